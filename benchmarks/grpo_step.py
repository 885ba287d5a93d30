"""Seconds of a whole GRPO step, rollout, reward, advantages and update: ours and Tunix's GRPO learner, in one run.

    python benchmarks/grpo_step.py --tunix-python PYTHON_WITH_TUNIX

The model, prompts and end ids of ``benchmarks/rollout.py`` (4 layers, width 256, float32; 16 prompts x 4 samples, 32
and at most 128 tokens), one AdamW update on all 64 responses, no KL, one update per rollout, the share of even ids as
reward, in Python. ``fixed``: no id ends a response. ``geometric``: about one token in a hundred does. The sides run by
turns as processes of their own on the same cores; steps that compile are left out. A step is the time from the first
reward of one to that of the next, for all sides. Ours takes the batch in eight parts, and every core is a device that
has its own rows; Tunix's takes it all at once (``tunix``) and in four parts (``tunix_parts``), on one device with as
many threads. ``--side tunix_cores`` prints what Tunix takes with every core a device: longer. The record goes to
results/benchmarks/grpo_step.json.
"""

import argparse
import json
import os
import platform
import sys
import time
from functools import partial

import rollout as shared

OUT = shared.OUT.with_name("grpo_step.json")
LEARNING_RATE, WARM_UP = 1e-6, 3
KINDS = ("fixed", "geometric")
SIDES = ("ours", "tunix", "tunix_parts")
ALONE = "tunix_cores"


def gaps(times: list[float], parts: int = 1) -> list[float]:
    """Seconds from step to step, the first ones left out; ``parts`` rewards a step."""
    firsts = times[::parts]
    return [b - a for a, b in zip(firsts, firsts[1:], strict=False)][WARM_UP:]


def run_ours(kind: str, steps: int) -> list[float]:
    """The host loop of the main job: reward in Python between the two compiled halves."""
    from jaxrl_llm.train.seed_axis import use_all_cores

    use_all_cores()
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxrl_llm.advantages import group
    from jaxrl_llm.curriculum.uniform import make_uniform
    from jaxrl_llm.distributed import mesh as meshes
    from jaxrl_llm.distributed import rules
    from jaxrl_llm.losses.policy import clipped_policy_loss
    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.decoder import make_policy
    from jaxrl_llm.rollout.generate import generate
    from jaxrl_llm.rollout.per_device import per_device
    from jaxrl_llm.run import host_memory
    from jaxrl_llm.train import host
    from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss, per_response
    from jaxrl_llm.train.methods.shared_prompt import share_prompts
    from jaxrl_llm.train.online import Online, init_state
    from jaxrl_llm.train.per_device import per_device_loss
    from jaxrl_llm.types import Problems, Rewards

    host_memory.keep_freed_pages()  # as the main job and every experiment do
    config = ModelConfig(
        family="qwen3", vocab_size=shared.VOCAB, hidden_size=256, intermediate_size=1024,
        max_positions=shared.WIDTH + shared.NEW, tie_embeddings=True, qk_norm=True, **shared.SHAPE,
    )  # fmt: skip
    policy, mesh = make_policy(config), meshes.parse_mesh(f"data={jax.device_count()}")
    tokens = jnp.asarray(shared.prompt_rows(), jnp.int32)
    times = []

    def rollout(params, tokens, valid, keys, ids):
        return generate(
            policy, params, tokens, valid, keys, group_size=shared.GROUP, max_new_tokens=shared.NEW,
            eos_ids=shared.end_ids(kind), problem_ids=ids, **shared.STAGES,
        )  # fmt: skip

    def score(trajectories):
        rows, mask = np.asarray(trajectories.tokens), np.asarray(trajectories.mask)
        times.append(time.perf_counter())
        share = ((rows % 2 == 0) & mask).sum(axis=1) / mask.sum(axis=1)
        return Rewards(jnp.asarray(share, jnp.float32), jnp.ones((len(rows),), bool))

    online = Online(
        policy=policy,
        problems=Problems(tokens, jnp.ones(tokens.shape, bool), jnp.arange(len(tokens), dtype=jnp.int32), None),
        sampler=make_uniform(),
        prompts_per_step=shared.PROMPTS,
        group_size=shared.GROUP,
        rollout=per_device(rollout, mesh),
        score=lambda answers, trajectories: None,
        estimate=make_estimate(policy, per_response(group.group_normalized_advantages), reduction="seq_mean"),
        loss=per_device_loss(
            make_policy_loss(
                policy, clipped_policy_loss, reduction="seq_mean", score=share_prompts(shared.GROUP, shared.NEW)
            ),
            mesh,
        ),
        tx=optax.adamw(LEARNING_RATE),
        microbatches=8,
    )
    state = init_state(online, jax.jit(policy.init)(jax.random.key(0)), jax.random.key(0))
    host.run(host.make_host_loop(online, score), rules.shard(state, mesh), steps)
    return gaps(times)


