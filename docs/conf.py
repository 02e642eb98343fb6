"""How Sphinx builds the site: guides in MyST, notebooks with the outputs they are kept with, the reference from docstrings.

Nothing is fetched and no notebook is run (tests/test_notebooks.py runs them). ``make docs`` makes warnings errors.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the envkit of this tree, wherever another is installed
README = HERE.parent / "README.md"
CHANGELOG = HERE.parent / "CHANGELOG.md"
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
TUTORIALS = HERE / "tutorials"  # copies: Sphinx reads below its own folder only
GENERATED = HERE / "reference" / "generated"  # a page for each public name, by autosummary
INVENTORIES = HERE / "inventories"
for folder in (TUTORIALS, GENERATED, INVENTORIES):  # else pages of what is gone would stay
    shutil.rmtree(folder, ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", TUTORIALS, ignore=shutil.ignore_patterns(".*", "*.toml"))

project = "envkit"
author = copyright = "the envkit authors"
version = release = PROJECT["version"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
templates_path = ["_templates"]
smartquotes = False  # they make one dash of the two in front of an option
html_theme = "furo"
html_title = f"envkit {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "navigation_with_keys": True,
    # Pictures have a white ground: dark mode inverts plots, and dims frames of simulators.
    "light_css_variables": {"of-plots": "none", "of-frames": "none"},
    "dark_css_variables": {
        "of-plots": "invert(0.9) hue-rotate(180deg)",
        "of-frames": "brightness(0.75)",
    },
}
if repository := PROJECT.get("urls", {}).get("Repository"):
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_html_meta = {"description": PROJECT["description"]}
nb_execution_mode = "off"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight:not(.highlight-text) > pre"

default_role = "py:obj"  # code in single backquotes leads to what bears that name, if anything does
add_module_names = False
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# Names of other libraries that signatures show, by the page that documents them. Their own inventories would have to be fetched.
_ELSEWHERE_ON_THE_WEB = {
    "torch": (
        "https://docs.pytorch.org/docs/stable/",
        {
            "torch.Generator": "generated/torch.Generator.html",
            "torch.Size": "size.html",
            "torch.Tensor": "tensors.html",
            "torch.device": "tensor_attributes.html",
            "torch.dtype": "tensor_attributes.html",
            "torch.nn.Module": "generated/torch.nn.Module.html",
        },
    ),
    "tensordict": (
        "https://docs.pytorch.org/tensordict/stable/reference/",
        {
            "tensordict.LazyStackedTensorDict": "generated/tensordict.LazyStackedTensorDict.html",
            "tensordict.TensorDict": "generated/tensordict.TensorDict.html",
            "tensordict.TensorDictBase": "generated/tensordict.TensorDictBase.html",
            "tensordict.nn.TensorDictModule": "generated/tensordict.nn.TensorDictModule.html",
        },
    ),
    "gymnasium": (
        "https://gymnasium.farama.org/api/",
        {
            "gymnasium.Env": "env/",
            "gymnasium.Wrapper": "wrappers/",
            "gymnasium.spaces.Space": "spaces/",
            "gymnasium.vector.VectorEnv": "vector/",
        },
    ),
    "jax": (
        "https://docs.jax.dev/en/latest/_autosummary/",
        {"jax.Array": "jax.Array.html", "jax.jit": "jax.jit.html"},
    ),
    "numpy": (
        "https://numpy.org/doc/stable/reference/",
        {"numpy.ndarray": "generated/numpy.ndarray.html"},
    ),
}
# What those classes are called where they are defined, which is what annotations say.
_ALIASES = {
    "tensordict._lazy.LazyStackedTensorDict": "tensordict.LazyStackedTensorDict",
    "tensordict._td.TensorDict": "tensordict.TensorDict",
    "tensordict.base.TensorDictBase": "tensordict.TensorDictBase",
    "tensordict.nn.common.TensorDictModule": "tensordict.nn.TensorDictModule",
    "torch._C.Generator": "torch.Generator",
    "torch._tensor.Tensor": "torch.Tensor",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "gymnasium.core.Env": "gymnasium.Env",
    "gymnasium.core.Wrapper": "gymnasium.Wrapper",
    "gymnasium.spaces.space.Space": "gymnasium.spaces.Space",
    "gymnasium.vector.vector_env.VectorEnv": "gymnasium.vector.VectorEnv",
    "jax.jaxlib._jax.Array": "jax.Array",
    "jaxlib._jax.Array": "jax.Array",
    "np.ndarray": "numpy.ndarray",
    "TensorDict": "tensordict.TensorDict",
    "TensorDictBase": "tensordict.TensorDictBase",
    "Tensor": "torch.Tensor",
}


def _write_inventories():
    """Write an inventory for each library above, and name it to intersphinx."""
    INVENTORIES.mkdir()
    mapping = {}
    for library, (address, pages) in _ELSEWHERE_ON_THE_WEB.items():
        names = {name: name for name in pages}
        names |= {alias: name for alias, name in _ALIASES.items() if name in pages}
        lines = [f"{name} py:class 1 {pages[to]}#{to} {to}\n" for name, to in sorted(names.items())]
        head = f"# Sphinx inventory version 2\n# Project: {library}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        file = INVENTORIES / f"{library}.inv"
        file.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
        mapping[library] = (address, str(file.relative_to(HERE)))
    return mapping


intersphinx_mapping = _write_inventories()
intersphinx_disabled_reftypes = ["std:*"]

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

# What authors of transforms and envs override stands on the pages of these classes; those of others list what users call.
_FOR_AUTHORS = (
    *("EnvBase", "GymLikeEnv", "Transform", "ObservationTransform", "CoupledTransform"),
    *("FusableTransform", "MomentTransform"),
)
_HOOKS = {
    *(
        "auto_register_info_dict",
        "computes_only",
        "constants",
        "counted",
        "extra_repr",
        "fast_encoding",
        "fuses",
    ),
    *(
        "is_pure",
        "keeps_books",
        "keeps_last_output",
        "keeps_memory",
        "memory",
        "moment_leaves",
        "only_adds_done",
    ),
    *(
        "read_action",
        "read_done",
        "read_obs",
        "read_reward",
        "remembers_rows",
        "reset_leaves",
        "resets_on_empty_mask",
    ),
    *(
        "row_core",
        "seen_leaves",
        "sees_rows",
        "stacks",
        "state",
        "step_leaves",
        "transform_action_spec",
    ),
    *(
        "transform_done_spec",
        "transform_env_batch_size",
        "transform_env_device",
        "transform_input_spec",
    ),
    *(
        "transform_observation_spec",
        "transform_output_spec",
        "transform_reward_spec",
        "transform_state_spec",
    ),
}

for name in ("absl", "jax"):  # what they log while they are imported is no news of the build
    logging.getLogger(name).setLevel(logging.WARNING)


def setup(app):
    """Say what is changed between the files as they are kept and what Sphinx reads."""
    app.connect("source-read", _read)
    app.connect("autodoc-skip-member", _leave_out_hooks)
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)  # before Napoleon
    app.connect("autodoc-process-docstring", _mark_shapes)
    app.connect("missing-reference", _to_keywords)


def _read(app, docname, source):
    """Put README and changelog on their pages, options into the list of commands; lead links to where the site has them."""
    text = source[0]
    if docname == "index":
        text = README.read_text() + text
        app.env.note_dependency(str(README))
    elif docname == "changelog":
        text = CHANGELOG.read_text()
        app.env.note_dependency(str(CHANGELOG))
    elif docname == "command_line":
        text += _options_of_commands()
    elif docname.startswith("tutorials/"):
        text = text.replace("](../docs/", "](../")
    if docname in ("index", "changelog"):
        text = text.replace("](docs/", "](").replace("](notebooks/", "](tutorials/")
    lines = text.replace("](../notebooks/", "](tutorials/").split("\n")
    source[0] = "\n".join(map(_unbroken, lines))


def _unbroken(line):
    """Keep a number, its unit and what follows in brackets on one line where the line is a row of a table."""
    if not line.startswith("|"):
        return line
    return re.sub(r"(?<=\d) (?=[kM]\b)|(?<=\d [kM]) (?=\(\d)|(?<=[≥≤]) (?=\d)", "\u00a0", line)


def _options_of_commands():
    ask = [sys.executable, "-m", "typer", "envkit.cli.app", "utils", "docs", "--name", "envkit"]
    where = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    told = subprocess.run(ask, env=where, capture_output=True, text=True, check=True).stdout
    told = re.sub(
        r"\*\*Commands\*\*:.*?(?=\n## )", "", told, count=1, flags=re.DOTALL
    )  # cut short there
    told = re.sub(r"\[/?\w*\]", "", told)  # markup of the terminal
    return "\n## Options\n" + told.partition("\n")[2].replace("\n## ", "\n### ")


def _leave_out_hooks(app, what, name, obj, skip, options):
    """Leave out what is overridden and not called, but for the classes that it is described for."""
    page = app.env.docname.rpartition("envkit.")[2]
    is_hook = name.rpartition(".")[2] in _HOOKS and page not in _FOR_AUTHORS
    return True if is_hook else None


def _keep_colons(app, what, name, obj, options, lines):
    """Begin docstrings of attributes with an escaped blank: Napoleon takes what comes before a colon in their first line for a type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "\\ ")
    elif what == "module":  # written for those who change it; the page has a beginning of its own
        lines.clear()


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
