"""Tokens per second of a rollout: slots against lock-step, and both against Tunix's sampler, in one run.

    python benchmarks/rollout.py [--tunix-python PYTHON_WITH_TUNIX]

A random model of 4 layers, width 256, ff 1024, 8 heads / 4 KV heads, vocabulary 2048, float32; 16 prompts x 4 samples,
32 prompt and at most 128 new tokens. ``fixed``: no id ends a response. ``geometric``: 20 ids do, about one token in a
hundred. ``queue`` is geometric with 64 prompts x 4, more responses than slots. ``per_core``: lock-step with every core
a device that has its own rows (``rollout.per_device``), and a cache that grows and a batch that shrinks in four stages
each; the others are one device with as many threads. The sides run by turns as processes of their own on the same
cores; compilation is left out. Seconds are wall time and, since other work on the machine does not count there, the
time of the processor. The record goes to results/benchmarks/rollout.json.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from functools import partial
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "benchmarks" / "rollout.json"
PROMPTS, GROUP, WIDTH, NEW, VOCAB, ENDS = 16, 4, 32, 128, 2048, 20
SHAPE = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
STAGES = {"cache_stages": 4, "row_stages": 4}  # of ``per_core``
KINDS = (("fixed", 1), ("geometric", 1), ("queue", 4))  # and how many times as many prompts


def prompt_rows(times: int = 1) -> list[list[int]]:
    """Prompts without id 0, which pads."""
    return [[1 + (37 * i + 101 * k * k + 11 * k) % (VOCAB - 1) for k in range(WIDTH)] for i in range(times * PROMPTS)]


def end_ids(kind: str) -> tuple[int, ...]:
    """The ids that end a response; the last of the vocabulary, or one beyond it."""
    return (VOCAB + 1,) if kind == "fixed" else tuple(range(VOCAB - ENDS, VOCAB))


class Words:
    """Texts are ids between spaces."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 0

    def eos_id(self):
        return VOCAB - 1

    def pad_id(self):
        return 0


def timed(call, repeats: int) -> list[dict]:
    """Tokens, wall and processor seconds of each call after the first."""
    call(0)
    found = []
    for seed in range(1, repeats + 1):
        wall, busy = time.perf_counter(), time.process_time()
        tokens = call(seed)
        found.append(
            {"tokens": tokens, "wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - busy}
        )
    return found


def run_ours(slots: int, repeats: int, cores: bool = False) -> dict:
    """Lock-step and slots on the same weights, prompts and keys; or lock-step with every core a device."""
    from jaxrl_llm.train.seed_axis import use_all_cores

    if cores:
        use_all_cores()
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.distributed import mesh as meshes
    from jaxrl_llm.distributed import rules
    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.decoder import make_policy
    from jaxrl_llm.rollout.generate import generate
    from jaxrl_llm.rollout.per_device import per_device
    from jaxrl_llm.rollout.slots import generate_in_slots
    from jaxrl_llm.run import host_memory

    host_memory.keep_freed_pages()  # as the main job and every experiment do
    config = ModelConfig(
        family="qwen3", vocab_size=VOCAB, hidden_size=256, intermediate_size=1024, max_positions=WIDTH + NEW,
        tie_embeddings=True, qk_norm=True, **SHAPE,
    )  # fmt: skip
    policy = make_policy(config)
    params = jax.jit(policy.init)(jax.random.key(0))
    found = {}
    for kind, times in KINDS:
        prompts = jnp.asarray(prompt_rows(times), jnp.int32)
        settings = {"group_size": GROUP, "max_new_tokens": NEW, "eos_ids": end_ids(kind)}
        sides = {"lock_step": generate, "slots": partial(generate_in_slots, slots=slots)}
        for side, rollout in {"per_core": partial(generate, **STAGES)}.items() if cores else sides.items():

            def rows(params, tokens, valid, keys, ids, rollout=rollout, settings=settings):
                return rollout(policy, params, tokens, valid, keys, problem_ids=ids, **settings)

            given, roll = (params, prompts, jnp.ones(prompts.shape, bool)), rows
            if cores:
                mesh = meshes.parse_mesh(f"data={jax.device_count()}")
                given, roll = (rules.shard(params, mesh), *given[1:]), per_device(rows, mesh)
            roll = jax.jit(roll)

            def call(seed, roll=roll, given=given):
                prompts = given[1].shape[0]
                keys = jax.random.split(jax.random.key(seed), GROUP * prompts)
                return int(roll(*given, keys, jnp.arange(prompts, dtype=jnp.int32)).mask.sum())

            found[f"{side}_{kind}"] = timed(call, repeats)
    return {"calls": found, "versions": {"python": platform.python_version(), "jax": jax.__version__}}


def run_tunix(repeats: int) -> dict:
    """Tunix's own sampler on a Qwen3 of the same shape; every sample is a row, as its GRPO learner asks."""
    import importlib.metadata

    import jax
    import numpy as np
    from flax import nnx
    from tunix.generate import sampler as samplers
    from tunix.models.qwen3 import model as models

    config = models.ModelConfig(
        vocab_size=VOCAB, embed_dim=256, hidden_dim=1024, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
        **SHAPE,
    )  # fmt: skip
    sampler = samplers.Sampler(
        models.Qwen3(config, rngs=nnx.Rngs(0)), Words(),
        samplers.CacheConfig(WIDTH + NEW, SHAPE["num_layers"], SHAPE["num_kv_heads"], SHAPE["head_dim"]),
    )  # fmt: skip
    found = {}
    for kind, times in KINDS:
        texts = [" ".join(map(str, row)) for row in prompt_rows(times) for _ in range(GROUP)]

        def call(seed, kind=kind, texts=texts):
            out = sampler(
                texts, NEW, max_prompt_length=WIDTH, temperature=1.0, top_p=1.0, seed=seed, pad_output=True,
                eos_tokens=list(end_ids(kind)),
            )  # fmt: skip
            tokens = np.asarray(out.tokens)
            ends = np.isin(tokens, end_ids(kind))
            cut = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, NEW)
            given = (tokens != 0).sum(axis=1)  # its own end token may be left out of what it returns
            return int(np.where(ends.any(axis=1), cut, np.minimum(given + 1, NEW)).sum())

        found[f"tunix_{kind}"] = timed(call, repeats)
    versions = {"tunix": importlib.metadata.version("google-tunix"), "jax": jax.__version__}
    return {"calls": found, "versions": versions | {"python": platform.python_version()}}


