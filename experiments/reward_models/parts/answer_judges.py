"""Judges of free answers: a large one that errs now and then, small ones distilled from it, with reasoning and without.

A judge is ``(value, answered, answers) -> [B]``, see ``free_answers``.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from experiments.reward_models.parts import free_answers
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.types import Key, Params

YES, NO, OTHER = 0, 1, 2  # what a distilled judge may say; OTHER cannot be read


def judged_pairs(rng: np.random.Generator, count: int, error_rate: float) -> tuple[np.ndarray, np.ndarray]:
    """``(answer, reference, modulus) [N, 3]`` of all qualities, and a judge's verdicts, wrong at the given rate."""
    modulus = rng.choice(chain.MODULI, count)
    value = rng.integers(0, modulus)
    reference = value + modulus * rng.integers(0, 2, count)
    right = rng.random(count) < 0.5
    other = np.where(right, value, rng.integers(0, modulus)) + modulus * rng.integers(0, 2, count)
    truth = (other - reference) % modulus == 0
    return np.stack([other, reference, modulus], axis=1), truth ^ (rng.random(count) < error_rate)


def pair_features(pairs: Int[Array, "B 3"]) -> Float[Array, "B F"]:
    """One-hot answer and reference (to 31) and modulus; what is larger is its own kind."""
    parts = [jax.nn.one_hot(jnp.clip(pairs[:, k], 0, 32), 33) for k in (0, 1)]
    kinds = jnp.asarray(chain.MODULI, jnp.int32)
    return jnp.concatenate([*parts, (pairs[:, 2:] == kinds[None, :]).astype(jnp.float32)], axis=1)


def init_net(key: Key, inputs: int, outputs: int, hidden: int = 64) -> Params:
    """Two layers."""
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (inputs, hidden)) * inputs**-0.5,
        "out": jax.random.normal(second, (hidden, outputs)) * hidden**-0.5,
    }


def apply_net(net: Params, features: Float[Array, "B F"]) -> Float[Array, "B K"]:
    """Logits."""
    return jnp.tanh(features @ net["in"]) @ net["out"]


def fit_net(net: Params, loss: Callable[[Params], Array], *, steps: int, learning_rate: float = 0.01) -> Params:
    """Full-batch Adam."""
    tx = optax.adam(learning_rate)

    def step(carry: Any, _: None):
        net, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optimisers mix weak integers and floats
            updates, state = tx.update(jax.grad(loss)(net), state)
        return (jax.tree.map(jnp.add, net, updates), state), None

    return jax.jit(lambda c: jax.lax.scan(step, c, None, steps)[0][0])((net, tx.init(net)))


def make_large_judge(error_rate: float) -> Callable[..., Array]:
    """The truth, but for a fixed share of (answer, reference, modulus) on which it is wrong."""

    def judge(value, answered, answers):
        mixed = value * 7919 + answers["reference"] * 104729 + answers["modulus"] * 1299709
        coin = (jnp.abs(mixed * 48271) % 1000).astype(jnp.float32) / 1000
        verdict = free_answers.equivalent(value, answered, answers) ^ (coin < error_rate)
        return (verdict & answered).astype(jnp.float32)

    return judge


def soft_judgement(
    yes: Float[Array, " B"], no: Float[Array, " B"], judged: Int[Array, " B"], *, renormalise: bool = False
) -> Float[Array, " B"]:
    """``P(yes)`` where the judge says yes, ``1 - P(no)`` where it says no, 0 where it says neither.

    Args:
      renormalise: over the two words only; then both are ``P(yes)``.

    From "Crossing the Reward Bridge: Expanding RL with Verifiable Rewards Across Diverse Domains", arXiv:2503.23829,
    section 3.

    >>> import jax.numpy as jnp
    >>> half = jnp.array([0.7, 0.7]), jnp.array([0.2, 0.2]), jnp.array([YES, NO])
    >>> [f"{x:.3f}" for x in (*soft_judgement(*half), *soft_judgement(*half, renormalise=True))]
    ['0.700', '0.800', '0.778', '0.778']
    """
    if renormalise:
        both = jnp.maximum(yes + no, 1e-9)
        yes, no = yes / both, no / both
    return jnp.where(judged == YES, yes, jnp.where(judged == NO, 1.0 - no, 0.0))


