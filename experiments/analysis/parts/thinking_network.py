"""A deep repeating ConvLSTM (DRC): a stack of convolutional memories that ticks several times for every action.

``x`` is what a convolution sees of the board; layer ``n`` gets ``x``, the memory below it (the lowest one that of the
top, a tick ago), its own and what the own pools over the board: ``c' = f c + i g + push``, ``h' = o tanh(c')``.

From "An Investigation of Model-Free Planning", arXiv:1901.03559.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.types import Key, Params


class Memory(NamedTuple):
    """Cells and outputs of all layers, of one board."""

    cell: Float[Array, "D S S C"]
    out: Float[Array, "D S S C"]


def _weights(key: Key, *shape: int) -> Array:
    inputs = 1
    for size in shape[:-1]:
        inputs *= size
    return jax.random.normal(key, shape, jnp.float32) / jnp.sqrt(jnp.float32(inputs))


def make(key: Key, *, planes: int, side: int, channels: int, depth: int, actions: int) -> Params:
    """Fresh weights."""
    keys = jax.random.split(key, 2 * depth + 4)
    gates = [_weights(keys[2 * k], 3, 3, 4 * channels, 4 * channels) for k in range(depth)]
    pools = [_weights(keys[2 * k + 1], 2 * channels, channels) for k in range(depth)]
    forget = jnp.zeros((4 * channels,), jnp.float32).at[channels : 2 * channels].set(1.0)
    wide = 128
    return {
        "see": _weights(keys[-4], 3, 3, planes, channels), "gates": jnp.stack(gates), "pools": jnp.stack(pools),
        "biases": jnp.tile(forget[None], (depth, 1)),
        "head": _weights(keys[-3], side * side * 2 * channels, wide), "head_bias": jnp.zeros((wide,), jnp.float32),
        "policy": 0.1 * _weights(keys[-2], wide, actions), "value": 0.1 * _weights(keys[-1], wide, 1),
    }  # fmt: skip


def fresh(params: Params, side: int) -> Memory:
    """A memory with nothing in it."""
    depth, channels = params["biases"].shape[0], params["see"].shape[3]
    empty = jnp.zeros((depth, side, side, channels), jnp.float32)
    return Memory(empty, empty)


def _convolved(x: Float[Array, "S S F"], kernel: Float[Array, "3 3 F G"]) -> Float[Array, "S S G"]:
    """A 3 x 3 convolution as one product, whose gradients are products, too: on a board a fraction of the time."""
    side = x.shape[0]
    around = jnp.pad(x, ((1, 1), (1, 1), (0, 0)))
    near = [around[a : a + side, b : b + side] for a in range(3) for b in range(3)]
    return jnp.concatenate(near, axis=2) @ kernel.reshape(-1, kernel.shape[3])


def tick(params: Params, x: Array, memory: Memory, push: Array) -> Memory:
    """All layers once, from below; ``push [D, S, S, C]`` is added to the new cells."""
    cells, outs, below = [], [], memory.out[-1]
    for k in range(params["biases"].shape[0]):
        own = memory.out[k]
        pooled = jnp.concatenate([jnp.max(own, axis=(0, 1)), jnp.sum(own, axis=(0, 1)) / (own.shape[0] * own.shape[1])])
        spread = jnp.broadcast_to((pooled @ params["pools"][k])[None, None, :], own.shape)
        given = jnp.concatenate([x, below, own, spread], axis=2)
        found = _convolved(given, params["gates"][k]) + params["biases"][k][None, None, :]
        enter, forget, leave, new = jnp.split(found, 4, axis=2)
        cell = jax.nn.sigmoid(forget) * memory.cell[k] + jax.nn.sigmoid(enter) * jnp.tanh(new) + push[k]
        below = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        cells, outs = [*cells, cell], [*outs, below]
    return Memory(jnp.stack(cells), jnp.stack(outs))


def think(
    params: Params, planes: Float[Array, "N P"], memory: Memory, *, ticks: int, push: Array | None = None
) -> tuple[Array, Array, Memory, Any]:
    """``(logits, value, memory, cells of every tick)`` of a board after ``ticks`` ticks."""
    side = memory.cell.shape[1]
    x = jax.nn.relu(_convolved(planes.reshape(side, side, -1), params["see"]))
    push = jnp.zeros(memory.cell.shape, jnp.float32) if push is None else push

    def once(memory: Memory, _: None) -> tuple[Memory, Array]:
        memory = tick(params, x, memory, push)
        return memory, memory.cell

    memory, cells = jax.lax.scan(once, memory, None, ticks)
    flat = jnp.concatenate([x, memory.out[-1]], axis=2).reshape(-1)
    wide = jax.nn.relu(flat @ params["head"] + params["head_bias"])
    return wide @ params["policy"], (wide @ params["value"])[0], memory, cells
