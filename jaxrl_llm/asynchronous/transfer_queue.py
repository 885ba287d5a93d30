"""A table of samples between the tasks of a training run: each takes a row as soon as it is complete for that task."""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Consumer(NamedTuple):
    """The columns that a task reads, and how many neighbouring rows it takes only together (a group of GRPO)."""

    columns: tuple[str, ...]
    group_size: int = 1


class TransferQueue:
    """Rows are numbers of samples, columns what is known of them; every task takes every row once.

    A row is ready for a task when all columns of the task have been written, in whole groups ``row // group_size``, and
    is handed out in the order of becoming ready. So a task begins with the first rows while others are still being
    made. All methods may be called from any thread.

    From "AsyncFlow: An Asynchronous Streaming RL Framework for Efficient LLM Post-Training", arXiv:2507.01663,
    section 3. Differs from the paper in that the table lies in one process, not on storage units, and that rows are not
    balanced by their tokens.

    >>> queue = TransferQueue({"score": Consumer(("text",)), "train": Consumer(("text", "reward"), group_size=2)})
    >>> queue.write([0, 1], text=["a", "b"])
    >>> queue.take("score", 2)
    [0, 1]
    >>> queue.write([1], reward=[1.0])
    >>> queue.take("train", 2, timeout=0.0)
    []
    >>> queue.write([0], reward=[0.0])
    >>> queue.take("train", 2), queue.read([0, 1], "reward")
    ([0, 1], [0.0, 1.0])
    """

    def __init__(self, consumers: Mapping[str, Consumer]):
        """Raises ValueError for a task without columns or a group size below 1."""
        for name, task in consumers.items():
            if not task.columns or task.group_size < 1:
                raise ValueError(f"consumer {name!r} needs a column and a group_size of at least 1, not {task}")
        self._consumers = dict(consumers)
        self._cells: dict[str, dict[int, Any]] = {c: {} for task in consumers.values() for c in task.columns}
        self._complete: dict[str, dict[int, int]] = {name: {} for name in consumers}  # group -> complete rows
        self._ready: dict[str, deque[int]] = {name: deque() for name in consumers}
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def write(self, rows: Sequence[int], **columns: Sequence[Any]) -> None:
        """Fills cells, and tells every task.

        Raises:
          ValueError: for a column that no task reads, a cell that is full, or another number of values than rows.
        """
        with self._changed:
            for name, values in columns.items():
                if name not in self._cells:
                    raise ValueError(f"column {name!r} is read by no task; the columns are {', '.join(self._cells)}")
                if len(values) != len(rows):
                    raise ValueError(f"column {name!r} has {len(values)} values for {len(rows)} rows")
                for row, value in zip(rows, values, strict=True):
                    if row in self._cells[name]:
                        raise ValueError(f"row {row} has its {name!r} already; a cell is written once")
                    self._cells[name][row] = value
                    self._tell(name, row)
            self._changed.notify_all()

    def _tell(self, column: str, row: int) -> None:
        for name, task in self._consumers.items():
            if column in task.columns and all(row in self._cells[c] for c in task.columns):
                group, complete = row // task.group_size, self._complete[name]
                complete[group] = complete.get(group, 0) + 1
                if complete[group] == task.group_size:
                    self._ready[name].extend(range(group * task.group_size, (group + 1) * task.group_size))

    def take(self, task: str, count: int, *, timeout: float | None = None) -> list[int]:
        """``count`` rows that the task has not had, once they are ready; it will not get them again.

        Args:
          timeout: seconds to wait; None for as long as it takes. When they are over, or the table is closed with too
            few rows, the list is empty.

        Raises:
          ValueError: for an unknown task, or a count that is no multiple of its group size.
          BaseException: what another thread has handed to ``close``.
        """
        if task not in self._consumers:
            raise ValueError(f"task {task!r} is unknown; the tasks are {', '.join(self._consumers)}")
        if count < 1 or count % self._consumers[task].group_size:
            raise ValueError(f"count={count} must be a multiple of group_size={self._consumers[task].group_size}")
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready[task]) >= count, timeout)
            if self._error is not None:
                raise self._error
            if len(self._ready[task]) < count:
                return []
            return [self._ready[task].popleft() for _ in range(count)]

    def give_back(self, task: str, rows: Sequence[int]) -> None:
        """Rows that were taken and not done, for whoever takes next: their worker died or does not answer."""
        with self._changed:
            self._ready[task].extendleft(reversed(rows))
            self._changed.notify_all()

    def read(self, rows: Iterable[int], column: str) -> list[Any]:
        """The cells of a column; KeyError where one is empty."""
        with self._changed:
            return [self._cells[column][row] for row in rows]

    def forget(self, rows: Iterable[int]) -> None:
        """Frees the cells of rows that nobody reads any more; they cannot be written again for a ready task."""
        with self._changed:
            for row in rows:
                for cells in self._cells.values():
                    if row in cells:
                        cells[row] = None

    def close(self, error: BaseException | None = None) -> None:
        """Wakes whoever waits; ``error`` is raised there, so that a failure in one thread ends all."""
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()
