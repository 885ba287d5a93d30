"""Programs and their tests in warm, isolated workers: the side of the run.

>>> from jaxrl_llm.sandbox.pool import Sandbox
>>> with Sandbox(workers=1) as sandbox:
...     ran = sandbox.run("print(6 * 7)")
...     checked = sandbox.check("def f(x):\\n    return x + 1", ["assert f(1) == 2", "assert f(1) == 3"])
>>> ran.status, ran.stdout, checked.passed
('ok', '42\\n', (True, False))
"""

import contextlib
import json
import os
import pathlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.sandbox.calls import goes_on
from jaxrl_llm.sandbox.records import Called, Checked, Limits, Protection, Ran
from jaxrl_llm.sandbox.worker import PATIENCE, receive, send

_PACKAGES = str(pathlib.Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from jaxrl_llm.sandbox.worker import main; "
    "sys.path.pop(0); import json; main(int(sys.argv[2]), sys.argv[3], **json.loads(sys.argv[4]))"
)
_START_S, _GRACE_S, _LEAVE_S = 60.0, 10.0, 3.0
_OUT_OF_MEMORY = 101
_CALLS = 5000  # of one process; then a fresh one answers


class Test(NamedTuple):
    """A program and what it must do.

    ``checks`` are pieces of Python, each run by itself: it passes if it ends without an exception. ``setup`` runs
    before each. The names in ``entries`` are the program's, whatever the setup says; other names that a check uses and
    nobody else defines are the program's, too.
    """

    program: str
    checks: tuple[str, ...]
    setup: str = ""
    entries: tuple[str, ...] = ()

    __test__ = False  # no test of pytest's


