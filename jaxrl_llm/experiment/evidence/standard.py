"""A record under the standard: pilot, tuning, registration, fresh seeds in looks, the claim on a bed that works."""

import dataclasses
import pathlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, claims, locate, loop, results
from jaxrl_llm.experiment.claims import Claim
from jaxrl_llm.experiment.evidence import (
    beds,
    certificates,
    fingerprints,
    pilot,
    provenance,
    records,
    rehearsal,
    store,
    tuning,
    verdicts,
)
from jaxrl_llm.experiment.evidence.controls import Seen
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.run import bench
from jaxrl_llm.train.plan import Plan

PROBLEMS, SAMPLES, EVALUATIONS, TAIL = 512, 4, 10, 3


class Job(NamedTuple):
    """One record in the making; ``folder`` is that of the stored seeds."""

    module: ModuleType
    options: Any
    base: Any
    resolved: dict[str, Any]
    built: dict[str, Plan]
    out: pathlib.Path
    folder: pathlib.Path


def widened(base: Any, given: set[str]) -> Any:
    """The settings with the evaluation of a record: more problems, samples and evaluations; training is the same.

    Args:
      given: settings from the command line, which stay.
    """
    wanted = {"eval_problems": max, "eval_samples": max, "eval_every": min}
    least = {"eval_problems": PROBLEMS, "eval_samples": SAMPLES, "eval_every": max(1, base.steps // EVALUATIONS)}
    names = {f.name for f in dataclasses.fields(base)} - given
    changes = {name: pick(getattr(base, name), least[name]) for name, pick in wanted.items() if name in names}
    wide = dataclasses.replace(base, **changes)
    return _as_many_as_there_are(wide, base) if "eval_problems" in changes else wide


def _as_many_as_there_are(wide: Any, base: Any) -> Any:
    """All held-out problems where a generated level has fewer than a record wants, in steps of 32."""
    if not isinstance(wide, bench.OnlineSettings):
        return wide
    return dataclasses.replace(wide, eval_problems=max(bench.most_heldout(wide), base.eval_problems))


def tail_of(built: dict[str, Plan], resolved: dict[str, Any]) -> int:
    """How many of the last evaluations are averaged: three where every arm that trains has ten, else one.

    Three of them lie in its last stage: what a model was before that is no part of what it became.
    """

    def enough(plan: Plan, every: int) -> bool:
        last = loop.evaluations(plan._replace(stages=tuple(s for s in plan.stages if s.steps)[-1:]), every)
        return loop.evaluations(plan, every) >= EVALUATIONS and last >= TAIL

    trained = {name: plan for name, plan in built.items() if plan.stages}
    whole = bool(trained) and all(enough(plan, resolved[name].eval_every) for name, plan in trained.items())
    return TAIL if whole else 1


def primary_arms(claim: Claim) -> list[str]:
    """The arms that the primary part compares."""
    assert claim.primary is not None
    return list(dict.fromkeys(name for name in (claim.primary.arm, claim.primary.than) if name))


def check_updates(job: Job) -> None:
    """Refuses two arms whose parameters are updated by the same program.

    Raises:
      UserError: naming them.
    """
    if same := fingerprints.same_updates(job.built):
        text = "; ".join(" and ".join(names) for names in same)
        raise UserError(f"{text} update the parameters in the same way: what differs feeds metrics alone; drop one")


def fixed_d_star(job: Job, primary: Any, tried: dict[str, Any]) -> dict[str, float]:
    """The smallest effect of interest before the first seed: stated by the file, else of the pilot's baseline.

    Raises:
      UserError: where neither gives one.
    """
    stated = getattr(job.module, "D_STAR", {})
    if primary.metric in stated:
        return {primary.metric: stated[primary.metric]}
    found = tried["d_star"]
    if found is None or not np.isfinite(found):
        raise UserError(f"no smallest effect of interest of {primary.metric}: state it in the file as D_STAR")
    return {primary.metric: found}


def run(job: Job) -> tuple[Results, Claim, dict[str, Any]] | None:
    """Runs a record; gives its results, its claim and what it rests on; None where it was only to be registered.

    Raises:
      UserError: where the claim cannot be read, two arms are one, no rate was tried, or the pilot says no and nobody
        forces it.
    """
    options, module = job.options, job.module
    if options.coefficient:
        tuning.read_coefficient(options.coefficient, job.base)  # before hours of rates
    planned = rehearsal.rehearse(module, job.resolved, job.built)
    check_updates(job)
    chosen = primary_arms(planned)
    free = [name for name in chosen if job.built[name].stages and tuning.own_rate(module, name) is None]
    if free and not options.tune and not getattr(module, "UNTUNED", ""):
        raise UserError(
            f"--tune: {' and '.join(free)} of the primary part would train at the rate of the file; give at least "
            "three learning rates, or say in the file why one is right: UNTUNED = 'why'"
        )
    tried = pilot.pilot(module, job.resolved, job.built, planned, job.folder)
    print(pilot.said(tried), flush=True)
    if tried["problems"] and not options.force_record:
        raise UserError(f"the pilot says no: {tried['problems'][0]}; change the bed, or give --force-record")
    tuned = tuning.tune(job, chosen, options.tune) if options.tune else None
    if tuned is not None:
        if options.coefficient:
            tuned = tuning.tune_coefficient(job, tuned, options.coefficient)
        job = tuning.applied(job, tuned)
    d_star = fixed_d_star(job, planned.primary, tried)
    looks = verdicts.LOOKS if options.until_decided else ()
    registration = provenance.registered(module, job.resolved, d_star, looks or (options.seeds,))
    path = arms.record_path(module)
    if options.bed:
        path = path.with_stem(f"{path.stem}@{options.bed}")
    earlier = results.read(path)[0] if path.is_file() else None
    unkept = provenance.withheld(locate.root()).get(f"{path.parent.name}/{path.stem}", [])
    first, tries = provenance.first_seed(earlier, registration, unkept=len(unkept))
    tail, day = tail_of(job.built, job.resolved), provenance.today()
    table = path.parents[1] / "registered.tsv"
    print(f"registered {registration} (d* {d_star}, seeds from {first}, {tries} earlier records)", flush=True)
    if options.register:
        provenance.register(table, {
            "name": f"{path.parent.name}/{path.stem}", "registered": registration, "on": day, "first seed": first,
            "primary": planned.primary.text, "d*": f"{d_star[planned.primary.metric]:.4g}",
            "rates": tuning.chosen_text(tuned) if tuned else "of the file",
        })  # fmt: skip
        print(f"written: {table}; commit it, then give the same command without --register")
        return None
    identities = store.identities(module, job.resolved, job.built, tail=tail)
    instrument = {
        "commit": provenance.commit(pathlib.Path(module.__file__ or "").parent),
        "registered": registration, "registered_on": day,
        "registered_in": provenance.registered_in(table, f"{path.parent.name}/{path.stem}", registration, first),
        "tries": tries, "first_seed": first, "withheld": unkept,
        "code": {name: store.code(module, job.built[name], arms.trace(job.built[name])) for name in job.built},
        "identities": identities, "tail": tail, "pilot": tried, "tuned": tuned, "forced": bool(tried["problems"]),
    }  # fmt: skip
    seen, broken = controlled(job, planned, identities, first, looks, tail)
    found, claim = _looked(job, chosen, identities, first, looks, d_star, tail, broken)
    claim = records.without_twins(claim, found)
    precise = records.precision(found, claim.primary.arm, claim.primary.than) if claim.primary else None
    near = tuning.neighbours(job, tuned, found, first, tail) if tuned is not None else []
    return found, claim, instrument | {
        "finished_on": provenance.today(), "precision": precise, "neighbours": near,
        "controls": [one._asdict() | {"bounds": one.bounds._asdict()} for one in seen],
    }  # fmt: skip


def controlled(
    job: Job, planned: Claim, identities: dict[str, str], first: int, looks: tuple[int, ...], tail: int
) -> tuple[list[Seen], list[str]]:
    """The controls of the arm on which the bed is judged, on the seeds of the first look, before the claim is seen.

    Returns:
      What they did, and what is wrong with the bed by them. Nothing where no arm has a curve that training raises.
    """
    if not job.options.controls:
        return [], []
    bed = beds.bed_of(job.module)
    seeds = list(range(first, first + (looks[0] if looks else job.options.seeds)))
    names = (planned.primary.arm, planned.primary.than) if planned.primary.than else tuple(job.resolved)
    healthy = bed.baseline or next(name for name in reversed(names) if name)
    own = {healthy: job.resolved[healthy]}
    ran = store.run_arms(job.options, own, job.built, identities, seeds, job.folder, tail=tail)
    metric, _ = beds.learned_metric(ran, planned.primary, bed._replace(baseline=healthy))
    if not metric:
        return [], []
    ran = dataclasses.replace(ran, d_star=getattr(job.module, "D_STAR", {}))
    _, seen = certificates.run_controls(
        job.module, job.options, job.built[healthy], own[healthy], ran.arms[healthy], job.folder, metric=metric,
        d_star=claims.rule(ran, metric, healthy), tail=tail, strict=False, positive=not bed.positive,
    )  # fmt: skip
    for one in seen:
        print(f"control {one.name}, {one.text}: {one.bounds.mean:+.3g} [{one.bounds.low:+.3g}, {one.bounds.high:+.3g}]")
    return seen, [one.problem for one in seen if one.problem]


def _looked(
    job: Job, chosen: list[str], identities, first: int, looks, d_star, tail: int, broken: list[str]
) -> tuple[Results, Claim]:
    """Seeds of the primary part's arms look by look until the verdict is there; the other arms take the first look.

    Where all that is wrong with the bed is a gain of its baseline that these seeds cannot tell from none, the next look
    judges bed and claim.

    Args:
      broken: what the controls say against the bed: then the first look is the last.
    """
    found: dict[str, Any] = {}
    done: list[int] = []
    for number in looks or (job.options.seeds,):
        now = job.resolved if not found else {name: job.resolved[name] for name in chosen}
        seeds = list(range(first, first + number))
        ran = store.run_arms(job.options, now, job.built, identities, seeds, job.folder, tail=tail, trained=done)
        found, done = found | ran.arms, seeds
        whole = Results({name: found[name] for name in job.resolved}, tuple(looks), d_star)
        claim = beds.judge(job.module, whole, smoke=False)
        claim = claims.on_bed(claim, [*claim.bed, *broken])
        print(f"{number} seeds: {claim.verdict}; {claim.primary}", flush=True)
        unsure = beds.unsure_of(whole, claim, beds.bed_of(job.module))
        if claim.verdict != verdicts.UNDECIDED and not unsure:
            break
        chosen = list(dict.fromkeys([*chosen, unsure])) if unsure else chosen
    return whole, claim


def pilot_command(path: str, arguments: list[str]) -> int:
    """``experiment pilot FILE [flags of the file]``: prints what a record would meet; 1 where it would be refused.

    With ``--record`` also into ``results/pilots.tsv``, at the cost of a record of all arms, to which ``--tune`` counts.
    ``--arm`` builds some alone, those that the claim names, where the others are dear to build.
    """
    from jaxrl_llm.experiment import cli, doctor

    module = doctor.load(path)
    arms.check_slots(module)
    options, base, given = cli.parse(module, arguments)
    cli.check_options(options, arguments)
    resolved = arms.resolve(module, widened(base, given), options.arm)
    built, reads = cli.build_arms(module, resolved, options.microbatches)
    cli.check_flags(module, resolved, base, given, reads)
    folder = cli.open_folder(options.out) / "arms" if options.out else store.FOLDER
    job = Job(module, options, base, resolved, built, folder.parent, folder)
    planned = rehearsal.rehearse(module, resolved, built)
    check_updates(job)
    found = pilot.pilot(module, resolved, built, planned, folder)
    print(pilot.said(found))
    if options.record:
        path = arms.record_path(module)
        own = tuning.read_coefficient(options.coefficient, base)[1] if options.coefficient else ()
        number = pilot.programs(module.ARMS, len(options.tune) + len(own))
        pilot.keep(path.parents[1] / "pilots.tsv", f"{path.parent.name}/{path.stem}", found, arms_of_record=number)
    return int(bool(found["problems"]))
