"""Envs of other packages in processes of their own, as one env that many threads may ask.

A package that bears one thread only (TextWorld's parser) plays in several processes, each of which answers one call at
a time; it neither holds the trainer's interpreter lock nor takes the trainer down with it. A call that does not come
back within its deadline, and a process that dies, lose the episode that asked. A fresh process takes the place, and
the other episodes of the old one begin anew there and are played forward to where they were by what was said in them;
one that does not repeat itself is lost.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from jaxrl_llm.envs.worker import main; main(*json.loads(sys.argv[2]))"
)
# a device belongs to the trainer, and threads of a library do not help a call that is served alone
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class EpisodeLost(RuntimeError):
    """The process of an episode was killed or died, or the episode does not repeat itself in a fresh one."""


class EnvFailed(RuntimeError):
    """The env of an episode raised an exception in its process."""


class _Process:
    """One process and the socket to it."""

    def __init__(self, make: bytes, memory_mb: int):
        self.connection, other = Pipe()
        settings = [other.fileno(), os.getpid(), memory_mb]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(settings)],
            pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        other.close()
        self.make = make

    def ask(self, blob: bytes, timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError, or EOFError where the process is gone."""
        try:
            self.connection.send_bytes(blob)
            if not self.connection.poll(timeout_s):
                raise TimeoutError
            return json.loads(self.connection.recv_bytes())
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError from error

    def kill(self) -> int:
        """Ends the process and its children at once; returns its exit code."""
        with contextlib.suppress(ProcessLookupError):  # gone already, and no child of it left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


@dataclasses.dataclass(eq=False)
class _Seat:
    """The place of a process, which changes; its lock is held during every call."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    process: _Process | None = None
    generation: int = 0
    episodes: int = 0


@dataclasses.dataclass(eq=False)
class _Episode:
    """An episode as the trainer knows it: where it is played, and all that would bring it there again."""

    seat: _Seat
    number: int
    seed: np.ndarray
    task: Any
    generation: int = 0
    first: str = ""
    identity: int = 0
    turns: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # what was said, and the answer


def _kill_all(seats: list[_Seat]) -> None:
    for seat in seats:
        if seat.process is not None:
            seat.process.kill()


class _Processes:
    """The seats of one env and how they are asked."""

    def __init__(self, make: bytes, count: int, call_s: float, start_s: float, memory_mb: int):
        self.make, self.call_s, self.start_s, self.memory_mb = make, call_s, start_s, memory_mb
        self.seats = [_Seat() for _ in range(count)]
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self.end = weakref.finalize(self, _kill_all, self.seats)

    def start(self, seat: _Seat) -> None:
        """A running process; the caller holds the seat's lock.

        Raises:
          UserError: where the env cannot be made.
        """
        if seat.process is not None and seat.process.process.poll() is None:
            return
        if seat.process is not None:  # died while nobody asked
            seat.process.kill()
        seat.process, seat.generation = _Process(self.make, self.memory_mb), seat.generation + 1
        try:
            ready = seat.process.ask(self.make, self.start_s)
        except (TimeoutError, EOFError) as error:
            code = self.drop(seat)
            late = isinstance(error, TimeoutError)
            how = f"did not come up within start_s={self.start_s:g}" if late else f"ended with code {code} at its start"
            raise UserError(f"the process of an env {how}; does it run alone?") from error
        if ready:
            self.drop(seat)
            named = "" if ready["error"] == "UserError" else f"an env cannot be made: {ready['error']}: "
            raise UserError(named + ready["message"])

    def drop(self, seat: _Seat) -> int:
        code, seat.process = seat.process.kill(), None
        return code

    def ask(self, seat: _Seat, *request: Any) -> dict[str, Any]:
        """The answer to one call; the caller holds the seat's lock."""
        try:
            reply = seat.process.ask(pickle.dumps(request), self.call_s)
        except TimeoutError as error:
            self.drop(seat)
            raise EpisodeLost(f"no answer to {request[0]} within call_s={self.call_s:g}; its process was killed"
                              ) from error  # fmt: skip
        except EOFError as error:
            code = self.drop(seat)
            raise EpisodeLost(f"its process ended with code {code} during {request[0]}") from error
        if "error" in reply:
            if reply["error"] == "UserError":
                raise UserError(reply["message"])
            raise EnvFailed(f"{reply['error']}: {reply['message']}")
        return reply

    def bring(self, episode: _Episode) -> None:
        """Has the episode's process play it, from its beginning where that is another process than before."""
        seat = episode.seat
        self.start(seat)
        if episode.generation == seat.generation:
            return
        found = self.ask(seat, "reset", episode.number, episode.seed, episode.task)
        same = not episode.generation or found["said"] == episode.first
        for text, shown in episode.turns if same else ():
            found = self.ask(seat, "step", episode.number, text)
            same = found["said"][0] == shown
            if not same:
                break
        if not same:
            raise EpisodeLost("its process was replaced, and the episode did not repeat itself in the fresh one")
        if not episode.generation:
            episode.first = found["said"]
        episode.generation, episode.identity = seat.generation, found["identity"]

    def reset(self, seed: np.ndarray, task: Any) -> _Episode:
        with self.lock:
            seat = min(self.seats, key=lambda seat: seat.episodes)
            seat.episodes += 1
            episode = _Episode(seat, next(self.numbers), np.asarray(seed), task)
        try:
            with seat.lock:
                self.bring(episode)
        except BaseException:
            self.leave(episode)
            raise
        return episode

    def step(self, episode: _Episode, text: str) -> TextStepResult:
        with episode.seat.lock:
            self.bring(episode)
            found = self.ask(episode.seat, "step", episode.number, text)
        episode.identity = found["identity"]
        episode.turns.append((text, found["said"][0]))
        return TextStepResult(episode, *found["said"])

    def close(self, episode: _Episode) -> None:
        seat = episode.seat
        try:
            with seat.lock:
                if seat.process is not None and episode.generation == seat.generation:
                    self.ask(seat, "close", episode.number)
        finally:
            self.leave(episode)

    def leave(self, episode: _Episode) -> None:
        with self.lock:
            episode.seat.episodes -= 1


def in_processes(
    make: Callable[[], TextEnv],
    *,
    processes: int = 4,
    call_s: float = 60.0,
    start_s: float = 120.0,
    memory_mb: int = 4096,
) -> TextEnv:
    """The env that ``make`` makes, played in processes; any number of threads may ask it.

    The episodes must depend on ``(seed, task)`` and what is said alone: then none but the one at fault is lost with a
    process. Tasks and seeds are sent pickled, answers come back as text and numbers.

    Args:
      make: a module-level function, or ``functools.partial`` of one; its env has ``first``.
      processes: that play at the same time; episodes are shared out among them.
      call_s: deadline of one call, from when its process takes it up.
      start_s: of the start of a process and of ``make``.
      memory_mb: address space of a process; 0: no limit.

    Raises:
      UserError: where the env cannot be made, for example for a missing package; ValueError for a ``make`` that another
        process cannot import, or a number out of range.
    """
    for name, value in (("processes", processes), ("call_s", call_s), ("start_s", start_s)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")
    try:
        blob = pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"make={make!r} must be a module-level function or a partial of one: {error}") from error
    pool = _Processes(blob, processes, call_s, start_s, memory_mb)
    with pool.seats[0].lock:
        pool.start(pool.seats[0])  # says at once what is missing
    return TextEnv(pool.reset, pool.step, lambda episode: episode.identity, pool.close, lambda episode: episode.first)
