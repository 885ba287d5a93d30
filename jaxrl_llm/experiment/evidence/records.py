"""Committed records: how a claim is kept, what a record says of itself, and old ones judged again without runs."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.experiment import claims, locate, plots, results
from jaxrl_llm.experiment.claims import Claim, Judged
from jaxrl_llm.experiment.evidence import beds, provenance, verdicts
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.run.records import record as files

OLD = "old instrument"


def plain_claim(claim: Claim) -> dict[str, Any]:
    """A claim as JSON; runs that make no updates are named where there are any, as most records are older than that."""

    def fields(part: Judged) -> dict[str, Any]:
        return {name: value for name, value in part._asdict().items() if name != "idle" or value}

    return results.plain({
        "statement": claim.statement,
        "verdict": claim.verdict,
        "primary": None if claim.primary is None else fields(claim.primary),
        "secondary": [fields(part) for part in claim.secondary],
        "bed": list(claim.bed),
    })  # fmt: skip


def read_claim(record: dict[str, Any]) -> Claim:
    """The claim of a record, judged by the present algebra.

    Raises:
      ValueError: for a record that was never judged by it.
    """
    kept = record["claim"]
    if "primary" not in kept:
        raise ValueError("judged by an earlier algebra; run python -m jaxrl_llm.experiment rejudge")

    def part(fields: dict[str, Any]) -> Judged:
        undefined = {k: float("nan") for k, v in fields.items() if v is None}
        return Judged(**fields | undefined)

    primary = None if kept["primary"] is None else part(kept["primary"])
    return Claim(kept["statement"], kept["verdict"], primary, tuple(map(part, kept["secondary"])), tuple(kept["bed"]))


def precision(found: Results, arm: str, than: str) -> dict[str, Any] | None:
    """What the counts by problem say of a difference of accuracies: how much of its variance is sampling, and more.

    ``sampling_share``: of the variance of a seed's paired difference, what drawing more samples of the same problems
    would remove. ``over_problems``: the 95 % interval with problems as the units, differences taken within them.
    None where no counts were kept.
    """
    pair = [found.arms.get(name) for name in (arm, than)]
    if any(x is None or "problems/right" not in x.problems or x.trials < 2 for x in pair):
        return None
    seeds = [s for s in pair[0].seeds if s in pair[1].seeds]
    shares = [
        np.stack([results.unpack(x.problems["problems/right"][x.seeds.index(s)]) for s in seeds]) / x.trials
        for x in pair
    ]
    # unbiased variance of a share of n draws: p (1 - p) / (n - 1)
    noise = sum((p * (1 - p)).mean(1) / (x.trials - 1) / p.shape[1] for p, x in zip(shares, pair, strict=True))
    differences = shares[0] - shares[1]
    spread = float(np.var(differences.mean(1), ddof=1)) if len(seeds) > 1 else float("nan")
    inside = verdicts.bounds(differences.mean(0))
    return {
        "problems": differences.shape[1],
        "trials": pair[0].trials,
        "sampling_share": float(np.mean(noise)) / spread if spread > 0 else float("nan"),
        "over_problems": [inside.low, inside.high],
    }


def less_than_claimed(part: Judged) -> str:
    """Of a contradicted difference that is beyond zero in the paper's direction: that it is smaller than is claimed."""
    ends = sorted((part.sign * part.low, part.sign * part.high))
    if part.verdict == verdicts.CONTRADICTED and part.kind == "difference" and ends[0] > 0:
        return "; in the paper's direction, but less than is claimed"
    return ""


def untuned(record: dict[str, Any]) -> bool:
    """Whether arms of the primary part of a record under the standard trained at rates that nobody chose by trying."""
    part, proof = record["claim"].get("primary"), record.get("instrument")
    if not part or not proof or proof.get("tuned"):
        return False
    return any(record["arms"].get(name, {}).get("updates") for name in (part["arm"], part["than"]))


def is_old(record: dict[str, Any]) -> bool:
    """Whether a record was made before the standard: narrow evaluation, no pilot, nothing fixed before its seeds."""
    return not record.get("instrument")


def named_bed(record: dict[str, Any]) -> str:
    """`` on BED`` of a record on another bed than the file's own; else nothing."""
    _, _, more = record.get("command", "").partition(" --bed ")
    return f" on {more.split()[0]}" if more else ""


def title(record: dict[str, Any]) -> str:
    """Experiment and verdict, for a figure, with the bed of a record on another one than the file's own."""
    old = f" ({OLD})" if is_old(record) else ""
    return f"{record['experiment']}{named_bed(record)}: {record['claim']['verdict']}{old}"


def caption(record: dict[str, Any]) -> str:
    """Seeds, problems, budget, tuned or not: what a figure must say."""
    found = list(record["arms"].values())
    seeds = sorted({len(arm["seeds"]) for arm in found})
    proof, settings = record.get("instrument") or {}, record["settings"]
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    counted = not proof or any(arm.get("problems") for arm in found)  # a file that measures otherwise keeps no counts
    problems = settings.get("eval_problems") if counted else None
    judged = f"{problems} problems x {settings.get('eval_samples', 1)} samples" if problems else "own measurement"
    ends = f", mean of the last {proof['tail']} evaluations" if proof.get("tail", 1) > 1 else ""
    budget = f"{max(a['updates'] for a in found):,} updates and {max(a['rollouts'] for a in found):,} rollouts a seed"
    tuned = "learning rates tuned equally" if proof.get("tuned") else "not tuned"
    if own := (proof.get("tuned") or {}).get("coefficient"):
        tuned = f"learning rates and {own['field']} tuned equally"
    return f"{number} seeds; {judged}{ends}; {budget}; {tuned}{'; ' + OLD if not proof else ''}"


