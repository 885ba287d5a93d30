"""What a step costs as its work grows: tokens per second, memory and compile time over batch, context and depth.

    python benchmarks/cost_curves.py

Decoding and the GRPO update of a small decoder, the same programs that `python -m jaxrl_llm plan` compiles for a TPU,
on one device of this machine in float32. One of rows, columns and layers grows at a time. Memory is the compiler's own
figure (arguments, results and temporaries of the program), seconds are the best of a few runs in one process: read the
shape of the curves, not their height. Writes results/benchmarks/cost_curves.json and cost_curves.png.
"""

import argparse
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.planning.phases import Phase, decode_phase, update_phase
from jaxrl_llm.planning.work import Work
from jaxrl_llm.run.records import record

OUT = pathlib.Path(__file__).resolve().parents[1] / "results" / "benchmarks"
ROWS, COLUMNS, LAYERS = 16, 128, 8
GROWING = {
    "rows": (1, 2, 4, 8, 16, 32, 64, 128),
    "columns": (32, 64, 128, 256, 512, 1024),
    "layers": (1, 2, 4, 6, 8, 16, 32, 64),
}
PHASES = {"decode": decode_phase, "update": update_phase}
REPEATS = 3


def config_of(layers: int) -> ModelConfig:
    """A Qwen3 of 128 numbers a token and 1,024 words."""
    return ModelConfig(
        family="qwen3", vocab_size=1024, hidden_size=128, intermediate_size=384, num_layers=layers, num_heads=4,
        num_kv_heads=2, head_dim=32, max_positions=2048, tie_embeddings=True, qk_norm=True, eos_token_ids=(1,),
        pad_token_id=0,
    )  # fmt: skip


def filled(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of that shape: small numbers, ones, or a key."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    value = 0.02 if jnp.issubdtype(shape.dtype, jnp.floating) else 1
    return jax.device_put(jnp.full(shape.shape, value, shape.dtype), shape.sharding)


def cost(phase: Phase, carried: int) -> dict[str, float]:
    """Seconds to trace and to compile, bytes, and seconds of a run.

    Args:
      carried: which argument the program takes over and gives back: the state of the update, the cache of decoding.
    """
    start = time.perf_counter()
    lowered = phase.lower()
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    memory = program.memory_analysis()
    arguments = list(jax.tree.map(filled, phase.arguments))
    found = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        out = jax.block_until_ready(program(*arguments))
        found.append(time.perf_counter() - began)
        arguments[carried] = out[carried]
    own = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "trace_s": traced - start,
        "compile_s": compiled - traced,
        "bytes": own + memory.temp_size_in_bytes,
        "seconds": min(found[1:]),
    }


def measure(name: str, value: int) -> dict[str, dict[str, float]]:
    """Both phases with one size changed; ``tokens_per_s`` of decoding are new tokens, of the update all tokens."""
    sizes = {"rows": ROWS, "columns": COLUMNS, "layers": LAYERS} | {name: value}
    rows, columns = sizes["rows"], sizes["columns"]
    config, mesh = config_of(sizes["layers"]), Sizes().mesh(jax.devices()[:1])
    work = Work(columns // 2, columns // 2, rows, rows, compute_dtype=jnp.float32, remat=False)
    found = {}
    for phase, make in PHASES.items():
        one = cost(make(config, mesh, work), carried=1 if phase == "decode" else 0)
        one["tokens_per_s"] = rows * (1 if phase == "decode" else columns) / one["seconds"]
        found[phase] = {key: float(f"{x:.5g}") for key, x in one.items()}
    return found


def draw(curves: dict[str, dict[str, dict[str, dict[str, float]]]], path: pathlib.Path) -> None:
    """One column a size, one row a cost; both axes logarithmic, the compile time's from zero."""
    costs = {"tokens_per_s": "tokens/s", "bytes": "MiB", "compile_s": "compile, s"}
    figure, axes = plt.subplots(3, 3, figsize=(10, 7), sharex="col", layout="constrained")
    for k, (name, points) in enumerate(curves.items()):
        x = [int(value) for value in points]
        for j, (key, label) in enumerate(costs.items()):
            for phase in PHASES:
                y = [points[value][phase][key] / (2**20 if key == "bytes" else 1) for value in points]
                axes[j, k].plot(x, y, "o-", ms=3, label=phase)
            axes[j, k].set(xscale="log", ylabel=label if k == 0 else "")
            if key == "compile_s":
                axes[j, k].set(ylim=(0, None), xlabel=name)
            else:
                axes[j, k].set_yscale("log")
            axes[j, k].grid(alpha=0.3, which="both")
    axes[0, 0].legend()
    figure.suptitle(f"Cost against work: {ROWS} rows, {COLUMNS} columns, {LAYERS} layers but for one")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    """Measures, prints, writes."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    curves = {name: {} for name in GROWING}
    for name, values in GROWING.items():
        for value in values:
            found = curves[name][str(value)] = measure(name, value)
            told = (
                f"{phase} {x['tokens_per_s']:,.0f}/s, {x['bytes'] / 2**20:.1f} MiB, compile {x['compile_s']:.1f} s"
                for phase, x in found.items()
            )
            print(f"{name} {value}: " + "; ".join(told), flush=True)
    whole = {
        "command": "python benchmarks/cost_curves.py",
        **provenance.made(OUT.parent),
        "what": "decode and update of one step, one device, float32; best of 3 runs, bytes by the compiler",
        "cores": len(os.sched_getaffinity(0)),
        "versions": record.versions(),
        "curves": curves,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "cost_curves.json").write_text(json.dumps(whole, indent=1) + "\n")
    draw(curves, OUT / "cost_curves.png")


if __name__ == "__main__":
    main()
