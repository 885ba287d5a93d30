"""Parts of a decoder that say themselves which device computes what: experts and long attention."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxrl_llm.distributed import expert_exchange, rules
from jaxrl_llm.distributed.compiler_options import memory_of
from jaxrl_llm.distributed.mesh import BATCH, batch_parts
from jaxrl_llm.distributed.ring import Parts, make_ring
from jaxrl_llm.distributed.scattered_sums import make_product
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.attention import Seen
from jaxrl_llm.models.cache import Devices
from jaxrl_llm.models.kernels import token_rows as rows_kernels
from jaxrl_llm.models.kernels import vocabulary
from jaxrl_llm.models.kernels.attention_cached import cut_out
from jaxrl_llm.models.kernels.grouped import GroupedFn, grouped
from jaxrl_llm.models.kernels.token_rows import HEADS, ROWS, SAME, SUMS, WAVES, TokenRows
from jaxrl_llm.models.kernels.vocabulary import Head, Sums, SumsFn
from jaxrl_llm.models.layers import plain_product
from jaxrl_llm.models.mlp import dense_experts, grouped_experts

# Rows of which a product with a matrix is over before the matrix is read, or hardly later: 197 TFLOP/s in 0.8 TB/s of a
# v5e are 240. Qwen3-30B-A3B, 128 rows on tensor=4,expert=16 of v5e:8x8: a layer of a decode step takes 0.10 ms by the
# compiler's count, which does not count sorting, and 0.20 where rows are sorted by expert.
FEW_ROWS = 256


def on_mesh(
    mesh: Mesh,
    attend_fn: Callable[..., Array],
    grouped_fn: GroupedFn,
    otherwise: Callable[..., Array] | None = None,
    cached_fn: Callable[..., Array] | None = None,
    rows_fn: Callable[..., Array] | None = None,
    sums_fn: SumsFn | None = None,
    parts: Parts | None = None,
    token_rows: TokenRows | None = None,
) -> dict[str, Any]:
    """The arguments of ``models.decoder.make_policy`` that depend on a mesh.

    Args:
      attend_fn: what runs on one device, ``models.attention.attend`` or a kernel.
      grouped_fn: ``models.kernels.attention_kernels.make_grouped``.
      otherwise: as in ``make_attend``.
      rows_fn: ``models.kernels.attention_kernels.make_rows``; None: none.
      cached_fn: ``models.kernels.attention_kernels.make_cached``; None: none.
      parts: ``models.kernels.attention_kernels.make_parts``: along ``context`` attention is then a ring.
      sums_fn: ``models.kernels.attention_kernels.make_sums``; None: none.
      token_rows: ``models.kernels.attention_kernels.make_token_rows``; None: none.
    """
    return {
        "token_rows": None if token_rows is None else make_token_rows(mesh),
        "product_fn": make_product(mesh) if mesh.devices.flat[0].platform == "tpu" else plain_product,
        "sums_fn": None if sums_fn is None else make_sums(mesh, sums_fn),
        "rows_fn": None if rows_fn is None else make_rows(mesh, rows_fn),
        "cached_fn": None if cached_fn is None else make_cached(mesh, cached_fn, otherwise or attend_fn),
        "place": rules.make_place(mesh),
        "attend_fn": make_attend(mesh, attend_fn, otherwise, parts),
        "experts_fn": make_experts(mesh, grouped_fn),
        "devices": Devices(
            memory_of(mesh.devices.flat[0]),
            mesh.size,
            mesh.shape["fsdp"] * mesh.shape["tensor"],
            mesh.shape["expert"],
        ),
    }


def make_experts(
    mesh: Mesh, grouped_fn: GroupedFn = grouped, *, exchange: bool | None = None, few: int = FEW_ROWS
) -> Callable[..., Array]:
    """The ``experts_fn`` of ``models.decoder.make_policy`` for a mesh with an ``expert`` axis.

    Every device has its share of the experts, and runs the tokens that chose them through grouped products. Tokens go
    only to the devices that have their experts (``distributed.expert_exchange``) where that loads the links less than
    collecting those of all devices along ``expert``; the sums go back to the tokens' own devices.

    Args:
      grouped_fn: the products of one device's rows and experts.
      exchange: whether tokens go to their experts; None: where ``expert_exchange.pays``.
      few: so many rows of a device, beside a kernel, run through all of its experts, if those of all devices are chosen
        once by them on average: what is read is the same, and nothing is sorted or moved.

    Raises:
      UserError: when called, for experts that do not divide over the axis.
    """
    parts = mesh.shape["expert"]
    device = mesh.devices.flat[0]
    across = expert_exchange.collected if device.platform == "cpu" else jax.lax.ragged_all_to_all
    pays = partial(expert_exchange.pays, device.platform, device.device_kind, mesh.size, parts)

    def experts(
        act: Callable[[Array], Array], layer: dict[str, Array], x: Array, weights: Array, chosen: Array
    ) -> Array:
        number = layer["experts_up"].shape[0]
        if number % parts:
            raise UserError(f"expert={parts} does not divide the {number} experts; choose a divisor")
        if x.shape[0] % batch_parts(mesh):
            return grouped_experts(act, layer, x, weights, chosen)  # that the compiler can divide
        to_experts = pays(chosen.shape[1]) if exchange is None else exchange
        most = 0 if to_experts or grouped_fn is grouped else few
        own = partial(_own_experts, grouped_fn, most)
        way = partial(_exchanged, own, across) if to_experts else partial(_collected, own)
        inner = {"tensor"} if layer["experts_up"].shape[2] % mesh.shape["tensor"] == 0 else set()
        width = "tensor" if inner else None
        up = P("expert", None, width)
        run = jax.shard_map(
            partial(way, act, bool(inner)),
            mesh=mesh,
            in_specs=(up, up, P("expert", width, None), *[P(BATCH, None)] * 3),
            out_specs=P(BATCH, None),
            # room for rows says of no axis that it differs along it, nor does what a kernel returns
            check_vma=not to_experts and grouped_fn is grouped,
        )
        matrices = (layer[f"experts_{name}"].astype(x.dtype) for name in ("gate", "up", "down"))
        return run(*matrices, x, weights, chosen)

    return experts


def _collected(own, act, split, gate, up, down, x, weights, chosen):
    x, weights, chosen = (jax.lax.all_gather(a, "expert", tiled=True) for a in (x, weights, chosen))
    total = own(act, gate, up, down, x, weights, chosen)
    total = jax.lax.psum_scatter(total, "expert", scatter_dimension=0, tiled=True)
    return jax.lax.psum(total, "tensor") if split else total


def _exchanged(own, across, act, split, gate, up, down, x, weights, chosen):
    way = expert_exchange.routes(chosen, up.shape[0], jax.lax.axis_size("expert"), "expert")
    numbers = (chosen + 1).astype(jnp.float32)  # 0: none, as rows that nobody sent
    beside = jnp.concatenate([weights.astype(jnp.float32), numbers], axis=1)
    rows, beside = (expert_exchange.sent(a, way, across, "expert") for a in (x, beside))
    weights, numbers = jnp.split(beside, 2, axis=1)
    chosen = jax.lax.stop_gradient(numbers).astype(jnp.int32) - 1
    total = own(act, gate, up, down, rows, weights, chosen)
    total = expert_exchange.returned(total, way, across, "expert")
    return jax.lax.psum(total, "tensor") if split else total


def _own_experts(grouped_fn, most, act, gate, up, down, x, weights, chosen):
    """What the experts of this device add to each row; ``most``: ``few`` of ``make_experts``."""
    here, per_token = up.shape[0], chosen.shape[1]
    local = chosen - jax.lax.axis_index("expert") * here
    if x.shape[0] <= most and chosen.size >= here * jax.lax.axis_size("expert"):
        matrices = {"experts_gate": gate, "experts_up": up, "experts_down": down}
        return dense_experts(act, matrices, x, weights, local)  # what others compute is none of these, and adds nothing
    ours = (local >= 0) & (local < here)
    flat = jnp.where(ours, local, here).reshape(-1)  # the others come last
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=here + 1)[:here].astype(jnp.int32)
    mine = (jnp.arange(flat.shape[0]) < jnp.sum(sizes))[:, None]
    rows = jnp.where(mine, x[order // per_token], 0)
    hidden = act(grouped_fn(rows, gate, sizes)) * grouped_fn(rows, up, sizes)
    out = grouped_fn(hidden, down, sizes)
    back = out[jnp.argsort(order, stable=True)].reshape(*chosen.shape, -1)
    back = jnp.where(ours[:, :, None], back, 0)  # rows of no group hold anything
    return jnp.sum(back * weights.astype(x.dtype)[:, :, None], axis=1)


def make_attend(
    mesh: Mesh,
    inner: Callable[..., Array],
    otherwise: Callable[..., Array] | None = None,
    parts: Parts | None = None,
) -> Callable[..., Array]:
    """The ``attend_fn`` of ``models.decoder.make_policy``: each device its rows, heads and, along ``context``, queries.

    Keys and values of a row go round along ``context`` (``distributed.ring``), or where ``parts`` is None are collected
    there; scores stay where their queries are. Shapes that do not divide are left to the compiler.

    Args:
      inner: what runs on one device: ``models.attention.attend``, or a kernel of ``models.kernels.attention_kernels``.
      otherwise: what the compiler can divide, for shapes that do not divide: ``models.attention.attend``, which is
        needed where ``inner`` is a kernel. None: ``inner``.
    """

    def attend(q: Array, k: Array, v: Array, mask: Array | Seen, **settings: Any) -> Array:
        if q.shape[0] % batch_parts(mesh) or q.shape[1] % mesh.shape["context"]:
            mask = mask.dense() if isinstance(mask, Seen) else mask
            return (otherwise or inner)(q, k, v, mask, **settings)
        mask, seen = _mask_specs(mask, "context")
        heads = "tensor" if k.shape[1] % mesh.shape["tensor"] == 0 else None
        around = parts is not None and mesh.shape["context"] > 1 and k.shape[2] % mesh.shape["context"] == 0
        one = make_ring(parts, mesh.shape["context"]) if around else inner
        queries, keys = P(BATCH, "context", heads, None), P(BATCH, heads, "context" if around else None, None)
        run = jax.shard_map(
            partial(one, **settings),
            mesh=mesh,
            in_specs=(queries, keys, keys, seen),
            out_specs=queries,
            check_vma=otherwise is None and not around,  # a kernel does not say along which axes its results differ
        )
        return run(q, k, v, mask)

    return attend


def _mask_specs(mask: Array | Seen, context: str | None) -> tuple[Array | Seen, P | Seen]:
    """A mask, dense or as positions and segments, and how it is split: queries over ``context``, keys not."""
    if not isinstance(mask, Seen):
        return mask, P(BATCH, context, None)
    queries, keys = P(BATCH, context), P(BATCH, None)
    return mask._replace(window=jnp.asarray(mask.window, jnp.int32)), Seen(queries, queries, keys, keys, P())


def make_cached(mesh: Mesh, inner: Callable[..., Array], otherwise: Callable[..., Array]) -> Callable[..., Array]:
    """The ``cached_fn`` of ``models.decoder.make_policy``: each device the caches of its rows and heads.

    Args:
      inner: ``models.kernels.attention_kernels.make_cached``, a kernel.
      otherwise: an ``attend`` for rows that do not divide over the devices.
    """

    def attend_layer(
        q: Array, k: Array, v: Array, mask: Array | Seen, layer: Any, filled: Any, *scales: Array, **settings: Any
    ) -> Array:
        scales += tuple(settings.pop(name) for name in ("k_scale", "v_scale") if name in settings)
        if q.shape[0] % batch_parts(mesh):
            mask = mask.dense() if isinstance(mask, Seen) else mask
            return cut_out(otherwise)(q, k, v, mask, layer, filled, *scales, **settings)
        heads = "tensor" if k.shape[2] % mesh.shape["tensor"] == 0 else None
        queries, stacked = P(BATCH, None, heads, None), P(None, BATCH, heads, None, None)
        mask, seen = _mask_specs(mask, None)
        run = jax.shard_map(
            partial(inner, **settings),
            mesh=mesh,
            in_specs=(queries, stacked, stacked, seen, P(), P(), *[P(*stacked[:4])] * len(scales)),
            out_specs=queries,
            check_vma=False,  # a kernel does not say along which axes its results differ
        )
        return run(q, k, v, mask, jnp.asarray(layer, jnp.int32), jnp.asarray(filled, jnp.int32), *scales)

    return attend_layer


def make_rows(mesh: Mesh, inner: Callable[..., Array]) -> Callable[..., Array]:
    """The ``rows_fn`` of ``models.decoder.make_policy``: each device repeats the rows that it has."""

    def repeat(x: Array, repeats: int, columns: int) -> Array:
        if x.shape[1] % batch_parts(mesh):
            more = [(0, columns - x.shape[3] if axis == 3 else 0) for axis in range(x.ndim)]
            return jnp.pad(jnp.repeat(x, repeats, axis=1), more)
        heads = "tensor" if x.shape[2] % mesh.shape["tensor"] == 0 else None
        stacked = P(None, BATCH, heads, None, None)
        run = jax.shard_map(
            lambda x: inner(x, repeats, columns), mesh=mesh, in_specs=stacked, out_specs=stacked, check_vma=False
        )
        return run(x)

    return repeat


def make_sums(mesh: Mesh, inner: SumsFn) -> SumsFn:
    """The ``sums_fn`` of ``models.decoder.make_policy``: each device its part of the vocabulary, and the sums of all.

    Where rows or vocabulary do not divide every device has all of them.
    """
    axes = rules.ACTIVATIONS["logits"][2]
    parts = math.prod(mesh.shape[a] for a in axes)

    def sums(head: Head, hidden: Array, table: Array, targets: Array) -> Sums:
        others = rules.ACTIVATIONS["logits"][0]
        rows = others if targets.shape[0] % math.prod(mesh.shape[a] for a in others) == 0 else None
        cut = axes if table.shape[0 if head.tied else 1] % parts == 0 else ()
        spec = P(cut or None, None) if head.tied else P(None, cut or None)

        def local(hidden: Array, table: Array, targets: Array) -> Sums:
            size = table.shape[0 if head.tied else 1]
            found = inner(head, hidden, table, targets, jax.lax.axis_index(cut) * size if cut else 0)
            return vocabulary.added(found, cut) if cut else found

        run = jax.shard_map(
            local, mesh=mesh, in_specs=(P(rows, None, None), spec, P(rows, None)), out_specs=P(rows, None),
            check_vma=False,  # a kernel does not say along which axes its results differ
        )  # fmt: skip
        return run(hidden, table, targets)

    return sums


def make_token_rows(mesh: Mesh) -> TokenRows:
    """The ``token_rows`` of ``models.decoder.make_policy``: each device the tokens, and of heads those, that it has."""

    def split(kernel: Callable[..., Any], given: Sequence[str], found: Sequence[str]) -> Callable[..., Any]:
        def run(*arrays: Array) -> Any:
            width = dict(zip(given, arrays, strict=True)).get(WAVES, arrays[0]).shape[2]
            apart = HEADS in given and arrays[0].shape[2] // width % mesh.shape["tensor"] == 0
            heads = ("tensor",) if apart else ()
            lies = {
                ROWS: P(BATCH, "context", None), HEADS: P(BATCH, "context", heads or None), SAME: P(),
                WAVES: P(BATCH, "context", None), SUMS: P((*BATCH, "context", *heads), None),
            }  # fmt: skip
            inside, outside = (tuple(lies[name] for name in names) for names in (given, found))
            # a kernel does not say along which axes its results differ
            return jax.shard_map(kernel, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)(*arrays)

        return run

    made = rows_kernels.make_token_rows(interpret=mesh.devices.flat[0].platform != "tpu", split=split)
    return made._replace(fits=lambda b, s: b % batch_parts(mesh) == 0 and s % mesh.shape["context"] == 0)
