"""How Sphinx builds the site: guides in MyST, notebooks with the outputs they are kept with, the reference from docstrings.

Nothing is fetched and no notebook is run (tests/test_notebooks.py runs them). ``make docs`` makes warnings errors.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the envkit of this tree, wherever another is installed
README = HERE.parent / "README.md"
TUTORIALS = HERE / "tutorials"  # copies: Sphinx reads below its own folder only
GENERATED = HERE / "reference" / "generated"  # a page for each public name, by autosummary
for folder in (TUTORIALS, GENERATED):  # else pages of what is gone would stay
    shutil.rmtree(folder, ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", TUTORIALS, ignore=shutil.ignore_patterns(".*"))

project = "envkit"
author = copyright = "the envkit authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "envkit"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]

myst_heading_anchors = 4
nb_execution_mode = "off"

default_role = "py:obj"  # code in single backquotes leads to what bears that name, if anything does
add_module_names = False
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# Classes whose members stand on their own page alone, each with what it is put together from; no page shows the general ones.
_PARTS = {
    "EnvBase": ("Stepping", "SpecNames", "EnvModule"),
    "JaxEnv": (),
    "Transform": (),
    "TensorSpec": ("Reshapable", "LeafSpec"),
}
_GENERAL = ("OwnState", "Module", "Enum", "int", "str", "Exception", "dict", "tuple", "object")
_ELSEWHERE = [*_PARTS, *(part for parts in _PARTS.values() for part in parts), *_GENERAL]
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "inherited-members": ",".join(_ELSEWHERE),
}
autosummary_context = {
    "skipped": {
        base: ", ".join(name for name in _ELSEWHERE if name not in (base, *parts))
        for base, parts in _PARTS.items()
    }
}

for name in ("absl", "jax"):  # what they log while they are imported is no news of the build
    logging.getLogger(name).setLevel(logging.WARNING)


def setup(app):
    """Say what is changed between the files as they are kept and what Sphinx reads."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _mark_shapes)
    app.connect("missing-reference", _to_keywords)


def _read(app, docname, source):
    """Put the README on the home page and options into the list of commands; lead links to where the site has it."""
    text = source[0]
    if docname == "index":
        text = (
            README.read_text().replace("](docs/", "](").replace("](notebooks/", "](tutorials/")
            + text
        )
    elif docname == "command_line":
        text += _options_of_commands()
    elif docname.startswith("tutorials/"):
        text = text.replace("](../docs/", "](../")
    source[0] = text.replace("](../notebooks/", "](tutorials/")


def _options_of_commands():
    ask = [sys.executable, "-m", "typer", "envkit.cli.app", "utils", "docs", "--name", "envkit"]
    where = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    told = subprocess.run(ask, env=where, capture_output=True, text=True, check=True).stdout
    told = re.sub(
        r"\*\*Commands\*\*:.*?(?=\n## )", "", told, count=1, flags=re.DOTALL
    )  # cut short there
    return "\n## Options\n" + told.partition("\n")[2].replace("\n## ", "\n### ")


def _mark_shapes(app, what, name, obj, options, lines):
    """Show ``(*batch, 1)`` as code where a docstring has it bare: stars would begin an emphasis."""
    lines[:] = [re.sub(r"(?<![`\w])(\(\*[^()`]*\))(?!`)", r"``\1``", line) for line in lines]


def _to_keywords(app, env, node, contnode):
    """Lead ``JaxOptions`` and its like, which are no public names, to the page that has them."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.endswith(("Options", "Metadata")):
        return None
    node["refspecific"] = True
    python, kind = env.domains["py"], node["reftype"]
    return python.resolve_xref(env, node["refdoc"], app.builder, kind, target, node, contnode)
