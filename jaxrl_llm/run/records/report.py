"""The end of the main job: what it printed and wrote, and the trained model as a model folder."""

import itertools
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import template_hash
from jaxrl_llm.distributed import rollout_weights
from jaxrl_llm.models.io import weights
from jaxrl_llm.planning import utilisation
from jaxrl_llm.run import compile_cache, parts
from jaxrl_llm.run.evaluate import Evaluation, while_training
from jaxrl_llm.run.records import health, record
from jaxrl_llm.train.skipped import SKIPPED
from jaxrl_llm.types import Params


def _as_dict(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "pass@1": evaluation.pass_at_1._asdict(),
        f"pass@{evaluation.k}": evaluation.pass_at_k._asdict(),
        "pass@1_by_level": {str(level): at_1._asdict() for level, at_1 in evaluation.by_level.items()},
        "reward": evaluation.reward._asdict(),
        "mean_tokens": evaluation.mean_tokens,
        "truncated_fraction": evaluation.truncated,
        "invalid": evaluation.invalid,
    }


def column(lines: list[dict[str, Any]], name: str) -> list[float]:
    """The values of a figure in the steps that have one: of an empty set, or of a damaged line, there is none."""
    return [line[name] for line in lines if isinstance(line.get(name), int | float)]


def summary(reduce: Callable[[list[float]], Any], values: list[float]) -> float | None:
    """Of no values there is no summary: None."""
    return float(reduce(values)) if values else None


