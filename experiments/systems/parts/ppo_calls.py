"""PPO as a graph of six calls of four models: what each costs on a block of devices, and what a whole plan costs."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.systems.parts import event_simulator, metropolis
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import cost, estimate, reshard_cost
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.parallel_layout import Number, held
from jaxrl_llm.planning.reshard_cost import Place
from jaxrl_llm.planning.search import MARGIN, Sizes, divisors, train_sizes
from jaxrl_llm.planning.work import Work
from jaxrl_llm.types import Key

CALLS = ("generate", "reward", "reference", "value", "train_actor", "train_critic")
MODELS = (0, 1, 2, 3, 0, 3)  # whose calls they are: actor, reward model, reference, critic
GENERATE, REWARD, REFERENCE, VALUE, TRAIN_ACTOR, TRAIN_CRITIC = range(6)
Figures = tuple[Number, Number, Number]  # seconds, bytes on each device that stay, bytes while it runs
_PARTS = 0.5  # of a chip's memory that a call may fill, so that something can lie beside it


class Tables(NamedTuple):
    """Of every call (first axis) on every place (second): what a plan is judged from."""

    seconds: Float[Array, "6 O"]  # infinity where the call cannot run there
    resident: Float[Array, "6 O"]  # bytes on each device that stay: masters and moments, frozen weights
    working: Float[Array, "6 O"]  # bytes on each device while it runs
    devices: Bool[Array, "O D"]
    moves: Float[Array, "2 O O"]  # seconds of the actor's, the critic's weights from where it trains to where it runs;
    # infinity where it was not worked out, as where no search goes: see ``candidates``
    capacity: Float[Array, ""]  # bytes of a device


class Outcome(NamedTuple):
    """Of a plan."""

    seconds: Float[Array, ""]  # of an iteration
    penalised: Float[Array, ""]  # three times as long where memory does not suffice
    peak: Float[Array, ""]  # bytes on the fullest device
    idle: Float[Array, ""]  # share of the devices' time


def draw_work(key: Key, longest: int) -> dict[str, Int[Array, " 2"]]:
    """Tokens of a prompt and of a response, log-uniform in multiples of 64: a workload to plan for.

    Args:
      longest: tokens of a response.
    """
    low = jnp.log(jnp.asarray([128.0, longest / 8], jnp.float32))
    high = jnp.log(jnp.asarray([1024.0, longest], jnp.float32))
    drawn = jnp.exp(jax.random.uniform(key, (2,)) * (high - low) + low)
    return {"tokens": (jnp.ceil(drawn / 64) * 64).astype(jnp.int32)}


def places(config: ModelConfig, chips: int, *, smallest: int = 1) -> list[Place]:
    """Aligned blocks of ``smallest``, twice as many, ... devices, each with every mesh of that size.

    Raises:
      UserError: when the chips are no power of two times ``smallest``.
    """
    count = chips // smallest
    if chips % smallest or count & (count - 1):
        raise UserError(f"{chips} chips are no power of two times blocks of {smallest}; choose another topology")
    found = []
    while smallest <= chips:
        sizes = train_sizes(config, smallest)
        found += [Place(first, one) for first in range(0, chips, smallest) for one in sizes]
        smallest *= 2
    return found


def _divided(sizes: Sizes, work: Work) -> list[Work]:
    """The batch in every number of parts that divides over the rows of a mesh, the fewest first."""
    numbers = (n for n in divisors(work.rows) if work.rows // n % sizes.rows == 0)
    return [dataclasses.replace(work, microbatches=n) for n in numbers]


@lru_cache(maxsize=4096)
def train_figures(config: ModelConfig, chip: Chip, sizes: Sizes, work: Work) -> Figures:
    """Of an update; masters and moments stay."""
    tried = [dataclasses.replace(w, remat=remat) for remat in (False, True) for w in _divided(sizes, work)]
    if not tried:
        return float("inf"), 0.0, 0.0
    fitting = [w for w in tried if estimate.update(config, sizes, w).peak <= _PARTS * chip.hbm]
    pairs = [(cost.step_seconds(config, chip, sizes, sizes, w)["update"], w) for w in fitting or tried[-1:]]
    least, chosen = min(pairs, key=lambda pair: pair[0])
    stays = 12 * held(config, sizes)
    return least, stays, estimate.update(config, sizes, chosen).peak - stays


@lru_cache(maxsize=4096)
def score_figures(config: ModelConfig, chip: Chip, sizes: Sizes, work: Work, *, frozen: bool) -> Figures:
    """Of a pass that only scores; the weights of a frozen model stay."""
    tried = _divided(sizes, dataclasses.replace(work, scores=1))
    if not tried:
        return float("inf"), 0.0, 0.0
    weights = 2 * held(config, sizes)  # bfloat16, where the estimate counts float32 masters
    beside = [estimate.score(config, sizes, w).peak - 4 * held(config, sizes) for w in tried]
    chosen = next((k for k, size in enumerate(beside) if size + weights <= _PARTS * chip.hbm), len(tried) - 1)
    time = cost.step_seconds(config, chip, sizes, sizes, tried[chosen])["score"]
    return time, weights if frozen else 0.0, beside[chosen] + (0.0 if frozen else weights)


def stage_of(config: ModelConfig, stages: int) -> ModelConfig:
    """One of so many pipeline stages of equal layers; the embedding and the head are counted in each.

    Raises:
      ValueError: where the layers do not divide into the stages.
    """
    if stages < 1 or config.num_layers % stages:
        raise ValueError(f"stages={stages} does not divide the {config.num_layers} layers; choose a divisor")
    layers = config.num_layers // stages
    return dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers])


@lru_cache(maxsize=4096)
def pipelined_figures(config: ModelConfig, chip: Chip, sizes: Sizes, work: Work, stages: int, phase: str) -> Figures:
    """Of an update or a score over ``stages`` blocks of ``sizes`` devices, every block with a stage of the layers.

    A batch of ``m`` parts takes ``(m + p - 1) / m`` times what a stage needs for all of them, with what a stage hands
    to the next one (and back, in an update): ``p - 1`` parts pass until the last stage has something to do. A device
    keeps what at most ``min(m, p)`` parts need in an update, one forward and one backward in turn.

    From "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), arXiv:2006.09503. Differs in that
    hand-overs are not hidden behind the work.

    Args:
      phase: ``update`` or ``score``.
    """
    stage, updates = stage_of(config, stages), phase == "update"
    base = work if updates else dataclasses.replace(work, scores=1)
    tried = [
        dataclasses.replace(w, remat=remat)
        for remat in ((False, True) if updates else (work.remat,))
        for w in _divided(sizes, base)
    ]
    if not tried:
        return float("inf"), 0.0, 0.0
    stays = 12 * held(stage, sizes) if updates else 2 * held(stage, sizes)

    def figures(part: Work) -> Figures:
        parts, kept = part.microbatches, 12 * held(stage, sizes) if updates else 4 * held(stage, sizes)
        peak = (estimate.update if updates else estimate.score)(stage, sizes, part).peak - kept
        tokens = part.rows // sizes.rows * (part.prompt + part.response)
        handed = (2 if updates else 1) * 2 * stage.hidden_size * tokens / chip.link if stages > 1 else 0.0
        seconds = (parts + stages - 1) / parts * (cost.step_seconds(stage, chip, sizes, sizes, part)[phase] + handed)
        return seconds, stays, peak * (min(parts, stages) if updates else 1)

    found = [figures(part) for part in tried]
    fitting = [one for one in found if one[1] + one[2] <= _PARTS * chip.hbm]
    return min(fitting or found[-1:], key=lambda one: one[0])


@lru_cache(maxsize=4096)
def generate_figures(config: ModelConfig, chip: Chip, sizes: Sizes, work: Work) -> Figures:
    """Of prompts read and responses sampled; nothing stays."""
    prompts = work.rows // work.group
    counts = [n for n in reversed(divisors(prompts)) if n % sizes.rows == 0]
    if sizes.fsdp > 1 or not counts:  # whole copies of the weights, see ``search.rollout_sizes``
        return float("inf"), 0.0, 0.0
    tried = [dataclasses.replace(work, rollout_rows=n * work.group) for n in counts]
    peaks = [max(estimate.prefill(config, sizes, w).peak, estimate.decode(config, sizes, w).peak) for w in tried]
    chosen = next((k for k, peak in enumerate(peaks) if peak <= _PARTS * chip.hbm), len(tried) - 1)
    times = cost.step_seconds(config, chip, sizes, sizes, tried[chosen])
    return times["prefill"] + times["decode"], 0.0, peaks[chosen]


def staged_places(
    config: ModelConfig, chips: int, *, smallest: int, depths: Sequence[int]
) -> tuple[list[Place], list[int]]:
    """``places``, then each block once more in every number of pipeline stages of ``depths`` beyond 1.

    Returns:
      The places, and how many stages each has. Where there are stages, ``fsdp`` of a place is their number: both cut
      the weights as often, and what moves between two places depends on nothing else.
    """
    found = places(config, chips, smallest=smallest)
    stages, blocks = [1] * len(found), dict.fromkeys((place.first, place.sizes.chips) for place in found)
    for first, size in blocks:
        for depth in (p for p in depths if p > 1 and size % p == 0 and config.num_layers % p == 0):
            more = [one._replace(fsdp=depth) for one in train_sizes(config, size // depth) if one.fsdp == 1]
            found, stages = found + [Place(first, one) for one in more], stages + [depth] * len(more)
    return found, stages


def offloaded(figures: Figures, speed: float) -> Figures:
    """Weights that stay, on the host instead: fetched at ``speed`` bytes a second and dropped again.

    >>> offloaded((2.0, 8.0, 1.0), 4.0)
    (4.0, 0.0, 9.0)
    """
    seconds, stays, working = figures
    return seconds + stays / speed, 0.0, working + stays


def tables(
    actor: ModelConfig, critic: ModelConfig, chip: Chip, options: list[Place], work: Work,
    stages: Sequence[int] | None = None, *, host: float = 0.0,
) -> Tables:  # fmt: skip
    """What every call costs on every place; the reference is shaped as the actor, the reward model as the critic.

    Moves are worked out between all ``candidates`` and between the two of ``zero_places``: they take the time.

    Args:
      work: rows, prompt and response of an iteration; parts and waves are chosen here for each place.
      stages: of each place, see ``staged_places``; nothing is generated over stages.
      host: bytes a second between a device and its host, where the weights of frozen models wait; 0: they stay.
    """

    def frozen(found: Figures) -> Figures:
        return offloaded(found, host) if host else found

    kinds = (
        lambda s: generate_figures(actor, chip, s, work),
        lambda s: frozen(score_figures(critic, chip, s, work, frozen=True)),
        lambda s: frozen(score_figures(actor, chip, s, work, frozen=True)),
        lambda s: score_figures(critic, chip, s, work, frozen=False),
        lambda s: train_figures(actor, chip, s, work),
        lambda s: train_figures(critic, chip, s, work),
    )

    def staged(sizes: Sizes, depth: int) -> list[Figures]:
        """As ``kinds`` on one layout; weights that are not frozen come for the call."""
        pipeline = [(config, phase) for phase in ("score", "update") for config in (critic, actor)]
        block, found = sizes._replace(fsdp=1), {}
        for config, phase in pipeline:
            able = config.num_layers % depth == 0
            nowhere = float("inf"), 0.0, 0.0
            made = pipelined_figures(config, chip, block, work, depth, phase) if able else nowhere
            found[config, phase] = made
        seconds, weights, working = found[critic, "score"]
        reward, reference = frozen(found[critic, "score"]), frozen(found[actor, "score"])
        value, learning = (seconds, 0.0, working + weights), (found[actor, "update"], found[critic, "update"])
        return [(float("inf"), 0.0, 0.0), reward, reference, value, *learning]

    depths = stages or [1] * len(options)
    keys = [(place.sizes, depth) for place, depth in zip(options, depths, strict=True)]
    sizes = {(one, p): [kind(one) for kind in kinds] if p == 1 else staged(one, p) for one, p in dict.fromkeys(keys)}
    figures = np.asarray([sizes[key] for key in keys], np.float32).transpose(2, 1, 0)  # [3, 6, O]
    last = max(device for place in options for device in place.devices)
    devices = np.asarray([[d in place.devices for d in range(last + 1)] for place in options])
    seconds, resident, working = (jnp.asarray(x) for x in figures)
    moves = np.where(np.eye(len(options), dtype=bool), 0.0, np.inf).astype(np.float32)
    capacity = jnp.asarray(MARGIN * chip.hbm, jnp.float32)
    found = Tables(seconds, resident, working, jnp.asarray(devices), jnp.asarray(np.stack([moves] * 2)), capacity)
    kept = np.asarray(candidates(found))
    both = [moves.copy(), moves.copy()]
    for k, (config, trains, uses) in enumerate(((actor, TRAIN_ACTOR, GENERATE), (critic, TRAIN_CRITIC, VALUE))):
        pairs = [*np.argwhere(np.outer(kept[trains], kept[uses])).tolist(), zero_places(options)]
        for i, j in pairs:
            both[k][i, j] = reshard_cost.seconds(config, chip, options[i], options[j])
    return found._replace(moves=jnp.asarray(np.stack(both)))


def zero_places(options: list[Place]) -> tuple[int, int]:
    """On all devices: the place where weights are cut the most over ``fsdp``, and that with the most ``tensor``."""
    most = max(place.sizes.chips for place in options)
    whole = [k for k, place in enumerate(options) if place.sizes.chips == most]
    sharded = max(whole, key=lambda k: options[k].sizes.fsdp)
    return sharded, max(whole, key=lambda k: (options[k].sizes.tensor, options[k].sizes.data))


def _edges(iterations: int) -> Bool[np.ndarray, "N N"]:
    """``[i, j]``: task ``i`` waits for ``j``. Of an iteration: the calls, the move of the actor, that of the critic."""
    to_actor, to_critic, size = 6, 7, 8
    within = [(GENERATE, to_actor), (REWARD, GENERATE), (REFERENCE, GENERATE), (VALUE, GENERATE), (VALUE, to_critic)]
    within += [(t, c) for t in (TRAIN_ACTOR, TRAIN_CRITIC) for c in (REWARD, REFERENCE, VALUE)]
    before = [(to_actor, TRAIN_ACTOR), (to_critic, TRAIN_CRITIC)]
    found = np.zeros((size * iterations, size * iterations), bool)
    for k in range(iterations):
        for i, j in within:
            found[k * size + i, k * size + j] = True
        for i, j in before if k else []:
            found[k * size + i, (k - 1) * size + j] = True
    return found


def outcome(found: Tables, plan: Int[Array, " 6"], *, iterations: int = 2) -> Outcome:
    """What a plan costs: the place of each call -> seconds of an iteration, memory, idleness.

    Weights go from where a model trains to where it generates or scores before each of these calls; the move takes no
    time and no device where both are the same place.

    Args:
      plan: the number of the place of each of ``CALLS``.
      iterations: simulated one after the other, so that one may begin while the last still trains a critic.
    """
    call = jnp.arange(len(CALLS), dtype=jnp.int32)
    where, seconds = found.devices[plan], found.seconds[call, plan]
    trains = plan[jnp.asarray([TRAIN_ACTOR, TRAIN_CRITIC])]
    uses = plan[jnp.asarray([GENERATE, VALUE])]
    moves = found.moves[jnp.arange(2, dtype=jnp.int32), trains, uses]
    both = (found.devices[trains] | found.devices[uses]) & (moves > 0.0)[:, None]
    devices = jnp.tile(jnp.concatenate([where, both]), (iterations, 1))
    timeline = event_simulator.schedule(
        jnp.tile(jnp.concatenate([seconds, moves]), iterations), devices, jnp.asarray(_edges(iterations))
    )
    each = timeline.makespan / iterations
    peak = event_simulator.peak_bytes(found.resident[call, plan], found.working[call, plan], where)
    return Outcome(
        each, event_simulator.penalised(each, peak, found.capacity), peak, event_simulator.idle_share(timeline, devices)
    )


def together(choice: Int[Array, " 4"]) -> Int[Array, " 6"]:
    """The plan in which all calls of a model run in one place: a place for each model."""
    return choice[jnp.asarray(MODELS, jnp.int32)]


def runnable(found: Tables) -> Bool[Array, "6 O"]:
    """Where each call can run."""
    return jnp.isfinite(found.seconds)


def candidates(found: Tables) -> Bool[Array, "6 O"]:
    """The places that a search need try: all others are worse in everything but the move of weights.

    A call keeps, of the places on the same devices, those that no other beats in seconds, in bytes that stay and in
    bytes while it runs, of equals the first. Places that the memory of a device does not suffice for with this call
    alone are left out where another place does. What either call of a model keeps, the other may have as well if it
    fits, for then the weights need not move.
    """
    figures = jnp.stack([found.seconds, found.resident, found.working], axis=-1)  # [6, O, 3]
    same = jnp.all(found.devices[:, None] == found.devices[None], axis=-1)  # [O, O]
    order = jnp.arange(same.shape[0], dtype=jnp.int32)
    mine, other = figures[:, :, None], figures[:, None]
    better = jnp.any(other < mine, axis=-1) | (order[None, None, :] < order[None, :, None])
    beaten = jnp.any(jnp.all(other <= mine, axis=-1) & better & same[None], axis=-1)
    fits = runnable(found) & (found.resident + found.working <= found.capacity)
    able = jnp.where(jnp.any(fits, axis=1, keepdims=True), fits, runnable(found))
    kept = able & ~beaten
    for pair in ((GENERATE, TRAIN_ACTOR), (VALUE, TRAIN_CRITIC)):
        calls = jnp.asarray(pair)
        shared = jnp.any(kept[calls], axis=0) & jnp.all(able[calls], axis=0)
        kept = kept.at[calls].set(kept[calls] | shared[None])
    return kept


def bound(found: Tables, *, iterations: int = 2, most: int = 1_000_000, batch: int = 4096) -> float:
    """Seconds below which no plan comes, whatever its places: ``outcome(...).penalised`` is never less.

    Of all choices of a block of devices for each call, with every call in the time and in the memory of the best of
    all layouts there and with weights that move in no time: the longer of the longest chain of calls that wait for each
    other and of the work of the busiest device. NaN for more than ``most`` choices.
    """
    blocks, which = np.unique(np.asarray(found.devices), axis=0, return_inverse=True)
    if len(blocks) ** len(CALLS) > most:
        return float("nan")
    runs = np.asarray(runnable(found))

    def least(figures: Array) -> Array:
        values = np.where(runs, np.asarray(figures, np.float64), np.inf)
        each = [values[:, which.reshape(-1) == k].min(axis=1) for k in range(len(blocks))]
        return jnp.asarray(np.stack(each, axis=1), jnp.float32)  # [6, B]

    seconds, resident, working = (least(x) for x in (found.seconds, found.resident, found.working))
    call, devices = jnp.arange(len(CALLS), dtype=jnp.int32), jnp.asarray(blocks)
    size, count = len(CALLS) + 2, (len(CALLS) + 2) * iterations
    after = jnp.asarray(_edges(iterations))

    def of(choice: Array) -> Array:
        taken, where = seconds[call, choice], devices[choice]
        tasks = jnp.tile(jnp.zeros((size,), jnp.float32).at[call].set(taken), iterations)
        ends = jnp.zeros((count,), jnp.float32)
        for _ in range(count):  # no chain is longer than there are tasks
            ends = tasks + jnp.max(jnp.where(after, ends[None, :], 0.0), axis=1)
        load = jnp.max(jnp.sum(jnp.where(where, taken[:, None], 0.0), axis=0))
        longest = jnp.maximum(jnp.max(ends) / iterations, load)
        peak = event_simulator.peak_bytes(resident[call, choice], working[call, choice], where)
        return event_simulator.penalised(longest, peak, found.capacity)

    grid = metropolis.every_plan([range(len(blocks))] * len(CALLS))
    return float(jnp.min(jax.jit(lambda x: jax.lax.map(of, x, batch_size=batch))(jnp.asarray(grid))))
