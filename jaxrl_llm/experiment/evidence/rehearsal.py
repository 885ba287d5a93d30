"""A claim tried on made-up numbers before anything runs: a misspelt metric, arm or step is an error at once."""

import dataclasses
import difflib
import zlib
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, durable, results
from jaxrl_llm.experiment.claims import Claim
from jaxrl_llm.experiment.results import ArmResult, Results
from jaxrl_llm.train import offline, online
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.plan import Plan

SEEDS = 8
CLOCKED = ("group/", "flow/", "plan/", "transition/")


def metric_names(plan: Plan) -> tuple[set[str], set[str]] | None:
    """Names that the measurement gives, and those that training gives; None where Python makes either."""
    if plan.on_host or plan.world is not None:
        return None
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, trained = jax.eval_shape(plan.init, key), set()
    measured = {name for name, x in jax.eval_shape(plans.measured(plan), params, key).items() if x.ndim == 0}
    for stage in plan.stages:
        module = online if isinstance(stage.method, online.Online) else offline
        start = jax.eval_shape(lambda p, k, s=stage: plans.start(s, p, k), params, key)
        state, metrics = jax.eval_shape(lambda s, m=module, x=stage.method: m.iterate(x, s), start)
        params, trained = state.params, trained | set(metrics)
    return measured, trained


def made_up(arm: str, plan: Plan, settings: Any, extra: set[str]) -> ArmResult:
    """Numbers between 0.2 and 0.8 under every name, measured as often as a run would."""
    rng = np.random.default_rng(zlib.crc32(arm.encode()))
    names = metric_names(plan)
    measured, trained = names if names is not None else (extra, extra)
    ends = list(np.cumsum([n for _, _, n, _ in durable.stretches(plan.stages, settings.eval_every)]))
    steps = {name: [0, *ends] for name in measured} | {name: ends for name in trained - measured}
    curves = {
        name: {"step": [int(s) for s in at], "values": rng.uniform(0.2, 0.8, (SEEDS, len(at))).tolist()}
        for name, at in steps.items()
        if at
    }
    last = {name: [row[-1] for row in curve["values"]] for name, curve in curves.items()}
    own = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return ArmResult(results.plain(own), list(range(SEEDS)), last, curves, 1, 1, 1, 1.0)


def rehearse(module: ModuleType, resolved: dict[str, Any], built: dict[str, Plan]) -> Claim:
    """The claim on made-up results of all arms.

    Where Python measures (worlds, verifiers of text) the names are those of ``METRICS``, ``CURVES`` and the record.

    Raises:
      UserError: where the claim, ``METRICS`` or ``CURVES`` name what no arm has.
    """
    extra = {*module.METRICS, *getattr(module, "CURVES", ()), *recorded_names(module)}
    made = Results({name: made_up(name, built[name], resolved[name], extra) for name in resolved})
    known = sorted({*(m for arm in made.arms.values() for m in arm.metrics), *made.arms})
    for field in ("METRICS", "CURVES"):
        for name in getattr(module, field, ()):
            if name not in known:
                raise UserError(f"{field} names {name!r}, which no arm measures{_near(name, known)}")
    try:
        return module.claim(made)
    except KeyError as error:
        raise UserError(f"the claim names {error.args[0]!r}, which no arm has{_near(error.args[0], known)}") from error
    except (ValueError, IndexError) as error:
        raise UserError(f"the claim does not work on made-up results: {error}") from error


def recorded_names(module: ModuleType) -> set[str]:
    """Metrics of the committed record, if there is one."""
    path = arms.record_path(module)
    return {m for arm in results.read(path)[1].arms.values() for m in arm.metrics} if path.is_file() else set()


def _near(name: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(known[:12])}"
