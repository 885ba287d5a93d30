"""Plans of an iteration of PPO on eight simulated devices: the order of the cost model against measured time.

    python benchmarks/plans_measured.py

The six calls of ``ppo_calls`` (four models of one small shape, scalar heads left out as in the cost model) run
for real, with weights moved wherever a plan says so, on eight CPU devices in one process: plans by rule and the plans
that the search of ``experiments/systems/realhf.py`` chooses with much memory and with little. The cost model has the
rates of this machine in the place of the chip table's: a square product, a pass over memory, an all-gather.

The devices share the machine's cores, so communication is a copy in memory, and a device that stands idle costs
nothing. Two times are therefore compared with the cost model:

* ``timeline``: every call is run alone and timed; a block of n of the eight devices had all the cores, so its seconds
  count 8 / n times; the event simulation puts them together. What eight devices with an eighth each would take.
* ``whole``: the iteration as it runs here, nothing waits but for its data.

On one core seconds are those of this process (``time.process_time``), which others that use the core do not change; on
several they are those of the wall. The chip table has rates of bytes and nothing for the meeting of devices; so there
are two models, with the table's rates measured here, and with the time of an all-gather of eight numbers for every
collective as well (``met``).

All plans run by turns, in another order every time. Moves are timed too against a naive all-gather, in which every
device of the new place first receives the whole model. Writes results/benchmarks/plans_measured.json and .png.
"""

import argparse
import itertools
import json
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # papers are of the checkout, and not installed

from experiments.systems.parts import measured_plan, placement_search, ppo_calls
from experiments.systems.parts.measured_plan import Job, Plan, mesh_of, moved
from jaxrl_llm.distributed import rules
from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.metrics.intervals import mean_interval
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import reshard_cost, utilisation
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.planning.cost import LINKS
from jaxrl_llm.planning.parallel_layout import Sizes, leaves
from jaxrl_llm.planning.reshard_cost import Place
from jaxrl_llm.planning.work import Work
from jaxrl_llm.run.records import record

OUT = pathlib.Path(__file__).resolve().parents[1] / "results" / "benchmarks"
CONFIG = ModelConfig(  # so many layers run under a scan, which compiles quickly
    family="qwen3", vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=8, num_heads=8, num_kv_heads=8,
    head_dim=16, max_positions=64, tie_embeddings=True, qk_norm=True, eos_token_ids=(1,), pad_token_id=0,
)  # fmt: skip
WORK = Work(16, 16, 16, 16, compute_dtype=jnp.float32, remat=False)
DEVICES = 8
NOW = time.process_time if len(os.sched_getaffinity(0)) == 1 else time.perf_counter


# --- the cost model with this machine's rates


def gather_seconds(numbers: int, repeats: int = 5) -> float:
    """Of an all-gather over all devices at once; the quickest."""
    mesh = Sizes(fsdp=DEVICES).mesh(jax.devices()[:DEVICES])
    cut, whole = (jax.NamedSharding(mesh, jax.P(axis)) for axis in ("fsdp", None))
    given = jax.device_put(jnp.ones((numbers,), jnp.float32), cut)
    gather = jax.jit(lambda x: x, out_shardings=whole)
    jax.block_until_ready(gather(given))
    found = []
    for _ in range(repeats):
        began = NOW()
        jax.block_until_ready(gather(given))
        found.append(NOW() - began)
    return min(found)


def link_rate(numbers: int = 2**20) -> float:
    """Bytes a second and link, as ``planning.cost`` counts them."""
    return 4 * numbers * (DEVICES - 1) / DEVICES / gather_seconds(numbers) / LINKS


def chip() -> Chip:
    """An eighth of this machine; memory without end, the search gets its own limit.

    The cost model counts two bytes a number where this machine moves four: rates of bytes are halved.
    """
    whole = utilisation.measured(jnp.float32, side=CONFIG.hidden_size)
    return Chip(1e15, whole.bandwidth / DEVICES / 2, whole.flops / DEVICES, link_rate() / 2)


class Costs(NamedTuple):
    """All that a search may choose from and what it costs."""

    options: list[Place]
    tables: ppo_calls.Tables

    def plan(self, numbers: Any) -> Plan:
        """Places by their numbers."""
        return tuple(self.options[int(k)] for k in numbers)

    def of(self, plan: Plan, tables: ppo_calls.Tables | None = None) -> ppo_calls.Outcome:
        """What a plan costs."""
        numbers = jnp.asarray([self.options.index(place) for place in plan], jnp.int32)
        return OUTCOME(self.tables if tables is None else tables, numbers)


OUTCOME = jax.jit(ppo_calls.outcome)


