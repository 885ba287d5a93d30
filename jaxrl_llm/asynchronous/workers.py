"""Workers that hold a state and apply functions to it, as the conductor sees them; here as threads of one process."""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Reply(NamedTuple):
    """The end of a call: a value, an error, or a worker that is no more."""

    ticket: int
    value: Any = None
    error: BaseException | None = None
    dead: bool = False


@runtime_checkable
class Workers(Protocol):
    """Where roles run. No method but ``wait`` takes long; all are called from one thread."""

    def start(self, name: str, role: str, make: Callable[[], Any]) -> None:
        """A worker whose state is ``make()``; its first call waits for that."""

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Begins ``function(state, *arguments)``; the ticket comes back in a ``Reply``, one for each call."""

    def beside(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """As ``call``, beside what the worker does and not behind it; of a worker that has answered before."""

    def aside(self, name: str, function: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
        """``function`` of a worker's state for other workers to call, while that worker does something else."""

    def wait(self, timeout_s: float) -> list[Reply]:
        """What has ended, at least one if something ends in time."""

    def kill(self, name: str) -> None:
        """Ends a worker at once; its calls are never heard of again."""

    def close(self) -> None:
        """Ends all workers."""


class Threads:
    """A ``Workers`` in this process. A killed worker goes on unheard, since a thread cannot be ended; SystemExit in a
    function is its death."""

    def __init__(self) -> None:
        self._inboxes: dict[str, queue.SimpleQueue] = {}
        self._states: dict[str, Any] = {}
        self._replies: queue.SimpleQueue[tuple[str, Reply]] = queue.SimpleQueue()
        self._tickets = 0

    def start(self, name: str, role: str, make: Callable[[], Any]) -> None:
        """See ``Workers``."""
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._inboxes[name] = inbox
        threading.Thread(target=self._work, args=(name, inbox, make), name=name, daemon=True).start()

    def _work(self, name: str, inbox: queue.SimpleQueue, make: Callable[[], Any]) -> None:
        ready = False
        while (item := inbox.get()) is not None:
            ticket, function, arguments = item
            try:
                if not ready:
                    self._states[name], ready = make(), True
                reply = Reply(ticket, function(self._states[name], *arguments))
            except SystemExit as error:
                self._states.pop(name, None)
                self._replies.put((name, Reply(ticket, error=error, dead=True)))
                return
            except Exception as error:
                reply = Reply(ticket, error=error, dead=not ready)
            self._replies.put((name, reply))

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """See ``Workers``."""
        self._tickets += 1
        self._inboxes[name].put((self._tickets, function, arguments))
        return self._tickets

    def beside(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """See ``Workers``."""
        self._tickets += 1
        work = (name, self._tickets, self._states[name], function, arguments)
        threading.Thread(target=self._beside, args=work, name=f"{name}-beside", daemon=True).start()
        return self._tickets

    def _beside(self, name: str, ticket: int, state: Any, function: Callable[..., Any], arguments: Any) -> None:
        try:
            reply = Reply(ticket, function(state, *arguments))
        except SystemExit as error:
            self._states.pop(name, None)
            reply = Reply(ticket, error=error, dead=True)
        except Exception as error:
            reply = Reply(ticket, error=error)
        self._replies.put((name, reply))

    def aside(self, name: str, function: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
        """See ``Workers``."""
        return partial(self._aside, name, function)

    def _aside(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name not in self._states:
            raise ConnectionError(f"{name} is gone")
        return function(self._states[name], *arguments)

    def wait(self, timeout_s: float) -> list[Reply]:
        """See ``Workers``."""
        found, deadline = [], time.monotonic() + timeout_s
        while not found or not self._replies.empty():
            try:
                name, reply = self._replies.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                return found
            if name in self._inboxes:
                found.append(reply)
        return found

    def kill(self, name: str) -> None:
        """See ``Workers``."""
        self._inboxes.pop(name).put(None)
        self._states.pop(name, None)

    def close(self) -> None:
        """See ``Workers``."""
        for name in list(self._inboxes):
            self.kill(name)
