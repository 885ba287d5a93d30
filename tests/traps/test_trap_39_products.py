"""Trap 39, sum of exponentials: the ratio of a sequence is a product (or its root), by hand for two tokens."""

import jax.numpy as jnp
import pytest

from jaxrl_llm.losses import correction, sequence
from tests import close

# token ratios 3 and 1/2, the third column is padding
LOGP, OLD = jnp.log(jnp.array([[0.6, 0.2, 0.9]])), jnp.log(jnp.array([[0.2, 0.4, 0.1]]))
ONES, MASK = jnp.ones((1, 3)), jnp.array([[True, True, False]])
PRODUCT, ROOT = 3 * 0.5, (3 * 0.5) ** 0.5  # not the sum 3.5, nor the mean 1.75


@pytest.mark.parametrize("loss", [sequence.gspo_loss, sequence.gspo_token_loss])
def test_gspo(loss):
    terms = loss(LOGP, OLD, ONES, MASK, clip_low=0.9, clip_high=9.0)
    close.assert_relative(terms.aux["ratio"], [[ROOT, ROOT, 0.0]])
    close.assert_relative(terms.loss, [[-ROOT, -ROOT, 0.0]])


def test_gmpo():
    terms = sequence.gmpo_loss(LOGP, OLD, ONES, MASK, clip_low=5.0, clip_high=5.0)
    close.assert_relative(terms.loss, [[-ROOT, -ROOT, 0.0]])


LEVELS = [("token", [3, 0.5]), ("sequence", [PRODUCT] * 2), ("geometric", [ROOT] * 2)]


@pytest.mark.parametrize(("level", "want"), LEVELS)
def test_mismatch(level, want):
    got = correction.mismatch_ratio(LOGP, OLD, MASK, level=level)
    close.assert_relative(got, [[*want, 0.0]])