def run_tunix(kind: str, steps: int, parts: int = 1, cores: bool = False) -> list[float]:
    """``GRPOLearner.train`` with the vanilla rollout engine; rollout and gradient in so many parts of the batch."""
    if cores:
        count = len(os.sched_getaffinity(0))
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as models
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    config = models.ModelConfig(
        vocab_size=shared.VOCAB, embed_dim=256, hidden_dim=1024, rope_theta=10_000, norm_eps=1e-6,
        use_tied_embedding=True, **shared.SHAPE,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(-1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    settings = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(LEARNING_RATE), eval_every_n_steps=10**6, max_steps=steps,
            mini_batch_size=shared.PROMPTS, train_micro_batch_size=shared.PROMPTS // parts,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=shared.NEW, max_prompt_length=shared.WIDTH, kv_cache_size=shared.WIDTH + shared.NEW,
            temperature=1.0, top_p=1.0, eos_tokens=list(shared.end_ids(kind)),
        ),
    )  # fmt: skip
    times = []

    def reward(prompts, completions, **_):
        times.append(time.perf_counter())
        ids = [[int(word) for word in text.split()] for text in completions]
        return [sum(i % 2 == 0 for i in row) / max(1, len(row)) for row in ids]

    with mesh:
        cluster = rl_cluster.RLCluster(
            actor=models.Qwen3(config, rngs=nnx.Rngs(0)), tokenizer=shared.Words(), cluster_config=settings
        )
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cluster, reward_fns=reward,
            algo_config=grpo_learner.GRPOConfig(num_generations=shared.GROUP, num_iterations=1, beta=0.0),
        )  # fmt: skip
        texts = np.asarray([" ".join(map(str, row)) for row in shared.prompt_rows()])
        learner.train([{"prompts": texts}] * steps)
    return gaps(times, parts)


def compare(arguments: argparse.Namespace) -> None:
    """Both sides by turns; prints and writes the ratios of the turns with their intervals."""
    from jaxrl_llm.experiment.evidence import provenance
    from jaxrl_llm.metrics.intervals import mean_interval

    cores = sorted(os.sched_getaffinity(0))[-arguments.cores :]
    os.sched_setaffinity(0, cores)
    turns, ratios = {kind: [] for kind in KINDS}, {}
    for turn in range(arguments.turns):
        for kind in KINDS:
            given = ["--kind", kind, "--steps", str(arguments.steps)]
            load, seconds = os.getloadavg()[0], {}
            for side in SIDES:
                python = sys.executable if side == "ours" else arguments.tunix_python
                seconds[side] = shared.one(python, ["--side", side, *given], __file__)
            means = {side: sum(found) / len(found) for side, found in seconds.items()}
            turns[kind].append({"load_before": load, "seconds": seconds})
            print(turn, kind, {side: round(mean, 3) for side, mean in means.items()}, flush=True)
            for side in ("tunix", "tunix_parts"):
                ratios.setdefault(f"{kind}: {side}", []).append(means[side] / means["ours"])
    found = {kind: mean_interval(values) for kind, values in ratios.items()}
    for kind, interval in found.items():
        print(f"{kind} over ours, seconds a step: {interval}")
    record = {
        "command": f"python benchmarks/grpo_step.py --tunix-python PYTHON --turns {arguments.turns} --steps "
        f"{arguments.steps} --cores {arguments.cores}",
        **provenance.made(shared.ROOT),
        "what": "seconds of a whole GRPO step, 64 responses of at most 128 tokens; ratio: Tunix's over ours",
        "machine": {"cores": len(cores), "processor": platform.processor() or platform.machine()},
        "versions": shared.versions(arguments.tunix_python),
        "ratios": {kind: {"values": ratios[kind], "low": i.low, "high": i.high} for kind, i in found.items()},
        "turns": turns,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {OUT.relative_to(shared.ROOT)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tunix-python", help="interpreter of an environment with google-tunix")
    parser.add_argument("--turns", type=int, default=3, help="turns of both sides")
    parser.add_argument("--steps", type=int, default=9, help=f"steps of a turn, the first {WARM_UP} left out")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--side", choices=(*SIDES, ALONE), help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run = {"ours": run_ours, "tunix": run_tunix, "tunix_parts": partial(run_tunix, parts=4),
               ALONE: partial(run_tunix, cores=True)}[arguments.side]  # fmt: skip
        found = run(arguments.kind, arguments.steps)
        print(json.dumps(found))
    elif not arguments.tunix_python:
        parser.error("--tunix-python is needed: python -m venv tunix && tunix/bin/pip install google-tunix==0.1.7")
    elif arguments.steps <= WARM_UP + 2:
        parser.error(f"--steps {arguments.steps} must be more than {WARM_UP + 2}")
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
