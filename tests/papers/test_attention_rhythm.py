"""Attention rhythm: its printed map, and what each arm amplifies."""

import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient.attention_rhythm import random_credit
from jaxrl_llm.advantages import attention
from tests import close

MAP = jnp.array([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.4, 0.1, 0.1, 0.4]]])
MASK = jnp.ones((1, 4), bool)
WAAD = attention.backward_distance(MAP, MASK, window=2)
FAI = attention.forward_influence(MAP, MASK, low=1)


def test_printed_map():
    close.assert_near(WAAD[0], [0, 0.5, 0.7, 1.1])
    close.assert_printed(FAI[0], [0.3667, 0.2, 0.1, 0.0], 4)


def test_credit_of_each_arm():
    """40 % of four tokens are two: differences .5, .2, .4, 0 choose 0 and 2; influence chooses 0 and 1."""
    numbers = {"fraction": 0.4, "amplify": 1.5}
    close.assert_near(attention.local_credit(WAAD, FAI, MASK, **numbers)[0], [1.5, 1, 1.5, 1], magnitude=0)
    close.assert_near(attention.anchor_credit(WAAD, FAI, MASK, **numbers)[0], [1.5, 1.5, 1, 1], magnitude=0)
    # anchor 1 looks less far back than the mean .575, so half of its bonus goes to 0, which has all it may have
    close.assert_near(attention.rhythm_credit(WAAD, FAI, MASK, **numbers)[0], [1.5, 1.25, 1, 1], magnitude=0)
    for credit in (attention.local_credit, attention.anchor_credit, attention.rhythm_credit, random_credit):
        plain = credit(WAAD, FAI, MASK, fraction=0.4, amplify=1.0)
        np.testing.assert_array_equal(plain, jnp.ones((1, 4)))  # no amplification: GRPO


def test_the_lot_draws_as_many_tokens_and_others_for_another_batch():
    mask = jnp.arange(20)[None] < jnp.array([20, 10, 5])[:, None]
    waad = jnp.asarray(np.random.default_rng(0).random((3, 20)), jnp.float32)
    first, again = (random_credit(waad, waad, mask, fraction=0.4, amplify=1.5) for _ in range(2))
    assert jnp.sum(first > 1, axis=1).tolist() == [8, 4, 2]
    np.testing.assert_array_equal(first, again)
    assert (random_credit(waad * 1.1, waad, mask, fraction=0.4, amplify=1.5) != first).any()
