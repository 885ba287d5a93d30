"""The host loop: the two halves of an iteration compiled, the rewards computed in Python between them."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed.compiler_options import jit_sampling, options_of
from jaxrl_llm.distributed.rollout_weights import Move
from jaxrl_llm.rollout.host.driver import HostEpisodes
from jaxrl_llm.train import packing, parity, skipped
from jaxrl_llm.train.online import Drawn, Online, answers_of, begin, draw, estimated, finish, learn, prompted
from jaxrl_llm.train.packing import Planner
from jaxrl_llm.types import Batch, Metrics, Rewards, TrainState, Trajectories

Scorer = Callable[[Trajectories], Rewards]


class Iteration(NamedTuple):
    """What one iteration leaves behind; ``state`` is donated to the next one: copy what you keep."""

    state: TrainState
    metrics: dict[str, float]
    drawn: Drawn
    rewards: Rewards
    compiled: int  # programs compiled so far; constant after the first iteration
    seconds: dict[str, float]  # of rollout, score and update; empty where they overlap


def metrics_of(iteration: Iteration) -> dict[str, float]:
    """What the compiled step says of itself."""
    return dict(iteration.metrics)


def no_curriculum(sampler: Any, key: Any, step: Any) -> tuple[None, Any]:
    """The ``draw`` of a loop whose prompts nothing chooses."""
    return None, sampler


def never() -> bool:
    """The ``stop`` of a loop that nobody asks to stop."""
    return False


class HostLoop(NamedTuple):
    """The compiled halves of an iteration."""

    begin: Callable[[TrainState], Drawn]
    finish: Callable[[TrainState, Drawn, Rewards], tuple[TrainState, Metrics]]
    score: Scorer
    compiled: Callable[[], int]  # programs so far
    most_gap: float = 0.0  # between the log-probabilities of sampler and trainer; 0: any
    most_skipped: int = skipped.MOST  # updates in a row that are not finite, see ``train.skipped``; 0: any number
    # (curriculum, key, step) -> (prompts, curriculum), as in ``begin``, for loops whose rollouts run ahead of it
    draw: Callable[..., tuple[Any, Any]] = no_curriculum
    trained: str = ""  # as in ``online.Online``: the rest of the parameters stays as it is


def make_host_loop(
    online: Online,
    score: Scorer | None = None,
    *,
    place: Callable[[TrainState], TrainState] | None = None,
    world: HostEpisodes | None = None,
    move: Move | None = None,
    most_gap: float = 0.0,
    most_skipped: int = skipped.MOST,
    planner: Planner | None = None,
    shards: int = 1,
) -> HostLoop:
    """Compiles lazily.

    Args:
      score: defaults to the jittable scorer of ``online``.
      place: inside ``jit``, keeps the new state where it was (``distributed.rules.constrain`` on a mesh): without it
        the compiler may place it elsewhere, and the next step would compile again.
      world: rolls out on the host, in place of ``online.rollout``; its figures are among the metrics of a step.
      move: makes the weights of a rollout before it, which is then a program of its own; its seconds are among those
        of the rollout, its figures among the metrics of a step. None: the rollout reads the weights that train.
      most_gap: a step whose sampler lies further from the trainer, in nats at the worst token, stops the run with a
        UserError; 0: none does.
      most_skipped: so many updates in a row that are not finite stop the run with a UserError; 0: none does.
      planner: arranges the rows of every update, for example ``packing.packed_rows``, where the method's loss takes a
        layout; None: rows are computed as they stand.
      shards: that the rows of a layout divide over.
    """
    if score is None:
        device_score = jax.jit(lambda trajectories: online.score(answers_of(online, trajectories), trajectories))
        score = device_score

    def end(state: TrainState, drawn: Drawn, rewards: Rewards) -> tuple[TrainState, Metrics]:
        state, metrics = finish(online, state, drawn, rewards)
        return (state if place is None else place(state)), metrics

    apart = world is not None or move is not None
    first = jit_sampling(partial(prompted if apart else begin, online))
    if planner is None or online.minibatches > 1 or not packing.takes(online.loss):
        last = jax.jit(end, donate_argnums=0, compiler_options=options_of())
        ends = [last]
    else:
        last, ends = _in_layouts(online, planner, shards, place)
    roll, choose = jit_sampling(online.rollout), jax.jit(partial(draw, online))

    def begun(state: TrainState) -> Drawn:
        ids, sampler, tokens, valid, keys = first(state)
        params, figures = (online.actor(state), {}) if move is None else move(online.actor(state))
        if world is None:
            return Drawn(ids, sampler, roll(params, tokens, valid, keys, ids), figures)
        out = world.play(params, tokens, valid, keys, ids)
        return Drawn(ids, sampler, out.trajectories, out.figures | figures)

    def compiled() -> int:
        programs = [first, *ends, roll, choose, *([] if move is None else [move.program])]
        return sum(program._cache_size() for program in programs) + (0 if world is None else world.compiled())

    return HostLoop(
        begun if apart else first, last, judged(score), compiled, most_gap, most_skipped, choose, online.trained
    )


def _in_layouts(
    online: Online, planner: Planner, shards: int, place: Callable[[TrainState], TrainState] | None
) -> tuple[Callable[..., Any], list[Any]]:
    """The second half of an iteration with its rows in layouts that are planned in between, and its programs.

    The layout of an update is planned when its mask is known: rows that train nothing are not computed.
    """

    def updated(state: TrainState, drawn: Drawn, rewards: Rewards, batch: Batch, layout: Any) -> Any:
        state, metrics = learn(online, state, drawn, rewards, batch, layout)
        return (state if place is None else place(state)), metrics

    estimate = jax.jit(partial(estimated, online), compiler_options=options_of())
    update = jax.jit(updated, donate_argnums=0, compiler_options=options_of())

    def planned(rows: Any, parts: int) -> tuple[Any, float]:
        names = ("tokens", "segment_ids", "positions", "mask", "group_ids")
        found = packing.Rows(**hosts.gathered({name: getattr(rows, name) for name in names}))
        layout = planner(found, parts=parts, shards=shards)
        return layout, packing.share(layout, found.mask.size)

    def last(state: TrainState, drawn: Drawn, rewards: Rewards) -> tuple[TrainState, Metrics]:
        trajectories = drawn.trajectories
        if packing.takes(online.estimate):
            layout = packing.only_part(planned(trajectories, 1)[0])
            trajectories = trajectories._replace(extras=trajectories.extras | {packing.LAYOUT: layout})
        batch = estimate(state, trajectories, rewards)
        layout, share = planned(batch, online.microbatches)
        state, metrics = update(state, drawn, rewards, batch, layout)
        return state, metrics | {"update/columns": share}

    return last, [estimate, update]


def judged(score: Scorer) -> Scorer:
    """The same scorer; a reward that is valid and not finite is a UserError that names its row."""
    who = skipped.name_of(score)

    def checked(trajectories: Trajectories) -> Rewards:
        rewards = score(trajectories)
        skipped.check_rewards(rewards, trajectories.problem_ids, who)
        return rewards

    return checked


def with_figures(metrics: Metrics, drawn: Drawn) -> dict[str, float]:
    """The metrics of a step as numbers, those of a rollout on the host among them."""
    return {k: float(np.asarray(v)) for k, v in metrics.items()} | drawn.figures


def iterations(loop: HostLoop, state: TrainState, steps: int) -> Iterator[Iteration]:
    """Runs until ``state.step`` reaches ``steps``, yielding after every update.

    Raises:
      UserError: for a reward that is not finite, a gap beyond ``most_gap``, or ``most_skipped`` updates in a row that
        were not finite.
    """
    streak = skipped.Streak(loop.most_skipped)
    while int(state.step) < steps:
        times = [time.monotonic()]
        drawn = jax.block_until_ready(loop.begin(state))
        times.append(time.monotonic())
        rewards = jax.block_until_ready(loop.score(drawn.trajectories))
        times.append(time.monotonic())
        # figures of the host are no part of the program: on several hosts they differ
        state, metrics = loop.finish(state, drawn._replace(figures={}), rewards)
        figures = with_figures(metrics, drawn)
        parity.check(figures, loop.most_gap, int(state.step))
        times.append(time.monotonic())
        seconds = dict(zip(("rollout", "score", "update"), np.diff(times).tolist(), strict=True))
        yield Iteration(state, figures, drawn, rewards, loop.compiled(), seconds)
        streak.see(figures, int(state.step))  # after the yield: the step that ends the run is in its records


def run(loop: HostLoop, state: TrainState, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
    """The final state and the metrics of every step."""
    history = []
    for iteration in iterations(loop, state, steps):
        state = iteration.state
        history.append(iteration.metrics)
    return state, history
