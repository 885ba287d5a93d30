"""An asynchronous run over workers: rollouts, scores, references and updates at the same time.

The conductor holds the table of rows and nobody else: it orders parts of steps, gives them out under leases, and hands
whole steps to the learner in their order. A row on a dead or late worker goes to another one; a learner that died goes
on from its checkpoint with the rows that it had since, kept until a checkpoint covers them. Every wait has a deadline
and a name in the report.
"""

import dataclasses
import pathlib
import time
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.asynchronous import roles
from jaxrl_llm.asynchronous.leases import Exhausted, Leases
from jaxrl_llm.asynchronous.limits import Event, Limit, Limits, Report, Sizes, Stuck, check
from jaxrl_llm.asynchronous.threads import STALENESS
from jaxrl_llm.asynchronous.transfer_queue import Consumer, TransferQueue
from jaxrl_llm.asynchronous.workers import Reply, Workers
from jaxrl_llm.distributed.weight_transfer import Cut
from jaxrl_llm.errors import UserError
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.skipped import Streak
from jaxrl_llm.types import Rewards


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


def run(
    crew: Workers, build: roles.Build, steps: int, *, folder: str, sizes: Sizes = Sizes(), limits: Limits = Limits(),
    checkpoint_every: int = 1,
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

    Raises:
      ValueError: for sizes that do not fit.
      Stuck: when a row fails or workers die more often than the limits allow, or an update raises.
      UserError: of a worker, for example for a reward that is not finite; for ``limits.skipped`` updates in a row
        that were not; or where another process trains in ``folder``.
    """
    program = build()
    check(sizes, program.online.prompts_per_step, checkpoint_every)
    work = _Run(crew, program, steps, sizes, limits)
    makers = {
        "roll": partial(roles.Roller, build, 4 * sizes.piece_bytes),
        "score": partial(roles.Judge, build),
        "refer": partial(roles.Judge, build),
        "learn": partial(roles.Learner, build, folder, checkpoint_every, sizes.piece_bytes, sizes.staleness + 1),
    }
    try:
        with checkpoint.locked(pathlib.Path(folder)):
            return work.go(makers)
    finally:
        crew.close()


class _Run:
    def __init__(self, crew: Workers, program: roles.Program, steps: int, sizes: Sizes, limits: Limits):
        self.crew, self.steps, self.sizes, self.limits = crew, steps, sizes, limits
        self.program, self.parts, self.drawn_parts = program, sizes.parts, len(program.rolls)
        last = f"rows{self.drawn_parts}"
        columns = (last, "rewards", *(["reference"] if program.reference else []))
        tasks = {f"roll{k}": Consumer((f"rows{k}",)) for k in range(self.drawn_parts)}
        tasks |= {"score": Consumer((last,))} | ({"refer": Consumer((last,))} if program.reference else {})
        self.table, self.columns = TransferQueue(tasks | {"learn": Consumer(columns, self.parts)}), columns
        self.leases = Leases(limits.tries)
        self.streak = Streak(limits.skipped)
        self.counts = {"roll": sizes.rollers, "score": sizes.judges, "learn": 1}
        if program.reference:
            self.counts["refer"] = sizes.references
        self.workers: dict[str, _Worker] = {}
        self.hired, self.restarts, self.started = 0, 0, time.monotonic()
        self.now: roles.Published | None = None  # where the learner is; None before it has said so
        self.first = self.next_step = self.forgotten = 0
        self.chain: Any = None  # the curriculum after the newest draw
        self.drawn: dict[int, tuple[np.ndarray, Any]] = {}
        self.whole: dict[int, list[int]] = {}  # steps whose rows are all there, until a checkpoint covers them
        self.behind: dict[int, float] = {}
        self.history: dict[int, dict[str, float]] = {}
        self.events, self.transfers, self.waits = [], [], defaultdict(float)

    # the loop

    def go(self, makers: dict[str, Any]) -> Report:
        self.makers = makers
        for role, count in self.counts.items():
            for _ in range(count):
                self._hire(role)
        while self.now is None or self.now.step < self.steps:
            self._order()
            self._hand_out()
            causes, began = self._causes(), time.monotonic()
            for reply in self.crew.wait(self._patience(began)):
                self._take_in(reply)
            for cause in causes:
                self.waits[cause] += time.monotonic() - began
            self._check_deadlines(time.monotonic())
        history = [self.history[step] for step in range(self.first, self.steps) if step in self.history]
        rows = [row for step in range(self.first, self.steps) for row in self._rows(step)]
        seconds = time.monotonic() - self.started
        return Report(history, rows, self.events, dict(self.waits), self.transfers, seconds)

    def _patience(self, now: float) -> float:
        busy = [w.hang_at for w in self.workers.values() if w.ticket is not None]
        resting = [w.rest_until for w in self.workers.values() if w.ticket is None and w.rest_until > now]
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
        for lease in self.leases.drop(worker.name):
            self._again(lease.item, f"{worker.name} lost ({cause})")
        self.restarts += 1
        if self.restarts > self.limits.restarts:
            raise Stuck(f"restarts={self.limits.restarts} are used up; the last was {worker.name}: {cause}")
        self._hire(worker.role)

    # work

    def _order(self) -> None:
        """Writes the steps that may begin into the table."""
        while self.now is not None and self.next_step < self.steps and self._held_back() is None:
            step, now = self.next_step, self.now
            own = now.sampler if now.step == step or self.chain is None else self.chain
            ids, self.chain = roles.draw(self.program, own, now.key, step)
            self.drawn[step] = ids, self.chain
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
        for worker in self._of("learn", idle=True):
            if self.now.step in self.whole and self.now.step < self.steps:
                self._learn(worker, self.now.step)
        if self._of("learn"):  # weights come from there
            for worker in self._of("roll", idle=True):
                self._roll(worker)
        for role, function in (("score", roles.score), ("refer", roles.refer)):
            for worker in self._of(role, idle=True):
                if (row := self._next(role)) is not None:
                    _, rows = self.table.read([row], self.columns[0])[0]
                    self._lease(worker, role, row, function, rows)

    def _next(self, task: str) -> int | None:
        """A row that nobody has done; one that was given back may have come in late after all."""
        while rows := self.table.take(task, 1, timeout=0.0):
            if not self.leases.is_done((task, rows[0])):
                return rows[0]
        return None

    def _roll(self, worker: _Worker) -> None:
        for part in reversed(range(self.drawn_parts)):  # what has begun goes first
            if (row := self._next(f"roll{part}")) is not None:
                order, rows = self.table.read([row], f"rows{part}")[0]
                sent = (self.fetch, self.now.manifest, self.now.key, order, rows, part)
                self._lease(worker, f"roll{part}", row, roles.roll, *sent)
                return

    def _lease(self, worker: _Worker, task: str, row: int, function: Any, *arguments: Any) -> None:
        limit: Limit = getattr(self.limits, worker.role)
        extra = 0.0 if task in worker.warm else self.limits.first_s
        self.leases.grant((task, row), worker.name, time.monotonic() + limit.lease_s + extra)
        self._call(worker, task, row, limit.hang_s + extra, function, *arguments)

    def _learn(self, worker: _Worker, step: int) -> None:
        cells = [self.table.read(self.whole[step], column) for column in self.columns]
        rows = [part for _, part in cells[0]]
        if len(cells) == 3:
            both = zip(rows, cells[2], strict=True)
            rows = [r._replace(extras=r.extras | roles.Scored(ref)._asdict()) for r, ref in both]
        versions = np.concatenate([part.extras[roles.VERSION].ravel() for part in rows])
        self.behind[step] = float(step - versions[versions >= 0].min(initial=step))
        sent = (step, *self.drawn[step], rows, cells[1], step + 1 == self.steps)
        extra = 0.0 if "learn" in worker.warm else self.limits.first_s
        self._call(worker, "learn", -1, self.limits.learn.hang_s + extra, roles.learn, *sent)

    # replies

    def _take_in(self, reply: Reply) -> None:
        worker = next((w for w in self.workers.values() if w.ticket == reply.ticket), None)
        if worker is None:  # replaced since
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
        elif task == "start":
            worker.ready = True
        else:
            self._done(worker, task, row, reply.value)

    def _done(self, worker: _Worker, task: str, row: int, value: Any) -> None:
        worker.warm.add(task)
        if isinstance(value, roles.Rolled):
            worker.cuts = 0
            self.transfers += [value.transfer] if value.transfer else []
        if not self.leases.done((task, row), worker.name):
            self._note("repeated", worker.name, f"{task} of row {row} was done before")
            return
        if isinstance(value, roles.Rolled):
            part = int(task.removeprefix("roll"))
            order, _ = self.table.read([row], f"rows{part}")[0]
            self.table.write([row], **{f"rows{part + 1}": [(order, value.rows)]})
        else:
            self.table.write([row], **{"rewards" if task == "score" else "reference": [value]})

    def _failed(self, worker: _Worker, task: str, error: BaseException) -> None:
        if isinstance(error, UserError):  # a reward that is no number would be none at the next try either
            raise error
        if task in ("start", "learn", "look"):
            raise Stuck(f"{worker.name}: {_said(error)}") from error
        if isinstance(error, Cut):
            self.transfers.append(error.transfer)
            worker.cuts += 1
            worker.rest_until = time.monotonic() + min(0.1 * 2**worker.cuts, 10.0)
            for learner in self._of("learn", idle=True):  # is it still there?
                self._call(learner, "look", -1, self.limits.start_s, roles.standing)
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
            count = self.table.read([row], self.columns[0])[0][1].tokens.shape[0]
            self.table.write([row], rewards=[Rewards(np.zeros(count, np.float32), np.zeros(count, bool))])

    def _stands(self, now: roles.Published) -> None:
        """What the learner says of itself: one update more, its start, or fewer updates after a restart."""
        before, self.now = self.now, now
        if before is None:
            self.first = self.next_step = self.forgotten = now.step
        elif now.step < self.forgotten:
            raise Stuck(f"the checkpoint of step {self.forgotten} is damaged, its rows are gone; start the run again")
        elif now.step < before.step:
            self._note("resumed", "learner", f"step {before.step} again from the checkpoint of step {now.step}")
        if now.metrics and now.step > self.first:
            done = now.step - 1
            self.history[done] = now.metrics | {STALENESS: self.behind[done]}
            if before is None or now.step > before.step:  # not of an update that is done again
                self.streak.see(now.metrics, now.step)
        while self.forgotten < min(now.saved, now.step):
            self.table.forget(self._rows(self.forgotten))
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

    def _causes(self) -> list[str]:
        """Who waits for what at this moment."""
        if not self._of("learn"):
            return ["learner: its start", *("roller: the learner" for _ in self._of("roll", idle=True))]
        causes = []
        if self._of("learn", idle=True) and self.now.step not in self.whole:
            rows, last = self._rows(self.now.step), f"roll{self.drawn_parts - 1}"
            stages = ((last, "rollouts"), ("score", "rewards"), ("refer", "reference"))
            pending = [name for task, name in stages if not all(self.leases.is_done((task, r)) for r in rows)]
            causes.append(f"learner: {pending[0]}")
        held = "the last step" if self.next_step >= self.steps else self._held_back()
        return causes + [f"roller: {held}" for _ in self._of("roll", idle=True)]


def _said(error: BaseException | None) -> str:
    """The first line of what an error says, and the last, where the text of another process ends with its cause."""
    text = [line.strip() for line in str(error).strip().splitlines()] if error is not None else []
    lines = [*text[:1], *(text[-1:] if len(text) > 1 else [])]
    return f"{type(error).__name__}: {' ... '.join(lines)}" if lines else type(error).__name__
