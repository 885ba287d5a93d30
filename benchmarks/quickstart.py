"""The record of the quickstart: held-out scores before and after of finished run folders, one figure of all of them.

    for seed in 0 1 2; do bash launch/quickstart.sh --seed $seed --out runs/quickstart$seed; done
    python benchmarks/quickstart.py runs/quickstart0 runs/quickstart1 runs/quickstart2

Writes results/quickstart/nano.json and nano.png.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.run.records.record import running_mean

OUT = pathlib.Path(__file__).resolve().parents[1] / "results" / "quickstart"


def read(folder: pathlib.Path) -> tuple[dict, list[dict]]:
    """Results and metrics of a finished run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "results.json").read_text()), lines


def draw(runs: list[tuple[dict, list[dict]]], path: pathlib.Path) -> None:
    """Training reward of each seed, held-out pass@1 before and after with 95 % intervals."""
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for k, (found, lines) in enumerate(runs):
        steps = [line["step"] for line in lines]
        color = f"C{k}"
        axis.plot(steps, running_mean([line["reward/mean"] for line in lines], 20), color=color, lw=1, alpha=0.7)
        for step, when in ((0, "before"), (steps[-1] * (1.01 + 0.012 * k), "after")):
            score = found[when]["pass@1"]
            error = [[score["mean"] - score["low"]], [score["high"] - score["mean"]]]
            label = f"seed {found['settings']['seed']}" if when == "after" else None
            axis.errorbar([step], [score["mean"]], error, fmt="o", ms=4, capsize=3, color=color, label=label)
    axis.set(
        xlabel="step", ylabel="fraction right", ylim=(0, None),
        title="GRPO on Countdown: training reward (lines, mean of 20 steps), held-out pass@1 (dots, 95 %)",
    )  # fmt: skip
    axis.title.set_fontsize(9)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(folders: list[str]) -> None:
    """Reads the runs, writes the record and the figure."""
    runs = [read(pathlib.Path(folder)) for folder in folders]
    OUT.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "seed": found["settings"]["seed"],
            "before": found["before"],
            "after": found["after"],
            "gain": found["after"]["pass@1"]["mean"] - found["before"]["pass@1"]["mean"],
            "training_seconds": found["training_seconds"],
        }
        for found, _ in runs
    ]
    settings = {k: v for k, v in runs[0][0]["settings"].items() if k not in ("seed", "out", "resume")}
    record = {
        "command": "bash launch/quickstart.sh --seed SEED",
        **provenance.made(pathlib.Path(__file__).parent),
        "settings": settings,
        "versions": runs[0][0]["versions"],
        "runs": rows,
    }
    (OUT / "nano.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(runs, OUT / "nano.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="the folder of a finished run")
    given = parser.parse_args().run
    for unfinished in (folder for folder in given if not (pathlib.Path(folder) / "results.json").is_file()):
        parser.error(f"{unfinished} is not the folder of a finished run: it has no results.json")
    main(given)
