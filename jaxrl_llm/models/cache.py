"""The key-value cache of a decoder: in the compute dtype, or in a byte with a scale for every head and column."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxrl_llm.models.spec import ModelConfig, matrix_shapes
from jaxrl_llm.types import Cache

RowsFn = Callable[[Array, int, int], Array]  # rows of a stacked cache so many times, side by side, with more columns

EXPERTS = "experts"  # ``[B, C, L K]``: of a mixture, those that computed each column, layer by layer; -1: none
ROWS_FIRST = ("segment_ids", "positions", EXPERTS)  # ``[B, C, ...]``; all else is of layers
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # what a cache may be kept in, and what a scale makes the largest
UNROLLED = 6  # so few layers have an array each: the products read it where it lies, no layer is copied out of a stack
# Beside a kernel that reads a stacked cache: so many layers are compiled one by one, which lets the weights of one come
# while the kernel of another runs. Qwen3-1.7B on v5e:2x4 by the compiler's count, 256 rows, a cache of 2,048: 14.9 ms a
# token against 19.4 under a loop over layers, for a second copy of the weights and minutes of compiling: larger models
# loop.
UNROLLED_BESIDE_KERNEL = 40
# In a loop of steps more: the kernel of experts reads matrices where they lie, and a loop over layers copies them out
# of their stack at every token. Qwen3-30B-A3B, 48 layers, on v5e:8x8: 10.6 ms a token against 17.7, 0.6 GiB more.
UNROLLED_STEPS = 48
# Deeper models, too, where a second copy of what a device has of their matrices has room: Qwen3-32B, 64 layers, on
# tensor=8 of v6e:8x8 takes 7.9 ms a token by the same count, in a loop over layers 10.1; 8 GiB more.
MOST_STEPS = 96


class DeviceLayout(NamedTuple):
    """How a cache, weights and logits lie where XLA alone computes with them.

    On a GPU layers in a stack are copied out of it at every token, weights and cache, and rows of columns that do not
    begin at a multiple of 16 bytes are read number by number; the product of a few rows with a small matrix reads it at
    a fraction of the bandwidth; and the gradient of the vocabulary's table, 1.2 GB of float32 for 151,936 x 2,048, is
    added up once for every part of the tokens. See docs/performance.md.
    """

    apart: int  # so few layers have an array each
    tile: int = 1  # there are a multiple of so many columns
    joined: bool = False  # matrices with the same input are one where steps read them
    scored: int = 0  # logits of so many tokens exist at once, if they are given
    # attention of one token of each row to a cache in numbers of 16 bits, whose layers then are [B, C, G, K]
    step_fn: Callable[..., Array] | None = None


class Devices(NamedTuple):
    """What decides whether a second copy of the layers' matrices has room while a rollout decodes."""

    memory: float  # bytes of one
    number: int = 1
    cut: int = 1  # those over which a matrix is cut
    experts: int = 1  # those over which the experts of a mixture lie, besides


def steps_apart(config: ModelConfig, dtype: Any, devices: Devices) -> bool:
    """Whether layers are compiled one by one in a loop of steps beside the kernel of a stacked cache.

    Two copies of their matrices in this dtype, and float32 masters with their moments, may fill three quarters of a
    device.
    """
    numbers = 0.0
    for name, shape in matrix_shapes(config).items():
        numbers += math.prod(shape) / devices.cut / (devices.experts if name.startswith("experts_") else 1)
    held = numbers * config.num_layers * jnp.dtype(dtype).itemsize
    filled = 2 * held + 12 * config.num_parameters / devices.number
    room = config.num_layers <= MOST_STEPS and filled <= 0.75 * devices.memory
    return room or config.num_layers <= UNROLLED_STEPS


ON_GPU = DeviceLayout(UNROLLED_BESIDE_KERNEL, 64, joined=True, scored=4096)


