"""Two minutes before a record: does the bed leave room, do the arms differ, can the seeds decide?"""

import math
import pathlib
import time
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxrl_llm.experiment import arms, loop, results
from jaxrl_llm.experiment.claims import Claim, of_a_loss, rule
from jaxrl_llm.experiment.evidence import along, beds, controls, provenance, records, store, verdicts
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.train import online
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Stage

SEEDS = (2000, 2001)  # of its own
NOISE = 0.0184  # sd of a paired difference of one seed where nothing better is known: 64 problems, evidence of old
SAME = 1e-6  # relative difference of two updates below which they are one


def compared(module: ModuleType, claim: Claim) -> tuple[str, str]:
    """The arm of the primary part and its baseline; against its own start or a number the first other arm."""
    first, second = claim.primary.arm, claim.primary.than
    if second in ("", first):
        second = next((name for name in module.ARMS if name != first), first)
    return first, second


def _iterations(plan: Plan, steps: int, index: int, at: int = 0) -> tuple[Any, Any, dict[str, float]] | None:
    """Parameters before and after a few iterations of one stage, begun by itself, and metrics.

    None with Python in the loop, and of a stage without rollouts.

    Args:
      at: the step that the first iteration takes itself for.
    """
    if plan.world is not None or plan.on_host or not isinstance(plan.stages[index].method, Online):
        return None
    key, stage = jax.random.key(SEEDS[0]), plan.stages[index]
    params = jax.tree.map(lambda x: x[0], loop.first_params(plan.init, SEEDS))  # those of the runs that follow
    step = jax.jit(lambda state: online.iterate(stage.method, state))
    state, seen = plans.start(stage, params, jax.random.fold_in(key, 0)), []
    state = state._replace(step=state.step + at)
    for _ in range(steps):
        state, metrics = step(state)
        seen.append(metrics)
    return params, state.params, {k: float(np.mean([m[k] for m in seen])) for k in seen[0]}


def first_updates(method: Plan, baseline: Plan) -> dict[str, float]:
    """``update_difference`` and ``groups_with_signal`` of three iterations of the first stage in which the two differ.

    Where they do not at its beginning, as many with the numbers of its last steps: a schedule may part them later. Of
    the last of their stages where none does; empty where no stage of both can be traced. The second figure is there
    for methods that compare responses of a group.
    """
    found: dict[str, float] = {}
    for index in range(min(len(method.stages), len(baseline.stages))):
        first = _apart(method, baseline, index, 0)
        if first is None:
            continue
        found, last = first, method.stages[index].steps - 3
        if found["update_difference"] < SAME and last > 0:
            found = first | {"update_difference": _apart(method, baseline, index, last)["update_difference"]}
        if not found["update_difference"] < SAME:
            break
    return found


def _apart(method: Plan, baseline: Plan, index: int, at: int) -> dict[str, float] | None:
    """``first_updates`` of one stage, with the numbers of the steps from ``at`` on; None where it cannot be traced."""
    right, left = (_iterations(plan, 3, index, at) for plan in (baseline, method))
    if right is None or left is None:
        return None
    found = {"update_difference": update_difference(left[1], right[1], right[0])}
    if has_groups(method.stages[index]):
        found["groups_with_signal"] = 1.0 - left[2].get("group/degenerate_fraction", math.nan)
    return found


def has_groups(stage: Stage) -> bool:
    """Whether responses to one prompt are compared: a single one has none to differ from."""
    return getattr(stage.method, "group_size", 1) > 1


def update_difference(left: Any, right: Any, start: Any) -> float:
    """``|left - right| / |right - start|`` over all parameters; NaN where their trees differ."""
    if jax.tree.structure(left) != jax.tree.structure(right):
        return math.nan

    def size(a, b):
        return math.sqrt(sum(float(jnp.sum((x - y) ** 2)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)))

    return size(left, right) / max(size(right, start), 1e-30)


def _as_claimed(module: ModuleType, primary: Any, found: Results) -> Any:
    """The primary part on a record's numbers, at the step or budget that the claim names.

    None where the record lacks what the claim of today reads: an arm, a curve or a step of it.
    """
    try:
        part = module.claim(found).primary
    except (KeyError, ValueError):
        return None
    return part if part is not None and part.text == primary.text and part.n > 3 else None


def _differences(found: Results, primary: Any, step: along.Along | None = None) -> np.ndarray:
    """Per seed: of two arms, of one and its own start, or one alone where it is held against a number.

    Args:
      step: where a budget is spent; None: at the ends.
    """
    values = found.values(primary.arm, primary.metric, step=step)
    if primary.than == primary.arm:
        return values - found.curve(primary.arm, primary.metric)[1][:, 0]
    if not primary.than:
        return values
    both = [seed for seed in found.arms[primary.arm].seeds if seed in found.arms[primary.than].seeds]
    left, right = (found.at_seeds(name, primary.metric, both, step=step) for name in (primary.arm, primary.than))
    return left - right


