"""Tables of what the TPU compiler promises: each phase of a GRPO step for known models and slices, without a TPU.

    python benchmarks/tpu_schedule.py
    python benchmarks/tpu_schedule.py --memory
    python benchmarks/tpu_schedule.py --models Qwen3-1.7B --slices v5e:2x4 --phases update

Adds to results/benchmarks/tpu_schedule.json what is not there yet, a phase of a model on a slice at a time, and writes
docs/schedule.md from it; what was compiled is kept if the next fails. Without a flag, all that follows, one after the
other. ``--compared``: the phases of one model in one shape, every layer compiled, or with ``--lines`` by the straight
lines of the other tables. ``--memory``: what each phase needs, which is known before any code is made. ``--phases``:
the schedules; without ``--slices`` a model is compiled for the smallest slice of each generation on which it fits by
the closed form. ``--checked``: straight lines against all layers. ``--tunix``: ours beside Tunix's programs, which
needs ``pip install google-tunix`` as well. Needs libtpu (extra ``plan``); a phase takes seconds on an idle core with
``--memory`` and a minute without, one whose layers are compiled one by one several, of ``--compared`` up to twenty.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "benchmarks" / "tpu_schedule.json"
PAGE = ROOT / "docs" / "schedule.md"
MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B", "Llama-3-8B", "Llama-3-70B", "Qwen3-30B-A3B")
SLICES = {
    "v5e": ("v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16"),
    "v5p": ("v5p:2x2x2", "v5p:4x4x4"),
    "v6e": ("v6e:2x4", "v6e:4x4", "v6e:8x8"),
    "v7x": ("v7x:2x2x1", "v7x:2x2x2", "v7x:4x4x4"),
}
PHASES = ("reshard", "prefill", "score", "decode", "update")  # the quickest to compile first
COMPARED = "compared"
COMPILER = "libtpu"  # whose figures they are: another version makes other programs
BESIDE = "tunix"
TABLES = (["--compared"], ["--memory"], ["--phases", *PHASES], ["--checked"], ["--tunix"])
PARTS = ("computing", "kernels", "exposed", "waiting", "total", "least")
HEAD = """# What the TPU compiler promises

The best plan of one GRPO step by the roofline, compiled ahead of time: milliseconds of one chip by the compiler's own
cycles, kernels by operations and bytes, collectives by bytes over links (see `planning.schedule`; no measurement).
Made by `python benchmarks/tpu_schedule.py` with libtpu {compiler}.

{compared}"""
MEMORY_HEAD = """
## Memory of the best plans

128 rows of 1,024 + 3,072 tokens, 8 responses to a prompt, in bfloat16 with float32 masters; of each generation the
smallest slice on which the model fits by the closed form, and there the plan that is quickest by the roofline. GiB of
one chip by the compiler's assignment of buffers, with the options and the effort of a run, every layer compiled
(`planning.buffers`): each phase alone, the fullest with all that lies there meanwhile, and the closed form of that.
*score* is one part of the batch, for plans with a reference.{missing}
"""
CELLS_HEAD = """
## Schedules of the best plans

The same plans. *decode* is every token of one rollout. A phase whose layers are compiled one by one (marked ~) is a
straight line through programs of {few} and {more} layers{checked}. Updates
and decoding on v7x are still of a reading that gave each of several collectives at once the links for itself: of scores
it said as much as was right, but for Llama-3-70B (11 % too little) and Qwen3-30B-A3B (23 %).{missing}
"""
COMPARED_HEAD = """## One model in one shape

Qwen3-1.7B on `v5e:2x4` in bfloat16, as a run compiles it: scores of 32 rows x 2,048 and updates of 16 rows x 1,024 on
`fsdp=8`; prefill of 32 prompts x 1,024 for 256 rows, and all 1,023 further tokens of each, on `data=8`. Marked ~: a
straight line through programs of fewer layers, as below.
"""
BESIDE_HEAD = """## Beside Tunix

