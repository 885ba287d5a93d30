"""Trap 38, clip metrics: "clipped" is 1 exactly where clipping removed the gradient, dual clip included."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from tests.close import doubles

RATIOS = [0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 8.0]
CASES = list(itertools.product(RATIOS, [-2.0, -0.5, 0.5, 2.0]))
LOGP = jnp.log(jnp.array([[r for r, _ in CASES]], jnp.float32))
SIGNAL = jnp.array([[a for _, a in CASES]])
MASK = jnp.ones_like(SIGNAL, bool)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_clipped_is_where_the_gradient_is_gone(dual_clip):
    def total(logp):
        terms = clipped_policy_loss(
            logp, jnp.zeros_like(logp), SIGNAL, MASK, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
        )
        return terms.loss.sum(), terms

    (_, terms), gradient = jax.value_and_grad(total, has_aux=True)(LOGP)
    clipped = np.asarray(terms.aux["clipped"])[0] > 0
    for k, (ratio, advantage) in enumerate(CASES):
        by_hand = (ratio > 1.28 and advantage > 0) or (ratio < 0.8 and advantage < 0)
        if dual_clip:
            by_hand |= ratio > dual_clip and advantage < 0
        assert clipped[k] == by_hand, (ratio, advantage)
        assert (gradient[0, k] == 0) == by_hand, (ratio, advantage)


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    wild = jnp.log(jnp.array([[100.0]]))
    terms = clipped_policy_loss(wild, jnp.zeros((1, 1)), jnp.array([[-2.0]]), jnp.ones((1, 1), bool), dual_clip=3.0)
    assert float(terms.loss[0, 0]) == doubles(6.0)


def test_tokens_outside_the_mask_do_not_count():
    terms = clipped_policy_loss(LOGP, jnp.zeros_like(LOGP), SIGNAL, jnp.zeros_like(MASK))
    assert not np.any(terms.aux["clipped"]) and not np.any(terms.loss)
