"""The bound holds for sums in any order, and is no wider than it must be."""

import math

import numpy as np
import pytest

from tests import close
from tests.models_for_tests import small_config


@pytest.mark.parametrize("n", [3, 48, 1000])
def test_a_sum_in_any_order_is_within_the_bound(n):
    rng = np.random.default_rng(n)
    terms = rng.normal(size=n).astype(np.float32)
    sums = []
    for _ in range(50):
        total = np.float32(0)
        for x in rng.permutation(terms):
            total = np.float32(total + x)
        sums.append(float(total))
    allowed = close.bound(n, float(np.abs(terms).sum()))
    assert max(abs(x - math.fsum(map(float, terms))) for x in sums) <= allowed
    assert max(sums) - min(sums) > allowed / (20 * n)  # the order does matter


def test_by_hand():
    """Two layers: 2 x (2 x 16 + 16 + 4 + 2 x 6 + 16 + 16 + 32) + 2 x 16 + 24 terms to a log-probability."""
    config = small_config("llama")
    assert close.forward_sums(config, 6) == 2 * (32 + 16 + 4 + 12 + 16 + 16 + 32) + 32 + config.padded_vocab_size
    assert close.gradient_sums(config, 8, 6) == 2 * close.forward_sums(config, 6) + 48
    assert close.bound(100, 0.5) == 50 * 2**-23


def test_one_element_beyond_the_bound_fails_and_one_within_passes():
    want = {"a": np.ones((4, 4), np.float32), "b": np.zeros(3, np.float32)}
    near = {"a": want["a"], "b": np.array([0, 9 * 2**-23, 0], np.float32)}
    close.assert_same_sums(near, want, 10)
    far = {"a": want["a"], "b": np.array([0, 11 * 2**-23, 0], np.float32)}
    with pytest.raises(AssertionError):
        close.assert_same_sums(far, want, 10)


def test_what_was_printed_may_be_off_by_half_of_its_last_digit():
    third = np.float32(1 / 3)
    close.assert_printed(third, 0.333, 3)
    with pytest.raises(AssertionError):
        close.assert_printed(third, 0.3330, 4)
    with pytest.raises(AssertionError):
        close.assert_near(third, 0.3333)
    close.assert_near(third, 1 / 3)


def test_near_is_of_terms_and_sizes():
    eps = 2.0**-23
    assert close.near(np.ones(4, np.float32), [1.0] * 4) == eps * 20
    assert close.near(np.float32(0), 0.0, terms=100, magnitude=8.0) == eps * 116 * 8
    assert close.near(np.float32(0), 1e-3, magnitude=0.0) == eps * 17 * 1e-3
    assert close.near(np.ones(2), np.ones(2)) == 2.0**-52 * 18  # of double precision
    assert close.near(np.ones(2), np.ones(2, np.float32)) == eps * 18
    assert close.near([1.0, np.inf, np.nan], [3.0, np.inf, np.nan]) == eps * 19 * 3


@pytest.mark.parametrize("chance", [0.0, 0.02, 0.5, 0.97])
def test_shares_of_draws_lie_within_their_bound(chance):
    rng = np.random.default_rng(7)
    shares = rng.binomial(400, chance, 20_000) / 400
    allowed = close.of_draws(chance, 400)
    assert np.abs(shares - chance).max() <= allowed
    assert allowed <= 10 * np.sqrt(max(chance * (1 - chance), 1 / 400) / 400), "and not much wider than it must be"
    close.assert_share(shares[:5], chance, 400)
    with pytest.raises(AssertionError, match="of 400 draws"):
        close.assert_share([chance, chance + 0.2], chance, 400)
