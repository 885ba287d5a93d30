"""The other end of ``pool``: one process that judges until its connection closes. Imports no JAX."""

import gc
import importlib
import json
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MAX_REASON = 500


def _limit(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allow_cpu(seconds: float) -> None:
    """The kernel ends the process after so many more seconds of computing, also when nobody is left to do it."""
    used = sum(os.times()[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, hard))


def _leave_with(parent: int) -> None:
    """Ends the process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _load(blob: bytes) -> Callable[[dict, str], Any]:
    verifier = pickle.loads(blob)
    module = sys.modules.get(getattr(verifier, "__module__", ""))
    prepare = getattr(module, "prepare", None)
    if prepare is not None:
        prepare()
    return verifier


def _judge(verifier: Callable[[dict, str], Any], blob: bytes) -> list[Any]:
    answer, response = pickle.loads(blob)
    try:
        value, valid, reason = verifier(answer, response)
        return [float(value), bool(valid), str(reason)[:MAX_REASON]]
    except MemoryError:
        gc.collect()
        return [0.0, False, "out of memory"]
    except Exception as error:
        return [0.0, False, f"{type(error).__name__}: {error}"[:MAX_REASON]]


def _serve(connection: Connection, start_timeout_s: float, timeout_s: float) -> None:
    loaded: dict[bytes, Callable[[dict, str], Any]] = {}
    while True:
        kind, blob = connection.recv_bytes(), connection.recv_bytes()
        if kind == b"load":
            _allow_cpu(start_timeout_s)
            try:
                loaded = {blob: _load(blob)}
                reply: list[Any] = []
            except Exception as error:
                reply = [f"{type(error).__name__}: {error}"]
        else:
            _allow_cpu(timeout_s)
            reply = _judge(next(iter(loaded.values())), blob)
        connection.send_bytes(json.dumps(reply).encode())


def main(descriptor: int, parent: int, memory_mb: int, start_timeout_s: float, timeout_s: float) -> None:
    """Runs a worker on an inherited socket until the other side closes it."""
    importlib.invalidate_caches()
    _limit(memory_mb)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    # what a verifier prints, or a library warns about, must not disturb the run
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        _serve(connection, start_timeout_s, timeout_s)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the pool is closed
