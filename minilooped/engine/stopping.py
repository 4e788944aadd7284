"""Signals that ask a training to end."""

import signal
import threading
from typing import Any


class StopSignal:
    """Turns Ctrl-C and SIGTERM into a wish: `asked` becomes True, and the loop stops at the end of the step.

    A second Ctrl-C stops at once. Python delivers signals to the main thread only, so elsewhere this does nothing.
    """

    def __init__(self):
        self.asked = False
        self.old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.old_handlers[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *exception: Any):
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
