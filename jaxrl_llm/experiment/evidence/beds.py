"""Whether a test bed can show an effect, read off its baseline and its controls before the claim is looked at."""

import dataclasses
import math
from types import ModuleType
from typing import NamedTuple

import numpy as np

from jaxrl_llm.experiment import claims
from jaxrl_llm.experiment.claims import Claim, Judged, on_bed, rule
from jaxrl_llm.experiment.evidence import along, verdicts
from jaxrl_llm.experiment.results import Results

LEARNED = ("eval/accuracy", "eval/success", "eval/completed", "eval/pass1", "eval/exact_many", "eval/score",
           "eval/test@10", "eval/gold", "eval/utility")  # fmt: skip
EARLY = 0.05  # of the runs may be read before the last stage of their arm: one of 32 does not spoil a bed
SHARES = ("accuracy", "success", "completed", "pass", "exact", "f1", "score", "solved")


class Bed(NamedTuple):
    """What a file says of its test bed, as ``BED``; without one the primary part's metric and baseline are taken.

    ``positive`` names an arm that must beat the baseline (an oracle, a knob known to help), ``negative`` one that must
    stay within d* of it (the baseline again, credit without meaning). ``judges`` are metrics of judges, reward models
    or value models on which the claim rests, with the least value at which they are no longer near chance.
    """

    metric: str = ""
    baseline: str = ""
    chance: float = 0.0
    ceiling: float | None = None
    positive: str = ""
    negative: str = ""
    judges: tuple[tuple[str, str, float], ...] = ()  # arm, metric, least value
    knob: str = ""  # the setting that is the dose of the disease
    stages: tuple[tuple[str, str], ...] = ()  # arm, setting: it is to be read within its last stage


def bed_of(module: ModuleType) -> Bed:
    """What a file says of its bed; nothing where it says nothing."""
    return getattr(module, "BED", None) or Bed()


def learned_metric(results: Results, primary: Judged, bed: Bed) -> tuple[str, str]:
    """The metric and the arm whose curve shows whether training works at all; empty where no arm has such a curve."""
    baseline = bed.baseline or primary.than or next(iter(results.arms))
    if baseline == primary.arm:  # against its own start: any other arm will do, as it trains on the same
        baseline = next(iter(results.arms))
    curves = results.arms[baseline].curves
    wanted = (bed.metric,) if bed.metric else (*(m for m in LEARNED if m == primary.metric), *LEARNED)
    for metric in wanted:
        if metric in curves and len(curves[metric]["step"]) > 2:
            return metric, baseline
    return "", baseline


