"""Decoding and the update on one accelerator, as shares of what the device can do, next to other systems.

    python benchmarks/accelerator.py [--model DIR | --shape Qwen3-1.7B] [--transformers-python P] [--tunix-python P]
        [--train "--model DIR --data FILE.jsonl ..."]

Both roofs are measured first, in the same run: one large bfloat16 product, one pass over memory. ``decode``: 64 rows
(``--rows``) read 512 tokens and write 512; the share is the bytes of weights and of the caches as they grow, by the
seconds of a token and the measured bandwidth. Seconds of a token are those of a call less those of a call with half as
many tokens. ``update``: one GRPO step on rows of 4,096 tokens, float32 masters, bfloat16 compute, AdamW; the share is
6 operations a weight and token, and attention's once, by the seconds and the measured rate. Of ours the quickest of
three that fits: all kept for the backward pass, the products kept, blocks recomputed.

The other systems run as processes of their own on the same weights (written to a folder first): transformers' generate
and a step of its forward and backward pass with torch's AdamW; Tunix's sampler and a step of its Qwen3. Their update
is of plain log-probabilities, which favours them. ``--train``: flags of a run of ``jaxrl train``, whose curve, speed
and shares of both roofs are kept, also of one that ``--train-seconds`` cuts short. The record goes to
results/benchmarks/accelerator.json; ``--tiny`` runs all of it in small, on any machine.
"""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "benchmarks" / "accelerator.json"
BARS = {"decode": 0.70, "update": 0.50}
KEEPS = ("all", "products", "none")  # of a layer for the backward pass


class Sizes(NamedTuple):
    """What is measured; ``side`` is of the product and of the memory pass."""

    prompt: int = 512
    new: int = 512
    columns: int = 4096
    update_rows: int = 4
    side: int = 8192
    dtype: str = "bfloat16"


TINY = Sizes(8, 8, 32, 2, 256, "float32")


