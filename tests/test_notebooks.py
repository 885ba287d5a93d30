"""Every notebook runs as committed, is committed with its output, and stays small."""

import importlib
import inspect
import os
import pathlib
import re

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as a reader has
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute(env=dict(os.environ))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_committed_with_small_output(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "run the notebook and save it"
    assert all(output.output_type != "error" for output in outputs)
    assert path.stat().st_size < 400_000


def test_there_are_notebooks():
    assert {"losses_anywhere", "estimator_microscope"} <= {path.stem for path in NOTEBOOKS}


def test_the_microscope_shows_every_estimator_of_its_modules_or_says_why():
    """The notebook asserts it where it runs, which is slow; a new estimator is named here at once."""
    cells = nbformat.read(FOLDER / "estimator_microscope.ipynb", as_version=4).cells
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    names = ", ".join(re.findall(r"^from jaxrl_llm.advantages import (.*)$", source, re.MULTILINE)).split(", ")
    modules = [importlib.import_module(f"jaxrl_llm.advantages.{name}") for name in names]
    estimators = {n for m in modules for n, _ in inspect.getmembers(m, inspect.isfunction) if n.endswith("_advantages")}
    assert len(modules) == 10 and len(estimators) > 25
    assert {name for name in estimators if not re.search(rf"\b{name}\b", source)} == set()
