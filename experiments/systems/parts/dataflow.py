"""PPO, GRPO and ReMax as programs of one controller over the same calls, and the graph of calls that each makes.

A controller is a function ``(calls, actor, critic, prompts) -> (actor, critic)``. Given functions that work, it is an
iteration of training; given functions that only take notes (``trace``), it says which call waits for which.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from experiments.systems.parts.ppo_calls import GENERATE, MODELS, REFERENCE, REWARD, TRAIN_ACTOR, TRAIN_CRITIC, VALUE


class Calls(NamedTuple):
    """What a controller asks of its models; states go in and come out, nothing is kept."""

    generate: Callable[..., Any]  # (actor, prompts) -> rows
    greedy: Callable[..., Any]  # likewise, the likeliest tokens
    reward: Callable[..., Any]  # (rows) -> rewards
    reference: Callable[..., Any]  # (rows) -> log-probabilities
    value: Callable[..., Any]  # (critic, rows) -> values
    estimate: Callable[..., Any]  # (rows, rewards, reference, baseline) -> batch; in the controller, on no device
    train_actor: Callable[..., Any]  # (actor, batch) -> actor
    train_critic: Callable[..., Any]  # (critic, batch) -> critic


def ppo(calls: Calls, actor: Any, critic: Any, prompts: Any) -> tuple[Any, Any]:
    """Proximal policy optimisation: values of a critic as baseline."""
    rows = calls.generate(actor, prompts)
    batch = calls.estimate(rows, calls.reward(rows), calls.reference(rows), calls.value(critic, rows))
    return calls.train_actor(actor, batch), calls.train_critic(critic, batch)


def grpo(calls: Calls, actor: Any, critic: Any, prompts: Any) -> tuple[Any, Any]:
    """Group-relative policy optimisation: the other responses to a prompt are the baseline."""
    rows = calls.generate(actor, prompts)
    batch = calls.estimate(rows, calls.reward(rows), calls.reference(rows), None)
    return calls.train_actor(actor, batch), critic


def remax(calls: Calls, actor: Any, critic: Any, prompts: Any) -> tuple[Any, Any]:
    """ReMax: the reward of the greedy response is the baseline."""
    rows, baseline = calls.generate(actor, prompts), calls.reward(calls.greedy(actor, prompts))
    batch = calls.estimate(rows, calls.reward(rows), calls.reference(rows), baseline)
    return calls.train_actor(actor, batch), critic


class Graph(NamedTuple):
    """The calls of some iterations and who waits for whom."""

    calls: Int[np.ndarray, " N"]  # numbers of ``ppo_calls.CALLS``
    after: Bool[np.ndarray, "N N"]  # ``[i, j]``: ``i`` begins after ``j`` has ended
    iterations: int

    @property
    def models(self) -> list[int]:
        """Whose calls there are, see ``ppo_calls.MODELS``."""
        return sorted({MODELS[call] for call in self.calls.tolist()})


Controller = Callable[..., tuple[Any, Any]]
_Notes = frozenset[int]  # in the place of data: the calls that it comes from


def trace(controller: Controller, iterations: int = 2) -> Graph:
    """Runs a controller on notes instead of data.

    >>> trace(grpo, 1).calls.tolist()
    [0, 1, 2, 4]
    """
    made: list[tuple[int, _Notes]] = []

    def joined(*needs: _Notes | None) -> _Notes:
        return frozenset().union(*(need for need in needs if need is not None))

    def noting(call: int) -> Callable[..., _Notes]:
        def note(*needs: _Notes) -> _Notes:
            made.append((call, joined(*needs)))
            return frozenset([len(made) - 1])

        return note

    asked = Calls(
        noting(GENERATE), noting(GENERATE), noting(REWARD), noting(REFERENCE), noting(VALUE), joined,
        noting(TRAIN_ACTOR), noting(TRAIN_CRITIC),
    )  # fmt: skip
    actor = critic = frozenset()
    for _ in range(iterations):
        actor, critic = controller(asked, actor, critic, frozenset())
    after = np.asarray([[j in needs for j in range(len(made))] for _, needs in made])
    return Graph(np.asarray([call for call, _ in made], np.int32), after, iterations)
