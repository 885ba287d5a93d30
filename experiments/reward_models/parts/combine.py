"""Several rewards of one response made into one: weights of rules, ensembles with their worst case."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def composed(rewards: Float[Array, "B K"], weights: Float[Array, " K"]) -> Float[Array, " B"]:
    """``sum_k w_k r_k``."""
    return rewards.astype(jnp.float32) @ weights.astype(jnp.float32)


def rating_entropy(ratings: Int[Array, "B K"], *, levels: int) -> Float[Array, " K"]:
    """Entropy (natural) of each rule's ratings ``0 .. levels - 1`` over the data; 0 for a constant one.

    From "Multi-head Reward Aggregation Guided by Entropy", arXiv:2503.20995, section 3.
    """
    at = jnp.arange(levels, dtype=ratings.dtype)[None, None, :]
    share = jnp.sum((ratings[:, :, None] == at).astype(jnp.float32), axis=0) / ratings.shape[0]
    return -jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0), axis=1)


def entropy_weights(
    entropy: Float[Array, " K"], *, temperature: float = 2.0, usable: Bool[Array, " K"] | None = None
) -> Float[Array, " K"]:
    """``softmax(-H / temperature)``: rules whose ratings are all over the scale count less.

    A negative temperature turns the order round.

    Args:
      usable: rules that take part; leave out those with one rating only, whose entropy 0 would win.

    From "Multi-head Reward Aggregation Guided by Entropy" (ENCORE), arXiv:2503.20995, section 3. Differs from the paper
    in ``usable``.

    >>> import jax.numpy as jnp
    >>> [round(float(w), 4) for w in entropy_weights(jnp.log(jnp.array([1.0, 2.0, 5.0])), temperature=1.0)]
    [0.5882, 0.2941, 0.1176]
    """
    if temperature == 0:
        raise ValueError("temperature=0.0 has no weights; a small one picks the rule of least entropy")
    scores = -entropy.astype(jnp.float32) / temperature
    return jax.nn.softmax(scores if usable is None else jnp.where(usable, scores, -jnp.inf))


def nominal_rewards(means: Float[Array, "B H"], deviations: Float[Array, "B H"]) -> Float[Array, " B"]:
    """The mean of the head that is most certain about each response.

    From "Reward-Robust RLHF in LLMs", arXiv:2409.15360, section 3.
    """
    surest = jnp.argmin(deviations, axis=1)
    return jnp.take_along_axis(means, surest[:, None], axis=1)[:, 0]


def robust_rewards(
    means: Float[Array, "B H"], deviations: Float[Array, "B H"], *, share: float = 0.6
) -> Float[Array, " B"]:
    """``share * nominal + (1 - share) * min_h mean_h``: what the surest head says, and the worst case of all.

    Args:
      share: 1 is plain optimisation of the surest head, 0 of the worst one.

    From "Reward-Robust RLHF in LLMs" (BRME), arXiv:2409.15360, eq. 5. Differs from the paper in taking the minimum
    response by response, not over whole reward functions.

    >>> import jax.numpy as jnp
    >>> found = robust_rewards(jnp.array([[0.9, 0.2, 0.5]]), jnp.array([[0.1, 0.3, 0.2]]), share=0.6)
    >>> round(float(found[0]), 4)
    0.62
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} of the nominal reward must lie in [0, 1]")
    return share * nominal_rewards(means, deviations) + (1 - share) * jnp.min(means, axis=1)


def lower_bound_rewards(means: Float[Array, "B H"], *, weight: float = 1.0) -> Float[Array, " B"]:
    """``mean_h - weight std_h`` (population): a soft worst case; weight 0 is the mean of the heads."""
    count = means.shape[1]
    centre = jnp.sum(means, axis=1, keepdims=True) / count
    spread = jnp.sqrt(jnp.sum((means - centre) ** 2, axis=1) / count)
    return centre[:, 0] - weight * spread


def pearson(left: Float[Array, " K"], right: Float[Array, " K"]) -> Float[Array, ""]:
    """Correlation of two rows of numbers; 0 where one of them is constant.

    >>> import jax.numpy as jnp
    >>> float(pearson(jnp.array([1.0, 2.0, 3.0]), jnp.array([6.0, 4.0, 2.0])))
    -1.0
    """
    a, b = (x - jnp.sum(x) / x.shape[0] for x in (left, right))
    scale = jnp.sqrt(jnp.sum(a**2) * jnp.sum(b**2))
    return jnp.where(scale > 0, jnp.sum(a * b) / jnp.where(scale > 0, scale, 1.0), 0.0)


def win_rates(first: Float[Array, "B K"], second: Float[Array, "B K"]) -> Float[Array, " K"]:
    """How often each column prefers the first of two responses; ties count half.

    >>> import jax.numpy as jnp
    >>> win_rates(jnp.array([[1.0, 0.0], [2.0, 0.0]]), jnp.array([[0.0, 0.0], [3.0, 1.0]])).tolist()
    [0.5, 0.25]
    """
    return jnp.sum(0.5 * (1.0 + jnp.sign(first - second)), axis=0) / first.shape[0]
