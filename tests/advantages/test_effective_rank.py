"""Effective rank: SVD in float64, invariances, growth by loops, shaping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import effective_rank as er
from tests import close

rng = np.random.default_rng(11)
HIDDEN = rng.normal(size=(4, 9, 5))
MASK = np.arange(9)[None] < np.array([9, 6, 1, 0])[:, None]
SUMS = 2 * 9 * 16  # a Gram matrix of at most 9 rows of 16, and as much for its eigenvalues


def _rank(z):
    if len(z) < 2:
        return 0.0
    s = np.linalg.svd(z - z.mean(0), compute_uv=False)
    p = s[s > 1e-9] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def _f32(x):
    return jnp.asarray(np.where(MASK[:, :, None], x, np.nan), jnp.float32), jnp.asarray(MASK)


@pytest.mark.parametrize("width", [5, 16])
def test_rank_against_svd(width):
    """Narrow and wide: either Gram matrix."""
    hidden = rng.normal(size=(4, 9, width))
    want = [_rank(h[m]) for h, m in zip(hidden, MASK, strict=True)]
    close.assert_near(er.rank_of_hidden_states(*_f32(hidden)), want, terms=SUMS)


def test_rank_is_one_on_a_line_and_knows_neither_scale_nor_rotation():
    line = np.arange(9.0)[None, :, None] * rng.normal(size=(4, 1, 5))
    close.assert_near(er.rank_of_hidden_states(*_f32(line))[:2], 1.0)
    turn, _ = np.linalg.qr(rng.normal(size=(5, 5)))
    want = er.rank_of_hidden_states(*_f32(HIDDEN))
    close.assert_near(er.rank_of_hidden_states(*_f32(3.0 * HIDDEN @ turn)), want, terms=SUMS)
    gradient = jax.grad(lambda x: jnp.sum(er.rank_of_hidden_states(x, jnp.asarray(MASK))))(
        jnp.asarray(HIDDEN, jnp.float32)
    )
    assert not np.asarray(gradient).any()


def test_figures_against_a_loop():
    got = er.rank_figures(*_f32(HIDDEN), stride=2)
    for b, m in enumerate(MASK):
        z = HIDDEN[b][m]
        series = [_rank(z[: t + 1]) for t in range(2, len(z), 2)]
        delta = [series[j] - np.mean(series[:j]) for j in range(1, len(series))]
        turn = np.diff(delta)
        want = [_rank(z), np.mean(delta) if delta else 0.0, np.mean(turn) if len(turn) else 0.0]
        close.assert_near(got[b], want, terms=SUMS)


def test_averages_and_deviations():
    averages, figures = er.no_averages(), jnp.asarray(rng.random((4, 3)) + 1, jnp.float32)
    assert not np.asarray(er.deviations(figures, averages)).any()
    averages = er.updated_averages(averages, figures)
    close.assert_near(averages.mean, figures.mean(0))
    again = er.updated_averages(averages, figures + 1.0, rate=0.3)
    close.assert_near(again.mean, figures.mean(0) + 0.3)
    want = (np.asarray(figures) - np.asarray(averages.mean)) / np.asarray(averages.mean)
    close.assert_near(er.deviations(figures, averages), want)
    assert float(er.deviations(figures * 100, averages).max()) == 5.0


def test_shaping_never_lowers_nor_turns():
    advantages = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    bonus = jnp.asarray(rng.normal(size=8), jnp.float32)
    got = er.shaped_advantages(advantages, bonus)
    assert (got >= advantages).all() and (jnp.sign(got) == jnp.sign(advantages)).all()
    np.testing.assert_array_equal(got[bonus < 0], advantages[bonus < 0])
    # no average yet: no bonus, GRPO
    none = er.rank_bonus(er.deviations(jnp.ones((8, 3)), er.no_averages()))
    np.testing.assert_array_equal(er.shaped_advantages(advantages, none), advantages)
    fixed = er.rank_bonus(jnp.array([[0.5, 1.0, 0.2]]), explore=1.0)
    close.assert_near(fixed[0], np.tanh(0.5))
    with pytest.raises(ValueError, match="kappa=1"):
        er.shaped_advantages(advantages, bonus, kappa=1.0)
    with pytest.raises(ValueError, match="stride=0"):
        er.rank_figures(jnp.zeros((1, 2, 3)), jnp.ones((1, 2), bool), stride=0)
