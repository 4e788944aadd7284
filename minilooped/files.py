"""Files: written whole or not at all, read with a check of every field, and each failure in one line."""

import json
import math
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, get_args

from filelock import FileLock, Timeout
from safetensors import SafetensorError

# ----------------------------------------------------------------------------------------------------------------------
# Writing


@contextmanager
def writing(path: Path, kept: str = "nothing half-written is left") -> Iterator[None]:
    """Turn whatever a full disk makes a writer raise into one OSError, which names the file and says what is left."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for it
        full = "is the disk full? " + str(error).partition("\n")[0]
        reason = (isinstance(error, OSError) and error.strerror) or full
        raise OSError(f"{path} could not be written ({reason}): make room or choose another place; {kept}") from error


SCRATCH = ".minilooped-scratch-"


@contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """Make a new folder inside the folder `place`, for files that are not whole yet. At the end it is deleted.

    The name is random, so nobody else's folder can have it. A process that is killed leaves its scratch folder behind,
    until :func:`clear_scratch` is called for that place, as it is here.
    """
    clear_scratch(place)
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
    try:
        with _lock(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_scratch(place: Path) -> None:
    """Delete the scratch folders that dead processes left in a folder.

    The lock of such a folder is free: the system releases it when the process ends, however that happens.
    """
    for left in place.glob(f"{SCRATCH}*"):
        if left.is_dir() and not left.is_symlink():
            with suppress(Timeout, OSError), _lock(left).acquire(blocking=False):
                shutil.rmtree(left, ignore_errors=True)


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / "lock")


@contextmanager
def locked(file: Path, taken: str, wait: float = 0) -> Iterator[None]:
    """Hold a lock while the context lasts. ``ValueError`` with `taken` if another process has it for `wait` seconds.

    The file stands for the lock and is deleted at the end. A file that a killed process left behind locks nothing: the
    system releases a lock with its process, however that ends.
    """
    lock = FileLock(file)
    with suppress(OSError, NotImplementedError):  # some network drives have no locks, some folders cannot be written
        try:
            lock.acquire(timeout=wait)
        except Timeout as error:
            raise ValueError(taken) from error
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows deletes no open file
                file.unlink()
            lock.release()


@contextmanager
def replacing(path: Path, kept: str = "nothing half-written is left") -> Iterator[Path]:
    """Yield the name to write a file under. When the file is whole and on the disk, it replaces `path` in one step.

    ``OSError`` if that fails; `path` then is what it was.
    """
    with writing(path, kept), scratch(path.parent) as folder:
        temporary = folder / path.name
        yield temporary
        flush_to_disk(temporary)
        os.replace(temporary, path)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk.

    A rename before that could survive a power cut without the content that it stands for.
    """
    if path.is_file():
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
    elif hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        descriptor = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, content: str | bytes, kept: str = "nothing half-written is left") -> None:
    """Write a file, whole or not at all; text as UTF-8, line ends as they are. ``OSError`` if that fails."""
    with replacing(path, kept) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are not there. ``OSError`` if that fails."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def refuse_links(folder: Path, files: Iterable[str] | None = None) -> None:
    """``ValueError`` for a symbolic link that leads out of a folder: one from a stranger could show, or let us write
    over, any file of this machine.

    `files` are the names to look at; None looks at everything in the folder and below, which takes long in a large one.
    """
    for path in folder.rglob("*") if files is None else map(folder.joinpath, files):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link that leads out of {folder}: put the file itself there")


Need = type | UnionType | dict[str, Any] | list[Any] | Callable[[Any], bool]  # what a value has to be: see `check`


def read_json(path: Path, needs: dict[str, Need], way_out: str) -> dict[str, Any]:
    """The object in a JSON file that this package wrote, its fields checked as in :func:`check`.

    ``FileNotFoundError`` if there is no such file, ``ValueError`` if its content is not what `needs` says. The message
    names the file and the field, and ends with `way_out`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {way_out}")
    return parse_json(path.read_bytes(), path, needs, way_out)


def parse_json(content: str | bytes, origin: Path | str, needs: dict[str, Need], way_out: str) -> dict[str, Any]:
    """As :func:`read_json`, for content that has been read already. `origin` is what the message calls it."""
    try:
        found = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not JSON ({in_a_line(error)}): {way_out}") from error
    try:
        check(found, needs)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}: {way_out}") from error
    return found


def check(value: Any, need: Need, name: str = "") -> None:
    """``ValueError`` that names the field, unless `value` is what `need` says. One of these is a need:

    - a type, or a union of types. A number has to be finite, and True is not a number;
    - a dict, for an object: the need of each field. Fields that it does not name are free;
    - a list, for a list of any length: the need of its items;
    - a function that says whether a value is right, and in its docstring what is right, as :func:`at_least` makes one.

    A field that may be None may also be missing: read it with ``get``.
    """
    if isinstance(need, dict):
        check(value, dict, name)
        for key, inner in need.items():
            field = f"{name}.{key}" if name else key
            if key in value:
                check(value[key], inner, field)
            elif isinstance(inner, dict | list) or not _fits(None, inner):
                raise ValueError(f"{field} is missing")
    elif isinstance(need, list):
        check(value, list, name)
        for number, item in enumerate(value):
            check(item, need[0], f"{name}[{number}]")
    elif not _fits(value, need):
        shown = textwrap.shorten(json.dumps(value, default=repr), 60, placeholder=" ...")
        raise ValueError(f"{name or 'the content'} is {shown}, but has to be {_in_words(need)}")


def at_least(low: int) -> Callable[[Any], bool]:
    """The need of a whole number that is not below `low`."""

    def whole(value: Any) -> bool:
        return _fits(value, int) and value >= low

    whole.__doc__ = f"a whole number of {low} or more"
    return whole


def one_of(*values: Any) -> Callable[[Any], bool]:
    """The need of one of a few values."""

    def known(value: Any) -> bool:
        return any(type(value) is type(right) and value == right for right in values)

    known.__doc__ = " or ".join(map(json.dumps, values))
    return known


def _fits(value: Any, need: type | UnionType | Callable[[Any], bool]) -> bool:
    if not isinstance(need, type | UnionType):
        return need(value)
    kinds = get_args(need) or (need,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, float):
        return float in kinds and math.isfinite(value)
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def _in_words(need: type | UnionType | Callable[[Any], bool]) -> str:
    if not isinstance(need, type | UnionType):
        return str(need.__doc__)
    words = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", dict: "an object"}
    words |= {list: "a list", type(None): "null"}
    return " or ".join(words.get(kind, kind.__name__) for kind in get_args(need) or (need,))


# ----------------------------------------------------------------------------------------------------------------------
# Saying


def in_a_line(error: Exception) -> str:
    """Kind and message of an error, the line breaks and all beyond 300 characters left out."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


class Report:
    """A text stream for what only reports, so that it can never end the work that it reports on.

    A character that the stream cannot show becomes a question mark. A stream that is closed or missing shows nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:  # encoding, isatty and the like
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if self.stream is not None:
            with suppress(OSError, ValueError):  # the reader of a pipe has left; the stream is closed
                try:
                    self.stream.write(text)
                except UnicodeEncodeError:  # a ValueError too
                    encoding = self.stream.encoding or "ascii"
                    self.stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            with suppress(OSError, ValueError):
                self.stream.flush()


def say(text: str) -> None:
    """Print a line that only reports: see :class:`Report`."""
    print(text, file=Report(sys.stdout), flush=True)
