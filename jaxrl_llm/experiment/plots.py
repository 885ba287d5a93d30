"""One figure an experiment: curves per arm, mean over seeds with its 95 % band, every seed as a thin line.

And one figure a comparison: a row for every method, with its interval and its paired difference to the baseline.
"""

import pathlib
import warnings

import numpy as np

from jaxrl_llm.experiment.results import Results, interval
from jaxrl_llm.metrics.intervals import t_quantile


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


def _rows(axis, values: dict[str, np.ndarray], names: list[str]) -> None:
    """A row for every name: one dot a seed, the mean with its interval."""
    for k, name in enumerate(names):
        found, colour = interval(values[name]), "tab:blue" if k else "black"
        axis.plot(values[name], np.full(len(values[name]), k), ".", ms=4, alpha=0.35, color=colour)
        ends = np.nan_to_num([[found.mean - found.low], [found.high - found.mean]])
        axis.errorbar([found.mean], [k], xerr=ends, fmt="o", ms=5, capsize=3, color=colour)
    axis.grid(alpha=0.3)


def plot_rows(path: pathlib.Path, results: Results, metrics, title: str) -> None:
    """Final values of many methods: the baseline above, the others by their mean of the first metric.

    The second panel is the difference to the baseline in the first metric, seed by seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    baseline, *others = results.arms
    found = {m: {n: np.asarray(arm.metrics.get(m, []), float) for n, arm in results.arms.items()} for m in metrics}
    first = found[metrics[0]]
    names = [baseline, *sorted(others, key=lambda name: -np.nan_to_num(interval(first[name]).mean, nan=-np.inf))]
    paired = {n: first[n] - first[baseline] if len(first[n]) == len(first[baseline]) else np.empty(0) for n in names}
    panels = {metrics[0]: first, f"{metrics[0]} - {baseline}": paired} | {m: found[m] for m in metrics[1:]}
    size = (3.6 * len(panels) + 1.5, 0.27 * len(names) + 1.4)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, (metric, values) in zip(axes.flat, panels.items(), strict=True):
        _rows(axis, values, names)
        axis.axvline(interval(values[baseline]).mean, ls="--", lw=1, color="black")
        axis.set_title(metric, fontsize=9)
    axes.flat[0].set_yticks(range(len(names)), names, fontsize=8)
    axes.flat[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot(path: pathlib.Path, results: Results, metrics, title: str) -> None:
    """One panel a metric: curves where there are three points or more, else the final values."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    palette = plt.get_cmap("tab20").colors  # dark and light by turns: the dark ones first
    palette = palette[::2] + palette[1::2]
    colours = {name: palette[k % len(palette)] for k, name in enumerate(results.arms)}
    columns = min(3, len(metrics))
    rows = -(-len(metrics) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    for axis, metric in zip(axes.flat, metrics, strict=False):
        points = max((len(arm.curves.get(metric, {"step": []})["step"]) for arm in results.arms.values()), default=0)
        (_lines if points >= 3 else _dots)(axis, results, metric, colours)
        axis.set_title(metric, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(metrics) :]:
        axis.axis("off")
    handles = [plt.Line2D([], [], color=c, lw=2, label=name) for name, c in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)
