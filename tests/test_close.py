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