def steady(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that compiled nothing; of a run that does not count its programs all but the first.

    >>> [x["step"] for x in steady([{"step": i, "compile/count": n} for i, n in enumerate((3, 3, 4, 4, 2, 2), 1)])]
    [2, 4, 6]
    """
    return [now for before, now in itertools.pairwise(lines) if before.get("compile/count") == now.get("compile/count")]


def phases(lines: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Of rollout, score and update the share of the time, and the median share of the peak rates; None: no work of
    the device, or nothing recorded. Of steps that compiled nothing, where there are any.
    """
    later = steady(lines) or lines
    names = ("rollout", "score", "update")
    seconds = {name: sum(column(later, f"time/{name}_s")) for name in names}
    roofs = {name: column(later, f"roof/{name}") for name in names}
    whole = sum(seconds.values())
    return {
        name: {
            "share": seconds[name] / whole if whole else None,
            "roof": float(np.median(roofs[name])) if roofs[name] else None,
        }
        for name in names
    }


def reshard(lines: list[dict[str, Any]]) -> dict[str, float] | None:
    """Medians over the steps of what the weights cost on their way to the rollout's layout; None: it is training's."""
    found = {name: column(steady(lines) or lines, f"reshard/{name}") for name in rollout_weights.FIGURES}
    return {name: float(np.median(values)) for name, values in found.items()} if all(found.values()) else None


def shown(value: float | None, form: str) -> str:
    """A figure as text; one that there is not is said to be so."""
    return "none" if value is None else format(value, form)


def _at_roof(share: float | None, dtype: Any) -> str:
    if share is None:
        return ""
    why = utilisation.above_roof(share, dtype)
    return f" at {share:.2g} of the roof" + (f" ({why})" if why else "")


def report(
    settings: dict[str, Any],
    model: parts.Model,
    tables: parts.Tables,
    run: pathlib.Path,
    before: Evaluation,
    after: Evaluation,
    seconds: float,
) -> None:
    """Prints and writes what the run did."""
    lines = record.read_lines(run / "metrics.jsonl")
    pairs = parts.side_by_side(model.tokenizer, tables.heldout, before, after)
    template = model.tokenizer.chat_template
    gain, between = after.pass_at_1.mean - before.pass_at_1.mean, while_training(lines)
    results = {
        "command": " ".join(["python -m jaxrl_llm", *sys.argv[1:]]),
        "settings": settings,
        "versions": record.versions(),
        "chat_template_sha256": None if template is None else template_hash(template),
        "before": _as_dict(before),
        "while_training": {
            str(step): dict(zip(("mean", "low", "high"), p, strict=True)) for step, p in between.items()
        },
        "after": _as_dict(after),
        "gain": gain,
        "sampler_trainer_gap": {
            "mean": summary(np.mean, column(lines, "kl/sampler_mean")),
            "max": summary(np.max, column(lines, "kl/sampler_max")),
        },
        "tokens_per_s": summary(np.median, column(lines, "tokens/per_s")),
        "skipped_updates": sum(column(lines, SKIPPED)),
        "learned_nothing": (
            causes := health.judged(lines, health.silent_of(group_size=settings["group_size"])).summary()
        ),
        "phases": phases(lines),
        "reshard": reshard(lines),
        "rollouts": len(lines) * settings["prompts_per_step"] * settings["group_size"],
        "training_seconds": sum(column(lines, "time/step_s")),
        "compile_seconds": compile_cache.measured(),  # on loading what was compiled before, too
        "seconds": seconds,
    }
    record.write_json(run / "results.json", results)
    record.write_lines(run / "samples.jsonl", [dict(zip(("prompt", "before", "after"), p, strict=True)) for p in pairs])
    points = {0: before.pass_at_1[:3], **between, settings["steps"]: after.pass_at_1[:3]}
    record.plot_curves(run / "curve.png", lines, f"GRPO, {settings['model']}, {settings['data']}", points)
    measured = settings["eval_data"] or f"held-out {settings['data']}"
    print(f"\n{measured}, {before.pass_at_1.n} problems x {before.k} samples, 95 % intervals")
    print(f"  pass@1  before {before.pass_at_1}   after {after.pass_at_1}   gain {gain:+.3f}")
    if settings["reward"]:
        print(f"  reward  before {before.reward}   after {after.reward}")
    print(f"  pass@{before.k}  before {before.pass_at_k}   after {after.pass_at_k}")
    for level, new in after.by_level.items():
        print(f"    level {level}  pass@1  before {before.by_level.get(level)}   after {new}")
    for step, (mean, low, high) in between.items():
        print(f"    step {step}  pass@1  {mean:.3f} [{low:.3f}, {high:.3f}]")
    running, took = steady(lines), results["training_seconds"]
    compiled, rest = len(lines) - len(running), took - sum(column(running, "time/step_s"))
    said = f"; {compiled} of them compiled programs, in {rest:.0f} s" if compiled > 1 else ""
    print(f"  {len(lines)} steps in {took:.0f} s of training{said}")
    gap = results["sampler_trainer_gap"]
    print(f"  sampler/trainer log-prob gap: mean {shown(gap['mean'], '.2g')}, max {shown(gap['max'], '.2g')}", end="")
    print(f"   {shown(results['tokens_per_s'], ',.0f')} tokens/s")
    for cause in causes:
        print(f"  {cause}")
    if count := results["skipped_updates"]:
        print(f"  {count:g} updates were not finite and were skipped")
    told = (
        f"{name} {shown(part['share'], '.0%')} of the time" + _at_roof(part["roof"], settings["compute"])
        for name, part in results["phases"].items()
    )
    print("  " + ", ".join(told))
    if moved := results["reshard"]:
        print(f"  weights to the rollout's layout: {moved['sent_bytes']:,.0f} bytes in {moved['seconds']:.2g} s a step")
    print("generations on held-out prompts:")
    for prompt, old, new in pairs:
        print(f"  {prompt}\n    before  {old}\n    after   {new}")
    print(f"run folder: {run} (settings, metrics, results, curve.png, samples, checkpoints, model)")


def save_model(run: pathlib.Path, model: parts.Model, params: Params, *, score: np.ndarray | None = None) -> None:
    """The trained model in Hugging Face layout, in the precision of the one given; tokenizer files beside it.

    Args:
      score: as in ``models.io.weights.save``.
    """
    dtype = weights.export_type(model.folder, model.config)
    weights.save(run / "model", model.config, params, dtype=dtype, score=score)
    for file in model.tokenizer.files:
        shutil.copy(file, run / "model" / file.name)
