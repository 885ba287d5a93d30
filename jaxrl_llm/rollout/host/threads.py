"""One thread a slot to call Python worlds with, replaced where a call does not come back."""

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Done(NamedTuple):
    """What came of a call."""

    slot: int
    ticket: int
    value: Any
    error: BaseException | None


class _Hand:
    """A thread and the calls it has before it."""

    def __init__(self, slot: int, results: "queue.SimpleQueue[Done]"):
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        self.slot, self.results = slot, results
        threading.Thread(target=self._work, name=f"world-{slot}", daemon=True).start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            ticket, function, arguments = call
            try:
                done = Done(self.slot, ticket, function(*arguments), None)
            except BaseException as error:  # also SystemExit: whoever waits must hear of it
                done = Done(self.slot, ticket, None, error)
            self.results.put(done)


class Hands:
    """Calls functions, one at a time for each slot; a context manager.

    All calls for a slot come from the same thread, so that a world may keep what belongs to a thread (a database
    connection), until ``give_up``: a thread cannot be stopped, so it is left to itself and another takes its place.
    """

    def __init__(self) -> None:
        self._hands: dict[int, _Hand] = {}
        self._results: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._tickets = itertools.count(1)

    def __enter__(self) -> "Hands":
        return self

    def __exit__(self, *_: Any) -> None:
        for slot in list(self._hands):
            self.give_up(slot)

    def call(self, slot: int, function: Callable[..., Any], *arguments: Any) -> int:
        """Begins a call; its ticket is in the ``Done`` that comes of it."""
        if slot not in self._hands:
            self._hands[slot] = _Hand(slot, self._results)
        ticket = next(self._tickets)
        self._hands[slot].calls.put((ticket, function, arguments))
        return ticket

    def give_up(self, slot: int) -> None:
        """The slot's next call has a new thread; the old one goes when it has made the calls that it was given."""
        self._hands.pop(slot).calls.put(None)

    def done(self, timeout_s: float | None) -> Done | None:
        """The next call that has ended, waited for this long (None: without end); or None."""
        try:
            return self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