def init_cache(config: ModelConfig, dtype, few, layout: DeviceLayout, batch: int, length: int) -> Cache:
    """An empty cache: keys and values ``[B, G, C, K]`` of each layer, and in a byte their scales ``[B, G, C]``.

    The layers are a tuple, or more than ``layout.apart`` of them the first axis of one array. In a tuple keys are
    ``[B, G, K, C]``: what the product of one query with all of them reads without turning it (four times as fast on a
    CPU; an accelerator chooses the order in memory itself). For ``layout.step_fn`` both are ``[B, C, G, K]`` there.

    Args:
      few: the dtype of a byte that keys and values are kept in, one of ``LARGEST``; None: ``dtype``.
      layout: of the columns there are a multiple of its ``tile``, those that a kernel reads at once.

    Raises:
      ValueError: for another dtype of few bits.
    """
    if few is not None and jnp.dtype(few).name not in LARGEST:
        raise ValueError(f"cache_dtype={jnp.dtype(few).name} is not one of {', '.join(LARGEST)}")
    layers, length = config.num_layers, -(-length // layout.tile) * layout.tile
    shape, stacked = (batch, config.num_kv_heads, length, config.head_dim), layers > layout.apart
    turned, first = (*shape[:2], *shape[:1:-1]), (shape[0], shape[2], shape[1], shape[3])

    def empty(shape: tuple[int, ...], dtype) -> Array | tuple[Array, ...]:
        if stacked:
            return jnp.zeros((layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(layers))

    shapes = {"k": shape if stacked else turned, "v": shape}
    if layout.step_fn is not None and not stacked:
        shapes = {"k": first, "v": first}
    cache = {name: empty(of, dtype if few is None else few) for name, of in shapes.items()}
    if few is not None:
        cache |= {f"{name}_scale": empty(shape[:-1], jnp.float32) for name in ("k", "v")}
    if config.experts is not None:
        kind = jnp.int8 if config.experts.number <= 128 else jnp.int16
        cache[EXPERTS] = jnp.full((batch, length, layers * config.experts.per_token), -1, kind)
    return cache | {name: jnp.zeros((batch, length), jnp.int32) for name in ("segment_ids", "positions")}


def experts_of(cache: Cache) -> Int[Array, "*S B C E"] | None:
    """Which experts computed each column, of caches side by side as well; None of a model without."""
    return cache.get(EXPERTS) if isinstance(cache, dict) else None


def by_layer(experts: Int[Array, "B S E"], layers: int) -> Int[Array, "L B S K"]:
    """Recorded choices as layers take them."""
    return jnp.moveaxis(experts.reshape(*experts.shape[:2], layers, -1), 2, 0)


def grow_cache(rows_fn: RowsFn, tile: int, cache: Cache, repeats: int, length: int) -> Cache:
    """``repeat_cache`` of a stack into one with room for ``length`` columns.

    ``rows_fn``: as ``make_policy`` has it; new columns of keys and values may hold anything, their segments are 0.
    """
    length = -(-length // tile) * tile

    def grown(name: str, x: Array) -> Array:
        if name in ("k", "v"):
            return rows_fn(x, repeats, length)
        axis = 0 if name in ROWS_FIRST else 1
        last = 1 if name in ROWS_FIRST else x.ndim - 1
        more = [(0, length - x.shape[last] if a == last else 0) for a in range(x.ndim)]
        return jnp.pad(jnp.repeat(x, repeats, axis=axis), more)

    return {name: grown(name, x) for name, x in cache.items()}


def repeat_cache(cache: Cache, repeats: int) -> Cache:
    """Each row ``repeats`` times, side by side."""

    def repeated(name: str, x: Array | tuple[Array, ...]) -> Array | tuple[Array, ...]:
        axis = 0 if name in ROWS_FIRST or isinstance(x, tuple) else 1
        return jax.tree.map(lambda array: jnp.repeat(array, repeats, axis=axis), x)

    return {name: repeated(name, x) for name, x in cache.items()}


def quantised(x: Float[Array, "*A K"], few: Any = jnp.int8) -> tuple[Num[Array, "*A K"], Float[Array, "*A"]]:
    """``x`` as numbers of a byte times a scale: ``scale = max |x| / LARGEST`` over a head.

    Whole numbers are off by at most half the scale; ``float8_e4m3fn``, three bits behind the leading one, by a
    sixteenth of themselves: nearer for what is less than an eighth of the largest of its head, farther for the rest.

    >>> import jax.numpy as jnp
    >>> whole, scale = quantised(jnp.array([[-12.7, 0.04, 6.4]]))
    >>> whole.tolist(), round(float(scale[0]), 4)
    ([[-127, 0, 64]], 0.1)
    >>> small, scale = quantised(jnp.array([[-44.8, 0.04, 6.4]]), jnp.float8_e4m3fn)
    >>> small.astype(jnp.float32).tolist(), round(float(scale[0]), 4)
    ([[-448.0, 0.40625, 64.0]], 0.1)
    """
    wide, most = x.astype(jnp.float32), LARGEST[jnp.dtype(few).name]
    scale = jnp.max(jnp.abs(wide), axis=-1) / most
    found = wide / jnp.where(scale > 0, scale, 1.0)[..., None]
    found = jnp.round(found) if jnp.issubdtype(few, jnp.integer) else found
    return jnp.clip(found, -most, most).astype(few), scale


def stored(cache: Cache, name: str, new: Float[Array, "B G S K"]) -> dict[str, Array]:
    """Keys or values as a cache keeps them, by the names of its arrays: as they are, or in a byte, with scales."""
    scaled, kept = f"{name}_scale", cache[name]
    if scaled not in cache:
        return {name: new}
    few = kept[0].dtype if isinstance(kept, tuple) else kept.dtype
    return dict(zip((name, scaled), quantised(new, few), strict=True))


def write(
    cache: Cache,
    name: str,
    new: Float[Array, "B G S K"],
    layer: Array | int,
    column: Array | int,
    columns_first: bool = False,
):
    """Keys or values of further columns of one layer: ``(cache, all of the layer [B, G, C, K] as new's dtype)``.

    ``columns_first``: the layers of a tuple are ``[B, C, G, K]``, see ``init_cache``.
    """
    whole = []
    for part, value in stored(cache, name, new).items():
        columns = 1 if columns_first else 3 if part == "k" else 2
        kept, of_layer = _put(cache[part], value, layer, column, columns)
        cache = cache | {part: kept}
        whole.append(of_layer)
    if len(whole) > 1:
        return cache, (whole[0].astype(jnp.float32) * whole[1][..., None]).astype(new.dtype)
    return cache, whole[0].astype(new.dtype)


def put(cache: Cache, new: dict[str, Array], layer: Array | int, column: Array | int) -> Cache:
    """What ``stored`` makes of further columns, into layers that are stacked, without a copy of the layer."""
    put = {}
    for name, x in new.items():
        start = (layer, 0, 0, column, 0)[: x.ndim + 1]
        put[name] = jax.lax.dynamic_update_slice(cache[name], x.astype(cache[name].dtype)[None], start)
    return cache | put


def with_room(x: Num[Array, "B G S *K"], columns: int) -> Num[Array, "B G C *K"]:
    """Keys or values, or their scales, with so many empty columns behind them."""
    return jnp.pad(x, [(0, columns if axis == 2 else 0) for axis in range(x.ndim)]) if columns else x


def _put(arrays: Array | tuple[Array, ...], value: Array, layer: Array | int, column: Array | int, columns: int):
    """``columns``: the axis of the columns in the arrays of a tuple; in ``value`` and in what is returned it is 2."""
    start = (0, 0, column, 0)[: value.ndim]
    if isinstance(arrays, tuple):
        value = value.astype(arrays[layer].dtype)
        if columns != 2:
            value, start = jnp.swapaxes(value, 2, columns), tuple(column if a == columns else 0 for a in range(4))
        kept = jax.lax.dynamic_update_slice(arrays[layer], value, start)
        return (*arrays[:layer], kept, *arrays[layer + 1 :]), kept if columns == 2 else jnp.swapaxes(kept, 2, columns)
    kept = jax.lax.dynamic_update_slice(arrays, value.astype(arrays.dtype)[None], (layer, *start))
    return kept, jax.lax.dynamic_index_in_dim(kept, layer, 0, keepdims=False)
