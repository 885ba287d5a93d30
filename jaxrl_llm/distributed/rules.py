"""Where each parameter lives: the last part of its path names a rule, whatever does not divide is replicated."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed.mesh import BATCH, AnyMesh, batch_parts, batch_sharding, replicated
from jaxrl_llm.errors import UserError

# decoder leaves (layers stacked on axis 0): inputs over fsdp and outputs over tensor, or the reverse
RULES: dict[str, tuple[str | None, ...]] = {
    "embed": ("tensor", "fsdp"),
    "head": ("fsdp", "tensor"),
    "q": (None, "fsdp", "tensor"),
    "k": (None, "fsdp", "tensor"),
    "v": (None, "fsdp", "tensor"),
    "o": (None, "tensor", "fsdp"),
    "gate": (None, "fsdp", "tensor"),
    "up": (None, "fsdp", "tensor"),
    "down": (None, "tensor", "fsdp"),
    "router": (None, "fsdp", None),
}
# adapters (models.lora): each thin matrix lies along the axis that it shares with its matrix
RULES |= {f"{name}_lora_a": (None, rule[1], None) for name, rule in RULES.items() if len(rule) == 3} | {
    f"{name}_lora_b": (None, None, rule[2]) for name, rule in RULES.items() if len(rule) == 3
}
# a mixture's matrices have their experts on the axis before
RULES |= {f"experts_{name}": (None, "expert", *RULES[name][1:]) for name in ("gate", "up", "down")}


# Activations by name. A looked-up row stays in the columns of its device until all rows are moved at once: the table is
# never whole on a device, nor is its gradient. The head is split over the vocabulary instead: its rows times all hidden
# states of a chunk cost one small gather, where the whole head would have to travel for every chunk. A chunk is cut out
# first: left to the compiler, on meshes with an expert axis all chunks are collected for each.
_VOCABULARY = ("tensor", "fsdp")
_OTHERS = ("data", "expert")  # what splits rows while fsdp splits columns
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "tokens": (_OTHERS, None),
    "embedded": (_OTHERS, None, "fsdp"),
    "rows": (BATCH, "context", None),
    "chunk": (BATCH, None, None),
    "unembedded": (_OTHERS, None, None),
    "table": (_VOCABULARY, None),
    "head": (None, _VOCABULARY),
    "logits": (_OTHERS, None, _VOCABULARY),
}


def _leaf_name(path: tuple[Any, ...]) -> str:
    for key in reversed(path):
        name = getattr(key, "key", None)
        if isinstance(name, str):
            return name
    return ""


def spec_of(path: tuple[Any, ...], shape: tuple[int, ...], mesh: AnyMesh) -> P:
    """Partition of one leaf; an axis that does not divide its dimension is dropped.

    Copies of a leaf that are stacked before its own axes (the policies of the last updates) each lie like the leaf.
    """
    rule = RULES.get(_leaf_name(path), ())
    if not rule or len(rule) > len(shape):
        return P()
    rule = (None,) * (len(shape) - len(rule)) + rule
    return P(*(a if a is not None and shape[i] % mesh.shape[a] == 0 else None for i, a in enumerate(rule)))


def shardings(tree: Any, mesh: AnyMesh) -> Any:
    """A tree of shardings for parameters, optimiser state or a whole train state.

    What waits in host memory (``distributed.offload``) stays there.
    """

    def of(path: tuple[Any, ...], x: Any) -> NamedSharding:
        found = NamedSharding(mesh, spec_of(path, tuple(x.shape), mesh))
        waits = isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host
        return found.with_memory_kind("pinned_host") if waits else found

    return jax.tree_util.tree_map_with_path(of, tree)


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
    """``device_put`` that also reaches the devices of other hosts, which must call it with the same value."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_place(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)  # global already
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def shard(tree: Any, mesh: Mesh) -> Any:
    """Places every leaf by its rule; on several hosts each passes the same values and keeps its part."""
    return jax.tree.map(_place, tree, shardings(tree, mesh))


def constrain(tree: Any, mesh: Mesh) -> Any:
    """Inside ``jit``: keeps parameters, gradients or a train state where their rules put them."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def make_place(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """The ``place`` of ``models.decoder.make_policy``: activations by name, see ``ACTIVATIONS``.

    Arrays without a time axis (``[B, D]`` in decoding) take the rule without it; an axis that does not divide its
    dimension is dropped.
    """

    def place(x: jax.Array, name: str) -> jax.Array:
        rule = ACTIVATIONS[name]
        if x.ndim == len(rule) - 1:
            rule = rule[:1] + rule[2:]
        axes = [((a,) if isinstance(a, str) else a or ()) for a in rule]
        fits = (x.shape[i] % math.prod(mesh.shape[a] for a in names) == 0 for i, names in enumerate(axes))
        spec = P(*(names or None if fit else None for names, fit in zip(axes, fits, strict=True)))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return place


def batch_shardings(tree: Any, mesh: AnyMesh) -> Any:
    """A tree of shardings for a batch: rows over the batch axes, scalars everywhere.

    Raises:
      UserError: naming the first leaf whose rows do not divide over them.
    """
    parts = batch_parts(mesh)

    def of(path: tuple[Any, ...], x: Any) -> NamedSharding:
        if not x.shape:
            return replicated(mesh)
        if x.shape[0] % parts:
            name = jax.tree_util.keystr(path) or "the batch"
            axes = " x ".join(BATCH)
            raise UserError(f"{name} has {x.shape[0]} rows, no multiple of {axes} = {parts}; choose a multiple")
        return batch_sharding(mesh)

    return jax.tree_util.tree_map_with_path(of, tree)


def shard_batch(tree: Any, mesh: Mesh) -> Any:
    """Places the rows of a batch (any tree of arrays with a leading row axis, and scalars) over the batch axes."""
    return jax.tree.map(_place, tree, batch_shardings(tree, mesh))


def constrain_batch(tree: Any, mesh: Mesh) -> Any:
    """Inside ``jit``: splits the rows of a batch over the batch axes, so that no device computes another's rows."""
    return jax.lax.with_sharding_constraint(tree, batch_shardings(tree, mesh))


def cache_shardings(cache: Any, mesh: AnyMesh) -> Any:
    """A tree of shardings for a cache of the decoder: rows over the batch axes, heads over tensor where they divide."""

    def of(path: tuple[Any, ...], x: Any) -> NamedSharding:
        if _leaf_name(path) in ("segment_ids", "positions", "experts"):
            return batch_sharding(mesh)
        before = (None,) if len(path) == 1 else ()  # few layers are a tuple, many an axis; see ``models.cache``
        heads = "tensor" if x.shape[len(before) + 1] % mesh.shape["tensor"] == 0 else None
        return NamedSharding(mesh, P(*before, *batch_sharding(mesh).spec, heads))

    return jax.tree_util.tree_map_with_path(of, cache)
