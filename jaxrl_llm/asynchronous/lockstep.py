"""The host loop of several processes with rollouts ahead of its updates: one order of programs, the same in all.

Programs that exchange arrays between processes wait for each other, so threads that start them as they come would wait
for good. Here one thread starts everything and waits for nothing that it does not read: devices roll out and update
while the verifiers of every process judge an earlier batch.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.asynchronous.threads import STALENESS
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.train import parity, skipped
from jaxrl_llm.train.host import HostLoop, Iteration, metrics_of, never, with_figures
from jaxrl_llm.train.online import Drawn
from jaxrl_llm.types import Rewards, TrainState, Trajectories


class _Ahead(NamedTuple):
    drawn: Drawn
    read: Trajectories  # what is scored
    version: int


class _Updated(NamedTuple):
    """An update that was started, and what made it."""

    step: int
    metrics: dict[str, Any]
    rollout: _Ahead
    rewards: Rewards


def as_drawn(trajectories: Trajectories) -> Trajectories:
    """Scored where they were sampled."""
    return trajectories


def to_all(mesh: Mesh) -> Callable[[Trajectories], Trajectories]:
    """Copies rows to every process as soon as they are there, in place of when a scorer on the host asks for them.

    What it asks for then would have to wait for all that was started before.
    """
    return jax.jit(lambda rows: rows, out_shardings=meshes.replicated(mesh))


def run(
    loop: HostLoop,
    state: TrainState,
    steps: int,
    *,
    staleness: int = 1,
    shown: Callable[[Trajectories], Trajectories] = as_drawn,
    streak: skipped.Streak | None = None,
    figures: Callable[[Iteration], dict[str, float]] = metrics_of,
    stop: Callable[[], bool] = never,
) -> tuple[TrainState, list[dict]]:
    """As ``host.run``; the rollout of the ``b``-th step here samples with the weights of ``min(b, staleness)`` before.

    No clock decides which, as in ``threads.run``: the results are the same every time and in every process. With
    ``staleness`` 0 the parameters are those of ``host.run``, bit for bit. A curriculum that learns from rewards has
    heard those of the same updates when it draws; all its lessons are kept.

    From "AsyncFlow", arXiv:2507.01663, section 4 (delayed parameter update). Differs from the paper in that one
    rollout is one batch, and that rollouts and updates take turns on the same devices: what overlaps is the scoring.

    Args:
      loop: of ``host.make_host_loop``. Its loss should correct for old samples by ``batch.sampler_logp``.
      shown: started right behind a rollout, makes what is scored of it, for example ``to_all``.
      streak: of the updates that were skipped before, which goes on; None: there were none.
      figures: of a step, in its line of the history.
      stop: whether to end behind the update under way, with fewer steps; asked before every update, and to be answered
        alike in every process. Rollouts ahead are dropped.

    Raises:
      ValueError: for a negative staleness.
      UserError: as ``host.iterations``.
    """
    if staleness < 0:
        raise ValueError(f"staleness={staleness} must not be negative")
    first, history = int(state.step), []
    streak = skipped.Streak(loop.most_skipped) if streak is None else streak
    ahead: deque[_Ahead] = deque()

    def begun(state: TrainState, done: int, step: int) -> _Ahead:
        acting, own = state, state.sampler
        for later in range(step - done):  # drawn before, and not learned from yet
            _, own = loop.draw(own, state.key, state.step + later)
        if step > done:
            acting = state._replace(step=state.step + (step - done), sampler=own)
        drawn = loop.begin(acting)
        return _Ahead(drawn, shown(drawn.trajectories), done)

    def told(updated: _Updated, state: TrainState) -> None:
        """Waits for an update, and says what it did."""
        drawn, step = updated.rollout.drawn, updated.step
        row = with_figures(updated.metrics, drawn) | {STALENESS: float(step - updated.rollout.version)}
        parity.check(row, loop.most_gap, step + 1)
        history.append(figures(Iteration(state, row, drawn, updated.rewards, loop.compiled(), {})))
        streak.see(row, step + 1)

    updated: _Updated | None = None
    for step in range(first, steps):
        # with the weights of the update that was started last, which may not be there yet
        ahead.extend(begun(state, step, b) for b in range(step + len(ahead), min(step + staleness + 1, steps)))
        rollout = ahead.popleft()
        rewards = loop.score(rollout.read)
        if updated is not None:  # before its state is given to the next one
            told(updated, state)
            updated = None
        if stop():
            break
        # the curriculum that learns is that of all lessons before, not that of the rollout
        _, sampler = loop.draw(state.sampler, state.key, state.step)
        state, metrics = loop.finish(state, rollout.drawn._replace(sampler=sampler, figures={}), rewards)
        updated = _Updated(step, metrics, rollout, rewards)
    if updated is not None:
        told(updated, state)
    return state, history
