"""How well slots are used with a slow world: episodes that share slots against batches that end together, in one run.

    python benchmarks/slot_occupancy.py

The shop of ``retail`` in Python: every answer takes 50 ms, and a customer leaves after a number of turns
that is geometric, 5 on average. Both arms play the same 512 episodes (32 prompts x 16) with the same decoder, 16 at a
time, with the same code; only

* ``slots`` hands all episodes to one rollout, whose free slots take the next one at once;
* ``batches`` hands it 16 at a time: the next 16 begin when the last of these is over. Within a batch nobody waits for
  another one's tool, which is kinder than lock-step by turns.

Occupancy is the share of the slots' time in which they hold an episode that is not over. The two arms run by turns; the
record goes to results/benchmarks/slot_occupancy.json.
"""

import argparse
import json
import os
import pathlib
import platform
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # papers are of the checkout, and not installed

from experiments.agents.parts import retail
from experiments.parts import strings
from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.metrics.intervals import mean_interval
from jaxrl_llm.rollout.host.driver import make_host_episodes
from jaxrl_llm.rollout.host.env import HostEnv, on_host, task_rows
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "benchmarks" / "slot_occupancy.json"
PROMPTS, GROUP, SLOTS, MEAN_TURNS, MOST_TURNS, TOOL_S = 32, 16, 16, 5.0, 60, 0.05
FIGURES = ("occupancy", "decoding", "waiting", "seconds")


def slow_shop() -> HostEnv:
    """The shop whose tools are slow and whose customers leave when they have had enough."""
    shop = on_host(retail.make_env())

    def reset(seed, task):
        stays = int(np.random.default_rng(seed).geometric(1.0 / MEAN_TURNS))
        return shop.reset(seed, task), stays

    def step(state, ids):
        inside, stays = state
        time.sleep(TOOL_S)
        heard = shop.step(inside, ids)
        return heard._replace(state=(heard.state, stays - 1), done=heard.done or stays <= 1)

    return HostEnv(reset, step, lambda state: shop.identity(state[0]), shop.action_tokens, shop.observation_tokens)


def players():
    """``{arm: () -> (figures, turns of every episode)}``; programs are compiled by the first call of each."""
    problems, env = retail.problems(PROMPTS, 0, openly=False), slow_shop()
    new = MOST_TURNS * (env.action_tokens + env.observation_tokens)
    policy = strings.make_world(len(retail.ALPHABET), problems.tokens.shape[1], new, layers=2).policy
    params, ids = policy.init(jax.random.key(0)), jnp.arange(PROMPTS, dtype=jnp.int32)
    host = make_host_episodes(
        policy, env, task_rows(problems.answers), group_size=GROUP, max_turns=MOST_TURNS, max_new_tokens=new,
        end_ids=(), slots=SLOTS, decode_tokens=env.action_tokens,
    )  # fmt: skip
    keys = sample_keys(jax.random.key(1), 0, ids, GROUP)

    def play(prompts: slice):
        rows = slice(prompts.start * GROUP, prompts.stop * GROUP)
        return host.play(params, problems.tokens[prompts], problems.valid[prompts], keys[rows], ids[prompts])

    def figures(played) -> tuple[dict, list[int]]:
        seconds = [one.figures["world/seconds"] for one in played]
        shares = {
            name: float(np.average([one.figures[f"world/{name}"] for one in played], weights=seconds))
            for name in FIGURES[:-1]
        }
        taken = [np.asarray(multi_turn.turns_of(one.trajectories).taken).sum(axis=1) for one in played]
        assert not any(one.failures for one in played)
        return shares | {"seconds": sum(seconds)}, np.concatenate(taken).tolist()

    def batches():
        size = SLOTS // GROUP
        return figures([play(slice(i, i + size)) for i in range(0, PROMPTS, size)])

    return {"slots": lambda: figures([play(slice(0, PROMPTS))]), "batches": batches}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="turns of both arms")
    arguments = parser.parse_args()
    arms, turns = players(), []
    for play in arms.values():  # compiles
        play()
    for turn in range(arguments.repeats):
        load, found = os.getloadavg()[0], {name: play() for name, play in arms.items()}
        lengths = [lengths for _, lengths in found.values()]
        assert lengths[0] == lengths[1], "both arms play the same episodes"
        turns.append({name: figures for name, (figures, _) in found.items()} | {"load_before": load})
        said = (f"{name} {shares['occupancy']:.3f} in {shares['seconds']:.1f} s" for name, (shares, _) in found.items())
        print(f"{turn}: " + "; ".join(said), flush=True)
    summary = {
        name: {figure: mean_interval([turn[name][figure] for turn in turns])._asdict() for figure in FIGURES}
        for name in arms
    }
    faster = mean_interval([turn["batches"]["seconds"] / turn["slots"]["seconds"] for turn in turns])
    record = {
        "command": f"python benchmarks/slot_occupancy.py --repeats {arguments.repeats}",
        **provenance.made(ROOT),
        "what": "slot occupancy; 512 episodes of a shop in Python, geometric turns, 50 ms a turn, 16 slots",
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "turns_of_an_episode": {"mean": float(np.mean(lengths[0])), "most": max(lengths[0])},
        "summary": summary, "seconds_ratio": faster._asdict(), "turns": turns,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }  # fmt: skip
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"batches take {faster} times as long; wrote {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