def best(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the quickest of some calls after the first."""
    call()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def token_seconds(call: Callable[[int], Any], new: int, repeats: int) -> float:
    """Of one token of all rows, prompts left out."""
    return (best(lambda: call(new), repeats) - best(lambda: call(new // 2), repeats)) / (new - new // 2)


def tokens_of(rows: int, columns: int) -> list[list[int]]:
    """Rows without the ids that pad or end."""
    return [[10 + (37 * i + 101 * k * k + 11 * k) % 1000 for k in range(columns)] for i in range(rows)]


def dearest(folder: str, call: Callable[[], Any], most: int = 25) -> list[str]:
    """A line for each of the kernels that take most of a call on a GPU: seconds, number, name."""
    import jax

    with tempfile.TemporaryDirectory(dir=folder) as there:
        with jax.profiler.trace(there):
            jax.block_until_ready(call())
        (found,) = pathlib.Path(there).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(found))
    spent: dict[str, list[float]] = {}
    for plane in data.planes:
        for line in plane.lines if "/device:GPU" in plane.name else ():
            for event in line.events if line.name.startswith("Stream") else ():
                spent.setdefault(event.name, []).append(event.duration_ns / 1e9)
    ordered = sorted(spent.items(), key=lambda item: -sum(item[1]))
    whole = sum(map(sum, spent.values()))
    return [f"  {whole:.4f} s in all", *(f"  {sum(x):.4f} s  {len(x):6d}  {name[:110]}" for name, x in ordered[:most])]


def ours_decode(
    policy: Any, config: Any, params: Any, rows: int, sizes: Sizes, repeats: int, trace: str = ""
) -> dict[str, float]:
    """Seconds of a token of all rows, and the bytes that must be read for it."""
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.planning.cost import cache_bytes
    from jaxrl_llm.planning.parallel_layout import Sizes as Mesh
    from jaxrl_llm.rollout.generate import generate

    dtype = jnp.dtype(sizes.dtype)
    prompts = jnp.asarray(tokens_of(rows, sizes.prompt), jnp.int32)
    settings = {"group_size": 1, "eos_ids": (config.padded_vocab_size,)}

    def rollout(params: Any, keys: Any, new: int) -> Any:
        valid = jnp.ones(prompts.shape, bool)
        return generate(policy, params, prompts, valid, keys, max_new_tokens=new, **settings).tokens

    roll = jax.jit(rollout, static_argnums=2)
    narrow = jax.tree.map(lambda x: x.astype(dtype), params)
    keys = jax.random.split(jax.random.key(0), rows)
    seconds = token_seconds(lambda new: jax.block_until_ready(roll(narrow, keys, new)), sizes.new, repeats)
    if trace:
        print(
            "decode, kernels:", *dearest(trace, lambda: roll(narrow, keys, sizes.new // 2)), sep="\n", file=sys.stderr
        )
    one = cache_bytes(config, Mesh()) * dtype.itemsize / 2
    context = sizes.prompt + 0.75 * sizes.new  # in the middle of the half that is timed
    return {"decode_s": seconds, "decode_bytes": config.num_parameters * dtype.itemsize + rows * one * context}


def quickest_update(
    make: Callable[..., Any], config: Any, params: Any, sizes: Sizes, repeats: int, trace: str, keeps: Sequence[str]
) -> dict[str, Any]:
    """``ours_update`` of the quickest policy, with seconds by what is kept for the backward pass.

    What does not fit into the memory has none; once keeping less is slower, what keeps still less is not tried.
    """
    import jax
    import jax.numpy as jnp

    products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ways = {"all": False, "products": products, "none": True}
    found, best_way, tried = {}, "", {}
    for kept, remat in ((name, ways[name]) for name in keeps):
        try:
            one = ours_update(make(config, remat), config, jax.tree.map(jnp.copy, params), sizes, repeats, trace)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            tried[kept] = None
            continue
        tried[kept] = one["update_s"]
        if best_way and one["update_s"] > found["update_s"]:
            break
        found, best_way = one, kept
    return found | {"update_keeps": best_way, "update_s_by_kept": tried}


def ours_update(policy: Any, config: Any, params: Any, sizes: Sizes, repeats: int, trace: str = "") -> dict[str, float]:
    """Seconds of a GRPO step, and its useful operations; ``params`` are used up."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxrl_llm.distributed.compiler_options import options_of
    from jaxrl_llm.losses.policy import clipped_policy_loss
    from jaxrl_llm.planning.cost import active_parameters
    from jaxrl_llm.train.methods.builders import make_policy_loss
    from jaxrl_llm.train.step import make_update
    from jaxrl_llm.types import Batch, TrainState

    shape = (sizes.update_rows, sizes.columns)
    tokens = jnp.asarray(tokens_of(*shape), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(sizes.columns, dtype=jnp.int32)[None], shape)
    zeros, ones = jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32)
    batch = Batch(
        tokens=tokens, segment_ids=jnp.ones_like(tokens), positions=places, mask=places > 0, advantages=ones,
        old_logp=zeros, sampler_logp=zeros, ref_logp=zeros, group_ids=jnp.arange(shape[0], dtype=jnp.int32),
        total=jnp.float32(shape[0] * (shape[1] - 1)), extras={},
    )  # fmt: skip
    tx = optax.adamw(1e-6)
    state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})
    update = jax.jit(
        make_update(make_policy_loss(policy, clipped_policy_loss), tx), donate_argnums=0, compiler_options=options_of()
    )

    def step() -> None:
        nonlocal state
        state, metrics = update(state, batch)
        jax.block_until_ready(metrics)

    found = best(step, repeats)
    if trace:
        print("update, kernels:", *dearest(trace, step), sep="\n", file=sys.stderr)
    count = shape[0] * shape[1]
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * count * sizes.columns  # half is masked
    return {"update_s": found, "update_flops": 6 * active_parameters(config) * count + attention}


