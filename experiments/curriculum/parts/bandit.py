"""Bandits over categories of prompts: the category by what it still teaches, then a prompt inside it at random.

``Arms`` is the bandit alone: ``init(K)``, ``probs(state)`` and ``learn(state, category, signal, weight)``.
``make_categories`` turns it into a ``Sampler`` over the rows of a table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.types import Sampler


class Arms(NamedTuple):
    """A bandit over K categories as pure functions."""

    init: Callable[[int], Any]
    probs: Callable[[Any], Float[Array, " K"]]
    learn: Callable[..., Any]  # (state, category [n], signal [n], weight [n]) -> state; weight 0 is left out


def mean_absolute_advantage(
    mean_reward: Float[Array, " n"], group_size: int, *, std: bool = True
) -> Float[Array, " n"]:
    """Mean ``|A|`` of a group of binary rewards, read off its mean reward ``p``: ``2 sqrt(p (1 - p) (G - 1) / G)``.

    Exactly what ``group_normalized_advantages`` (``eps = 0``) gives; without std ``2 p (1 - p)``, as
    ``dr_grpo_advantages``. Both peak at 1/2.

    From "Self-Evolving Curriculum for LLM Reasoning", arXiv:2505.14970, section 3.2.

    >>> import jax.numpy as jnp
    >>> mean_absolute_advantage(jnp.array([0.0, 0.5, 1.0]), 8, std=False).tolist()
    [0.0, 0.5, 0.0]
    """
    p = jnp.clip(mean_reward.astype(jnp.float32), 0.0, 1.0)
    spread = p * (1.0 - p)
    return 2.0 * jnp.sqrt(spread * (group_size - 1) / group_size) if std else 2.0 * spread


def _sums(values: Array, category: Array, count: int) -> Array:
    return jax.ops.segment_sum(values, category, num_segments=count)


class WindowState(NamedTuple):
    """The newest signals of each category, and how many responses it ever had."""

    window: Float[Array, "K W"]  # the newest first
    filled: Int[Array, " K"]
    visits: Float[Array, " K"]


def ucb_scores(state: WindowState, *, explore: float = 2.0) -> Float[Array, " K"]:
    """``L_j + sqrt(explore ln(n + 1) / (n_j + 1))``, ``L_j`` the mean over the window, 0 while it is empty.

    From "DUMP: Automated Distribution-Level Curriculum Learning for RL-based LLM Post-training", arXiv:2504.09710,
    section 3.

    >>> import jax.numpy as jnp
    >>> state = WindowState(jnp.array([[0.8], [0.2]]), jnp.array([1, 1]), jnp.array([99.0, 99.0]))
    >>> [round(float(x), 5) for x in ucb_scores(state)]
    [1.12537, 0.52537]
    """
    there = jnp.arange(state.window.shape[1])[None, :] < state.filled[:, None]
    count = jnp.maximum(state.filled.astype(jnp.float32), 1.0)
    learnability = jnp.sum(jnp.where(there, state.window, 0.0), axis=1) / count
    total = jnp.maximum(jnp.sum(state.visits), 1.0)
    return learnability + jnp.sqrt(explore * jnp.log(total + 1.0) / (state.visits + 1.0))


def make_ucb(*, window: int = 300, temperature: float = 0.1, explore: float = 2.0, group_size: int = 1) -> Arms:
    """DUMP: ``softmax(ucb_scores / temperature)`` over a sliding window of signals.

    Args:
      window: signals of a category that are remembered, newest first.
      explore: factor under the root; 0 leaves exploration out.
      group_size: responses that each signal stands for in the counts.

    From "DUMP", arXiv:2504.09710, section 3. Differs from its code in remembering the mean ``|A|`` of each group
    instead of every response's (the window then holds ``window`` groups), and in neither pushing validation rewards
    into the windows nor keeping its unused Beta posterior.
    """
    if window < 1 or temperature <= 0:
        raise ValueError(f"window={window} must be at least 1 and temperature={temperature} positive")

    def init(count):
        return WindowState(
            jnp.zeros((count, window), jnp.float32), jnp.zeros((count,), jnp.int32), jnp.zeros((count,), jnp.float32)
        )

    def probs(state):
        return jax.nn.softmax(ucb_scores(state, explore=explore) / temperature)

    def push(state, row):
        category, signal, weight = row
        used = weight > 0
        shifted = jnp.concatenate([signal[None], state.window[category, :-1]])
        new = WindowState(
            state.window.at[category].set(shifted),
            state.filled.at[category].set(jnp.minimum(state.filled[category] + 1, window)),
            state.visits.at[category].add(jnp.float32(group_size)),
        )
        return jax.tree.map(lambda a, b: jnp.where(used, a, b), new, state), None

    def learn(state, category, signal, weight):
        rows = (category, jnp.where(weight > 0, signal, 0.0).astype(jnp.float32), weight)
        return jax.lax.scan(push, state, rows)[0]

    return Arms(init, probs, learn)


def make_td(*, rate: float = 0.5, temperature: float = 1.0, decay_unsampled: bool = True) -> Arms:
    """SEC: ``Q_c <- rate r_c + (1 - rate) Q_c`` with ``r_c`` the mean signal of the category, ``softmax(Q / tau)``.

    Args:
      decay_unsampled: a category without a draw has ``r_c = 0``, as in the released code; False keeps its Q, as in
        the paper.

    From "Self-Evolving Curriculum for LLM Reasoning", arXiv:2505.14970, eqs. 3 and 4.

    >>> import jax.numpy as jnp
    >>> arms = make_td(rate=0.5, temperature=0.4)
    >>> state = arms.learn(arms.init(3), jnp.array([0, 1]), jnp.array([0.8, 0.4]), jnp.ones(2))
    >>> [round(float(x), 4) for x in arms.probs(state)]
    [0.5065, 0.3072, 0.1863]
    """
    if not 0 < rate <= 1 or temperature <= 0:
        raise ValueError(f"rate={rate} must lie in (0, 1] and temperature={temperature} be positive")

    def init(count):
        return jnp.zeros((count,), jnp.float32)

    def learn(state, category, signal, weight):
        count = _sums(weight.astype(jnp.float32), category, state.shape[0])
        mean = _sums(jnp.where(weight > 0, weight * signal, 0.0), category, state.shape[0]) / jnp.maximum(count, 1e-9)
        moved = rate * mean + (1.0 - rate) * state
        return moved if decay_unsampled else jnp.where(count > 0, moved, state)

    return Arms(init, lambda state: jax.nn.softmax(state / temperature), learn)


def make_schedule(weights: Callable[[Array, int], Array]) -> Arms:
    """A curriculum fixed beforehand: ``weights(updates so far, K) -> [K]``, not negative; nothing is learnt."""

    def probs(state):
        step, count = state
        chances = weights(step, count.shape[0])
        return chances / jnp.sum(chances)

    def learn(state, category, signal, weight):
        return state[0] + 1, state[1]

    return Arms(lambda count: (jnp.zeros((), jnp.int32), jnp.zeros((count,), jnp.float32)), probs, learn)


def uniform_weights(step: Int[Array, ""], count: int) -> Float[Array, " K"]:
    """The same for every category at every step."""
    return jnp.ones((count,), jnp.float32)


def make_ordered_weights(steps: int, *, backwards: bool = False) -> Callable[[Array, int], Array]:
    """One category after another over ``steps`` updates, in the order of their numbers or against it."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")

    def weights(step, count):
        at = jnp.minimum(step * count // steps, count - 1)
        return jax.nn.one_hot(count - 1 - at if backwards else at, count)

    return weights


class CategoryState(NamedTuple):
    """What a sampler by category carries."""

    arms: Any
    drawn: Float[Array, " K"]  # prompts of each category drawn so far


def make_categories(categories: np.ndarray, arms: Arms, *, signal: Callable[[Array], Array]) -> Sampler:
    """Draws a category from the bandit, then a prompt of it with equal chances, both with replacement.

    Args:
      categories: ``[N]`` numbers from 0 to K - 1, every one of them used; the row's category.
      signal: what the bandit learns from a prompt's mean reward, for example a partial of
        ``mean_absolute_advantage``; the identity for a bandit on success.
    """
    found = np.asarray(categories).astype(np.int32)
    sizes = np.bincount(found)
    if found.min() < 0 or (sizes == 0).any():
        raise ValueError(f"categories has sizes {sizes.tolist()}; every number from 0 to K - 1 needs a prompt")
    order = np.argsort(found, kind="stable").astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)

    def init(num_problems):
        if num_problems != found.size:
            raise ValueError(f"categories has {found.size} entries, the table {num_problems} prompts")
        return CategoryState(arms.init(len(sizes)), jnp.zeros((len(sizes),), jnp.float32))

    def draw(state, key, n):
        first, second = jax.random.split(key)
        category = jax.random.categorical(first, jnp.log(jnp.maximum(arms.probs(state.arms), 1e-30)), shape=(n,))
        inside = jnp.floor(jax.random.uniform(second, (n,)) * jnp.asarray(sizes, jnp.float32)[category])
        inside = jnp.minimum(inside.astype(jnp.int32), jnp.asarray(sizes, jnp.int32)[category] - 1)
        counts = _sums(jnp.ones((n,), jnp.float32), category, len(sizes))
        ids = jnp.asarray(order)[jnp.asarray(starts)[category] + inside]
        return ids, CategoryState(state.arms, state.drawn + counts)

    def update(state, ids, scores, valid):
        weight = valid.astype(jnp.float32)
        learnt = arms.learn(state.arms, jnp.asarray(found)[ids], signal(jnp.where(valid, scores, 0.0)), weight)
        return CategoryState(learnt, state.drawn)

    return Sampler(init, draw, update)
