"""One figure an experiment: a forest plot of the claim, then curves per arm with 95 % bands and a line a seed.

And one figure a comparison: a row for every method, with its interval and its paired difference to the baseline.
"""

import pathlib
import warnings
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.experiment.claims import Claim, Judged
from jaxrl_llm.experiment.evidence.verdicts import CONTRADICTED, SUPPORTED_HERE
from jaxrl_llm.experiment.results import Results, interval
from jaxrl_llm.metrics.intervals import Interval, t_quantile
from jaxrl_llm.run.records import record


def _band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half width of the t interval of ``[seeds, points]`` over finite seeds."""
    count = np.isfinite(values).sum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a point without any finite seed stays NaN
        mean, spread = np.nanmean(values, axis=0), np.nanstd(values, axis=0, ddof=1)
    quantile = np.array([t_quantile(n - 1) if n > 1 else np.nan for n in count.tolist()])
    return mean, quantile * spread / np.sqrt(np.maximum(count, 1))


def _dots(axis, results: Results, metric: str, colours) -> None:
    """Final values: one dot a seed, the mean with its interval."""
    for k, (name, arm) in enumerate(results.arms.items()):
        values = np.asarray(arm.metrics.get(metric, []), float)
        spread = np.linspace(-0.15, 0.15, len(values)) if len(values) > 1 else np.zeros(len(values))
        axis.plot(k + spread, values, ".", ms=4, alpha=0.4, color=colours[name])
        found = interval(values)
        low, high = np.nan_to_num([found.mean - found.low, found.high - found.mean])
        axis.errorbar([k], [found.mean], [[low], [high]], fmt="o", capsize=4, color=colours[name])
    axis.set_xticks(range(len(results.arms)), list(results.arms), rotation=20, fontsize=8)


def _lines(axis, results: Results, metric: str, colours) -> None:
    for name, arm in results.arms.items():
        if metric not in arm.curves:
            continue
        steps, values = results.curve(name, metric)
        mean, half = _band(values)
        if len(steps) == 1:  # measured once: a level to compare with
            axis.axhline(mean[0], ls="--", lw=1.2, color=colours[name])
        axis.plot(steps, values.T, lw=0.4, alpha=0.25, color=colours[name])
        axis.fill_between(steps, mean - half, mean + half, alpha=0.15, color=colours[name], lw=0)
        axis.plot(steps, mean, lw=1.8, color=colours[name], label=name)
    axis.set_xlabel("step")


def _point(axis, found: Judged | Interval, row: int, **style) -> None:
    """A mean with its interval in a row."""
    ends = np.nan_to_num([[found.mean - found.low], [found.high - found.mean]])
    axis.errorbar([found.mean], [row], xerr=ends, ms=5, capsize=3, **style)


def _rows(axis, values: dict[str, np.ndarray], names: list[str]) -> None:
    """A row for every name: one dot a seed, the mean with its interval."""
    for k, name in enumerate(names):
        found, colour = interval(values[name]), "tab:blue" if k else "black"
        axis.plot(values[name], np.full(len(values[name]), k), ".", ms=4, alpha=0.35, color=colour)
        _point(axis, found, k, fmt="o", color=colour)
    axis.grid(alpha=0.3)


def _differences(axis, parts: dict[str, Judged], names: list[str]) -> None:
    """The difference of every method to the baseline with Holm's interval, its verdict beside it, and d* shaded."""
    widest = max((part.d_star for part in parts.values() if np.isfinite(part.d_star)), default=0.0)
    axis.axvspan(-widest, widest, color="tab:grey", alpha=0.15, lw=0)
    for k, name in enumerate(names):
        if name not in parts or not np.isfinite(parts[name].mean):
            continue
        part = parts[name]
        colour = {SUPPORTED_HERE: "tab:green", CONTRADICTED: "tab:red"}.get(part.verdict, "tab:blue")
        _point(axis, part, k, fmt="D", color=colour)
        said = {SUPPORTED_HERE: "better", CONTRADICTED: "worse"}.get(part.verdict, part.verdict)
        said += ", below d*" * part.small
        axis.annotate(
            said, (1.02, k), xycoords=("axes fraction", "data"), fontsize=7, va="center", annotation_clip=False
        )
    axis.axvline(0, color="black", lw=1)
    axis.grid(alpha=0.3)


