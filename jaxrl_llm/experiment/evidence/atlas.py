"""Maps of the atlas: methods by the dose of a disease, on several base models; kept cell by cell, drawn as far as run.

A bed names its map as ``MAP``: a module with ``Settings``, ``EMBEDDED``, ``SMOKE``, ``METHODS`` (settings to plan, by
name), ``BASELINE`` (one of them), ``KNOB`` (a setting) with ``DOSES``, ``BASES`` (models), ``METRIC`` and ``TITLE``;
for example ``experiments/beds/parts/staleness_map.py``.
"""

import dataclasses
import json
import os
import pathlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, locate, results
from jaxrl_llm.experiment.evidence import provenance, store, verdicts
from jaxrl_llm.experiment.evidence.verdicts import Bounds
from jaxrl_llm.run import compile_cache, flags
from jaxrl_llm.run.records import record


@dataclasses.dataclass(frozen=True)
class Options:
    """A part of the grid, or all of it; finished cells are not run again."""

    methods: tuple[str, ...] = ()  # none: all
    doses: tuple[float, ...] = ()  # none: all
    bases: tuple[str, ...] = ()  # none: all
    seeds: int = 16  # seeds 0, 1, ... of every cell
    smoke: bool = False  # two steps
    join: tuple[str, ...] = ()  # maps made elsewhere, whose cells this one takes in; nothing is run then
    out: str = ""  # folder of map and figure; empty: results/atlas, and its page in docs/atlas
    fresh: bool = False  # train finished seeds again
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start


class Cell(NamedTuple):
    """One method at one dose on one base."""

    method: str
    dose: float
    base: str


def key(cell: Cell) -> str:
    """The name of a cell in a map.

    >>> key(Cell("grpo", 8.0, "nano"))
    'nano/grpo/8'
    """
    return f"{cell.base}/{cell.method}/{cell.dose:g}"


def cells(module: ModuleType, options: Options) -> list[Cell]:
    """The chosen part of the grid: the baseline first at every dose, so that a slice can be read.

    Raises:
      UserError: for a name or a dose that the map does not have.
    """
    chosen = {}
    for name, given, there in (
        ("methods", options.methods, tuple(module.METHODS)),
        ("doses", options.doses, module.DOSES),
        ("bases", options.bases, module.BASES),
    ):
        if wrong := [x for x in given if x not in there]:
            raise UserError(f"--{name} {wrong[0]}: this map has {', '.join(map(str, there))}")
        chosen[name] = [x for x in there if x in given or not given]
    methods = sorted(chosen["methods"], key=lambda name: name != module.BASELINE)
    return [Cell(m, float(d), b) for b in chosen["bases"] for d in chosen["doses"] for m in methods]


def settings_of(module: ModuleType, cell: Cell, *, smoke: bool) -> Any:
    """The settings of a cell, with the evaluation of a record.

    Raises:
      UserError: where the map has no such setting.
    """
    from jaxrl_llm.experiment.evidence import standard  # which needs the command line of the experiments

    base = dataclasses.replace(arms.preset(module, smoke=smoke, model=cell.base), model=cell.base)
    kind = type(getattr(base, module.KNOB))
    dosed = dataclasses.replace(base, **{module.KNOB: kind(cell.dose)})
    return dosed if smoke else standard.widened(dosed, set())


def differences(kept: dict[str, Any], cell: Cell, baseline: str) -> Bounds | None:
    """A method less the baseline at the same dose on the same base, paired by seed; None without two common seeds.

    Cells of two devices are not compared: the same seed draws other samples there.
    """
    pair = [kept["cells"].get(key(cell._replace(method=name))) for name in (cell.method, baseline)]
    if cell.method == baseline or None in pair or len({one["versions"]["device"] for one in pair}) > 1:
        return None
    values = [dict(zip(one["seeds"], one["values"], strict=True)) for one in pair]
    common = sorted(values[0].keys() & values[1].keys())
    paired = np.asarray([values[0][s] - values[1][s] for s in common], np.float64)
    paired = paired[np.isfinite(paired)]
    return verdicts.bounds(paired) if paired.size > 1 else None


