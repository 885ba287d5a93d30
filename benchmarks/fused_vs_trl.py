"""Updates per second of TRL's GRPOTrainer and of the fused loop: same weights, sizes, reward and cores, same run.

    python benchmarks/fused_vs_trl.py --trl-python PYTHON_WITH_TRL

Each update is one rollout of 256 responses (32 prompts x 8, 6 + 6 tokens) and one gradient step of GRPO on all of them,
float32, AdamW, no KL, a model of 0.1 M parameters. The two sides run by turns as processes of their own on the same
cores; start-up, compilation and the first updates are left out (and recorded). TRL computes with as many threads as
there are cores; the fused loop makes every core a device and divides the rows over them. The record goes to
results/benchmarks/fused_vs_trl.json.

``--accelerator``: both sides on the GPU that JAX and torch see, the fused loop with ``--seeds`` seeds side by side in
one program, whose updates are summed; the record goes to results/benchmarks/fused_vs_trl_accelerator.json.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "benchmarks" / "fused_vs_trl.json"
ON_ACCELERATOR = OUT.with_stem("fused_vs_trl_accelerator")
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, VOCAB, EOS = 32, 8, 6, 6, 64, 1
LEARNING_RATE, WARM_UP = 3e-3, 10


def prompt_rows() -> list[list[int]]:
    """1024 prompts of six tokens, the same for both sides."""
    return [[2 + (7 * i + i // 62 + 11 * k * k) % (VOCAB - 2) for k in range(PROMPT_TOKENS)] for i in range(1024)]


def run_jax(folder: pathlib.Path, updates: int, seeds: int) -> dict:
    """The fused loop; one compiled program of ``WARM_UP`` updates, called again and again.

    Args:
      seeds: side by side on one device; 0: one seed, on a device a core.
    """
    from jaxrl_llm.train.seed_axis import use_all_cores

    if not seeds:
        use_all_cores()
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxrl_llm import reduce
    from jaxrl_llm.advantages import group
    from jaxrl_llm.curriculum.uniform import make_uniform
    from jaxrl_llm.distributed import mesh as meshes
    from jaxrl_llm.distributed import rules
    from jaxrl_llm.losses.policy import clipped_policy_loss
    from jaxrl_llm.models.io import weights
    from jaxrl_llm.rollout.generate import generate
    from jaxrl_llm.rollout.per_device import per_device
    from jaxrl_llm.run import host_memory
    from jaxrl_llm.train import fused
    from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss
    from jaxrl_llm.train.methods.shared_prompt import share_prompts
    from jaxrl_llm.train.online import Online, init_state
    from jaxrl_llm.train.per_device import per_device_loss
    from jaxrl_llm.types import Problems, Rewards

    host_memory.keep_freed_pages()  # as the main job and every experiment do
    mesh = None if seeds else meshes.parse_mesh(f"data={jax.device_count()}")
    policy, params, _ = weights.pretrained(folder)
    tokens = jnp.asarray(prompt_rows(), jnp.int32)

    def rollout(params, tokens, valid, keys, ids):
        return generate(
            policy, params, tokens, valid, keys, group_size=GROUP, max_new_tokens=NEW_TOKENS, eos_ids=(EOS,),
            problem_ids=ids, early_exit=False,
        )  # fmt: skip

    def score(answers, out):
        high = (out.tokens >= VOCAB // 2).astype(jnp.float32)
        return Rewards(reduce.sequences(high, out.mask, mode="mean"), jnp.ones(high.shape[0], bool))

    def advantages(out, rewards):
        return group.per_token(group.group_normalized_advantages(rewards.value, out.group_ids), out.mask)

    loss = make_policy_loss(policy, clipped_policy_loss, score=share_prompts(GROUP, NEW_TOKENS))
    online = Online(
        policy=policy,
        problems=Problems(tokens, jnp.ones(tokens.shape, bool), {}, jnp.zeros(len(tokens), jnp.int32)),
        sampler=make_uniform(),
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        rollout=rollout if mesh is None else per_device(rollout, mesh),
        score=score,
        estimate=make_estimate(policy, advantages),
        loss=loss if mesh is None else per_device_loss(loss, mesh),
        tx=optax.adamw(LEARNING_RATE, weight_decay=0.0),
    )
    if mesh is None:
        state = fused.stack_states([init_state(online, params, jax.random.key(k)) for k in range(seeds)])
    else:
        state = rules.shard(init_state(online, params, jax.random.key(0)), mesh)
    run = fused.make_run(online, WARM_UP, seeds=bool(seeds))
    started = time.perf_counter()
    state, first = jax.block_until_ready(run(state))
    compiled = time.perf_counter() - started

    def reward(metrics):  # waits for the block
        found = np.asarray(metrics["reward/mean"])
        return found.mean(0) if seeds else found

    rewards, started = [reward(first)], time.perf_counter()
    for _ in range(updates // WARM_UP):
        state, metrics = run(state)
        rewards.append(reward(metrics))
    seconds = time.perf_counter() - started
    rewards = np.concatenate(rewards)
    return {
        "updates_per_s": max(seeds, 1) * WARM_UP * (updates // WARM_UP) / seconds,
        "first_call_s": compiled,
        "reward_first": float(rewards[:5].mean()),
        "reward_at_40": float(rewards[35:40].mean()),
        "parameters": int(sum(x.size for x in jax.tree.leaves(params))),
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "optax": optax.__version__},
    }


def run_trl(folder: pathlib.Path, updates: int, seeds: int) -> dict:
    """GRPOTrainer with transformers' generation, settings that cost nothing extra; on a GPU beside ``seeds``."""
    import datasets
    import tokenizers
    import torch
    import transformers
    import trl

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0")
    rows = [{"prompt": " ".join(f"t{i}" for i in row)} for row in prompt_rows()]
    rewards, clock = [], []

    def high(completion_ids, **_):
        found = [sum(i >= VOCAB // 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]
        rewards.append(sum(found) / len(found))
        return found

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.append(time.perf_counter())

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        config = trl.GRPOConfig(
            output_dir=out, use_cpu=not seeds, bf16=False, gradient_checkpointing=False, max_steps=WARM_UP + updates,
            per_device_train_batch_size=PROMPTS * GROUP, gradient_accumulation_steps=1, num_generations=GROUP,
            max_completion_length=NEW_TOKENS, temperature=1.0, beta=0.0, num_iterations=1, loss_type="dapo",
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
            max_grad_norm=1.0, report_to="none", save_strategy="no", logging_steps=1000, disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=high, args=config, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    return {
        "updates_per_s": updates / (clock[-1] - clock[WARM_UP - 1]),
        "first_call_s": clock[0] - started,
        "reward_first": sum(rewards[:5]) / 5,
        "reward_at_40": sum(rewards[35:40]) / 5,
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {
            "python": platform.python_version(), "trl": trl.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }  # fmt: skip


def write_model(folder: pathlib.Path) -> None:
    """Random weights that both sides load."""
    import jax

    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.decoder import make_policy
    from jaxrl_llm.models.io import weights

    config = ModelConfig(
        family="qwen3", vocab_size=VOCAB, hidden_size=64, intermediate_size=176, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, max_positions=64, tie_embeddings=True, qk_norm=True, eos_token_ids=(EOS,),
        pad_token_id=0,
    )  # fmt: skip
    weights.save(folder, config, make_policy(config).init(jax.random.key(0)))


def one(python: str, side: str, folder: pathlib.Path, updates: int, seeds: int) -> dict:
    """Runs one side in its own process; its last line is the record."""
    cpu = {} if seeds else {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | cpu | {"HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--side", side, "--folder", str(folder), "--updates", str(updates)]
    command += ["--accelerator", "--seeds", str(seeds)] if seeds else []
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(arguments: argparse.Namespace) -> None:
    """Both sides by turns; prints and writes the ratio of each turn and its interval."""
    from jaxrl_llm.experiment.evidence import provenance
    from jaxrl_llm.metrics.intervals import mean_interval

    seeds, turns = arguments.seeds if arguments.accelerator else 0, []
    if not seeds:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_model(folder)
        for turn in range(arguments.repeats):
            load = os.getloadavg()[0]
            ours = one(sys.executable, "jax", folder, 10 * arguments.updates, seeds)
            theirs = one(arguments.trl_python, "trl", folder, arguments.updates, seeds)
            turns.append({"fused": ours, "trl": theirs, "load_before": load})
            here, there = ours["updates_per_s"], theirs["updates_per_s"]
            print(f"{turn}: fused {here:.1f}, TRL {there:.2f} updates/s: {here / there:.1f}x", flush=True)
    ratios = [turn["fused"]["updates_per_s"] / turn["trl"]["updates_per_s"] for turn in turns]
    found = mean_interval(ratios)
    print(f"ratio {found}")
    command = f"python benchmarks/fused_vs_trl.py --trl-python PYTHON --repeats {arguments.repeats}"
    more = f"--accelerator --seeds {seeds}" if seeds else f"--cores {arguments.cores}"
    machine = {"device": turns[0]["fused"]["device"]} if seeds else {"cores": arguments.cores}
    out = ON_ACCELERATOR if seeds else OUT
    record = {
        "command": f"{command} --updates {arguments.updates} {more}",
        **provenance.made(ROOT),
        "what": "updates per second; 256 responses, 6 prompt + 6 new tokens, one GRPO update; TRL without vLLM"
        + (f"; the fused loop's are summed over {seeds} seeds" if seeds else ""),
        "machine": machine | {"processor": platform.processor() or platform.machine()},
        "ratio": {"mean": found.mean, "low": found.low, "high": found.high, "n": len(turns), "values": ratios},
        "turns": turns,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {out.relative_to(ROOT)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="interpreter of an environment with trl, torch and datasets")
    parser.add_argument("--repeats", type=int, default=5, help="turns of both sides")
    parser.add_argument("--updates", type=int, default=40, help="timed updates of TRL; the fused side makes 10 times")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--accelerator", action="store_true", help="on the GPU, seeds side by side")
    parser.add_argument("--seeds", type=int, default=64, help="of the fused loop, with --accelerator")
    parser.add_argument("--side", choices=("jax", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        side = run_jax if arguments.side == "jax" else run_trl
        seeds = arguments.seeds if arguments.accelerator else 0
        print(json.dumps(side(arguments.folder, arguments.updates, seeds)))
    elif arguments.trl_python:
        compare(arguments)
    else:
        parser.error("--trl-python PYTHON: an environment with trl, for example made by pip install trl")


if __name__ == "__main__":
    main()
