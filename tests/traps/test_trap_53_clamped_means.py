"""Trap 53, clamped before the mean: ratios of sequences hold their sum or mean, never each token."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses import correction, off_policy, sequence
from tests import close

# one token 25 nats off among ten: the mean log ratio is -2.5, with each token held at 20 it would be -2
OLD, ONE, MASK = jnp.zeros((1, 10)), jnp.ones((1, 10)), jnp.ones((1, 10), bool)
LOGP = OLD.at[0, 3].set(-25.0)
WIDE = {"clip_low": 0.999, "clip_high": 9.0}
MEANS = {
    "gspo": lambda x: sequence.gspo_loss(x, OLD, ONE, MASK, **WIDE).aux["ratio"],
    "gspo_token": lambda x: sequence.gspo_token_loss(x, OLD, ONE, MASK, **WIDE).aux["ratio"],
    "gmpo": lambda x: sequence.gmpo_loss(x, OLD, ONE, MASK).aux["ratio"],
    "mean_ratio": lambda x: off_policy.mean_ratio(x, OLD, MASK),
    "geometric": lambda x: correction.mismatch_ratio(x, OLD, MASK, level="geometric"),
}
SUMS = {
    "vespo": lambda x: sequence.vespo_loss(x, OLD, ONE, MASK).aux["ratio"],
    "loop": lambda x: sequence.loop_loss(x, OLD, ONE, MASK).aux["ratio"],
    "sequence_ratio": lambda x: off_policy.sequence_ratio(x, OLD, MASK),
    "sequence": lambda x: correction.mismatch_ratio(x, OLD, MASK, level="sequence"),
}


@pytest.mark.parametrize("name", MEANS)
def test_means(name):
    close.assert_relative(MEANS[name](LOGP), np.exp(-2.5))


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    """Tokens 25 nats down and 10 up make 15 down; held at 20 first, they would make 10."""
    close.assert_relative(SUMS[name](LOGP.at[0, 7].set(10.0)), np.exp(-15.0))
