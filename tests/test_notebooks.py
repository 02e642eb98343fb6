"""The notebooks run from top to bottom in this interpreter's kernel, and are kept with outputs.

To renew the outputs: ``jupyter execute --inplace notebooks/*.ipynb``.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook) -> list[str]:
    """List the PNGs a notebook shows, base64."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]


def complaints(cells) -> str:
    """Join what was written to stderr."""
    return "".join(
        out.text for cell in cells for out in cell.outputs if out.get("name") == "stderr"
    )


@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # not a kernel of the user's
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import sys; print(sys.executable)"))
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(FOLDER)}}
    )

    client.execute()

    interpreter, *cells = code_cells(notebook)
    assert interpreter.outputs[0].text.strip() == sys.executable
    assert not complaints(cells)
    assert pictures(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_the_outputs_of_one_clean_run(path):
    notebook = nbformat.read(path, as_version=4)

    counts = [cell.execution_count for cell in code_cells(notebook)]

    assert counts == list(range(1, len(counts) + 1))
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures(notebook))
    assert pictures(notebook)
    assert not complaints(code_cells(notebook))
    assert str(Path.home()) not in json.dumps(notebook)