def plot_rows(
    path: pathlib.Path, results: Results, metrics, title: str, parts: Sequence[Judged] = (), caption: str = ""
) -> None:
    """Many methods: the baseline above, the others by their difference to it, or by their mean of the first metric.

    Args:
      parts: what the methods were judged by, the first panel: with Holm's intervals.
    """
    plt = record.pyplot()
    baseline, *others = results.arms
    found = {m: {n: np.asarray(arm.metrics.get(m, []), float) for n, arm in results.arms.items()} for m in metrics}
    judged = {part.arm: part for part in parts}
    worth = {n: judged[n].mean if n in judged else interval(found[metrics[0]][n]).mean for n in others}
    names = [baseline, *sorted(others, key=lambda name: -np.nan_to_num(worth[name], nan=-np.inf))]
    size = (3.6 * len(metrics) + (4.6 if judged else 1.5), 0.27 * len(names) + 1.6)
    figure, axes = plt.subplots(
        1, len(metrics) + bool(judged), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    panels = list(axes.flat)
    if judged:
        first = panels.pop(0)
        _differences(first, judged, names)
        first.set_title(f"{next(iter(judged.values())).metric} - {baseline}, Holm, d* shaded", fontsize=9)
    for axis, metric in zip(panels, metrics, strict=True):
        _rows(axis, found[metric], names)
        axis.axvline(interval(found[metric][baseline]).mean, ls="--", lw=1, color="black")
        axis.set_title(metric, fontsize=9)
    axes.flat[0].set_yticks(range(len(names)), names, fontsize=8)
    axes.flat[0].invert_yaxis()
    figure.suptitle(f"{title}\n{caption}" if caption else title, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _row_of(part: Judged) -> tuple[float, float, float]:
    """Mean and ends of a part in units of d* beyond what it claims, in the paper's direction.

    A level, of which no smallest difference is stated, in units of its interval's width.
    """
    scale = part.by if part.kind == "same" else part.d_star
    if part.kind == "level" or not np.isfinite(scale) or scale <= 0:
        scale = max(abs(part.high - part.low), 1e-12)
    margin = 0.0 if part.kind == "same" else part.by
    ends = sorted((part.sign * part.low, part.sign * part.high))
    return tuple((x - margin) / scale for x in (part.sign * part.mean, *ends))


def _forest(axis, claim: Claim) -> None:
    """Every part with its interval, zero and one d* to both sides; the primary part above, in black, always whole.

    A secondary part that lies beyond the axis has an arrow at its edge.
    """
    rows = [_row_of(part) for part in claim.parts]
    far = [np.abs(np.nan_to_num(row)).max() if np.isfinite(row[0]) else 0.0 for row in rows]
    reach = 1.15 * max(1.5, far[0], min(max(far), 12.0))
    for k, (mean, low, high) in enumerate(rows):
        if abs(mean) > reach:
            axis.plot([np.copysign(reach, mean)], [k], ">" if mean > 0 else "<", color="tab:blue", clip_on=False)
        if np.isfinite(mean):
            ends, colour = np.nan_to_num([[mean - low], [high - mean]]), "black" if k == 0 else "tab:blue"
            axis.errorbar([mean], [k], xerr=ends, fmt="D" if k == 0 else "o", ms=5, capsize=3, color=colour)
    axis.axvspan(-1, 1, color="tab:grey", alpha=0.15, lw=0)
    axis.axvline(0, color="black", lw=1)
    for x in (-1, 1):
        axis.axvline(x, color="tab:grey", lw=1, ls="--")
    axis.set_xlim(-reach, reach)
    axis.set_yticks(range(len(claim.parts)), ["" for _ in claim.parts])
    for k, part in enumerate(claim.parts):
        said = part.verdict + ", below d*" * part.small
        text = f"{part.text}: {part.mean:+.3g} [{part.low:+.3g}, {part.high:+.3g}], {said}"
        axis.annotate(text, (0.01, k - 0.18), xycoords=("axes fraction", "data"), fontsize=7, va="bottom",
                      weight="bold" if k == 0 else "normal")  # fmt: skip
    axis.set_ylim(len(claim.parts) - 0.5, -0.8)
    levels = "; levels in widths of their intervals" * any(part.kind == "level" for part in claim.parts)
    units = f"effect beyond what is claimed, in the paper's direction, in units of d* (dashed){levels}"
    axis.set_xlabel(units, fontsize=8)
    axis.set_title("primary part (black) and secondary parts (blue, Holm)", fontsize=10)


def plot(
    path: pathlib.Path, results: Results, metrics, title: str, *, claim: Claim | None = None, caption: str = ""
) -> None:
    """The forest of the claim's parts, then one panel a metric: curves where there are three points or more.

    Else the final values. A metric that no arm has a value of has no panel. ``caption`` is written below.
    """
    plt = record.pyplot()
    measured = [m for m in metrics if any(np.isfinite(arm.metrics.get(m, [])).any() for arm in results.arms.values())]
    metrics = measured or metrics
    palette = plt.get_cmap("tab20").colors  # dark and light by turns: the dark ones first
    palette = palette[::2] + palette[1::2]
    colours = {name: palette[k % len(palette)] for k, name in enumerate(results.arms)}
    columns = min(3, len(metrics))
    rows = -(-len(metrics) // columns)
    parts = () if claim is None else claim.parts
    above = 0.9 + 0.42 * len(parts) if parts else 0.0
    figure = plt.figure(figsize=(4.6 * max(columns, 2), 3.4 * rows + above), layout="constrained")
    grid = figure.add_gridspec(rows + bool(parts), columns, height_ratios=[above] * bool(parts) + [3.4] * rows)
    if parts:
        _forest(figure.add_subplot(grid[0, :]), claim)
    first = int(bool(parts))
    axes = [figure.add_subplot(grid[first + k // columns, k % columns]) for k in range(rows * columns)]
    for axis, metric in zip(axes, metrics, strict=False):
        points = max((len(arm.curves.get(metric, {"step": []})["step"]) for arm in results.arms.values()), default=0)
        (_lines if points >= 3 else _dots)(axis, results, metric, colours)
        axis.set_title(metric, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[len(metrics) :]:
        axis.axis("off")
    handles = [plt.Line2D([], [], color=c, lw=2, label=name) for name, c in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), fontsize=8)
    figure.suptitle(f"{title}\n{caption}" if caption else title, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_certificate(path: pathlib.Path, kept: dict) -> None:
    """The figure of a bed: the response to the dose, its controls in units of d*, and the curves."""
    plt = record.pyplot()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14.5, 4.2), layout="constrained")
    rows = kept["dose_response"]
    for row in rows:
        low, high = (np.nan if row[k] is None else row[k] for k in ("low", "high"))
        ends = np.nan_to_num([[row["mean"] - low], [high - row["mean"]]])
        left.errorbar([row["dose"]], [row["mean"]], yerr=ends, fmt="o", color="black", capsize=3)
        left.annotate(row["arm"], (row["dose"], row["mean"]), fontsize=7, xytext=(4, 4), textcoords="offset points")
    left.plot([row["dose"] for row in rows], [row["mean"] for row in rows], lw=1, color="black")
    left.axhline(kept["base"].get(kept["metric"], np.nan), ls=":", color="tab:grey", label="before training")
    left.set(xlabel=kept["knob"], title=f"{kept['metric']} by dose")
    left.legend(fontsize=7)
    for k, one in enumerate(kept["controls"]):
        mean, low, high = (np.nan if one["bounds"][x] is None else one["bounds"][x] / kept["d_star"]
                           for x in ("mean", "low", "high"))  # fmt: skip
        ends = np.nan_to_num([[mean - low], [high - mean]])
        colour = "tab:red" if one["problem"] else "black"
        middle.errorbar([mean], [k], xerr=ends, fmt="D", capsize=3, color=colour)
        middle.annotate(f"{one['name']}: {one['kind'].replace('_', ' ')}", (0.02, k - 0.12), fontsize=7,
                        xycoords=("axes fraction", "data"), va="bottom")  # fmt: skip
    middle.axvspan(-1, 1, color="tab:grey", alpha=0.15, lw=0)
    middle.axvline(0, color="black", lw=1)
    middle.set(ylim=(len(kept["controls"]) - 0.5, -0.8), yticks=[], xlabel="units of d*", title="controls (red: fails)")
    for name, curves in kept["curves"].items():
        curve = curves[kept["metric"]]
        values = np.asarray([[np.nan if v is None else v for v in row] for row in curve["values"]], float)
        mean, half = _band(values)
        line = right.plot(curve["step"], mean, lw=1.6, label=name)[0]
        right.fill_between(curve["step"], mean - half, mean + half, alpha=0.12, lw=0, color=line.get_color())
    right.set(xlabel="step", title=kept["metric"])
    right.legend(fontsize=7)
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    state = "certified" if kept["certified"] else f"not certified (problems: {len(kept['problems'])})"
    settings, budget = kept["settings"], kept["budget"]
    fewest = min(len(one["seeds"]) for one in kept["values"].values())
    number = f"{kept['seeds']} seeds" if fewest == kept["seeds"] else f"{fewest} to {kept['seeds']} seeds"
    many = "eval_problems" in settings
    measured = f"{settings['eval_problems']} problems x {settings['eval_samples']} samples, " if many else ""
    text = f"{kept['bed']}: {state}; {number}, {measured}mean of the last {kept['tail']} evaluations, "
    text += f"{budget['updates']} updates and {budget['rollouts']:,} rollouts a seed"
    figure.suptitle(text, fontsize=9)
    figure.savefig(path, dpi=100)
    plt.close(figure)
