"""The process that serves one pool slot: it isolates itself once, then forks a limited process for every program.

It never executes model-written code itself. Messages are a length and JSON on one socket. Of a test, the program comes
first; what is expected comes in a second message, which only a fork reads that the program does not descend from.
"""

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

from jaxrl_llm.sandbox import calls, filters, inside, kernel
from jaxrl_llm.sandbox.isolation import Isolation, isolate

_PRELOADED = "bisect collections copy datetime decimal fractions functools heapq itertools math random re string typing"
_GRACE_S = 0.5
PATIENCE = 8  # times wall_s on the clock, for a program that waits for a processor
_SESSION_CPU_S = 3600.0
_LEAVE_S = 2.0  # for a keeper to end its programs


def receive(link: socket.socket) -> Any:
    """One message.

    Raises:
      EOFError: when the other side is gone.
    """
    size = struct.unpack("=I", _exactly(link, 4))[0]
    return json.loads(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = link.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(link: socket.socket, tree: Any) -> None:
    """One message."""
    text = json.dumps(tree).encode()
    link.sendall(struct.pack("=I", len(text)) + text)


def main(
    descriptor: int, private: str, *, without: list[str], modules: list[str], paths: list[str], readable: list[str]
) -> None:
    """Serves until the other side closes.

    Args:
      modules: to import before all is given up, from ``paths``; requests call their functions.
      readable: what programs read besides Python's library.
    """
    link = socket.socket(fileno=descriptor)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # that of whoever started this is not meant for it
    try:
        for name in _PRELOADED.split():
            importlib.import_module(name)
        shown = readable + _load(modules, paths)
        kernels = _kernels_view()
        how = isolate(private, frozenset(without), shown)
        send(link, {"protection": how.protection._asdict()})
    except Exception as error:  # said to the other side, which raises it
        send(link, {"failed": f"{type(error).__name__}: {error}"})
        return
    gc.collect()
    gc.freeze()
    while True:
        try:
            request = receive(link)
        except (EOFError, ConnectionError):
            os._exit(0)  # faster than an end in order
        how.renew(request["limits"]["disk_mb"])
        keeper = os.fork()
        if keeper == 0:
            code = 70
            try:
                _Keeper(how, request["limits"], kernels).serve(link, request)
                code = 0
            finally:
                os._exit(code)
        _wait(keeper, link)


def _load(modules: list[str], paths: list[str]) -> list[str]:
    """Imports modules and calls their ``warm_up``; the folders that they and what they import later are read from."""
    if not modules:
        return []
    sys.path[:] = paths
    for name in modules:
        warm_up = getattr(importlib.import_module(name), "warm_up", None)
        if warm_up is not None:
            warm_up()
    packages = [path for path in paths if os.path.basename(path) in ("site-packages", "dist-packages")]
    tops = [sys.modules[name] for name in {name.partition(".")[0] for name in sys.modules} if name in sys.modules]
    places = [place for top in tops for place in getattr(top, "__path__", [getattr(top, "__file__", None)])]
    known = tuple(path + "/" for path in (*packages, *filters.readable()))
    loaded = {place for place in places if place and os.path.exists(place) and not place.startswith(known)}
    return [*packages, *sorted(loaded)]


def _wait(keeper: int, link: socket.socket) -> None:
    """Until the keeper ends well; with anything else this worker ends, and takes along what runs."""
    poll, ended = select.poll(), os.pidfd_open(keeper)
    poll.register(ended, select.POLLIN)
    poll.register(link, select.POLLRDHUP)
    ready = [descriptor for descriptor, _ in poll.poll()]
    if ended not in ready:  # the run is gone; the keeper ends what it started, also what would not die with it
        os.kill(keeper, signal.SIGTERM)
        select.select([ended], [], [], _LEAVE_S)
        os._exit(0)
    os.close(ended)
    if os.waitpid(keeper, 0)[1] != 0:
        os._exit(71)  # the other side sees the end of the link and takes another worker


class _Child:
    """A limited process as its keeper sees it."""

    def __init__(self, pid: int, up: int, pipes: dict[str, int]):
        self.up = up  # says "up" when the process is limited and goes on to the program
        self.pid, self.pipes, self.status, self.cpu_s, self.waited_s = pid, pipes, None, 0.0, 0.0
        self.taken = {name: bytearray() for name in pipes}

    def ended(self, status: int, used: resource.struct_rusage) -> None:
        self.status, self.cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


class _Keeper:
    """Starts, watches and ends the processes of one request. It runs outside of their process namespace."""

    def __init__(self, how: Isolation, limits: dict[str, Any], kernels: int | None):
        self.how, self.limits, self.kernels = how, limits, kernels
        self.children: list[_Child] = []
        self.left = False  # alone: nobody waits for an answer any more
        signal.signal(signal.SIGTERM, self._leave)
        self.began = time.monotonic()
        kernel.die_with_parent()
        kernel.adopt_orphans()
        how.new_processes()

    def _leave(self, *_: Any) -> None:
        self.left = True

    def serve(self, link: socket.socket, request: dict[str, Any]) -> None:
        """Answers one request."""
        if request["kind"] == "calls":
            self._serve_calls(link)
            return
        start, children = time.monotonic(), self.children
        stdin = _as_file(request.get("stdin", ""))
        try:
            if request["kind"] == "run":
                self._start(lambda: inside.run_program(request["program"]), stdin, ())
            elif request["kind"] == "call":
                self._start_call(request, stdin)
            else:
                self._start_test(link, request, stdin)
            why = self._watch(children)
        finally:
            self._end(children)
        last = children[-1]
        verdict = children[0].taken.get("verdict", b"").decode("utf-8", "replace")
        up = [bool(os.read(child.up, 2)) for child in children]
        # tests that ask nothing may end before the program's side is up, which ends with theirs
        unasked = up[0] and not why and '"passed"' in verdict and inside.ENDED not in verdict
        reply = {
            "why": why if all(up) or unasked else "broken",
            "status": last.status,
            "cpu_s": last.cpu_s,
            "stdout": last.taken["stdout"].decode("utf-8", "replace"),
            "stderr": last.taken["stderr"].decode("utf-8", "replace"),
            "seconds": time.monotonic() - start,
            "verdict": verdict,
        }
        send(link, reply)

    def _start_call(self, request: dict[str, Any], stdin: int) -> None:
        reading, writing = os.pipe()
        words = (request["module"], request["name"], request["given"], writing)
        child = self._start(lambda: inside.run_call(*words), stdin, (writing,))
        child.pipes["verdict"], child.taken["verdict"] = reading, bytearray()
        os.close(writing)

    def _serve_calls(self, link: socket.socket) -> None:
        """Hands calls to one limited process until the other side wants no more, or something ended it."""
        asked, answered = os.pipe(), os.pipe()
        per_call = self.limits["cpu_s"]
        self.limits = self.limits | {"cpu_s": _SESSION_CPU_S}  # of the process; each call is watched by its clock
        child = self._start(
            lambda: calls.answer(asked[0], answered[1], self.how.shown), _as_file(""), (asked[0], answered[1])
        )
        os.close(asked[0])
        os.close(answered[1])
        os.set_blocking(asked[1], False)
        try:
            why = "" if os.read(child.up, 2) else "broken"
            again = True
            while again and "call" in (request := receive(link)):
                start, text = time.monotonic(), b""
                if not why:
                    question = json.dumps(request["call"]).encode()
                    text, why = self._one_call(child, question, asked[1], answered[0], per_call)
                send(link, {"why": why, "said": text.decode(), "seconds": time.monotonic() - start})
                again = not why and calls.goes_on(text)
        finally:
            self._end(self.children)

    def _one_call(self, child: "_Child", question: bytes, asked: int, answered: int, cpu_s: float) -> tuple[bytes, str]:
        """The answer, or why there is none."""
        poll, text, question = select.poll(), bytearray(), question + b"\n"
        poll.register(answered, select.POLLIN)
        poll.register(asked, select.POLLOUT)
        deadline, first = time.monotonic() + self.limits["wall_s"], _cpu_s_of(child.pid)
        while time.monotonic() < deadline and not self.left:
            if _cpu_s_of(child.pid) - first > cpu_s:
                return b"", "cpu"
            for descriptor, _ in poll.poll(20):
                if descriptor == asked:
                    try:
                        question = question[os.write(asked, question[:4096]) :]  # so much is taken or refused at once
                    except BrokenPipeError:
                        return b"", "killed"
                    if not question:
                        poll.unregister(asked)
                    continue
                part = os.read(answered, 1 << 16)
                text += part
                if not part:
                    return b"", "killed"
                if len(text) > self.limits["output_bytes"]:
                    return b"", "output"
                if text.endswith(b"\n"):
                    return bytes(text), ""
        return b"", "wall"

    def _start_test(self, link: socket.socket, request: dict[str, Any], stdin: int) -> None:
        """The checker first, empty-handed; then the solver; only then are the tests read, and passed on."""
        asked, answered, tests = os.pipe(), os.pipe(), os.pipe()

        def check() -> int:
            given = json.loads(_all_of(tests[0]))
            verdict = inside.check(given["setup"], given["entries"], given["checks"], answered[0], asked[1])
            os.write(verdict_out, json.dumps(verdict).encode())
            return 0

        verdict_in, verdict_out = os.pipe()
        checker = self._start(check, stdin, (tests[0], answered[0], asked[1], verdict_out))
        checker.pipes["verdict"], checker.taken["verdict"] = verdict_in, bytearray()
        os.close(verdict_out)
        self._start(lambda: inside.solve(request["program"], asked[0], answered[1]), stdin, (asked[0], answered[1]))
        for used in (asked[0], asked[1], answered[0], answered[1], tests[0]):
            os.close(used)
        text = json.dumps(receive(link)).encode()
        try:
            while text:
                text = text[os.write(tests[1], text) :]
        except BrokenPipeError:
            text = b""  # the checker is gone, which the missing verdict says
        os.close(tests[1])

    def _start(self, run: Any, stdin: int, keep: tuple[int, ...]) -> _Child:
        out, err, up = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 72
            try:
                self._limit(stdin, out[1], err[1], (*keep, up[1]))
                os.write(up[1], b"up")  # from here on it is the program's fault
                os.close(up[1])
                code = run()
            except BaseException as error:
                os.write(2, f"the sandbox did not come up: {error}\n".encode())
            finally:
                os._exit(code)
        for used in (out[1], err[1], up[1]):
            os.close(used)
        child = _Child(pid, up[0], {"stdout": out[0], "stderr": err[0]})
        self.children.append(child)
        return child

    def _limit(self, stdin: int, out: int, err: int, keep: tuple[int, ...]) -> None:
        """From a fork of the keeper to a process that may run anything."""
        os.setsid()
        for source, target in ((stdin, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        _close_all_but({0, 1, 2, *keep})
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        kernel.clear_environment()
        os.chdir(self.how.private)
        os.umask(0o077)
        os.nice(5)
        megabyte, cpu = 1 << 20, max(1, int(-(-self.limits["cpu_s"] // 1)))
        self._bound(resource.RLIMIT_CPU, cpu, 1)  # a signal that says why; a second later one that cannot be caught
        self._bound(resource.RLIMIT_AS, self.limits["memory_mb"] * megabyte)
        self._bound(resource.RLIMIT_FSIZE, self.limits["disk_mb"] * megabyte)
        self._bound(resource.RLIMIT_NOFILE, 64)
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
            self._bound(kind, 0)
        self.how.drop(self.limits["threads"])
        kernel.die_with_parent()
        self.how.seal()
        seen = (*filters.readable(), *self.how.shown)
        sys.path[:] = [p for p in sys.path if p.startswith(seen) or any(s.startswith(p + "/") for s in seen)]
        sys.argv[:] = [""]

    @staticmethod
    def _bound(kind: int, amount: int, room: int = 0) -> None:
        _, hard = resource.getrlimit(kind)
        most = amount + room if hard == resource.RLIM_INFINITY else min(amount + room, hard)
        resource.setrlimit(kind, (min(amount, most), most))

    def _watch(self, children: list[_Child]) -> str:
        """Reads until all have ended; why they had to be ended, if so."""
        poll, owners = select.poll(), {}
        for child in children:
            poll.register(os.pidfd_open(child.pid), select.POLLIN)  # wakes when it ends
            for name, pipe in child.pipes.items():
                os.set_blocking(pipe, False)
                poll.register(pipe, select.POLLIN)
                owners[pipe] = (child, name)
        limit = self.limits["output_bytes"]
        while True:
            for child in children:
                self._reap(child)
            if children[0].status is not None:
                for pipe in list(owners):
                    self._take(pipe, owners, poll, limit)
                return ""
            if why := self._late(children):
                return why
            if not self.how.has_own_disk() and self._disk_mb() > self.limits["disk_mb"]:
                return "disk"
            for pipe, _ in poll.poll(20):
                if pipe in owners and self._take(pipe, owners, poll, limit):
                    return "output"

    def _late(self, children: list[_Child]) -> str:
        """``timeout`` once they ran or slept for ``wall_s``; ``wall`` where a busy machine had most of far longer."""
        elapsed, wall_s = time.monotonic() - self.began, self.limits["wall_s"]
        if self.left:
            return "timeout"
        if elapsed <= wall_s:
            return ""
        for child in children:
            child.waited_s = max(child.waited_s, _waited_s(self.kernels, child.pid))
        if elapsed - sum(child.waited_s for child in children) > wall_s:
            return "timeout"
        return "wall" if elapsed > PATIENCE * wall_s else ""

    @staticmethod
    def _reap(child: _Child) -> None:
        if child.status is None:
            pid, status, used = os.wait4(child.pid, os.WNOHANG)
            if pid:
                child.ended(status, used)

    @staticmethod
    def _take(pipe: int, owners: dict, poll: Any, limit: int) -> bool:
        """Reads what is there; whether it is too much."""
        child, name = owners[pipe]
        try:
            part = os.read(pipe, 65536)
        except BlockingIOError:
            return False
        if not part:
            poll.unregister(pipe)
            del owners[pipe]
            return False
        room = limit - len(child.taken[name])
        child.taken[name] += part[:room]
        return len(part) > room

    def _disk_mb(self) -> float:
        total = 0
        for folder, _, files in os.walk(self.how.private):
            for name in files:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except OSError:
                    continue  # removed meanwhile
        return total / (1 << 20)

    def _end(self, children: list[_Child]) -> None:
        """Kills whatever is left, also what has hidden from its group."""
        for child in children:
            if child.status is None:  # should its end take longer than there is patience for
                child.cpu_s = _cpu_s_of(child.pid)
            for kill in (os.killpg, os.kill):
                try:
                    kill(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        end = time.monotonic() + _GRACE_S
        # in any order: the first process of a tree is not gone before the others have been waited for
        while time.monotonic() < end:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            for child in children:
                if child.pid == pid:
                    child.ended(status, used)
            if pid == 0:
                for orphan in () if self.how.tree else _children():
                    os.kill(orphan, signal.SIGKILL)
                time.sleep(0.0005)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(x) for x in listed.read().split()]
    except OSError:
        return []


def _cpu_s_of(pid: int) -> float:
    """Seconds that a process has computed; 0 when it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the kernel's number of a process's own clock
    except OSError:
        return 0.0


def _kernels_view() -> int | None:
    """The folder of what the kernel tells of processes, which no program gets; None where there is none."""
    try:
        return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None


def _waited_s(kernels: int | None, pid: int) -> float:
    """Seconds that a thread of a process, the one that waited longest, got no processor; 0 where it is not told."""
    if kernels is None:
        return 0.0
    longest = 0
    try:
        tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=kernels)
    except OSError:  # it has ended
        return 0.0
    try:
        for name in os.listdir(tasks):
            file = os.open(f"{name}/schedstat", os.O_RDONLY, dir_fd=tasks)
            try:
                longest = max(longest, int(os.read(file, 100).split()[1]))  # nanoseconds: on a processor, waiting
            finally:
                os.close(file)
    except (OSError, IndexError):  # a thread has ended, or this kernel does not count
        return longest / 1e9
    finally:
        os.close(tasks)
    return longest / 1e9


def _as_file(text: str) -> int:
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    file = os.memfd_create("stdin")
    data = text.encode()
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _all_of(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def _close_all_but(keep: set[int]) -> None:
    edges = [-1, *sorted(keep), os.sysconf("SC_OPEN_MAX")]
    for low, high in zip(edges, edges[1:], strict=False):
        if high > low + 1:
            os.closerange(low + 1, high)
