"""Calibration figures: the sheet's numbers, loops over the definitions, invariances, nothing to judge."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.metrics import calibration as cal
from tests import close

C, Y = [0.9, 0.9, 0.8, 0.6, 0.55], [1, 0, 1, 1, 0]


def _args(c, y, valid=None):
    arrays = jnp.asarray(np.asarray(c), jnp.float32), jnp.asarray(np.asarray(y, bool))
    return arrays if valid is None else (*arrays, jnp.asarray(np.asarray(valid, bool)))


def _binned_error(pairs_by_bin, n):
    gaps = [(len(b), abs(sum(y for _, y in b) / len(b) - sum(c for c, _ in b) / len(b))) for b in pairs_by_bin if b]
    return sum(k * g for k, g in gaps) / n, max(g for _, g in gaps)


def _loop(c, y, bins):
    pairs, n = list(zip(c, y, strict=True)), len(c)
    width = [[p for p in pairs if min(int(p[0] * bins + 1e-4), bins - 1) == m] for m in range(bins)]
    ranked = sorted(pairs, key=lambda p: p[0])
    mass = [[p for k, p in enumerate(ranked) if k * bins // n == m] for m in range(bins)]
    right, wrong = [a for a, b in pairs if b], [a for a, b in pairs if not b]
    wins = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong)
    rate, clipped = sum(y) / n, [(min(max(a, 1e-3), 1 - 1e-3), b) for a, b in pairs]
    cost = -sum(math.log(a) if b else math.log(1 - a) for a, b in clipped) / n
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    ece, mce = _binned_error(width, n)
    return {
        "ece": ece,
        "mce": mce,
        "adaptive_ece": _binned_error(mass, n)[0],
        "brier": sum((a - b) ** 2 for a, b in pairs) / n,
        "auroc": wins / (len(right) * len(wrong)),
        "overconfidence": sum(a - b for a, b in pairs) / n,
        "nce": (entropy - cost) / entropy,
        "readable": 1.0,
    }


def test_worked_numbers():
    found = cal.summary(*_args(C, Y))
    expected = {"ece": 0.39, "mce": 0.55, "brier": 0.2645, "auroc": 0.583333, "overconfidence": 0.15, "readable": 1.0}
    close.assert_printed([found[k] for k in expected], list(expected.values()), 6)


@pytest.mark.parametrize("seed", range(4))
def test_against_a_loop(seed):
    """Whole tenths (ties, bin edges) and arbitrary confidences; invalid items are as if they were not there."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(20, 60))
    c = rng.integers(0, 11, n) / 10 if seed % 2 else np.asarray(rng.random(n), np.float32).astype(float)
    y, valid = rng.random(n) < c, rng.random(n) < 0.8
    y[:2], valid[:2] = [True, False], True
    c[~valid] = np.nan
    bins = 10 if seed < 2 else 7
    found = jax.jit(lambda *x: cal.summary(*x, bins=bins))(*_args(c, y, valid))
    expected = _loop(c[valid].tolist(), y[valid].tolist(), bins) | {"readable": valid.mean()}
    if seed % 2:  # which of equal confidences comes first is not the loop's business
        expected.pop("adaptive_ece")
    close.assert_near([found[k] for k in expected], list(expected.values()), terms=n)


def test_perfect_and_constant_confidence():
    sure = cal.summary(*_args([1.0, 0.0, 1.0], [1, 0, 1]))
    assert float(sure["ece"]) == float(sure["brier"]) == 0.0 and float(sure["auroc"]) == 1.0
    entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
    close.assert_near(sure["nce"], 1 + np.log(1 - 1e-3) / entropy)  # whoever is sure says 0.999
    base_rate = cal.summary(*_args([0.25] * 4, [1, 0, 0, 0]))
    close.assert_near([float(base_rate[k]) for k in ("ece", "auroc", "nce")], [0.0, 0.5, 0.0])


def test_a_monotone_map_changes_ece_and_not_auroc():
    c, y = _args(C, Y)
    plain, squared = cal.summary(c, y), cal.summary(c**2, y)
    assert float(plain["auroc"]) == float(squared["auroc"])
    assert abs(float(plain["ece"] - squared["ece"])) > 0.01


def test_brier_rewards_the_honest_confidence():
    """Its minimum over one stated confidence is the share of right items; its slope there is 0."""
    _, y = _args(C, Y)
    slope = jax.grad(lambda c: cal.brier(jnp.full((5,), 1.0) * c, y))
    close.assert_near(slope(jnp.asarray(0.6)), 0.0)
    close.assert_near(slope(jnp.asarray(0.9)), 2 * 0.3)


def test_undefined_is_nan():
    one_class = cal.summary(*_args([0.5, 0.9], [1, 1]))
    assert math.isnan(one_class["auroc"]) and math.isnan(one_class["nce"]) and not math.isnan(one_class["ece"])
    nothing = cal.summary(*_args([np.nan, 0.5], [1, 0], [0, 0]))
    assert all(math.isnan(v) for k, v in nothing.items() if k != "readable") and float(nothing["readable"]) == 0.0
    with pytest.raises(ValueError, match="bins=0"):
        cal.reliability(*_args(C, Y), bins=0)