def cell_of(name: str) -> Cell:
    """The inverse of ``key``.

    >>> cell_of("nano/grpo/8")
    Cell(method='grpo', dose=8.0, base='nano')
    """
    base, method, dose = name.split("/")
    return Cell(method, float(dose), base)


def agreement(kept: dict[str, Any]) -> list[str]:
    """For every method and dose that ran on two bases: whether the signs agree, each with its interval."""
    baseline, lines = kept["baseline"], []
    found = {cell: seen for name in kept["cells"] if (seen := differences(kept, cell := cell_of(name), baseline))}
    for cell in sorted({(c.method, c.dose) for c in found}):
        both = {b: found[Cell(*cell, b)] for b in kept["bases"] if Cell(*cell, b) in found}
        if len(both) < 2:
            continue
        signs = {0 if x.low <= 0 <= x.high else int(np.sign(x.mean)) for x in both.values()}
        said = "agree" if len(signs) == 1 else "differ, one being open" if 0 in signs else "differ"
        each = ", ".join(f"{b} {interval(x)}" for b, x in both.items())
        lines.append(f"- {cell[0]} at {kept['knob']} {cell[1]:g}: signs {said} ({each})")
    return lines


def interval(seen: Bounds) -> str:
    """A difference with its interval and seeds."""
    return f"{seen.mean:+.3f} [{seen.low:+.3f}, {seen.high:+.3f}], n={seen.n}"


def run(
    module: ModuleType, options: Options, path: pathlib.Path, folder: pathlib.Path, command: str = ""
) -> dict[str, Any]:
    """Runs the chosen cells one after another and keeps the map after each; what is there for these seeds is not run.

    Args:
      path: of the map.
      folder: of the stored seeds.
      command: that asks for them; each cell has a commit and a day of its own, the map those of the last.

    Raises:
      UserError: for a part of the grid that there is not.
    """
    from jaxrl_llm.experiment.evidence import standard  # as above

    chosen, seeds = cells(module, options), list(range(options.seeds))
    kept = opened(module, path)
    for number, cell in enumerate(chosen, 1):
        settings = settings_of(module, cell, smoke=options.smoke)
        plan = module.METHODS[cell.method](settings)
        tail = standard.tail_of({"cell": plan}, {"cell": settings})
        identity = store.identity(module, settings, plan, arms.trace(plan), tail=tail)
        there = kept["cells"].get(key(cell), {})
        if there.get("identity") == identity and set(seeds) <= set(there["seeds"]) and not options.fresh:
            continue
        print(f"cell {key(cell)} ({number}/{len(chosen)}), {len(seeds)} seeds", flush=True)
        ran, _ = store.seeds_of(plan, settings, seeds, folder / identity, fresh=options.fresh, tail=tail)
        kept["cells"][key(cell)] = results.plain({
            "identity": identity, "seeds": ran.seeds, "values": ran.metrics[module.METRIC],
            "start": float(np.nanmean(np.asarray(ran.curves[module.METRIC]["values"], np.float64)[:, 0])),
            "learning_rate": settings.learning_rate, "problems": getattr(settings, "eval_problems", None),
            "samples": getattr(settings, "eval_samples", None), "tail": tail, "updates": ran.updates,
            "rollouts": ran.rollouts, "seconds": ran.seconds, "on": provenance.today(),
            "commit": provenance.commit(pathlib.Path(module.__file__ or "").parent), "versions": record.versions(),
        })  # fmt: skip
        kept |= {"command": command} | provenance.made(locate.root())
        path.parent.mkdir(parents=True, exist_ok=True)
        record.write_json(path, kept)
    return kept


def opened(module: ModuleType, path: pathlib.Path) -> dict[str, Any]:
    """The map as far as it was run, with what its module says of it now."""
    kept = json.loads(path.read_text()) if path.is_file() else {"cells": {}}
    return kept | {
        "title": module.TITLE, "knob": module.KNOB, "metric": module.METRIC, "baseline": module.BASELINE,
        "doses": list(module.DOSES), "bases": list(module.BASES), "methods": list(module.METHODS),
    }  # fmt: skip


