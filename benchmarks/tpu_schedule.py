"""Tables of what the TPU compiler promises: each phase of a GRPO step for known models and slices, without a TPU.

    python benchmarks/tpu_schedule.py --models Qwen3-1.7B --slices v5e:2x4
    python benchmarks/tpu_schedule.py --compared

Adds to results/benchmarks/tpu_schedule.json what is not there yet, a cell (a model on a slice) at a time, and writes
docs/schedule.md from it. ``--compared``: the phases of Qwen3-1.7B that Tunix's figures exist for, in their shapes, with
the compiler's effort of a run. Needs libtpu (extra ``plan``); with the least effort a phase takes seconds on an idle
core, with a run's a minute or several.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "benchmarks" / "tpu_schedule.json"
PAGE = ROOT / "docs" / "schedule.md"
MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B", "Llama-3-8B", "Llama-3-70B", "Qwen3-30B-A3B")
SLICES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "v5e:8x8", "v5p:4x4x4", "v6e:8x8")
COMPARED = "compared"
# by the compiler's cycles, kernels without any: google-tunix 0.1.7 on the same shapes, where it has been compiled
TUNIX = {"decode, one token": "21.7", "update": "510; with splash attention 397 + kernels"}
PARTS = ("computing", "kernels", "exposed", "waiting", "total", "least")
HEAD = """# What the TPU compiler promises

The best plan of one GRPO step by the roofline, compiled ahead of time: milliseconds of one chip by the compiler's own
cycles, kernels by operations and bytes, collectives by bytes over links (see `planning.schedule`; no measurement).
Made by `python benchmarks/tpu_schedule.py`.

{compared}"""
CELLS_HEAD = """
## The best plan of each model and slice

128 rows of 1,024 + 3,072 tokens, 8 responses to a prompt, compiled with the least effort (`--effort -1`), not with that
of a run. GiB are of the whole loop, masters and moments included.

"""
COMPARED_HEAD = """## Beside Tunix

Qwen3-1.7B on `v5e:2x4` in bfloat16, as a run compiles it: scores of 32 rows x 2,048 and updates of 16 rows x 1,024 on
`fsdp=8`; prefill of 32 prompts x 1,024 for 256 rows, and all 1,023 further tokens of each, on `data=8`.
"""


def planned(model: str, topology: str) -> dict[str, Any]:
    """The best choice as ``plan --schedule --json`` has it."""
    from jaxrl_llm.run import plan

    settings = plan.Settings(model=model, topology=topology, show=1, schedule=True)
    config, found, shown, figures = plan.best(settings)
    return plan.as_data(config, shown[0], found, figures[0])


SHAPES = {  # prompt, response, rows, group, activations recomputed
    "prefill": ("prefill", 1024, 1024, 256, 8, True),
    "scores": ("score", 1024, 1024, 32, 1, True),
    "update, recomputed": ("update", 256, 768, 16, 1, True),
    "update, activations kept": ("update", 256, 768, 16, 1, False),
    "decode, 1,023 tokens": ("decode", 1024, 1024, 256, 8, True),
}


def compared(name: str) -> dict[str, float]:
    """Milliseconds of a phase in the shapes of the comparison, with the effort and the options of a run."""
    from jaxrl_llm.distributed.compiler_options import options_of
    from jaxrl_llm.planning import chips, compiled, cost, phases
    from jaxrl_llm.planning.known_models import shape_of
    from jaxrl_llm.planning.parallel_layout import Sizes

    topology, config = chips.parse("v5e:2x4"), shape_of("Qwen3-1.7B")
    phase, prompt, response, rows, group, remat = SHAPES[name]
    work = phases.Work(prompt, response, rows, rows, group=group, remat=remat)
    devices, train, sample = compiled.devices(topology), Sizes(fsdp=8), Sizes(data=8)
    program = phases.phases(config, train.mesh(devices), sample.mesh(devices), work)[phase]()
    options = options_of(devices[0]) if phase in ("score", "update") else None
    figure = compiled.of_phase(program, options=options, chip=topology.chip)
    if figure.schedule is None:
        raise SystemExit(f"{name} does not fit: {figure.peak / 2**30:.1f} GiB")
    found = {part: round(1e3 * getattr(figure.schedule, part), 1) for part in (*PARTS[:-1], "collectives")}
    least = cost.least_seconds(config, topology.chip, train, sample, work)[phase]
    return found | {"least": round(1e3 * least, 1), "gib": round(figure.peak / 2**30, 2)}


def compared_table(found: dict[str, dict[str, float]]) -> str:
    """``compared`` for people."""
    columns = ("phase", *PARTS, "collectives", "GiB", "Tunix 0.1.7")
    lines = [COMPARED_HEAD, "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, one in found.items():
        theirs = next((said for phase, said in TUNIX.items() if name.startswith(phase)), "-")
        lines.append(
            "| " + " | ".join([name, *(f"{one[part]:,}" for part in (*PARTS, "collectives", "gib")), theirs]) + " |"
        )
        if name.startswith("decode"):
            tokens = {part: one[part] / 1023 for part in (*PARTS, "collectives")}
            cells = ["decode, one token", *(f"{x:.2f}" for x in tokens.values()), "", TUNIX["decode, one token"]]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


COLUMNS = ("model", "slice", "plan", "phase", *PARTS, "of the roof", "GiB", "dearest place")


def rows_of(name: str, plan: dict[str, Any]) -> list[str]:
    """The lines of one cell, a phase each; of a plan that does not fit one that says so."""
    how = f"`{plan['mesh']}` / `{plan['rollout_mesh']}`, {plan['microbatches']} parts, "
    first = [*name.split(" "), how + ("recomputed" if plan["remat"] else "kept")]
    if not plan["fits"]:
        said = f"does not fit: {plan['loop_peak_gib']:.1f} GiB in {plan['limit']}"
        return ["| " + " | ".join([*first, said, *[""] * (len(COLUMNS) - 4)]) + " |"]
    lines = []
    for phase, found in plan["schedule_ms"].items():
        dearest = found["places"][0] if found["places"] else {"where": "", "milliseconds": 0.0}
        cells = [*first, phase, *(f"{found[part]:.1f}" for part in PARTS)]
        cells += [f"{found['share_of_roof']:.0%}", f"{plan['peak_gib'][phase]:.1f}"]
        lines.append("| " + " | ".join([*cells, f"`{dearest['where']}` {dearest['milliseconds']:.1f}"]) + " |")
    return lines


def page(record: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    beside = compared_table(record[COMPARED]) if COMPARED in record else ""
    cells = [line for name, plan in record.items() if name != COMPARED for line in rows_of(name, plan)]
    head = [CELLS_HEAD + "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)] if cells else []
    return "\n".join([HEAD.format(compared=beside).rstrip(), *head, *cells]) + "\n"


def main(words: list[str] | None = None, record: pathlib.Path = RECORD, out: pathlib.Path = PAGE) -> None:
    """Compiles what is missing, one after the other; what was compiled is kept if the next fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--slices", nargs="+", default=SLICES)
    parser.add_argument("--compared", action="store_true", help="the phases beside Tunix's, and no others")
    given = parser.parse_args(words)
    found = json.loads(record.read_text()) if record.exists() else {}
    place = found.setdefault(COMPARED, {}) if given.compared else found
    cells = [f"{model} {topology}" for model in given.models for topology in given.slices]
    for name in SHAPES if given.compared else cells:
        if name not in place:
            place[name] = compared(name) if given.compared else planned(*name.split(" "))
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(found, indent=1) + "\n")
            out.write_text(page(found))
            print(f"{name}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
