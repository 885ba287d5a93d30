"""Trap 8, ratio against a different numeric path: exactly 1 on the first update, in bfloat16 and in any parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.train.methods.builders import make_policy_loss
from jaxrl_llm.train.step import accumulate
from tests import close
from tests.models_for_tests import small_config, small_model
from tests.traps.tables import VOCAB, online, random_batch, same, start


@pytest.mark.parametrize(("dtype", "parts"), [(jnp.float32, 1), (jnp.bfloat16, 1), (jnp.bfloat16, 4)])
def test_ratio_is_exactly_one_whatever_the_stored_log_probs_say(dtype, parts):
    policy = make_policy(small_config(), compute_dtype=dtype)
    loss = make_policy_loss(policy, clipped_policy_loss)
    _, _, metrics = jax.jit(accumulate, static_argnums=(0, 3))(loss, small_model()[1], random_batch(), parts)
    close.assert_near(metrics["policy/ratio"], 1.0)  # a weighted mean of exact ones
    assert float(metrics["policy/clipped"]) == 0.0
    if parts == 1:
        assert float(metrics["policy/ratio"]) == 1.0


def test_learning_rate_zero_does_not_drift():
    from jaxrl_llm.train import fused

    method = online(tx=optax.sgd(0.0))
    before = start(method)
    want = jax.tree.map(np.asarray, before.params)
    after, metrics = fused.run(method, before, 4)
    same(want, after.params)
    apart = close.near(0.0, before.params["table"], terms=VOCAB)
    assert float(metrics["kl/sampler_max"].max()) <= apart
    np.testing.assert_array_equal(metrics["policy/ratio"], 1.0)