class _Worker:
    """One isolated process and the socket to it; used by one thread at a time."""

    def __init__(self, settings: dict[str, Sequence[str]]):
        self.calls: Limits | None = None  # of the process that answers calls, where there is one
        self.left = 0  # calls that it may still answer
        self.private = tempfile.mkdtemp(prefix="jaxrl_llm_sandbox_")
        mine, theirs = socket.socketpair()
        self.link = mine
        self.process = subprocess.Popen(
            # no site packages: a program sees Python's own library
            [sys.executable, "-S", "-s", "-P", "-B", "-c", _BOOT]
            + [_PACKAGES, str(theirs.fileno()), self.private, json.dumps(settings)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        self.ended, self.up = False, False
        self.protection: Protection | None = None

    def hello(self) -> Protection:
        """Waits until the worker is isolated.

        Raises:
          UserError: when it does not come up.
        """
        if self.protection is not None:
            return self.protection
        self.link.settimeout(_START_S)
        try:
            said = receive(self.link)
        except (EOFError, OSError) as error:
            raise UserError(f"a sandbox worker did not come up ({type(error).__name__})") from error
        if "failed" in said:
            raise UserError(f"a sandbox worker cannot isolate itself: {said['failed']}")
        held = {k: tuple(v) if isinstance(v, list) else v for k, v in said["protection"].items()}
        self.protection = Protection(**held)
        return self.protection

    def opening(self, calls: Limits | None) -> list[dict[str, Any]]:
        """What is to be said first: closes the process that answers calls if it is not wanted, opens one if it is."""
        said: list[dict[str, Any]] = []
        if self.calls is not None and (calls != self.calls or self.left < 1):
            said.append({"end": True})
            self.calls = None
        if calls is not None and self.calls is None:
            said.append({"kind": "calls", "limits": calls._asdict()})
            self.calls, self.left = calls, _CALLS
        self.left -= 1
        return said

    def ask(self, messages: Sequence[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Raises EOFError or OSError where the worker is gone or silent."""
        self.up = True
        self.link.settimeout(timeout_s)
        for message in messages:
            send(self.link, message)
        return receive(self.link)

    def end(self) -> None:
        """Kills the worker and with it, by the kernel, all that it started."""
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)  # wakes whoever waits, here and there
        self.link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # it ends its programs first, also those that would outlive it
            self.process.wait(_LEAVE_S if self.up else 0)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.poll()
        self.process.wait()
        shutil.rmtree(self.private, ignore_errors=True)


def _end_all(workers: set[_Worker]) -> None:
    for worker in list(workers):
        worker.end()


class Sandbox:
    """Runs model-written Python in warm workers; a context manager, usable from several threads.

    Every program gets a process of its own; nothing of it is left for the next. Read ``protection`` (or run
    ``python -m jaxrl_llm.sandbox``) for what this machine's kernel holds.

    Args:
      workers: programs at the same time.
      without: means not to use, for tests of the others: ``namespaces``, ``landlock``, ``seccomp``, ``other_user``,
        ``root`` (enter namespaces as an ordinary user would).
      modules: imported by every worker before it isolates itself, as this process would import them; what they define
        as ``warm_up`` is called then, too. ``call`` and ``call_fresh`` run their functions. They and all installed
        packages can be read by what runs. One more worker waits, so that one that was killed is replaced without
        importing again.
      readable: files and folders that may be read besides Python's library.

    Raises:
      UserError: on another system than Linux.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        limits: Limits | None = None,
        without: Sequence[str] = (),
        modules: Sequence[str] = (),
        readable: Sequence[str] = (),
    ):
        if workers < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        if not hasattr(os, "pidfd_open"):  # every answer would be that the worker is gone
            raise UserError(
                f"{sys.platform} has no sandbox for programs: judge them on Linux, in a container for example"
            )
        for path in readable:
            if not os.path.isabs(path) or not os.path.exists(path):
                raise ValueError(f"readable={path!r} must be an absolute path of something that exists")
        self._limits, self._modules = Limits() if limits is None else limits, tuple(modules)
        paths = [os.path.abspath(path) for path in sys.path] if modules else []
        self._settings = {
            "without": tuple(without),
            "modules": self._modules,
            "paths": paths,
            "readable": [os.path.normpath(path) for path in readable],
        }
        self._spare: _Worker | None = None
        self._lock, self._closed = threading.Lock(), False
        self._workers: set[_Worker] = set()
        # the last one back goes first: no more workers start than are busy at once
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):  # None stands for a worker still to be started
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._finalizer = weakref.finalize(self, _end_all, self._workers)
        self._protection: Protection | None = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers at once. Closing twice is harmless."""
        self._closed = True
        self._finalizer()
        self._threads.shutdown(wait=True, cancel_futures=True)
        _end_all(self._workers)

    @property
    def protection(self) -> Protection:
        """What holds a program here; starts a worker if none is running."""
        if self._protection is None:
            worker = self._idle.get()
            try:
                worker = worker or self._start()
            finally:
                self._idle.put(worker)
        assert self._protection is not None
        return self._protection

    def run(self, program: str, *, stdin: str = "", limits: Limits | None = None) -> Ran:
        """Executes a program as ``__main__`` and returns what it wrote."""
        limits = self._limits if limits is None else limits
        request = {"kind": "run", "program": encodable(program), "stdin": encodable(stdin), "limits": limits._asdict()}
        reply = self._ask([request], limits)
        if reply is None:
            return Ran("broken", None, "", "the sandbox worker did not answer", 0.0)
        if reply["why"] == "wall":
            return Ran("broken", None, "", _in_words("wall", reply, limits), reply["seconds"])
        return Ran(_status(reply, limits), reply["status"], reply["stdout"], reply["stderr"], reply["seconds"])

    def call(self, function: str, *arguments: Any, limits: Limits | None = None) -> Called:
        """``module:function`` of one of ``modules`` on plain (JSON) arguments; its value must be plain, too.

        Calls share a warm process that is held as a program is, and that executes no text (``sandbox.calls.guard``):
        what the function hands to ``eval`` is an error there. ``cpu_s`` and ``wall_s`` are those of one call.
        """
        limits = self._limits if limits is None else limits
        self._check_known(function)
        reply = self._ask([{"call": [function, list(arguments)]}], limits, calls=True)
        if reply is None:
            return Called("broken", None, "the sandbox worker did not answer", 0.0)
        if reply["why"]:
            reason = _WHY.get(reply["why"], "the sandbox did not come up").format(**limits._asdict())
            return Called(reply["why"], None, reason, reply["seconds"])
        said = json.loads(reply["said"])
        if "raised" not in said:
            return Called("ok", said["value"], "", reply["seconds"])
        status = "memory" if said["raised"] == "MemoryError" else "raised"
        return Called(status, None, f"{said['raised']}: {said['text']}".strip(": "), reply["seconds"])

    def _check_known(self, function: str) -> None:
        if function.partition(":")[0] not in self._modules:
            raise ValueError(f"function={function!r} is of none of the modules {self._modules}; name its module there")

    def call_fresh(self, function: str, *arguments: Any, limits: Limits | None = None) -> Called:
        """``module:function`` of one of ``modules`` on plain (JSON) arguments; its value must be plain, too.

        Each call has a process of its own, held as a program is: what the arguments make of it is gone with it. The
        function itself is trusted, and so is its value only as far as it does not execute its arguments.
        """
        limits = self._limits if limits is None else limits
        self._check_known(function)
        module, _, name = function.partition(":")
        words = {"kind": "call", "module": module, "name": name, "given": arguments}
        reply = self._ask([words | {"limits": limits._asdict()}], limits)
        if reply is None:
            return Called("broken", None, "the sandbox worker did not answer", 0.0)
        status, value, reason = _call_status(reply, limits), None, reply["stderr"].strip()[-300:]
        if status == "ok":
            try:
                value = json.loads(reply["verdict"])
            except (ValueError, RecursionError):
                status, reason = "killed", "it ended without a value"
        return Called(status, value, reason or _in_words(status, reply, limits), reply["seconds"])

    def check(
        self,
        program: str,
        checks: Sequence[str],
        *,
        setup: str = "",
        entries: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Checked:
        """Runs tests against a program, the two in processes that exchange plain data only; see ``Test``."""
        limits = self._limits if limits is None else limits
        if not checks:
            raise ValueError("checks is empty: a program without tests is neither right nor wrong")
        request = {"kind": "check", "program": encodable(program), "limits": limits._asdict()}
        tests = {"setup": setup, "entries": list(entries), "checks": list(checks)}
        reply = self._ask([request, tests], limits)
        failed = (False,) * len(checks)
        if reply is None:
            return Checked(failed, "the sandbox worker did not answer", False, 0.0)
        if reply["why"] == "broken":
            return Checked(failed, f"the sandbox did not come up: {reply['stderr'][-200:]}", False, reply["seconds"])
        if reply["why"] == "wall":
            return Checked(failed, _in_words("wall", reply, limits), False, reply["seconds"])
        if reply["why"] == "timeout":
            return Checked(failed, f"timed out after {limits.wall_s} s", True, reply["seconds"])
        if reply["why"]:
            return Checked(failed, f"too much {reply['why']}", True, reply["seconds"])
        if not reply["verdict"]:
            return Checked(failed, "the tests did not end: " + _status(reply, limits), True, reply["seconds"])
        verdict = json.loads(reply["verdict"])
        if verdict["unfit"]:
            return Checked(failed, verdict["unfit"], False, reply["seconds"])
        if _status(reply, limits) == "timeout" and not all(verdict["passed"]):
            verdict["reason"] = f"timed out after {limits.cpu_s} s of the processor"
        return Checked(tuple(verdict["passed"]), verdict["reason"], True, reply["seconds"])

    def check_all(self, tests: Sequence[Test]) -> tuple[list[Checked], dict[str, float]]:
        """All tests, in order, on all workers; and ``sandbox/checks_per_s``, ``sandbox/invalid_fraction``."""
        start = time.monotonic()
        done = list(
            self._threads.map(lambda t: self.check(t.program, t.checks, setup=t.setup, entries=t.entries), tests)
        )
        seconds = max(time.monotonic() - start, 1e-9)
        invalid = sum(not c.valid for c in done) / max(len(done), 1)
        return done, {"sandbox/checks_per_s": len(done) / seconds, "sandbox/invalid_fraction": invalid}

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed; open a new one")
            spare, self._spare = self._spare, None
            lost = spare is not None and spare.process.poll() is not None  # something killed it while it waited
            worker = _Worker(self._settings) if spare is None or lost else spare
            self._workers.add(worker)
        if lost:
            self._discard(spare)
        try:
            self._protection = worker.hello()
        except UserError:
            self._discard(worker)
            raise
        with self._lock:
            if self._modules and self._spare is None and not self._closed:
                self._spare = _Worker(self._settings)
                self._workers.add(self._spare)
        return worker

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()

    def _ask(self, messages: Sequence[dict[str, Any]], limits: Limits, *, calls: bool = False) -> dict[str, Any] | None:
        """The reply of a worker; None when a second, fresh one does not answer either."""
        worker = self._idle.get()
        try:
            for _ in range(2):
                worker = worker or self._start()
                try:
                    first = worker.opening(limits if calls else None)
                    reply = worker.ask([*first, *messages], PATIENCE * limits.wall_s + _GRACE_S)
                    if calls and (reply["why"] or not goes_on(reply["said"].encode())):
                        worker.calls = None  # that process has ended
                    return reply
                except (EOFError, OSError):
                    self._discard(worker)
                    worker = None
                    if self._closed:
                        raise RuntimeError("the sandbox was closed while a program ran") from None
            return None
        except BaseException:
            if worker is not None:
                self._discard(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)


_WHY = {
    "cpu": "computed for more than {cpu_s} s",
    "wall": "got no processor within {wall_s} s",
    "memory": "needed more than {memory_mb} MB",
    "output": "the value is too large",
    "killed": "its process died",
}


def _in_words(status: str, reply: dict[str, Any], limits: Limits) -> str:
    """Why a process of its own ended so; what a busy machine kept waiting had ``PATIENCE`` times its time."""
    times = PATIENCE if reply["why"] == "wall" else 1
    return _WHY.get(status, "").format(**limits._replace(wall_s=times * limits.wall_s)._asdict())


def _call_status(reply: dict[str, Any], limits: Limits) -> str:
    status = _status(reply, limits)
    if status == "timeout":
        # whoever computed for half of its time was busy, not kept waiting
        return "cpu" if reply["cpu_s"] >= 0.5 * limits.cpu_s else "wall"
    return {"error": "raised"}.get(status, status)


def encodable(text: str) -> str:
    """Text that any encoding takes: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode()


def _status(reply: dict[str, Any], limits: Limits) -> str:
    if reply["why"]:
        return {"disk": "output"}.get(reply["why"], reply["why"])
    code = reply["status"]
    if code == 0:
        return "ok"
    if code == _OUT_OF_MEMORY:
        return "memory"
    if code < 0:
        return "timeout" if code == -signal.SIGXCPU or reply["cpu_s"] > limits.cpu_s else "killed"
    return "error"
