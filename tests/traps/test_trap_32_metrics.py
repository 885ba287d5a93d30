"""Trap 32, metrics over prompts or pads: entropy and gap are of the sampled tokens, and exact."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import reduce
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_policy_loss
from tests import close
from tests.traps.tables import params, random_batch, table_policy


def test_entropy_is_that_of_the_distributions_that_were_drawn_from():
    batch = random_batch()
    _, metrics = make_policy_loss(table_policy(), clipped_policy_loss)(params(), batch)
    logp = np.asarray(jax.nn.log_softmax(params()["table"]), np.float64)
    entropy = -(np.exp(logp) * logp).sum(1)
    before = np.asarray(batch.tokens)[:, :-1][np.asarray(batch.mask)[:, 1:]]
    close.assert_relative(metrics["policy/entropy"], entropy[before].mean())


def test_what_stands_outside_the_mask_does_not_show():
    batch = random_batch()
    loss = make_policy_loss(table_policy(), clipped_policy_loss)
    dirty = batch._replace(sampler_logp=jnp.where(batch.mask, batch.sampler_logp, 1e6))
    for (name, a), b in zip(loss(params(), batch)[1].items(), loss(params(), dirty)[1].values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    rows = jnp.where(batch.mask, 1.0, jnp.nan)
    assert float(reduce.metrics({"x": rows}, batch.mask, prefix="p")["p/x"]) == 1.0
