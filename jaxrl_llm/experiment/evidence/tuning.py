"""Equal tuning: every arm of the primary part over the same learning rates, on seeds of its own.

An arm that ends with samples and rewards is judged by its training reward, one that says how it is validated
(``Plan.validate``) by fresh samples on problems that neither train nor are measured on. Another that ends on a table of
rows (pairs, demonstrations) has no reward: an eighth of its rows is held out of training, and the rate with the lowest
value of its own loss there is taken. Losses of two arms need not be comparable, for each is only compared with itself.

Where an arm learns from samples, a rate counts as the mean of what it and the next higher one reach. Three seeds hardly
tell the last rate that holds from one that is safe, and of the eight to 64 of a record some then fall: a rate is taken
whose next higher one was tried and holds, too. Where no two neighbours hold, the best of those that do is all there is.
Of a table, which is learned without falling, each rate counts alone.

A coefficient of the method (``--coefficient FIELD=V,V,V``) is tried in the same way, at the best rate of each arm.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli, results, sweep
from jaxrl_llm.experiment.evidence import beds, store
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Plan

FIRST_SEED, SEEDS = 1000, 3  # no seed of a record is used, and no evaluation problem is looked at
METRIC, HELD = "reward/mean", "heldout/loss"
HELD_SHARE = 8  # one row in so many


class NoRate(UserError):
    """An arm diverges at everything that was tried."""


def criterion(plan: Plan) -> tuple[str, int]:
    """The training metric that chooses a rate, and 1 where more is better, -1 where less is."""
    return (HELD, -1) if on_a_table(plan) and plan.validate is None else (METRIC, 1)


def on_a_table(plan: Plan) -> bool:
    """Whether a plan ends on a table of rows. Of samples too high a rate costs more than speed."""
    return bool(plan.stages) and isinstance(plan.stages[-1].method, Offline)


def held_out(method: Offline) -> Offline:
    """The method on the first seven eighths of its table, with its loss on the others among its metrics.

    Raises:
      UserError: for rows that come as a stream, of which none can be set aside.
    """
    if method.stream is not None:
        raise UserError("--tune sets rows aside, and --rows-in host reads them as a stream: drop one of them")

    def parts(extras: Any) -> tuple[Any, Any]:
        table = method.rows(extras)
        count = jax.tree.leaves(table)[0].shape[0]
        first = count - max(1, count // HELD_SHARE)
        if first < method.rows_per_step:
            raise UserError(f"--tune leaves {first} of {count} rows to train on, a step takes {method.rows_per_step}; "
                            "give more rows, or drop --tune")  # fmt: skip
        return jax.tree.map(lambda x: x[:first], table), jax.tree.map(lambda x: x[first:], table)

    def loss(params: Any, extras: Any, batch: Any, *total: Any) -> Any:
        value, metrics = method.loss(params, extras, batch, *total)
        kept = parts(extras)[1]
        whole = () if method.whole is None else (method.whole(kept),)
        there = method.loss(jax.lax.stop_gradient(params), extras, kept, *whole)[0]
        return value, metrics | {HELD: there / method.microbatches}  # metrics of parts add up

    return method._replace(rows=lambda extras: parts(extras)[0], loss=loss)


def tried(plan: Plan) -> Plan:
    """The plan as it is tried out: validated or not measured, and rows are held out where they choose the rate."""
    if criterion(plan)[0] == HELD:
        stages = (s._replace(method=held_out(s.method)) if isinstance(s.method, Offline) else s for s in plan.stages)
        plan = plan._replace(stages=tuple(stages))
    return plan._replace(measure=plan.validate or sweep.nothing)


def own_rate(module: ModuleType, arm: str) -> float | None:
    """The learning rate that an arm sets in the file, as one that is measured untrained does; None: it sets none."""
    return module.ARMS[arm].get("learning_rate")


def grid_of(rates: tuple[float, ...]) -> tuple[float, ...]:
    """The learning rates of ``--tune``, the lowest first, as they name what is run and kept.

    Raises:
      UserError: for fewer than three.
    """
    rates = tuple(sorted({float(f"{r:g}") for r in rates}))
    if len(rates) < 3:
        raise UserError(f"--tune {' '.join(f'{r:g}' for r in rates)} needs at least three different learning rates")
    return rates


def tune(job: Any, chosen: list[str], rates: tuple[float, ...]) -> dict[str, Any]:
    """The criterion over the second half, by arm and rate: the sensitivity curves, and the best rate of each arm.

    An arm that does not train (a floor, a base, one whose own rate is 0) has no rate, and stays as it is.

    Raises:
      UserError: for fewer than three rates, arms that set their own, or where no arm trains.
    """
    rates = grid_of(rates)
    chosen = [name for name in chosen if job.built[name].stages and own_rate(job.module, name) != 0]
    if not chosen:
        raise UserError("--tune: no arm of the primary part trains; drop --tune")
    if fixed := [name for name in chosen if own_rate(job.module, name) is not None]:
        raise UserError(f"--tune: arm {fixed[0]} sets its own learning rate; drop --tune")
    resolved = {}
    for name in chosen:
        for rate in rates:
            resolved[f"{name}@{rate:g}"] = dataclasses.replace(job.resolved[name], learning_rate=rate)
    built, reads = cli.build_arms(job.module, resolved, job.options.microbatches)
    unread = [name for name, fields in reads.items() if "learning_rate" not in fields]
    if unread:
        raise UserError(f"--tune: arm {unread[0].split('@')[0]} reads no learning rate; drop --tune")
    metric = ", ".join(dict.fromkeys(criterion(plan)[0] for plan in built.values()))
    identities = _identities(job, resolved, built)
    found = best(job.options, job.folder, "", rates, resolved, built, identities, rising=True)
    return {"metric": metric, "seeds": SEEDS} | found


def _identities(job: Any, resolved: dict[str, Any], built: dict[str, Plan]) -> dict[str, str]:
    """Of plans as they are tried."""
    return store.identities(job.module, resolved, {name: tried(built[name]) for name in resolved})


def best(
    options: Any, folder: pathlib.Path, said: str, values: tuple[Any, ...], resolved: dict[str, Any],
    built: dict[str, Plan], identities: dict[str, str], *, rising: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The criterion of every arm at every value, the best value of each arm, and which have theirs at an end.

    Args:
      options: with ``fresh``.
      folder: of the stored seeds.
      said: what stands before the value in the names ``arm@value`` of what is run.
      resolved: settings of what is run, by these names.
      built: the same as plans.
      identities: of them as they are tried.
      rising: the values are learning rates, the lowest first: of arms that sample each counts with the next.

    Raises:
      NoRate: for an arm that diverges at every value.
    """
    first = {name.partition("@")[0]: plan for name, plan in built.items()}
    judged = {name: criterion(plan) for name, plan in first.items()}
    built = {name: tried(plan) for name, plan in built.items()}
    seeds = list(range(FIRST_SEED, FIRST_SEED + SEEDS))
    found = store.run_arms(options, resolved, built, identities, seeds, folder)
    curves = {name: {f"{v:g}": sweep.second_half(found, f"{name}@{said}{v:g}", metric).tolist() for v in values}
              for name, (metric, _) in judged.items()}  # fmt: skip
    beside = [name for name, plan in first.items() if rising and not on_a_table(plan)]
    chosen, edge, paired = {}, [], []
    for name, (_, sign) in judged.items():
        alone = [_worth(curves[name][f"{v:g}"], sign) for v in values]
        if not np.isfinite(alone).any():
            text = " ".join(f"{v:g}" for v in values)
            raise NoRate(f"arm {name} diverges, or has no {judged[name][0]}, at every one of {text} that was tried: "
                         "give others, lower learning rates first")  # fmt: skip
        worth = with_the_next(alone) if name in beside else alone
        if name in beside and np.isfinite(worth).any():
            paired.append(name)
        else:
            worth = alone
        chosen[name] = values[int(np.argmax(worth))]
        edge += [name] if int(np.argmax(alone)) in (0, len(values) - 1) else []
    return {"curves": results.plain(curves), "best": chosen, "at_the_edge": edge, "with_the_next": paired}


