"""Updates an hour of the threaded loop at staleness 2 and of the host loop, with a verifier that sleeps; same run.

    python benchmarks/async_vs_sync.py

GRPO on running sums modulo 7 from the same base, equal updates, prompts and learning rate; the loss corrects for old
samples by the sampler's probabilities. The verifier sleeps a fixed time for each batch, as one does that waits for
sandboxes, and the threaded loop has as many scorers as the staleness lets batches be under way. Both sides run by
turns in one process on the same two cores, each seed a turn; compilation is left out. The record goes to
results/benchmarks/async_vs_sync.json.
"""

import argparse
import json
import os
import pathlib
import platform
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # papers are of the checkout, and not installed
OUT = ROOT / "results" / "benchmarks" / "async_vs_sync.json"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="turns of both sides")
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds that the verifier sleeps for a batch")
    parser.add_argument("--base-steps", type=int, default=1000, help="supervised steps of the base")
    parser.add_argument("--cores", type=int, default=2)
    compare(parser.parse_args())


def make(sleep: float):
    """The loop with the sleeping verifier, the first state of a seed, and held-out accuracy."""
    import jax
    import jax.numpy as jnp
    import optax

    from experiments.parts import running_sums, strings
    from experiments.parts import running_sums_task as toy
    from jaxrl_llm.advantages import group
    from jaxrl_llm.losses.policy import clipped_policy_loss
    from jaxrl_llm.train import host
    from jaxrl_llm.train.methods import builders
    from jaxrl_llm.train.online import init_state

    world = running_sums.WORLD
    online = strings.learned_from_prompts(
        world, toy.draw_prompts(jax.random.key(1), 2048), strings.score_of(world, toy.right),
        estimate=builders.make_estimate(world.policy, builders.per_response(group.group_normalized_advantages)),
        loss=builders.make_policy_loss(world.policy, clipped_policy_loss, anchor=builders.sampler_anchor),
        tx=optax.adam(1e-3), prompts_per_step=8, group_size=8,
    )  # fmt: skip
    plain = host.make_host_loop(online)

    def judge(rows):
        found = jax.block_until_ready(plain.score(rows))
        time.sleep(sleep)
        return found

    def start(base, seed: int):
        return init_state(online, jax.tree.map(jnp.copy, base), jax.random.fold_in(jax.random.key(7), seed))

    return plain._replace(score=judge), start, jax.jit(running_sums.measure)


def compare(arguments: argparse.Namespace) -> None:
    """Both sides by turns; prints and writes the ratio of each turn, both final scores and their difference."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    import jax

    from experiments.parts import running_sums, strings
    from experiments.parts import running_sums_task as toy
    from jaxrl_llm.asynchronous import threads
    from jaxrl_llm.experiment.evidence import provenance
    from jaxrl_llm.metrics.intervals import mean_interval, paired_difference
    from jaxrl_llm.train import host

    loop, start, measure = make(arguments.sleep)
    scorers = arguments.staleness + 1

    def late(state, steps):
        return threads.run(loop, state, steps, staleness=arguments.staleness, scorers=scorers)

    sides = {"sync": lambda state, steps: host.run(loop, state, steps), "async": late}
    init = jax.jit(
        strings.make_base(running_sums.WORLD, toy.draw_attempts, steps=arguments.base_steps, learning_rate=5e-3)
    )
    turns = []
    for seed in range(arguments.seeds):
        base = init(jax.random.key(seed))
        before = score(measure, base)
        turn = {"seed": seed, "load_before": os.getloadavg()[0], "before": before}
        for name, run in sides.items():
            run(start(base, seed), 3)  # compiles
            state = start(base, seed)
            began = time.perf_counter()
            state, history = run(state, arguments.updates)
            seconds = time.perf_counter() - began
            behind = [row.get(threads.STALENESS, 0.0) for row in history]
            turn[name] = {
                "updates_per_hour": 3600 * arguments.updates / seconds,
                "after": score(measure, state.params),
                "staleness": sum(behind) / len(behind),
            }
        turns.append(turn)
        rate = turn["async"]["updates_per_hour"] / turn["sync"]["updates_per_hour"]
        shown = ", ".join(f"{n} {turn[n]['updates_per_hour']:.0f}/h to {turn[n]['after']:.3f}" for n in sides)
        print(f"{seed}: {shown} from {turn['before']:.3f}: {rate:.2f}x", flush=True)
    ratios = [t["async"]["updates_per_hour"] / t["sync"]["updates_per_hour"] for t in turns]
    scores = {name: [t[name]["after"] for t in turns] for name in sides}
    figures = {"ratio": mean_interval(ratios), "sync": mean_interval(scores["sync"])}
    figures |= {"async": mean_interval(scores["async"]), "before": mean_interval([t["before"] for t in turns])}
    figures["difference"] = paired_difference(scores["async"], scores["sync"])
    print("\n".join(f"{name} {found}" for name, found in figures.items()))
    options = " ".join(f"--{k.replace('_', '-')} {v:g}" for k, v in vars(arguments).items())
    record = {
        "command": f"python benchmarks/async_vs_sync.py {options}",
        **provenance.made(ROOT),
        "what": "updates per hour and held-out accuracy, asynchronous.threads.run against train.host.run",
        "scorers": scorers,
        "machine": {"cores": arguments.cores, "processor": platform.processor() or platform.machine()},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    record |= {name: {"mean": x.mean, "low": x.low, "high": x.high, "n": len(turns)} for name, x in figures.items()}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record | {"turns": turns}, indent=1) + "\n")
    print(f"wrote {OUT.relative_to(ROOT)}")


def score(measure, params) -> float:
    """Held-out accuracy on 4,096 problems."""
    import jax

    return sum(float(measure(params, jax.random.key(1000 + k))["eval/accuracy"]) for k in range(8)) / 8


if __name__ == "__main__":
    main()
