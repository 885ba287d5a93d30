"""What a model fails at, and new problems aimed there: weak problems, budgets, sets of concepts, quality votes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.types import Key

BAD, ACCEPTABLE, PERFECT = 0, 1, 2  # what a judge says of a synthetic problem


def accuracy_slopes(history: Float[Array, "N E"]) -> Float[Array, " N"]:
    """Least-squares slope of each problem's accuracy against the epoch; 0 for a constant row and for one epoch.

    >>> import jax.numpy as jnp
    >>> accuracy_slopes(jnp.array([[0.25, 0.125, 0.0], [0.5, 0.5, 0.5]])).tolist()
    [-0.125, 0.0]
    """
    epochs = history.shape[1]
    centred = jnp.arange(epochs, dtype=jnp.float32) - (epochs - 1) / 2
    # centred epochs sum to 0, so the mean accuracy drops out; rows equal to their first entry are exactly flat
    moved = history.astype(jnp.float32) - history[:, :1]
    return moved @ centred / jnp.maximum(jnp.sum(centred**2), 1.0)


def weak_problems(history: Float[Array, "N E"], *, threshold: float = 0.5) -> Bool[Array, " N"]:
    """Problems whose accuracy never exceeded ``threshold`` and did not rise over the epochs.

    From "SwS: Self-aware Weakness-driven Problem Synthesis in Reinforcement Learning for LLM Reasoning",
    arXiv:2506.08989, section 2.2.

    >>> import jax.numpy as jnp
    >>> weak_problems(jnp.array([[0.25, 0.125, 0.0], [0.0, 0.25, 0.375], [0.6, 0.5, 0.4]])).tolist()
    [True, False, False]
    """
    return (jnp.max(history, axis=1) <= threshold) & (accuracy_slopes(history) <= 0)


def category_budgets(
    weak: Bool[Array, " N"], categories: Int[Array, " N"], *, total: int, count: int
) -> Int[Array, " K"]:
    """New problems for each of ``count`` categories: ``floor(total f_D / sum f)``, ``f_D`` the weak share of one.

    Where nothing is weak all budgets are 0.

    From "SwS", arXiv:2506.08989, section 2.2.

    >>> import jax.numpy as jnp
    >>> weak, of = jnp.arange(40) % 20 < jnp.repeat(jnp.array([3, 1]), 20), jnp.repeat(jnp.arange(2), 20)
    >>> category_budgets(weak, of, total=100, count=2).tolist()
    [75, 25]
    """
    sizes = jax.ops.segment_sum(jnp.ones(weak.shape, jnp.float32), categories, num_segments=count)
    failed = jax.ops.segment_sum(weak.astype(jnp.float32), categories, num_segments=count)
    ratio = failed / jnp.maximum(sizes, 1.0)
    # 1e-4: float32 must not lower a whole number to the one before
    share = ratio / jnp.maximum(jnp.sum(ratio), 1e-9)
    return jnp.floor(total * share + 1e-4).astype(jnp.int32)


def concept_scores(
    cooccurrence: Float[Array, "K K"], embeddings: Float[Array, "K D"], chosen: Bool[Array, " K"]
) -> Float[Array, " K"]:
    """How well each concept goes with those chosen: ``sum_c' Co[c, c'] + cos(e_c, mean of the chosen e)``.

    Args:
      embeddings: of length 1.

    From "SwS", arXiv:2506.08989, section 2.3. Differs from the released fast code, which adds the similarities in the
    order of their ranks instead of by concept.
    """
    seen = cooccurrence @ chosen.astype(jnp.float32)
    mean = chosen.astype(jnp.float32) @ embeddings
    length = jnp.sqrt(jnp.sum(mean**2))
    return seen + embeddings @ (mean / jnp.maximum(length, 1e-9))


def draw_concepts(
    key: Key,
    frequency: Float[Array, " K"],
    cooccurrence: Float[Array, "K K"],
    embeddings: Float[Array, "K D"],
    *,
    size: int = 5,
    temperature: float = 0.2,
) -> Bool[Array, " K"]:
    """A set of ``size`` concepts: the first by frequency, each further one by a softmax of its score.

    From "SwS", arXiv:2506.08989, section 2.3.
    """
    count = frequency.shape[0]
    if not 1 <= size <= count or temperature <= 0:
        raise ValueError(f"size={size} must be from 1 to {count} concepts, temperature={temperature} positive")
    keys = jax.random.split(key, size)
    first = jax.random.categorical(keys[0], jnp.log(jnp.maximum(frequency, 1e-30)))

    def add(chosen, key):
        scores = concept_scores(cooccurrence, embeddings, chosen) / temperature
        further = jax.random.categorical(key, jnp.where(chosen, -jnp.inf, scores))
        return chosen | (jnp.arange(count) == further), None

    return jax.lax.scan(add, jnp.arange(count) == first, keys[1:])[0]


def passes_vote(ratings: Int[Array, "N J"]) -> Bool[Array, " N"]:
    """Problems that at least one judge calls perfect and none bad.

    From "SwS", arXiv:2506.08989, section 2.3.

    >>> import jax.numpy as jnp
    >>> passes_vote(jnp.array([[PERFECT, ACCEPTABLE], [PERFECT, BAD], [ACCEPTABLE, ACCEPTABLE]])).tolist()
    [True, False, False]
    """
    return jnp.any(ratings == PERFECT, axis=1) & jnp.all(ratings != BAD, axis=1)


def consistent_answers(answers: Int[Array, "N S"]) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """The most frequent of the ``S`` answers to each problem (of equals the first) and its share.

    From "SwS", arXiv:2506.08989, section 2.4: a problem is kept where the share reaches a threshold.

    >>> import jax.numpy as jnp
    >>> [x.tolist() for x in consistent_answers(jnp.array([[3, 5, 5, 5], [1, 2, 2, 1]]))]
    [[5, 1], [0.75, 0.5]]
    """
    votes = jnp.sum((answers[:, :, None] == answers[:, None, :]).astype(jnp.int32), axis=2)
    best = jnp.argmax(votes, axis=1)
    picked = jnp.take_along_axis(answers, best[:, None], axis=1)[:, 0]
    return picked, jnp.max(votes, axis=1).astype(jnp.float32) / answers.shape[1]
