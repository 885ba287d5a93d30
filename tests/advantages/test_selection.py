import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import selection
from tests import close

rng = np.random.default_rng(0)
SCORES = jnp.asarray(rng.normal(size=10), jnp.float32)
IDS = jnp.array([0, 0, 0, 0, 4, 4, 4, 4, 4, 9])
VALID = jnp.ones(10, bool).at[4].set(False)
POISONED = SCORES.at[4].set(jnp.nan)


def _loop(pick):
    out = np.zeros(10)
    for g in (0, 4, 9):
        members = [i for i in range(10) if int(IDS[i]) == g and bool(VALID[i])]
        for i, w in pick(members).items():
            out[i] = w
    return out


def test_filters_against_loops():
    value = np.asarray(SCORES)
    best = lambda m: max(m, key=lambda i: value[i])  # noqa: E731
    worst = lambda m: min(m, key=lambda i: value[i])  # noqa: E731
    pairs = {
        selection.best_weights: lambda m: {best(m): 1},
        selection.best_worst_weights: lambda m: {best(m): 1, worst(m): 1},
        selection.best_random_weights: lambda m: {i: 0.4 if i == best(m) else 0.1 for i in m},
        selection.power_weights: lambda m: {i: value[i] ** 2 for i in m},
        selection.equal_weights: lambda m: {i: 1 for i in m},
    }
    for function, pick in pairs.items():
        close.assert_near(function(POISONED, IDS, valid=VALID), _loop(pick))


def test_two_of_equals_are_different_members():
    equal, ids = jnp.zeros(3), jnp.zeros(3, jnp.int32)
    assert selection.best_worst_weights(equal, ids).tolist() == [1, 0, 1]
    assert selection.best_worst_weights(equal[:1], ids[:1]).tolist() == [1]


def test_resampling_has_the_expected_counts():
    weights = selection.best_random_weights(POISONED, IDS, valid=VALID)
    grid = np.random.default_rng(1).permutation((np.arange(100_000) + 0.5) / 100_000).reshape(-1, 10)
    draw = jax.vmap(lambda u: selection.resampled(weights, u))
    picked = np.bincount(np.asarray(draw(jnp.asarray(grid, jnp.float32))).ravel(), minlength=10) / 10_000
    cells = 2 * 10 / 100_000  # an even grid: what is drawn for a member ends within a cell of either edge of its share
    np.testing.assert_allclose(selection.expected_counts(weights), picked, atol=cells)
    # no filter: every sequence once on average, so the loss is PPO's
    close.assert_near(selection.expected_counts(jnp.ones(10)), 1.0)
    assert not np.asarray(selection.expected_counts(jnp.zeros(3))).any()
    assert selection.resampled(jnp.zeros(3), jnp.array([0.0, 0.5, 0.9])).tolist() == [2, 2, 2]  # rows that are there


def test_reliability_of_what_is_kept():
    truth = jnp.asarray(rng.random(10) < 0.5, jnp.float32)
    weights = jnp.asarray(rng.integers(0, 3, 10), jnp.float32)
    scores, y = (np.repeat(np.asarray(x), np.asarray(weights, int)) for x in (SCORES, truth))
    want = np.corrcoef(scores, y)[0, 1] ** 2
    close.assert_near(selection.reliability(SCORES, truth, weights), want)
    assert float(selection.reliability(SCORES, jnp.ones(10), weights)) == 0.0
    poisoned = selection.reliability(POISONED, truth, weights.at[4].set(0.0))
    assert np.isfinite(poisoned)


def test_shortest_right_and_what_it_rejects():
    length = jnp.array([10.0, 12.0, 16.0, 8.0, 11.0, 5.0])
    right, ids = jnp.array([True, True, True, False, False, False]), jnp.array([0, 0, 0, 0, 0, 1])
    assert selection.shortest_right(length, right, ids).tolist() == [True, False, False, False, False, False]
    # 16 > 1.5 * 10 is rejected, 12 is not; the wrong one of 8 is shorter; the second group has no right answer
    assert selection.longer_rejected(length, right, ids).tolist() == [False, False, True, False, True, False]
