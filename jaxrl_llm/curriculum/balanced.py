"""Draws by difficulty: by default prompts that are sometimes solved come more often than solved or hopeless ones."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Key, Sampler


class BalancedState(NamedTuple):
    """Difficulty statistics of ``N`` prompts."""

    success: Float[Array, " N"]  # moving average of the mean reward, in [0, 1]
    visits: Int[Array, " N"]  # scored draws so far


def learnability(success: Float[Array, " N"]) -> Float[Array, " N"]:
    """``p (1 - p)``: prompts that are sometimes solved first.

    From "Learning to Reason at the Frontier of Learnability", arXiv:2502.12272. Differs from the paper in drawing from
    all prompts by weight instead of keeping the best ones of a buffer.
    """
    return success * (1.0 - success)


def failure(success: Float[Array, " N"]) -> Float[Array, " N"]:
    """``1 - p``: prompts in proportion to how often they fail.

    From "Kimi k1.5", arXiv:2501.12599, section 2.3.4 (prioritised sampling).
    """
    return 1.0 - success


def reward_kl(success: Float[Array, " N"], *, beta: float) -> Float[Array, " N"]:
    """``KL(pi || pi*)`` of the optimum ``pi* ~ pi exp(r / beta)`` for 0/1 rewards of mean ``p``: what can be learned.

    ``log(1 - p + p e^(1 / beta)) - p / beta``: 0 for a prompt never or always solved. Its second-order term is
    ``reward_variance(p) = p (1 - p) / (2 beta^2)``, which is no strict lower bound for ``p >= 1/2``.

    From "Online Difficulty Filtering for Reasoning Oriented Reinforcement Learning", arXiv:2504.03380, section 3.1.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 5) for x in reward_kl(jnp.array([0.1, 0.5, 0.9]), beta=1.0)]
    [0.05857, 0.12011, 0.0347]
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be positive")
    mixed = (success > 0) & (success < 1)
    inside = jnp.where(mixed, success, 0.5)
    # log((1 - p) + p e^(1 / beta)) without overflow for a small beta
    normaliser = jnp.logaddexp(jnp.log(inside) + 1 / beta, jnp.log1p(-inside))
    return jnp.where(mixed, normaliser - inside / beta, 0.0)


def reward_variance(success: Float[Array, " N"], *, beta: float) -> Float[Array, " N"]:
    """``p (1 - p) / (2 beta^2)``: the second-order term of ``reward_kl``, largest at ``p = 1/2``.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in reward_variance(jnp.array([0.1, 0.5, 0.9]), beta=1.0)]
    [0.045, 0.125, 0.045]
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be positive")
    return learnability(success) / (2 * beta**2)


def draw_probabilities(
    state: BalancedState, *, weigh: Callable[[Array], Array] = learnability, floor: float = 0.05
) -> Float[Array, " N"]:
    """Chance of each prompt in the first draw: proportional to ``weigh(p) + floor``; they sum to 1.

    ``p`` is the moving average of the prompt's success. The floor keeps every prompt reachable, so that one that was
    solved or hopeless is measured again.

    >>> import jax.numpy as jnp
    >>> state = BalancedState(jnp.array([0.5, 1.0, 0.0]), jnp.zeros(3, jnp.int32))
    >>> [round(float(x), 4) for x in draw_probabilities(state, floor=0.125)]
    [0.6, 0.2, 0.2]
    >>> state = BalancedState(jnp.array([0.25, 0.75]), jnp.zeros(2, jnp.int32))
    >>> draw_probabilities(state, weigh=failure, floor=0.0).tolist()
    [0.75, 0.25]
    """
    weight = weigh(state.success) + floor
    return weight / jnp.sum(weight)


def make_balanced(
    *,
    weigh: Callable[[Array], Array] = learnability,
    rate: float = 0.3,
    prior: float = 0.5,
    floor: float = 0.05,
) -> Sampler:
    """Draws different prompts with weight ``weigh(p) + floor``; ``p <- (1 - rate) p + rate score``.

    A draw is without replacement (Gumbel top-n), so ``n`` may not exceed the number of prompts. Scores are clipped to
    [0, 1]; an invalid score teaches nothing. A prompt that occurs twice in one update counts once, with its mean score.

    Args:
      weigh: weight of a success rate in [0, 1]: ``learnability`` or ``failure``.
      rate: weight of the newest score in the moving average, in (0, 1].
      prior: success assumed of a prompt never seen, in [0, 1]; 0.5 draws unseen prompts first by ``learnability``.
      floor: added to every weight, positive; ``learnability`` is 0.25 at ``p = 0.5`` and 0 at the ends.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate={rate} must lie in (0, 1]")
    if not 0 <= prior <= 1:
        raise ValueError(f"prior={prior} must lie in [0, 1]: it is a success rate")
    if floor <= 0:
        raise ValueError(f"floor={floor} must be positive, or prompts once solved would never be measured again")

    def init(num_problems: int) -> BalancedState:
        return BalancedState(jnp.full((num_problems,), prior, jnp.float32), jnp.zeros((num_problems,), jnp.int32))

    def draw(state: BalancedState, key: Key, n: int) -> tuple[Int[Array, " n"], BalancedState]:
        count = state.success.shape[0]
        if n > count:
            raise ValueError(f"n={n} different prompts cannot be drawn from {count}; draw fewer, or use make_epochs")
        chances = draw_probabilities(state, weigh=weigh, floor=floor)
        score = jnp.log(chances) + jax.random.gumbel(key, (count,), jnp.float32)
        return jax.lax.top_k(score, n)[1].astype(jnp.int32), state

    def update(
        state: BalancedState, ids: Int[Array, " n"], scores: Float[Array, " n"], valid: Bool[Array, " n"]
    ) -> BalancedState:
        size = state.success.shape[0]
        scores = jnp.where(valid, jnp.clip(scores.astype(jnp.float32), 0.0, 1.0), 0.0)
        total = jax.ops.segment_sum(scores, ids, num_segments=size)
        seen = jax.ops.segment_sum(valid.astype(jnp.float32), ids, num_segments=size)
        moved = (1.0 - rate) * state.success + rate * total / jnp.maximum(seen, 1.0)
        return BalancedState(jnp.where(seen > 0, moved, state.success), state.visits + seen.astype(jnp.int32))

    return Sampler(init, draw, update)