def run_ours(
    folder: str, rows: int, sizes: Sizes, repeats: int, trace: str = "", keeps: Sequence[str] = KEEPS
) -> dict[str, Any]:
    """This library; also the roofs and the least bytes and operations, which serve all."""
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.models.decoder import make_policy
    from jaxrl_llm.models.io import weights
    from jaxrl_llm.models.kernels.attention_kernels import (
        make_attend,
        make_cached,
        make_layout,
        make_rows,
        make_sums,
        make_token_rows,
    )
    from jaxrl_llm.planning import utilisation

    dtype = jnp.dtype(sizes.dtype)
    chip = utilisation.measured(dtype, side=sizes.side)

    def make(config: Any, remat: Any = True, **_: Any) -> Any:
        fast = {"attend_fn": make_attend("auto"), "layout": make_layout(), "cached_fn": make_cached("auto"),
                "rows_fn": make_rows("auto"), "sums_fn": make_sums("auto"),
                "token_rows": make_token_rows("auto")}  # fmt: skip
        return make_policy(config, compute_dtype=dtype, remat=remat, **fast)

    policy, params, config = weights.pretrained(folder, make=make)
    found: dict[str, Any] = ours_decode(policy, config, params, rows, sizes, repeats, trace)
    found |= quickest_update(make, config, params, sizes, repeats, trace, keeps)
    return found | {"bandwidth": chip.bandwidth, "matrix_rate": chip.flops, "device": jax.devices()[0].device_kind}


def run_transformers(folder: str, rows: int, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """transformers on the same folder; on the GPU where torch sees one."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, sizes.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    prompts = torch.tensor(tokens_of(rows, sizes.prompt), device=device)

    def done() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def roll(new: int) -> None:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, min_new_tokens=new, do_sample=True,
            top_k=0, pad_token_id=0,
        )  # fmt: skip
        done()

    found = {"decode_s": token_seconds(roll, sizes.new, repeats), "version": transformers.__version__}
    del model
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    model.gradient_checkpointing_enable()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    tokens = torch.tensor(tokens_of(sizes.update_rows, sizes.columns), device=device)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        done()

    try:
        return found | {"update_s": best(step, repeats)}
    except torch.OutOfMemoryError as error:  # its logits of the vocabulary are not chunked
        return found | {"update_s": None, "update_failed": str(error).splitlines()[0]}


class _Words:
    """Texts are ids between spaces, as Tunix's sampler wants a tokenizer."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 0

    def eos_id(self):
        return 1

    def pad_id(self):
        return 0


def run_tunix(folder: str, rows: int, sizes: Sizes, repeats: int) -> dict[str, float]:
    """Tunix's Qwen3 and sampler on the same folder."""
    import importlib.metadata

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tunix.generate import sampler as samplers
    from tunix.models.qwen3 import model as models
    from tunix.models.qwen3 import params as stored

    raw = json.loads((pathlib.Path(folder) / "config.json").read_text())
    dtype = jnp.dtype(sizes.dtype)
    common = dict(
        num_layers=raw["num_hidden_layers"], vocab_size=raw["vocab_size"], embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"], num_heads=raw["num_attention_heads"], head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"], rope_theta=int(raw["rope_theta"]), norm_eps=raw["rms_norm_eps"],
        use_tied_embedding=raw["tie_word_embeddings"], dtype=dtype,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))

    def load(param_dtype: Any, remat: Any) -> Any:
        config = models.ModelConfig(**common, param_dtype=param_dtype, remat_config=remat)
        return stored.create_model_from_safe_tensors(folder, config, mesh, dtype=param_dtype)

    with mesh:
        cache = samplers.CacheConfig(
            sizes.prompt + sizes.new, common["num_layers"], common["num_kv_heads"], common["head_dim"]
        )
        texts = [" ".join(map(str, row)) for row in tokens_of(rows, sizes.prompt)]

        sampler = samplers.Sampler(load(dtype, models.RematConfig.NONE), _Words(), cache)

        def roll(new: int) -> None:
            out = sampler(texts, new, max_prompt_length=sizes.prompt, temperature=1.0, top_p=1.0, seed=0,
                          pad_output=True, eos_tokens=[raw["vocab_size"] + 1])  # fmt: skip
            jax.block_until_ready(out.tokens)

        seconds = token_seconds(roll, sizes.new, repeats)
        model = load(jnp.float32, models.RematConfig.BLOCK)
        optimiser = nnx.Optimizer(model, optax.adamw(1e-6), wrt=nnx.Param)
        tokens = jnp.asarray(tokens_of(sizes.update_rows, sizes.columns), jnp.int32)
        places = jnp.broadcast_to(jnp.arange(sizes.columns, dtype=jnp.int32)[None], tokens.shape)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((sizes.columns,) * 2, bool))[None], (*tokens.shape, sizes.columns))

        @nnx.jit
        def step(model: Any, optimiser: Any) -> Any:
            def loss(model: Any) -> Any:
                logits, _ = model(tokens, places, None, causal)
                logp = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
                return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

            value, grads = nnx.value_and_grad(loss)(model)
            optimiser.update(model, grads)
            return value

        update = best(lambda: jax.block_until_ready(step(model, optimiser)), repeats)
    return {"decode_s": seconds, "update_s": update, "version": importlib.metadata.version("google-tunix")}


