"""Trap 28, gradient clipping: after accumulation and once, so the parts of a batch do not change the step."""

import jax
import numpy as np
import optax
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_policy_loss, sampler_anchor
from jaxrl_llm.train.step import make_update
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
        np.testing.assert_allclose(step, steps[0], atol=1e-6)
        assert norm == pytest.approx(norms[0], rel=1e-5)  # the norm before clipping
        wanted = norm if bound is None else min(norm, bound)
        assert np.linalg.norm(step) == pytest.approx(wanted, rel=1e-3)