def joined(module: ModuleType, path: pathlib.Path, others: tuple[str, ...], command: str = "") -> dict[str, Any]:
    """The map with the cells of others, of the same knob and metric; of two with the same name that with more seeds.

    Raises:
      UserError: for a file that is no such map.
    """
    kept = opened(module, path)
    for other in others:
        try:
            there = json.loads(pathlib.Path(other).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"--join {other} cannot be read ({error}); give the JSON of a map") from error
        same = ("knob", "metric", "baseline")
        if not isinstance(there, dict) or any(there.get(name) != kept[name] for name in same):
            raise UserError(f"--join {other} is no map of {kept['metric']} by {kept['knob']}; give one of this file")
        for name, cell in there["cells"].items():
            if len(cell["seeds"]) > len(kept["cells"].get(name, {"seeds": ()})["seeds"]):
                kept["cells"][name] = cell
    kept |= {"command": command} | provenance.made(locate.root())
    path.parent.mkdir(parents=True, exist_ok=True)
    record.write_json(path, kept)
    return kept


def page(kept: dict[str, Any], figure: str, module: ModuleType) -> str:
    """The page of a map: what was run, a table by base, what a user can act on, and whether bases agree."""
    done, whole = len(kept["cells"]), len(kept["doses"]) * len(kept["bases"]) * len(kept["methods"])
    seeds = sorted({len(one["seeds"]) for one in kept["cells"].values()})
    lines = [f"# {kept['title']}", "", (module.__doc__ or "").split("\n\n", 1)[0], ""]
    if not done:
        return "\n".join([*lines, "Nothing of it has been run.", ""])
    number = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    one = next(iter(kept["cells"].values()))
    devices = " and ".join(sorted({cell["versions"]["device"] for cell in kept["cells"].values()}))
    lines += [f"{done} of {whole} cells have been run ({devices}), {number} seeds each. {kept['metric']}, mean of the "
              f"last {one['tail']} evaluations on {one['problems']} problems x {one['samples']} samples; "
              f"{one['updates']} updates and {one['rollouts']:,} rollouts a seed; learning rate "
              f"{one['learning_rate']:g} for all, not tuned. Differences are to *{kept['baseline']}* at the same "
              f"{kept['knob']}, paired by seed, with 95 % intervals that are not corrected for their number; empty: "
              "not run."]  # fmt: skip
    lines += ["", f"![the map]({figure})"]
    for base in kept["bases"]:
        here = {cell: kept["cells"][name] for name in kept["cells"] if (cell := cell_of(name)).base == base}
        if not here:
            continue
        doses = sorted({cell.dose for cell in here})
        columns = " | ".join(f"{kept['knob']} {dose:g}" for dose in doses)
        lines += ["", f"## {base}", "", f"| method | {columns} |", "|---" * (len(doses) + 1) + "|"]
        for method in kept["methods"]:
            row = [_cell_text(kept, Cell(method, dose, base)) for dose in doses]
            if any(row):
                lines.append(f"| {method} | {' | '.join(row)} |")
        lines += ["", *_actions(kept, base, doses)]
    same = agreement(kept)
    lines += ["", "## Do the signs hold on the other base?", "", *(same or ["Not known: no cell ran on two bases."])]
    return "\n".join(lines) + "\n"


def _cell_text(kept: dict[str, Any], cell: Cell) -> str:
    one = kept["cells"].get(key(cell))
    if one is None:
        return ""
    values = np.asarray([np.nan if v is None else v for v in one["values"]], np.float64)
    seen = differences(kept, cell, kept["baseline"])
    return f"{np.nanmean(values):.3f}" + (f" ({interval(seen)})" if seen else f" (n={len(values)})")


def _actions(kept: dict[str, Any], base: str, doses: list[float]) -> list[str]:
    """By dose: what helps, what hurts, and what cannot be told apart."""
    lines = []
    for dose in doses:
        seen = {m: differences(kept, Cell(m, dose, base), kept["baseline"]) for m in kept["methods"]}
        seen = {m: x for m, x in seen.items() if x is not None}
        if not seen:
            continue
        parts = {
            "helps": [m for m, x in seen.items() if x.low > 0],
            "hurts": [m for m, x in seen.items() if x.high < 0],
            "open": [m for m, x in seen.items() if x.low <= 0 <= x.high],
        }
        said = "; ".join(f"{word}: {', '.join(names)}" for word, names in parts.items() if names)
        lines.append(f"- {kept['knob']} {dose:g}: {said}")
    return lines


