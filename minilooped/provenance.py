"""Where a recorded result comes from: the part of a result file that lets a reader judge the numbers, and redo them."""

import platform
import subprocess
from datetime import date
from pathlib import Path

import torch


def provenance(made_by: str) -> dict[str, str | int | None]:
    """Facts about this run: the command, the day, the code and the machine.

    made_by: the command that makes the result, as a reader would type it. The commit is None outside a git checkout,
    and ends in "+" where files that git tracks differ from it.
    """
    return dict(
        made_by=made_by,
        date=date.today().isoformat(),
        commit=_commit(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cpu=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        threads=torch.get_num_threads(),
    )


def _commit() -> str | None:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