@lru_cache(maxsize=8)
def distilled(examples: int, error_rate: float, steps: int = 300, seed: int = 0) -> Params:
    """A net that imitates a judge's verdicts on logged answers; 3 % of the log cannot be read."""
    rng = np.random.default_rng(seed)
    pairs, verdict = judged_pairs(rng, examples, error_rate)
    said = np.where(rng.random(examples) < 0.03, OTHER, np.where(verdict, YES, NO))
    features, said = pair_features(jnp.asarray(pairs, jnp.int32)), jnp.asarray(said, jnp.int32)

    def loss(net):
        logp = jax.nn.log_softmax(apply_net(net, features))
        return -jnp.sum(jnp.take_along_axis(logp, said[:, None], axis=1)) / examples

    return fit_net(init_net(jax.random.key(seed), features.shape[1], 3), loss, steps=steps)


def _pairs(value: Array, answers: dict[str, Array]) -> Array:
    return jnp.stack([value, answers["reference"], answers["modulus"]], axis=1)


def make_small_judge(net: Params, *, soft: bool) -> Callable[..., Array]:
    """The distilled judge, by its word or by how sure it is."""

    def judge(value, answered, answers):
        chances = jax.nn.softmax(apply_net(net, pair_features(_pairs(value, answers))))
        judged = jnp.argmax(chances, axis=1).astype(jnp.int32)
        reward = (
            soft_judgement(chances[:, YES], chances[:, NO], judged) if soft else (judged == YES).astype(jnp.float32)
        )
        return jnp.where(answered, reward, 0.0)

    return judge


def number_features(numbers: Int[Array, " B"], modulus: Int[Array, " B"]) -> Float[Array, "B F"]:
    """One-hot number (to 31) within its modulus."""
    kind = jnp.argmax(modulus[:, None] == jnp.asarray(chain.MODULI, jnp.int32)[None, :], axis=1)
    return jax.nn.one_hot(kind * 33 + jnp.clip(numbers, 0, 32), 33 * len(chain.MODULI))


@lru_cache(maxsize=8)
def distilled_reasoner(examples: int, steps: int = 300, seed: int = 0) -> Params:
    """A net that names the canonical form of one number; the written work of a strong judge is its data."""
    pairs, _ = judged_pairs(np.random.default_rng(seed), examples, 0.0)
    numbers, modulus = (jnp.asarray(np.concatenate(x), jnp.int32) for x in
                        ((pairs[:, 0], pairs[:, 1]), (pairs[:, 2], pairs[:, 2])))  # fmt: skip
    features, residue = number_features(numbers, modulus), numbers % modulus

    def loss(net):
        logp = jax.nn.log_softmax(apply_net(net, features))
        return -jnp.sum(jnp.take_along_axis(logp, residue[:, None], axis=1)) / (2 * examples)

    return fit_net(init_net(jax.random.key(seed), features.shape[1], max(chain.MODULI)), loss, steps=steps)


def make_reasoning_judge(net: Params) -> Callable[..., Array]:
    """Writes the canonical form of answer and of reference, then compares: yes where they are the same.

    From "General-Reasoner: Advancing LLM Reasoning Across All Domains", arXiv:2505.14652, section 3.
    """

    def judge(value, answered, answers):
        forms = [
            jnp.argmax(apply_net(net, number_features(x, answers["modulus"])), axis=1)
            for x in (value, answers["reference"])
        ]
        return ((forms[0] == forms[1]) & answered).astype(jnp.float32)

    return judge


def make_false_positives(judge: Callable[..., Array]):
    """``eval/false_positives``: of what the judge accepts, the share that is wrong. A ``more`` of ``make_measure``."""

    def figures(read, rows, answers):
        value, answered = read(rows)
        passed = judge(value, answered, answers).astype(jnp.float32) > 0.5
        wrong = passed & ~free_answers.equivalent(value, answered, answers)
        count = jnp.maximum(jnp.sum(passed.astype(jnp.float32)), 1.0)
        return {"eval/false_positives": jnp.sum(wrong.astype(jnp.float32)) / count}

    return figures
