"""Staged difficulty: levels from a ladder of models, draws from a level only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.curriculum.subset import ladder_levels, make_subset
from tests import close


@pytest.mark.parametrize(
    ("rates", "first", "second"),
    [((0.5, 0.5, 1.0), True, True), ((0.0, 0.0, 0.0), False, False), ((1.0, 1.0, 1.0), False, False),
     ((0.0, 1.0, 1.0), False, True), ((0.0, 0.5, 1.0), False, True), ((0.5, 1.0, 1.0), True, False)],
)  # fmt: skip
def test_worked_levels(rates, first, second):
    rows = [jnp.array([x, x]) for x in rates]
    levels = ladder_levels(*rows, jnp.array([True, False]))
    assert levels[0].tolist() == [first] * 2
    assert levels[1].tolist() == [second] * 2
    # unsolved by the largest model: always level 3; else by the coin
    assert levels[2].tolist() == [True, rates[2] == 0.0]


def test_levels_agree_with_the_data_card_written_out():
    rng = np.random.default_rng(0)
    small, medium, large = (rng.choice([0.0, 0.5, 1.0], 200) for _ in range(3))
    coins = rng.random(200) < 0.5
    found = ladder_levels(*(jnp.asarray(x, jnp.float32) for x in (small, medium, large)), jnp.asarray(coins))
    for k in range(200):
        s, m = small[k], medium[k]
        second = (s == 0 and m == 1) or (s == 0 and 0 < m < 1) or (0 < s < 1 and 0 < m < 1)
        assert [bool(x[k]) for x in found] == [0 < s < 1, second, bool(large[k] == 0 or coins[k])]


def test_draws_stay_in_the_level_and_are_uniform():
    chosen = np.array([False, True, False, True, True])
    sampler = make_subset(chosen)
    state = sampler.init(5)
    ids, _ = sampler.draw(state, jax.random.key(0), 3000)
    counts = np.bincount(np.asarray(ids), minlength=5)
    assert counts[~chosen].sum() == 0
    close.assert_share(counts[chosen] / 3000, 1 / 3, 3000)
    # rows by number are the same rows, so that a stage of all rows of a level is the plain method on that level
    same, _ = make_subset([1, 3, 4]).draw(state, jax.random.key(0), 3000)
    np.testing.assert_array_equal(ids, same)


def test_empty_and_foreign_rows_are_refused():
    with pytest.raises(ValueError, match="rows is empty"):
        make_subset(np.zeros(4, bool))
    with pytest.raises(ValueError, match="0 to 2"):
        make_subset([3]).init(3)
