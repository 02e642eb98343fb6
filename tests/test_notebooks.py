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


def run(notebook) -> None:
    """Execute all cells in this interpreter's kernel; what a cell raises is raised."""
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, kernel_name="python3", timeout=900, resources=resources).execute()


LONG = (  # several trainings each, or many programs
    *("03_gradients", "05_worlds", "07_domain_randomisation", "08_ppo_of_sb3", "09_sim_to_sim"),
    "11_self_play",
)


@pytest.mark.slow
@pytest.mark.rounding
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.sweep if path.stem in LONG else (), id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_from_top_to_bottom(path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # not a kernel of the user's
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import sys; print(sys.executable)"))

    run(notebook)

    interpreter, *cells = code_cells(notebook)
    assert interpreter.outputs[0].text.strip() == sys.executable
    assert not complaints(cells)
    assert pictures(notebook)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.rounding
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_self_play_beats_random_moves_from_other_seeds_too(seed, monkeypatch):
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    notebook = nbformat.read(FOLDER / "11_self_play.ipynb", as_version=4)
    setup = code_cells(notebook)[0]
    assert "SEED, ROWS = 0," in setup.source
    setup.source = setup.source.replace("SEED, ROWS = 0,", f"SEED, ROWS = {seed},")
    notebook.cells.append(nbformat.v4.new_code_cell("import json; print(json.dumps(rates))"))

    run(notebook)

    rates = json.loads(code_cells(notebook)[-1].outputs[0].text)
    assert rates.keys() == {"first", "second"}
    assert all(low >= 0.9 for _, low, _ in rates.values())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_the_outputs_of_one_clean_run(path):
    notebook = nbformat.read(path, as_version=4)

    counts = [cell.execution_count for cell in code_cells(notebook)]

    assert counts == list(range(1, len(counts) + 1))
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures(notebook))
    assert pictures(notebook)
    assert not complaints(code_cells(notebook))
    assert str(Path.home()) not in json.dumps(notebook)
