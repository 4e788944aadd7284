"""Run notebooks from top to bottom and store clean outputs: python notebooks/refresh.py [NOTEBOOK ...]

What differs from run to run without a change of code is taken out: widget state (GitHub refuses to show a notebook that
carries it half), timestamps, and the name of the reader's kernel. How long each one took stands in a file of its own:
with no notebook named, all chapters are run and data/results/chapters.json is written anew.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from traitlets import Type

from minilooped.science.provenance import RESULTS, provenance

HERE = Path(__file__).parent
TIMES = RESULTS / "chapters.json"
WIDGET = "application/vnd.jupyter.widget-view+json"


class WakefulChannel(AsyncZMQSocketChannel):
    """Looks every second: now and then zmq's asyncio does not wake up for a reply that is there."""

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return await super().get_msg(timeout=max(0.0, min(1.0, ends - time.monotonic())))
            except Empty:
                if time.monotonic() >= ends:
                    raise


class WakefulClient(AsyncKernelClient):
    shell_channel_class = Type(WakefulChannel)


class WakefulManager(AsyncKernelManager):
    client_factory = Type(WakefulClient)


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


def refresh(path: Path) -> dict[str, float]:
    """Run and store a notebook. Returns the seconds it took, with the kernel's start, and the size of the file."""
    notebook = nbformat.read(path, as_version=4)
    began = os.times()
    # Beside the notebooks' folder, where "../data" is the same place and no earlier run is found, nor this one left.
    with TemporaryDirectory(dir=path.resolve().parents[1]) as folder:
        # What a cell prints arrives in pieces cut by the clock: coalesce them, or every run would store other ones.
        options = dict(
            timeout=300,
            coalesce_streams=True,
            kernel_manager_class=WakefulManager,
            resources={"metadata": {"path": folder}},
        )
        NotebookClient(notebook, **options).execute()
    ended = os.times()
    clean(notebook)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    # The kernel is a child process that has ended by now. (Windows does not say what a child took.)
    cpu, since = (times.children_user + times.children_system for times in (ended, began))
    took = dict(
        cpu_seconds=round(cpu - since, 1),
        wall_seconds=round(ended.elapsed - began.elapsed, 1),
        kilobytes=round(path.stat().st_size / 1e3),
    )
    print("{}: {kilobytes} kB, {cpu_seconds} s of CPU time, {wall_seconds} s".format(path.name, **took), flush=True)
    return took


if __name__ == "__main__":
    named = [Path(name) for name in sys.argv[1:]]
    if missing := [str(path) for path in named if not path.is_file()]:
        sys.exit(f"no notebook {', '.join(missing)}: give paths, such as notebooks/00_start_here.ipynb")
    head = provenance("python notebooks/refresh.py") | {"threads": "what each chapter sets"}
    took = {path.stem: refresh(path) for path in named or sorted(HERE.glob("[0-9]*.ipynb"))}
    if not named:
        TIMES.write_text(json.dumps(dict(provenance=head, chapters=took), indent=1) + "\n", encoding="utf-8")
