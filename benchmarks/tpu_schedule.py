"""Tables of what the TPU compiler promises: each phase of a GRPO step for known models and slices, without a TPU.

    python benchmarks/tpu_schedule.py --models Qwen3-1.7B --slices v5e:2x4

Adds to results/benchmarks/tpu_schedule.json what is not there yet and writes docs/schedule.md from it. Needs libtpu
(extra ``plan``); each phase compiles for a minute or several on a core.
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
SLICES = ("v5e:2x4", "v5e:8x8", "v5p:2x2x2", "v5p:4x4x4", "v6e:8x8")
PARTS = ("computing", "kernels", "exposed", "waiting", "total", "least")
HEAD = """# What the TPU compiler promises

The best plan of one GRPO step by the roofline, compiled ahead of time: milliseconds of one chip by the compiler's own
cycles, kernels by operations and bytes, collectives by bytes over links (see `planning.schedule`; no measurement).
Made by `python benchmarks/tpu_schedule.py`.
"""


def planned(model: str, topology: str) -> dict[str, Any]:
    """The best choice as ``plan --schedule --json`` has it."""
    from jaxrl_llm.run import plan

    settings = plan.Settings(model=model, topology=topology, show=1, schedule=True)
    config, found, shown, figures = plan.best(settings)
    return plan.as_data(config, shown[0], found, figures[0])


def page(record: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    columns = ("model", "slice", "phase", *PARTS, "of the roof", "GiB", "dearest place")
    lines = [HEAD, "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, plan in record.items():
        for phase, found in plan.get("schedule_ms", {}).items():
            first = found["places"][0] if found["places"] else {"where": "", "milliseconds": 0.0}
            cells = [*name.split(" "), phase, *(f"{found[part]:.1f}" for part in PARTS)]
            cells += [f"{found['share_of_roof']:.0%}", f"{plan['peak_gib'][phase]:.1f}"]
            lines.append("| " + " | ".join([*cells, f"`{first['where']}` {first['milliseconds']:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None, record: pathlib.Path = RECORD, out: pathlib.Path = PAGE) -> None:
    """Compiles what is missing, one after the other; what was compiled is kept if the next fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--slices", nargs="+", default=SLICES)
    given = parser.parse_args(words)
    found = json.loads(record.read_text()) if record.exists() else {}
    for name in (f"{model} {topology}" for model in given.models for topology in given.slices):
        if name not in found:
            found[name] = planned(*name.split(" "))
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(found, indent=1) + "\n")
            out.write_text(page(found))
            print(f"{name}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
