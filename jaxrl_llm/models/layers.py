"""Projections and norms that every family shares."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxrl_llm.models.kernels.token_rows import TokenRows
from jaxrl_llm.models.quantised import multiplied
from jaxrl_llm.models.spec import ModelConfig

PRODUCT, ATTENDED = "product", "attended"  # what a policy of recomputation may keep, see ``models.decoder.kept``
ProductFn = Callable[[Array, Array, str], Array]
Layer = dict[str, Any]  # arrays of one layer by name, its matrices perhaps in few bits: see ``models.quantised``
LORA_A, LORA_B = "_lora_a", "_lora_b"
JOINED = {"qkv": ("q", "k", "v"), "up_gate": ("up", "gate")}  # matrices that multiply the same input, by what they are


def _along_last(vector: Array, x: Array) -> Array:
    return jnp.reshape(vector, (1,) * (x.ndim - 1) + (-1,))


def plain_product(x: Array, weight: Array, name: str) -> Array:
    """``x W`` in the dtype of ``x``; ``name``: of the matrix, for products that lie somewhere.

    Rows are one axis during the product: on a CPU the gradient of ``W`` takes three times as long as a sum over two.
    """
    weight = weight.astype(x.dtype)
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], weight.shape[-1])


def project(x: Array, layer: Layer, name: str, product_fn: ProductFn = plain_product) -> Array:
    """``x W + b`` in the dtype of ``x``; the bias where the layer has one."""
    product = multiplied(lambda x, matrix: product_fn(x, matrix, name), x, layer[name])
    out = checkpoint_name(product, PRODUCT)
    if name + LORA_A in layer:  # see models.lora
        out = out + (x @ layer[name + LORA_A].astype(x.dtype)) @ layer[name + LORA_B].astype(x.dtype)
    bias = layer.get(f"{name}_bias")
    return out if bias is None else out + _along_last(bias.astype(x.dtype), out)


def joined(layer: Layer) -> Layer:
    """Parameters of a layer in which matrices that multiply the same input are one matrix, see ``JOINED``.

    What is no plain array, such as weights in few bits, stays as it is, and so do matrices with an adapter.
    """
    layer = dict(layer)
    for whole, parts in JOINED.items():
        plain = all(isinstance(layer.get(part), jax.Array) and part + LORA_A not in layer for part in parts)
        biased = [f"{part}_bias" in layer for part in parts]
        if not plain or any(biased) != all(biased):
            continue
        for end in ("", "_bias") if all(biased) else ("",):
            layer[whole + end] = jnp.concatenate([layer.pop(part + end) for part in parts], axis=-1)
    return layer


def projections(
    x: Array, layer: Layer, whole: str, widths: tuple[int, ...], product_fn: ProductFn = plain_product
) -> Iterator[Array]:
    """``project`` by each matrix of ``JOINED[whole]``, when its turn comes; ``widths``: of what they return."""
    if whole in layer:
        ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
        yield from jnp.split(project(x, layer, whole, product_fn), ends, axis=-1)
    else:
        for name in JOINED[whole]:
            yield project(x, layer, name, product_fn)


def table_product(x: Array, table: Array, tied: bool) -> Array:
    """``x table^T`` (``tied``) or ``x table`` with the table in the dtype of ``x``, in float32."""
    product = "...d,vd->...v" if tied else "...d,dv->...v"
    return jnp.einsum(product, x, table.astype(x.dtype), preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def wide_product(x: Array, table: Array, tied: bool) -> Array:
    """``table_product`` with short slopes.

    Backward the slopes are rounded to the dtype of ``x`` first, as a TPU's product does by itself: else a GPU computes
    both products in float32. The table's gradient has the table's own dtype.
    """
    return table_product(x, table, tied)


def _wide_forward(x: Array, table: Array, tied: bool) -> tuple[Array, tuple[Array, Array]]:
    return wide_product(x, table, tied), (x, table)


def _wide_backward(tied: bool, kept: tuple[Array, Array], slopes: Array) -> tuple[Array, Array]:
    x, table = kept
    slopes = slopes.astype(x.dtype)
    back = jnp.einsum("...v,vd->...d" if tied else "...v,dv->...d", slopes, table.astype(x.dtype))
    rows, of_rows = x.reshape(-1, x.shape[-1]), slopes.reshape(-1, slopes.shape[-1])
    found = jnp.einsum("nv,nd->vd" if tied else "nv,nd->dv", of_rows, rows, preferred_element_type=jnp.float32)
    return back, found.astype(table.dtype)


wide_product.defvjp(_wide_forward, _wide_backward)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm in float32, returned in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed.astype(x.dtype)) * _along_last(scale.astype(x.dtype), x)


def _rms_norm_plus_one(x: Array, scale: Array, eps: float) -> Array:
    """Gemma's: the scale is ``1 + w`` and multiplies before the dtype narrows."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * _along_last(1.0 + scale.astype(jnp.float32), x)).astype(x.dtype)


def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    out = normed * _along_last(scale.astype(jnp.float32), x) + _along_last(bias.astype(jnp.float32), x)
    return out.astype(x.dtype)


def norm(config: ModelConfig, x: Array, tree: Layer, name: str) -> Array:
    """The norm ``name`` of a layer (or of the whole tree) in the family's form."""
    if config.norm == "layer":
        return _layer_norm(x, tree[name], tree[f"{name}_bias"], config.rms_norm_eps)
    form = _rms_norm_plus_one if config.norm == "rms_plus_one" else rms_norm
    return form(x, tree[name], config.rms_norm_eps)


def forked_norm(
    config: ModelConfig, x: Array, tree: Layer, name: str, token_rows: TokenRows | None
) -> tuple[Array, Array]:
    """``(x, norm(x))`` of rows that go on beside their norm, by a kernel where there is one for the family's form."""
    if token_rows is None or config.norm != "rms":
        return x, norm(config, x, tree, name)
    return token_rows.forked(x, tree[name], config.rms_norm_eps)