def with_the_next(worth: list[float]) -> list[float]:
    """The mean of each and the one after it; the last, after which nothing was tried, is the worst of all."""
    return [(one + after) / 2 for one, after in itertools.pairwise(worth)] + [-np.inf]


def read_coefficient(spec: str, settings: Any) -> tuple[str, tuple[Any, ...]]:
    """The field of ``FIELD=V,V,V`` and its values, in the type that the field has."""
    field, _, text = spec.partition("=")
    now = getattr(settings, field, None)
    if isinstance(now, bool) or not isinstance(now, (int, float)) or field == "learning_rate":
        raise UserError(f"--coefficient {spec}: {field!r} is no number among the settings of this experiment")
    try:
        read = [type(now)(value) for value in text.split(",")]
    except ValueError:
        raise UserError(f"--coefficient {spec}: {text!r} is no list of {type(now).__name__} numbers") from None
    values = tuple({f"{value:g}": value for value in read}.values())  # as they name what is run and kept
    if len(values) < 3 or not all(np.isfinite(values)):
        raise UserError(f"--coefficient {spec} needs at least three different finite values")
    return field, values


def tune_coefficient(job: Any, tuned: dict[str, Any], spec: str) -> dict[str, Any]:
    """``tuned`` with the best value of a coefficient for every tuned arm that reads it and does not set it itself.

    An arm whose program is the same at every value (it passes the number to a function that ignores it) does not. A
    term that keeps a policy from over-optimising a learned reward is not to be tuned so: that reward is highest without
    it.

    Args:
      tuned: of ``tune``, at whose best rates the values are tried.
      spec: ``FIELD=V,V,V``.

    Raises:
      UserError: for fewer than three values, a field that is no number, or that no such arm reads.
    """
    field, values = read_coefficient(spec, job.base)
    resolved = {
        f"{name}@{field}={value:g}": dataclasses.replace(job.resolved[name], learning_rate=rate, **{field: value})
        for name, rate in tuned["best"].items()
        if field not in job.module.ARMS[name]
        for value in values
    }
    built, reads = cli.build_arms(job.module, resolved, job.options.microbatches)
    resolved = {name: settings for name, settings in resolved.items() if field in reads[name]}
    identities = _identities(job, resolved, built)
    programs: dict[str, set[str]] = {}
    for name, identity in identities.items():
        programs.setdefault(name.partition("@")[0], set()).add(identity)
    resolved = {name: settings for name, settings in resolved.items() if len(programs[name.partition("@")[0]]) > 1}
    if not resolved:
        raise UserError(f"--coefficient {spec}: no arm of the primary part that trains reads {field}; drop it")
    own = {name: built[name] for name in resolved}
    found = best(job.options, job.folder, f"{field}=", values, resolved, own, identities)
    return tuned | {"coefficient": {"field": field} | found}


