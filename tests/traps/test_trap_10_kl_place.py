"""Trap 10, KL in the reward or in the loss: two functions, two coefficients, and each leaves the other place alone."""

import inspect

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_policy_loss
from tests import close
from tests.traps.tables import params, random_batch, table_policy


def test_the_coefficient_belongs_to_one_place_and_has_no_default():
    reward = inspect.signature(kl.kl_in_reward).parameters["coefficient"]
    assert reward.default is inspect.Parameter.empty and reward.kind is inspect.Parameter.KEYWORD_ONLY
    for terms in (kl.kl_gradient_terms, kl.weighted_kl_gradient_terms, kl.k3_gradient_terms):
        assert "coefficient" not in inspect.signature(terms).parameters
    assert not any("kl" in name for name in inspect.signature(clipped_policy_loss).parameters)


def test_in_the_loss_it_adds_to_the_loss_and_nothing_else():
    batch, policy = random_batch(), table_policy()

    def terms(logp, entropy, batch):
        return 0.1 * kl.k3_gradient_terms(logp, batch.ref_logp, batch.mask)

    plain, plain_metrics = make_policy_loss(policy, clipped_policy_loss)(params(), batch)
    with_kl, metrics = make_policy_loss(policy, clipped_policy_loss, extra_terms=terms)(params(), batch)
    assert float(with_kl) > float(plain)
    for name, value in plain_metrics.items():
        np.testing.assert_array_equal(metrics[name], value)


def test_in_the_reward_a_penalty_shared_by_a_group_is_normalised_away():
    rewards, ids = jnp.array([1.0, 0.0, 0.5, 0.25]), jnp.zeros((4,), jnp.int32)
    mask = jnp.ones((4, 3), bool)
    zeros = jnp.zeros((4, 3))

    def penalised(logp):
        return rewards + kl.kl_in_reward(zeros, logp, zeros, mask, coefficient=0.3).sum(axis=1)

    want = group.group_normalized_advantages(rewards, ids)
    same_for_all = group.group_normalized_advantages(penalised(jnp.full((4, 3), -0.5)), ids)
    close.assert_near(same_for_all, want)
    differing = group.group_normalized_advantages(penalised(jnp.arange(12.0).reshape(4, 3) / -10), ids)
    assert np.abs(np.asarray(differing - want)).max() > 0.05
