"""Certificates of test beds: gates of the healthy arm, controls, and the response to the dose, measured and kept."""

import dataclasses
import json
import math
import pathlib
import shlex
from types import ModuleType
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, plots, results
from jaxrl_llm.experiment.claims import rule
from jaxrl_llm.experiment.evidence import beds, controls, provenance, rehearsal, store, verdicts
from jaxrl_llm.experiment.evidence.controls import Seen
from jaxrl_llm.experiment.results import ArmResult, Results
from jaxrl_llm.run.records import record
from jaxrl_llm.train.plan import Plan


def path_of(module: ModuleType) -> pathlib.Path:
    """Where the committed certificate of a bed lies."""
    kept = arms.record_path(module)
    return kept.with_name(f"{kept.stem}.certificate.json")


def healthy_arm(bed: beds.Bed, primary: Any, names: list[str]) -> tuple[str, str]:
    """``(arm without the disease, arm with it)``; a bed without a knob has one baseline, which is both."""
    baseline = bed.baseline or (primary.than if primary is not None else "") or names[0]
    return (bed.positive if bed.knob and bed.positive else baseline), baseline


def _looks(seeds: int) -> list[int]:
    """The first look, and all of the seeds."""
    return sorted({min(verdicts.LOOKS[0], seeds), seeds})


def run_controls(
    module: ModuleType,
    options: Any,
    plan: Plan,
    settings: Any,
    arm: ArmResult,
    folder: pathlib.Path,
    *,
    metric: str,
    d_star: float,
    tail: int,
    strict: bool,
    positive: bool,
) -> tuple[dict[str, ArmResult], list[Seen]]:
    """Trains the controls of an arm on as many seeds and says what they did; finished seeds are stored as any others.

    Args:
      arm: what the arm itself gave.
      strict: see ``controls.same``.
      positive: whether the harness looks for a positive control; False where the file has one of its own.
    """
    found: dict[str, ArmResult] = {}
    seen: list[Seen] = []
    for word in controls.WORDS:
        helped = any(one.kind == "helps" and not one.problem for one in seen)
        if word in controls.POSITIVE and (helped or not positive):
            continue
        made = controls.made(word, module.build, plan, settings)
        if made is None:
            continue
        other = "" if word == "again" else word
        identity = store.identity(module, settings, made, arms.trace(made), tail=tail, control=other)
        # what the first look shows needs no more; that two runs of one arm are the same takes all seeds
        for number in (len(arm.seeds),) if word == "again" else _looks(len(arm.seeds)):
            own = controls.seeds_of(word, arm.seeds[:number])
            print(f"control {word}, {number} seeds", flush=True)
            found[word], _ = store.seeds_of(made, settings, own, folder / identity, fresh=options.fresh, tail=tail)
            one = judged(word, arm, found[word], metric, d_star, strict=strict)
            if not one.problem:
                break
        seen.append(one)
    return found, controls.one_helps(seen)


def judged(word: str, arm: ArmResult, control: ArmResult, metric: str, d_star: float, *, strict: bool) -> Seen:
    """What one control of an arm did on one metric."""
    values, other = np.asarray(arm.metrics[metric], np.float64), np.asarray(control.metrics[metric], np.float64)
    if word == "again":
        return controls.same(word, f"{metric}, other seeds - these", other, values, d_star, strict=strict)
    if word == "scrambled":
        gains = other - np.asarray(control.curves[metric]["values"], np.float64)[:, 0]
        text = f"{metric}, end - start with the rewards of other responses"
        return controls.gains_nothing(word, text, gains[np.isfinite(gains)], d_star)
    differences = other - values[: len(other)]
    what = {"oracle": "shown solutions", "more": f"{controls.MORE} times the problems a step"}[word]
    return controls.helps(word, f"{metric}, {what} - without", differences[np.isfinite(differences)])


def dose_response(found: Results, resolved: dict[str, Any], bed: beds.Bed, metric: str) -> list[dict[str, Any]]:
    """Mean and interval of every arm by its dose, the healthy one first, over the seeds that all of them have.

    The healthy arm has more: over these, seeds that happen to be easy would count as an effect of the dose.
    """
    if not bed.knob:
        return []
    rows = []
    common = sorted(set.intersection(*(set(arm.seeds) for arm in found.arms.values())))
    for name in found.arms:
        values = found.at_seeds(name, metric, common)
        seen = verdicts.bounds(values[np.isfinite(values)])
        dose = float(getattr(resolved[name], bed.knob))
        rows.append({"arm": name, "dose": dose, "mean": seen.mean, "low": seen.low, "high": seen.high, "n": seen.n})
    return sorted(rows, key=lambda row: row["dose"])


