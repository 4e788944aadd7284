"""Run notebooks from top to bottom and store clean outputs: python notebooks/refresh.py [NOTEBOOK ...]

What differs from run to run without a change of code is taken out: widget state (GitHub refuses to show a notebook that
carries it half), timestamps, and the name of the reader's kernel.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"


def clean(notebook: nbformat.NotebookNode) -> None:
    """Take out of the notebook what a second run would change."""
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # A widget needs its kernel; without one, its static twin stands in.
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data.pop("text/html", None)  # the same picture once more, for a live page


def refresh(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    # What a cell prints arrives in pieces cut by the clock: coalesce them, or every run would store other ones.
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, coalesce_streams=True, resources=resources).execute()
    clean(notebook)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(HERE.glob("[0-9]*.ipynb")):
        refresh(Path(name))
