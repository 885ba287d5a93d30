"""Trap 28, gradient clipping: after accumulation and once, so the parts of a batch do not change the step."""

import jax
import numpy as np
import optax
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_policy_loss, sampler_anchor
from jaxrl_llm.train.step import make_update
from tests import close
from tests.traps.tables import online, random_batch, start, table_policy


@pytest.mark.parametrize("bound", [1e-3, 1e3, None])
def test_the_step_is_the_same_in_any_parts(bound):
    loss = make_policy_loss(table_policy(), clipped_policy_loss, anchor=sampler_anchor)
    steps, norms = [], []
    for parts in (1, 2, 8):
        state = start(online(tx=optax.sgd(1.0)))
        before = np.asarray(state.params["table"])
        after, metrics = jax.jit(make_update(loss, optax.sgd(1.0), microbatches=parts, max_grad_norm=bound))(
            state, random_batch()
        )
        steps.append(np.asarray(after.params["table"]) - before)
        norms.append(float(metrics["grad/norm"]))
    for step, norm in zip(steps, norms, strict=True):
        rounding = close.bound(1, np.linalg.norm(before))  # the step is read off the weights that it was added to
        apart = rounding + close.near(step, steps[0], magnitude=0)
        np.testing.assert_allclose(step, steps[0], rtol=0, atol=apart)
        close.assert_relative(norm, norms[0], terms=random_batch().tokens.size)  # the norm before clipping
        wanted = norm if bound is None else min(norm, bound)
        apart = rounding + close.near(wanted, wanted, terms=step.size, magnitude=0)
        np.testing.assert_allclose(np.linalg.norm(step), wanted, rtol=0, atol=apart)
