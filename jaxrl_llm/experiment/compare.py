"""The methods of one family side by side: one bed, one budget, rates tuned alike, one measurement, one figure.

Every method is held against the baseline over paired seeds, with Holm's correction over all of them, on a bed whose
baseline is seen to learn.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, claims, cli, doctor, locate, plots, recipes, results
from jaxrl_llm.experiment.claims import Judged
from jaxrl_llm.experiment.evidence import beds, provenance, standard, store, tuning, verdicts
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.run import bench, compile_cache, flags
from jaxrl_llm.run.records import record
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan

METRICS = ("eval/accuracy", "eval/tokens", "eval/wrong_tokens")
PANELS = ("eval/accuracy", "eval/tokens", "policy/entropy")


@dataclasses.dataclass(frozen=True)
class Common(recipes.OnlineSettings):
    """What all methods share; whatever else a method has stays as its own file sets it."""

    steps: int = 60
    learning_rate: float = 2e-4
    eval_every: int = 20
    data: str = "countdown"
    levels: tuple[int, ...] = (3,)
    prompts_per_step: int = 8
    max_new_tokens: int = 18
    train_problems: int = 2048
    eval_problems: int = 192
    bed: str = ""  # of experiments/beds, whose problems and sizes are taken; empty: what the family and the flags say
    tune: tuple[float, ...] = ()  # learning rates: every method has its best by training reward; none: --learning-rate
    methods: tuple[str, ...] = ()  # experiment:arm or experiment; none: every experiment of the family
    baseline: str = ""  # experiment:arm that comes first; empty: the first arm of the first method
    seeds: int = 8
    smoke: bool = False  # three steps, two seeds, few problems
    out: str = ""  # folder of the results; empty: runs/compare/<family>
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start
    fresh: bool = False  # do not reuse the finished methods of an earlier comparison in that folder
    record: bool = False  # also copy results and figure to results/compare/


SMOKE = {
    "steps": 3, "eval_every": 3, "prompts_per_step": 2, "group_size": 2, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 2, "seeds": 2,
}  # fmt: skip
OWN = ("bed", "tune", "methods", "baseline", "seeds", "smoke", "out", "fresh", "record", "compile_cache")


def method_arm(module: ModuleType) -> str:
    """The arm of the paper's method: ``METHOD``, that with the name of the file, else the first after the baseline."""
    slug = module.__name__.split(".")[-1]
    if hasattr(module, "METHOD"):
        return module.METHOD
    return slug if slug in module.ARMS else list(module.ARMS)[min(1, len(module.ARMS) - 1)]


def families() -> list[str]:
    """The families that have experiments."""
    folders = sorted(p.parent.name for p in (locate.root() / "experiments").glob("*/__init__.py"))
    return [name for name in folders if name not in ("parts", "beds")]  # test beds compare nothing


def usage() -> str:
    """What ``compare --help`` says without a family: the families, and the flags that all have."""
    return f"families: {', '.join(families())}\n" + flags.listed(Common, "jaxrl papers compare FAMILY")