def examined(
    found: Results, bed: beds.Bed, healthy: str, sick: str, metric: str, d_star: float
) -> tuple[list[str], list[Seen]]:
    """What the gates say of the healthy arm, and what it does beside the sick one."""
    steps, values = found.curve(healthy, metric)
    gates = verdicts.gates(steps, values, ceiling=beds.ceiling_of(metric, bed), chance=bed.chance)
    problems = [f"{metric} of {healthy}: {x}" for x in gates]
    if healthy == sick:
        return problems, []
    return problems, [_beside(found, healthy, sick, metric, d_star)]


def _beside(found: Results, healthy: str, sick: str, metric: str, d_star: float) -> Seen:
    """The positive control of a bed with a knob; an arm that is both, or alone so far, has none.

    A disease that costs less than the smallest effect of interest leaves a remedy nothing to show.
    """
    text = f"{metric}, {healthy} - {sick}"
    if healthy == sick or sick not in found.arms:
        return Seen(healthy, text, "helps", verdicts.bounds([]), "")
    number = min(len(found.arms[x].seeds) for x in (healthy, sick))
    differences = found.values(healthy, metric)[:number] - found.values(sick, metric)[:number]
    seen = controls.helps(healthy, text, differences[np.isfinite(differences)])
    if seen.problem or not seen.bounds.mean < d_star:
        return seen
    less = f"control {healthy}, {text}: {seen.bounds.mean:+.3g} is less than d* {d_star:.3g}, which no remedy can reach"
    return seen._replace(problem=less)


def base_of(arm: ArmResult) -> dict[str, float]:
    """Accuracy and pass@k of the base model, before the first step."""
    return {name: float(np.nanmean([row[0] for row in curve["values"]])) for name, curve in arm.curves.items()
            if name.startswith("eval/") and curve["step"][0] == 0}  # fmt: skip


def certify(module: ModuleType, options: Any, resolved: dict[str, Any], built: dict[str, Plan], folder: pathlib.Path, *,
            tail: int, command: str, target: pathlib.Path) -> dict[str, Any]:  # fmt: skip
    """Runs the arms and controls of a bed and writes its certificate and figure after every arm that is finished.

    Raises:
      UserError: where no arm has a curve of the metric.
    """
    planned = rehearsal.rehearse(module, resolved, built)
    bed = beds.bed_of(module)
    healthy, sick = healthy_arm(bed, planned.primary, list(resolved))
    metric = bed.metric or (planned.primary.metric if planned.primary else "")
    seeds = list(range(options.seeds))
    # the healthy arm and its controls first: beds of one kind share them
    order = list(dict.fromkeys([healthy, sick, *(resolved if bed.knob else ())]))
    order = [name for name in order if name in options.arm or not options.arm]
    if not {healthy, sick} <= set(order):
        raise UserError(f"--arm {' '.join(options.arm)}: a certificate needs {' and '.join({healthy: 0, sick: 0})}")
    identities = store.identities(module, {name: resolved[name] for name in order}, built, tail=tail)
    found: dict[str, ArmResult] = {}
    made: dict[str, ArmResult] = {}
    seen: list[Seen] = []
    d_star = math.nan  # until the healthy arm, the first, says it
    for name in order:
        for number in (len(seeds),) if name == healthy else _looks(len(seeds)):
            own = {name: resolved[name]}
            ran = store.run_arms(options, own, built, identities, seeds[:number], folder, tail=tail)
            found |= ran.arms
            if name not in (healthy, sick) or not _beside(Results(found), healthy, sick, metric, d_star).problem:
                break  # the first look shows it, or nothing is to be shown
        whole = Results(dict(found), (), getattr(module, "D_STAR", {}))
        if name == healthy:
            if metric not in found[healthy].curves:
                raise UserError(f"arm {healthy} has no curve of {metric or 'any metric'}: name one in BED")
            d_star = rule(whole, metric, healthy)
            made, seen = run_controls(
                module, options, built[name], resolved[name], found[name], folder,
                metric=metric, d_star=d_star, tail=tail, strict=True, positive=healthy == sick,
            )  # fmt: skip
        if {healthy, sick} <= found.keys():
            problems, more = examined(whole, bed, healthy, sick, metric, d_star)
            kept = {
                "metric": metric, "healthy": healthy, "sick": sick, "d_star": d_star, "tail": tail, "command": command,
                "problems": problems + [one.problem for one in (*more, *seen) if one.problem],
                "controls": [one._asdict() | {"bounds": one.bounds._asdict()} for one in (*more, *seen)],
                "identities": {arm: identities[arm] for arm in found},
            }  # fmt: skip
            kept = written(module, whole, made, resolved, bed, kept)
            target.parent.mkdir(parents=True, exist_ok=True)
            record.write_json(target, kept)
            plots.plot_certificate(target.with_suffix(".png"), kept)
    return kept


