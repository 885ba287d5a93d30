"""Shaping of reward arrays ``[B]``: length penalties, clipping, normalising, prices of turns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def overlong_penalty(length_tokens: Int[Array, " B"], *, limit_tokens: int, buffer_tokens: int) -> Float[Array, " B"]:
    """DAPO's soft overlong punishment: 0 up to ``limit - buffer``, then linearly to -1 at ``limit``, -1 beyond.

    From "DAPO", arXiv:2503.14476, eq. 13.

    >>> import jax.numpy as jnp
    >>> overlong_penalty(jnp.array([10, 15, 20, 30]), limit_tokens=20, buffer_tokens=10).tolist()
    [-0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer_tokens <= limit_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must lie in (0, limit_tokens={limit_tokens}]")
    over = (length_tokens.astype(jnp.float32) - (limit_tokens - buffer_tokens)) / buffer_tokens
    return jnp.clip(-over, -1.0, 0.0)


def length_reward(
    length_tokens: Int[Array, " B"], right: Bool[Array, " B"], shortest: Float[Array, " B"], longest: Float[Array, " B"]
) -> Float[Array, " B"]:
    """Kimi k1.5's length reward: ``lam = 0.5 - (len - min) / (max - min)``; wrong answers get ``min(0, lam)``.

    Args:
      shortest: least length in the group of each sequence, ``longest`` the greatest, see ``group_extremes``; equal
        ones give 0.

    From "Kimi k1.5", arXiv:2501.12599, section 2.3.3.
    """
    shortest, longest = shortest.astype(jnp.float32), longest.astype(jnp.float32)
    spread = longest - shortest
    share = (length_tokens.astype(jnp.float32) - shortest) / jnp.maximum(spread, 1.0)
    lam = jnp.where(spread > 0, 0.5 - share, 0.0)
    return jnp.where(right, lam, jnp.minimum(lam, 0.0))


def cosine_length_reward(
    length_tokens: Int[Array, " B"],
    right: Bool[Array, " B"],
    *,
    limit_tokens: int,
    right_short: float = 2.0,
    right_long: float = 1.0,
    wrong_short: float = -10.0,
    wrong_long: float = 0.0,
    exceeded: float | None = None,
) -> Float[Array, " B"]:
    """Cosine between a value at length 0 and one at the limit, for right and wrong answers.

    ``long + (short - long) (1 + cos(pi length / limit)) / 2``.

    Args:
      exceeded: reward of every answer that reaches the limit, right or wrong; the paper takes -10.

    From "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv:2502.03373, section 4. Differs from the paper in
    leaving ``exceeded`` out by default: truncation may already be judged elsewhere.

    >>> import jax.numpy as jnp
    >>> right = jnp.array([True, True, False])
    >>> cosine_length_reward(jnp.array([0, 50, 100]), right, limit_tokens=100, exceeded=-10.0).tolist()
    [2.0, 1.5, -10.0]
    """
    if limit_tokens < 1:
        raise ValueError(f"limit_tokens={limit_tokens} must be at least 1")
    phase = jnp.clip(length_tokens.astype(jnp.float32) / limit_tokens, 0.0, 1.0)
    share = 0.5 * (1 + jnp.cos(jnp.pi * phase))  # 1 at length 0, 0 at the limit
    low, high = jnp.where(right, right_long, wrong_long), jnp.where(right, right_short, wrong_short)
    reward = low + (high - low) * share
    return reward if exceeded is None else jnp.where(length_tokens >= limit_tokens, exceeded, reward)


def group_extremes(
    values: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Least and greatest valid value of the group of each sequence, ``(low, high)``; both 0 in a group without any."""
    valid = jnp.ones(values.shape, bool) if valid is None else valid
    values, size = values.astype(jnp.float32), values.shape[0]
    low = jax.ops.segment_min(jnp.where(valid, values, jnp.inf), group_ids, num_segments=size)[group_ids]
    high = jax.ops.segment_max(jnp.where(valid, values, -jnp.inf), group_ids, num_segments=size)[group_ids]
    return jnp.where(jnp.isfinite(low), low, 0.0), jnp.where(jnp.isfinite(high), high, 0.0)


def linear_length_penalty(
    length_tokens: Int[Array, " B"], *, limit_tokens: int, free_tokens: int = 0, weight: float = 1.0
) -> Float[Array, " B"]:
    """``-weight`` times the share of the way from ``free_tokens`` to ``limit_tokens``: 0 below, ``-weight`` above.

    >>> import jax.numpy as jnp
    >>> linear_length_penalty(jnp.array([15, 20, 40]), limit_tokens=20, free_tokens=10, weight=2.0).tolist()
    [-1.0, -2.0, -2.0]
    """
    if not 0 <= free_tokens < limit_tokens:
        raise ValueError(f"free_tokens={free_tokens} must lie in [0, limit_tokens={limit_tokens})")
    over = (length_tokens.astype(jnp.float32) - free_tokens) / (limit_tokens - free_tokens)
    return -weight * jnp.clip(over, 0.0, 1.0)


def target_length_penalty(
    length_tokens: Int[Array, " B"], target_tokens: Int[Array, " B"], *, weight: float = 3e-4
) -> Float[Array, " B"]:
    """``-weight |target - length|``: the length that the prompt asked for.

    From "L1: Controlling How Long A Reasoning Model Thinks", arXiv:2503.04697, eq. 1 (LCPO-exact).
    """
    return -weight * jnp.abs((target_tokens - length_tokens).astype(jnp.float32))


def clipped_rewards(rewards: Float[Array, " B"], *, low: float, high: float) -> Float[Array, " B"]:
    """Rewards bounded to ``[low, high]``."""
    if low > high:
        raise ValueError(f"low={low} is greater than high={high}")
    return jnp.clip(rewards.astype(jnp.float32), low, high)


class RunningMoments(NamedTuple):
    """Mean and spread of all rewards seen so far: part of a checkpoint."""

    count: Float[Array, ""]
    mean: Float[Array, ""]
    squares: Float[Array, ""]  # sum of squared distances from the mean


def no_moments() -> RunningMoments:
    """The moments before the first reward."""
    return RunningMoments(*(jnp.zeros((), jnp.float32) for _ in range(3)))


def add_rewards(
    moments: RunningMoments, rewards: Float[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> RunningMoments:
    """The moments after a further batch of rewards; invalid ones are left out.

    Two sets merge by ``M = M_a + M_b + (mean_b - mean_a)^2 n_a n_b / (n_a + n_b)``: no cancellation, any batch sizes.

    From Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
    """
    valid = jnp.ones(rewards.shape, bool) if valid is None else valid
    rewards = jnp.where(valid, rewards.astype(jnp.float32), 0.0)
    new = jnp.sum(valid.astype(jnp.float32))
    mean = jnp.sum(rewards) / jnp.maximum(new, 1.0)
    squares = jnp.sum(jnp.where(valid, rewards - mean, 0.0) ** 2)
    count = moments.count + new
    gap, share = mean - moments.mean, new / jnp.maximum(count, 1.0)
    return RunningMoments(count, moments.mean + gap * share, moments.squares + squares + gap**2 * moments.count * share)


def normalized_rewards(
    rewards: Float[Array, " B"], moments: RunningMoments, *, centre: float = 1.0, eps: float = 1e-6
) -> Float[Array, " B"]:
    """``(r - centre * mean) / (std + eps)`` by running (population) moments; before the first reward, unchanged.

    Args:
      centre: share of the running mean that is taken off; 0 only scales and keeps the sign of a reward.

    >>> import jax.numpy as jnp
    >>> moments = add_rewards(no_moments(), jnp.array([1.0, 3.0]))
    >>> normalized_rewards(jnp.array([1.0, 2.0, 5.0]), moments, eps=0.0).tolist()
    [-1.0, 0.0, 3.0]
    """
    variance = moments.squares / jnp.maximum(moments.count, 1.0)
    usable = variance > 0
    deviation = jnp.where(usable, jnp.sqrt(jnp.where(usable, variance, 1.0)) + eps, 1.0)
    return (rewards.astype(jnp.float32) - centre * moments.mean) / deviation


def answered_rewards(
    right: Bool[Array, " B"],
    answered: Bool[Array, " B"],
    *,
    right_reward: float = 1.0,
    wrong_reward: float = -0.5,
    missing_reward: float = -1.0,
) -> Float[Array, " B"]:
    """A reward for right answers, another for wrong ones, and a third where no answer is found.

    From "Concise Reasoning via Reinforcement Learning", arXiv:2504.05185. Differs from the paper in that its three
    numbers are arguments; the defaults are recalled, not read.

    >>> import jax.numpy as jnp
    >>> answered_rewards(jnp.array([True, False, False]), jnp.array([True, True, False])).tolist()
    [1.0, -0.5, -1.0]
    """
    return jnp.where(right & answered, right_reward, jnp.where(answered, wrong_reward, missing_reward))


def limited_rewards(
    right: Bool[Array, " B"], length_tokens: Float[Array, " B"], *, limit_tokens: int
) -> Float[Array, " B"]:
    """1 for a right answer that ends within the limit, else 0: nothing beyond the limit is read.

    A sampler that stops at the limit gives the same rewards; a limit no response reaches changes nothing.

    From "ThinkPrune: Pruning Long Chain-of-Thought of LLMs via Reinforcement Learning", arXiv:2504.01296, section 3.

    >>> import jax.numpy as jnp
    >>> limited_rewards(jnp.array([True, True, False]), jnp.array([50.0, 51.0, 3.0]), limit_tokens=50).tolist()
    [1.0, 0.0, 0.0]
    """
    if limit_tokens < 1:
        raise ValueError(f"limit_tokens={limit_tokens} must be at least 1")
    return (right & (length_tokens <= limit_tokens)).astype(jnp.float32)


def excess_length_penalty(
    length_tokens: Float[Array, " B"],
    reference_tokens: Float[Array, " B"],
    *,
    target_share: float = 0.3,
    weight: float = 1.0,
) -> Float[Array, " B"]:
    """``-weight max(0, length / reference - target_share)^2``: shorter than the target earns nothing more.

    Being one-sided it does not pull towards the empty text.

    From "HAWKEYE", arXiv:2504.00424. Differs from the paper in that the form is a reconstruction from its description.

    >>> import jax.numpy as jnp
    >>> penalty = excess_length_penalty(jnp.array([30.0, 80.0]), jnp.array([100.0, 100.0]))
    >>> [round(abs(float(x)), 4) for x in penalty]
    [0.0, 0.25]
    """
    if target_share < 0:
        raise ValueError(f"target_share={target_share} must not be negative")
    share = length_tokens.astype(jnp.float32) / jnp.maximum(reference_tokens.astype(jnp.float32), 1.0)
    return -weight * jnp.maximum(share - target_share, 0.0) ** 2


def verified_rewards(
    passed: Bool[Array, " B"],
    answered: Bool[Array, " B"],
    answer_tokens: Float[Array, " B"],
    reference_tokens: Float[Array, " B"],
    *,
    missing_reward: float = -0.5,
    length_weight: float = 0.05,
    most_tokens: float = 10.0,
) -> Float[Array, " B"]:
    """1 for an accepted answer, less a price for an answer longer or shorter than the reference; -0.5 without one.

    ``missing_reward [no answer] + [passed] (1 - length_weight min(most, |answer - reference|))``: a verifier that
    accepts what is not there pays 0.5, as in the released code.

    From "General-Reasoner: Advancing LLM Reasoning Across All Domains", arXiv:2505.14652, with its code.

    >>> import jax.numpy as jnp
    >>> yes, no = jnp.array([True, True, False, False]), jnp.array([True, True, True, False])
    >>> found = verified_rewards(yes, no, jnp.array([5.0, 28, 3, 0]), jnp.array([3.0, 3, 3, 3]))
    >>> [round(float(x), 4) for x in found]
    [0.9, 0.5, 0.0, -0.5]
    """
    gap = jnp.abs(answer_tokens.astype(jnp.float32) - reference_tokens.astype(jnp.float32))
    gap = jnp.minimum(gap, most_tokens)
    return jnp.where(answered, 0.0, missing_reward) + jnp.where(passed, 1.0 - length_weight * gap, 0.0)


def early_rewards(rewards: Float[Array, " B"], turns: Int[Array, " B"], *, decay: float = 0.5) -> Float[Array, " B"]:
    """``R decay^(k - 1)``: the outcome of an episode that took ``k`` turns; the first turn pays it in full.

    From "A Simple 'Try Again' Can Elicit Multi-Turn LLM Reasoning" (UFO), arXiv:2507.14295, section 3.

    >>> import jax.numpy as jnp
    >>> early_rewards(jnp.array([1.0, 1.0, 0.0]), jnp.array([1, 3, 5])).tolist()
    [1.0, 0.25, 0.0]
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay} must lie in [0, 1]")
    later = jnp.maximum(turns.astype(jnp.float32) - 1.0, 0.0)
    return rewards.astype(jnp.float32) * jnp.power(jnp.float32(decay), later)


def distinct_share(answers: Int[Array, "B K"], valid: Bool[Array, "B K"]) -> Float[Array, " B"]:
    """``E / T``: different answers over all answers of an episode; 1 without any.

    Args:
      answers: equal numbers for answers that are the same; those that are not ``valid`` do not count.

    >>> import jax.numpy as jnp
    >>> round(float(distinct_share(jnp.array([[3, 3, 5, 7]]), jnp.array([[True, True, True, False]]))[0]), 4)
    0.6667
    """
    index = jnp.arange(answers.shape[1], dtype=jnp.int32)
    earlier = (index[:, None] > index[None, :])[None] & valid[:, None, :]
    seen = jnp.any(earlier & (answers[:, :, None] == answers[:, None, :]), axis=2)
    total = jnp.sum(valid.astype(jnp.float32), axis=1)
    new = jnp.sum((valid & ~seen).astype(jnp.float32), axis=1)
    return jnp.where(total > 0, new / jnp.maximum(total, 1.0), 1.0)


def repetition_penalty(
    answers: Int[Array, "B K"], valid: Bool[Array, "B K"], *, weight: float = 0.5
) -> Float[Array, " B"]:
    """``-weight (1 - E / T)``: for answers given before, of solved episodes too; see ``distinct_share``.

    From "A Simple 'Try Again' Can Elicit Multi-Turn LLM Reasoning" (UFO), arXiv:2507.14295, section 3.

    >>> import jax.numpy as jnp
    >>> round(float(repetition_penalty(jnp.full((1, 5), 3), jnp.ones((1, 5), bool))[0]), 4)
    -0.4
    """
    return -weight * (1.0 - distinct_share(answers, valid))


def execution_rewards(
    right: Bool[Array, " B"], failed: Bool[Array, " B"], *, penalty: float = 0.5
) -> Float[Array, " B"]:
    """ToRL: 1 for a right answer, -1 for a wrong one or none, less ``penalty`` where code could not be executed.

    Args:
      penalty: 0 is the paper's default; 0.5 its ablation.

    From "ToRL: Scaling Tool-Integrated RL", arXiv:2503.23383, section 3.

    >>> import jax.numpy as jnp
    >>> execution_rewards(jnp.array([True, False, False]), jnp.array([False, False, True])).tolist()
    [1.0, -1.0, -1.5]
    """
    if penalty < 0:
        raise ValueError(f"penalty={penalty} must not be negative")
    return jnp.where(right, 1.0, -1.0) - jnp.where(failed, penalty, 0.0)


def multi_tool_rewards(
    accuracy: Float[Array, " B"], well_formed: Bool[Array, " B"], both: Bool[Array, " B"], *, bonus: float = 0.1
) -> Float[Array, " B"]:
    """Tool-Star: -1 where malformed; else ``accuracy``, and ``bonus`` more where it is not 0 and both tools were used.

    Args:
      accuracy: in ``[0, 1]``, for example the F1 of an answer's words.

    From "Tool-Star: Empowering LLM-Brained Multi-Tool Reasoner via Reinforcement Learning", arXiv:2505.16410, eq. 4,
    with its code.

    >>> import jax.numpy as jnp
    >>> fine, both = jnp.array([False, True, True, True]), jnp.array([True, True, True, False])
    >>> [round(float(x), 4) for x in multi_tool_rewards(jnp.array([1.0, 0.0, 0.8, 0.8]), fine, both)]
    [-1.0, 0.0, 0.9, 0.8]
    """
    if bonus < 0:
        raise ValueError(f"bonus={bonus} must not be negative")
    accuracy = accuracy.astype(jnp.float32)
    return jnp.where(well_formed, accuracy + jnp.where(both & (accuracy > 0), bonus, 0.0), -1.0)


def graded_rewards(
    score: Float[Array, " B"],
    formed: Bool[Array, " B"],
    *,
    wrong_reward: float = 0.1,
    malformed_reward: float = 0.0,
) -> Float[Array, " B"]:
    """A score in ``[0, 1]`` where the form is right, ``wrong_reward`` instead of 0, another where the form is wrong.

    Args:
      formed: follows the template, and has an answer.
      malformed_reward: -1 in "DeepResearcher", arXiv:2504.03160, which has no reward for the form (``wrong_reward`` 0).

    From "ReSearch: Learning to Reason with Search for LLMs via Reinforcement Learning", arXiv:2503.19470, section 2.3.

    >>> import jax.numpy as jnp
    >>> score, formed = jnp.array([0.5, 0.0, 0.5]), jnp.array([True, True, False])
    >>> [round(float(x), 4) for x in graded_rewards(score, formed)]
    [0.5, 0.1, 0.0]
    """
    inside = jnp.where(score > 0, score.astype(jnp.float32), wrong_reward)
    return jnp.where(formed, inside, malformed_reward)