Tunix {tunix} (its models, its GRPO loss, its layouts; splash attention in the update) and this library, compiled for
the same slice in the same shapes and added up alike: an update of two rows of 256 + 768 tokens a chip, and one token of
256 rows with a cache of 2,048, which theirs reads whole and ours as far as it is filled, in the mean of 1,023 tokens.
*x*: Tunix's total by ours. Ours is the program of a run, of layers that are compiled one by one a straight line as
below; theirs has every layer compiled. A kernel of theirs that does not say what it needs counts nothing, and of a
token theirs is the step alone, without its loop and without sampling. Where ours samples through layers that are
compiled one by one it keeps a second copy of their matrices: for Qwen3-32B there is no room here, so that its layers
are a loop, which is slower.
"""


@functools.cache
def plan_of(model: str, topology: str) -> Any:
    """The best plan by the closed form and the roofline."""
    from jaxrl_llm.planning import chips, search
    from jaxrl_llm.planning.known_models import shape_of
    from jaxrl_llm.run import plan

    settings, config = plan.Settings(model=model, topology=topology), shape_of(model)
    return search.plans(config, chips.parse(topology), plan.work_of(settings, config))[0]


def chosen(model: str, slices: tuple[str, ...]) -> str | None:
    """The first of the slices on which the model fits by the closed form; None: none of them."""
    from jaxrl_llm.planning import chips, search

    fits = (name for name in slices if plan_of(model, name).peak <= search.MARGIN * chips.parse(name).chip.hbm)
    return next(fits, None)


def described(model: str, topology: str) -> dict[str, Any]:
    """A cell without any phase: what is planned."""
    plan = plan_of(model, topology)
    return {
        "mesh": plan.train.spec, "rollout_mesh": plan.rollout.spec, "microbatches": plan.work.microbatches,
        "rollout_rows": plan.work.rollout_rows, "remat": plan.work.remat,
        "closed_form_gib": round(plan.peak / 2**30, 3), "gib": {}, "phases": {},
    }  # fmt: skip


def add_memory(cell: dict[str, Any], model: str, topology: str, phase: str) -> None:
    """What the compiler's buffers of a phase need, without its code; of the whole loop where all phases are known."""
    from jaxrl_llm.planning import buffers, chips
    from jaxrl_llm.planning.known_models import shape_of

    plan = plan_of(model, topology)
    found = buffers.peak(shape_of(model), plan.train, plan.rollout, plan.work, chips.parse(topology), phase)
    cell["gib"][phase] = round(found / 2**30, 3)
    whole_loop(cell, model, topology)


def whole_loop(cell: dict[str, Any], model: str, topology: str) -> None:
    """Adds what a cell's phases say of the loop, masters and moments included, where all of its plan are known."""
    from jaxrl_llm.planning import chips, estimate
    from jaxrl_llm.planning.known_models import shape_of

    plan, hbm = plan_of(model, topology), chips.parse(topology).chip.hbm
    if all(name in cell["gib"] for name in plan.peaks):
        alone = {name: cell["gib"][name] * 2**30 for name in plan.peaks}
        peaks = estimate.of_the_loop(shape_of(model), plan.train, alone, plan.work)
        most = max(peaks, key=lambda name: peaks[name])
        cell |= {"peak_gib": {name: round(peak / 2**30, 3) for name, peak in peaks.items()},
                 "loop_peak_gib": round(peaks[most] / 2**30, 3), "limit": most, "fits": peaks[most] <= hbm}  # fmt: skip


