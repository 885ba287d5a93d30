"""Stopping on request: a signal is remembered, the loop ends after its step; outside a loop it ends the run at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a terminal that is gone


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """The signals reach ``handler`` inside the block, and whoever had them before outside it.

    A signal that is ignored stays so: of ``nohup`` the user expects that.
    """
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals there alone
        yield
        return
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:  # writing to a terminal that is gone would end the run before it is saved
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for fd in terminals:
                os.dup2(nowhere, fd)
            os.close(nowhere)
        handler(number, frame)

    numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def interrupt(number: int, frame: Any) -> None:
    """Any of the signals as what Ctrl-C raises."""
    raise KeyboardInterrupt


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Inside this block SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does: nothing is left half done."""
    return _handled(interrupt)


def leave(number: int, frame: Any) -> None:
    """Ends the process where nothing has begun: an exception inside a module that is being loaded would be wrapped."""
    os.write(2, b"stopped before the run began\n")
    os._exit(130)


def before_the_run() -> contextlib.AbstractContextManager[None]:
    """Inside this block any of the signals ends the process with one line; for the loading of modules."""
    return _handled(leave)


class Stop:
    """Ctrl-C, SIGTERM or SIGHUP asks the loop to stop after the current step; a second one interrupts at once."""

    def __init__(self):
        self.asked = False

    def _ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Signals reach this object inside the block, and whoever had them before outside it."""
        return _handled(self._ask)