SIDES = {"ours": run_ours, "transformers": run_transformers, "tunix": run_tunix}


def write_model(folder: str, shape: str, tiny: bool) -> None:
    """Random weights of a known shape."""
    import jax

    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.decoder import init_params
    from jaxrl_llm.models.io import weights
    from jaxrl_llm.planning.known_models import shape_of

    config = shape_of(shape)
    if tiny:
        config = ModelConfig(
            family="qwen3", vocab_size=1100, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=8, max_positions=64, tie_embeddings=True, qk_norm=True,
        )  # fmt: skip
    weights.save(folder, config, init_params(config, jax.random.key(0)), dtype="bfloat16")


def compare(arguments: argparse.Namespace, folder: str) -> None:
    """Every side after the other; prints and writes the shares."""
    pythons = {"ours": sys.executable, "transformers": arguments.transformers_python, "tunix": arguments.tunix_python}
    found: dict[str, dict[str, Any]] = {}
    for side, python in pythons.items():
        if python:
            words = ["--side", side, "--model", folder, "--rows", str(arguments.rows), "--repeats",
                     str(arguments.repeats), *(["--tiny"] if arguments.tiny else [])]  # fmt: skip
            words += ["--trace", arguments.trace, "--keeps", *arguments.keeps] if side == "ours" else []
            done = subprocess.run([python, __file__, *words], capture_output=True, text=True, cwd=ROOT)
            if done.returncode and side == "ours":
                raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
            if done.returncode:  # the others do not take our figures with them
                print(f"{side} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
                continue
            if arguments.trace and side == "ours":
                print(done.stderr[done.stderr.find("decode, kernels:") :], flush=True)
            found[side] = with_shares(json.loads(done.stdout.strip().splitlines()[-1]), found)
            print(side, json.dumps(found[side]), flush=True)
            shares = ", ".join(
                f"{name} {found[side][f'{name}_share']:.1%} of the roof (bar {bar:.0%})"
                for name, bar in BARS.items() if f"{name}_share" in found[side]
            )  # fmt: skip
            print(f"{side}: {arguments.rows / found[side]['decode_s']:,.0f} tokens/s; {shares}", flush=True)
            write(arguments, {"sides": found})  # a machine that is lent may go before the last of them
    if arguments.train:
        write(arguments, {"sides": found, "train": train(shlex.split(arguments.train), arguments.train_seconds)})


def with_shares(one: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a side measured, with its shares of the roofs that ours measured."""
    roof = found.get("ours", one)
    one["decode_share"] = roof["decode_bytes"] / one["decode_s"] / roof["bandwidth"]
    if one["update_s"] is not None:
        one["update_share"] = roof["update_flops"] / one["update_s"] / roof["matrix_rate"]
    return one


def write(arguments: argparse.Namespace, measured: dict[str, Any]) -> None:
    """The record so far; a small run leaves none."""
    from jaxrl_llm.experiment.evidence import provenance  # which takes no device

    if not arguments.tiny:
        whole = {"command": " ".join(sys.argv), **provenance.made(ROOT)}
        whole |= {"rows": arguments.rows, "shape": arguments.shape}
        OUT.write_text(json.dumps(whole | measured, indent=1) + "\n")


CURVES = ("reward/mean", "loss/total", "length/mean_tokens", "kl/sampler_mean", "kl/sampler_max", "tokens/per_s",
          "time/step_s", "time/rollout_s", "time/update_s", "roof/rollout", "roof/update")  # fmt: skip


def train(flags: list[str], seconds: float) -> dict[str, Any]:
    """A run of the main job: its flags, what it measured before and after, and its curves, as far as it came.

    Args:
      seconds: after so many it is asked to stop (it ends after its step); after as many again it is killed.
    """
    folder = ROOT / "runs" / "accelerator"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "jaxrl_llm", "train", *flags, "--out", str(folder / "run")]
    with open(folder / "said.txt", "w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT)
        for ask in (process.terminate, process.kill, lambda: None):
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                ask()
    lines = (folder / "said.txt").read_text().splitlines()
    print("\n".join(lines[-40:]), flush=True)
    metrics, results = folder / "run" / "metrics.jsonl", folder / "run" / "results.json"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    curves = {name: [row.get(name) for row in rows] for name in CURVES}
    found = {"flags": flags, "steps": [row["step"] for row in rows], "curves": curves}
    if process.returncode or not results.is_file():
        return found | {"unfinished": lines[-1:], "exit_code": process.returncode}
    whole = json.loads(results.read_text())
    whole.pop("settings", None)
    return found | {"results": whole}


def main() -> None:
    """One side, or all of them in processes of their own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="", help="folder of a model; empty: random weights of --shape")
    parser.add_argument("--shape", default="Qwen3-1.7B", help="a name that python -m jaxrl_llm plan knows")
    parser.add_argument("--transformers-python", default="", help="interpreter with torch and transformers")
    parser.add_argument("--tunix-python", default="", help="interpreter with google-tunix")
    parser.add_argument("--train", default="", help="flags of jaxrl train: the run of a real model")
    parser.add_argument("--train-seconds", type=float, default=3600.0, help="after which --train is asked to stop")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--keeps", nargs="+", choices=KEEPS, default=KEEPS, help="what is tried for the update of ours")
    parser.add_argument("--trace", default="", help="folder for traces of ours: prints the dearest kernels of a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", choices=("write", *SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--only-train", action="store_true", help="the run of --train, into the record that there is")
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else Sizes()
    if arguments.side == "write":
        write_model(arguments.model, arguments.shape, arguments.tiny)
    elif arguments.side:
        more = (arguments.trace, arguments.keeps) if arguments.side == "ours" else ()
        print(json.dumps(SIDES[arguments.side](arguments.model, arguments.rows, sizes, arguments.repeats, *more)))
    elif arguments.only_train:
        if not (arguments.train and OUT.is_file()):
            parser.error("--only-train adds the run of --train to a record; there must be both")
        whole = json.loads(OUT.read_text()) | {"train": train(shlex.split(arguments.train), arguments.train_seconds)}
        OUT.write_text(json.dumps(whole, indent=1) + "\n")
    elif arguments.model:
        compare(arguments, os.path.abspath(arguments.model))
    else:
        with tempfile.TemporaryDirectory() as folder:
            # a process of its own: one that has used the device keeps its memory from those that are measured
            words = ["--side", "write", "--model", folder, "--shape", arguments.shape]
            subprocess.run([sys.executable, __file__, *words, *(["--tiny"] if arguments.tiny else [])], check=True)
            compare(arguments, folder)


if __name__ == "__main__":
    main()