def save(record: dict[str, Any], path: pathlib.Path) -> None:
    """A record with few line breaks."""
    files.write_whole(path, json.dumps(record, separators=(",", ":")).replace('},"', '},\n"') + "\n")


def withdrawn(root: pathlib.Path) -> dict[tuple[str, str], str]:
    """Why verdicts do not stand, by ``family/slug`` and registration; that of an old record is empty."""
    path = root / "results" / "withdrawn.tsv"
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]] if path.is_file() else []
    return {(name, "".join(registered)): reason for name, reason, *registered in rows}


def standing(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records whose verdict stands."""
    return [record for record in found if record["claim"]["verdict"] != verdicts.WITHDRAWN]


def reason_withdrawn(path: pathlib.Path, record: dict[str, Any]) -> str:
    """Why the verdict of this record does not stand; empty where it does.

    Of a record under the standard its registration is withdrawn, so that a record that is made anew stands.
    """
    registered = "" if is_old(record) else record["instrument"].get("registered")
    return withdrawn(path.parents[2]).get((f"{path.parent.name}/{path.stem}", registered), "")


def committed(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """``(record, experiment file)`` of every committed record of an experiment; ``slug@bed.json`` is one, too."""
    for path in sorted((root / "results").glob("*/*.json")):
        file = root / "experiments" / path.parent.name / f"{path.stem.partition('@')[0]}.py"
        if file.is_file():
            yield path, file


def same_outcomes(found: Results) -> str:
    """Arms that ended with the same measurements in every seed, though they trained: they are one arm. Or nothing."""

    def ends(name: str, seeds: list[int]) -> str:
        arm = found.arms[name]
        where = [arm.seeds.index(seed) for seed in seeds]
        return repr(sorted((m, [v[k] for k in where]) for m, v in arm.metrics.items() if m.startswith("eval/")))

    for k, (name, arm) in enumerate(found.arms.items()):
        for other in [*found.arms][:k] if arm.updates else ():
            seeds = [seed for seed in arm.seeds if seed in found.arms[other].seeds]  # those of later looks have more
            if len(seeds) > 1 and (said := ends(name, seeds)) != "[]" and said == ends(other, seeds):
                return f"{other} and {name}"
    return ""


def without_twins(claim: Claim, found: Results) -> Claim:
    """The claim, of a bed that is invalid where two arms ended the same."""
    equal = same_outcomes(found)
    if not equal:
        return claim
    return claim._replace(verdict=verdicts.INVALID, bed=(*claim.bed, f"{equal} ended the same in every seed"))


def judge_again(module: Any, record: dict[str, Any], found: Results, reason: str = "") -> dict[str, Any]:
    """The record with its claim judged by the present algebra, on the numbers that are there.

    Args:
      reason: why the verdict is withdrawn; empty: it is not. What the parts said stays readable and is not judged
        again: the file may have other arms by now.
    """
    if reason:
        claim = read_claim(record)
        others = tuple(problem for problem in claim.bed if problem != reason)
        claim = claim._replace(verdict=verdicts.WITHDRAWN, bed=(reason, *others))
    else:
        stated = dataclasses.replace(found, d_star=getattr(module, "D_STAR", {}) | found.d_star)
        claim = beds.examined(stated, module.claim(stated), getattr(module, "BED", None))
        kept = (record.get("instrument") or {}).get("controls") or ()  # they are no arms of the record, and stand
        claim = claims.on_bed(claim, [*claim.bed, *(one["problem"] for one in kept if one["problem"])])
        claim = claim if is_old(record) else without_twins(claim, found)
    return record | {"claim": plain_claim(claim), "instrument": record.get("instrument")}


def rejudge(root: pathlib.Path | None = None, *, only: tuple[str, ...] = ()) -> list[str]:
    """Judges every committed record again and draws its figure again; nothing is run. Returns one line a record.

    The commit that registered a record is looked up again, where the history is whole: a commit that was put on top of
    another since has another name.

    Args:
      only: ``family/slug`` of the records; none: all.
    """
    from jaxrl_llm.experiment import doctor  # which reads records itself

    root, lines = locate.root() if root is None else root, []
    whole, table = provenance.whole_history(root), root / "results" / "registered.tsv"
    for path, file in committed(root):
        name = f"{path.parent.name}/{path.stem}"
        if only and name not in only:
            continue
        module = doctor.load(file)
        record, found = results.read(path)
        reason = reason_withdrawn(path, record)
        if record["claim"].get("parts", True) == []:  # a record that was never judged stays so
            again = record | {"claim": plain_claim(claims.open_claim(record["claim"]["statement"]))}
            again["instrument"] = record.get("instrument")
        else:
            again = judge_again(module, record, found, reason)
        proof = again["instrument"]
        if whole and proof and "first_seed" in proof:
            given = name, proof["registered"], proof["first_seed"]
            again["instrument"] = proof | {"registered_in": provenance.registered_in(table, *given)}
        save(again, path)
        held = {curve for arm in found.arms.values() for curve in arm.curves}
        shown = tuple(x for x in getattr(module, "CURVES", module.METRICS) if x in held or not reason)
        plots.plot(path.with_suffix(".png"), found, shown, title(again),
                   claim=read_claim(again), caption=caption(again))  # fmt: skip
        lines.append(f"{name}: {again['claim']['verdict']}")
    return lines