def experiments_of(family: str) -> dict[str, pathlib.Path]:
    """The experiment files of a family by their names.

    Raises:
      UserError: for a family that does not exist.
    """
    folder = locate.root() / "experiments" / family
    files = {p.stem: p for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")}
    if not files:
        raise UserError(f"no family {family!r} with experiments; the families are {', '.join(families())}")
    return files


def of_bed(name: str) -> tuple[dict[str, Any], beds.Bed]:
    """What methods share on a test bed: its problems, sizes and rate; and its chance and ceiling.

    Raises:
      UserError: for a bed that does not exist, or that has no problems to sample and verify.
    """
    found = experiments_of("beds")
    if name not in found:
        raise UserError(f"--bed {name}: the test beds are {', '.join(found)}")
    module = doctor.load(found[name])
    settings = arms.preset(module, smoke=False, model=module.Settings().model)
    if not isinstance(settings, recipes.OnlineSettings):
        raise UserError(f"--bed {name} has no problems to sample and verify; choose another")
    names = [f.name for f in dataclasses.fields(Common) if f.name not in OWN]
    return {name: getattr(settings, name) for name in names}, beds.bed_of(module)


def first_settings(family: str, *, smoke: bool, bed: str = "") -> Common:
    """What is compared where no flag says otherwise: ``COMPARE`` of the family's package over the common settings.

    Args:
      bed: in the place of the family's.
    """
    module = doctor.load(next(iter(experiments_of(family).values())))
    own = getattr(sys.modules[module.__package__ or ""], "COMPARE", {})
    bed = bed or own.get("bed", "")
    common = arms.override(Common(), of_bed(bed)[0] if bed else {}, f"--bed {bed}")
    common = dataclasses.replace(arms.override(common, own, f"COMPARE of {family}"), bed=bed)
    return dataclasses.replace(common, **SMOKE) if smoke else common


def chosen(family: str, methods: tuple[str, ...], baseline: str = "") -> list[tuple[ModuleType, str]]:
    """Modules and arms: the baseline, then the methods.

    Raises:
      UserError: for a family, an experiment or an arm that does not exist.
    """
    files = experiments_of(family)

    def find(word: str, flag: str) -> tuple[ModuleType, str]:
        slug, _, arm = word.partition(":")
        if slug not in files:
            raise UserError(f"{flag} {word}: the experiments of {family} are {', '.join(files)}")
        module = doctor.load(files[slug])
        arms.check_slots(module)
        arm = arm or method_arm(module)
        if arm not in module.ARMS:
            raise UserError(f"{flag} {word}: the arms of {slug} are {', '.join(module.ARMS)}")
        return module, arm

    found = [find(word, "--methods") for word in methods or files]
    first = found[0][0]
    return [find(baseline, "--baseline") if baseline else (first, next(iter(first.ARMS))), *found]


def prepare(module: ModuleType, arm: str, common: Common) -> tuple[Any, Plan]:
    """Settings and plan of one method under the common settings, measured on the common held-out problems.

    Raises:
      UserError: where the experiment has other settings than those that are shared, or does not take them.
    """
    settings = arms.override(module.Settings(), getattr(module, "EMBEDDED", {}), "EMBEDDED")
    settings = arms.override(settings, module.SMOKE if common.smoke else {}, "SMOKE")
    settings = arms.override(settings, module.ARMS[arm], f"arm {arm!r}")
    if not isinstance(settings, recipes.OnlineSettings):
        raise UserError("has no problems to sample and verify")
    shared = {f.name: getattr(common, f.name) for f in dataclasses.fields(common) if f.name not in OWN}
    settings = arms.override(settings, shared, "the comparison")
    cli.check_sizes(settings, 0)
    plan = shortened(cli.in_parts(module.build(settings), settings), common.steps)
    if _is_plain(plan, common):
        plan = plan._replace(measure=recipes.make_measure(common))
    arms.trace(plan)
    return settings, plan


def shortened(plan: Plan, steps: int) -> Plan:
    """The plan with its stages of sampling in the same proportions, but of no more than ``steps`` iterations in all.

    An experiment counts the steps of one stage; here a method of three stages shall not train three times as long.
    """
    online = [stage.steps for stage in plan.stages if isinstance(stage.method, Online)]
    if sum(online) <= steps:
        return plan
    if len(online) > steps:
        raise UserError(f"--steps {steps} is less than one for each of {len(online)} stages")
    spare = np.cumsum([n - 1 for n in online]) / max(sum(online) - len(online), 1)
    ends = np.rint(spare * (steps - len(online))).astype(int)  # one step for each stage, the rest by proportion
    parts = iter(1 + np.diff(ends, prepend=0))
    return plan._replace(
        stages=tuple(s._replace(steps=int(next(parts))) if isinstance(s.method, Online) else s for s in plan.stages)
    )


def _is_plain(plan: Plan, common: Common) -> bool:
    """Whether an arm's parameters are those of the model alone.

    With more to them (heads, codes, two models) only its own measurement knows what samples: on the same held-out
    problems, for it has the same settings.
    """
    params = jax.eval_shape(plan.init, jax.eval_shape(lambda: jax.random.key(0)))
    return jax.tree.structure(params) == jax.tree.structure(recipes.bench(common).model.params)


def tuned_by(common: Common, module: ModuleType, arm: str, folder: pathlib.Path) -> tuple[dict[str, Any], Any, Plan]:
    """The rates of ``--tune`` for one method, tried on seeds of their own; its settings and plan at the best of them.

    By training reward, from seed 1000 on; no evaluation problem is looked at.
    """
    resolved, built = {}, {}
    for rate in common.tune:
        name = f"{method_name(module, arm)}@{rate:g}"
        resolved[name], built[name] = prepare(module, arm, dataclasses.replace(common, learning_rate=rate))
    tried = {name: tuning.tried(plan) for name, plan in built.items()}
    identities = store.identities(module, resolved, tried)
    found = tuning.best(common, folder, "", common.tune, resolved, built, identities, rising=True)
    ((name, rate),) = found["best"].items()
    return found, resolved[f"{name}@{rate:g}"], built[f"{name}@{rate:g}"]


def method_name(module: ModuleType, arm: str) -> str:
    """The name of a method in tables and figures."""
    return f"{module.__name__.split('.')[-1]}.{arm}"


def judged(found: Results, bed: beds.Bed) -> tuple[tuple[Judged, ...], list[str]]:
    """Every method against the baseline, the first of them, with Holm's correction; and what is wrong with the bed."""
    baseline, *others = found.arms
    metric = METRICS[0]
    steps, values = found.curve(baseline, metric)
    ceiling = beds.ceiling_of(metric, bed)
    wrong = verdicts.gates(steps, values, ceiling=ceiling, chance=bed.chance) if len(steps) > 2 else [
        f"{len(steps)} evaluations show no learning; give more --steps, or a smaller --eval-every"
    ]  # fmt: skip
    parts = [claims.greater(found, metric, name, baseline) for name in others if metric in found.arms[name].metrics]
    return claims.corrected(parts), [f"{metric} of {baseline}: {problem}" for problem in wrong]


def verdict_table(parts: tuple[Judged, ...], found: Results, edge: Collection[str] = ()) -> str:
    """Markdown: one row a method, its difference with Holm's interval, and the rate at which it was run.

    Args:
      edge: methods of which that rate is the lowest or the highest that was tried.
    """
    lines = ["| method | difference | verdict | learning rate |", "|---|---|---|---|"]
    for part in sorted(parts, key=lambda part: -part.mean):
        said = f"{part.mean:+.3g} [{part.low:+.3g}, {part.high:+.3g}], {100 * (1 - part.level):.3g} % interval"
        small = ", below d*" * part.small
        rate = f"{found.arms[part.arm].settings['learning_rate']:g}{', an end of the grid' * (part.arm in edge)}"
        lines.append(f"| {part.arm} | {said} | {part.verdict}{small} | {rate} |")
    return "\n".join(lines) + "\n"


def read_common(family: str, arguments: list[str]) -> Common:
    """The shared settings of a command; a whole comparison measures as a record does, where no flag says otherwise."""
    given = flags.named(arguments)
    start = first_settings(family, smoke="--smoke" in arguments, bed=given.get("bed", ""))
    if "data" in given and not bench.is_generated(given["data"]):
        if "bed" in given:
            raise UserError(f"--bed {given['bed']} has problems of its own; drop it, or --data {given['data']}")
        start = dataclasses.replace(start, bed="")
    prog = f"python -m jaxrl_llm.experiment compare {family}"
    common = flags.read(Common, arguments, prog=prog, default=start)
    cli.check_run(common)
    if common.tune:
        common = dataclasses.replace(common, tune=tuning.grid_of(common.tune))
    common = common if common.smoke else standard.widened(common, set(given))
    cli.check_sizes(common, 0)
    return common


def tune_all(
    common: Common, modules: dict[str, tuple[ModuleType, str]], resolved: dict[str, Any], built: dict[str, Plan],
    left_out: dict[str, str], folder: pathlib.Path,
) -> dict[str, Any]:  # fmt: skip
    """What was tried for every method that trains; settings and plans become those of the best rate.

    A method that holds at no rate is left out, with the reason.

    Raises:
      UserError: where that is the first, with which all others are compared.
    """
    tuned, baseline = {}, next(iter(built))
    for name in [name for name, plan in built.items() if plan.stages]:
        try:
            tuned[name], resolved[name], built[name] = tuned_by(common, *modules[name], folder)
        except tuning.NoRate as error:
            if name == baseline:
                raise
            left_out[name] = str(error)
            print(f"left out: {name}: {error}")
            del resolved[name], built[name]
    return tuned


def compare(family: str, arguments: list[str]) -> Results:
    """Runs the comparison and writes ``results.json``, ``table.md`` and ``plot.png``."""
    common = read_common(family, arguments)
    compile_cache.enable(common.compile_cache)
    resolved, built, modules, left_out = {}, {}, {}, {}
    for module, arm in chosen(family, common.methods, common.baseline):
        name = method_name(module, arm)
        try:
            resolved[name], built[name] = prepare(module, arm, common)
            modules[name] = module, arm
        except (UserError, ValueError) as error:
            left_out[name] = str(error).splitlines()[0]
            print(f"left out: {name}: {left_out[name]}")
    if not built:
        raise UserError(f"no method of {family} takes the common settings; see the lines above")
    out = cli.open_folder(common.out or f"runs/{'smoke/' if common.smoke else ''}compare/{family}")
    tuned = tune_all(common, modules, resolved, built, left_out, out / "arms") if common.tune else {}
    tail = standard.tail_of(built, resolved)
    identities = {
        name: store.identity(modules[name][0], resolved[name], plan, arms.trace(plan), tail=tail)
        for name, plan in built.items()
    }
    found = store.run_arms(common, resolved, built, identities, list(range(common.seeds)), out / "arms", tail=tail)
    parts, wrong = judged(found, of_bed(common.bed)[1] if common.bed else beds.Bed())
    _write(family, arguments, common, found, parts, wrong, tail, out, {"left_out": left_out, "tuned": tuned})
    return found


def _write(
    family: str, arguments: list[str], common: Common, found: Results, parts: tuple[Judged, ...], wrong: list[str],
    tail: int, out: pathlib.Path, more: dict[str, Any],
) -> None:  # fmt: skip
    told = [f.name for f in dataclasses.fields(common) if f.name not in ("out", "fresh", "record", "compile_cache")]
    whole = {
        "family": family,
        "command": cli.said(f"python -m jaxrl_llm.experiment compare {family}", arguments),
        **provenance.made(locate.root()),
        "versions": record.versions(),
        "settings": results.plain({name: getattr(common, name) for name in told}),
        "tail": tail,
        "bed": wrong,
        "parts": results.plain([part._asdict() for part in parts]),
        "arms": results.plain({k: dataclasses.asdict(v) for k, v in found.arms.items()}),
    } | results.plain(more)
    record.write_json(out / "results.json", whole)
    said = f"{verdicts.INVALID}: {'; '.join(wrong)}\n" if wrong else ""
    edge = [name for one in more["tuned"].values() for name in one["at_the_edge"]]
    table = f"{results.table(found, METRICS)}\n{said}{verdict_table(parts, found, edge)}"
    (out / "table.md").write_text(table)
    where = f"bed {common.bed}" if common.bed else common.data
    caption = f"{common.seeds} seeds, {common.eval_problems} problems x {common.eval_samples} samples, "
    caption += f"mean of the last {tail} evaluations; learning rates {'tuned equally' if common.tune else 'of the bed'}"
    caption += f"; {verdicts.INVALID}" if wrong else ""
    title = f"{family}: {where}, {common.steps} steps"
    plots.plot_rows(out / "plot.png", found, PANELS, title, parts, caption)
    if common.record:
        cli.keep_copy(whole, out / "plot.png", pathlib.Path("results/compare"), family)
    print(f"\n{table}\nresults in {out}")
