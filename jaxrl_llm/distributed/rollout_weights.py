"""Weights of the rollout in a layout of their own: made from the trained ones before it, let go after it."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.reshard import make_reshard, moved_bytes
from jaxrl_llm.distributed.weight_transfer import Transfer
from jaxrl_llm.models import quantised
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.types import Params

FIGURES = Transfer._fields[1:]  # as a transfer between jobs names them


class Move(NamedTuple):
    """The compiled move, and what by its two layouts has to travel."""

    program: Any  # ``jax.jit`` of the parameters that train to those of the rollout
    sent_bytes: int  # that the devices receive together
    kept_bytes: int  # that they have already

    def __call__(self, params: Params) -> tuple[Params, dict[str, float]]:
        """The weights to sample with, and the metrics of the move."""
        started = time.monotonic()
        moved = jax.block_until_ready(self.program(params))
        seconds = time.monotonic() - started
        figures = zip(FIGURES, (float(self.sent_bytes), float(self.kept_bytes), seconds), strict=True)
        return moved, {f"reshard/{name}": value for name, value in figures}


def make_move(
    config: ModelConfig,
    params: Params,
    before: Mesh,
    after: Mesh,
    *,
    compute_dtype: Any,
    few_bits: str = "",
    whole: bool = False,
) -> Move:
    """From parameters laid out by ``distributed.rules`` on ``before`` to weights for rollouts; compiles when called.

    What travels is what a rollout reads: matrices in the dtype of the activations or in few bits. Norms, biases and an
    adapter keep their precision, so that the samples are those of the parameters themselves.

    Args:
      params: arrays or shapes; with an adapter ``{"base", "lora"}``.
      after: the same devices in the same order, in another shape.
      few_bits: one of ``quantised.TYPES``: the matrices of the layers are quantised before they move; empty: none is.
      whole: every device gets all of the weights, as ``rollout.per_device`` wants them.
    """
    prepare = partial(_lighter, config, compute_dtype, few_bits)
    shapes = jax.eval_shape(travelling(config, compute_dtype, few_bits), params)
    wanted = jax.tree.map(lambda _: meshes.replicated(after), shapes) if whole else rules.shardings(shapes, after)

    trained = rules.shardings(shapes, before)
    to, old = (tree["base"] if "base" in params else tree for tree in (wanted, trained))
    reshard = make_reshard(to, compute_dtype, prepare=prepare, before=old)

    def run(params: Params) -> Params:
        if "base" in params:
            return params | {"base": reshard(params["base"])}
        return reshard(params)

    sent = total = 0
    for leaf, here, there in zip(*(jax.tree.leaves(tree) for tree in (shapes, trained, wanted)), strict=True):
        bits = jax.dtypes.itemsize_bits(leaf.dtype)
        sent += moved_bytes(leaf, here, there, bits)
        total += _held(leaf.shape, there) * bits
    return Move(jax.jit(run, out_shardings=wanted), sent // 8, (total - sent) // 8)


def travelling(config: ModelConfig, compute_dtype: Any, few_bits: str = "") -> Callable[[Params], Params]:
    """What goes to a rollout in the place of the parameters: see ``make_move``, which arguments these are of."""
    prepare = partial(_lighter, config, compute_dtype, few_bits)

    def prepared(params: Params) -> Params:
        if "base" in params:
            return params | {"base": prepared(params["base"])}
        top = {name: x for name, x in params.items() if name != "layers"}
        return prepare(top) | {"layers": jax.lax.map(prepare, params["layers"])}

    return prepared


def _lighter(config: ModelConfig, dtype: Any, few_bits: str, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """The arrays of one layer, or those of none, as they travel."""
    of_layer = "embed" not in arrays
    made = quantised.quantise_layers(config, arrays, few_bits) if few_bits and of_layer else arrays
    return {name: x.astype(dtype) if isinstance(x, jax.Array) and x.ndim > 1 else x for name, x in made.items()}


def _held(shape: tuple[int, ...], sharding: NamedSharding) -> int:
    """Numbers of an array on all devices together, copies counted."""
    return math.prod(sharding.shard_shape(shape)) * sharding.mesh.size