def add_phase(cell: dict[str, Any], model: str, topology: str, phase: str) -> None:
    """Compiles a phase of the plan that the cell has: memory and schedule."""
    from jaxrl_llm.planning import chips, compiled
    from jaxrl_llm.planning.known_models import shape_of
    from jaxrl_llm.run import plan as command

    plan, config, where = plan_of(model, topology), shape_of(model), chips.parse(topology)
    settings = {"names": (phase,), "chip": where.chip, "whole": False}
    found = compiled.of_step(config, plan.train, plan.rollout, plan.work, compiled.devices(where), **settings)
    figure, timed = found[phase], command.scheduled(config, plan, where, found).get(phase)
    if timed is not None:
        timed["places"] = timed["places"][:3]
    cell["phases"][phase] = {"fits": figure.fits, "layers": list(figure.layers),
                             "compile_seconds": round(figure.seconds, 1), "schedule_ms": timed}  # fmt: skip
    if phase not in cell["gib"]:
        cell["gib"][phase] = round(figure.peak / 2**30, 3)
        whole_loop(cell, model, topology)


SHAPES = {  # prompt, response, rows, group, activations recomputed
    "prefill": ("prefill", 1024, 1024, 256, 8, True),
    "scores": ("score", 1024, 1024, 32, 1, True),
    "update, recomputed": ("update", 256, 768, 16, 1, True),
    "update, activations kept": ("update", 256, 768, 16, 1, False),
    "decode, 1,023 tokens": ("decode", 1024, 1024, 256, 8, True),
    "decode, 1,023 tokens, weights and cache in int8": ("decode", 1024, 1024, 256, 8, True),
}
FEW_BITS = {"decode, 1,023 tokens, weights and cache in int8": {"sampled": "int8", "cached": "int8"}}


CHECKED = "checked"
LINES = ("decode, 1,023 tokens", "scores", "update, activations kept")  # whose layers are compiled one by one


def compared(name: str, whole: bool = True) -> dict[str, Any]:
    """Milliseconds of a phase in the shapes of the comparison, with the effort and the options of a run.

    Args:
      whole: every layer is compiled; else a straight line, as in the cells.
    """
    from jaxrl_llm.planning import chips, compiled, cost
    from jaxrl_llm.planning.known_models import shape_of
    from jaxrl_llm.planning.parallel_layout import Sizes
    from jaxrl_llm.planning.work import Work

    topology, config = chips.parse("v5e:2x4"), shape_of("Qwen3-1.7B")
    phase, prompt, response, rows, group, remat = SHAPES[name]
    work = Work(prompt, response, rows, rows, group=group, remat=remat, **FEW_BITS.get(name, {}))
    devices, train, sample = compiled.devices(topology), Sizes(fsdp=8), Sizes(data=8)
    found = compiled.of_step(config, train, sample, work, devices, names=(phase,), chip=topology.chip, whole=whole)
    figure = found[phase]
    if figure.schedule is None:
        raise SystemExit(f"{name} does not fit: {figure.peak / 2**30:.1f} GiB")
    parts = {part: round(1e3 * getattr(figure.schedule, part), 1) for part in (*PARTS[:-1], "collectives")}
    least = cost.least_seconds(config, topology.chip, train, sample, work)[phase]
    lines = {"layers": list(figure.layers)} if figure.layers else {}
    return parts | {"least": round(1e3 * least, 1), "gib": round(figure.peak / 2**30, 2)} | lines


def checked_words(record: dict[str, dict[str, Any]]) -> str:
    """How far straight lines are off, where all layers were compiled too."""
    whole, told = record.get(COMPARED, {}), []
    for name, line in record.get(CHECKED, {}).items():
        if name in whole and "layers" not in whole[name]:
            time, memory = (line[part] / whole[name][part] - 1 for part in ("total", "gib"))
            told.append(f"{name} {time:+.0%} of time, {memory:+.0%} of memory")
    return f" (against all layers, Qwen3-1.7B above: {'; '.join(told)})" if told else ""


