"""The feed-forward part: dense, gated or plain, or a mixture of experts by grouped matrix products."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.kernels.grouped import GroupedFn, grouped
from jaxrl_llm.models.layers import Layer, ProductFn, plain_product, project, projections
from jaxrl_llm.models.quantised import opening
from jaxrl_llm.models.spec import Experts, ModelConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
ExpertsFn = Callable[..., Array]


def dense(config: ModelConfig, layer: Layer, x: Array, product_fn: ProductFn = plain_product) -> Array:
    """``down(act(gate x) * up x)``, or ``down(act(up x))`` where the family has no gate."""
    act = ACTIVATIONS[config.activation]
    if not config.gated_mlp:
        return project(act(project(x, layer, "up", product_fn)), layer, "down", product_fn)
    up, gate = projections(x, layer, "up_gate", (config.intermediate_size,) * 2, product_fn)
    return project(act(gate) * up, layer, "down", product_fn)


class Routed(NamedTuple):
    """What the router of a layer said, and the experts that computed."""

    logits: Float[Array, "B S E"]
    chosen: Int[Array, "B S K"]


def route(
    experts: Experts, logits: Float[Array, "N E"], recorded: Int[Array, "N K"] | None = None
) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
    """Weights (float32) and numbers of the chosen experts: softmax over all of them, then the largest ones.

    Tokens that have a ``recorded`` choice keep it (-1: none): the one that a sampler in other numerics made. Weights
    are of the router's own probabilities in any case.

    From "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370,
    section 4 (rollout routing replay).

    >>> weights, chosen = route(Experts(4, 2, 8, normalise=True), jnp.log(jnp.array([[0.1, 0.6, 0.2, 0.1]])))
    >>> weights.round(2).tolist(), chosen.tolist()
    ([[0.75, 0.25]], [[1, 2]])
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, experts.per_token)
    if recorded is not None:
        chosen = jnp.where(recorded >= 0, recorded.astype(chosen.dtype), chosen)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if experts.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def grouped_experts(
    act: Callable[[Array], Array],
    layer: dict[str, Array],
    x: Array,
    weights: Array,
    chosen: Array,
    *,
    grouped_fn: GroupedFn = grouped,
) -> Array:
    """Tokens sorted by expert, three grouped products (``models.kernels.grouped``), sorted back and added up."""
    n, k = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=layer["experts_up"].shape[0]).astype(jnp.int32)
    rows = x[order // k]

    def product(rows: Array, name: str) -> Array:
        return grouped_fn(rows, layer[name].astype(x.dtype), sizes)

    out = product(act(product(rows, "experts_gate")) * product(rows, "experts_up"), "experts_down")
    back = out[jnp.argsort(order, stable=True)].reshape(n, k, -1)
    return jnp.sum(back * weights.astype(x.dtype)[:, :, None], axis=1)


def dense_experts(
    act: Callable[[Array], Array], layer: dict[str, Array], x: Array, weights: Array, chosen: Array
) -> Array:
    """Every expert on every token, the chosen ones weighted in: the reference, and right for a handful of tokens.

    Plain batched products, so that it shards like any other matrix product; it costs ``number / per_token`` times
    the work of ``grouped_experts``.
    """
    gate, up, down = (layer[f"experts_{name}"].astype(x.dtype) for name in ("gate", "up", "down"))
    hidden = act(jnp.einsum("nd,edf->enf", x, gate)) * jnp.einsum("nd,edf->enf", x, up)
    picked = jax.nn.one_hot(chosen, gate.shape[0], dtype=x.dtype) * weights.astype(x.dtype)[:, :, None]
    return jnp.einsum("enf,efd,ne->nd", hidden, down, jnp.sum(picked, axis=1))


def feed_forward(
    config: ModelConfig,
    layer: Layer,
    x: Float[Array, "B S D"],
    experts_fn: ExpertsFn = grouped_experts,
    recorded: Int[Array, "B S K"] | None = None,
    product_fn: ProductFn = plain_product,
) -> tuple[Float[Array, "B S D"], Routed | None]:
    """The feed-forward part and, for a mixture of experts, what its router did; ``recorded``: as in ``route``."""
    if config.experts is None:
        return dense(config, layer, x, product_fn), None
    b, s, d = x.shape
    flat = x.reshape(b * s, d)
    logits = project(flat, layer, "router")
    weights, chosen = route(config.experts, logits, None if recorded is None else recorded.reshape(b * s, -1))
    own = {name: x for name, x in layer.items() if name.startswith("experts_")}
    out = opening(partial(experts_fn, ACTIVATIONS[config.activation]))(own, flat, weights, chosen)
    return out.reshape(b, s, d), Routed(logits.reshape(b, s, -1), chosen.reshape(b, s, -1))


def load_figures(chosen: Int[Array, "B T C"], valid: Bool[Array, "B T"], experts: Experts) -> dict[str, Array]:
    """How evenly the experts of a mixture are used: choices of all layers beside each other, -1: none.

    ``experts/load_max``: of all layers the choices of the most loaded expert, of what each would have if all were used
    alike (1 is even); ``experts/unused``: the share of a layer's experts that nobody chose, over the layers.
    """
    number, layers = experts.number, chosen.shape[2] // experts.per_token
    there = valid[:, :, None] & (chosen >= 0)
    layer = jnp.arange(chosen.shape[2], dtype=jnp.int32) // experts.per_token
    flat = jnp.where(there, layer[None, None, :] * number + chosen.astype(jnp.int32), layers * number)
    counts = jnp.bincount(flat.reshape(-1), length=layers * number + 1)[:-1].reshape(layers, number)
    counts = counts.astype(jnp.float32)
    even = jnp.maximum(jnp.mean(counts, axis=1, keepdims=True), 1e-9)
    return {"experts/load_max": jnp.max(counts / even), "experts/unused": jnp.mean((counts == 0).astype(jnp.float32))}
