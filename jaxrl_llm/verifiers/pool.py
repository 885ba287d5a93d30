"""Verifiers in processes of their own: limits on CPU, memory and wall clock, hard kill, ordered verdicts.

The workers are fresh Python processes that never import JAX and inherit nothing but one socket. A verifier that hangs,
runs out of memory, crashes or raises gives an *invalid* verdict, which leaves loss, baseline and metrics; its worker is
killed and replaced.
"""

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.verifiers.verdict import Verdict, Verifier

_STARTS = 3  # of a worker that something kills before it is ready
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxrl_llm.verifiers.worker import main; main(*json.loads(sys.argv[2]))"
)


class Judged(NamedTuple):
    """Verdicts in the order of the responses, and what judging them cost."""

    verdicts: list[Verdict]
    metrics: dict[str, float]


class _Killed(UserError):
    """A worker was killed from outside before it was ready."""


class _Worker:
    """One process and the socket to it; used by one thread at a time."""

    def __init__(self, memory_mb: int, start_timeout_s: float, timeout_s: float):
        self.connection, other = Pipe()
        settings = [other.fileno(), os.getpid(), memory_mb, start_timeout_s, timeout_s]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(settings)],
            pass_fds=(other.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the run; and the whole session can be killed
        )
        other.close()
        self.killed = False
        self.loaded: bytes | None = None

    def reply(self, timeout_s: float) -> bytes | None:
        """What the worker sends; None after the timeout. Raises EOFError when it died."""
        try:
            return self.connection.recv_bytes() if self.connection.poll(timeout_s) else None
        except OSError as error:
            raise EOFError from error

    def send(self, kind: bytes, blob: bytes) -> None:
        """Raises EOFError when the worker died."""
        try:
            self.connection.send_bytes(kind)
            self.connection.send_bytes(blob)
        except OSError as error:
            raise EOFError from error

    def kill(self) -> int:
        """Ends the process and its children at once; returns its exit code."""
        if not self.killed:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):  # gone already, and no child of it left
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def _kill_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.kill()


