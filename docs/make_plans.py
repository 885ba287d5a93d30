"""Writes docs/plans.md: for known models and TPU slices the best plan of one GRPO step.

python docs/make_plans.py

Memory is the TPU compiler's where ``benchmarks/tpu_schedule.py`` has compiled that plan, and the closed form beside it.
"""

import functools
import json
import pathlib
from typing import Any

from jaxrl_llm.planning import chips, search
from jaxrl_llm.planning.known_models import shape_of
from jaxrl_llm.run.plan import GIB, Settings, work_of

MODELS = (
    "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B", "Llama-3-8B", "Llama-3-70B", "Qwen3-30B-A3B",
)  # fmt: skip
SLICES = (
    "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5p:2x2x2", "v5p:4x4x4", "v6e:2x4", "v6e:4x4", "v6e:8x8", "v7x:2x2x1",
    "v7x:4x4x4",
)  # fmt: skip
PROMPT, RESPONSE, PROMPTS, GROUP = 1024, 3072, 16, 8
RECORD = pathlib.Path(__file__).resolve().parents[1] / "results" / "benchmarks" / "tpu_schedule.json"

HEAD = """# Plans

One GRPO step of {rows} rows ({prompts} prompts x {group} responses) of {prompt} + {response} tokens, AdamW, float32
masters, bfloat16 compute: for each model and slice the choice that fits by the closed form and is quickest by the
roofline, or, where none fits, the one that needs least. *Closed form* is an estimate that ranks plans; *compiled* is
what the TPU's compiler needs for the same plan, where it has been asked (`benchmarks/tpu_schedule.py`){error}. A plan
that has not been compiled is not known to fit: check it before you pay for the slice. Seconds are a roofline, for
ranking plans, not a promise. Made by `python docs/make_plans.py`; for other sizes, several choices each, all flags of
the job, and the TPU compiler's own figures (`--schedule`: and seconds by its own count):

```bash
python -m jaxrl_llm plan --model Qwen3-8B --topology v5e:4x4 --prompt 1024 --response 3072
```

Read a row as: train on `mesh` with the batch in so many parts, activations kept or recomputed; sample on `rollout mesh`
so many rows at a time; the fullest chip needs so much in the phase that limits.
"""
COLUMNS = (
    "model",
    "slice",
    "mesh",
    "parts",
    "activations",
    "rollout mesh",
    "rows",
    "closed form GiB",
    "compiled GiB",
    "of",
    "limit",
    "s/step",
)


@functools.cache
def compiled() -> dict[str, Any]:
    """What the compiler has said, by model and slice."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def of_compiler(name: str, spec: str, best: search.Plan) -> float | None:
    """GiB of the same plan by the compiler; None where it has not been asked."""
    found = compiled().get(f"{name} {spec}", {})
    same = (best.train.spec, best.rollout.spec, best.work.microbatches, best.work.rollout_rows, best.work.remat)
    asked = tuple(found.get(key) for key in ("mesh", "rollout_mesh", "microbatches", "rollout_rows", "remat"))
    return found.get("loop_peak_gib") if same == asked else None


def row_of(name: str, spec: str) -> tuple[str, ...]:
    """The best choice for one model on one slice."""
    config, topology = shape_of(name), chips.parse(spec)
    response = min(RESPONSE, config.max_positions - PROMPT)
    settings = Settings(model=name, topology=spec, prompt=PROMPT, response=response, prompts=PROMPTS, group=GROUP)
    found = search.plans(config, topology, work_of(settings, config))
    if not found:
        return (name, spec, *["no mesh divides"] + [""] * 9)
    best, hbm = found[0], topology.chip.hbm
    asked = of_compiler(name, spec, best)
    fits = best.peak <= search.MARGIN * hbm if asked is None else asked * GIB <= hbm
    return (
        name, spec, f"`{best.train.spec}`", str(best.work.microbatches), "again" if best.work.remat else "kept",
        f"`{best.rollout.spec}`", str(best.work.rollout_rows), f"{best.peak / GIB:.1f}",
        "-" if asked is None else f"{asked:.1f}", f"{hbm / GIB:.0f}",
        best.limit if fits else f"**{best.limit}: does not fit**", f"{best.step:.1f}" if fits else "-",
    )  # fmt: skip


def stated(rows: list[tuple[str, ...]]) -> str:
    """How far the closed form is off, over the rows that were compiled."""
    ratios = [float(row[7]) / float(row[8]) - 1 for row in rows if len(row) > 8 and row[8] not in ("-", "")]
    if not ratios:
        return ""
    return f": over {len(ratios)} plans the closed form is {min(ratios):+.0%} to {max(ratios):+.0%} off"


def write(path: pathlib.Path) -> None:
    """The whole page."""
    rows = [row_of(model, spec) for model in MODELS for spec in SLICES]
    counts = {"rows": PROMPTS * GROUP, "prompts": PROMPTS, "group": GROUP, "prompt": PROMPT, "response": RESPONSE}
    lines = [HEAD.format(**counts, error=stated(rows))]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(MODELS) * len(SLICES)} plans")


if __name__ == "__main__":
    write(pathlib.Path(__file__).with_name("plans.md"))
