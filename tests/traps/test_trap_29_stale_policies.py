"""Trap 29, stale old policy or reference: an update changes neither the stored values nor the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import fused
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss, score_tokens, stored_anchor
from jaxrl_llm.train.online import begin
from jaxrl_llm.train.step import make_update
from tests import close
from tests.traps.tables import advantages, fresh_params, online, params, same, score, start, table_policy


def _several():
    policy = table_policy()
    return online(
        estimate=make_estimate(policy, advantages, recompute_old=True, reference=lambda extras: extras["reference"]),
        loss=make_policy_loss(policy, clipped_policy_loss, anchor=stored_anchor),
        updates_per_rollout=3,
        tx=optax.sgd(0.5),
    )


def test_estimates_take_the_pass_without_a_gradient():
    """Old and reference log-probabilities are of ``Policy.for_scores``, the loss is of the policy itself."""
    method = _several()
    rows = jax.jit(partial(begin, method))(start(method, reference=fresh_params())).trajectories
    rewards = score(jax.tree.map(lambda x: x[rows.problem_ids], method.problems.answers), rows)
    extras = {"reference": params()}

    def no_pass(*given):
        raise AssertionError("hidden is for passes with a gradient")

    plain = table_policy()
    parted = plain._replace(hidden=no_pass, hidden_alone=plain.hidden)
    assert plain.for_scores() is plain and parted.for_scores().hidden_alone is None
    found, want = (
        make_estimate(policy, advantages, recompute_old=True, reference=lambda extras: extras["reference"])(
            params(), extras, rows, rewards
        )
        for policy in (parted, plain)
    )
    np.testing.assert_array_equal(found.old_logp, want.old_logp)
    np.testing.assert_array_equal(found.ref_logp, want.ref_logp)
    with pytest.raises(AssertionError, match="with a gradient"):
        make_policy_loss(parted, clipped_policy_loss, anchor=stored_anchor)(params(), found)


def test_the_stored_values_stay_and_the_ratio_leaves_one():
    method = _several()
    state = start(method, reference=fresh_params())
    drawn = jax.jit(partial(begin, method))(state)
    out = drawn.trajectories
    answers = jax.tree.map(lambda x: x[out.problem_ids], method.problems.answers)
    batch = jax.jit(method.estimate)(state.params, state.extras, out, score(answers, out))
    old = np.array(batch.old_logp)
    close.assert_near(old, score_tokens(method.policy, params(), out)[0])
    update = jax.jit(make_update(method.loss, method.tx))
    ratios = []
    for _ in range(3):
        state, metrics = update(state, batch)
        ratios.append(float(metrics["policy/ratio"]))
    np.testing.assert_array_equal(batch.old_logp, old)
    close.assert_near(ratios[0], 1.0)
    assert abs(ratios[2] - 1) > 1e-4
    now, _ = score_tokens(method.policy, state.params, out)
    assert np.abs(np.asarray(now) - old)[np.asarray(out.mask)].max() > 1e-3


def test_the_reference_stays_over_a_run():
    method = _several()
    state, _ = fused.run(method, start(method, reference=fresh_params()), 3)
    same(params(), state.extras["reference"])
    assert float(jnp.abs(state.params["table"] - params()["table"]).max()) > 1e-3
