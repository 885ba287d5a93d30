"""Verdicts per second of scorers of other packages, warm, in the sandbox and in a bare process: by turns in one run.

    python benchmarks/foreign_scorers.py

``sandbox``: ``verifiers.gym.verify`` and ``verifiers.math.verify`` as a job asks them, in a ``VerifierPool`` of as many
workers as cores, each with a warm worker of the sandbox. ``bare``: the same scorers called in the pool's own processes,
as this user and without any protection. The responses are the reference answers of every reasoning-gym family, those
of the family's next problem, and one number; for math-verify, numbers, fractions and polynomials, no two alike.
Start-up is left out. ``..._cpu``: verdicts per second of processor time of all processes concerned, times the cores:
what a machine reaches that does nothing else, whatever else this one does.
The record goes to results/benchmarks/foreign_scorers.json.
"""

import argparse
import base64
import contextlib
import functools
import json
import os
import pathlib
import pickle
import platform
import sys
from typing import Any

import psutil

from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.metrics.intervals import mean_interval
from jaxrl_llm.verifiers import gym, math
from jaxrl_llm.verifiers.pool import VerifierPool
from jaxrl_llm.verifiers.verdict import Verdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "benchmarks" / "foreign_scorers.json"
Items = tuple[list[dict[str, Any]], list[str]]


def prepare() -> None:
    """Before the clock runs, in a bare worker."""
    import math_verify
    import reasoning_gym

    assert reasoning_gym and math_verify.parse("$1$", parsing_timeout=0)


@functools.lru_cache(maxsize=256)
def _family(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0)


def bare_gym(answer: dict[str, Any], response: str) -> Verdict:
    """The family's scorer in this process."""
    entry = pickle.loads(base64.b64decode(answer["entry"]))
    try:
        return Verdict(float(_family(answer["family"]).score_answer(response, entry)), True, "")
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # some fail on what is no answer
        return Verdict(0.0, True, type(error).__name__)


def bare_math(answer: dict[str, Any], response: str) -> Verdict:
    """math-verify in this process."""
    import math_verify

    gold, given = (math_verify.parse(text, parsing_timeout=0) for text in (f"${answer['value']}$", response))
    return Verdict(float(math_verify.verify(gold, given, timeout_seconds=0)), True, "")


def gym_items(each: int) -> Items:
    """Right and wrong answers of every family that stores one."""
    answers, responses = [], []
    for family in gym.families():
        made = gym.problems(family, each + 1, 0, unsound=True)
        for k in range(each):
            for response in (made.solutions[k], made.solutions[k + 1], "42"):
                if response is not None:
                    answers.append(made.answers[k])
                    responses.append(response)
    return answers, responses


def math_items(count: int) -> Items:
    """Numbers, fractions and polynomials, every second one wrong."""
    answers, responses = [], []
    for k in range(3, 3 + count):
        wrong = k // 3 % 2
        value, response = (
            (f"{k}/{k + 1}", f"So it is $\\frac{{{2 * k}}}{{{2 * k + 2 + wrong}}}$."),
            (f"x^2+{2 * k}x+{k * k}", f"It is $(x+{k + wrong})^2$"),
            (f"{k}", f"\\boxed{{{k + wrong}}}"),
        )[k % 3]
        answers.append({"value": value})
        responses.append(response)
    return answers, responses


def processor_s() -> float:
    """Seconds of a processor that this process and all that it started have had."""
    this = psutil.Process()
    spent = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


def rate(pool: VerifierPool, verifier: Any, items: Items, cores: int) -> tuple[float, float, list[float]]:
    """Verdicts per second, the same of processor time on all cores, and the values."""
    before = processor_s()
    judged = pool.judge(verifier, *items)
    spent = processor_s() - before
    assert all(verdict.valid for verdict in judged.verdicts), [v for v in judged.verdicts if not v.valid][:1]
    count, values = len(items[0]), [verdict.value for verdict in judged.verdicts]
    return count / judged.metrics["verifier/seconds"], cores * count / spent, values


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8, help="turns of both")
    parser.add_argument("--each", type=int, default=2, help="problems of a family")
    arguments = parser.parse_args()
    bare = sys.modules["__main__"] if __name__ != "__main__" else __import__("foreign_scorers")  # for other processes
    workers, turns = len(os.sched_getaffinity(0)), []
    work = {
        "gym": (gym.verify, bare.bare_gym, gym_items(arguments.each)),
        "math": (math.verify, bare.bare_math, math_items(300)),
    }
    pools = {
        (name, kind): VerifierPool(workers=workers, timeout_s=gym.TIMEOUT_S, memory_mb=4096)
        for name in work
        for kind in ("sandbox", "bare")
    }
    for turn in range(-1, arguments.repeats):  # the first warms up
        load, rates, values = os.getloadavg()[0], {}, {}
        for name, (sandboxed, unprotected, items) in work.items():
            for kind, verifier in (("sandbox", sandboxed), ("bare", unprotected)):
                label = f"{name}_{kind}"
                rates[label], rates[f"{label}_cpu"], values[kind] = rate(pools[name, kind], verifier, items, workers)
            assert values["sandbox"] == values["bare"], name
        if turn >= 0:
            turns.append(rates | {"load_before": load})
            print(f"{turn}: " + ", ".join(f"{k} {v:.0f}/s" for k, v in rates.items()), flush=True)
    for pool in pools.values():
        pool.close()
    summary = {name: mean_interval([t[name] for t in turns])._asdict() for name in turns[0] if name != "load_before"}
    ratios = {
        name: mean_interval([t[f"{name}_sandbox_cpu"] / t[f"{name}_bare_cpu"] for t in turns])._asdict()
        for name in work
    }
    record = {
        "command": f"python benchmarks/foreign_scorers.py --repeats {arguments.repeats} --each {arguments.each}",
        "what": "verdicts of scorers of other packages per second, warm",
        **provenance.made(ROOT),
        "machine": {"cores": workers, "processor": platform.processor() or platform.machine()},
        "verdicts_a_turn": {name: len(items[0]) for name, (_, _, items) in work.items()},
        "summary": summary, "sandbox_over_bare": ratios, "turns": turns,
        "versions": {"python": platform.python_version()},
    }  # fmt: skip
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{json.dumps(summary)}; wrote {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
