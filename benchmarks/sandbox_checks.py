"""Programs judged per second by the sandbox, warm, against a bare interpreter for each: by turns in one run.

    python benchmarks/sandbox_checks.py

A program of a few lines with three tests, as those of MBPP. ``sandbox``: ``sandbox.pool.Sandbox`` with as many warm
workers as cores; every program gets a process of its own with all the protection of this machine. ``bare``:
``python -I`` on program and tests, without any protection, as many at a time. Start-up of the workers is left out. The
record goes to results/benchmarks/sandbox_checks.json.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.metrics.intervals import mean_interval
from jaxrl_llm.sandbox.pool import Sandbox, Test

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "benchmarks" / "sandbox_checks.json"
CHECKS = ("assert ordered([3, 1, 2]) == [1, 2, 3]", "assert ordered([]) == []", "assert ordered([2, 2]) == [2, 2]")


def tests(count: int) -> list[Test]:
    """Every third program is wrong."""
    returned = ("sorted(items)", "sorted(items)", "items")
    return [
        Test(f"def ordered(items):\n    return {returned[k % 3]}  # {k}\n", CHECKS, entries=("ordered",))
        for k in range(count)
    ]


def bare(workers: int, given: list[Test]) -> float:
    """Programs per second."""

    def one(test: Test) -> bool:
        source = "\n".join((test.program, *test.checks))
        return subprocess.run([sys.executable, "-I", "-c", source], stderr=subprocess.DEVNULL).returncode == 0

    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as threads:
        right = list(threads.map(one, given))
    assert right == [k % 3 != 2 for k in range(len(given))]
    return len(given) / (time.perf_counter() - start)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8, help="turns of both")
    parser.add_argument("--programs", type=int, default=90, help="programs of a turn")
    arguments = parser.parse_args()
    workers, given, turns = len(os.sched_getaffinity(0)), tests(arguments.programs), []
    with Sandbox(workers=workers) as sandbox:
        sandbox.check_all(given[: 4 * workers])
        for turn in range(arguments.repeats):
            load = os.getloadavg()[0]
            done, metrics = sandbox.check_all(given)
            assert [all(c.passed) for c in done] == [k % 3 != 2 for k in range(len(given))]
            turns.append(
                {"sandbox": metrics["sandbox/checks_per_s"], "bare": bare(workers, given), "load_before": load}
            )
            print(f"{turn}: sandbox {turns[-1]['sandbox']:.1f}, bare {turns[-1]['bare']:.1f} a second", flush=True)
        protection = sandbox.protection.statement()
    summary = {name: mean_interval([turn[name] for turn in turns])._asdict() for name in ("sandbox", "bare")}
    ratio = mean_interval([turn["sandbox"] / turn["bare"] for turn in turns])
    record = {
        "command": f"python benchmarks/sandbox_checks.py --repeats {arguments.repeats} --programs {arguments.programs}",
        **provenance.made(ROOT),
        "what": "programs of three tests judged per second, warm",
        "machine": {"cores": workers, "processor": platform.processor() or platform.machine()},
        "protection": protection, "summary": summary, "sandbox_over_bare": ratio._asdict(), "turns": turns,
        "versions": {"python": platform.python_version()},
    }  # fmt: skip
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{summary['sandbox']['mean']:.1f} a second, {ratio} times a bare interpreter; wrote {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
