"""A table of samples between the tasks of a training run: each takes a row as soon as it is complete for that task.

The control plane knows which cells are written, who had them and what a row weighs, never what is in them; values lie
on storage units, each with rows of its own, in this process or in others.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Consumer(NamedTuple):
    """The columns that a task reads, how many neighbouring rows it takes only together (a group of GRPO), and how many
    make a batch: where rows are balanced, those of an earlier batch go first all the same."""

    columns: tuple[str, ...]
    group_size: int = 1
    batch_size: int | None = None  # None: all rows are one batch


class StorageUnit:
    """The cells of some rows; it knows no task and may lie in any process. All methods may be called from any thread.

    From "AsyncFlow: An Asynchronous Streaming RL Framework for Efficient LLM Post-Training", arXiv:2507.01663,
    section 3 (data plane).

    >>> unit = StorageUnit()
    >>> unit.put(4, "text", "a")
    >>> unit.get(4, "text"), len(unit)
    ('a', 1)
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._cells)

    def put(self, row: int, column: str, value: Any) -> None:
        """Fills a cell; one that is full is filled anew, by who did not know."""
        with self._lock:
            self._cells[row, column] = value

    def get(self, row: int, column: str) -> Any:
        """What lies in a cell; KeyError where it is empty."""
        with self._lock:
            return self._cells[row, column]

    def drop(self, rows: Iterable[int]) -> None:
        """Frees the cells of rows that nobody reads any more."""
        gone = set(rows)
        with self._lock:
            self._cells = {key: value for key, value in self._cells.items() if key[0] not in gone}


