"""The host loop in three threads: rollouts, rewards and updates at the same time, weights a bounded number behind.

For a machine whose devices or host have room for it: a rollout is sampled while the update of an earlier one runs, and
a slow scorer in Python holds up neither.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.asynchronous.transfer_queue import Consumer, TransferQueue
from jaxrl_llm.train import parity, skipped
from jaxrl_llm.train.host import HostLoop, Iteration, metrics_of, never, with_figures
from jaxrl_llm.train.online import Drawn
from jaxrl_llm.train.step import trained_part, with_trained
from jaxrl_llm.types import Rewards, TrainState

STALENESS = "sampler/staleness"  # in the metrics: updates between the weights that sampled a batch and those it trains


class _Weights:
    """The newest state that may sample, handed from the learner to the sampler."""

    def __init__(self, state: TrainState, first: int):
        self._changed = threading.Condition()
        self._closed = False
        self._state, self.version = state, first

    def put(self, state: TrainState) -> None:
        with self._changed:
            self._state, self.version = state, self.version + 1
            self._changed.notify_all()

    def get(self, least: int) -> tuple[TrainState, int] | None:
        """A state of at least this version, waited for; None after ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.version >= least)
            return None if self._closed else (self._state, self.version)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Apart(NamedTuple):
    """Rollouts on devices of their own, beside those that train.

    From "LlamaRL", arXiv:2505.24034 (generator and trainer on disjoint devices, weights sent directly).
    """

    begin: Callable[[TrainState], Drawn]  # there
    # (state, whole) -> all that ``begin`` reads, sent there, or of the weights what trains; returns before it arrived
    hand: Callable[[TrainState, bool], TrainState]
    back: Callable[[Any], Any]  # rollouts and rewards, to where the update reads them
    sent_bytes: Callable[[TrainState], int]  # by ``hand`` of what trains


LEAVE_S = 60.0  # so long an error waits for the other threads: one that asks a dead endpoint again may never end
STOP_S = 10.0  # and a run that is asked to stop, which whoever asks may end before it is saved
ASK_S = 0.2  # between two looks at whether it is
HAND = ("weights/sent_bytes", "weights/hand_s")  # in the metrics: what travelled, and how long the learner was held


class _Rollout(NamedTuple):
    drawn: Drawn
    version: int


def _copied(trained: str, state: TrainState, whole: bool) -> TrainState:
    """All that a rollout reads: the state itself is donated to the next update."""
    params = state.params if whole else trained_part(state.params, trained)
    return jax.tree.map(jnp.copy, state._replace(params=params, opt_state=()))


def _arrived(
    queue: TransferQueue, step: int, early: set[int], patience_s: float, stop: Callable[[], bool]
) -> tuple[_Rollout, Rewards] | None:
    """Rollout and rewards of a step; with several scorers steps may be there before one that began earlier.

    None where the run is asked to stop: what is still being made of the step is not waited for.
    """
    end = time.monotonic() + patience_s
    while not (asked := stop()) and step not in early:
        if rows := queue.take("learn", 1, timeout=min(max(end - time.monotonic(), 0.0), ASK_S)):
            early.update(rows)
            end = time.monotonic() + patience_s
        elif time.monotonic() >= end:
            raise TimeoutError(f"no rewards of step {step} in patience_s={patience_s:g}: its rollout or score hangs")
    if asked:
        return None
    (rollout,), (rewards,) = queue.read([step], "rollout"), queue.read([step], "rewards")
    queue.forget([step])
    return rollout, rewards


@contextlib.contextmanager
def _working(threads: Sequence[threading.Thread], *channels: Any, stop: Callable[[], bool]) -> Iterator[None]:
    """Threads that end with the block, as their channels close; behind an error they have ``LEAVE_S`` for it.

    Those of a run that is asked to stop have ``STOP_S``. None is waited for where nothing arrived in time: one of them
    hangs.
    """
    for thread in threads:
        thread.start()
    wait = LEAVE_S
    try:
        yield
        wait = STOP_S if stop() else math.inf
    except TimeoutError:
        wait = 0.0
        raise
    finally:
        for channel in channels:
            channel.close()
        end = time.monotonic() + wait
        for thread in threads:
            thread.join(None if wait == math.inf else max(end - time.monotonic(), 0.0))


