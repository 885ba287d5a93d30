"""Trap 6, temperature: the ratio against the sampler is 1 before the first update at any temperature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss, sampler_anchor, score_tokens
from jaxrl_llm.types import Rewards
from tests import close
from tests.traps.tables import VOCAB, advantages, params, problems, rollout, table_policy


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_ratio_is_one_at_any_temperature(temperature):
    policy, table = table_policy(), problems()
    keys = jax.random.split(jax.random.key(0), 24)
    out = rollout(params(), table.tokens, table.valid, keys, jnp.arange(6, dtype=jnp.int32), temperature=temperature)
    rewards = Rewards(jnp.arange(24, dtype=jnp.float32), jnp.ones((24,), bool))
    batch = make_estimate(policy, advantages, temperature=temperature)(params(), {}, out, rewards)
    loss = make_policy_loss(policy, clipped_policy_loss, temperature=temperature, anchor=sampler_anchor)
    _, metrics = loss(params(), batch)
    close.assert_near(metrics["policy/ratio"], 1.0)
    apart = close.near(out.sampler_logp, out.sampler_logp, terms=VOCAB, magnitude=0.0)
    assert float(metrics["kl/sampler_max"]) <= apart
    if temperature != 1.0:
        wrong, _ = score_tokens(policy, params(), out)  # the bug: no temperature in the trainer
        assert np.abs(np.asarray(wrong - out.sampler_logp))[np.asarray(out.mask)].max() > 0.05
