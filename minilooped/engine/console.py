"""What a run says while it works: lines, and a progress bar. Nothing that goes wrong here ends a run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm.auto import tqdm


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
        with drawing():
            if self.bar is not None:
                self.bar.clear()
        with suppress(OSError, ValueError):  # the stream is closed, or its reader has left
            print(showable(text), flush=True)

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        """A bar from `done` to `total` steps, for as long as the context lasts; `advance` moves it."""
        with drawing():
            self.bar = tqdm(total=total, initial=done, unit="step", disable=not self.speaks)
        try:
            yield
        finally:
            with drawing():
                self.bar.close()
            self.bar = None

    def advance(self, **shown: str) -> None:
        """One step more, with these values beside the bar."""
        with drawing():
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


@contextmanager
def drawing() -> Iterator[None]:
    """For work on a bar, which a terminal can refuse in many ways. A failure is passed over.

    tqdm does not give its lock back when a drawing fails: this thread would never notice, and a bar of any other thread
    would wait for ever.
    """
    try:
        yield
    except Exception:
        with suppress(RuntimeError):  # the failure came before the lock
            tqdm.get_lock().release()


def showable(text: str) -> str:
    """The text as standard output can show it: a character that its encoding lacks becomes a question mark."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
