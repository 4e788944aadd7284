"""A kill, an error or a full disk at every event of the file system, for the tests of what lies on the disk."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


class Killed(BaseException):
    """Stands for a kill: from here on nothing changes on the disk, not even in a ``finally``."""


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATHS = {"open": 1, "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.link": 2}
_listener: Callable[[str], None] | None = None
_place = ""


def _hook(event: str, arguments: tuple) -> None:
    """Python's own audit of what a process does. It sees every file that is opened, made, renamed or deleted."""
    if _listener is None or event not in PATHS:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITES):
        return
    paths = [os.fspath(path) for path in arguments[: PATHS[event]] if isinstance(path, str | os.PathLike)]
    if not paths or any(path.startswith(_place) or not os.path.isabs(path) for path in paths):  # relative to a folder
        _listener(event)


sys.addaudithook(_hook)  # there is no way to take it off again


@contextmanager
def _listening(place: Path, listener: Callable[[str], None]) -> Iterator[None]:
    global _listener, _place
    fsync = os.fsync

    def heard(descriptor: int) -> None:
        if _listener is not None:
            _listener("os.fsync")
        fsync(descriptor)

    _listener, _place, os.fsync = listener, str(place), heard
    try:
        yield
    finally:
        _listener, os.fsync = None, fsync


def all_events(place: Path, work: Callable[[], object]) -> int:
    """How many events there are when the work is done without a disturbance."""
    events: list[str] = []
    with _listening(place, events.append):
        work()
    return len(events)


@contextmanager
def disturbed(place: Path, number: int, what: str) -> Iterator[SimpleNamespace]:
    """Do what is inside, and disturb event `number` (from 0) in the folder `place`. Yields what will tell the error.

    what: ``"kill"``: the event and all that follow do not happen; ``"error"``: the event fails, those after it do not;
    ``"full disk"``: from this event on nothing more can be written, only deleted.
    """
    told = SimpleNamespace(error=None, event=None)
    count = iter(range(10**9))

    def listener(event: str) -> None:
        now = next(count)
        if now == number:
            told.event = event
        if what == "kill" and now >= number:
            raise Killed(event)
        if what == "error" and now == number:
            raise OSError(errno.EIO, "Input/output error")
        if what == "full disk" and now >= number and event in ("open", "os.mkdir", "os.fsync"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with _listening(place, listener):
        try:
            yield told
        except (Killed, Exception) as error:
            told.error = error