def run(
    loop: HostLoop,
    state: TrainState,
    steps: int,
    *,
    staleness: int = 1,
    scorers: int = 1,
    units: int = 1,
    patience_s: float = 3600.0,
    apart: Apart | None = None,
    streak: skipped.Streak | None = None,
    figures: Callable[[Iteration], dict[str, float]] = metrics_of,
    stop: Callable[[], bool] = never,
) -> tuple[TrainState, list[dict]]:
    """As ``host.run``; the rollout of step ``b`` begins when at least ``b - staleness`` updates are done.

    It samples with the newest weights of that moment, so its staleness, a metric of every step, lies between 0 and
    ``staleness``; which it is depends on the time that things take, and so do the results. With ``staleness`` 0 nothing
    overlaps and the parameters are those of ``host.run``, bit for bit. A curriculum that learns from rewards has heard
    those of the same updates when it draws; all its lessons are kept.

    From "AsyncFlow", arXiv:2507.01663, section 4 (delayed parameter update). Differs from the paper in that one
    rollout is one batch: weights change between batches, never within.

    Args:
      loop: of ``host.make_host_loop``. Its loss should correct for old samples by ``batch.sampler_logp``.
      scorers: threads that score, each a batch of its own; batches train in their order all the same.
      units: storage units that the rows go around.
      patience_s: how long the learner waits for one batch.
      apart: where rollouts run, and how weights get there; None: on the devices that train, by turns with the updates.
      streak: of the updates that were skipped before, which goes on; None: there were none.
      figures: of a step, in its line of the history. Phases overlap: nothing is known of the seconds of each.
      stop: whether to end behind the update under way, with fewer steps; from once it says so on. Rollouts ahead are
        dropped.

    Raises:
      ValueError: for a negative staleness, no scorer, or no unit.
      TimeoutError: when a batch does not come; the message says what was missing.
      UserError: as ``host.iterations``.
    """
    if staleness < 0:
        raise ValueError(f"staleness={staleness} must not be negative")
    if scorers < 1:
        raise ValueError(f"scorers={scorers} must be at least 1")
    first, history = int(state.step), []
    columns = ("rollout", "rewards")
    queue = TransferQueue({"score": Consumer(columns[:1]), "learn": Consumer(columns)}, units=units)
    hand, begin = (partial(_copied, loop.trained), loop.begin) if apart is None else (apart.hand, apart.begin)
    weights = _Weights(hand(state, True), first)
    base = weights.get(first)[0].params if loop.trained else None  # else nothing keeps the first weights

    def handed(state: TrainState) -> TrainState:
        """With the base of an adapter, which no update changes, as it arrived at first."""
        acting = hand(state, False)
        return acting._replace(params=with_trained(base, acting.params, loop.trained))

    def sample() -> None:
        for step in range(first, steps):
            found = weights.get(step - staleness)
            if found is None:
                return
            acting, version = found
            own = acting.sampler
            for other in range(version, step):  # drawn before, and not learned from yet
                _, own = loop.draw(own, acting.key, jnp.asarray(other, jnp.int32))
            acting = acting._replace(step=jnp.asarray(step, jnp.int32), sampler=own)
            queue.write([step], rollout=[_Rollout(begin(acting), version)])

    def score() -> None:
        while not stop() and (rows := queue.take("score", 1)):
            queue.write(rows, rewards=[loop.score(r.drawn.trajectories) for r in queue.read(rows, "rollout")])

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def inner() -> None:
            try:
                work()
            except BaseException as error:  # handed to the learner, which raises it
                queue.close(error)

        return inner

    threads = [threading.Thread(target=guarded(work), daemon=True) for work in (sample, *[score] * scorers)]
    early: set[int] = set()
    streak = skipped.Streak(loop.most_skipped) if streak is None else streak
    with _working(threads, weights, queue, stop=stop):
        for step in range(first, steps):
            if (arrived := _arrived(queue, step, early, patience_s, stop)) is None:
                break
            rollout, rewards = arrived
            drawn, behind = rollout.drawn, int(state.step) - rollout.version
            if apart is not None:
                drawn, rewards = apart.back((drawn._replace(figures={}), rewards))
            # the curriculum that learns is that of all lessons before, not that of the rollout
            _, sampler = loop.draw(state.sampler, state.key, state.step)
            state, metrics = loop.finish(state, drawn._replace(sampler=sampler, figures={}), rewards)
            began = time.monotonic()
            weights.put(handed(state))  # sent while the update that makes them is computed, and the next one after it
            row = with_figures(metrics, rollout.drawn) | {STALENESS: float(behind)}
            if apart is not None:
                row |= dict(zip(HAND, (float(apart.sent_bytes(state)), time.monotonic() - began), strict=True))
            parity.check(row, loop.most_gap, step + 1)
            history.append(figures(Iteration(state, row, drawn, rewards, loop.compiled(), {})))
            streak.see(row, step + 1)
    return state, history
