"""Figures are written whatever the seeds gave, and bands are t intervals."""

import math

import numpy as np
import pytest

from jaxrl_llm.experiment import Results, claims, conclude, greater, plots
from jaxrl_llm.run.records import record
from tests import close
from tests.experiment.made import arm, results

NAN = math.nan


def test_bands_are_t_intervals_of_the_finite_seeds():
    mean, half = plots._band(np.array([[0.1, 1.0, NAN], [0.2, NAN, NAN], [0.3, NAN, NAN]]))
    close.assert_near(mean, [0.2, 1.0, NAN])
    close.assert_printed(half, [0.248434, NAN, NAN], 6)


@pytest.mark.parametrize(
    "curve",
    [
        {0: [0.1, 0.2], 5: [0.2, 0.3], 10: [0.3, NAN]},
        {0: [NAN, NAN], 5: [NAN, NAN], 10: [NAN, NAN]},
        {0: [0.1, 0.2], 5: [0.2, 0.3]},
        None,
    ],
    ids=["curves", "undefined", "two points", "final values"],
)
def test_a_figure_is_written(curve, tmp_path):
    found = Results({"base": arm([0.2, 0.3], curve=curve), "method": arm([0.4, NAN], curve=curve)})
    plots.plot(tmp_path / "plot.png", found, ("eval/accuracy",), "a title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_that_an_arm_lacks_leave_room(tmp_path):
    found = Results({"base": arm([0.2, 0.3]), "other": arm([5.0], metric="eval/tokens")})
    plots.plot(tmp_path / "plot.png", found, ("eval/accuracy", "eval/tokens", "none", "neither"), "four panels")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_rows_of_a_comparison_are_sorted_below_the_baseline(tmp_path, monkeypatch):
    """By their differences, with the verdict beside each: read off what is drawn."""
    rows, judged = [], []
    monkeypatch.setattr(plots, "_rows", lambda axis, values, names: rows.append(list(names)))
    monkeypatch.setattr(plots, "_differences", lambda axis, parts, names: judged.append((parts, list(names))))
    arms = {"base": [0.2, 0.3], "worse": [0.1, 0.25], "better": [0.5, 0.3], "failed": [NAN, NAN]}
    found = Results({name: arm(values) for name, values in arms.items()} | {"lacks": arm([5.0], metric="other")})
    plots.plot_rows(tmp_path / "plot.png", found, ("eval/accuracy", "none"), "a title")
    assert rows == [["base", "better", "worse", "failed", "lacks"]] * 2 and not judged
    rows.clear()
    parts = claims.corrected([claims.greater(found, "eval/accuracy", name, "base") for name in ("better", "worse")])
    close.assert_near([part.mean for part in parts], [0.15, -0.075])
    plots.plot_rows(tmp_path / "plot.png", found, ("eval/accuracy", "none"), "a title", parts)
    assert judged == [({"better": parts[0], "worse": parts[1]}, ["base", "better", "worse", "failed", "lacks"])]
    monkeypatch.undo()
    plots.plot_rows(tmp_path / "plot.png", found, ("eval/accuracy", "none"), "a title", parts, "a caption")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_primary_part_is_always_whole():
    """However far from zero; a secondary part beyond the axis has an arrow at its edge."""
    plt = record.pyplot()
    found = results(base=[0.1, 0.2, 0.3, 0.4], close=[0.11, 0.21, 0.3, 0.41], far=[0.9, 0.95, 0.97, 0.99])
    close_by, far_off = (greater(found, "eval/accuracy", name, "base") for name in ("close", "far"))
    figure, axis = plt.subplots()
    claim = conclude("", far_off, close_by)
    plots._forest(axis, claim)
    ends = claim.primary.low / claim.primary.d_star, claim.primary.high / claim.primary.d_star
    assert axis.get_xlim()[0] < ends[0] < ends[1] < axis.get_xlim()[1] and ends[0] > 12.0
    assert not any(line.get_marker() == ">" for line in axis.lines)
    plt.close(figure)
    figure, axis = plt.subplots()
    plots._forest(axis, conclude("", close_by, far_off))
    assert axis.get_xlim()[1] < 14.0 and any(line.get_marker() == ">" for line in axis.lines)
    plt.close(figure)


@pytest.mark.parametrize("rewards", [(0.1, 0.4), (-2.0, 0.4), (3.0, 5.0)])
def test_the_curve_of_a_run_shows_every_reward(rewards, tmp_path, monkeypatch):
    """Those of one's own are no shares of right responses."""
    plt, closed = record.pyplot(), []
    monkeypatch.setattr(plt, "close", closed.append)
    rows = [{"step": k + 1, "reward/mean": x, "policy/entropy": 1.0} for k, x in enumerate(rewards)]
    record.plot_curves(tmp_path / "curve.png", rows, "a title", {0: (0.1, 0.0, 0.2)})
    low, high = closed[0].axes[0].get_ylim()
    assert low <= min(rewards) and max(rewards) <= high and ((low, high) == (0, 1)) == (rewards == (0.1, 0.4))
    monkeypatch.undo()
    plt.close(closed[0])