def costs(machine: Chip) -> Costs:
    """Tables of all blocks of two devices and more."""
    options = ppo_calls.places(CONFIG, DEVICES, smallest=2)
    return Costs(options, ppo_calls.tables(CONFIG, CONFIG, machine, options, WORK))


def with_moves(found: Costs, machine: Chip, plans: dict[str, Plan]) -> Costs:
    """Moves of these plans as well, where the tables have none."""
    moves = np.array(found.tables.moves)
    for plan in plans.values():
        for k, (before, after) in enumerate(moved(plan)):
            where = found.options.index(before), found.options.index(after)
            moves[(k, *where)] = reshard_cost.seconds(CONFIG, machine, before, after)
    return found._replace(tables=found.tables._replace(moves=jnp.asarray(moves)))


def by_rule() -> dict[str, Plan]:
    """Plans that need no search; generation has whole copies of the weights, see ``search.rollout_sizes``."""
    all_data, sharded, tensor = (Place(0, Sizes(**{axis: DEVICES})) for axis in ("data", "fsdp", "tensor"))
    first, second = (Place(start, Sizes(data=DEVICES // 2)) for start in (0, DEVICES // 2))
    return {
        "data": (all_data,) * 6,
        "tensor": (tensor,) * 6,
        "fsdp": (all_data, *(sharded,) * 5),
        "zero": (tensor, *(sharded,) * 5),
        "pairs": tuple(second if model in (1, 3) else first for model in ppo_calls.MODELS),
    }


def searched(found: Costs, steps: int, capacity: float) -> Plan:
    """The plan of the search of ReaL where a device has so much memory."""
    settings = {"allowed": ppo_calls.candidates, "betas": (0.01, 0.1, 1.0), "steps": steps}
    tables = found.tables._replace(capacity=jnp.float32(capacity))
    return found.plan(placement_search.metropolis_plan(tables, found.options, jax.random.key(0), **settings))


# --- what comes of it


def timeline(found: Costs, plan: Plan, seconds: dict[str, float]) -> float:
    """The event simulation of measured calls, as if each device had an eighth of the cores."""
    tables = found.tables
    measured, moves = np.array(tables.seconds), np.array(tables.moves)

    def whole(name: str, *places: Place) -> float:
        return seconds[name] * DEVICES / len({d for place in places for d in place.devices})

    for call, (name, place) in enumerate(zip(ppo_calls.CALLS, plan, strict=True)):
        measured[call, found.options.index(place)] = whole(name, place)
    for k, (name, pair) in enumerate(zip(measured_plan.MOVES, moved(plan), strict=True)):
        if pair[0] != pair[1]:
            moves[(k, *map(found.options.index, pair))] = whole(name, *pair)
    return float(found.of(plan, tables._replace(seconds=jnp.asarray(measured), moves=jnp.asarray(moves))).seconds)


def agreement(left: dict[str, float], right: dict[str, float]) -> float:
    """Share of the pairs of plans that both put into the same order; a half by chance."""
    pairs = list(itertools.combinations(left, 2))
    return sum((left[a] < left[b]) == (right[a] < right[b]) for a, b in pairs) / len(pairs)


def transition(before: Place, after: Place, params: Any, repeats: int) -> dict[str, Any]:
    """Bytes and seconds of a move, and of the same move by way of the whole model on every device."""
    shapes, everywhere = leaves(CONFIG), Place(after.first, Sizes(data=after.sizes.chips))

    def count(to: Place) -> int:
        pieces = reshard_cost.transfers(shapes, before, to)
        return 4 * sum(int(np.prod([b - a for a, b in p.ranges])) * len(p.targets) for p in pieces)

    old, new, whole = (rules.shardings(params, mesh_of(place)) for place in (before, after, everywhere))
    here, found = jax.device_put(params, old), []
    for _ in range(repeats + 1):
        marks = [NOW()]
        jax.block_until_ready(jax.device_put(here, new))
        marks.append(NOW())
        jax.block_until_ready(jax.device_put(jax.block_until_ready(jax.device_put(here, whole)), new))
        marks.append(NOW())
        found.append((marks[1] - marks[0], marks[2] - marks[1]))
    times = np.asarray(found[1:])
    return {
        "bytes": count(after), "naive_bytes": count(everywhere),
        "naive_to_direct": mean_interval(times[:, 1] / times[:, 0])._asdict(),
    }  # fmt: skip


def name_of(place: Place) -> str:
    """``first+mesh``."""
    return f"{place.first}+{place.sizes.spec}"


def measure(plans: dict[str, Plan], found: Costs, given: measured_plan.Given, repeats: int) -> list[dict[str, Any]]:
    """All plans by turns, in an order that changes."""
    jobs, order = {name: Job(CONFIG, WORK, plan) for name, plan in plans.items()}, np.random.default_rng(1)
    models = {name: measured_plan.begin(job, given) for name, job in jobs.items()}

    def iterate(name: str, clock: dict[str, float] | None = None) -> float:
        began = NOW()
        models[name] = jax.block_until_ready(measured_plan.iterate(jobs[name], given, models[name], clock, now=NOW))
        return NOW() - began

    for name in jobs:  # compiles what is left: moves of weights and rows
        iterate(name)
    turns = []
    for number in range(repeats):
        turn = {"load_before": os.getloadavg()[0], "whole": {}, "timeline": {}, "calls": {}}
        for name in order.permutation(list(jobs)).tolist():
            turn["whole"][name] = iterate(name)
            clock = turn["calls"][name] = {}
            iterate(name, clock)
            turn["timeline"][name] = timeline(found, plans[name], clock)
        turns.append(turn)
        fastest = {kind: min(turn[kind], key=turn[kind].get) for kind in ("timeline", "whole")}
        print(f"turn {number}: fastest {fastest}", flush=True)
    return turns


def summary(turns: list[dict[str, Any]], predicted: dict[str, dict[str, float]], base: str) -> dict[str, Any]:
    """Seconds, times those of ``base``, and the agreement with both cost models, over the turns."""
    told: dict[str, Any] = {}
    for kind in ("timeline", "whole"):
        told[kind] = {
            name: {
                "seconds": mean_interval([t[kind][name] for t in turns])._asdict(),
                f"to_{base}": mean_interval([t[kind][name] / t[kind][base] for t in turns])._asdict(),
            }
            for name in predicted["bytes"]
        }
        for model, seconds in predicted.items():
            told[f"{kind}_agreement_{model}"] = mean_interval([agreement(seconds, t[kind]) for t in turns])._asdict()
    return told


def of_calls(turns: list[dict[str, Any]], plans: dict[str, Plan], models: dict[str, Costs]) -> dict[str, Any]:
    """Every call on every place of a plan: seconds by both models, and measured with an eighth of the cores each."""
    seen: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        for k, (call, place) in enumerate(zip(ppo_calls.CALLS, plan, strict=True)):
            kind = {"train_actor": "update", "train_critic": "update", "generate": "generate"}.get(call, "score")
            one = seen.setdefault(f"{kind} {name_of(place)}", {"measured": []})
            for model, found in models.items():
                one[model] = float(found.tables.seconds[k, found.options.index(place)])
            one["measured"] += [t["calls"][name][call] * DEVICES / place.sizes.chips for t in turns]
    return {key: one | {"measured": float(np.median(one["measured"]))} for key, one in sorted(seen.items())}


def plot(
    predicted: dict[str, dict[str, float]], told: dict[str, Any], names: dict[str, str], path: pathlib.Path
) -> None:
    """Measured against predicted seconds of both models; squares are what the search chooses with the model."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    titles = {"bytes": "rates of bytes", "met": "collectives timed"}
    for row, (model, seconds) in zip(axes, predicted.items(), strict=True):
        for axis, kind in zip(row, ("timeline", "whole"), strict=True):
            chosen = [one for name, one in names.items() if name.startswith(model)]
            for name, x in seconds.items():
                y = told[kind][name]["seconds"]
                error = [[y["mean"] - y["low"]], [y["high"] - y["mean"]]]
                axis.errorbar(x, y["mean"], error, fmt="s" if name in chosen else "o", capsize=3)
                axis.annotate(name, (x, y["mean"]), textcoords="offset points", xytext=(6, 4), fontsize=8)
            agree = told[f"{kind}_agreement_{model}"]["mean"]
            axis.set(title=f"{titles[model]}: {agree:.2f} of pairs in the same order", xlabel="cost model, s")
            axis.set(ylabel=f"measured ({kind}), s", xlim=(0, 1.15 * max(seconds.values())), ylim=(0, None))
            axis.grid(alpha=0.3)
    figure.suptitle("Plans of a PPO iteration on eight simulated devices; squares: chosen by search")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def verdicts(told: dict[str, Any], names: dict[str, str], outcomes: dict[str, Any], small: float) -> dict[str, Any]:
    """For each search and time: is its plan the fastest of those that fit its memory?

    The search of ReaL looks at the fastest layout of each block alone, so that it may find none that fits.
    """
    found = {}
    for chosen, mine in names.items():
        capacity = small if chosen.endswith("small") else float("inf")
        fits = [name for name in outcomes if outcomes[name].peak <= capacity]
        for kind in ("timeline", "whole"):
            means = {name: told[kind][name]["seconds"]["mean"] for name in outcomes}
            least = min(fits, key=means.get)
            found[f"{chosen}/{kind}"] = {
                "plan": mine, "fastest": least, "is_fastest": least == mine, "fits": mine in fits, "of": fits,
                "over_fastest": means[mine] / means[least],
            }  # fmt: skip
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8, help="turns of all plans")
    parser.add_argument("--steps", type=int, default=1000, help="proposals of each chain of the search")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    machine, plans, given = chip(), by_rule(), measured_plan.given(CONFIG, WORK, jax.random.key(0))
    meeting = gather_seconds(DEVICES)
    machines = {"bytes": machine, "met": machine._replace(meeting=meeting)}
    models, names = {model: costs(one) for model, one in machines.items()}, {}
    small = 0.5 * float(models["bytes"].of(plans["data"]).peak)  # half of what copies of everything everywhere need
    for model, found in models.items():
        for name, capacity in ((model, float("inf")), (f"{model}_small", small)):
            plan = searched(found, arguments.steps, capacity)
            # a plan that is there already is measured once
            names[name] = next((one for one, other in plans.items() if other == plan), f"by_{name}")
            plans.setdefault(names[name], plan)
    models = {model: with_moves(found, machines[model], plans) for model, found in models.items()}
    outcomes = {name: models["bytes"].of(plan) for name, plan in plans.items()}
    predicted = {
        model: {name: float(found.of(plan).seconds) for name, plan in plans.items()} for model, found in models.items()
    }
    turns = measure(plans, models["bytes"], given, arguments.repeats)
    told = summary(turns, predicted, names["bytes"])
    pairs = {f"{name_of(a)} to {name_of(b)}": (a, b) for p in plans.values() for a, b in moved(p) if a != b}
    whole = {
        "command": f"python benchmarks/plans_measured.py --repeats {arguments.repeats} --steps {arguments.steps}",
        **provenance.made(OUT.parent),
        "what": "PPO iterations on eight simulated devices that share the cores: cost model against measured seconds",
        "cores": len(os.sched_getaffinity(0)), "versions": record.versions(), "rates": machine._asdict(),
        "meeting_s": meeting, "clock": NOW.__name__,
        "small_bytes": small,
        "plans": {
            name: {
                "places": dict(zip(ppo_calls.CALLS, map(name_of, plan), strict=True)), 
                "predicted_s": {model: seconds[name] for model, seconds in predicted.items()},
                "peak_bytes": float(outcomes[name].peak),
            }
            for name, plan in plans.items()
        },
        "chosen": names, "verdicts": verdicts(told, names, outcomes, small), "summary": told,
        "calls": of_calls(turns, plans, models),
        "transitions": {name: transition(a, b, given.params, arguments.repeats) for name, (a, b) in pairs.items()},
        "turns": turns,
    }  # fmt: skip
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "plans_measured.json").write_text(json.dumps(whole, indent=1) + "\n")
    plot(predicted, told, names, OUT / "plans_measured.png")
    report(whole)


def report(whole: dict[str, Any]) -> None:
    """Prints what was found, in favour of the search or not."""
    print(f"on {whole['cores']} core(s); communication between devices is a copy in memory,")
    print(f"their meeting takes {whole['meeting_s']:.1e} s")
    for name, plan in whole["plans"].items():
        predicted = ", ".join(f"{model} {x:.3f}" for model, x in plan["predicted_s"].items())
        shown = ", ".join(f"{k} {whole['summary'][k][name]['seconds']['mean']:.3f}" for k in ("timeline", "whole"))
        print(f"{name:12} predicted {predicted}; measured {shown} s {list(plan['places'].values())}")
    for name, agree in whole["summary"].items():
        if "agreement" in name:
            print(
                f"{name}: {agree['mean']:.2f} [{agree['low']:.2f}, {agree['high']:.2f}] of the pairs, n = {agree['n']}"
            )
    for name, one in whole["verdicts"].items():
        said = "is the fastest" if one["is_fastest"] else f"is not the fastest, which is {one['fastest']}"
        said = said if one["fits"] else f"does not fit; the fastest that does is {one['fastest']}"
        print(f"{name}: the chosen plan, {one['plan']}, {said}; it takes {one['over_fastest']:.2f} times as long")
    for name, one in whole["transitions"].items():
        print(f"{name}: {one['bytes']:,} bytes, naively {one['naive_bytes']:,}, {one['naive_to_direct']['mean']:.2f}x")


if __name__ == "__main__":
    main()
