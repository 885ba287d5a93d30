"""All meshes, parts and recomputations that divide, those that fit first, the quickest by the roofline on top."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_llm.models import cache as caches
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import chips, cost, estimate
from jaxrl_llm.planning.chips import Topology
from jaxrl_llm.planning.parallel_layout import Number, Sizes
from jaxrl_llm.planning.work import Work, kept_bytes, trained

MARGIN = 0.92  # of a chip's memory that an estimate may fill: it is within 15 % of the compiler's figure, mostly below
LONG = 16384  # tokens of a row from which on it is cut along context
_STATE = 8  # bytes of a number that trains which are needed somewhere beside it and its gradient: two moments


class Plan(NamedTuple):
    """A choice, its peak in bytes on one chip with all that lies there in each phase, and the roofline's seconds."""

    train: Sizes
    rollout: Sizes
    work: Work
    peaks: dict[str, Number]
    seconds: dict[str, Number]

    @property
    def peak(self) -> Number:
        """Of the whole loop."""
        return max(self.peaks.values())

    @property
    def limit(self) -> str:
        """The phase that needs the most memory."""
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def step(self) -> Number:
        """Seconds of a whole step."""
        return sum(self.seconds.values())


def divisors(number: int) -> list[int]:
    """In ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]


def train_sizes(config: ModelConfig, chips: int, length: int = 0) -> list[Sizes]:
    """Meshes for training: heads and inner width divide over tensor, which stays within eight neighbours.

    Args:
      length: of a row, whose parts lie along context where it has at least ``LONG`` tokens.
    """
    found = []
    for tensor in divisors(chips):
        if tensor > 8 or config.num_heads % tensor or config.intermediate_size % tensor:
            continue
        for expert in expert_sizes(config, chips // tensor):
            for context in divisors(chips // tensor // expert):
                if context > 1 and (length < LONG or length % context):
                    continue
                rest = chips // tensor // expert // context
                found += [Sizes(data, rest // data, tensor, expert, context) for data in divisors(rest)]
    return found


def expert_sizes(config: ModelConfig, chips: int) -> list[int]:
    """Ways to split a mixture's experts over so many chips; a dense model has one."""
    number = 1 if config.experts is None else config.experts.number
    return [n for n in divisors(chips) if number % n == 0]


def rollout_sizes(config: ModelConfig, chips: int) -> list[Sizes]:
    """Meshes for sampling: whole copies of the weights along data, each cut over tensor and, in a mixture, expert."""
    return [
        Sizes(chips // tensor // expert, 1, tensor, expert)
        for tensor in divisors(chips)
        if config.num_heads % tensor == 0 and config.intermediate_size % tensor == 0
        for expert in expert_sizes(config, chips // tensor)
    ]


def _samplings(config: ModelConfig, train: Sizes, work: Work) -> list[Sizes]:
    """Layouts of sampling; weights beside an adapter may stay where they train, and have to in few bits."""
    stay = [train] if work.adapter and train.context == 1 else []
    return stay if work.base else stay + [sizes for sizes in rollout_sizes(config, train.chips) if sizes not in stay]


def _parts(config: ModelConfig, sizes: Sizes, work: Work, room: Number, kernels: bool) -> Iterator[Work]:
    """For keeping and for recomputing activations: the fewest parts of the batch that fit; the most where none does.

    Parts of rows in a layout hold whole groups.
    """
    for remat in (False, True):
        tried = [
            dataclasses.replace(work, microbatches=n, remat=remat)
            for n in divisors(work.rows)
            if work.rows // n % sizes.rows == 0 and (work.planner is None or work.rows // n % work.group == 0)
        ]
        fitting = (w for w in tried if estimate.update(config, sizes, w, kernels).peak <= room)
        if tried:
            yield next(fitting, tried[-1])


def _sampling(config: ModelConfig, sizes: Sizes, work: Work, topology: Topology) -> Number:
    """The most that a rollout needs."""
    prompts = estimate.prefill(config, sizes, work, topology.tpu)
    return max(prompts.peak, estimate.decode(config, sizes, work, topology.tpu, topology.chip.hbm).peak)


def _waves(config: ModelConfig, sizes: Sizes, work: Work, room: Number, topology: Topology) -> Work | None:
    """The most rows sampled at a time that fit, whole groups on every copy; None: they do not divide."""
    prompts = work.rows // work.group
    counts = [n for n in divisors(prompts) if n % sizes.rows == 0]
    tried = [dataclasses.replace(work, rollout_rows=n * work.group) for n in reversed(counts)]
    fitting = (w for w in tried if _sampling(config, sizes, w, topology) <= room)
    return next(fitting, tried[-1] if tried else None)


def plans(
    config: ModelConfig,
    topology: Topology,
    work: Work,
    *,
    train: Sizes | None = None,
    rollout: Sizes | None = None,
    margin: Number = MARGIN,
) -> list[Plan]:
    """Every choice that divides, those that fit first, then by seconds a step (those that do not: by memory).

    Args:
      work: what a step is; ``rollout_rows``, ``microbatches`` and ``remat`` are chosen here.
      train, rollout: meshes that are given.
    """
    limit, found, kernels = topology.chip.hbm * margin, [], topology.tpu
    if topology.chip.platform == "gpu":
        work = dataclasses.replace(work, scored=caches.ON_GPU.scored)
    for sizes in [train] if train else train_sizes(config, topology.chips, work.length):
        beside = estimate.of_the_loop(config, sizes, {"update": 0.0}, work)
        for parts in _parts(config, sizes, work, limit - beside["update"], kernels):
            for sampling in [rollout] if rollout else _samplings(config, sizes, work):
                beside = estimate.of_the_loop(config, sizes, {"decode": 0.0}, work, sampling)
                chosen = _waves(config, sampling, parts, limit - beside["decode"], topology)
                if chosen is None:
                    continue
                phases = estimate.memory(config, sizes, sampling, chosen, kernels, topology.chip.hbm)
                alone = {n: m.peak for n, m in phases.items()}
                peaks = estimate.of_the_loop(config, sizes, alone, chosen, sampling)
                seconds = cost.step_seconds(config, topology.chip, sizes, sampling, chosen)
                found.append(Plan(sizes, sampling, chosen, peaks, seconds))
    return sorted(found, key=lambda p: (p.peak > limit, p.peak if p.peak > limit else p.step))


def would_fit(config: ModelConfig, topology: Topology, work: Work) -> dict[str, Plan]:
    """Where nothing fits ``topology``: by the closed form the best plan on the smallest slice that does.

    Returns:
      By the slice's name: of the same generation, of any other of no more chips than that; none that is larger than
      what exists.
    """
    found, most = {}, None
    state = _STATE + estimate.trained_size(work)
    needed = kept_bytes(config, Sizes(), work) + state * trained(config, Sizes(), work)
    others = [kind for kind in (chips.CHIPS if topology.tpu else chips.GPUS) if kind != topology.kind]
    for kind in (topology.kind, *others):
        for tried in chips.slices(kind):
            if kind == topology.kind and tried.chips <= topology.chips:
                continue
            if most is not None and tried.chips > most:
                break
            if needed > MARGIN * tried.chip.hbm * tried.chips:
                continue
            best = next(iter(plans(config, tried, work)), None)
            if best is not None and best.peak <= MARGIN * tried.chip.hbm:
                found[tried.name] = best
                most = tried.chips if kind == topology.kind else most
                break
    return found