def one(python: str, arguments: list[str], script: str = __file__) -> Any:
    """Runs one side in its own process; its last line is the record."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, script, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def versions(tunix_python: str) -> dict:
    """Of both environments."""
    code = (
        "import importlib.metadata as m, json, platform; "
        "print(json.dumps({n: m.version(n) for n in NAMES} | {'python': platform.python_version()}))"
    )
    sides = {"ours": (sys.executable, ["jax"]), "tunix": (tunix_python, ["google-tunix", "jax", "flax"])}
    return {
        side: json.loads(subprocess.check_output([python, "-c", code.replace("NAMES", repr(names))], text=True))
        for side, (python, names) in sides.items()
    }


def rate(calls: list[dict], clock: str) -> float:
    """Tokens of all calls by their seconds."""
    return sum(call["tokens"] for call in calls) / sum(call[clock] for call in calls)


def compare(arguments: argparse.Namespace) -> None:
    """All sides by turns; prints and writes the ratios of each turn and their intervals."""
    from jaxrl_llm.experiment.evidence import provenance
    from jaxrl_llm.metrics.intervals import mean_interval

    cores = sorted(os.sched_getaffinity(0))[-arguments.cores :]
    os.sched_setaffinity(0, cores)
    turns = []
    for turn in range(arguments.turns):
        load = os.getloadavg()[0]
        common = ["--repeats", str(arguments.repeats), "--slots", str(arguments.slots)]
        found = one(sys.executable, ["--side", "ours", *common])
        found["calls"] |= one(sys.executable, ["--side", "per_core", *common])["calls"]
        if arguments.tunix_python:
            theirs = one(arguments.tunix_python, ["--side", "tunix", *common])
            found = {
                "calls": found["calls"] | theirs["calls"],
                "versions": {"ours": found["versions"], "tunix": theirs["versions"]},
            }
        turns.append(found | {"load_before": load})
        for clock in ("wall_s", "processor_s"):
            print(turn, clock, {name: round(rate(calls, clock)) for name, calls in found["calls"].items()}, flush=True)
    ratios = {}
    names = [
        "slots/lock_step",
        *(["slots/tunix", "lock_step/tunix", "per_core/tunix"] if arguments.tunix_python else []),
    ]
    for kind, _ in KINDS:
        for name in names:
            for clock in ("wall_s", "processor_s"):
                a, b = (f"{side}_{kind}" for side in name.split("/"))
                values = [rate(t["calls"][a], clock) / rate(t["calls"][b], clock) for t in turns]
                low = mean_interval(values) if len(values) > 1 else None
                ratios[f"{kind}: {name} by {clock}"] = {
                    "mean": sum(values) / len(values), "low": low and low.low, "high": low and low.high,
                    "values": values,
                }  # fmt: skip
                print(f"{kind}: {name} by {clock}", low or round(values[0], 2))
    record = {
        "command": f"python benchmarks/rollout.py --turns {arguments.turns} --repeats {arguments.repeats} "
        f"--slots {arguments.slots} --cores {arguments.cores}"
        + (" --tunix-python PYTHON" if arguments.tunix_python else ""),
        **provenance.made(ROOT),
        "what": "tokens per second of a rollout, 64 responses (queue: 256) of at most 128 tokens",
        "machine": {"cores": len(cores), "processor": platform.processor() or platform.machine()},
        "ratios": ratios,
        "turns": turns,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {OUT.relative_to(ROOT)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tunix-python", help="interpreter of an environment with google-tunix; without it, ours alone"
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of all sides")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each kind in a turn")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--side", choices=("ours", "per_core", "tunix"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side in ("ours", "per_core"):
        print(json.dumps(run_ours(arguments.slots, arguments.repeats, arguments.side == "per_core")))
    elif arguments.side == "tunix":
        print(json.dumps(run_tunix(arguments.repeats)))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
