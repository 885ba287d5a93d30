"""Runs one arm for all its seeds: fused (seeds are an axis of one compiled program), or seed by seed."""

import dataclasses
import time
import warnings
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import hosts
from jaxrl_llm.experiment import durable
from jaxrl_llm.experiment.durable import Keeping, SeedRun, given_start, shared_start
from jaxrl_llm.experiment.results import ArmResult, pack, plain
from jaxrl_llm.run.records import health
from jaxrl_llm.run.records.progress import progress
from jaxrl_llm.run.stop import Stop
from jaxrl_llm.train import fused, offline
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.train.seed_axis import over_seeds
from jaxrl_llm.train.skipped import Streak

SHOWN = ("eval/accuracy", "reward/mean", "loss/total")
COUNTED = ("tokens/generated", "tokens/trained")  # summed over a run, not averaged
DRAWN = "rollouts/generated"  # also summed: of methods whose rows do not show how many responses they drew


class _Curves:
    """Values by name and step, each a row of one number per seed; and what is counted by problem, ``[seeds, P]``."""

    def __init__(self):
        self.points: dict[str, dict[int, np.ndarray]] = {}
        self.problems: dict[str, dict[int, np.ndarray]] = {}
        self.measured: set[str] = set()
        self.tokens = 0.0
        self.rollouts = 0.0

    def measure(self, step: int, values: dict[str, Any]) -> None:
        """What a measurement gave; a row of numbers per seed is one number a problem."""
        arrays = {name: np.asarray(value, np.float64) for name, value in values.items()}
        rows = {name: value for name, value in arrays.items() if value.ndim == 2}
        for name, value in rows.items():
            self.problems.setdefault(name, {})[step] = value
        self.measured |= arrays.keys() - rows.keys()
        self.add(step, {name: value for name, value in arrays.items() if name not in rows})

    def add(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.points.setdefault(name, {})[step] = np.asarray(value, np.float64)

    def train(self, step: int, metrics: dict[str, Any]) -> None:
        """``[seeds, steps]`` of training figures: means over the steps that define one, tokens summed.

        A figure that is measured, too (``Plan.validate`` says ``reward/mean``), stays what the measurement gave.
        """
        host_side = {k: np.asarray(v, np.float64) for k, v in metrics.items()}
        # a step whose line of figures was damaged on the disk is not counted; its sum would be no number
        self.tokens += sum(np.nansum(host_side[k], -1).mean() for k in COUNTED if k in host_side)
        self.rollouts += np.nansum(host_side[DRAWN], -1).mean() if DRAWN in host_side else 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what no step of the stretch defines is undefined
            # an infinite one is undefined, too: a log has null for both, and one step that was skipped ends no seed
            means = {k: np.nanmean(np.where(np.isfinite(v), v, np.nan), -1) for k, v in host_side.items()}
            self.add(step, {k: v for k, v in means.items() if k not in self.measured})

    def last(self) -> dict[str, np.ndarray]:
        return {name: rows[max(rows)] for name, rows in self.points.items()}

    def final(self, tail: int) -> dict[str, np.ndarray]:
        """The last training figures, and means of the last ``tail`` measurements; undefined ones are left out."""
        ends = {name: np.stack([self.points[name][s] for s in _last(self.points[name], tail)])
                for name in self.measured}  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # where all are undefined the mean is
            return self.last() | {name: np.nanmean(rows, axis=0) for name, rows in ends.items()}

    def counted(self, tail: int) -> dict[str, np.ndarray]:
        """``[seeds, P]``: what was counted by problem in the last ``tail`` measurements, added up."""
        return {name: sum(rows[s] for s in _last(rows, tail)) for name, rows in self.problems.items()}

    def record(self) -> dict[str, dict[str, list]]:
        return {
            name: {"step": list(rows), "values": np.stack(list(rows.values()), axis=1).tolist()}
            for name, rows in self.points.items()
        }


def _last(rows: dict[int, Any], number: int) -> list[int]:
    return sorted(rows)[-number:]


def _run_fused(plan: Plan, seeds: list[int], every: int, measure) -> Iterator[tuple[int, dict | None, dict]]:
    """Yields ``(step, training metrics [seeds, steps], measured [seeds])``."""
    keys = _keys(seeds)
    eval_keys = jnp.stack([jax.random.fold_in(jax.random.key(durable.EVAL_KEY), s) for s in seeds])
    params = first_params(plan.init, tuple(seeds))
    yield 0, None, measure(params, eval_keys)
    states, runners, step = None, {}, 0
    for index, stage, steps, done in durable.stretches(plan.stages, every):
        if done == 0:
            stage_keys = jax.vmap(lambda k, i=index: jax.random.fold_in(k, i))(keys)
            extras = _compiled(stage.extras)(params, stage_keys)
            states = jax.jit(over_seeds(lambda *x, s=stage: plans.start(s, *x)))(params, stage_keys, extras)
            # the state is donated: what it shares with other arms or twice within itself stays whole
            states = jax.tree.map(jnp.copy, states)
        if (index, steps) not in runners:
            module = fused if isinstance(stage.method, Online) else offline
            runners[index, steps] = module.make_run(stage.method, steps, seeds=True)
        states, metrics = runners[index, steps](states)
        params, step = states.params, step + steps
        yield step, metrics, measure(params, eval_keys)


def _keys(seeds) -> Any:
    return jnp.stack([jax.random.key(s) for s in seeds])


@lru_cache(maxsize=16)
def _compiled(function):
    """One compiled program for all arms with the same measurement, or the same extras."""
    return jax.jit(over_seeds(function))


@lru_cache(maxsize=8)  # the chunks of all looks
def first_params(init, seeds: tuple[int, ...]):
    """The first parameters of the seeds, computed once for all arms with the same ``init``."""
    return _compiled(init)(_keys(seeds))


def _joined(found: list[_Curves]) -> _Curves:
    """The curves of seeds that ran one after another."""
    curves = _Curves()
    for name, steps in found[0].points.items():
        curves.points[name] = {s: np.concatenate([f.points[name][s] for f in found]) for s in steps}
    for name, rows in found[0].problems.items():
        curves.problems[name] = {s: np.concatenate([f.problems[name][s] for f in found]) for s in rows}
    curves.measured = found[0].measured
    curves.tokens = float(np.mean([f.tokens for f in found]))
    curves.rollouts = float(np.mean([f.rollouts for f in found]))
    return curves


def _trials(curves: _Curves, tail: int) -> int:
    return min((len(_last(rows, tail)) for rows in curves.problems.values()), default=0)


def evaluations(plan: Plan, every: int) -> int:
    """How often a run is measured after its start."""
    return sum(1 for _ in durable.stretches(plan.stages, every))


def run_arm(
    plan: Plan,
    settings: Any,
    seeds: list[int],
    *,
    mesh: str = "",
    tail: int = 1,
    keeping: Keeping | None = None,
    most_skipped: int = 0,
) -> ArmResult:
    """Trains and measures one arm.

    Args:
      settings: of the arm; ``eval_every`` is read here, all of it goes into the record.
      mesh: as of the command line; empty: one device.
      tail: so many of the last measurements make up the final values.
      keeping: of runs on the host: what is kept in a folder, and how. None: nothing, and a plan that can be one
        compiled program for all seeds is.
      most_skipped: so many updates in a row that are not finite, of any seed, stop the run; 0: none do. Fused runs
        are looked at after each of their stretches.

    Raises:
      NotFinite: for that many.
    """
    started, every = time.monotonic(), settings.eval_every
    total = sum(stage.steps for stage in plan.stages)
    follow = partial(_follow, total=total, most_skipped=most_skipped, silent=_silent(plan, settings))
    if plan.on_host or mesh or keeping is not None:
        stop, temperature = Stop(), getattr(settings, "temperature", 1.0)
        kept = (keeping or Keeping())._replace(most_skipped=most_skipped)
        start = given_start if plan.gives and len(seeds) == 1 else shared_start
        seed_run = partial(SeedRun, every=every, mesh=mesh, keeping=kept, temperature=temperature, start=start)
        shared = seed_run(plan) if plan.of_seed is None else None
        runs = ((shared or seed_run(plans.of_seed(plan, seed))).run(seed, stop) for seed in seeds)
        curves = _joined([follow(run, alone=True) for run in runs])
    elif plan.of_seed is not None:
        own = ((plans.of_seed(plan, seed), seed) for seed in seeds)
        runs = (_run_fused(one, [seed], every, _compiled(plans.measured(one))) for one, seed in own)
        curves = _joined([follow(run, alone=False) for run in runs])
    else:
        stretches = _run_fused(plan, seeds, every, _compiled(plans.measured(plan)))
        curves = follow(stretches, alone=False)
    return ArmResult(
        settings=plain({f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}),
        seeds=list(seeds),
        metrics={k: v.tolist() for k, v in curves.final(tail).items()},
        curves=curves.record(),
        rollouts=round(curves.rollouts) or plans.rollouts(plan),
        tokens=int(curves.tokens),
        updates=plans.updates(plan),
        seconds=time.monotonic() - started,
        problems={k: [pack(row) for row in rows] for k, rows in curves.counted(tail).items()},
        trials=_trials(curves, tail) * getattr(settings, "eval_samples", 1),
    )


def _silent(plan: Plan, settings: Any) -> tuple[str, ...]:
    """Figures of training that say nothing of this arm; the embedded worlds set the length of episodes themselves."""
    sizes = [stage.method.group_size for stage in plan.stages if hasattr(stage.method, "group_size")]
    world = hasattr(settings, "max_turns") and not getattr(settings, "data", "")
    limited = hasattr(settings, "max_new_tokens") and not world
    return health.silent_of(group_size=min(sizes, default=1), limited=limited)


def _follow(stretches, *, total: int, alone: bool, most_skipped: int, silent: tuple[str, ...]) -> _Curves:
    """Collects a run and shows its progress; ``alone``: one seed without the seed axis."""
    curves, streak, watch = _Curves(), Streak(most_skipped), health.Health(silent=silent)
    with progress(total, every=1) as shown:
        for step, metrics, measured in stretches:
            if alone:
                metrics = None if metrics is None else {k: np.asarray(v)[None] for k, v in metrics.items()}
                measured = {k: np.asarray(v)[None] for k, v in measured.items()}
            curves.measure(step, measured)
            if metrics is not None:
                curves.train(step, metrics)
                streak.see(metrics, step)
                means = {k: float(np.mean(v)) for k, v in metrics.items()}
                steps = max((v.shape[-1] for v in metrics.values()), default=0)
                for line in watch.see(means, steps) if hosts.is_first() else ():
                    print(f"step {step}: {line}", flush=True)
            last = curves.last()
            figures = {k: float(np.nanmean(last[k])) for k in SHOWN if k in last}
            shown.step(step, figures)
    return curves
