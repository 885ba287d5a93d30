"""A value model of prompts chooses those of a wanted success rate, without a single rollout."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.types import Sampler


class ValueState(NamedTuple):
    """The head that predicts success from a prompt's features, and its optimiser."""

    weight: Float[Array, " F"]
    bias: Float[Array, ""]
    opt_state: Any


def predicted_success(weight: Float[Array, " F"], bias: Float[Array, ""], features: Float[Array, "n F"]) -> Array:
    """``sigmoid(features w + b)``, in [0, 1]."""
    return jax.nn.sigmoid(features @ weight + bias)


def success_loss(values: Float[Array, " n"], rates: Float[Array, " n"], valid: Bool[Array, " n"]) -> Float[Array, ""]:
    """``sum (V - p)^2`` over the prompts with a measured success rate.

    From "Prompt Curriculum Learning for Efficient LLM Post-Training", arXiv:2510.01135, section 4.
    """
    return jnp.sum(jnp.where(valid, (values - jnp.where(valid, rates, 0.0)) ** 2, 0.0))


def nearest_prompts(values: Float[Array, " n"], *, target: float, count: int) -> Int[Array, " m"]:
    """The ``count`` prompts whose predicted success is nearest to ``target``, of equals the first.

    >>> import jax.numpy as jnp
    >>> nearest_prompts(jnp.array([0.1, 0.45, 0.9, 0.6]), target=0.5, count=2).tolist()
    [1, 3]
    """
    if count > values.shape[0]:
        raise ValueError(f"count={count} prompts cannot be taken from {values.shape[0]}")
    return jnp.argsort(jnp.abs(values - target), stable=True)[:count].astype(jnp.int32)


def effective_ratio(success: Float[Array, " n"], responses: int) -> Float[Array, " n"]:
    """Chance that a group has both right and wrong responses: ``1 - p^G - (1 - p)^G``.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 5) for x in effective_ratio(jnp.array([0.5, 0.05]), 16)]
    [0.99997, 0.55987]
    """
    return 1.0 - success**responses - (1.0 - success) ** responses


def make_prompt_value(
    features: Float[Array, "N F"], tx: Any, *, candidates: int = 4, target: float = 0.5, explore: float = 0.0
) -> Sampler:
    """Of ``candidates`` times as many random prompts, takes those that the value model puts nearest to ``target``.

    After the rollouts the value model takes one step on ``success_loss`` of the prompts that were used, so it is always
    one policy step behind.

    Args:
      features: of every prompt of the table, for example a frozen model's hidden state at its last token.
      tx: a gradient transformation (``init`` and ``update``), for example of optax.
      candidates: prompts that are valued for each one taken; 1 is uniform.
      explore: share of the draw that is random, so that the value model also sees what it would not choose.

    From "Prompt Curriculum Learning for Efficient LLM Post-Training", arXiv:2510.01135, algorithm 1. Differs from the
    paper in that the value model is a head on given features, not a language model of the policy's size.
    """
    if candidates < 1 or not 0 <= target <= 1 or not 0 <= explore <= 1:
        raise ValueError(f"candidates={candidates} must be at least 1; target={target}, explore={explore} in [0, 1]")

    def init(num_problems: int) -> ValueState:
        if num_problems != features.shape[0]:
            raise ValueError(f"features has {features.shape[0]} rows, the table {num_problems} prompts")
        head = jnp.zeros((features.shape[1],), jnp.float32), jnp.zeros((), jnp.float32)
        return ValueState(*head, tx.init(head))

    def draw(state: ValueState, key, n: int) -> tuple[Int[Array, " n"], ValueState]:
        pool = min(candidates * n, features.shape[0])
        ids = jax.random.permutation(key, features.shape[0])[: max(pool, n)].astype(jnp.int32)
        values = predicted_success(state.weight, state.bias, features[ids])
        free = round(explore * n)
        # the first rows of a random order are random prompts; the others are chosen among the rest
        chosen = ids[free:][nearest_prompts(values[free:], target=target, count=n - free)]
        return jnp.concatenate([ids[:free], chosen]), state

    def update(state: ValueState, ids, scores, valid) -> ValueState:
        def loss(head):
            return success_loss(predicted_success(*head, features[ids]), scores, valid)

        head = (state.weight, state.bias)
        with jax.numpy_dtype_promotion("standard"):  # optimisers mix weak integers and floats
            updates, opt_state = tx.update(jax.grad(loss)(head), state.opt_state, head)
        head = jax.tree.map(lambda x, u: x + u, head, updates)
        return ValueState(*head, opt_state)

    return Sampler(init, draw, update)


def standardised(features: Float[Array, "N F"]) -> Float[Array, "N F"]:
    """Features with mean 0 and deviation 1 over the table; a constant one becomes 0."""
    centred = features - jnp.sum(features, axis=0, keepdims=True) / features.shape[0]
    deviation = jnp.sqrt(jnp.sum(centred**2, axis=0, keepdims=True) / features.shape[0])
    return jnp.where(deviation > 1e-6, centred / jnp.maximum(deviation, 1e-6), 0.0)


@lru_cache(maxsize=8)
def _prompt_features(identity: tuple) -> Array:
    found = recipes.bench(OnlineSettings(**dict(identity)))
    policy, tokens, valid = found.model.policy, found.train.tokens, found.train.valid
    positions = jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)

    @jax.jit
    def last(params, tokens, valid, positions):
        return policy.hidden(params, tokens, positions, valid.astype(jnp.int32))[:, -1]

    size, rows = 256, (tokens, valid, positions)
    parts = [last(found.model.params, *(x[k : k + size] for x in rows)) for k in range(0, tokens.shape[0], size)]
    return standardised(jnp.concatenate(parts).astype(jnp.float32))


def prompt_features(settings: OnlineSettings) -> Array:
    """Hidden state of the base model at the last token of every training prompt ``[N, D]``, standardised."""
    return _prompt_features(recipes.bench_identity(settings))
