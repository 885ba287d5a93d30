"""The host loop: the two halves of an iteration compiled, the rewards computed in Python between them."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.rollout.host_episodes import HostEpisodes
from jaxrl_llm.train import parity
from jaxrl_llm.train.online import Drawn, Online, answers_of, begin, finish, prompted
from jaxrl_llm.types import Metrics, Rewards, TrainState, Trajectories

Scorer = Callable[[Trajectories], Rewards]


class Iteration(NamedTuple):
    """What one iteration leaves behind; ``state`` is donated to the next one: copy what you keep."""

    state: TrainState
    metrics: dict[str, float]
    drawn: Drawn
    rewards: Rewards
    compiled: int  # programs compiled so far; constant after the first iteration
    seconds: dict[str, float]  # of rollout, score and update


class HostLoop(NamedTuple):
    """The compiled halves of an iteration."""

    begin: Callable[[TrainState], Drawn]
    finish: Callable[[TrainState, Drawn, Rewards], tuple[TrainState, Metrics]]
    score: Scorer
    compiled: Callable[[], int]  # programs so far
    most_gap: float = 0.0  # between the log-probabilities of sampler and trainer; 0: any


def make_host_loop(
    online: Online,
    score: Scorer | None = None,
    *,
    place: Callable[[TrainState], TrainState] | None = None,
    world: HostEpisodes | None = None,
    most_gap: float = 0.0,
) -> HostLoop:
    """Compiles lazily.

    Args:
      score: defaults to the jittable scorer of ``online``.
      place: inside ``jit``, keeps the new state where it was (``distributed.rules.constrain`` on a mesh): without it
        the compiler may place it elsewhere, and the next step would compile again.
      world: rolls out on the host, in place of ``online.rollout``; its figures are among the metrics of a step.
      most_gap: a step whose sampler lies further from the trainer, in nats at the worst token, stops the run with a
        UserError; 0: none does.
    """
    if score is None:
        device_score = jax.jit(lambda trajectories: online.score(answers_of(online, trajectories), trajectories))
        score = device_score

    def end(state: TrainState, drawn: Drawn, rewards: Rewards) -> tuple[TrainState, Metrics]:
        state, metrics = finish(online, state, drawn, rewards)
        return (state if place is None else place(state)), metrics

    first, last = jax.jit(partial(begin if world is None else prompted, online)), jax.jit(end, donate_argnums=0)

    def played(state: TrainState) -> Drawn:
        ids, sampler, tokens, valid, keys = first(state)
        out = world.play(online.actor(state), tokens, valid, keys, ids)
        return Drawn(ids, sampler, out.trajectories, out.figures)

    def compiled() -> int:
        return first._cache_size() + last._cache_size() + (0 if world is None else world.compiled())

    return HostLoop(first if world is None else played, last, score, compiled, most_gap)


def with_figures(metrics: Metrics, drawn: Drawn) -> dict[str, float]:
    """The metrics of a step as numbers, those of a rollout on the host among them."""
    return {k: float(np.asarray(v)) for k, v in metrics.items()} | drawn.figures


def iterations(loop: HostLoop, state: TrainState, steps: int) -> Iterator[Iteration]:
    """Runs until ``state.step`` reaches ``steps``, yielding after every update."""
    while int(state.step) < steps:
        times = [time.monotonic()]
        drawn = jax.block_until_ready(loop.begin(state))
        times.append(time.monotonic())
        rewards = jax.block_until_ready(loop.score(drawn.trajectories))
        times.append(time.monotonic())
        state, metrics = loop.finish(state, drawn, rewards)
        figures = with_figures(metrics, drawn)
        parity.check(figures, loop.most_gap, int(state.step))
        times.append(time.monotonic())
        seconds = dict(zip(("rollout", "score", "update"), np.diff(times).tolist(), strict=True))
        yield Iteration(state, figures, drawn, rewards, loop.compiled(), seconds)


def run(loop: HostLoop, state: TrainState, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
    """The final state and the metrics of every step."""
    history = []
    for iteration in iterations(loop, state, steps):
        state = iteration.state
        history.append(iteration.metrics)
    return state, history
