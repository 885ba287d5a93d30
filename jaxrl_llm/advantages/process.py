"""Rewards of single steps: bounded process rewards, votes of critics, progress under a prover.

Steps are the columns of ``[B, K]`` arrays; ``valid`` says which of them a response has. A hole between two valid steps
is stepped over.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import group_sum
from jaxrl_llm.advantages.turns import next_valid


def clipped_steps(scores: Float[Array, "B K"], valid: Bool[Array, "B K"], *, bound: float = 0.5) -> Float[Array, "B K"]:
    """``min(s - bound, 0)``: no step earns anything, so that more steps cannot pay.

    From "On Designing Effective RL Reward at Training Time for LLM Reasoning", arXiv:2410.15115, section 4.

    >>> import jax.numpy as jnp
    >>> found = clipped_steps(jnp.array([[0.9, 0.7, 0.8]]), jnp.ones((1, 3), bool), bound=0.75)
    >>> [round(float(x), 4) for x in found[0]]
    [0.0, -0.05, 0.0]
    """
    scores = jnp.where(valid, scores.astype(jnp.float32), 0.0)
    return jnp.where(valid, jnp.minimum(scores - bound, 0.0), 0.0)


def delta_steps(scores: Float[Array, "B K"], valid: Bool[Array, "B K"]) -> Float[Array, "B K"]:
    """``s_k - s_{k+1}``, the last step ``s_k``: the rewards from any step on sum to its own score, however many follow.

    ``s_{k+1}`` is the score of the next valid step.

    From "On Designing Effective RL Reward at Training Time for LLM Reasoning", arXiv:2410.15115, section 4.

    >>> import jax.numpy as jnp
    >>> found = delta_steps(jnp.array([[0.9, 0.7, 0.8, 0.6]]), jnp.array([[True, True, True, False]]))
    >>> [round(float(x), 4) for x in found[0]]
    [0.2, -0.1, 0.8, 0.0]
    """
    scores = jnp.where(valid, scores.astype(jnp.float32), 0.0)
    following = jnp.take_along_axis(jnp.pad(scores, ((0, 0), (0, 1))), next_valid(valid), axis=1)  # 0 after the last
    return jnp.where(valid, scores - following, 0.0)


def plain_steps(scores: Float[Array, "B K"], valid: Bool[Array, "B K"]) -> Float[Array, "B K"]:
    """The scores themselves: a response can earn more by saying more."""
    return jnp.where(valid, scores.astype(jnp.float32), 0.0)


def majority(wrong: Bool[Array, "B V K"], spoke: Bool[Array, "B V"]) -> Float[Array, "B K"]:
    """1 where more than half of the critics that answered call a step wrong.

    From "CAPO: Towards Enhancing LLM Reasoning through Generative Credit Assignment", arXiv:2508.02298, section 3.
    """
    return (average(wrong, spoke) > 0.5).astype(jnp.float32)


def unanimous(wrong: Bool[Array, "B V K"], spoke: Bool[Array, "B V"]) -> Float[Array, "B K"]:
    """1 where all critics that answered call a step wrong (intersection)."""
    wrong, spoke = wrong.astype(bool), spoke.astype(bool)  # of numbers ``~`` would turn the bits round
    every = jnp.all(wrong | ~spoke[:, :, None], axis=1) & jnp.any(spoke, axis=1, keepdims=True)
    return every.astype(jnp.float32)


def average(wrong: Bool[Array, "B V K"], spoke: Bool[Array, "B V"]) -> Float[Array, "B K"]:
    """The share of the critics that answered and call a step wrong; 0 where none answered.

    >>> import jax.numpy as jnp
    >>> wrong = jnp.array([[[True, False], [True, True], [False, False]]])
    >>> [round(float(x), 3) for x in average(wrong, jnp.ones((1, 3), bool))[0]]
    [0.667, 0.333]
    """
    count = jnp.maximum(jnp.sum(spoke.astype(jnp.float32), axis=1, keepdims=True), 1.0)
    return jnp.sum((wrong & spoke[:, :, None]).astype(jnp.float32), axis=1) / count


def credited(
    right: Bool[Array, " B"],
    flaws: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    outcome: float = 2.0,
    penalty: float = 1.0,
) -> Float[Array, "B T"]:
    """``outcome * right - penalty * flaw`` at every token; with ``outcome > penalty`` the outcome dominates.

    Args:
      flaws: of the step that a token belongs to, in [0, 1].

    From "CAPO", arXiv:2508.02298, section 3. Differs from the paper in that its two numbers are recalled, not read.
    """
    earned = outcome * right[:, None].astype(jnp.float32) - penalty * flaws.astype(jnp.float32)
    return jnp.where(mask, earned, 0.0)


def group_token_normalized(
    rewards: Float[Array, "B T"], group_ids: Int[Array, " B"], mask: Bool[Array, "B T"], *, eps: float = 1e-6
) -> Float[Array, "B T"]:
    """``(r - mean) / (std + eps)`` over all masked tokens of a group; 0 where they are all equal.

    With one reward a response and equal lengths it is the group normalisation of responses, with the population's
    deviation.

    From "CAPO", arXiv:2508.02298, section 3.

    >>> import jax.numpy as jnp
    >>> found = group_token_normalized(jnp.array([[1.0, 1.0], [0.0, 0.0]]), jnp.array([0, 0]), jnp.ones((2, 2), bool))
    >>> found.round(3).tolist()
    [[1.0, 1.0], [-1.0, -1.0]]
    """
    lowest = jnp.min(jnp.where(mask, rewards.astype(jnp.float32), jnp.inf), axis=1)
    low = jax.ops.segment_min(lowest, group_ids, num_segments=lowest.shape[0])[group_ids][:, None]
    # less a member of the group: sums of large numbers lose digits
    real = jnp.where(mask, rewards.astype(jnp.float32) - jax.lax.stop_gradient(jnp.where(mask, low, 0.0)), 0.0)
    count = jnp.maximum(group_sum(jnp.sum(mask.astype(jnp.float32), axis=1), group_ids), 1.0)
    mean = group_sum(jnp.sum(real, axis=1), group_ids) / count
    centred = jnp.where(mask, real - mean[:, None], 0.0)
    deviation = jnp.sqrt(group_sum(jnp.sum(centred**2, axis=1), group_ids) / count)[:, None]
    usable = mask & (deviation > 1e-6)
    return jnp.where(usable, centred / (jnp.where(deviation > 0, deviation, 1.0) + eps), 0.0)


def best_of(success: Float[Array, "B K"], samples: int) -> Float[Array, "B K"]:
    """Success of the best of several completions: ``1 - (1 - Q)^K``, a stronger prover made of the same one.

    From "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning", arXiv:2410.08146, section 3.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 4) for x in best_of(jnp.array([[0.2, 0.5]]), 4)[0]]
    [0.5904, 0.9375]
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    return 1.0 - (1.0 - success.astype(jnp.float32)) ** samples


def progress(after: Float[Array, "B K"], before: Float[Array, " B"], valid: Bool[Array, "B K"]) -> Float[Array, "B K"]:
    """Process advantages: a prover's chance of success after each step less that before it; they telescope.

    The chance before a step is that after the last valid one: those of a response sum to ``after[last] - before``.

    Args:
      before: its chance at the prompt alone.

    From "Rewarding Progress" (PAV), arXiv:2410.08146, section 3.

    >>> import jax.numpy as jnp
    >>> found = progress(jnp.array([[0.9, jnp.nan, 0.8]]), jnp.array([0.1]), jnp.array([[True, False, True]]))
    >>> [round(float(x), 4) for x in found[0]]
    [0.8, 0.0, -0.1]
    """
    after = jnp.where(valid, after.astype(jnp.float32), 0.0)
    chances = jnp.concatenate([before.astype(jnp.float32)[:, None], after], axis=1)
    own = jnp.pad(jnp.where(valid, jnp.arange(1, chances.shape[1])[None, :], 0), ((0, 0), (1, 0)))
    earlier = jnp.take_along_axis(chances, jax.lax.cummax(own, axis=1)[:, :-1], axis=1)
    return jnp.where(valid, after - earlier, 0.0)