def compared_table(found: dict[str, dict[str, Any]]) -> str:
    """``compared`` for people."""
    columns = ("phase", *PARTS, "collectives", "GiB")
    lines = []
    for name, one in ((name, found[name]) for name in SHAPES if name in found):
        said = f"{name} ~" if "layers" in one else name
        lines.append("| " + " | ".join([said, *(f"{one[part]:,}" for part in (*PARTS, "collectives", "gib"))]) + " |")
        if name.startswith("decode"):
            tokens = {part: one[part] / 1023 for part in (*PARTS, "collectives")}
            said = name.replace("1,023 tokens", "one token")
            cells = [said, *(f"{x:.2f}" for x in tokens.values()), ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([COMPARED_HEAD, *table(columns, lines), ""])


# the slice of a model, and the parts of ``tensor`` that its sampling has; a token of Qwen3-30B-A3B in Tunix's layout
# takes more than 20 GiB of a machine's memory to compile, and was not
SIDE_BY_SIDE = {
    "Qwen3-0.6B": ("v5e:2x4", 1), "Qwen3-1.7B": ("v5e:2x4", 1), "Qwen3-8B": ("v5e:4x4", 8),
    "Llama-3-8B": ("v5e:4x4", 8), "Qwen3-32B": ("v5e:8x8", 8), "Llama-3-70B": ("v5p:4x4x4", 8),
}  # fmt: skip
SIDES = ("decode, one token", "update, recomputed")
# an update of theirs has every layer by itself, which takes minutes and much memory to compile, and of Llama weights in
# the type that computes
UPDATED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B")


def figures_of(found: Any, tokens: int = 1) -> dict[str, Any] | None:
    """Milliseconds and GiB, of one token; None: does not fit."""
    if found.schedule is None:
        return None
    parts = {part: round(1e3 * getattr(found.schedule, part) / tokens, 2) for part in PARTS[:-1]}
    return parts | {"gib": round(found.peak / 2**30, 2)}


def beside(model: str, name: str, side: str) -> dict[str, Any] | None:
    """One phase of a model, "ours" or "tunix": see ``BESIDE_HEAD``."""
    from jaxrl_llm.planning import chips, compiled
    from jaxrl_llm.planning.known_models import shape_of
    from jaxrl_llm.planning.parallel_layout import Sizes
    from jaxrl_llm.planning.work import Work

    slice_, tensor = SIDE_BY_SIDE[model]
    topology, config = chips.parse(slice_), shape_of(model)
    devices, phase = compiled.devices(topology), name.split(",")[0]
    rows, prompt, response, group = (256, 1024, 1024, 8) if phase == "decode" else (2 * topology.chips, 256, 768, 1)
    if side == "tunix":
        import tunix_programs

        shapes = {"rows": rows, "prompt": prompt, "response": response, "tensor": tensor}
        program = tunix_programs.phase(model, phase, devices, **shapes)
        return figures_of(compiled.of_phase(program, chip=topology.chip))
    layouts = Sizes(fsdp=topology.chips), Sizes(data=topology.chips // tensor, tensor=tensor)
    work = Work(prompt, response, rows, rows, group=group)
    found = compiled.of_step(config, *layouts, work, devices, names=(phase,), chip=topology.chip, whole=False)
    return figures_of(found[phase], response - 1 if phase == "decode" else 1)


def beside_table(record: dict[str, Any]) -> str:
    """``beside`` for people."""
    from jaxrl_llm.planning import chips

    columns = ("model", "slice", "phase", "layout", "ours", "exposed", "GiB", "Tunix", "exposed", "GiB", "x")
    lines = []
    for model, (topology, tensor) in SIDE_BY_SIDE.items():
        for name in (one for one in SIDES if {"ours", "tunix"} <= record.get(model, {}).get(one, {}).keys()):
            of_slice = chips.parse(topology)
            both = [record[model][name][side] for side in ("ours", "tunix")]
            cells = [f"tensor={tensor}" if name == SIDES[0] else f"fsdp={of_slice.chips}"]
            parts = ("total", "exposed", "gib")
            for one in both:
                cells += [f"{one[part]:,.2f}" for part in parts] if one else ["does not fit", "", ""]
            cells.append(f"{both[1]['total'] / both[0]['total']:.2f}" if all(both) else "-")
            lines.append("| " + " | ".join([model, topology, name, *cells]) + " |")
    return "\n".join([BESIDE_HEAD.format(tunix=record["version"]), *table(columns, lines), ""])


COLUMNS = ("model", "slice", "plan", "phase", *PARTS, "of the roof", "dearest place")
GIB_COLUMNS = ("model", "slice", "plan", *PHASES, "of the loop", "closed form", "fits")


def how_of(name: str, cell: dict[str, Any]) -> list[str]:
    """Model, slice and plan."""
    kept = "recomputed" if cell["remat"] else "kept"
    return [*name.split(" "), f"`{cell['mesh']}` / `{cell['rollout_mesh']}`, {cell['microbatches']} parts, {kept}"]


def gib_row(name: str, cell: dict[str, Any]) -> str:
    """The memory of one cell: each phase alone, and the whole loop."""
    alone = [f"{cell['gib'][phase]:.1f}" if phase in cell["gib"] else "-" for phase in PHASES]
    whole = [f"{cell['loop_peak_gib']:.1f} in {cell['limit']}"] if "fits" in cell else ["-"]
    fits = {True: "yes", False: "**no**", None: "-"}[cell.get("fits")]
    return "| " + " | ".join([*how_of(name, cell), *alone, *whole, f"{cell['closed_form_gib']:.1f}", fits]) + " |"


def rows_of(name: str, cell: dict[str, Any]) -> list[str]:
    """The schedules of one cell, a phase a line."""
    lines = []
    for phase in (one for one in PHASES if one in cell["phases"]):
        one = cell["phases"][phase]
        found, said = one["schedule_ms"], f"{phase} ~" if one["layers"] else phase
        if found is None:
            cells = [said, "does not fit", *[""] * (len(COLUMNS) - 5)]
        else:
            dearest = found["places"][0] if found["places"] else {"where": "", "milliseconds": 0.0}
            cells = [said, *(f"{found[part]:,.1f}" for part in PARTS), f"{found['share_of_roof']:.0%}",
                     f"`{dearest['where']}` {dearest['milliseconds']:,.1f}"]  # fmt: skip
        lines.append("| " + " | ".join([*how_of(name, cell), *cells]) + " |")
    return lines


def missing(cells: dict[str, dict[str, Any]], part: str) -> str:
    """What has not been compiled yet: ``gib`` or ``phases``."""
    done = {name: [phase for phase in PHASES if phase in cell[part]] for name, cell in cells.items()}
    some = [
        f"{name} ({', '.join(phase for phase in PHASES if phase not in have)})"
        for name, have in done.items()
        if 0 < len(have) < len(PHASES)
    ]
    none = [name for name, have in done.items() if not have]
    none += [model for model in MODELS if model not in {name.split(" ")[0] for name in cells}]
    todo = some + ([f"nothing of {', '.join(none)}"] if none else [])
    return f" Not there yet: {'; '.join(todo)}." if todo else ""


def table(columns: tuple[str, ...], lines: list[str]) -> list[str]:
    """With its head; nothing where there is no line."""
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *lines] if lines else []


def page(record: dict[str, Any]) -> str:
    """The whole page."""
    from jaxrl_llm.planning.compiled import DEPTHS

    first = compared_table(record[COMPARED]) if COMPARED in record else ""
    first += "\n" + beside_table(record[BESIDE]) if BESIDE in record else ""
    cells = {name: cell for name, cell in record.items() if name not in (COMPARED, CHECKED, BESIDE, COMPILER)}
    memory = [gib_row(name, cell) for name, cell in cells.items() if cell["gib"]]
    lines = [line for name, cell in cells.items() for line in rows_of(name, cell)]
    said = {"few": DEPTHS[0], "more": DEPTHS[1], "checked": checked_words(record), "missing": missing(cells, "phases")}
    parts = [HEAD.format(compared=first, compiler=record.get(COMPILER, "(none yet)")).rstrip()]
    parts += [MEMORY_HEAD.format(missing=missing(cells, "gib")), *table(GIB_COLUMNS, memory)] if memory else []
    parts += [CELLS_HEAD.format(**said), *table(COLUMNS, lines)] if lines else []
    return "\n".join(parts) + "\n"


def planned_cells(models: list[str], slices: list[str] | None) -> Iterator[tuple[str, str]]:
    """Models and slices, for each model those that are given or the smallest of each generation that do."""
    for model in models:
        for topology in slices or [chosen(model, several) for several in SLICES.values()]:
            if topology is not None:
                yield model, topology


def main(words: list[str] | None = None, record: pathlib.Path = RECORD, out: pathlib.Path = PAGE) -> None:
    """Compiles what is missing, one after the other; each cell has the command, commit and day of its last phase."""
    from jaxrl_llm.experiment.evidence import provenance
    from jaxrl_llm.planning import compiled

    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--slices", nargs="+")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--memory", action="store_true", help="buffers alone, without code: seconds a phase")
    parser.add_argument("--compared", action="store_true", help="one model in one shape, and no others")
    parser.add_argument("--lines", action="store_true", help="--compared by straight lines, as the other table is")
    parser.add_argument("--checked", action="store_true", help="straight lines against all layers, and no others")
    parser.add_argument("--tunix", action="store_true", help="of --models beside Tunix's programs, and no others")
    words = sys.argv[1:] if words is None else words
    if not words:
        for one in TABLES:
            main(one, record, out)
        return
    given = parser.parse_args(words)
    command = " ".join(["python benchmarks/tpu_schedule.py", *words])
    found = json.loads(record.read_text()) if record.exists() else {}
    installed = importlib.metadata.version(COMPILER) if compiled.available() else "none"
    if found.setdefault(COMPILER, installed) != installed:
        raise SystemExit(
            f"{record} was made with libtpu {found[COMPILER]}, and {installed} is installed, which makes "
            f"other programs: pip install libtpu=={found[COMPILER]}, or move the file away"
        )

    def kept(name: str, what: dict[str, Any]) -> None:
        what |= {"command": command, **provenance.made(ROOT)}
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(found, indent=1) + "\n")
        out.write_text(page(found))
        print(f"{name}: done", file=sys.stderr)

    if given.compared or given.checked:  # a phase at a time, too
        place = found.setdefault(COMPARED if given.compared else CHECKED, {})
        for name in [name for name in (SHAPES if given.compared else LINES) if name not in place]:
            place[name] = compared(name, whole=given.compared and not given.lines)
            kept(name, place[name])
        return
    if given.tunix:
        if importlib.util.find_spec("tunix") is None:
            raise SystemExit("--tunix: Tunix is not installed: pip install google-tunix==0.1.7")
        place = found.setdefault(BESIDE, {})
        place["version"] = importlib.metadata.version("google-tunix")
        models = [model for model in SIDE_BY_SIDE if model in given.models]
        for name, model, side in itertools.product(SIDES, models, ("ours", "tunix")):
            of_both = place.setdefault(model, {}).setdefault(name, {})
            if side not in of_both and (name == SIDES[0] or model in UPDATED):
                of_both[side] = beside(model, name, side)
                kept(f"{model} {name}: {side}", of_both)
        return
    cells = list(planned_cells(given.models, given.slices))
    for phase in given.phases:  # every cell has something soon
        for model, topology in cells:
            cell = found.setdefault(f"{model} {topology}", {}) or found[f"{model} {topology}"]
            if not cell:
                cell |= described(model, topology)
            if phase not in cell["gib" if given.memory else "phases"]:
                (add_memory if given.memory else add_phase)(cell, model, topology, phase)
                kept(f"{model} {topology} {phase}", cell)


if __name__ == "__main__":
    main()
