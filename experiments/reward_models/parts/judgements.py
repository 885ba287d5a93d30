"""Scores that a judge writes: rewards of a judgement against gold, votes of several, and their changes of mind."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def structure_rewards(tagged: Bool[Array, " B"], scored: Bool[Array, " B"]) -> Float[Array, " B"]:
    """+1 for a judgement in its form, -0.5 where only the scores are no numbers of the scale, -1 for broken tags.

    From "JudgeLRM: Large Reasoning Models as a Judge", arXiv:2504.00050, with its code.
    """
    return jnp.where(tagged, jnp.where(scored, 1.0, -0.5), -1.0)


def judge_rewards(
    structure: Float[Array, " B"], scores: Float[Array, "B 2"], gold: Float[Array, "B 2"], *, score_terms: bool = True
) -> Float[Array, " B"]:
    """Structure plus content: 2 for the right relation of the scores, -1.5 for the wrong one, and how close they are.

    ``structure - 2`` where the structure is not right. The relation is ``first >= second``. With ``d`` the sum of the
    absolute errors: +1 for ``d = 0``, +0.6 for ``d <= 2``; +0.2 where the scores are at least as far apart as gold's.

    Args:
      score_terms: False leaves closeness and distance out.

    From "JudgeLRM: Large Reasoning Models as a Judge", arXiv:2504.00050, with its code (without its length terms, which
    the released scripts switch off).

    >>> import jax.numpy as jnp
    >>> pairs = jnp.array([[8.0, 5.0], [7.0, 5.0], [4.0, 6.0]])
    >>> [round(float(x), 4) for x in judge_rewards(jnp.ones(3), pairs, jnp.broadcast_to(pairs[0], (3, 2)))]
    [4.2, 3.6, -0.5]
    """
    same = (scores[:, 0] >= scores[:, 1]) == (gold[:, 0] >= gold[:, 1])
    error = jnp.sum(jnp.abs(scores - gold), axis=1)
    apart = jnp.abs(scores[:, 1] - scores[:, 0]) >= jnp.abs(gold[:, 1] - gold[:, 0])
    close = jnp.where(error == 0, 1.0, jnp.where(error <= 2, 0.6, 0.0)) + jnp.where(apart, 0.2, 0.0)
    content = jnp.where(same, 2.0 + (close if score_terms else 0.0), -1.5)
    return jnp.where(structure > 0, structure + content, structure - 2.0)


def three_way(scores: Float[Array, "B 2"], gold: Float[Array, "B 2"]) -> Bool[Array, " B"]:
    """Whether the scores say the same as gold: first better, second better, or equal."""
    return jnp.sign(scores[:, 0] - scores[:, 1]) == jnp.sign(gold[:, 0] - gold[:, 1])


def picks_best(scores: Float[Array, "B N"], gold: Float[Array, "B N"]) -> Bool[Array, " B"]:
    """Whether a best response alone has the highest score (a tie with a worse one is wrong); of one: whether exact.

    Of several that are equally the best any may have it: no place is preferred. Where gold has all alike every report
    is right, so that such a group teaches nothing. Gold below 0: there is no response in that place, and a report that
    scores one there, or leaves a response without a score (below 0), is wrong.

    From "Inference-Time Scaling for Generalist Reward Modeling" (SPCT), arXiv:2504.02495, section 3.2.

    >>> import jax.numpy as jnp
    >>> picks_best(jnp.array([[6.0, 8, 8], [6.0, 8, 7]]), jnp.array([[0.0, 1, 0], [0.0, 1, 0]])).tolist()
    [False, True]
    >>> picks_best(jnp.array([[8.0, 6, 7], [6.0, 8, 7]]), jnp.array([[1.0, 1, 0], [1.0, 1, 0]])).tolist()
    [True, True]
    >>> picks_best(jnp.array([[1.0, -1, -1], [0.0, -1, -1], [1.0, 0, -1]]), jnp.array([[1.0, -1, -1]] * 3)).tolist()
    [True, False, False]
    """
    there = gold >= 0
    same = jnp.all((scores >= 0) == there, axis=1)
    best = there & (gold == jnp.max(gold, axis=1, keepdims=True))
    own = jnp.max(jnp.where(best, scores, -jnp.inf), axis=1)
    ahead = own > jnp.max(jnp.where(there & ~best, scores, -jnp.inf), axis=1)
    exact = jnp.all(~there | (scores == gold), axis=1)
    return same & jnp.where(jnp.sum(there.astype(jnp.int32), axis=1) == 1, exact, ahead)


def decided(gold: Float[Array, "B N"]) -> Bool[Array, " B"]:
    """Whether a report can be wrong: a single response, or several of which one at least is not the best.

    >>> import jax.numpy as jnp
    >>> decided(jnp.array([[5.0, 5, -1], [5.0, 4, -1], [0.0, -1, -1]])).tolist()
    [False, True, True]
    """
    there, top = gold >= 0, jnp.max(gold, axis=1, keepdims=True)
    return jnp.any(there & (gold < top), axis=1) | (jnp.sum(there.astype(jnp.int32), axis=1) == 1)


def by_majority(sums: Float[Array, "B N"], gold: Float[Array, "B N"], *, votes: int) -> Float[Array, "B N"]:
    """Sums of so many scores, but of a single response, rated 0 or 1, what most of the votes say (half of them: 0.5).

    >>> import jax.numpy as jnp
    >>> sums = jnp.array([[3.0, -4], [2.0, -4], [1.0, -4], [20.0, 18]])
    >>> by_majority(sums, jnp.array([[1.0, -1], [1.0, -1], [1.0, -1], [9.0, 8]]), votes=4)[:, 0].tolist()
    [1.0, 0.5, 0.0, 20.0]
    """
    single = (jnp.sum((gold >= 0).astype(jnp.int32), axis=1) == 1)[:, None] & (gold >= 0)
    return jnp.where(single, 0.5 + 0.5 * jnp.sign(2 * sums - votes), sums)


def voted(scores: Float[Array, "B V N"], confidence: Float[Array, "B V"] | None = None, *, keep: int = 0):
    """Sums of the scores of several judgements ``[B, N]``; with ``confidence`` of the ``keep`` most trusted only.

    From "Inference-Time Scaling for Generalist Reward Modeling", arXiv:2504.02495, sections 4.1 and 4.2 (meta RM).

    >>> import jax.numpy as jnp
    >>> scores = jnp.array([[[7.0, 6], [5.0, 6], [8.0, 6]]])
    >>> voted(scores).tolist(), voted(scores, jnp.array([[0.2, 0.9, 0.3]]), keep=2).tolist()
    ([[20.0, 18.0]], [[13.0, 12.0]])
    """
    if confidence is None:
        return jnp.sum(scores, axis=1)
    if not 1 <= keep <= scores.shape[1]:
        raise ValueError(f"keep={keep} must be from 1 to the {scores.shape[1]} judgements")
    rank = jnp.argsort(jnp.argsort(-confidence, axis=1), axis=1)
    return jnp.sum(jnp.where((rank < keep)[:, :, None], scores, 0.0), axis=1)


def restored(scores: Float[Array, "B N"], order: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """Scores of responses that were shown in another order, in their own: ``order[b, i]`` was shown at place i."""
    return jnp.take_along_axis(scores, jnp.argsort(order, axis=1), axis=1)


def flips(before: Bool[Array, " B"], after: Bool[Array, " B"]) -> dict[str, Float[Array, ""]]:
    """Shares of judgements that further thought put right, and that it spoilt.

    From "J1: Exploring Simple Test-Time Scaling for LLM-as-a-Judge", arXiv:2505.11875.

    >>> import jax.numpy as jnp
    >>> found = flips(jnp.array([False, False, True, True]), jnp.array([True, False, True, False]))
    >>> {k: float(v) for k, v in found.items()}
    {'put_right': 0.25, 'spoilt': 0.25}
    """
    count = before.shape[0]
    return {
        "put_right": jnp.sum((~before & after).astype(jnp.float32)) / count,
        "spoilt": jnp.sum((before & ~after).astype(jnp.float32)) / count,
    }


def log_slope(accuracy: Float[Array, " R"], tokens: Float[Array, " R"]) -> Float[Array, ""]:
    """Least-squares slope of accuracy against the logarithm of the tokens spent: the trend of test-time scaling."""
    x = jnp.log(tokens) - jnp.sum(jnp.log(tokens)) / tokens.shape[0]
    total = jnp.sum(x**2)
    return jnp.where(total > 0, jnp.sum(x * accuracy) / jnp.where(total > 0, total, 1.0), 0.0)


def meta_loss(logits: Float[Array, " B"], correct: Bool[Array, " B"]) -> Float[Array, " B"]:
    """Binary cross-entropy of a judge of judgements.

    From "Inference-Time Scaling for Generalist Reward Modeling", arXiv:2504.02495, section 4.2.
    """
    right = correct.astype(jnp.float32)
    return -right * jax.nn.log_sigmoid(logits) - (1 - right) * jax.nn.log_sigmoid(-logits)
