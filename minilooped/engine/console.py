"""What a run says while it works: lines, and a progress bar. Nothing that goes wrong here ends a run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm.auto import tqdm


class Unfailing:
    """A stream whose writes never fail. What it cannot show is replaced, and once it is closed nothing more is shown.

    tqdm needs that: an error in the middle of its writing would leave its lock locked.
    """

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # the stream is closed, or its reader has left
            self.stream.write(showable(text, self.stream))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __eq__(self, other: object) -> bool:  # tqdm asks whether it writes to standard error
        return self.stream is other

    __hash__ = None  # type: ignore[assignment]


class Console:
    """Lines on standard output, a bar on standard error. A stream that is closed, or gone, is no longer written to.

    speaks: False in all processes but the first, which then say nothing.
    """

    def __init__(self, speaks: bool = True):
        self.speaks = speaks
        self.bar: Any = None

    def say(self, text: str) -> None:
        """Print a line. A character that the stream cannot show is replaced."""
        if not self.speaks:
            return
        if self.bar is not None:
            self.bar.clear()
        print(text, file=Unfailing(sys.stdout), flush=True)

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        """A bar from `done` to `total` steps, for as long as the context lasts; `advance` moves it."""
        file = Unfailing(sys.stderr)
        with tqdm(total=total, initial=done, unit="step", disable=not self.speaks, file=file) as self.bar:
            try:
                yield
            finally:
                self.bar.close()
                self.bar = None

    def advance(self, **shown: str) -> None:
        """One step more, with these values beside the bar."""
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """For work that only reports. Its failure is one notice, unless it is that numbers are not finite."""
        try:
            yield
        except FloatingPointError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.say(f"notice   {what} failed and is left out ({reason})")


def showable(text: str, stream: Any) -> str:
    """The text as a stream can show it: a character that its encoding lacks becomes a question mark."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
