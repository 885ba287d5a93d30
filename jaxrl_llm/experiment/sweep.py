"""One setting swept equally over every arm of an experiment, judged by what training itself shows."""

import dataclasses
import pathlib
import warnings
from types import ModuleType
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, doctor, results
from jaxrl_llm.experiment.evidence import store
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.metrics.intervals import Interval
from jaxrl_llm.run import compile_cache, flags
from jaxrl_llm.run.records import record

FIRST_SEED = 1000  # no seed of a record is used, and no evaluation problem is looked at


@dataclasses.dataclass(frozen=True)
class Options:
    """A sweep: every arm with every value, each with seeds of its own."""

    values: tuple[str, ...] = ()  # of the swept setting, for example 1e-4 3e-4 1e-3
    field: str = "learning_rate"
    arm: tuple[str, ...] = ()  # arms to sweep; none: all
    metric: str = "reward/mean"  # of training; its mean over the second half of a run is compared, more is better
    seeds: int = 3  # seeds 1000, 1001, ...
    smoke: bool = False
    out: str = ""  # folder of the results; empty: runs/sweep/<experiment>
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start
    fresh: bool = False  # do not reuse the finished arms of an earlier sweep in that folder
    record: bool = False  # also copy the table to results/sweeps/


def usage() -> str:
    """What ``sweep --help`` says without a file: what a file is, and the flags."""
    what = "FILE: an experiment, for example experiments/policy_gradient/dr_grpo.py\n"
    return what + flags.listed(Options, "jaxrl papers sweep FILE")


def nothing(params: Any, key: Any) -> dict:
    """Measures nothing: the choice must not see what the claim is judged on."""
    return {}


def read_values(settings: Any, options: Options) -> list[float | int]:
    """The values as numbers of the field's kind.

    Raises:
      UserError: for a field that is no number, a value that is none, or fewer than two values.
    """
    numbers = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    numbers = {k: v for k, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if options.field not in numbers:
        raise UserError(f"--field {options.field}: the settings that are numbers are {', '.join(numbers)}")
    kind = type(numbers[options.field])
    try:
        values = [kind(word) for word in options.values]
    except ValueError as error:
        raise UserError(f"--values {' '.join(options.values)}: {options.field} is of type {kind.__name__}") from error
    if len(set(values)) < len(values) or len(values) < 2:
        raise UserError("--values needs at least two, all different, for example --values 1e-4 3e-4 1e-3")
    return values


def second_half(found: Results, name: str, metric: str) -> np.ndarray:
    """The mean of a training curve over the second half of its points, ``[seeds]``; NaN for a seed that diverged.

    What such a seed had shown before it failed says nothing for the rate at which it did.

    Raises:
      UserError: for a metric that this arm does not train with.
    """
    if metric not in found.arms[name].curves:
        raise UserError(f"--metric {metric}: training records {', '.join(found.arms[name].curves)}")
    _, values = found.curve(name, metric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a half without any value has no mean
        means = np.nanmean(values[:, values.shape[1] // 2 :], axis=1)
    failed = np.isin(found.arms[name].seeds, list(found.diverged(name)))
    return np.where(failed, np.nan, means)


def best_of(scores: dict[str, dict[str, Interval]], seeds: int) -> str:
    """The value with the best mean over all arms, of those at which no seed of any arm diverged; empty: there is none.

    >>> from jaxrl_llm.metrics.intervals import mean_interval
    >>> best_of({"arm": {"0.1": mean_interval([0.9]), "0.01": mean_interval([0.5, 0.6])}}, 2)
    '0.01'
    """
    values = next(iter(scores.values()))
    whole = {v: float(np.mean([row[v].mean for row in scores.values()])) for v in values
             if all(row[v].n == seeds for row in scores.values())}  # fmt: skip
    return max(whole, key=lambda v: whole[v], default="")


def table(scores: dict[str, dict[str, Interval]]) -> str:
    """Markdown: one row an arm, one column a value, and the row of means over arms."""
    values = list(next(iter(scores.values())))
    lines = ["| arm | " + " | ".join(values) + " |", "|---" * (len(values) + 1) + "|"]
    for name, row in scores.items():
        lines.append(f"| {name} | " + " | ".join(results.cell(row[v]) for v in values) + " |")
    means = [f"{np.mean([row[v].mean for row in scores.values()]):.4g}" for v in values]
    return "\n".join([*lines, "| all arms | " + " | ".join(means) + " |"]) + "\n"


def sweep(path: str, arguments: list[str]) -> dict[str, dict[str, Interval]]:
    """Runs the sweep, writes ``results.json`` and ``table.md``, and says which value is best over all arms."""
    module: ModuleType = doctor.load(path)
    arms.check_slots(module)
    prog = f"python -m jaxrl_llm.experiment sweep {path}"
    options = flags.read(Options, arguments, prog=prog)
    cli.check_run(options)
    compile_cache.enable(options.compile_cache)
    base = arms.preset(module, smoke=options.smoke, model=module.Settings().model)
    resolved = {}
    for value in read_values(base, options):
        for name, settings in arms.resolve(module, base, options.arm).items():
            if getattr(settings, options.field) != getattr(base, options.field):
                raise UserError(f"arm {name} sets {options.field} itself; sweep the other arms with --arm")
            resolved[f"{name}@{value:g}"] = dataclasses.replace(settings, **{options.field: value})
    built, reads = cli.build_arms(module, resolved)
    unread = [name for name, fields in reads.items() if options.field not in fields]
    if unread:
        raise UserError(f"--field {options.field} is not read by arm {unread[0].split('@')[0]}; sweep another one")
    slug = cli.command_name(module).split(".")[-1]
    out = cli.open_folder(options.out or f"runs/{'smoke/' if options.smoke else ''}sweep/{slug}")
    built = {name: plan._replace(measure=plan.validate or nothing) for name, plan in built.items()}
    seeds = list(range(FIRST_SEED, FIRST_SEED + options.seeds))
    identities = store.identities(module, resolved, built)
    found = store.run_arms(options, resolved, built, identities, seeds, out / "arms")
    scores: dict[str, dict[str, Interval]] = {}
    for key in resolved:
        name, value = key.split("@")
        scores.setdefault(name, {})[value] = results.interval(second_half(found, key, options.metric))
    whole = {
        "command": cli.said(prog, arguments),
        "versions": record.versions(),
        "settings": results.plain({f.name: getattr(base, f.name) for f in dataclasses.fields(base)}),
        "metric": f"{options.metric}, mean over the second half of training",
        "scores": {name: {v: results.plain(x._asdict()) for v, x in row.items()} for name, row in scores.items()},
    }
    record.write_json(out / "results.json", whole)
    text = table(scores)
    (out / "table.md").write_text(text)
    if options.record:
        folder = pathlib.Path("results/sweeps")
        folder.mkdir(parents=True, exist_ok=True)
        record.write_json(folder / f"{slug}.json", whole)
    best = best_of(scores, options.seeds)
    found_best = f"{options.field} {best} is best over these arms" if best else "a seed diverged at every value"
    print(f"\n{text}\n{options.metric}: {found_best}; the file has {getattr(base, options.field):g}; results in {out}")
    return scores