def plot(path: pathlib.Path, kept: dict[str, Any]) -> None:
    """One panel a base: every method that was run over the doses that were, with intervals; the title says n."""
    plt = record.pyplot()
    ran = [base for base in kept["bases"] if any(cell_of(name).base == base for name in kept["cells"])]
    figure, axes = plt.subplots(1, max(1, len(ran)), figsize=(6.2 * max(1, len(ran)), 4.4), layout="constrained",
                                squeeze=False)  # fmt: skip
    for axis, base in zip(axes[0], ran, strict=False):
        numbers = set()
        for k, method in enumerate(kept["methods"]):
            here = {c.dose: kept["cells"][name] for name in kept["cells"]
                    if (c := cell_of(name)).base == base and c.method == method}  # fmt: skip
            if not here:
                continue
            doses = sorted(here)
            found = [verdicts.bounds([v for v in here[d]["values"] if v is not None]) for d in doses]
            numbers |= {x.n for x in found}
            ends = np.nan_to_num([[x.mean - x.low for x in found], [x.high - x.mean for x in found]])
            shifted = [kept["doses"].index(d) + 0.06 * (k - len(kept["methods"]) / 2) for d in doses]
            axis.errorbar(shifted, [x.mean for x in found], yerr=ends, fmt="o-", ms=4, lw=1.2, capsize=2,
                          label=method, color="black" if method == kept["baseline"] else f"C{k}")  # fmt: skip
        axis.set_xticks(range(len(kept["doses"])), [f"{d:g}" for d in kept["doses"]])
        axis.set(xlabel=kept["knob"], ylabel=kept["metric"])
        axis.set_title(f"{base}, n = {'-'.join(map(str, sorted(numbers)))} seeds, 95 % intervals", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    done = len(kept["cells"])
    whole = len(kept["doses"]) * len(kept["bases"]) * len(kept["methods"])
    figure.suptitle(f"{kept['title']} ({done} of {whole} cells run; one learning rate, not tuned)", fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def command(path: str, arguments: list[str]) -> int:
    """``experiment atlas FILE [flags]``: runs cells that are missing, and writes map, figure and page.

    Raises:
      UserError: for a file without a map, or flags that do not fit it.
    """
    from jaxrl_llm.experiment import doctor

    module = getattr(doctor.load(path), "MAP", None)
    if module is None:
        raise UserError(f"{path} has no MAP; give for example experiments/beds/stale_sampler.py")
    options = flags.read(Options, arguments, prog=f"python -m jaxrl_llm.experiment atlas {path}")
    if options.seeds < 2:
        raise UserError(f"--seeds {options.seeds} must be at least 2: an interval needs two")
    compile_cache.enable(options.compile_cache)
    slug, root = module.__name__.rpartition(".")[2].removesuffix("_map"), locate.root()
    folder, pages = root / "results" / "atlas", root / "docs" / "atlas"
    if options.out or options.smoke:
        folder = pages = cli.open_folder(options.out or f"runs/smoke/atlas/{slug}")
    said, path = cli.said(f"python -m jaxrl_llm.experiment atlas {path}", arguments), folder / f"{slug}.json"
    if options.join:
        kept = joined(module, path, options.join, said)
    else:
        kept = run(module, options, path, store.FOLDER, said)
    for target in write_page(module, kept, folder, slug, pages):
        print(f"written: {target}")
    return 0


def write_page(module: ModuleType, kept: dict[str, Any], folder: pathlib.Path, slug: str,
               pages: pathlib.Path) -> list[pathlib.Path]:  # fmt: skip
    """Figure and page of a map; the page links to the figure from where it lies."""
    figure = folder / f"{slug}.png"
    plot(figure, kept)
    pages.mkdir(parents=True, exist_ok=True)
    target = pages / f"{slug}.md"
    target.write_text(page(kept, pathlib.PurePosixPath(os.path.relpath(figure, pages)).as_posix(), module))
    return [figure, target]
