"""Stopping on request: a signal is remembered, the loop ends after its step; outside a loop it ends the run at once."""

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a terminal that is gone
GRACE_S = 10.0  # after an interruption: so long may the closing of pools and files take, and no longer
AGAIN_S = 0.1  # after an interruption that was lost

# A child of a fork shares the pipe of ``Interruption``: its signals are not its parent's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _lead_nowhere(descriptors: Iterable[int]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


class _Output(io.FileIO):
    """What a program says, into a pipe whose reader may leave: then the rest is said to nobody."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            _lead_nowhere([self.fileno()])
            if signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:  # outside a run there is nothing to stop
                os.kill(os.getpid(), signal.SIGHUP)
            return len(data)


def watch_output() -> None:
    """From here on a reader that leaves (``| head``, a ``tee`` that is killed) is what a terminal that is gone is.

    The run stops after its step and is saved; without this, the next line would end it. Called once by the command
    lines; streams that a caller has replaced are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = _Output(stream.fileno(), "w", closefd=False)
        at_once = isinstance(stream.buffer, io.RawIOBase)  # python -u
        watched = io.TextIOWrapper(
            raw if at_once else io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors,
            line_buffering=stream.line_buffering, write_through=stream.write_through,
        )  # fmt: skip
        setattr(sys, name, watched)


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
            _lead_nowhere(terminals)
        handler(number, frame)

    numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Interruption:
    """Signals of a block, from the ``patience``-th on as KeyboardInterrupt, which ends the block in bounded time.

    An exception that a signal raises is not certain to arrive. In a callback of the garbage collector (JAX has one,
    most of the signals of a compilation fall into it: jax-ml/jax#18246), a weak reference or a finaliser Python prints
    it and drops it; C++ that calls Python may hand on another one (#9082); and inside a compilation no Python runs at
    all. So a dropped one is raised again, another one that follows it counts as it, and a thread that the kernel wakes,
    whatever the main thread does, ends the process ``GRACE_S`` later. What is on the disk is then what ``kill -9``
    leaves, from which every run goes on.
    """

    def __init__(self, words: str, patience: int = 1):
        self.words, self.patience = words, patience
        self.seen, self.last, self.over = 0, signal.SIGINT, threading.Event()

    def _handle(self, number: int, frame: Any) -> None:
        self.seen, self.last = self.seen + 1, number
        if self.seen >= self.patience and not self.over.is_set():
            raise KeyboardInterrupt

    def _end(self, signals: int) -> None:
        """Reads the bytes of the signals, which the kernel's side of Python writes; ends what does not end."""
        left = self.patience
        while left and (number := os.read(signals, 1)):  # empty: the block is over
            left -= number[0] in SIGNALS
        if not left and not self.over.wait(GRACE_S):
            with contextlib.suppress(OSError):  # a terminal that is gone
                os.write(2, f"\n{self.words}\n".encode())
            os._exit(130)

    def _dropped(self, hook: Callable[[Any], None], unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)
            return
        again = threading.Timer(AGAIN_S, self._again)  # not from here: this, too, is a place that drops it
        again.daemon = True
        again.start()

    def _again(self) -> None:
        if not self.over.is_set():
            signal.pthread_kill(threading.main_thread().ident, self.last)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals reach this object inside the block, and whoever had them before outside it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.over.clear()
        signals, theirs = os.pipe()
        os.set_blocking(theirs, False)
        hook, watch = sys.unraisablehook, threading.Thread(target=self._end, args=(signals,), daemon=True)
        watch.start()
        with _handled(self._handle):
            before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
            sys.unraisablehook = lambda unraisable: self._dropped(hook, unraisable)
            try:
                yield
            except Exception as error:
                if self.seen >= self.patience:
                    raise KeyboardInterrupt from error
                raise
            finally:
                self.over.set()
                signal.set_wakeup_fd(before)
                sys.unraisablehook = hook
                os.close(theirs)
                watch.join()
                os.close(signals)


def interruptible(words: str = "stopped before the run began") -> contextlib.AbstractContextManager[None]:
    """Inside this block Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt: nothing is left half done.

    Args:
      words: the line of a process that had to be ended, ``GRACE_S`` after its signal.
    """
    return Interruption(words).listening()


def leave(number: int, frame: Any) -> None:
    """Ends the process where nothing has begun: an exception inside a module that is being loaded would be wrapped."""
    os.write(2, b"stopped before the run began\n")
    os._exit(130)


def before_the_run() -> contextlib.AbstractContextManager[None]:
    """Inside this block any of the signals ends the process with one line; for the loading of modules."""
    return _handled(leave)


class Stop(Interruption):
    """Ctrl-C, SIGTERM or SIGHUP asks the loop to stop after the current step; a second one interrupts at once."""

    def __init__(self, words: str = "stopped"):
        super().__init__(words, patience=2)

    @property
    def asked(self) -> bool:
        """Whether there was a signal."""
        return self.seen > 0
