"""Which models share devices: all ways to put them together, how many devices each set gets, and what it costs.

Devices come in equal units, a set of models has neighbouring ones, and every model the layout that is fastest there.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.systems.parts import dataflow, event_simulator, metropolis, ppo_calls, regroup
from experiments.systems.parts.ppo_calls import Figures, Outcome, Tables
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.cost import LINKS
from jaxrl_llm.planning.parallel_layout import Number, Sizes
from jaxrl_llm.planning.search import MARGIN, divisors, train_sizes
from jaxrl_llm.planning.work import Work

Partition = tuple[int, ...]  # the set of every model, numbered as they first appear
MakeTransition = Callable[
    ..., regroup.Transition
]  # (train, pipeline=, tensor=), see ``experiments.systems.parts.regroup``


def set_partitions(models: int) -> list[Partition]:
    """All ways to divide models into sets.

    From "HybridFlow: A Flexible and Efficient RLHF Framework", arXiv:2409.19256, section 6.

    >>> set_partitions(3)
    [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2)]
    """
    if models == 0:
        return [()]
    return [(*rest, k) for rest in set_partitions(models - 1) for k in range(max(rest, default=-1) + 2)]


def colocated(models: int) -> list[Partition]:
    """All models on the same devices (DeepSpeed-Chat)."""
    return [(0,) * models]


def apart(models: int) -> list[Partition]:
    """Every model on devices of its own (OpenRLHF)."""
    return [tuple(range(models))]


def in_pairs(models: int) -> list[Partition]:
    """Actor and reference here, critic and reward model there (NeMo-Aligner)."""
    return [(0, 1, 0, 1)[:models]]


def blocks(units: int) -> list[tuple[int, int]]:
    """``(first, size)`` of all runs of neighbouring units.

    >>> blocks(2)
    [(0, 1), (1, 1), (0, 2)]
    """
    return [(first, size) for size in range(1, units + 1) for first in range(units - size + 1)]


def _divisions(sets: int, units: int) -> list[tuple[int, ...]]:
    """Units for every set, at least one each, not more than there are."""
    if sets == 0:
        return [()]
    return [(size, *rest) for size in range(1, units - sets + 2) for rest in _divisions(sets - 1, units - size)]


def mappings(partitions: Sequence[Partition], units: int) -> Int[np.ndarray, "K M"]:
    """The number of every model's block, for all partitions and all divisions of the units among their sets."""
    number = {block: k for k, block in enumerate(blocks(units))}
    found = []
    for partition in partitions:
        for sizes in _divisions(max(partition) + 1, units):
            firsts = np.cumsum((0, *sizes)).tolist()
            found.append([number[firsts[k], sizes[k]] for k in partition])
    return np.asarray(found, np.int32)


class Engine(NamedTuple):
    """How an actor trains and generates on some chips; the change of layout is part of generation."""

    train: Sizes
    tensor: int  # of generation
    change: regroup.Transition
    move_bytes: Number  # received by a device
    figures: tuple[Figures, Figures]  # of training and of generation
    stages: int = 1  # of the pipeline in training


def _order(figures: Sequence[Figures], chip: Chip) -> tuple[bool, Number]:
    """What fits first, then what is quick."""
    seconds, stays, working = zip(*figures, strict=True)
    return sum(stays) + max(working) > MARGIN * chip.hbm, sum(seconds)