class VerifierPool:
    """Judges responses in worker processes; a context manager, usable from several threads.

    A verifier is a module-level function ``(answer, response) -> Verdict``. Where its module defines ``prepare()``,
    each worker calls it once before the clock of an item runs (slow imports belong there).

    Args:
      workers: processes.
      timeout_s: wall clock and CPU of one item; then its worker is killed.
      memory_mb: address space of a worker.
      start_timeout_s: for starting a worker and importing the verifier.

    >>> from jaxrl_llm.verifiers import countdown
    >>> with VerifierPool(workers=1) as pool:
    ...     judged = pool.judge(countdown.verify, [{"numbers": [2, 3], "target": 6}], ["2*3=6"])
    >>> judged.verdicts[0].value
    1.0
    """

    def __init__(
        self, *, workers: int = 2, timeout_s: float = 2.0, memory_mb: int = 1024, start_timeout_s: float = 60.0
    ):
        if workers < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if memory_mb < 128:
            raise ValueError(f"memory_mb={memory_mb} is too little for a Python process; give at least 128")
        self._settings = (memory_mb, start_timeout_s, timeout_s)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._lock, self._closed = threading.Lock(), False
        self._workers: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers):  # None stands for a worker still to be started
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Kills all workers; pending items of other threads end with RuntimeError. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._finalizer()
        # the threads that wait for a killed worker see its end and close its socket
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in list(self._workers):
            self._discard(worker)

    def judge(
        self,
        verifier: Verifier,
        answers: Sequence[dict[str, Any]],
        responses: Sequence[str],
        *,
        deadline_s: float | None = None,
    ) -> Judged:
        """Verdicts of ``verifier(answers[i], responses[i])``, in order.

        Args:
          deadline_s: how long the batch may take without being noticed: items that end later are judged all the same
            and counted in ``verifier/late_fraction``.

        Returns:
          ``metrics``: ``verifier/seconds``, ``verifier/slowest_s``, ``verifier/invalid_fraction``,
          ``verifier/killed`` (items whose worker was killed or died) and ``verifier/late_fraction``.

        Raises:
          ValueError: for a verifier that another process cannot import, or lists of unequal length.
          UserError: when the verifier does not load in a worker, for example for a package that is not installed.
          RuntimeError: when the pool is closed.
        """
        if len(answers) != len(responses):
            raise ValueError(f"answers has {len(answers)} items and responses {len(responses)}; give one each")
        blob = _importable(verifier)
        self._check_open()
        start = time.monotonic()
        items = [pickle.dumps(item) for item in zip(answers, responses, strict=True)]
        futures = [self._threads.submit(self._one, blob, item) for item in items]
        try:
            results = [future.result() for future in futures]
        except CancelledError as error:
            raise RuntimeError("the verifier pool was closed while it judged") from error
        finally:
            for future in futures:
                future.cancel()
        ends = [end - start for _, _, _, end in results]
        late = [deadline_s is not None and end > deadline_s for end in ends]
        count = max(len(results), 1)
        metrics = {
            "verifier/seconds": time.monotonic() - start,
            "verifier/slowest_s": max((seconds for _, _, seconds, _ in results), default=0.0),
            "verifier/invalid_fraction": sum(not verdict.valid for verdict, _, _, _ in results) / count,
            "verifier/killed": float(sum(killed for _, killed, _, _ in results)),
            "verifier/late_fraction": sum(late) / count,
        }
        return Judged([verdict for verdict, _, _, _ in results], metrics)

    def _one(self, blob: bytes, item: bytes) -> tuple[Verdict, bool, float, float]:
        """``(verdict, killed, seconds, end)`` of one item on the next idle worker."""
        worker = self._idle.get()
        try:
            worker = self._ready(worker, blob)
            start = time.monotonic()
            verdict, alive = self._ask(worker, item)
            if not alive:
                worker = None
            end = time.monotonic()
            return verdict, not alive, end - start, end
        except BaseException:
            if worker is not None:
                self._discard(worker)
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def _ready(self, worker: _Worker | None, blob: bytes) -> _Worker:
        """A running worker that has loaded the verifier; replaces one that died while idle.

        One that something kills before it is ready is replaced, too: that is no fault of the verifier.
        """
        for _ in range(_STARTS - 1):
            try:
                return self._loaded(worker, blob)
            except _Killed:
                worker = None
        return self._loaded(worker, blob)

    def _loaded(self, worker: _Worker | None, blob: bytes) -> _Worker:
        if worker is not None and worker.process.poll() is not None:
            self._discard(worker)
            worker = None
        if worker is None:
            worker = self._start()
        if worker.loaded == blob:
            return worker
        try:
            worker.send(b"load", blob)
            reply = worker.reply(self._start_timeout_s)
        except EOFError as error:
            code = self._discard(worker)
            self._check_open()
            kind = _Killed if code == -signal.SIGKILL else UserError
            raise kind(f"a verifier worker ended with code {code} while loading the verifier") from error
        if reply is None:
            self._discard(worker)
            raise UserError(f"the verifier was not loaded within start_timeout_s={self._start_timeout_s}; raise it")
        wrong = json.loads(reply)
        if wrong:
            self._discard(worker)
            raise UserError(f"the verifier does not load in a worker: {wrong[0]}")
        worker.loaded = blob
        return worker

    def _start(self) -> _Worker:
        with self._lock:
            self._check_open()
            worker = _Worker(*self._settings)
            self._workers.add(worker)
        try:
            ready = worker.reply(self._start_timeout_s)
        except EOFError as error:
            code = self._discard(worker)
            self._check_open()
            kind = _Killed if code == -signal.SIGKILL else UserError
            raise kind(f"a verifier worker ended with code {code} at its start") from error
        if ready is None:
            self._discard(worker)
            raise UserError(f"no verifier worker came up within start_timeout_s={self._start_timeout_s}; raise it")
        return worker

    def _ask(self, worker: _Worker, item: bytes) -> tuple[Verdict, bool]:
        """The verdict on one item and whether the worker is still there."""
        try:
            worker.send(b"item", item)
            reply = worker.reply(self._timeout_s)
        except EOFError:
            code = self._discard(worker)
            self._check_open()
            if code == -signal.SIGXCPU:
                return self._timed_out(), False
            return Verdict(0.0, False, f"the verifier process ended with code {code}"), False
        if reply is None:
            self._discard(worker)
            return self._timed_out(), False
        return Verdict(*json.loads(reply)), True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the verifier pool is closed; open a new one")

    def _timed_out(self) -> Verdict:
        return Verdict(0.0, False, f"timed out after {self._timeout_s} s")

    def _discard(self, worker: _Worker) -> int:
        with self._lock:
            self._workers.discard(worker)
            code = worker.kill()
        worker.connection.close()
        return code


def _importable(verifier: Verifier) -> bytes:
    """The verifier by reference, as a worker will import it."""
    if getattr(verifier, "__module__", None) == "__main__":
        raise ValueError("verifier is defined in __main__; move it to a module that a worker process can import")
    try:
        return pickle.dumps(verifier)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"verifier={verifier!r} must be a module-level function: {error}") from error
