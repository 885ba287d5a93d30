"""Optimisers that know the decoder's tree: Muon for its matrices, and weights kept in bfloat16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl_llm.models.spec import ModelConfig, matrix_shapes, parameter_shapes
from jaxrl_llm.types import Key

ROUTER = "router"  # few columns, and the choice of experts jumps: by Adam


def muon(
    config: ModelConfig,
    learning_rate: optax.ScalarOrSchedule,
    *,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: float = 0.0,
    **settings: Any,
) -> optax.GradientTransformation:
    """Orthogonalised momentum for the matrices of the layers, AdamW for embedding, head, router, norms and biases.

    Layers and experts lie stacked in one array; each of their matrices is orthogonalised alone. Updates have the size
    that Adam's have (root mean square 0.2), so that one learning rate serves both.

    From "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.2. The iteration is optax's.

    Args:
      adam_learning_rate: of the rest; None: the same.
      weight_decay: of all of them.
      settings: further ones of ``optax.contrib.muon``, for example ``beta``.
    """
    matrices = {name: len(shape) for name, shape in matrix_shapes(config).items() if name != ROUTER}
    shapes = parameter_shapes(config)

    def axes(name: str) -> optax.contrib.MuonDimensionNumbers | None:
        rank = matrices.get(name)  # without the axis of layers, so that the last axis has this number
        return None if rank is None else optax.contrib.MuonDimensionNumbers(rank - 1, rank)

    layers = {name: axes(name) for name in shapes["layers"]}
    return optax.contrib.muon(
        learning_rate,
        adam_learning_rate=adam_learning_rate,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers={name: None for name in shapes} | {"layers": layers},
        **{"consistent_rms": 0.2} | settings,
    )


class RoundingState(NamedTuple):
    """State of ``stochastic_rounding``."""

    key: Key
    inner: Any


def rounded(x: Float[Array, "..."], key: Key) -> Float[Array, "..."]:
    """``x`` (float32) as bfloat16, up or down at random so that the mean is ``x``; what is not finite stays.

    >>> found = rounded(jnp.full((4000,), 1.001), jax.random.key(0))
    >>> sorted({float(x) for x in found}), round(float(found.astype(jnp.float32).mean()), 3)
    ([1.0, 1.0078125], 1.001)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    moved = (bits + noise) & jnp.uint32(0xFFFF0000)
    moved = jax.lax.bitcast_convert_type(moved, jnp.float32)
    return jnp.where(jnp.isfinite(x), moved, x).astype(jnp.bfloat16)


def stochastic_rounding(tx: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformation:
    """``tx`` for parameters in bfloat16 without float32 masters: sums in float32, rounded at random.

    Rounding to the nearest loses every update below a 256th of its weight; this keeps it in the mean. The state of
    ``tx`` is float32, leaves that are float32 already are left to it.

    Raises:
      ValueError: in ``init``, for parameters that are neither.
    """

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> RoundingState:
        kinds = {str(x.dtype) for x in jax.tree.leaves(params)} - {"bfloat16", "float32"}
        if kinds:
            raise ValueError(f"parameters of {', '.join(sorted(kinds))} are neither bfloat16 nor float32; cast them")
        return RoundingState(jax.random.key(seed), tx.init(wide(params)))

    def update(grads: Any, state: RoundingState, params: Any) -> tuple[Any, RoundingState]:
        key, step = jax.random.split(state.key)
        old = wide(params)
        updates, inner = tx.update(wide(grads), state.inner, old)
        leaves, tree = jax.tree.flatten(params)
        keys = jax.tree.unflatten(tree, list(jax.random.split(step, len(leaves))))

        def moved(param: Array, before: Array, change: Array, key: Key) -> Array:
            if param.dtype == jnp.float32:
                return change
            return (
                rounded(before + change, key).astype(jnp.float32) - before
            )  # added to the weight it gives that number

        return jax.tree.map(moved, params, old, updates, keys), RoundingState(key, inner)

    return optax.GradientTransformation(init, update)
