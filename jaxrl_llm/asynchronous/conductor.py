"""An asynchronous run over workers: rollouts, scores, references and updates at the same time.

The conductor holds the table of rows and nobody else: it orders parts of steps, gives them out under leases, and hands
whole steps to the learner in their order. What is in the rows lies with it, or on storage units: then it knows where,
and workers read and write there. A row on a dead or late worker goes to another one, one on a dead storage unit is
rolled out again; a learner that died goes on from its checkpoint with the rows that it had since, kept until a
checkpoint covers them. Every wait has a deadline and a name in the report.
"""

import dataclasses
import pathlib
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.asynchronous import roles
from jaxrl_llm.asynchronous.leases import Exhausted, Leases
from jaxrl_llm.asynchronous.limits import Event, Limit, Limits, Report, Sizes, Stuck, check
from jaxrl_llm.asynchronous.threads import STALENESS
from jaxrl_llm.asynchronous.transfer_queue import Consumer, StorageUnit, TransferQueue
from jaxrl_llm.asynchronous.workers import Reply, Workers
from jaxrl_llm.distributed.weight_transfer import Cut, Manifest
from jaxrl_llm.errors import UserError
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.host import never
from jaxrl_llm.train.skipped import Streak
from jaxrl_llm.types import Rewards

ASK_S = 0.5  # between two looks at whether the run is asked to stop


@dataclasses.dataclass
class _Worker:
    name: str
    role: str
    ready: bool = False
    ticket: int | None = None
    task: str = ""
    row: int = -1
    hang_at: float = 0.0
    hang_s: float = 0.0
    rest_until: float = 0.0
    cuts: int = 0
    warm: set[str] = dataclasses.field(default_factory=set)
    # of a rollout worker that fetches weights beside its work: those in its host memory, which its next row takes, and
    # those under way; of the learner, which packs weights beside its work: whether it has been asked for them
    held: Manifest | None = None
    coming: Manifest | None = None
    fetching: int | None = None
    fetch_until: float = 0.0
    fetch_rest: float = 0.0


def run(
    crew: Workers, build: roles.Build, steps: int, *, folder: str, sizes: Sizes = Sizes(), limits: Limits = Limits(),
    checkpoint_every: int = 1, streak: Streak | None = None, stop: Callable[[], bool] = never,
) -> Report:  # fmt: skip
    """Trains until ``steps`` updates are done; the final state is the newest checkpoint in ``folder``.

    The rollout of step ``b`` begins when at least ``b - staleness`` updates are done, and its later parts
    (``make_program(go_on=...)``) use the newest weights of their moment: ``roles.VERSION`` has that of every token.
    With ``staleness`` 0 and one part the parameters are those of ``train.host.run``, bit for bit, whatever dies.

    In one process: ``run(Threads(), build, 100, folder="runs/a")``; on the cluster that ``ray.init`` has joined:
    ``run(RayWorkers({"learn": {"resources": {"TPU": 4}}}), build, 100, folder="/shared/a")``.

    Args:
      build: makes the program; called once here and in every worker. A module-level function where workers are
        processes.
      folder: of the checkpoints, one that a restarted learner reaches; a run that finds some there resumes.
      streak: of the updates that were skipped before, which goes on; None: there were none.
      stop: whether to end behind the update under way, of which a checkpoint is kept; the report then ends there.

    Raises:
      ValueError: for sizes that do not fit.
      Stuck: when a row fails or workers die more often than the limits allow, or an update raises.
      UserError: of a worker, for example for a reward that is not finite; for ``limits.skipped`` updates in a row
        that were not; or where another process trains in ``folder``.
    """
    program = build()
    check(sizes, program.online.prompts_per_step, checkpoint_every)
    streak = Streak(limits.skipped) if streak is None else streak
    work = _Run(crew, program, steps, sizes, limits, streak, stop)
    makers = {
        "roll": partial(roles.Roller, build, 4 * sizes.piece_bytes),
        "score": partial(roles.Judge, build),
        "refer": partial(roles.Judge, build),
        "learn": partial(roles.Learner, build, folder, checkpoint_every, sizes.piece_bytes, sizes.staleness + 1),
        "store": StorageUnit,
    }
    try:
        with checkpoint.locked(pathlib.Path(folder)):
            return work.go(makers)
    finally:
        crew.close()


