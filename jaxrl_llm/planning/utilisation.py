"""How near to the roof a running step comes: the least seconds of its useful work, over the seconds it took."""

import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jaxrl_llm.distributed import hosts
from jaxrl_llm.distributed.compiler_options import TPUS
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning.chips import CHIPS, GPUS, TARGETS, Chip
from jaxrl_llm.planning.cost import active_parameters, cache_bytes
from jaxrl_llm.planning.parallel_layout import Number, Sizes, held
from jaxrl_llm.types import Rewards, Trajectories

# as ``jax.Device.device_kind`` names them
KINDS = TPUS | {target.name: kind for kind, target in TARGETS.items()}


def _least_time(run: Callable[[Array], Array], given: Array, repeats: int) -> float:
    """Seconds of the quickest of ``repeats`` runs, the first and its compilation left out."""
    program = jax.jit(run)
    jax.block_until_ready(program(given))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(given))
        found.append(time.perf_counter() - start)
    return min(found)


@lru_cache(maxsize=4)
def measured(dtype: Any = jnp.float32, *, side: int = 1024, repeats: int = 5) -> Chip:
    """Rates that the first device reaches on a square product and on one pass over memory; no links.

    Args:
      side: of the product; the memory pass is over ``16 side^2`` numbers of float32, which any device reads and
        writes at its best. Smaller ones measure caches and overheads.
    """
    product = _least_time(lambda x: x @ x, jnp.ones((side, side), dtype), repeats)
    numbers = jnp.ones((16 * side * side,), jnp.float32)
    passed = _least_time(lambda x: x + 1.0, numbers, repeats)
    return Chip(0.0, 2 * 4 * numbers.size / passed, 2 * side**3 / product, 0.0)


def of_device(dtype: Any = jnp.float32) -> Chip:
    """Peak rates of the first device: the table's for a TPU or GPU that computes in bfloat16, else measured."""
    kind = KINDS.get(jax.devices()[0].device_kind)
    return (CHIPS | GPUS)[kind] if kind and jnp.dtype(dtype) == jnp.bfloat16 else measured(dtype)


def above_roof(share: float, dtype: Any = jnp.float32) -> str:
    """Why a share of the peak rates is above 1; empty where it is not."""
    if share <= 1:
        return ""
    kind = KINDS.get(jax.devices()[0].device_kind)
    if kind and jnp.dtype(dtype) == jnp.bfloat16:
        return f"above 1: fewer bytes were moved than the weights have in {dtype}, at the published rates of {kind}"
    rates = of_device(dtype)
    return (
        f"above 1: the peak was measured here ({rates.flops / 1e9:.3g} GFLOP/s, "
        f"{rates.bandwidth / 1e9:.3g} GB/s of memory), in a busier moment or beyond the caches, where small ones stay"
    )


def least_seconds(
    config: ModelConfig,
    chip: Chip,
    *,
    prompt_tokens: Int[np.ndarray, " P"],
    response_tokens: Int[np.ndarray, " R"],
    trained: Bool[np.ndarray, " R"],
    sizes: Sizes = Sizes(),
    itemsize: int = 4,
    adapter: bool = False,
) -> dict[str, Number]:
    """Seconds of one step at the peak rates, for tokens that were really read, sampled and trained on.

    ``rollout = 2 N sum(prompts) / F + max(responses) max((w + k) / B, 2 N R / F)`` and ``update = 6 N tokens / F``
    (4 in the place of 6 beside an adapter: its frozen base has no gradient):
    ``N`` parameters that a token meets, ``F`` operations and ``B`` bytes a second of all chips, ``w`` the weights' and
    ``k`` the mean cache's bytes. Attention's own products, recomputation and padding count as nothing, so a share of
    1 is reached only where the peak was measured too low, or weights stay in a cache: ``above_roof`` says so.

    Args:
      prompt_tokens: of each prompt, read once for its group.
      response_tokens: of each row, the same number to each prompt, next to each other.
      trained: rows that the update takes; their prompts are read once more, with the first of them.
      itemsize: bytes of a weight and of a number in the cache.
      adapter: one trains beside the weights, which do not.
    """
    active, rates = active_parameters(config), chip.flops * sizes.chips
    rows, group = response_tokens.size, response_tokens.size // prompt_tokens.size
    steps = int(response_tokens.max(initial=0))
    local = rows / sizes.rows
    context = float(prompt_tokens.mean()) + steps / 2
    moved = held(config, Sizes(tensor=sizes.tensor, expert=sizes.expert)) * itemsize
    moved += local * cache_bytes(config, sizes) * itemsize / 2 * context
    step = max(moved / chip.bandwidth, 2 * active * rows / rates)
    again = prompt_tokens[trained.reshape(-1, group).any(axis=1)]
    tokens = int(response_tokens[trained].sum() + again.sum())
    return {
        "rollout": 2 * active * int(prompt_tokens.sum()) / rates + steps * step,
        "update": (4 if adapter else 6) * active * tokens / rates,
    }


def make_roof(
    config: ModelConfig,
    dtype: Any,
    *,
    group_size: int,
    mesh: Mesh | None = None,
    keep: Callable[[Trajectories, Rewards], Array] | None = None,
    adapter: bool = False,
) -> Callable[[Trajectories, Rewards, dict[str, float]], dict[str, float]]:
    """``(trajectories, rewards, seconds by phase) -> {"roof/rollout", "roof/update"}``: shares of the peak rates.

    On a CPU the devices of a mesh share the machine, whose rates count once.

    Args:
      dtype: that the decoder computes in.
      keep: rows that train, of the valid ones; None: all. As in ``builders.make_estimate``.
      adapter: as in ``least_seconds``.
    """
    chip, sizes = of_device(dtype), Sizes()
    if mesh is not None and mesh.devices.flat[0].platform != "cpu":
        sizes = Sizes(**{name: mesh.shape.get(name, 1) for name in Sizes._fields})

    @jax.jit
    def chosen(trajectories: Trajectories, rewards: Rewards) -> Array:
        return rewards.valid if keep is None else rewards.valid & keep(trajectories, rewards)

    def roof(trajectories: Trajectories, rewards: Rewards, seconds: dict[str, float]) -> dict[str, float]:
        mask, segments, trained = hosts.gathered(
            (trajectories.mask, trajectories.segment_ids, chosen(trajectories, rewards))
        )
        responses, whole = mask.sum(axis=1), (segments > 0).sum(axis=1)
        least = least_seconds(
            config,
            chip,
            prompt_tokens=(whole - responses)[::group_size],
            response_tokens=responses,
            trained=trained,
            sizes=sizes,
            itemsize=jnp.dtype(dtype).itemsize,
            adapter=adapter,
        )
        shares = {f"roof/{phase}": float(least[phase] / seconds[phase]) for phase in least}
        for name, share in shares.items():
            if why := above_roof(share, dtype):
                warnings.warn(f"{name} is {why}", stacklevel=2)  # shown once
        return shares

    return roof
