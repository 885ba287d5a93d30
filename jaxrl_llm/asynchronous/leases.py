"""Who works on which row until when: a row of a dead or late worker is given to another, and is done once."""

from collections.abc import Hashable
from typing import NamedTuple

Item = tuple[str, int]  # task, row


class Lease(NamedTuple):
    """``holder`` works on ``item``; others may from ``until`` on (seconds of the caller's clock)."""

    item: Item
    holder: Hashable
    until: float


class Exhausted(RuntimeError):
    """A row failed too often: the message says how."""


class Leases:
    """Leases of the rows of a table, with a count of the tries.

    Several may hold a lease of the same item (one that does not answer, and who came after); the first to be done
    counts, what the others bring is dropped. Nothing here looks at a clock or waits.

    >>> leases = Leases(tries=2)
    >>> leases.grant(("score", 7), "a", until=3.0)
    >>> leases.lapse(4.0)
    [Lease(item=('score', 7), holder='a', until=3.0)]
    >>> leases.grant(("score", 7), "b", until=9.0)
    >>> leases.done(("score", 7), "a"), leases.done(("score", 7), "b")
    (True, False)
    """

    def __init__(self, tries: int):
        """Raises ValueError for fewer tries than 1."""
        if tries < 1:
            raise ValueError(f"tries={tries} must be at least 1")
        self._tries = tries
        self._held: dict[tuple[Item, Hashable], Lease] = {}
        self._done: set[Item] = set()
        self._failures: dict[Item, list[str]] = {}

    def grant(self, item: Item, holder: Hashable, until: float) -> None:
        """Raises ValueError where the item is done, or the holder has it."""
        if item in self._done:
            raise ValueError(f"{item} is done; it is not given out again")
        if (item, holder) in self._held:
            raise ValueError(f"{holder} holds {item} already")
        self._held[item, holder] = Lease(item, holder, until)

    def done(self, item: Item, holder: Hashable) -> bool:
        """Whether this is the first time; if not, the result is to be dropped."""
        self._held.pop((item, holder), None)
        first = item not in self._done
        self._done.add(item)
        self._failures.pop(item, None)
        return first

    def reopen(self, item: Item) -> None:
        """What was made of an item is gone: it is to be done again, as if nobody had begun."""
        for key in [key for key in self._held if key[0] == item]:
            del self._held[key]
        self._done.discard(item)
        self._failures.pop(item, None)

    def is_done(self, item: Item) -> bool:
        """Whether someone was done with the item."""
        return item in self._done

    def held(self) -> list[Lease]:
        """Leases that neither ended nor lapsed."""
        return list(self._held.values())

    def lapse(self, now: float) -> list[Lease]:
        """Leases over their time; they end here, though their holders may still be first."""
        over = [lease for lease in self._held.values() if lease.until <= now]
        for lease in over:
            del self._held[lease.item, lease.holder]
        return over

    def drop(self, holder: Hashable) -> list[Lease]:
        """The leases of a holder that is no more."""
        lost = [lease for lease in self._held.values() if lease.holder == holder]
        for lease in lost:
            del self._held[lease.item, lease.holder]
        return lost

    def fail(self, item: Item, cause: str) -> bool:
        """Notes a try that came to nothing; True when the item is to be tried again, not where someone did it.

        Raises:
          Exhausted: after the last try, with the cause of each.
        """
        if item in self._done:
            return False
        causes = self._failures.setdefault(item, [])
        causes.append(cause)
        if len(causes) >= self._tries:
            raise Exhausted(f"{item[0]} of row {item[1]} failed {len(causes)} times: {'; '.join(causes)}")
        return True
