"""Equal tuning: every arm of the primary part over the same learning rates, on training reward, on seeds of its own."""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli, results, sweep
from jaxrl_llm.experiment.evidence import store
from jaxrl_llm.experiment.results import Results

FIRST_SEED, SEEDS = 1000, 3  # no seed of a record is used, and no evaluation problem is looked at
METRIC = "reward/mean"


def tune(job: Any, chosen: list[str], rates: tuple[float, ...]) -> dict[str, Any]:
    """Training reward over the second half, by arm and rate: the sensitivity curves, and the best rate of each arm.

    Raises:
      UserError: for fewer than three rates, or arms that set their own.
    """
    if len(set(rates)) < 3:
        raise UserError(f"--tune {' '.join(f'{r:g}' for r in rates)} needs at least three different learning rates")
    resolved = {}
    for name in chosen:
        for rate in rates:
            resolved[f"{name}@{rate:g}"] = dataclasses.replace(job.resolved[name], learning_rate=rate)
    built, reads = cli.build_arms(job.module, resolved, job.options.microbatches)
    unread = [name for name, fields in reads.items() if "learning_rate" not in fields]
    if unread:
        raise UserError(f"--tune: arm {unread[0].split('@')[0]} reads no learning rate; drop --tune")
    built = {name: plan._replace(measure=sweep.nothing) for name, plan in built.items()}
    identities = store.identities(job.module, resolved, built)
    seeds = list(range(FIRST_SEED, FIRST_SEED + SEEDS))
    found = store.run_arms(job.options, resolved, built, identities, seeds, job.folder)
    curves = {name: {f"{r:g}": sweep.second_half(found, f"{name}@{r:g}", METRIC).tolist() for r in rates}
              for name in chosen}  # fmt: skip
    best = {name: max(rates, key=lambda r, n=name: float(np.nanmean(curves[n][f"{r:g}"]))) for name in chosen}
    edge = [name for name in chosen if len(rates) > 1 and best[name] in (min(rates), max(rates))]
    return {"metric": METRIC, "seeds": SEEDS, "curves": results.plain(curves), "best": best, "at_the_edge": edge}


def applied(job: Any, tuned: dict[str, Any]) -> Any:
    """The record with every tuned arm at its own best rate, and the others at that of the first (the baseline's)."""
    others = tuned["best"][list(tuned["best"])[-1]]
    resolved = {
        name: dataclasses.replace(settings, learning_rate=tuned["best"].get(name, others))
        for name, settings in job.resolved.items()
    }
    built, _ = cli.build_arms(job.module, resolved, job.options.microbatches)
    return job._replace(resolved=resolved, built=built)


def neighbours(job: Any, chosen: list[str], tuned: dict[str, Any], found: Results, first: int,
               tail: int) -> list[dict[str, Any]]:  # fmt: skip
    """Whether the verdict holds where every arm of the primary part takes the next lower, or the next higher, rate.

    An arm whose best rate is the last of the grid stays there. On the seeds of the first look of the other arms.
    """
    rates, rows = sorted(float(r) for r in next(iter(tuned["curves"].values()))), []
    number = min(len(arm.seeds) for arm in found.arms.values())
    for side, move in (("lower", -1), ("higher", 1)):
        at = {name: rates.index(tuned["best"][name]) + move for name in chosen}
        own = {name: rates[min(max(k, 0), len(rates) - 1)] for name, k in at.items()}
        if own == {name: tuned["best"][name] for name in chosen}:
            continue
        resolved = {name: dataclasses.replace(job.resolved[name], learning_rate=rate) for name, rate in own.items()}
        built, _ = cli.build_arms(job.module, resolved, job.options.microbatches)
        identities = store.identities(job.module, resolved, built, tail=tail)
        seeds = list(range(first, first + number))
        ran = store.run_arms(job.options, resolved, built, identities, seeds, job.folder, tail=tail)
        part = job.module.claim(Results(found.arms | ran.arms, (), found.d_star)).primary
        rows.append({"side": side, "rates": own, "verdict": part.verdict, "mean": part.mean, "low": part.low,
                     "high": part.high, "n": part.n})  # fmt: skip
        print(f"at the next {side} rates {own}: {part.verdict}; {part}", flush=True)
    return results.plain(rows)
