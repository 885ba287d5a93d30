"""Writes docs/plans.md: for known models and TPU slices the best plan of one GRPO step, in closed form.

python docs/make_plans.py
"""

import pathlib

from jaxrl_llm.planning import chips, search
from jaxrl_llm.planning.known_models import shape_of
from jaxrl_llm.run.plan import GIB, Settings, work_of

MODELS = (
    "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B", "Llama-3-8B", "Llama-3-70B", "Qwen3-30B-A3B",
)  # fmt: skip
SLICES = ("v5e:2x4", "v5e:4x4", "v5e:8x8", "v5p:2x2x2", "v5p:4x4x4", "v6e:4x4", "v6e:8x8")
PROMPT, RESPONSE, PROMPTS, GROUP = 1024, 3072, 64, 8

HEAD = """# Plans

One GRPO step of {rows} rows ({prompts} prompts x {group} responses) of {prompt} + {response} tokens, AdamW, float32
masters, bfloat16 compute: for each model and slice the choice that fits and is quickest by the roofline, or, where none
fits, the one that needs least. Memory is **estimated in closed form**, not compiled: within 15 % of XLA on the small
cases that the tests compile for a CPU; against the TPU's compiler only one update here was held. It had been wrong:
65 GiB for the update of Qwen3-8B on v5p:2x2x2 in 32 parts with activations kept, and the compiler more than 96, because
a block that was kept left every float32 intermediate of its norms, rotations and gates. Beside kernels a kept block now
leaves its products and attention (`models.decoder.rematerialised`), which is what the figures here count: the same
update in 16 parts is 77.2 GiB here and 71.4 by the compiler. Check a plan with it before you pay for the slice. Seconds
are a roofline, for ranking plans, not a promise. Made by `python docs/make_plans.py`;
for other sizes, several choices each, all flags of the job, and the TPU compiler's own
figures (`--schedule`: and seconds by its own count):

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
    "GiB/chip",
    "of",
    "limit",
    "s/step",
)


def row_of(name: str, spec: str) -> tuple[str, ...]:
    """The best choice for one model on one slice."""
    config, topology = shape_of(name), chips.parse(spec)
    response = min(RESPONSE, config.max_positions - PROMPT)
    settings = Settings(model=name, topology=spec, prompt=PROMPT, response=response, prompts=PROMPTS, group=GROUP)
    found = search.plans(config, topology, work_of(settings, config))
    if not found:
        return (name, spec, *["no mesh divides"] + [""] * 8)
    best, hbm = found[0], topology.chip.hbm
    fits = best.peak <= search.MARGIN * hbm
    return (
        name, spec, f"`{best.train.spec}`", str(best.work.microbatches), "again" if best.work.remat else "kept",
        f"`{best.rollout.spec}`", str(best.work.rollout_rows), f"{best.peak / GIB:.1f}" if fits else
        f"**{best.peak / GIB:.1f}**", f"{hbm / GIB:.0f}", best.limit if fits else f"{best.limit}: does not fit",
        f"{best.step:.1f}" if fits else "-",
    )  # fmt: skip


def write(path: pathlib.Path) -> None:
    """The whole page."""
    lines = [HEAD.format(rows=PROMPTS * GROUP, prompts=PROMPTS, group=GROUP, prompt=PROMPT, response=RESPONSE)]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row_of(model, spec)) + " |" for model in MODELS for spec in SLICES]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(MODELS) * len(SLICES)} plans")


if __name__ == "__main__":
    write(pathlib.Path(__file__).with_name("plans.md"))