def chosen_text(tuned: dict[str, Any]) -> str:
    """The rates, and coefficients, that were chosen: ``arm 0.001, arm.field 0.1``."""
    said = [f"{arm} {rate:g}" for arm, rate in tuned["best"].items()]
    if own := tuned.get("coefficient"):
        said += [f"{arm}.{own['field']} {value:g}" for arm, value in own["best"].items()]
    return ", ".join(said)


def _worth(values: list[float], sign: int) -> float:
    """Of the seeds at one rate, more is better; a rate at which one of them diverges is the worst of all."""
    return sign * float(np.mean(values)) if np.isfinite(values).all() else -np.inf


def nearest(job: Any, name: str, tuned: Iterable[str]) -> str:
    """The tuned arm from which an arm differs in the fewest settings; of several the last one (the baseline).

    What an arm leaves out of the method is to be seen at the method's rate: at the baseline's the rate would be a part
    of every such difference.
    """

    def differing(other: str) -> int:
        one, two = job.resolved[name], job.resolved[other]
        fields = [field.name for field in dataclasses.fields(one) if field.name != "learning_rate"]
        return sum(getattr(one, field) != getattr(two, field) for field in fields)

    return min(reversed([*tuned]), key=differing)


def applied(job: Any, tuned: dict[str, Any]) -> Any:
    """The record with every tuned arm at its own best rate, and any other at that of the tuned arm ``nearest`` to it.

    An arm whose own rate is what it is about keeps it: at another a floor would train. So with a coefficient, of which
    the others take that of the first (the method's).
    """
    resolved, own = {}, tuned.get("coefficient")
    for name, settings in job.resolved.items():
        given = {"learning_rate": tuned["best"][nearest(job, name, tuned["best"])]}
        if own:
            given[own["field"]] = own["best"].get(name, next(iter(own["best"].values())))
        given = {field: value for field, value in given.items() if field not in job.module.ARMS[name]}
        resolved[name] = dataclasses.replace(settings, **given)
    built, _ = cli.build_arms(job.module, resolved, job.options.microbatches)
    return job._replace(resolved=resolved, built=built)


def neighbours(job: Any, tuned: dict[str, Any], found: Results, first: int, tail: int) -> list[dict[str, Any]]:
    """Whether the verdict holds where every tuned arm takes the next lower, or the next higher, rate.

    An arm whose best rate is the last of the grid stays there. On the seeds of the first look of the other arms. The
    test bed is examined there as in a record: ``bed`` says what is wrong with it, and the verdict is that.
    """
    rates, rows = sorted(float(r) for r in next(iter(tuned["curves"].values()))), []
    chosen = list(tuned["best"])
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
        claim = beds.judge(job.module, Results(found.arms | ran.arms, (), found.d_star), smoke=False)
        part = claim.primary
        if part is None:  # as the record itself: the data have not what the claim is about
            print(f"at the next {side} rates {own}: {claim.statement}", flush=True)
            continue
        rows.append({"side": side, "rates": own, "verdict": claim.verdict, "mean": part.mean, "low": part.low,
                     "high": part.high, "n": part.n, "bed": list(claim.bed)})  # fmt: skip
        wrong = "".join(f"; {problem}" for problem in claim.bed)
        print(f"at the next {side} rates {own}: {claim.verdict}; {part}{wrong}", flush=True)
    return results.plain(rows)