def paired_noise(module: ModuleType, primary: Any, ran: Results) -> tuple[float, float, str]:
    """The sd of one seed's paired difference, the effect seen before, and where they are from.

    Of the committed record, unless it is withdrawn, where the claim compares its arms or else at their ends; without
    one the pilot's own sd, where a budget is spent that the claim names, and no effect: two seeds show none. An effect
    that was seen and is wider than the interval of all looks can be decided, however small d* is beside the noise.
    """
    path = arms.record_path(module)
    record, found = results.read(path) if path.is_file() else ({}, None)
    if found is not None and not records.reason_withdrawn(path, record):
        if part := _as_claimed(module, primary, found):
            factor = float(special.stdtrit(part.n - 1, 1 - part.level / 2))
            effect = part.sign * part.mean - part.by if part.kind in ("difference", "share") else math.nan
            return (part.high - part.low) / 2 / factor * math.sqrt(part.n), effect, "the committed record"
        if {primary.arm, primary.than} - {""} <= set(found.arms) and primary.metric in found.arms[primary.arm].metrics:
            values = _differences(found, primary)
            values = values[np.isfinite(values)]
            if values.size > 3:
                effect = primary.sign * float(np.mean(values)) - primary.by
                effect = effect if primary.kind == "difference" else math.nan
                return float(np.std(values, ddof=1)), effect, "the ends of the committed record"
    if primary.kind == "level" or primary.than not in ran.arms:
        return math.nan, math.nan, "unknown"
    values = _differences(ran, primary, along.at(primary.budget, primary.spent) if primary.budget else None)
    spread = float(np.std(values, ddof=1)) if np.isfinite(values).all() else math.nan
    share = beds.ceiling_of(primary.metric, beds.Bed()) is not None
    if share:
        return max(spread, NOISE), math.nan, "the pilot, at least the noise known"
    return spread, math.nan, "the pilot's two seeds"


def half_width(noise: float, seeds: int, looks: tuple[int, ...] = verdicts.LOOKS) -> float:
    """Expected half-width of the interval after so many seeds.

    >>> round(half_width(0.0184, 16), 4)
    0.014
    """
    level = verdicts.level_at(seeds, looks)
    return float(special.stdtrit(seeds - 1, 1 - level / 2)) * noise / math.sqrt(seeds)


def _registered_with(module: ModuleType, metric: str, d_star: float) -> bool:
    """Whether the committed record has this smallest effect of interest: what was fixed before its seeds stays."""
    path = arms.record_path(module)
    record = results.read(path)[0] if path.is_file() else {}
    return not records.is_old(record) and record["d_star"].get(metric) == results.plain(d_star)


def pilot(module: ModuleType, resolved: dict[str, Any], built: dict[str, Plan], claim: Claim,
          folder: pathlib.Path) -> dict[str, Any]:  # fmt: skip
    """Trains the method and its baseline on two seeds of their own, and says what a record would meet.

    Args:
      claim: of the rehearsal, for its primary part.
      folder: of the stored seeds, so that a second pilot is free.

    Returns:
      Numbers and ``problems``: each a sentence why a record would show nothing.
    """
    method, baseline = compared(module, claim)
    bed = beds.bed_of(module)
    healthy = bed.baseline or baseline  # a file whose baseline is sick by design says on which arm the bed is judged
    judging = [arm for arm, _, _ in bed.judges]  # a judge at chance is known here, not after the record
    pair = {name: resolved[name] for name in dict.fromkeys((method, baseline, healthy, *judging))}
    identities = store.identities(module, pair, built)
    found: dict[str, Any] = {"method": method, "baseline": baseline, "metric": claim.primary.metric}
    problems: list[str] = []
    if method != baseline and (first := first_updates(built[method], built[baseline])):
        found |= first
        lengths = [[stage.steps for stage in built[name].stages] for name in (method, baseline)]
        if found["update_difference"] < SAME and lengths[0] == lengths[1]:
            problems.append(f"{method} and {baseline} make the same updates: three iterations differ by nothing")
        if found.get("groups_with_signal") == 0.0:
            problems.append("no group of the first iterations has two different rewards: nothing acts on anything")

    class Options:
        fresh = False

    begun = time.process_time()
    ran = store.run_arms(Options, pair, built, identities, list(SEEDS), folder)
    found |= {"processor_seconds": time.process_time() - begun, "programs": len(pair)}
    metric, learner = beds.learned_metric(ran, claim.primary, bed._replace(baseline=healthy))
    if metric:
        steps, values = beds.learned_curve(ran, claim.primary, metric, learner)
        ceiling = beds.ceiling_of(metric, bed)
        ends_at = values.mean(0)
        solved = {k: float(np.mean([c["values"][i][0] for i in range(len(SEEDS))]))
                  for k, c in ran.arms[learner].curves.items() if k.startswith("eval/pass@")}  # fmt: skip
        found |= {"learned": metric, "floor": float(ends_at[0]), "chance": bed.chance, "ceiling": ceiling,
                  "end": float(ends_at[-1]), "pass_at_k_of_the_base": solved}  # fmt: skip
        whole = beds.ceiling_of(claim.primary.metric, bed) is not None or metric == claim.primary.metric
        said = verdicts.gates(steps, values, ceiling=ceiling, chance=bed.chance, room=whole)
        problems += [f"{metric} of {learner}: {x}" for x in said if "standard errors" not in x]  # of two seeds
        if not ends_at[-1] > ends_at[0]:
            problems.append(f"{metric} of {learner} does not rise: {ends_at[0]:.3g} to {ends_at[-1]:.3g}")
    found["judges"] = {f"{name} of {arm}": float(np.nanmean(ran.values(arm, name))) for arm, name, _ in bed.judges}
    problems += beds.judges_at_chance(ran, bed) + beds.read_too_early(ran, claim.primary, bed)
    stated = getattr(module, "D_STAR", {}).get(claim.primary.metric)
    d_star = stated if stated is not None else rule(ran, claim.primary.metric, baseline)
    if stated is None and not _registered_with(module, claim.primary.metric, d_star):
        problems += [said for said in (of_a_loss(ran, claim.primary, baseline),) if said]
    noise, seen, source = paired_noise(module, claim.primary, ran)
    widths = {n: half_width(noise, n) for n in verdicts.LOOKS}
    found |= {"d_star": d_star, "noise": noise, "noise_from": source, "half_widths": widths,
              "seconds_a_seed": sum(a.seconds / len(a.seeds) for a in ran.arms.values()) / len(ran.arms),
              "evaluations": loop.evaluations(built[healthy], resolved[healthy].eval_every)}  # fmt: skip
    last = verdicts.LOOKS[-1]
    found["seen_before"] = seen
    same = claim.primary.kind == "same"  # then the whole interval must fit into the margin of the claim
    least, what = (claim.primary.by, "the margin") if same else (d_star, "d*")
    if math.isfinite(noise) and math.isfinite(least) and widths[last] > least and not abs(seen) > widths[last]:
        problems.append(f"{last} seeds give an interval of +-{widths[last]:.3g}, wider than {what} {least:.3g}")
    return results.plain(found) | {"problems": problems}


