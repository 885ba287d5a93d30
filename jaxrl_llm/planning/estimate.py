"""Memory of each phase on one chip in closed form: what is held, and what the largest moment needs beside.

Made for plans where no TPU compiler is at hand; ``compiled.py`` has the compiler's own figures. The parts that matter
(weights, moments, gradients, caches, kept activations) are exact; the working memory of one layer and of one chunk of
logits is a count of the arrays that live at the same time.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import READ_AT_ONCE
from jaxrl_llm.planning.parallel_layout import Number, Sizes, gathered, held_layers, share
from jaxrl_llm.planning.work import (
    Work,
    cached_bytes,
    judge_bytes,
    judge_phases,
    judged_columns,
    kept_bytes,
    sampled_bytes,
    saved_bytes,
    shared,
    trained,
)  # fmt: skip

_CHUNK = 128  # the fewest time steps whose logits exist at once, see ``logprobs.chunked``
_TRAINED_COLUMN, _SCORED_COLUMN = 21, 12  # bytes of a token's entries that the programs read
_BLOCK = 512  # queries whose scores exist at once, see ``models.attention.attend``


class Memory(NamedTuple):
    """Bytes on one chip: ``arguments`` are there before and after, ``working`` only during the phase."""

    arguments: Number
    working: Number
    results: Number = 0.0  # new arrays that stay

    @property
    def peak(self) -> Number:
        """The most that is held at once."""
        return self.arguments + self.working + self.results


def _itemsize(work: Work) -> int:
    return np.dtype(work.compute_dtype).itemsize


def trained_size(work: Work) -> int:
    """Bytes of a weight that trains, and of its gradient."""
    return np.dtype(jnp.float32 if work.adapter else work.weights).itemsize


def _layer(
    config: ModelConfig, sizes: Sizes, work: Work, rows: Number, queries: int, keys: int, kernels: bool
) -> Number:
    """Working memory of one block forward: the larger of attention (heads, scores) and of the inner width."""
    size, tokens = _itemsize(work), rows * queries
    heads = share(config.num_heads, sizes.tensor)
    hidden = tokens * config.hidden_size * size
    projected = tokens * config.head_dim * (heads + 2 * share(config.num_kv_heads, sizes.tensor)) * size
    block = queries if queries <= 2 * _BLOCK else _BLOCK
    scores = rows * queries * heads * 4 if kernels else rows * block * keys * (heads * (4 + size) + 1)
    if config.experts is None:
        inner = tokens * (config.hidden_size + 3 * share(config.intermediate_size, sizes.tensor)) * size
    else:
        e = config.experts
        inner = tokens * sizes.expert * e.per_token * (2 * config.hidden_size + 3 * share(e.size, sizes.tensor)) * size
    collected = gathered(config, sizes) * size if sizes.fsdp > 1 or work.base else 0  # few bits are opened
    return hidden + max(projected + scores, inner) + collected


def _kept_layer(config: ModelConfig, sizes: Sizes, work: Work, rows: Number, kernels: bool) -> Number:
    """What a block leaves for its backward pass where nothing is recomputed; scores of long rows are, anyway.

    Beside kernels: its products with weights, and attention, see ``models.decoder.rematerialised``.
    """
    size, tokens = _itemsize(work), rows * share(work.length, sizes.context)
    heads = share(config.num_heads, sizes.tensor)
    if kernels:
        both = heads + share(config.num_kv_heads, sizes.tensor)
        inner = 0 if config.experts else 2 * share(config.intermediate_size, sizes.tensor)
        return tokens * size * (3 * config.hidden_size + 2 * both * config.head_dim + inner) + tokens * heads * 4
    projected = tokens * config.head_dim * (heads + 2 * share(config.num_kv_heads, sizes.tensor)) * size
    scores = rows * work.length**2 * heads * (8 + 1.5 * size) if work.length <= 2 * _BLOCK else 0.0
    if config.experts is None:
        inner = tokens * 4 * share(config.intermediate_size, sizes.tensor) * size
    else:
        e = config.experts
        chosen = tokens * sizes.expert * e.per_token
        inner = chosen * (2 * config.hidden_size + 4 * share(e.size, sizes.tensor)) * size
    return 4 * tokens * config.hidden_size * size + 1.5 * projected + scores + inner


def _passing(config: ModelConfig, sizes: Sizes, work: Work, rows: Number) -> Number:
    """Keys and values that pass by along ``context``, and their gradients in float32: those here and the next."""
    if sizes.context == 1:
        return 0
    entries = rows * share(work.length, sizes.context) * share(config.num_kv_heads, sizes.tensor) * config.head_dim
    return 2 * 2 * entries * (_itemsize(work) + 4)


def _experts(config: ModelConfig, sizes: Sizes) -> int:
    """Parameters of the experts of all layers on one chip."""
    e = config.experts
    inner = share(e.size, sizes.tensor * sizes.fsdp)
    return config.num_layers * 3 * share(e.number, sizes.expert) * inner * config.hidden_size


def _cast(config: ModelConfig, sizes: Sizes, work: Work) -> Number:
    """Float32 masters in the compute type: the compiler casts the layers of a chip before it goes through them."""
    size = _itemsize(work)
    return held_layers(config, sizes) * size if size < trained_size(work) and not work.adapter else 0.0


def update(config: ModelConfig, sizes: Sizes, work: Work, kernels: bool = False) -> Memory:
    """Masters, two moments, gradients, kept activations; beside them one layer backward or one chunk of logits.

    With an adapter the masters are a base that has no gradient.
    """
    size, here = _itemsize(work), trained(config, sizes, work)
    rows, own = math.ceil(work.update_rows / sizes.rows), share(work.length, sizes.context)
    tokens = rows * own
    columns = work.rows * work.length / sizes.rows
    gradients = here * (trained_size(work) + (4 if work.microbatches > 1 else 0))
    kept = config.num_layers * tokens * config.hidden_size * size
    one = _layer(config, sizes, work, rows, own, work.length, kernels) + _passing(config, sizes, work, rows)
    layer = 2 * one + 4 * tokens * config.hidden_size * size + (0 if work.adapter else 4 * gathered(config, sizes))
    if not work.remat:
        kept = config.num_layers * _kept_layer(config, sizes, work, rows, kernels)
    chunk = _logits(config, sizes, work, work.update_rows / sizes.data, _steps_at_once(work), 3)
    return Memory(
        kept_bytes(config, sizes, work) + 8 * here + columns * _TRAINED_COLUMN,
        gradients + _cast(config, sizes, work) + kept + max(layer, chunk),
    )


def _steps_at_once(work: Work) -> int:
    """Time steps whose logits exist at once, see ``types.Policy.steps_at_once``."""
    return min(max(_CHUNK, work.scored // work.update_rows), work.length)


def _logits(config: ModelConfig, sizes: Sizes, work: Work, rows: Number, steps: int, copies: int) -> Number:
    """Logits of so many time steps in float32, and the head as it is used where it has to be cast."""
    vocabulary = share(config.padded_vocab_size, sizes.tensor * sizes.fsdp)
    head = vocabulary * config.hidden_size * _itemsize(work) if steps > 1 else 0
    return copies * rows * steps * vocabulary * 4 + head


def score(config: ModelConfig, sizes: Sizes, work: Work, kernels: bool = False) -> Memory:
    """Masters, one layer forward or one chunk of logits, of which beside kernels only the head is there."""
    rows, own = math.ceil(work.update_rows / sizes.rows), share(work.length, sizes.context)
    layer = _layer(config, sizes, work, rows, own, work.length, kernels)
    chunk = _logits(config, sizes, work, work.update_rows / sizes.data, _steps_at_once(work), 0 if kernels else 2)
    hidden = rows * own * config.hidden_size * _itemsize(work)
    working = hidden + _cast(config, sizes, work) + max(layer, chunk)
    return Memory(kept_bytes(config, sizes, work) + rows * work.length * _SCORED_COLUMN, working)


def reward(judge: ModelConfig, sizes: Sizes, work: Work, kernels: bool = False) -> Memory:
    """A reward model, one layer forward of the rows that a chip reads at once, and their hidden states."""
    rows, columns = READ_AT_ONCE, judged_columns(judge, work)
    hidden = rows * columns * judge.hidden_size * _itemsize(work)
    layer = _layer(judge, sizes, work, rows, columns, columns, kernels)
    return Memory(judge_bytes(judge, sizes, work) + rows * columns * _SCORED_COLUMN, hidden + layer)


def reshard(config: ModelConfig, train: Sizes, rollout: Sizes, work: Work) -> Memory:
    """Masters in, compute weights out, and the layers cast where they lie before any of them moves.

    Between two layouts a chip collects its part of a layer, or of the table; of a mixture that is cut along tensor and
    expert in training one matrix of all the experts of a layer, four times.
    """
    size, working = _itemsize(work), _cast(config, train, work)
    if train != rollout:
        table = share(config.padded_vocab_size, rollout.tensor * rollout.fsdp) * config.hidden_size
        working += max(held_layers(config, rollout) / config.num_layers, table) * size
        if config.experts is not None and train.tensor > 1 and train.expert > 1:
            working += 4 * config.experts.number * config.experts.size * config.hidden_size * size
    return Memory(kept_bytes(config, train, work), working, sampled_bytes(config, rollout, work))


def cache(config: ModelConfig, sizes: Sizes, work: Work, rows: Number) -> Number:
    """Keys and values of so many rows on one chip; of a mixture also which experts computed each column, in a byte."""
    heads, e = share(config.num_kv_heads, sizes.tensor), config.experts
    read = 0 if e is None else config.num_layers * e.per_token * (1 if e.number <= 128 else 2)
    return rows * work.length * (2 * config.num_layers * heads * cached_bytes(config, work) + 8 + read)


def prefill(config: ModelConfig, sizes: Sizes, work: Work, kernels: bool = False) -> Memory:
    """Weights, the prompts' cache, and in the end the cache of every row.

    Args:
      kernels: of a TPU, where the prompts' cache has room for the prompts alone.
    """
    rows = work.rollout_rows / sizes.rows
    prompts = math.ceil(rows / work.group)
    one = _layer(config, sizes, work, prompts, work.prompt, work.length, kernels)
    own = cache(config, sizes, work, prompts) if work.group > 1 or kernels else 0.0
    own *= work.prompt / work.length if kernels else 1.0
    new = cache(config, sizes, work, rows)  # beside what the layers need, or where that was
    return Memory(sampled_bytes(config, sizes, work), own + (one if kernels else max(one - new, 0.0)), new)


def steps_apart(config: ModelConfig, sizes: Sizes, work: Work, chip: Number) -> bool:
    """``models.cache.steps_apart`` of a rollout in this layout on chips of so many bytes."""
    devices = caches.Devices(float(chip), math.prod(sizes), sizes.fsdp * sizes.tensor, sizes.expert)
    return caches.steps_apart(config, work.compute_dtype, devices)


def decode(config: ModelConfig, sizes: Sizes, work: Work, kernels: bool = False, chip: Number = 0.0) -> Memory:
    """Weights; caches and the logits of one token; beside them the layers' weights apart or opened, or a layer's cache.

    Args:
      kernels: of a TPU, which read the cache where it lies, and layers compiled one by one, see ``models.cache``.
      chip: bytes of its memory, by which deep models are compiled so, too.
    """
    rows = work.rollout_rows / sizes.rows
    stored = cache(config, sizes, work, rows)
    apart = steps_apart(config, sizes, work, chip) if kernels else config.num_layers <= caches.UNROLLED
    # a base in few bits is opened for all steps, see ``models.quantised.opened_for_steps``
    beside = held_layers(config, sizes) * _itemsize(work) - saved_bytes(config, sizes, work)
    beside = beside if apart or work.base else 0.0
    if not apart and not kernels:
        beside += stored / config.num_layers
    if config.experts is not None and kernels:  # grouped products read them in an order of their own, made once
        beside = max(beside, _experts(config, sizes) * _itemsize(work))
    given = work.rollout_rows / sizes.data * share(config.padded_vocab_size, sizes.tensor * sizes.fsdp) * 4
    logits = _logits(config, sizes, work, work.rollout_rows / sizes.data, 1, 2)
    return Memory(sampled_bytes(config, sizes, work) + given, stored + beside + logits)


def memory(
    config: ModelConfig, train: Sizes, rollout: Sizes, work: Work, kernels: bool = False, chip: Number = 0.0
) -> dict[str, Memory]:
    """Every phase of a step by itself; ``kernels``: of a TPU, see ``decode`` and ``_kept_layer``; ``chip``: bytes."""
    found = {
        "reshard": reshard(config, train, rollout, work),
        "prefill": prefill(config, rollout, work, kernels),
        "decode": decode(config, rollout, work, kernels, chip),
        "score": score(config, train, work, kernels),
        "update": update(config, train, work, kernels),
    }
    found |= {name: reward(judge, train, work, kernels) for name, judge in judge_phases(work).items()}
    absent = {"score"} - ({"score"} if work.scores else set()) | (
        {"reshard"} if shared(train, rollout, work) else set()
    )
    return {name: value for name, value in found.items() if name not in absent}


def of_the_loop(
    config: ModelConfig, train: Sizes, peaks: dict[str, Number], work: Work, rollout: Sizes | None = None
) -> dict[str, Number]:
    """Peak of each phase with what lies there meanwhile: masters and moments always, a reference where one scores.

    Reward models stay where they read.

    Args:
      peaks: of each phase by itself, estimated or compiled.
      rollout: layout of sampling, where it may read the weights that are there; None: it has weights of its own.
    """
    here = trained(config, train, work)
    masters, moments = kept_bytes(config, train, work), 8 * here
    masters = 0 if rollout is not None and shared(train, rollout, work) else masters
    reference = work.scores * here * (trained_size(work) if work.adapter else _itemsize(work))
    beside = {"reshard": moments, "prefill": masters + moments, "decode": masters + moments, "score": moments,
              "update": 0}  # fmt: skip
    own = {name: judge_bytes(judge, train, work) for name, judge in judge_phases(work).items()}
    beside |= {name: kept_bytes(config, train, work) + moments - size for name, size in own.items()}
    return {name: peak + beside[name] + reference + sum(own.values()) for name, peak in peaks.items()}
