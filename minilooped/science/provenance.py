"""Where a recorded result comes from: facts that let a reader judge the numbers, and make them again.

    provenance("python benchmarks/growth.py")  # the command, the day, the code and the machine

`records` keeps them beside the numbers.
"""

import platform
import subprocess
from datetime import date
from functools import cache
from pathlib import Path

import torch

CHECKOUT = Path(__file__).parents[2]  # where this package was cloned to
RESULTS = CHECKOUT / "data" / "results"  # an installed package has none: its CHECKOUT is a folder of packages


def provenance(made_by: str) -> dict[str, str | int | None]:
    """Facts about this run: the command, the day, the code and the machine.

    made_by: the command that makes the result, as a reader would type it. The commit is None where git does not track
    this package. It ends in "+" where the package, the benchmarks or the data differ from it. Recorded results do not
    count, so that one recording does not mark the next. gpu, cuda and driver are None where torch sees no GPU.
    """
    gpu = torch.cuda.is_available()
    return dict(
        made_by=made_by,
        date=date.today().isoformat(),
        commit=_commit(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cpu=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        gpu=torch.cuda.get_device_name() if gpu else None,
        cuda=torch.version.cuda if gpu else None,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        threads=torch.get_num_threads(),
    )


@cache
def _commit() -> str | None:
    """The commit of this package as the process found it: edits during a long measurement do not count."""
    if _first_line("git", "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # no git, or an installed copy that lies inside somebody else's repository
    commit = _first_line("git", "describe", "--always", "--exclude=*")
    code = (":/minilooped", ":/benchmarks", ":/data", ":(top,exclude)data/results")
    changed = _first_line("git", "status", "--porcelain", "--untracked-files=no", "--", *code)
    return commit and commit + ("+" if changed else "")


def _first_line(*command: str) -> str | None:
    """The first line that a program prints, run in the folder of this file. None if it is missing, or fails."""
    try:
        said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip().partition("\n")[0]