def programs(resolved: dict[str, Any], rates: int) -> int:
    """How many a record compiles and runs to its first look: every arm, its controls, and the rates that are tried."""
    return len(resolved) + len(controls.WORDS) - 1 + 2 * rates


def kept_rows(path: pathlib.Path) -> dict[str, dict[str, str]]:
    """A table of pilots by ``family/slug``; nothing where there is none."""
    lines = [line.split("\t") for line in path.read_text().splitlines()] if path.is_file() else [[]]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}


def kept_at(root: pathlib.Path) -> dict[str, dict[str, str]]:
    """The committed table of pilots, ``results/pilots.tsv``, see ``kept_rows``."""
    return kept_rows(root / "results" / "pilots.tsv")


def keep(path: pathlib.Path, name: str, found: dict[str, Any], *, arms_of_record: int) -> None:
    """Puts what a pilot found into the table of pilots, with what a record would cost, the cheapest first.

    The estimate is that of a record to its first look: as many programs as ``programs`` says, each with the seeds of
    that look, each seed as dear as one of the pilot's with its share of the compiling, which a program does once: the
    most that it costs. A pilot that took its seeds from the store keeps the time of the one that trained them.
    """

    def short(value: Any) -> str:
        return "" if value is None or isinstance(value, float) and not math.isfinite(value) else f"{value:.4g}"

    rows = kept_rows(path)
    seconds, seeds = found["processor_seconds"], verdicts.LOOKS[0] / len(SEEDS)
    if seconds < 5 and name in rows:  # its seeds were there
        seconds = float(rows[name]["processor seconds"])
    row = {
        "name": name, "on": provenance.today(), "compared": f"{found['method']} - {found['baseline']}",
        "metric": found["metric"], "start": short(found.get("floor")), "end": short(found.get("end")),
        "d*": short(found["d_star"]), "noise": short(found["noise"]), "seen before": short(found["seen_before"]),
        "processor seconds": f"{seconds:.0f}", "programs of a record": str(arms_of_record),
        "processor minutes of a record": f"{seeds * seconds / found['programs'] * arms_of_record / 60:.0f}",
        "problem": (found["problems"] or [""])[0],
    }  # fmt: skip
    rows[name] = row
    order = sorted(rows.values(), key=lambda r: (float(r["processor minutes of a record"]), r["name"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["\t".join(row), *("\t".join(r.values()) for r in order)]) + "\n")


def said(found: dict[str, Any]) -> str:
    """The pilot's findings as lines."""
    names = [k for k in found if k != "problems" and found[k] is not None]
    lines = [f"pilot  {name.replace('_', ' ')}: {found[name]}" for name in names]
    return "\n".join([*lines, *(f"pilot  PROBLEM: {x}" for x in found["problems"])])
