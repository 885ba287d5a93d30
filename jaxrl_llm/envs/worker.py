"""The other end of ``processes``: one process that plays episodes, one call at a time, until its connection closes."""

import json
import os
import pickle
import resource
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

MOST_REASON = 500  # letters


def _leave_with(parent: int) -> None:
    """Ends the process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _answer(world: Any, episodes: dict[int, Any], request: tuple) -> dict[str, Any]:
    kind, number, *given = request
    if kind == "close":
        state = episodes.pop(number)
        if world.close is not None:
            world.close(state)
        return {}
    if kind == "reset":
        episodes[number] = world.reset(*given)
        said: Any = world.first(episodes[number])
    else:
        found = world.step(episodes[number], *given)
        episodes[number] = found.state
        said = [found.text, float(found.reward), bool(found.done), bool(found.valid), bool(found.cut), found.reason,
                int(found.mark)]  # fmt: skip
    return {"said": said, "identity": int(world.identity(episodes[number]))}


def _reply(world: Any, episodes: dict[int, Any], blob: bytes) -> dict[str, Any]:
    try:
        return _answer(world, episodes, pickle.loads(blob))
    except BaseException as error:  # also SystemExit: the package does not decide when this process ends
        return {"error": type(error).__name__, "message": str(error)[:MOST_REASON]}


def main(descriptor: int, parent: int, memory_mb: int) -> None:
    """Makes the world that the first message names, then plays until the other side closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    connection, episodes = Connection(descriptor), {}
    try:
        blob = connection.recv_bytes()
        try:
            world, ready = pickle.loads(blob)(), {}
        except Exception as error:
            world, ready = None, {"error": type(error).__name__, "message": str(error)[:MOST_REASON]}
        connection.send_bytes(json.dumps(ready).encode())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what packages warn about must not disturb the run
        while True:
            connection.send_bytes(json.dumps(_reply(world, episodes, connection.recv_bytes())).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody asks any more