class ControlPlane:
    """Which rows are ready for which task and who had them; every task gets every row once.

    A row is ready for a task when all columns of the task have been written, in whole groups ``row // group_size``. It
    is handed out in the order of becoming ready, or, to consumers that name themselves, so that all of them get the
    same weight. All methods may be called from any thread.

    From "AsyncFlow", arXiv:2507.01663, section 3 (control plane). Differs from the paper in that one object holds the
    controllers of all tasks, and in the rule of the balance, which the paper leaves open: a consumer that had no more
    than the others gets the heaviest rows that are ready, one that had more the lightest.

    >>> control = ControlPlane({"score": Consumer(("text",))})
    >>> control.written([0, 1, 2, 3], "text")
    >>> control.weigh([0, 1, 2, 3], [9, 1, 2, 7])
    >>> [control.take("score", 1, by=worker) for worker in ("a", "b", "b", "a")]
    [[0], [3], [2], [1]]
    """

    def __init__(self, consumers: Mapping[str, Consumer]):
        """Raises ValueError for a task without columns or a group size below 1."""
        for name, task in consumers.items():
            if not task.columns or task.group_size < 1:
                raise ValueError(f"consumer {name!r} needs a column and a group_size of at least 1, not {task}")
        self._consumers = dict(consumers)
        self._written: dict[str, set[int]] = {c: set() for task in consumers.values() for c in task.columns}
        self._complete: dict[str, dict[int, int]] = {name: {} for name in consumers}  # group -> complete rows
        self._ready: dict[str, list[int]] = {name: [] for name in consumers}
        self._weights: dict[int, float] = {}
        self._loads: dict[str, dict[str, float]] = {name: {} for name in consumers}  # of those that named themselves
        self._left: dict[str, list[float]] = {name: [] for name in consumers}  # loads of consumers that are no more
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def check(self, rows: Sequence[int], column: str, count: int) -> None:
        """Raises ValueError for a column that no task reads, a cell that is full, or another number of values."""
        with self._changed:
            if column not in self._written:
                raise ValueError(f"column {column!r} is read by no task; the columns are {', '.join(self._written)}")
            if count != len(rows):
                raise ValueError(f"column {column!r} has {count} values for {len(rows)} rows")
            for row in rows:
                if row in self._written[column]:
                    raise ValueError(f"row {row} has its {column!r} already; a cell is written once")

    def written(self, rows: Sequence[int], column: str) -> None:
        """Tells every task that the cells of a column are there; ValueError as ``check``."""
        with self._changed:
            self.check(rows, column, len(rows))
            for row in rows:
                self._written[column].add(row)
                self._tell(column, row)
            self._changed.notify_all()

    def _complete_for(self, task: Consumer, row: int) -> bool:
        return all(row in self._written[c] for c in task.columns)

    def _tell(self, column: str, row: int) -> None:
        for name, task in self._consumers.items():
            if column in task.columns and self._complete_for(task, row):
                group, complete = row // task.group_size, self._complete[name]
                complete[group] = complete.get(group, 0) + 1
                if complete[group] == task.group_size:
                    self._ready[name].extend(range(group * task.group_size, (group + 1) * task.group_size))

    def weigh(self, rows: Sequence[int], weights: Sequence[float | int]) -> None:
        """What rows weigh, their tokens for example; unweighed ones weigh 1."""
        with self._changed:
            self._weights |= dict(zip(rows, map(float, weights), strict=True))

    def unweigh(self, rows: Iterable[int]) -> None:
        """Forgets what rows weigh that nobody takes any more."""
        with self._changed:
            for row in rows:
                self._weights.pop(row, None)

    def take(self, task: str, count: int, *, timeout: float | None = None, by: str | None = None) -> list[int]:
        """``count`` rows that the task has not had, once they are ready; it will not get them again.

        Args:
          timeout: seconds to wait; None for as long as it takes. When they are over, or the table is closed with too
            few rows, the list is empty.
          by: the consumer of that task who takes them, so that all of its consumers get the same weight; None: rows go
            in the order of becoming ready.

        Raises:
          ValueError: for an unknown task, or a count that is no multiple of its group size.
          BaseException: what another thread has handed to ``close``.
        """
        if task not in self._consumers:
            raise ValueError(f"task {task!r} is unknown; the tasks are {', '.join(self._consumers)}")
        size = self._consumers[task].group_size
        if count < 1 or count % size:
            raise ValueError(f"count={count} must be a multiple of group_size={size}")
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready[task]) >= count, timeout)
            if self._error is not None:
                raise self._error
            if len(self._ready[task]) < count:
                return []
            found = self._chosen(task, size, by)[:count]
            taken = set(found)
            self._ready[task] = [row for row in self._ready[task] if row not in taken]
            if by is not None:
                self._loads[task][by] += sum(self._weights.get(row, 1.0) for row in found)
            return found

    def _chosen(self, task: str, size: int, by: str | None) -> list[int]:
        """The rows that are ready in the order in which this consumer is to have them, whole groups together."""
        ready, loads, batch = self._ready[task], self._loads[task], self._consumers[task].batch_size
        if by is None:
            return list(ready)
        if by not in loads:
            loads[by] = self._left[task].pop() if self._left[task] else 0.0
        own = loads[by]
        groups = [ready[k : k + size] for k in range(0, len(ready), size)]
        sign = -1.0 if own * len(loads) <= sum(loads.values()) else 1.0  # the heaviest first, or the lightest

        def turn(rows: list[int]) -> tuple[int, float]:
            return rows[0] // batch if batch else 0, sign * sum(self._weights.get(row, 1.0) for row in rows)

        return [row for rows in sorted(groups, key=turn) for row in rows]  # stable

    def loads(self, task: str) -> dict[str, float]:
        """The weight that every consumer of a task has had."""
        with self._changed:
            return dict(self._loads[task])

    def give_back(self, task: str, rows: Sequence[int], *, by: str | None = None) -> None:
        """Rows that were taken and not done, for whoever takes next: their worker died or does not answer."""
        with self._changed:
            self._ready[task] = [*rows, *self._ready[task]]
            if by is not None:
                self._loads[task][by] -= sum(self._weights.get(row, 1.0) for row in rows)
            self._changed.notify_all()

    def leave(self, by: str) -> None:
        """A consumer that is no more: whoever comes next goes on with what it had."""
        with self._changed:
            for task, loads in self._loads.items():
                if by in loads:
                    self._left[task].append(loads.pop(by))

    def lose(self, rows: Iterable[int], columns: Sequence[str]) -> None:
        """Cells that are gone: they may be written again, and their rows are then ready again, had or not."""
        with self._changed:
            for row in rows:
                for name, task in self._consumers.items():
                    if not set(columns) & set(task.columns) or not self._complete_for(task, row):
                        continue
                    group = row // task.group_size
                    self._complete[name][group] -= 1
                    self._ready[name] = [r for r in self._ready[name] if r // task.group_size != group]
                for column in columns:
                    self._written[column].discard(row)

    def close(self, error: BaseException | None = None) -> None:
        """Wakes whoever waits; ``error`` is raised there, so that a failure in one thread ends all."""
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()


class TransferQueue(ControlPlane):
    """A control plane with its storage units in this process; rows are numbers of samples, columns what is known.

    So a task begins with the first rows while others are still being made, and who copies a value holds up neither
    the control plane nor the other units.

    From "AsyncFlow", arXiv:2507.01663, section 3.

    >>> tasks = {"score": Consumer(("text",)), "train": Consumer(("text", "reward"), group_size=2)}
    >>> queue = TransferQueue(tasks, units=2)
    >>> queue.write([0, 1], text=["a", "b"])
    >>> queue.take("score", 2), [len(unit) for unit in queue.units]
    ([0, 1], [1, 1])
    >>> queue.write([1], reward=[1.0])
    >>> queue.take("train", 2, timeout=0.0)
    []
    >>> queue.write([0], reward=[0.0])
    >>> queue.take("train", 2), queue.read([0, 1], "reward")
    ([0, 1], [0.0, 1.0])
    """

    def __init__(self, consumers: Mapping[str, Consumer], *, units: int = 1):
        """Raises ValueError as ``ControlPlane``, and for no unit."""
        super().__init__(consumers)
        if units < 1:
            raise ValueError(f"units={units} must be at least 1")
        self.units = tuple(StorageUnit() for _ in range(units))

    def unit(self, row: int) -> StorageUnit:
        """Where a row lies, all of its columns: rows go around the units."""
        return self.units[row % len(self.units)]

    def write(self, rows: Sequence[int], **columns: Sequence[Any]) -> None:
        """Fills cells, and tells every task.

        Raises:
          ValueError: for a column that no task reads, a cell that is full, or another number of values than rows.
        """
        for name, values in columns.items():
            self.check(rows, name, len(values))
            for row, value in zip(rows, values, strict=True):
                self.unit(row).put(row, name, value)
            self.written(rows, name)  # now, and no sooner, they can be taken

    def read(self, rows: Iterable[int], column: str) -> list[Any]:
        """The cells of a column; KeyError where one is empty."""
        return [self.unit(row).get(row, column) for row in rows]

    def forget(self, rows: Iterable[int]) -> None:
        """Frees the cells of rows that nobody reads any more; they cannot be written again."""
        rows = list(rows)
        self.unweigh(rows)
        for unit in self.units:
            unit.drop(row for row in rows if self.unit(row) is unit)
