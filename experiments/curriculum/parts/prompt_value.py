"""A value model of prompts chooses those of a wanted success rate, without a single rollout."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.models import heads
from jaxrl_llm.types import Params, Policy, Sampler


class Head(NamedTuple):
    """What predicts success from a prompt's features."""

    weight: Float[Array, " F"]
    bias: Float[Array, ""]


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


class Trained(NamedTuple):
    """Parameters of a value model, and its optimiser."""

    params: Params
    opt_state: Any


def make_value_sampler(
    values: Callable[[Params, Int[Array, " n"]], Float[Array, " n"]],
    start: Callable[[], Params],
    prompts: int,
    tx: Any,
    *,
    candidates: int = 4,
    target: float = 0.5,
    explore: float = 0.0,
) -> Sampler:
    """Of ``candidates`` times as many random prompts, takes those that the value model puts nearest to ``target``.

    After the rollouts the value model takes one step on ``success_loss`` of the prompts that were used, so it is always
    one policy step behind.

    Args:
      values: ``(params, rows of the table) -> V`` in [0, 1], for example of ``head_values`` or ``model_values``.
      start: the first parameters; prompts: rows of the table.
      tx: a gradient transformation (``init`` and ``update``), for example of optax.
      candidates: prompts that are valued for each one taken; 1 is uniform.
      explore: share of the draw that is random, so that the value model also sees what it would not choose.

    From "Prompt Curriculum Learning for Efficient LLM Post-Training", arXiv:2510.01135, algorithm 1.
    """
    if candidates < 1 or not 0 <= target <= 1 or not 0 <= explore <= 1:
        raise ValueError(f"candidates={candidates} must be at least 1; target={target}, explore={explore} in [0, 1]")

    def init(num_problems: int) -> Trained:
        if num_problems != prompts:
            raise ValueError(f"the value model knows {prompts} rows, the table has {num_problems} prompts")
        params = start()
        return Trained(params, tx.init(params))

    def draw(state: Trained, key, n: int) -> tuple[Int[Array, " n"], Trained]:
        pool = min(candidates * n, prompts)
        ids = jax.random.permutation(key, prompts)[: max(pool, n)].astype(jnp.int32)
        valued = values(state.params, ids)
        free = round(explore * n)
        # the first rows of a random order are random prompts; the others are chosen among the rest
        chosen = ids[free:][nearest_prompts(valued[free:], target=target, count=n - free)]
        return jnp.concatenate([ids[:free], chosen]), state

    def update(state: Trained, ids, scores, valid) -> Trained:
        def loss(params):
            return success_loss(values(params, ids), scores, valid)

        with jax.numpy_dtype_promotion("standard"):  # optimisers mix weak integers and floats
            updates, opt_state = tx.update(jax.grad(loss)(state.params), state.opt_state, state.params)
        return Trained(jax.tree.map(lambda x, u: x + u, state.params, updates), opt_state)

    return Sampler(init, draw, update)


def head_values(features: Float[Array, "N F"]) -> Callable[[Params, Int[Array, " n"]], Float[Array, " n"]]:
    """``(head, rows) -> V``: ``predicted_success`` on given features of those rows of the table.

    From "Prompt Curriculum Learning for Efficient LLM Post-Training", arXiv:2510.01135, section 4. Differs from the
    paper in that the value model is a head on features, not a language model of the policy's size: that is
    ``model_values``.

    Args:
      features: for example a frozen model's hidden state at its last token.
    """
    return lambda head, ids: predicted_success(*head, features[ids])


def started_head(width: int) -> Head:
    """A head that says 1/2 of every prompt."""
    return Head(jnp.zeros((width,), jnp.float32), jnp.zeros((), jnp.float32))


def model_values(
    policy: Policy, tokens: Int[Array, "N P"], valid: Bool[Array, "N P"]
) -> Callable[[Params, Int[Array, " n"]], Float[Array, " n"]]:
    """``(params, rows) -> V``: a language model that reads the prompt, with a head at its last token.

    ``sigmoid(w h + b)``; ``params`` are ``{"model", "head"}``, see ``started_model``. All of them train.

    From "Prompt Curriculum Learning for Efficient LLM Post-Training", arXiv:2510.01135, section 4: a value model of
    the policy's size.
    """

    def values(params: Params, ids: Array) -> Array:
        there = valid[ids].astype(jnp.int32)
        positions = jnp.maximum(jnp.cumsum(there, axis=1) - 1, 0)
        hidden = policy.hidden(params["model"], tokens[ids], positions, there)
        return jax.nn.sigmoid(heads.sequence_rewards(params["head"], hidden, there))

    return values


def started_model(params: Params, width: int) -> Params:
    """Parameters of a value model that begins as a copy of ``params`` and says 1/2 of every prompt."""
    return {"model": jax.tree.map(jnp.copy, params), "head": heads.init_head(width, jax.random.key(0))}


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
