"""Linear probes: the optimum of a float64 descent, separability of equal and of shifted classes; gate surgery."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.preference.parts import surgery
from jaxrl_llm.metrics import probes
from tests import close

RNG = np.random.default_rng(5)


def _descent(x, y, ridge, steps=20_000):
    w, b = np.zeros(x.shape[1]), 0.0
    for _ in range(steps):
        gap = 1 / (1 + np.exp(-(x @ w + b))) - y
        w, b = w - 0.3 * (x.T @ gap / len(y) + ridge * w), b - 0.3 * (gap.mean() + ridge * 1e-4 * b)
    return w, b


def test_fit_against_gradient_descent():
    x = RNG.normal(size=(60, 3))
    y = RNG.random(60) < 1 / (1 + np.exp(-(2 * x[:, 0] - x[:, 1] + 0.5)))
    w, b = _descent(x, y, 0.05)
    found = probes.fit(jnp.asarray(x, jnp.float32), jnp.asarray(y), ridge=0.05)
    # a slope that is off by the rounding of 60 terms moves the minimum by that over the curvature, which is the ridge's
    over = {"terms": 60, "magnitude": float(np.abs(x).max()) / 0.05}
    close.assert_near(found.direction, w, **over)
    close.assert_near(found.bias, b, **over)


def test_rows_left_out_do_not_matter():
    x, y = RNG.normal(size=(40, 2)), RNG.random(40) < 0.5
    used = np.arange(40) < 25
    both = [
        probes.fit(jnp.asarray(np.where(used[:, None], x, junk), jnp.float32), jnp.asarray(y), jnp.asarray(used))
        for junk in (0.0, 7.0)
    ]
    close.assert_near(both[0].direction, both[1].direction)
    with pytest.raises(ValueError, match="ridge"):
        probes.fit(jnp.asarray(x, jnp.float32), jnp.asarray(y), ridge=0.0)


def test_separability_of_equal_and_of_shifted_classes():
    y = jnp.arange(400) % 2 == 0
    fold = (jnp.arange(400) // 2) % 5
    same = jnp.asarray(RNG.normal(size=(400, 4)), jnp.float32)
    deviation = np.sqrt((400 + 1) / (12 * 200 * 200))  # of a rank sum of 200 among 400 equals
    assert abs(float(probes.separability(same, y, fold)) - 0.5) < 3 * deviation
    apart = same.at[:, 0].add(jnp.where(y, 9.0, -9.0))
    assert float(probes.separability(apart, y, fold)) == 1.0


def test_one_row_is_edited():
    gate = jnp.asarray([[[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]]])
    v = jnp.asarray([1.0, 0.0])
    edited = surgery.operate({"layers": {"gate": gate, "up": gate}}, v, alpha=0.5, rows=1)
    assert edited["layers"]["gate"][0].T.tolist() == [[1.0, 0.0], [-0.5, 0.0], [0.0, 1.0]]
    assert edited["layers"]["up"] is gate
    with pytest.raises(ValueError, match="gated"):
        surgery.operate({"layers": {"up": gate}}, v, alpha=0.5, rows=1)
    with pytest.raises(ValueError, match="rows=7"):
        surgery.highest(jnp.zeros((2, 3)), 7)


def test_rows_over_all_layers_and_lengths_that_do_not_matter():
    gate, v = jnp.asarray(RNG.normal(size=(3, 5, 8)), jnp.float32), jnp.asarray(RNG.normal(size=5), jnp.float32)
    cosine = np.einsum("ldf,d->lf", gate, v) / np.linalg.norm(gate, axis=1) / np.linalg.norm(v)
    close.assert_near(surgery.alignment(gate, v), cosine)
    scaled = gate * jnp.asarray(RNG.uniform(0.1, 5, (3, 1, 8)), jnp.float32)
    close.assert_near(surgery.alignment(scaled, v), cosine)
    edited = surgery.operate({"layers": {"gate": gate}}, v, alpha=0.7, rows=4)["layers"]["gate"]
    changed = np.asarray(jnp.any(edited != gate, axis=1))
    assert changed.sum() == 4 and set(zip(*np.nonzero(changed), strict=True)) == {
        np.unravel_index(k, (3, 8)) for k in np.argsort(cosine.ravel())[:4]
    }
    still = surgery.operate({"layers": {"gate": gate}}, v, alpha=0.0, rows=4)["layers"]["gate"]
    assert jnp.array_equal(still, gate) and jax.tree.structure(still) == jax.tree.structure(gate)
