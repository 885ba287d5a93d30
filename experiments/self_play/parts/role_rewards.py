"""What a proposer, a solver and a judge earn from the scores of that same judge, as functions of arrays.

From "Multi-Agent Evolve: LLM Self-Improve through Co-evolution" (MAE), arXiv:2510.23595, sections 3 and 4, with its
code. All rewards lie in [0, 1].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages import process, whiten
from jaxrl_llm.types import Key

PROPOSER, SOLVER, JUDGE = range(3)
UNREADABLE = 0.5  # what a judgement without a score says


def normalised(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scores of 1 to 10 as ``clip((s - 1) / 9, 0, 1)``; NaN, a judgement without a score, as 0.5.

    So a judge that forgets its form still pays: who trains by it counts how often that happens.

    >>> [round(float(x), 6) for x in normalised(jnp.array([8.0, 1.0, 12.0, jnp.nan]))]
    [0.777778, 0.0, 1.0, 0.5]
    """
    there = jnp.isfinite(scores)
    return jnp.where(there, jnp.clip((jnp.where(there, scores, 1.0) - 1.0) / 9.0, 0.0, 1.0), UNREADABLE)


def hardness(solved: Float[Array, " P"]) -> Float[Array, " P"]:
    """Difficulty of a question: one minus the mean judgement of the answers to it."""
    return 1.0 - solved


def no_hardness(solved: Float[Array, " P"]) -> Float[Array, " P"]:
    """A proposer that is not paid for hard questions."""
    return jnp.zeros_like(solved)


def accepted(quality: Float[Array, " P"], asked: Bool[Array, " P"], *, threshold: float = 0.7) -> Bool[Array, " P"]:
    """Which questions join the pool: there is one, and the judge finds it good enough."""
    return asked & (quality >= threshold)


def proposer_rewards(
    quality: Float[Array, " P"],
    solved: Float[Array, " P"],
    form: Float[Array, " P"],
    asked: Bool[Array, " P"],
    *,
    threshold: float = 0.7,
    difficulty: Callable[[Array], Array] = hardness,
) -> Float[Array, " P"]:
    """``(quality + difficulty + form) / 3``; the difficulty of a question below the threshold counts 0.

    Without a question to be read the reward is 0. From "MAE", arXiv:2510.23595, section 3.

    Args:
      quality: what the judge says of each question, in [0, 1].
      solved: mean of what it says of the answers to it, in [0, 1].
      form: 1 for a response in the form that was asked for, see ``roles``.
      asked: whether a question can be read from the response.

    >>> one = jnp.ones(2)
    >>> good = proposer_rewards(jnp.array([7 / 9, 5 / 9]), 0.4 * one, one, one > 0)
    >>> [round(float(x), 6) for x in good]
    [0.792593, 0.518519]
    """
    hard = jnp.where(accepted(quality, asked, threshold=threshold), difficulty(solved), 0.0)
    return jnp.where(asked, (quality + hard + form) / 3.0, 0.0)


def solver_rewards(judged: Float[Array, " P"], form: Float[Array, " P"]) -> Float[Array, " P"]:
    """``judged / 2 + form / 2``: an answer in its form earns half, whatever the judge says of it."""
    return 0.5 * judged + 0.5 * form


def by_role(rewards: Float[Array, "B T"], roles: Int[Array, " B"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Task-relative REINFORCE++: rewards at every token, whitened over the tokens of each role by itself."""
    return jax.lax.stop_gradient(process.group_token_normalized(rewards, roles, mask))


def batch_wide(rewards: Float[Array, "B T"], roles: Int[Array, " B"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """REINFORCE++ over all tokens alike: the role that earns more on the whole is always above the mean."""
    return jax.lax.stop_gradient(whiten.whitened_tokens(rewards, mask))


def every_role(roles: Int[Array, " B"]) -> Bool[Array, " B"]:
    """All three roles train."""
    return jnp.ones(roles.shape, bool)


def without_judge(roles: Int[Array, " B"]) -> Bool[Array, " B"]:
    """The judge's form is not trained."""
    return roles != JUDGE


def solver_alone(roles: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Only answers train."""
    return roles == SOLVER


def as_judged(judged: Float[Array, " N"], truth: Float[Array, " N"], key: Key) -> Float[Array, " N"]:
    """Answers are paid by the judge."""
    return judged


def permuted(judged: Float[Array, " N"], truth: Float[Array, " N"], key: Key) -> Float[Array, " N"]:
    """Answers are paid by what the judge says of other answers: a judge that knows nothing."""
    return jax.random.permutation(key, judged)


def half_permuted(judged: Float[Array, " N"], truth: Float[Array, " N"], key: Key) -> Float[Array, " N"]:
    """Every second answer is paid by what the judge says of another one."""
    where, how = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(where, 0.5, judged.shape), permuted(judged, truth, how), judged)


def true_answers(judged: Float[Array, " N"], truth: Float[Array, " N"], key: Key) -> Float[Array, " N"]:
    """Answers are paid by whether they are right, where that is known (not NaN), else by the judge."""
    return jnp.where(jnp.isnan(truth), judged, truth)
