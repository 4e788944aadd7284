"""Signals that ask a training to end."""

import signal
import threading
from typing import Any

# Those by which a person, a closed terminal or a batch system ends a process politely. Not every system has them all.
POLITE = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK", "SIGXCPU") if hasattr(signal, name)
]


class StopSignal:
    """Turns a signal into a wish: `asked` becomes True, and the loop stops at the end of the step.

    A second Ctrl-C stops at once. A signal that this process was started to ignore (as by nohup) stays ignored. Python
    delivers signals to the main thread only, so in another thread this does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self.old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in POLITE:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.old_handlers[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
