"""Files and what can go wrong with them: written whole or not at all, and each failure in one line."""

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def writing(path: Path, kept: str = "nothing half-written is left") -> Iterator[None]:
    """Whatever a full disk makes a writer raise, as one OSError that names the file and says what is left."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for it
        full = "is the disk full? " + str(error).partition("\n")[0]
        reason = (isinstance(error, OSError) and error.strerror) or full
        raise OSError(f"{path} could not be written ({reason}): make room or choose another place; {kept}") from error


@contextmanager
def replacing(path: Path, kept: str = "nothing half-written is left") -> Iterator[Path]:
    """The name to write a file under: it takes its own when it is whole and on the disk. ``OSError`` if that fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path, kept):
            yield temporary
            with open(temporary, "r+b") as file:  # or a power cut could leave the name without its content
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, kept: str = "nothing half-written is left") -> None:
    """Write a file, whole or not at all; text as UTF-8, line ends as they are. ``OSError`` if that fails."""
    with replacing(path, kept) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are not there. ``OSError`` if that fails."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def refuse_links(folder: Path) -> None:
    """``ValueError`` for a symbolic link that leads out of a folder: one from a stranger could show, or let us write
    over, any file of this machine."""
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link that leads out of {folder}: put the file itself there")


def in_a_line(error: Exception) -> str:
    """Kind and message of an error, the line breaks and all beyond 300 characters left out."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