def written(module: ModuleType, found: Results, made: dict[str, ArmResult], resolved: dict[str, Any], bed: beds.Bed,
            kept: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """The certificate as JSON: what was judged, and the numbers behind it."""
    healthy, metric = kept["healthy"], kept["metric"]
    arm, file = found.arms[healthy], pathlib.Path(module.__file__ or "")
    everything = found.arms | {f"{healthy}, {word}": one for word, one in made.items()}
    shown = (metric, "reward/mean", "group/degenerate_fraction", "kl/sampler_mean")
    return results.plain({
        "bed": file.stem, "certified": not kept["problems"], "seeds": len(arm.seeds), "made_on": provenance.today(),
        "commit": provenance.commit(file.parent), "versions": record.versions(), **kept,
        "knob": bed.knob, "chance": bed.chance, "ceiling": beds.ceiling_of(metric, bed), "base": base_of(arm),
        "end": float(np.nanmean(arm.metrics[metric])), "dose_response": dose_response(found, resolved, bed, metric),
        "settings": arm.settings,
        "budget": {"rollouts": arm.rollouts, "updates": arm.updates, "tokens": arm.tokens,
                   "seconds_a_seed": arm.seconds / len(arm.seeds)},
        "values": {name: {"seeds": one.seeds, metric: one.metrics[metric]} for name, one in everything.items()},
        "curves": {name: {m: one.curves[m] for m in shown if m in one.curves} for name, one in everything.items()},
    })  # fmt: skip


def stale(module: ModuleType) -> str:
    """What of a bed is no longer as its committed certificate says; empty where all is, or other versions made it.

    Every arm is traced again with the flags of the certificate's own command; nothing is run.
    """
    from jaxrl_llm.experiment import cli  # which needs this module by way of the standard
    from jaxrl_llm.experiment.evidence import standard

    kept = json.loads(path_of(module).read_text())
    if kept["versions"] != record.versions():
        return ""  # another jax writes its programs in other words
    bed = beds.bed_of(module)
    stated = {"knob": bed.knob, "chance": bed.chance, "ceiling": beds.ceiling_of(kept["metric"], bed)}
    moved = [name for name, value in stated.items() if not results.same(kept[name], results.plain(value))]
    if bed.metric not in ("", kept["metric"]):
        moved.append("metric")
    if bed.baseline and healthy_arm(bed, None, list(module.ARMS)) != (kept["healthy"], kept["sick"]):
        moved.append("baseline")
    words = shlex.split(kept["command"])
    options, base, given = cli.parse(module, words[words.index("certify") + 2 :])
    resolved = arms.resolve(module, standard.widened(base, given), ())
    built, _ = cli.build_arms(module, resolved, options.microbatches)
    tail = standard.tail_of(built, resolved)
    there = {name: settings for name, settings in resolved.items() if name in kept["identities"]}
    now = store.identities(module, there, built, tail=tail)
    arms_moved = [f"arm {name}" for name, was in kept["identities"].items() if now.get(name) != was]
    if not moved and not arms_moved:
        return ""
    return f"stale: {', '.join(arms_moved + moved)} is not what was certified; run {kept['command']} --record"


def said(kept: dict[str, Any]) -> str:
    """A certificate as lines."""
    state, start = "certified" if kept["certified"] else "not certified", kept["base"].get(kept["metric"], float("nan"))
    lines = [
        f"{kept['bed']}: {state} on {kept['seeds']} seeds; {kept['metric']} of {kept['healthy']} {start:.3f} to "
        f"{kept['end']:.3f}, chance {kept['chance']:g}, ceiling {kept['ceiling']}, d* {kept['d_star']:.3g}"
    ]
    lines += [f"  dose {row['dose']:g} ({row['arm']}): {row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
              for row in kept["dose_response"]]  # fmt: skip
    for one in kept["controls"]:
        seen = one["bounds"]
        low, high = (float("nan") if seen[x] is None else seen[x] for x in ("low", "high"))
        lines.append(f"  control {one['name']}, {one['text']}: {seen['mean']:+.3f} [{low:+.3f}, {high:+.3f}]")
    return "\n".join([*lines, *(f"  problem: {problem}" for problem in kept["problems"])])


def command(path: str, arguments: list[str]) -> int:
    """``experiment certify FILE [flags of the file]``: 1 where the bed is not certified."""
    from jaxrl_llm.experiment import cli, doctor
    from jaxrl_llm.experiment.evidence import standard

    module = doctor.load(path)
    arms.check_slots(module)
    options, base, given = cli.parse(module, arguments)
    cli.check_options(dataclasses.replace(options, record=False), [])
    cli.check_kept(options)
    resolved = arms.resolve(module, standard.widened(base, given), ())
    built, reads = cli.build_arms(module, resolved, options.microbatches)
    cli.check_flags(module, resolved, base, given, reads)
    target = path_of(module)
    if not options.record:
        target = cli.open_folder(options.out or f"runs/certificates/{target.stem}") / target.name
    text = cli.said(f"python -m jaxrl_llm.experiment certify {path}", arguments)
    tail, folder = standard.tail_of(built, resolved), store.FOLDER
    kept = certify(module, options, resolved, built, folder, tail=tail, command=text, target=target)
    print(f"{said(kept)}\nwritten: {target}")
    return int(not kept["certified"])
