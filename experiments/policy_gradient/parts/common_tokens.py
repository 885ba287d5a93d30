"""What a wrong answer has in common with the annotated one, and a contrastive loss that learns from the difference."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.losses import contrastive
from jaxrl_llm.types import PairTerms


def _in_common(
    left: Int[Array, " A"], left_there: Bool[Array, " A"], right: Int[Array, " R"], right_there: Bool[Array, " R"]
) -> tuple[Bool[Array, " A"], Bool[Array, " R"]]:
    same = (left[:, None] == right[None, :]) & left_there[:, None] & right_there[None, :]

    def row(above, equal):  # lengths for one more token of the left, and 0, 1, ... of the right
        own = jnp.maximum(above[1:], jnp.where(equal, above[:-1] + 1, 0))
        here = jnp.concatenate([jnp.zeros(1, jnp.int32), jax.lax.cummax(own)])
        return here, here

    first = jnp.zeros(right.shape[0] + 1, jnp.int32)
    length = jnp.concatenate([first[None], jax.lax.scan(row, first, same)[1]])

    def back(at, _):
        i, j = at
        up, aside = jnp.maximum(i - 1, 0), jnp.maximum(j - 1, 0)
        inside = (i > 0) & (j > 0)
        both = inside & same[up, aside] & (length[i, j] == length[up, aside] + 1)
        leave_left = inside & ~both & (length[up, j] >= length[i, aside])
        next_i = jnp.where(both | leave_left, up, i)
        next_j = jnp.where(both | (inside & ~leave_left), aside, j)
        return (next_i, next_j), (up, aside, both)

    ends = jnp.int32(left.shape[0]), jnp.int32(right.shape[0])
    _, (rows, columns, taken) = jax.lax.scan(back, ends, None, length=left.shape[0] + right.shape[0])
    marked = (jnp.zeros(x.shape, bool).at[at].max(taken) for x, at in ((left, rows), (right, columns)))
    return tuple(marked)


def in_common(
    left: Int[Array, "B A"], left_there: Bool[Array, "B A"], right: Int[Array, "B R"], right_there: Bool[Array, "B R"]
) -> tuple[Bool[Array, "B A"], Bool[Array, "B R"]]:
    """Which tokens of two texts are part of a longest common subsequence, row by row: its table is [A, R].

    >>> import jax.numpy as jnp
    >>> x, y = jnp.array([[1, 2, 3, 4]]), jnp.array([[2, 9, 4, 4]])
    >>> here, there = in_common(x, x > 0, y, y > 0)
    >>> here.tolist(), int(there.sum()), there[0, :2].tolist()
    ([[False, True, False, True]], 2, [True, False])
    """
    return jax.lax.map(lambda row: _in_common(*row), (left, left_there, right, right_there))


def negative_infonce_loss(
    missing: Float[Array, "B K"],
    shared: Float[Array, "B K"],
    wrong: Float[Array, "B K"],
    keep: Bool[Array, " B"],
    *,
    group_ids: Int[Array, " B"],
    tau: float = 0.2,
    cap: float = 0.9,
) -> PairTerms:
    """What a wrong sample shares with the annotation is drawn to what it lacks of it, away from what is wrong in it.

    ``-log(exp(min(cos(m_i, s_i), cap) / tau) / (sum_j exp(cos(s_i, s_j) / tau) + sum_j exp(cos(s_i, w_j) / tau)))`` of
    the kept rows, else 0; ``j`` over the kept rows, in the first sum over those of other prompts and the row itself.

    From "CARFT: Boosting LLM Reasoning via Contrastive Learning with Annotated Chain-of-Thought-based Reinforced
    Fine-Tuning", arXiv:2508.15868. Differs from its public code (WNQzhu/CARFT, ``my_cl_trainer.py``) in the sums, which
    there run over right samples, too: where many answers are right, what is not in the annotation is no error in them.

    Args:
      missing: of the annotation's tokens that the sample does not have; no gradient.
      shared, wrong: of the sample's tokens that the annotation has, and of the others.
      keep: wrong samples, of which none of the three is empty.
    """
    pull = jnp.diagonal(contrastive.cosines(jax.lax.stop_gradient(missing), shared))
    siblings = (group_ids[:, None] == group_ids[None, :]) & ~jnp.eye(group_ids.shape[0], dtype=bool)
    others, errors = contrastive.cosines(shared, shared), contrastive.cosines(shared, wrong)
    others = jnp.where(keep[None, :] & ~siblings, others, -jnp.inf)
    errors = jnp.where(keep[None, :], errors, -jnp.inf)
    near = jnp.where(keep[:, None], jnp.concatenate([others, errors], axis=1), 0.0)
    loss = jax.nn.logsumexp(near / tau, axis=1) - jnp.minimum(pull, cap) / tau
    return PairTerms(jnp.where(keep, loss, 0.0), {"cosine": jax.lax.stop_gradient(pull)})
