"""Generation, scoring and training as a stream of micro-batches: who waits for whom, and how many samples a second."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from experiments.systems.parts import event_simulator
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import chips, known_models
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.cost import LINKS, active_parameters, cache_bytes
from jaxrl_llm.planning.parallel_layout import Sizes, held
from jaxrl_llm.types import Key

STAGES = 3  # generate, score, train; and then the weights are sent


class Rates(NamedTuple):
    """Seconds of one instance: a few chips that hold the model once."""

    step: float  # of a decoding step, for the weights
    row: float  # and for the cache of every row
    score: float  # of a token
    train: float  # of a token
    send: float  # of new weights


def rates(config: ModelConfig, chip: Chip, *, tensor: int, context: int, efficiency: float = 0.4) -> Rates:
    """Of a model on instances of ``tensor`` chips: decoding by memory traffic, the rest by operations.

    Args:
      context: tokens in the cache of a row, on average.
      efficiency: share of the peak rate at which scoring (one pass) and training (four) run.
    """
    sizes = Sizes(tensor=tensor)
    weights = 2 * held(config, sizes)
    row = cache_bytes(config, sizes) * context / chip.bandwidth
    score = 2 * active_parameters(config) / (tensor * chip.flops * efficiency)
    return Rates(weights / chip.bandwidth, row, score, 4 * score, weights / (chip.link * LINKS))


def as_ready(part: int, parts: int) -> int:
    """Streamed: a part goes on when it is done."""
    return part


def as_batch(part: int, parts: int) -> int:
    """Every stage waits for the whole batch."""
    return parts - 1


def edges(
    iterations: int, parts: int, *, hand_on: Callable[[int, int], int], staleness: int
) -> Bool[np.ndarray, "N N"]:
    """``[i, j]``: task ``i`` waits for ``j``. Of an iteration: ``parts`` of every stage in turn, then the new weights.

    Parts are generated and trained in order. Part ``k`` is scored, and later trained on, when part
    ``hand_on(k, parts)`` has left the stage before: ``as_ready`` or ``as_batch``. Batch ``b`` is
    generated after the weights of update ``b - 1 - staleness`` have arrived.

    From "AsyncFlow", arXiv:2507.01663, sections 3 and 4.
    """
    size = STAGES * parts + 1

    def task(batch: int, stage: int, part: int = 0) -> int:
        return batch * size + stage * parts + part

    found = np.zeros((iterations * size,) * 2, bool)
    for b in range(iterations):
        for k in range(parts):
            ready = hand_on(k, parts)
            for stage in (1, 2):
                found[task(b, stage, k), task(b, stage - 1, ready)] = True
            for stage in (0, 2):
                if k or b:
                    found[task(b, stage, k), task(b, stage, k - 1) if k else task(b - 1, stage, parts - 1)] = True
        found[task(b, STAGES), task(b, STAGES - 1, parts - 1)] = True
        if b > staleness:
            found[task(b, 0), task(b - 1 - staleness, STAGES)] = True
    return found


def pipeline_seconds(seconds: Float[Array, "S M"], *, hand_on: Callable[[int, int], int]) -> Float[Array, ""]:
    """Until the last of ``M`` micro-batches has left the last of ``S`` stages, each on devices of its own.

    >>> import jax.numpy as jnp
    >>> [float(pipeline_seconds(jnp.ones((2, 3)), hand_on=how)) for how in (as_batch, as_ready)]
    [6.0, 4.0]
    """
    stages, parts = seconds.shape
    after = np.zeros((stages * parts,) * 2, bool)
    for s in range(1, stages):
        for k in range(parts):
            after[s * parts + k, (s - 1) * parts + hand_on(k, parts)] = True
    devices = np.repeat(np.eye(stages, dtype=bool), parts, axis=0)
    return event_simulator.schedule(seconds.reshape(-1), jnp.asarray(devices), jnp.asarray(after)).makespan


def parts_of(lengths: Float[Array, "I P G"], parts: int) -> tuple[Float[Array, "I M"], Float[Array, "I M"]]:
    """``(steps, tokens)`` of every micro-batch of whole groups, those first that end first.

    ``steps``: decoding steps between the end of one micro-batch and that of the next, all rows being decoded together;
    they add up to the longest response.

    Args:
      lengths: tokens of ``I`` batches of ``P`` groups of ``G`` responses.
    """
    batches, groups, _ = lengths.shape
    if groups % parts:
        raise ValueError(f"parts={parts} does not divide the {groups} groups of a batch")
    longest = jnp.max(lengths, axis=2)
    order = jnp.argsort(longest, axis=1)
    ends = jnp.take_along_axis(longest, order, axis=1).reshape(batches, parts, -1)[:, :, -1]
    tokens = jnp.take_along_axis(jnp.sum(lengths, axis=2), order, axis=1).reshape(batches, parts, -1).sum(axis=2)
    return jnp.diff(ends, axis=1, prepend=jnp.zeros((batches, 1), ends.dtype)), tokens


def splits(instances: int) -> Bool[np.ndarray, "K 3 D"]:
    """All ways to give every stage neighbouring instances of its own, the last stages at least one each.

    >>> splits(3).astype(int).tolist()
    [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]
    """
    place = np.arange(instances)
    found = []
    for first in range(1, instances - 1):
        for second in range(first + 1, instances):
            found.append([place < first, (place >= first) & (place < second), place >= second])
    return np.asarray(found)


def colocated(instances: int) -> Bool[np.ndarray, "1 3 D"]:
    """All stages on all instances."""
    return np.ones((1, STAGES, instances), bool)


class Flow(NamedTuple):
    """What a way to run the stages yields."""

    rows_per_second: Float[Array, ""]
    idle: Float[Array, ""]
    generating: Float[Array, ""]  # share of the instances


def flow(
    lengths: Float[Array, "I P G"], rate: Rates, shares: Bool[np.ndarray, "K 3 D"], *, parts: int, prompt: int,
    hand_on: Callable[[int, int], int], staleness: int,
) -> Flow:  # fmt: skip
    """The best of the given divisions of instances for batches of these lengths.

    Args:
      lengths: tokens of every response.
      shares: which instances each stage has, ``splits`` or ``colocated``.
      prompt: tokens of a prompt, scored and trained on with every response.
    """
    batches, groups, size = lengths.shape
    steps, tokens = parts_of(lengths, parts)
    tokens = tokens + prompt * size * groups / parts
    after = jnp.asarray(edges(batches, parts, hand_on=hand_on, staleness=staleness))
    stage = np.concatenate([np.repeat(np.arange(STAGES), parts), [STAGES]])  # of every task of an iteration

    def one(share):
        count = jnp.sum(share.astype(jnp.float32), axis=1)
        decoding = rate.step + rate.row * groups * size / count[0]
        seconds = [steps * decoding, tokens * rate.score / count[1], tokens * rate.train / count[2]]
        seconds = jnp.concatenate([*seconds, jnp.full((batches, 1), rate.send, jnp.float32)], axis=1)
        nobody = jnp.zeros((1, share.shape[1]), bool)  # needs no instance: the weights travel beside the work
        devices = jnp.tile(jnp.concatenate([share, nobody])[stage], (batches, 1))
        timeline = event_simulator.schedule(seconds.reshape(-1), devices, after)
        idle = event_simulator.idle_share(timeline, devices)
        return Flow(batches * groups * size / timeline.makespan, idle, count[0] / share.shape[1])

    found = jax.lax.map(one, jnp.asarray(shares), batch_size=32)
    best = jnp.argmax(found.rows_per_second)
    return jax.tree.map(lambda x: x[best], found)


def draw_lengths(
    key: Array, shape: tuple[int, int, int], *, median: float, spread: float, most: float
) -> Float[Array, "I P G"]:
    """Log-normal response lengths, cut off at ``most``; ``spread`` is the deviation of the logarithm."""
    drawn = median * jnp.exp(spread * jax.random.normal(key, shape, jnp.float32))
    return jnp.clip(jnp.ceil(drawn), 1.0, most)


@lru_cache(maxsize=8)
def make_flow(
    model: str,
    chip: str,
    tensor: int,
    instances: int,
    parts: int,
    division: Callable[[int], Array],
    hand_on: Callable[[int, int], int],
    staleness: int,
    *,
    batches: tuple[int, int, int] = (6, 64, 8),
    prompt: int = 512,
) -> Callable[[Key], dict[str, Array]]:
    """``key -> figures``: throughput over that of all stages on all instances in turn, idle and generating shares.

    Args:
      model: simulated, of ``shapes``, on instances of ``tensor`` chips.
      parts: micro-batches of a batch.
      division: ``instances -> shares`` that ``flow`` chooses among: ``splits`` or ``colocated``.
      batches: batches, groups and responses of a group, whose lengths are drawn.
    """
    rate = rates(known_models.shape_of(model), chips.CHIPS[chip], tensor=tensor, context=prompt + 512)
    same = {"parts": parts, "prompt": prompt}
    here = partial(flow, shares=division(instances), hand_on=hand_on, staleness=staleness, **same)
    base = partial(flow, shares=colocated(instances), hand_on=as_batch, staleness=0, **same)

    def figures(key: Key) -> dict[str, Array]:
        lengths = draw_lengths(key, batches, median=800.0, spread=0.7, most=8192.0)
        found, first = here(lengths, rate), base(lengths, rate)
        return {
            "flow/relative": found.rows_per_second / first.rows_per_second,
            "flow/idle": found.idle,
            "flow/generating": found.generating,
        }

    return figures