def staged_sizes(config: ModelConfig, chips: int, depths: Sequence[int]) -> list[tuple[Sizes, int]]:
    """Layouts of training: a mesh, and how many pipeline stages each have one; fully sharded only without stages."""
    able = [p for p in depths if chips % p == 0 and config.num_layers % p == 0]
    return [(one, p) for p in able for one in train_sizes(config, chips // p) if p == 1 or one.fsdp == 1]


def engines(
    config: ModelConfig, chip: Chip, chips: int, work: Work, transition: MakeTransition, depths: Sequence[int] = (1,)
) -> list[Engine]:
    """Every layout of training with every smaller tensor of generation.

    Without stages fully sharded data stand for the pipeline of the closed forms: both cut the weights, and generation
    has neither.

    Args:
      depths: numbers of pipeline stages of training that are tried.
    """
    weights, found = 2 * config.num_parameters, []
    for sizes, stages in staged_sizes(config, chips, depths):
        if stages == 1:
            training = ppo_calls.train_figures(config, chip, sizes, work)
        else:
            training = ppo_calls.pipelined_figures(config, chip, sizes, work, stages, "update")
        cut = max(stages, sizes.fsdp)  # one of both is 1
        for tensor in divisors(sizes.tensor):
            rows = chips // tensor
            seconds, _, working = ppo_calls.generate_figures(config, chip, Sizes(data=rows, tensor=tensor), work)
            change = transition(regroup.Layout(cut, sizes.data, sizes.tensor), pipeline=1, tensor=tensor)
            moved = change.costs.communication * weights
            working = max(working, change.costs.peak * weights) + change.costs.redundant * weights
            generation = (seconds + moved / (chip.link * LINKS), 0.0, working)
            found.append(Engine(sizes, tensor, change, moved, (training, generation), stages))
    return found


def engine(
    config: ModelConfig, chip: Chip, chips: int, work: Work, transition: MakeTransition, depths: Sequence[int] = (1,)
) -> Engine:
    """The fastest of those that fit."""
    found = engines(config, chip, chips, work, transition, depths)
    return min(found, key=lambda one: _order(one.figures, chip))


class Mapping(NamedTuple):
    """The tables of all blocks, and the actor's engine for every number of units."""

    tables: Tables
    engines: tuple[Engine, ...]


def _fastest(
    config: ModelConfig, chip: Chip, chips: int, kinds: Sequence[Callable[..., Figures]], depths: Sequence[int] = (1,)
) -> list[Figures]:
    """The calls of a model in the one layout that is best for them together."""
    layouts = staged_sizes(config, chips, depths)
    tried = [[kind(config, chip, sizes, stages) for kind in kinds] for sizes, stages in layouts]
    return min(tried, key=lambda figures: _order(figures, chip))


@lru_cache(maxsize=64)
def tables(
    actor: ModelConfig, critic: ModelConfig, chip: Chip, work: Work, transition: MakeTransition, *, count: int,
    units: int, depths: tuple[int, ...] = (1,),
) -> Mapping:  # fmt: skip
    """What every call costs on every block of ``count`` chips in so many units; models as in ``ppo_calls.tables``.

    Args:
      depths: numbers of pipeline stages that actor and critic may have; frozen models have none.

    Raises:
      UserError: when the chips do not divide into the units.
    """
    if count % units:
        raise UserError(f"{count} chips do not divide into {units} units; choose another number of either")

    def score(config, chip, sizes, stages, frozen=True):
        return ppo_calls.score_figures(config, chip, sizes, work, frozen=frozen)

    def value(config, chip, sizes, stages):
        if stages == 1:
            return score(config, chip, sizes, stages, frozen=False)
        seconds, weights, working = ppo_calls.pipelined_figures(config, chip, sizes, work, stages, "score")
        return seconds, 0.0, working + weights

    def train(config, chip, sizes, stages):
        if stages == 1:
            return ppo_calls.train_figures(config, chip, sizes, work)
        return ppo_calls.pipelined_figures(config, chip, sizes, work, stages, "update")

    by_size, chosen = {}, []
    for size in range(1, units + 1):
        here = chip, count // units * size
        own = engine(actor, *here, work, transition, depths)
        chosen.append(own)
        (reward,), (reference,) = _fastest(critic, *here, [score]), _fastest(actor, *here, [score])
        values, learning = _fastest(critic, *here, [value, train], depths)
        by_size[size] = [own.figures[1], reward, reference, values, own.figures[0], learning]  # as ``ppo_calls.CALLS``
    options = blocks(units)
    figures = np.asarray([by_size[size] for _, size in options], np.float32).transpose(2, 1, 0)
    devices = np.asarray([[first <= u < first + size for u in range(units)] for first, size in options])
    moves = np.where(np.eye(len(options), dtype=bool), 0.0, np.inf).astype(np.float32)  # they are in the engine
    capacity = jnp.asarray(MARGIN * chip.hbm, jnp.float32)
    parts = [jnp.asarray(x) for x in (*figures, devices, np.stack([moves] * 2))]
    return Mapping(Tables(*parts, capacity), tuple(chosen))


def _of_tasks(
    found: Tables, choice: Int[Array, " 4"], graph: dataflow.Graph
) -> tuple[Float[Array, " N"], Bool[Array, "N U"]]:
    place = ppo_calls.together(choice)[graph.calls]
    return found.seconds[graph.calls, place], found.devices[place]


def outcome(found: Tables, choice: Int[Array, " 4"], graph: dataflow.Graph) -> Outcome:
    """What a mapping costs in the event simulation of a controller's calls.

    Args:
      choice: the number of the block of every model; that of a model without calls does not matter.
    """
    seconds, devices = _of_tasks(found, choice, graph)
    timeline = event_simulator.schedule(seconds, devices, jnp.asarray(graph.after))
    # without an end where a call cannot run, and no smallest of all
    each = jnp.where(jnp.all(jnp.isfinite(seconds)), timeline.makespan / graph.iterations, jnp.inf)
    used = jnp.asarray(np.isin(np.arange(len(ppo_calls.CALLS)), graph.calls))
    place = ppo_calls.together(choice)
    call = jnp.arange(len(ppo_calls.CALLS), dtype=jnp.int32)
    where = found.devices[place] & used[:, None]
    peak = event_simulator.peak_bytes(found.resident[call, place], found.working[call, place], where)
    return Outcome(
        each, event_simulator.penalised(each, peak, found.capacity), peak, event_simulator.idle_share(timeline, devices)
    )


_STAGES = np.asarray([0, 1, 1, 1, 2, 2])  # of ``ppo_calls.CALLS``: generation, preparation, training


def by_events(found: Tables, choice: Int[Array, " 4"], graph: dataflow.Graph) -> Float[Array, ""]:
    """Seconds of an iteration in the event simulation, three times as many where memory does not suffice."""
    return outcome(found, choice, graph).penalised


def by_stages(found: Tables, choice: Int[Array, " 4"], graph: dataflow.Graph) -> Float[Array, ""]:
    """The same by the paper's rule: of each of three stages what the busiest set needs, one stage after the other.

    From "HybridFlow", arXiv:2409.19256, section 6 (Algorithm 1, ``d_cost``).
    """
    seconds, devices = _of_tasks(found, choice, graph)
    each = jnp.where(devices, seconds[:, None], 0.0)
    busy = jax.ops.segment_sum(each, jnp.asarray(_STAGES[graph.calls], jnp.int32), num_segments=3)
    total = jnp.sum(jnp.max(busy, axis=1)) / graph.iterations
    return event_simulator.penalised(total, outcome(found, choice, graph).peak, found.capacity)


Judge = Callable[[Tables, Array, dataflow.Graph], Array]


@lru_cache(maxsize=8)
def make_outcome(controller: dataflow.Controller) -> Callable[[Tables, Array], Outcome]:
    """``outcome`` of two iterations of a controller, compiled."""
    graph = dataflow.trace(controller)
    return jax.jit(lambda found, choice: outcome(found, choice, graph))


@lru_cache(maxsize=32)
def _searcher(controller: dataflow.Controller, judge: Judge) -> Callable[[Tables, Array], Array]:
    graph = dataflow.trace(controller)
    return jax.jit(lambda found, plans: metropolis.cheapest(lambda choice: judge(found, choice, graph), plans).plan)


def choose(
    found: Tables, controller: dataflow.Controller, partitions: Callable[[int], list[Partition]], judge: Judge, *,
    units: int,
) -> Int[Array, " 4"]:  # fmt: skip
    """The mapping that the judge finds cheapest of all divisions of the units among these sets, the first of equals.

    From "HybridFlow", arXiv:2409.19256, section 6 (Algorithm 1). Differs from the paper in that what exceeds memory
    counts three times instead of being left out.
    """
    models = dataflow.trace(controller).models
    plans = mappings(partitions(len(models)), units)
    whole = np.repeat(plans[:, :1], 4, axis=1)  # a model without calls: beside the actor, where it does nothing
    whole[:, models] = plans
    rows = len(mappings(set_partitions(len(models)), units))  # again and again from the top: one program for all sets
    return _searcher(controller, judge)(found, jnp.asarray(np.resize(whole, (rows, 4))))