class _Run:
    def __init__(
        self, crew: Workers, program: roles.Program, steps: int, sizes: Sizes, limits: Limits, streak: Streak,
        stop: Callable[[], bool],
    ):  # fmt: skip
        self.stop, self.stopping = stop, False
        self.crew, self.steps, self.sizes, self.limits = crew, steps, sizes, limits
        self.program, self.parts, self.drawn_parts = program, sizes.parts, len(program.rolls)
        last = f"rows{self.drawn_parts}"
        columns = (last, "rewards", *(["reference"] if program.reference else []))
        judged = Consumer((last,), batch_size=self.parts)
        tasks = {f"roll{k}": Consumer((f"rows{k}",)) for k in range(self.drawn_parts)}
        tasks |= {"score": judged} | ({"refer": judged} if program.reference else {})
        self.all_columns = tuple(dict.fromkeys([c for task in tasks.values() for c in task.columns] + [*columns]))
        self.table, self.columns = TransferQueue(tasks | {"learn": Consumer(columns, self.parts)}), columns
        self.tasks = tuple(tasks)
        self.leases = Leases(limits.tries)
        self.streak = streak
        self.counts = {"store": sizes.units, "roll": sizes.rollers, "score": sizes.judges, "learn": 1}
        if program.reference:
            self.counts["refer"] = sizes.references
        self.workers: dict[str, _Worker] = {}
        self.hired, self.restarts, self.started = 0, 0, time.monotonic()
        self.now: roles.Published | None = None  # where the learner is; None before it has said so
        self.manifest: Manifest | None = None  # the newest weights to fetch: packed while the learner goes on
        self.first = self.next_step = self.forgotten = 0
        self.drawn: dict[int, np.ndarray] = {}  # the prompts of a step
        self.whole: dict[int, list[int]] = {}  # steps whose rows are all there, until a checkpoint covers them
        self.facts: dict[int, roles.Rolled] = {}  # of rows: what is known of them wherever they lie
        self.units: list[str] = []  # names of the storage units; row r lies on number r modulo their number
        self.cells: dict[str, tuple[Any, Any]] = {}  # by unit: how others read and write there
        self.given = 0  # cells that workers were told to fill
        self.litter: dict[str, list[int]] = defaultdict(list)  # rows that a unit may drop
        self.stalled: list[tuple[tuple[str, int], str]] = []  # work whose unit did not answer, until it is known why
        self.doubted: set[str] = set()  # names of units of which that is not known yet
        self.spent: dict[int, Any] = {}  # orders of rows that trained, and were then lost with their unit
        self.missed = 0  # times in a row that the learner could not read
        self.behind: dict[int, float] = {}
        self.history: dict[int, dict[str, float]] = {}
        self.events, self.transfers, self.waits = [], [], defaultdict(float)

    # the loop

    def go(self, makers: dict[str, Any]) -> Report:
        self.makers = makers
        for role, count in self.counts.items():
            for _ in range(count):
                self._hire(role)
        while not self._over():
            if self.stopping:
                self._keep()
            else:
                self._order()
                self._hand_out()
            causes, began = self._causes(), time.monotonic()
            for reply in self.crew.wait(min(self._patience(began), ASK_S)):
                self._take_in(reply)
            for cause in causes:
                self.waits[cause] += time.monotonic() - began
            self._check_deadlines(time.monotonic())
        end = self.first if self.now is None else self.now.step
        history = [self.history[step] for step in range(self.first, end) if step in self.history]
        rows = [row for step in range(self.first, end) for row in self._rows(step)]
        seconds = time.monotonic() - self.started
        loads = {task: self.table.loads(task) for task in ("score", *(["refer"] if self.program.reference else []))}
        lesson = None if self.now is None else self.now.lesson
        return Report(history, rows, self.events, dict(self.waits), self.transfers, seconds, loads, lesson)

    def _over(self) -> bool:
        """Whether all updates are done; or, when the run is asked to stop, the one under way, and kept."""
        if self.now is not None and self.now.step >= self.steps:
            return True
        self.stopping = self.stopping or self.stop()
        if not self.stopping or any(worker.ticket is not None for worker in self._of("learn")):
            return False
        return self.now is None or self.now.saved >= self.now.step

    def _keep(self) -> None:
        """Nothing new begins; the learner keeps what it has as soon as it is idle."""
        for worker in self._of("learn", idle=True):
            self._call(worker, "keep", -1, self.limits.learn.hang_s, roles.keep)

    def _patience(self, now: float) -> float:
        workers = self.workers.values()
        busy = [w.hang_at for w in workers if w.ticket is not None]
        busy += [w.fetch_until for w in workers if w.fetching is not None]
        resting = [w.rest_until for w in workers if w.ticket is None and w.rest_until > now]
        resting += [w.fetch_rest for w in workers if w.fetching is None and w.fetch_rest > now]
        if not busy and not resting:
            raise Stuck(f"nobody has anything to do at step {self.now and self.now.step}: {', '.join(self._causes())}")
        return max(min([*busy, *resting, *(lease.until for lease in self.leases.held())]) - now, 0.0)

    def _note(self, kind: str, who: str, cause: str) -> None:
        self.events.append(Event(time.monotonic() - self.started, kind, who, cause))

    def _rows(self, step: int) -> list[int]:
        return list(range(step * self.parts, (step + 1) * self.parts))

    # workers

    def _hire(self, role: str) -> None:
        name, self.hired = f"{role}-{self.hired}", self.hired + 1
        worker = self.workers[name] = _Worker(name, role)
        self.crew.start(name, role, self.makers[role])
        first = roles.standing if role == "learn" else roles.ready
        self._call(worker, "start", -1, self.limits.start_s, first)
        if role == "learn":
            self.fetch = self.crew.aside(name, roles.pieces, self.limits.fetch_s)
        if role == "store":
            self.units = [name if unit not in self.workers else unit for unit in self.units]  # in a dead one's place
            self.units += [] if name in self.units else [name]
            both = (self.crew.aside(name, work, self.limits.fetch_s) for work in (roles.get_value, roles.put_value))
            self.cells[name] = tuple(both)

    def _call(self, worker: _Worker, task: str, row: int, hang_s: float, function: Any, *arguments: Any) -> None:
        worker.ticket = self.crew.call(worker.name, function, *arguments)
        worker.task, worker.row, worker.hang_s = task, row, hang_s
        worker.hang_at = time.monotonic() + hang_s

    def _of(self, role: str, *, idle: bool = False) -> list[_Worker]:
        now = time.monotonic()
        found = [w for w in self.workers.values() if w.role == role and w.ready]
        return [w for w in found if not idle or (w.ticket is None and w.rest_until <= now)]

    def _replace(self, worker: _Worker, cause: str) -> None:
        self._note("lost", worker.name, cause)
        self.crew.kill(worker.name)
        del self.workers[worker.name]
        self.doubted.discard(worker.name)
        self.table.leave(worker.name)
        for lease in self.leases.drop(worker.name):
            self._again(lease.item, f"{worker.name} lost ({cause})")
        if worker.role == "store":
            self._lose(self.units.index(worker.name))
        self.restarts += 1
        if self.restarts > self.limits.restarts:
            raise Stuck(f"restarts={self.limits.restarts} are used up; the last was {worker.name}: {cause}")
        self._hire(worker.role)

    # work

    def _order(self) -> None:
        """Writes the steps that may begin into the table."""
        while self.now is not None and self.next_step < self.steps and self._held_back() is None:
            step, now = self.next_step, self.now
            ids, own = None, now.sampler
            for other in range(now.step, step + 1):  # those before it were drawn, and not learned from yet
                ids, own = roles.draw(self.program, own, now.key, other)
            self.drawn[step] = ids
            orders = [roles.Order(step, k, part) for k, part in enumerate(np.split(ids, self.parts))]
            self.table.write(self._rows(step), rows0=[(order, None) for order in orders])
            self.next_step += 1

    def _held_back(self) -> str | None:
        """Why the next step may not begin."""
        if self.next_step - self.sizes.staleness > self.now.step:
            return "staleness"
        ahead = (self.next_step + 1 - self.now.step) * self.parts
        return "queue full" if self.sizes.capacity is not None and ahead > self.sizes.capacity else None

    def _hand_out(self) -> None:
        while rows := self.table.take("learn", self.parts, timeout=0.0):
            self.whole[rows[0] // self.parts] = rows
        self._ask_units()
        for unit in self._of("store", idle=True):
            if rows := self.litter.pop(unit.name, []):
                self._call(unit, "drop", -1, self.limits.start_s, roles.drop, rows)
        if not self._stored():
            return
        for worker in self._of("learn", idle=True):
            if self.now.step in self.whole and self.now.step < self.steps:
                self._learn(worker, self.now.step)
        if self._of("learn"):  # weights come from there
            self._send_weights()
            for worker in self._of("roll", idle=True):
                self._roll(worker)
        for role, column, function in (("score", "rewards", roles.score), ("refer", "reference", roles.refer)):
            for worker in self._of(role, idle=True):
                if (row := self._next(role, worker.name)) is not None:
                    _, rows = self.table.read([row], self.columns[0])[0]
                    self._lease(worker, role, row, function, rows, self._cell(row, column))

    def _stored(self) -> bool:
        """Whether all storage units are there, as far as is known."""
        return len(self._of("store")) == self.sizes.units and not self.doubted

    def _cell(self, row: int, column: str) -> roles.Cell | None:
        """Where a cell belongs; None: in this process.

        Every call has a cell of its own: one that comes late would else change rows that others have judged already.
        """
        if not self.units:
            return None
        unit, self.given = self.units[row % len(self.units)], self.given + 1
        return roles.Cell(unit, *self.cells[unit], row, f"{column}.{self.given}")

    def _next(self, task: str, by: str | None = None) -> int | None:
        """A row that nobody has done; one that was given back may have come in late after all."""
        while rows := self.table.take(task, 1, timeout=0.0, by=by):
            if not self.leases.is_done((task, rows[0])):
                return rows[0]
        return None

    def _roll(self, worker: _Worker) -> None:
        for part in reversed(range(self.drawn_parts)):  # what has begun goes first
            if (row := self._next(f"roll{part}")) is not None:
                order, rows = self.table.read([row], f"rows{part}")[0]
                if (manifest := self._weights_for(worker, order.step)) is None:
                    self.table.give_back(f"roll{part}", [row])
                    return
                sent = (self.fetch, manifest, self.now.key, order, rows, part, self._cell(row, f"rows{part + 1}"))
                self._lease(worker, f"roll{part}", row, roles.roll, *sent)
                return

    # weights

    def _send_weights(self) -> None:
        """Lets rollout workers fetch the newest weights, so many at a time, those first that are furthest behind.

        From "AsyncFlow", arXiv:2507.01663, section 4: they arrive while their worker generates, it takes them at its
        next row, and the others have theirs before or after.
        """
        now, workers = time.monotonic(), self._of("roll")
        free = self.sizes.swaps - sum(w.fetching is not None for w in workers)
        for worker in sorted(workers, key=lambda w: -1 if w.held is None else w.held.version):
            other = worker.held is None or worker.held.version != self.manifest.version
            if free > 0 and other and worker.fetching is None and worker.fetch_rest <= now:
                worker.coming, worker.fetch_until = self.manifest, now + self.limits.roll.hang_s
                sent = (roles.fetch_weights, self.fetch, worker.coming)
                worker.fetching, free = self.crew.beside(worker.name, *sent), free - 1

    def _weights_for(self, worker: _Worker, step: int) -> Manifest | None:
        """What a worker generates a row of a step with; None while all that it has is too old for that.

        Or too new, where the learner came back from its checkpoint.
        """
        found = worker.held if self.sizes.swaps else self.manifest
        fits = found is not None and step - self.sizes.staleness <= found.version <= step
        return found if fits else None

    def _await_weights(self, learner: _Worker) -> None:
        """Hears of the weights of the newest update as soon as they are packed; the learner need not wait for it."""
        if learner.fetching is None and self.manifest.version < self.now.step < self.steps:
            learner.fetch_until = time.monotonic() + self.limits.learn.hang_s
            learner.fetching = self.crew.beside(learner.name, roles.newest)

    def _fetched(self, worker: _Worker, reply: Reply) -> None:
        worker.fetching = None
        if reply.dead:
            self._replace(worker, _said(reply.error))
        elif worker.role == "learn":
            if reply.error is not None:
                raise Stuck(f"{worker.name}: {_said(reply.error)}") from reply.error
            self.manifest = reply.value
            self._await_weights(worker)
        elif reply.error is not None:
            worker.fetch_rest = self._cut(worker, reply.error)
            self._note("cut", worker.name, _said(reply.error))
        else:
            worker.held, worker.cuts = worker.coming, 0
            self.transfers.append(reply.value)

    def _cut(self, worker: _Worker, error: BaseException) -> float:
        """Notes weights that did not arrive, and says when to try again."""
        if isinstance(error, Cut):
            self.transfers.append(error.transfer)
        worker.cuts += 1
        for learner in self._of("learn", idle=True):  # is it still there?
            self._call(learner, "look", -1, self.limits.start_s, roles.standing)
        return time.monotonic() + min(0.1 * 2**worker.cuts, 10.0)

    # storage units

    def _missed(self, worker: _Worker, task: str, error: roles.Missing) -> None:
        """Someone could not read or write: work waits until the units have said whether they are there."""
        self._note("missing", worker.name, _said(error))
        self.missed += task == "learn"
        if self.missed > self.limits.tries:
            raise Stuck(f"{worker.name}: {_said(error)}") from error
        self.stalled += [(lease.item, _said(error)) for lease in self.leases.drop(worker.name)]
        self.doubted |= {unit.name for unit in self._of("store")}
        self._ask_units()
        self._settle()

    def _ask_units(self) -> None:
        """Those that are doubted: is it still there? One that is at work is asked behind that, or missed with it."""
        for unit in self._of("store", idle=True):
            if unit.name in self.doubted:
                self._call(unit, "look", -1, self.limits.start_s, roles.ready)

    def _settle(self) -> None:
        """Gives work back that had stalled, once all units are there."""
        if self._stored():
            stalled, self.stalled = self.stalled, []
            for item, cause in stalled:
                self._again(item, cause)

    def _lose(self, number: int) -> None:
        """What lay on a storage unit is made again; of rows that trained, if they are to train once more."""
        rows = range(self.forgotten * self.parts, self.next_step * self.parts)
        rows = [row for row in rows if row % len(self.units) == number]
        self.stalled = [(item, cause) for item, cause in self.stalled if item[1] not in rows]
        for row in rows:
            if row in self.spent:
                continue
            for task in self.tasks:
                self.leases.reopen((task, row))
            order = self.table.read([row], "rows0")
            self.table.lose([row], self.all_columns)
            self.whole.pop(row // self.parts, None)
            if row // self.parts < self.now.step:
                self.spent[row] = order
            else:  # of the step that the learner updates by, too: it may not have read them yet
                self.table.write([row], rows0=order)

    def _spend(self) -> None:
        """Takes rows out that are being made again, of steps that meanwhile trained by what was lost."""
        steps = [step for step in range(self.forgotten, self.now.step) if step not in self.whole]
        rows = {row for step in steps for row in self._rows(step) if row not in self.spent}
        rows = {row for row in rows if not all(self.leases.is_done((task, row)) for task in self.tasks)}
        self.stalled = [(item, cause) for item, cause in self.stalled if item[1] not in rows]
        for row in rows:
            for task in self.tasks:
                self.leases.reopen((task, row))
            self.spent[row] = self.table.read([row], "rows0")
            self.table.lose([row], self.all_columns)

    def _needed(self, row: int) -> bool:
        """Whether a row is to train, or may have to once more."""
        return row >= self.forgotten * self.parts and row not in self.spent

    def _respend(self, step: int) -> None:
        """Orders rows again that trained and were lost, when a learner came back from before them."""
        for row in [row for row in self.spent if row // self.parts >= step]:
            self.table.write([row], rows0=self.spent.pop(row))

    def _lease(self, worker: _Worker, task: str, row: int, function: Any, *arguments: Any) -> None:
        limit: Limit = getattr(self.limits, worker.role)
        extra = 0.0 if task in worker.warm else self.limits.first_s
        self.leases.grant((task, row), worker.name, time.monotonic() + limit.lease_s + extra)
        self._call(worker, task, row, limit.hang_s + extra, function, *arguments)

    def _learn(self, worker: _Worker, step: int) -> None:
        cells = [self.table.read(self.whole[step], column) for column in self.columns]
        rows = [part for _, part in cells[0]]
        if len(cells) == 3:
            rows = [roles.Referred(*both) for both in zip(rows, cells[2], strict=True)]
        self.behind[step] = float(max(step - min(self.facts[row].oldest for row in self.whole[step]), 0))
        sent = (step, self.drawn[step], rows, cells[1], step + 1 == self.steps)
        extra = 0.0 if "learn" in worker.warm else self.limits.first_s
        self._call(worker, "learn", -1, self.limits.learn.hang_s + extra, roles.learn, *sent)

    # replies

    def _take_in(self, reply: Reply) -> None:
        found = (w for w in self.workers.values() if reply.ticket in (w.ticket, w.fetching))
        if (worker := next(found, None)) is None:  # replaced since
            return
        if reply.ticket == worker.fetching:
            self._fetched(worker, reply)
            return
        task, row, worker.ticket = worker.task, worker.row, None
        if reply.dead:
            self._replace(worker, _said(reply.error))
        elif reply.error is not None:
            self._failed(worker, task, reply.error)
        elif isinstance(reply.value, roles.Published):
            worker.ready = True
            worker.warm.add(task)
            self._stands(reply.value)
            self._await_weights(worker)
        elif task in ("start", "look", "drop"):
            worker.ready = True
            if task == "look":
                self.doubted.discard(worker.name)
            self._settle()
        else:
            self._done(worker, task, row, reply.value)

    def _done(self, worker: _Worker, task: str, row: int, value: Any) -> None:
        worker.warm.add(task)
        rolled = isinstance(value, roles.Rolled)
        if rolled and value.transfer and not self.sizes.swaps:  # else it was fetched before
            worker.cuts = 0
            self.transfers.append(value.transfer)
        where = value.rows if rolled else value
        if isinstance(where, roles.Cell) and where.unit not in self.workers:
            return  # it came in on a unit that is no more: the row was given out again with it
        if not self._needed(row) and not self.leases.is_done((task, row)):
            return  # its step trained while it was made again
        if not self.leases.done((task, row), worker.name):
            self._note("repeated", worker.name, f"{task} of row {row} was done before")
            return
        if rolled:
            part = int(task.removeprefix("roll"))
            order, _ = self.table.read([row], f"rows{part}")[0]
            self.facts[row] = value._replace(rows=None)
            self.table.weigh([row], [value.tokens])
            self.table.write([row], **{f"rows{part + 1}": [(order, value.rows)]})
        else:
            self.table.write([row], **{"rewards" if task == "score" else "reference": [value]})

    def _failed(self, worker: _Worker, task: str, error: BaseException) -> None:
        if isinstance(error, UserError):  # a reward that is no number would be none at the next try either
            raise error
        if isinstance(error, roles.Missing):
            self._missed(worker, task, error)
            return
        if task in ("start", "learn", "look", "drop", "keep"):
            raise Stuck(f"{worker.name}: {_said(error)}") from error
        if isinstance(error, Cut):
            worker.rest_until = self._cut(worker, error)
        self._note("cut" if isinstance(error, Cut) else "failed", worker.name, _said(error))
        for lease in self.leases.drop(worker.name):
            self._again(lease.item, _said(error))

    def _again(self, item: tuple[str, int], cause: str) -> None:
        task, row = item
        try:
            if self.leases.fail(item, cause):
                self.table.give_back(task, [row])
        except Exhausted as error:
            if task != "score":
                raise Stuck(str(error)) from error
            self._note("invalid", "conductor", str(error))
            self.leases.done(item, "conductor")
            count = self.facts[row].count
            self.table.write([row], rewards=[Rewards(np.zeros(count, np.float32), np.zeros(count, bool))])

    def _stands(self, now: roles.Published) -> None:
        """What the learner says of itself: one update more, its start, or fewer updates after a restart."""
        before, self.now, self.manifest = self.now, now, now.manifest
        if before is None:
            self.first = self.next_step = self.forgotten = now.step
        elif now.step < self.forgotten:
            raise Stuck(f"the checkpoint of step {self.forgotten} is damaged, its rows are gone; start the run again")
        elif now.step < before.step:
            self._note("resumed", "learner", f"step {before.step} again from the checkpoint of step {now.step}")
            self._respend(now.step)
            for worker in self._of("roll"):
                worker.held = None
        if now.metrics and now.step > self.first:
            done = now.step - 1
            self.history[done] = now.metrics | {STALENESS: self.behind[done]}
            if before is None or now.step > before.step:  # not of an update that is done again
                self.streak.see(now.metrics, now.step)
        self.missed = 0
        self._spend()
        while self.forgotten < min(now.saved, now.step):
            self.table.forget(self._rows(self.forgotten))
            for row in self._rows(self.forgotten):
                self.facts.pop(row, None)
                self.spent.pop(row, None)
                if self.units:
                    self.litter[self.units[row % len(self.units)]].append(row)
            self.whole.pop(self.forgotten, None)
            self.drawn.pop(self.forgotten, None)
            self.forgotten += 1

    # deadlines and waits

    def _check_deadlines(self, now: float) -> None:
        for lease in self.leases.lapse(now):
            cause = f"no answer from {lease.holder} in time"
            self._note("late", str(lease.holder), f"{lease.item[0]} of row {lease.item[1]}: {cause}")
            self._again(lease.item, cause)
        for worker in list(self.workers.values()):
            if worker.ticket is not None and worker.hang_at <= now:
                what = f"{worker.task} of row {worker.row}" if worker.row >= 0 else worker.task
                self._replace(worker, f"no answer to {what} in {worker.hang_s:g} s")
            elif worker.fetching is not None and worker.fetch_until <= now:
                which, limit = (self.now.step, self.limits.learn) if worker.role == "learn" else (
                    worker.coming.version, self.limits.roll)  # fmt: skip
                self._replace(worker, f"no weights of version {which} in {limit.hang_s:g} s")

    def _causes(self) -> list[str]:
        """Who waits for what at this moment."""
        if not self._of("learn"):
            return ["learner: its start", *("roller: the learner" for _ in self._of("roll", idle=True))]
        causes = [] if self._stored() else ["all: a storage unit"]
        idle = self._of("roll", idle=True)
        if idle and len(idle) == len(self._of("roll")):
            causes.append("rollout: nobody generates")
        if self._of("learn", idle=True) and self.now.step not in self.whole:
            rows, last = self._rows(self.now.step), f"roll{self.drawn_parts - 1}"
            stages = ((last, "rollouts"), ("score", "rewards"), ("refer", "reference"))
            pending = [name for task, name in stages if not all(self.leases.is_done((task, r)) for r in rows)]
            causes.append(f"learner: {pending[0]}")
        held = "the last step" if self.next_step >= self.steps else self._held_back()
        return causes + [f"roller: {held or 'weights'}" for _ in idle]


def _said(error: BaseException | None) -> str:
    """The first line of what an error says, and the last, where the text of another process ends with its cause."""
    text = [line.strip() for line in str(error).strip().splitlines()] if error is not None else []
    lines = [*text[:1], *(text[-1:] if len(text) > 1 else [])]
    return f"{type(error).__name__}: {' ... '.join(lines)}" if lines else type(error).__name__