def learned_curve(results: Results, primary: Judged, metric: str, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """``(steps, values [seeds, points])`` of an arm up to where the primary part reads it.

    A claim that compares arms at a budget says nothing of what they do beyond: a reward model that is over-optimised
    there spoils no bed. Steps are those of the points, the last one that of the first measurement beyond the budget.
    """
    if not primary.budget or primary.budget not in results.arms[arm].curves:
        return results.curve(arm, metric)
    steps, budget, values = results.beside(arm, primary.budget, metric)
    values = along.cut(budget, values, primary.spent)
    return steps[: values.shape[1]], values


def ceiling_of(metric: str, bed: Bed) -> float | None:
    """What the file states, else one for a share and none for anything else."""
    share = any(word in metric.rpartition("/")[2] for word in SHARES)
    return bed.ceiling if bed.ceiling is not None else 1.0 if share else None


def problems(results: Results, claim: Claim, bed: Bed | None = None) -> list[str]:
    """What is wrong with the bed of a claim: gates of the baseline's curve, controls, judges at chance."""
    bed = Bed() if bed is None else bed
    if claim.primary is None:
        return []
    metric, baseline = learned_metric(results, claim.primary, bed)
    found = []
    if metric:
        steps, values = learned_curve(results, claim.primary, metric, baseline)
        ceiling = ceiling_of(metric, bed)
        learns = metric == claim.primary.metric or ceiling_of(claim.primary.metric, bed) is not None
        found = verdicts.gates(steps, values, ceiling=ceiling, chance=bed.chance, room=learns)
        found = [f"{metric} of {baseline}: {x}" for x in found]
        found += _controls(results, metric, baseline, bed)
    found += judges_at_chance(results, bed) + read_too_early(results, claim.primary, bed)
    return found + never_there(results, claim.primary)


def unsure_of(results: Results, claim: Claim, bed: Bed) -> str:
    """The baseline of a bed whose one fault may be too few seeds; or nothing.

    Its gain is within four standard errors, and beyond as many of the last look if it stays what it is.

    Args:
      claim: after its bed was looked at.
    """
    if claim.primary is None or len(claim.bed) != 1:
        return ""
    metric, baseline = learned_metric(results, claim.primary, bed)
    if not metric:
        return ""
    values = learned_curve(results, claim.primary, metric, baseline)[1]
    gain, error = verdicts.gained(values)
    last = max((len(values), *results.looks))
    return baseline if 4 * error * math.sqrt(len(values) / last) < gain <= 4 * error else ""


def judges_at_chance(results: Results, bed: Bed) -> list[str]:
    """The judges of a bed whose mean over the seeds is below what the file asks of them."""
    found = []
    for arm, name, least in bed.judges:
        if arm in results.arms and name not in results.arms[arm].metrics:
            found.append(f"{name} of {arm} is not in the record, which was made before it was asked for")
            continue
        mean = float(np.nanmean(results.values(arm, name)))
        if not mean >= least:
            found.append(f"{name} of {arm} is {mean:.3g}, below {least:g}: too near chance to judge by")
    return found


def read_too_early(results: Results, primary: Judged, bed: Bed) -> list[str]:
    """The arms of which more than a twentieth of the runs spend the budget of the claim before their last stage.

    What is read there is an arm that has not yet begun with what sets it apart.
    """
    found = []
    for arm, setting in bed.stages:
        if arm not in results.arms or primary.budget not in results.arms[arm].curves:
            continue
        begins = results.arms[arm].settings[setting]
        steps, spent = results.curve(arm, primary.budget)
        early = (spent[:, steps <= begins] >= primary.spent).any(axis=1)
        if early.mean() > EARLY:
            found.append(
                f"{arm} has spent {primary.budget} {primary.spent:g} before its last stage begins (step {begins}) in "
                f"{early.sum()} of {early.size} runs"
            )
    return found


def never_there(results: Results, primary: Judged) -> list[str]:
    """The arms of a decided comparison at a budget of which more than half of the runs end before it.

    They count with their last value there, a shorter way from the start than the others went. An arm that is ahead all
    the same is ahead; one that is behind, or level, might not be where the others are. An arm that makes no updates has
    no way to go: where it begins is where it belongs.
    """
    ahead = {verdicts.SUPPORTED_HERE: primary.arm, verdicts.CONTRADICTED: primary.than}
    if not primary.budget or primary.verdict not in (*ahead, verdicts.NO_EFFECT):
        return []
    found = []
    for arm in dict.fromkeys(name for name in (primary.arm, primary.than) if name):
        if arm == ahead.get(primary.verdict) or primary.budget not in results.arms[arm].curves:
            continue
        if not results.arms[arm].updates:
            continue
        spent = results.curve(arm, primary.budget)[1]
        ends = along.short(spent, primary.spent)
        if 2 * ends > len(spent):
            found.append(
                f"{ends} of {len(spent)} runs of {arm} end before {primary.budget} {primary.spent:g}, with their last "
                "value in its place: give it the updates that spend the budget, or compare at less"
            )
    return found


def _controls(results: Results, metric: str, baseline: str, bed: Bed) -> list[str]:
    found, d_star = [], rule(results, metric, baseline)
    for kind, arm in (("positive", bed.positive), ("negative", bed.negative)):
        if not arm or arm not in results.arms:
            continue
        number = min(len(results.arms[x].seeds) for x in (arm, baseline))
        differences = results.values(arm, metric)[:number] - results.values(baseline, metric)[:number]
        seen = verdicts.bounds(differences[np.isfinite(differences)])
        said = f"{kind} control {arm} - {baseline}: {seen.mean:+.3g} [{seen.low:+.3g}, {seen.high:+.3g}]"
        if kind == "positive" and not seen.low > 0:
            found.append(f"{said} does not beat the baseline")
        if kind == "negative" and not (-d_star < seen.low and seen.high < d_star):
            found.append(f"{said} is not within d* {d_star:.3g}")
    return found


def examined(results: Results, claim: Claim, bed: Bed | None = None) -> Claim:
    """The claim with its test bed looked at first.

    The gates look at one metric of one arm; that the rival of the primary part falls in another stays said there.
    """
    if claim.primary is not None:
        claim = claims.gated(claim, *learned_metric(results, claim.primary, Bed() if bed is None else bed))
    return on_bed(claim, problems(results, claim, bed))


def judge(module: ModuleType, found: Results, *, smoke: bool) -> Claim:
    """The claim of the module on a bed that works, or an open one where arms are missing or it was a smoke run."""
    statement = " ".join((module.claim.__doc__ or "").split())
    missing = [name for name in module.ARMS if name not in found.arms]
    if missing:
        return claims.open_claim(f"{statement} [not judged: without {', '.join(missing)}]")
    if smoke:
        return claims.open_claim(f"{statement} [not judged: smoke run]")
    found = dataclasses.replace(found, d_star=getattr(module, "D_STAR", {}) | found.d_star)
    try:
        return examined(found, module.claim(found), getattr(module, "BED", None))
    except KeyError as error:  # data of one's own have no hops, or no scenarios: hours of work are not lost for that
        return claims.open_claim(f"{statement} [not judged: no arm measures {error.args[0]}]")
