"""The methods of one family side by side: one task, one budget, one measurement, one figure."""

import dataclasses
import pathlib
import sys
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, doctor, locate, plots, recipes, results
from jaxrl_llm.experiment.evidence import store
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.run import compile_cache, flags
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
OWN = ("methods", "baseline", "seeds", "smoke", "out", "fresh", "record", "compile_cache")


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


def first_settings(family: str, *, smoke: bool) -> Common:
    """What is compared where no flag says otherwise: ``COMPARE`` of the family's package over the common settings."""
    module = doctor.load(next(iter(experiments_of(family).values())))
    own = getattr(sys.modules[module.__package__ or ""], "COMPARE", {})
    common = arms.override(Common(), own, f"COMPARE of {family}")
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


def compare(family: str, arguments: list[str]) -> Results:
    """Runs the comparison and writes ``results.json``, ``table.md`` and ``plot.png``."""
    prog = f"python -m jaxrl_llm.experiment compare {family}"
    start = first_settings(family, smoke="--smoke" in arguments)
    common = flags.read(Common, arguments, prog=prog, default=start)
    cli.check_run(common)
    compile_cache.enable(common.compile_cache)
    cli.check_sizes(common, 0)
    resolved, built, identities, left_out = {}, {}, {}, {}
    for module, arm in chosen(family, common.methods, common.baseline):
        name = f"{module.__name__.split('.')[-1]}.{arm}"
        try:
            resolved[name], built[name] = prepare(module, arm, common)
        except (UserError, ValueError) as error:
            left_out[name] = str(error).splitlines()[0]
            print(f"left out: {name}: {left_out[name]}")
            continue
        traced = arms.trace(built[name])
        identities[name] = store.identity(module, resolved[name], built[name], traced)
    if not built:
        raise UserError(f"no method of {family} takes the common settings; see the lines above")
    out = cli.open_folder(common.out or f"runs/{'smoke/' if common.smoke else ''}compare/{family}")
    found = store.run_arms(common, resolved, built, identities, list(range(common.seeds)), out / "arms")
    told = [f.name for f in dataclasses.fields(common) if f.name not in ("out", "fresh", "record", "compile_cache")]
    settings = results.plain({name: getattr(common, name) for name in told})
    whole = {
        "family": family,
        "command": cli.said(prog, arguments),
        "versions": record.versions(),
        "settings": settings,
        "left_out": left_out,
        "arms": results.plain({k: dataclasses.asdict(v) for k, v in found.arms.items()}),
    }
    record.write_json(out / "results.json", whole)
    table = results.table(found, METRICS)
    (out / "table.md").write_text(table)
    plots.plot_rows(out / "plot.png", found, PANELS, f"{family}: {common.data}, {common.steps} steps")
    if common.record:
        cli.keep_copy(whole, out / "plot.png", pathlib.Path("results/compare"), family)
    print(f"\n{table}\nresults in {out}")
    return found
