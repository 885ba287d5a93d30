"""Stopping on request: a signal is remembered, the loop ends after its step."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stop:
    """Ctrl-C or SIGTERM asks the loop to stop after the current step; a second one interrupts at once."""

    def __init__(self):
        self.asked = False

    def _ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals reach this object inside the block, and whoever had them before outside it."""
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals there alone
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
