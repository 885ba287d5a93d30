"""The fused loop with a policy that is a table of logits: vmapped seeds and settings, learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.train import fused
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss, reference_kl
from jaxrl_llm.train.online import Online, iterate
from tests import close
from tests.traps.tables import (
    VOCAB,
    advantages,
    clipped_policy_loss,
    fresh_params,
    online,
    params,
    problems,
    start,
    table_policy,
)  # fmt: skip

SEEDS = (0, 1, 2)
RATE = 0.5
SUMS = 2 * (2 * VOCAB) + 16 * 8  # a product with the table and a softmax, back again, and the tokens of sixteen rows
LARGEST = 2.0  # of a gradient: advantages of groups of four, of which a mean over tokens is taken


@functools.cache
def _method() -> Online:
    return online(tx=optax.sgd(RATE))


def _same_table(got, want, steps):
    close.assert_same_descent(got, want, RATE, steps, SUMS, gradient=LARGEST)


def _seeds():
    return fused.stack_states([start(_method(), seed) for seed in SEEDS])


def test_the_scan_equals_stepping_one_by_one():
    step = jax.jit(functools.partial(iterate, _method()))
    state, history = start(_method()), []
    for _ in range(4):
        state, metrics = step(state)
        history.append(metrics)
    whole, stacked = fused.run(_method(), start(_method()), 4)
    _same_table(whole.params, state.params, 4)
    for name, values in stacked.items():
        alone = np.asarray([m[name] for m in history])
        close.assert_same_sums(values, alone, SUMS, magnitude=max(LARGEST, float(np.abs(alone).max())))


def test_seeds_are_independent_axes_of_one_program():
    many, metrics = fused.make_run(_method(), 4, seeds=True)(_seeds())
    assert metrics["reward/mean"].shape == (3, 4)
    for k, seed in enumerate(SEEDS):
        one, alone = fused.run(_method(), start(_method(), seed), 4)
        _same_table(many.params["table"][k], one.params["table"], 4)
        close.assert_same_sums(metrics["reward/mean"][k], alone["reward/mean"], 16, magnitude=1.0)
    assert len({tuple(row) for row in np.asarray(metrics["reward/mean"]).tolist()}) == 3


@pytest.mark.slow
def test_a_learning_rate_is_a_vmap_axis():
    method = online(tx=optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    states = fused.stack_states([start(method)] * 2)
    rates = jnp.array([0.0, 0.5])
    opt = states.opt_state._replace(hyperparams=dict(states.opt_state.hyperparams) | {"learning_rate": rates})
    many, _ = fused.make_run(method, 2, seeds=True)(states._replace(opt_state=opt))
    np.testing.assert_array_equal(many.params["table"][0], params()["table"])
    one, _ = fused.run(_method(), start(_method()), 2)
    _same_table(many.params["table"][1], one.params["table"], 2)
    assert np.abs(np.asarray(one.params["table"] - params()["table"])).max() > 1e-3


def _penalised(coefficient):
    """A method with an entropy term; its weight is a number, or comes from the state through the rows."""

    def rows(extras, trajectories, rewards):
        return {"entropy_weight": jnp.broadcast_to(extras["entropy_weight"], trajectories.truncated.shape)}

    def term(logp, entropy, batch):
        weight = coefficient if coefficient is not None else batch.extras["entropy_weight"][:, None]
        return -weight * entropy

    return online(
        estimate=make_estimate(table_policy(), advantages, row_extras=rows if coefficient is None else None),
        loss=make_policy_loss(table_policy(), clipped_policy_loss, extra_terms=term),
        microbatches=2,
        tx=optax.sgd(RATE),
    )


@pytest.mark.slow
def test_a_coefficient_in_extras_is_a_vmap_axis():
    method = _penalised(None)
    weights = (0.0, 1.0)
    states = fused.stack_states([start(method, entropy_weight=jnp.float32(w)) for w in weights])
    many, _ = fused.make_run(method, 3, seeds=True)(states)
    for k, weight in enumerate(weights):
        one, _ = fused.run(_penalised(weight), start(_penalised(weight)), 3)
        _same_table(many.params["table"][k], one.params["table"], 3)
    assert np.abs(np.asarray(many.params["table"][0] - many.params["table"][1])).max() > 1e-3


def _largest_logp():
    """Of a softmax of a row of the table: not below the range of its logits and the logarithm of their number."""
    return float(jnp.ptp(fresh_params()["table"], axis=1).max()) + float(np.log(VOCAB))


def test_metric_names_of_the_loss_and_the_reference_kl_starts_at_zero():
    policy = table_policy()
    method = online(
        estimate=make_estimate(policy, advantages, reference=lambda extras: extras["reference"]),
        loss=make_policy_loss(policy, clipped_policy_loss, diagnostics=reference_kl),
    )
    _, metrics = fused.run(method, start(method, reference=fresh_params()), 3)
    for name in ("policy/ratio", "policy/clip_fraction", "policy/entropy", "kl/sampler_mean", "kl/sampler_max"):
        assert name in metrics
    # logged before the update of its step; k3 of a difference is at most its size
    assert float(metrics["kl/ref"][0]) <= close.bound(SUMS, _largest_logp())
    assert 0 < float(metrics["kl/ref"][1]) < float(metrics["kl/ref"][2])


def test_the_largest_gap_of_several_updates_is_kept():
    """``_max`` metrics are not averaged over the updates of a rollout: later updates drift from the sampler."""
    one, first = fused.run(online(), start(online()), 1)
    method = online(updates_per_rollout=4, tx=optax.sgd(1.0))
    _, metrics = fused.run(method, start(method), 1)
    assert float(first["kl/sampler_max"][0]) <= close.bound(SUMS, _largest_logp())
    assert float(metrics["kl/sampler_max"][0]) >= 2 * float(metrics["kl/sampler_mean"][0]) > 0


def test_it_learns():
    """Three seeds find the token that is wanted after every prompt: its share rises from under 1/3 to over 0.8.

    The wanted token is the same everywhere, because a table of the previous token cannot see which prompt it answers.
    """
    table = problems()._replace(answers={"wanted": jnp.full((6,), 4, jnp.int32)})
    method = online(tx=optax.adam(0.1), problems=table)
    _, metrics = fused.make_run(method, 80, seeds=True)(fused.stack_states([start(method, seed) for seed in SEEDS]))
    reward = np.asarray(metrics["reward/mean"])
    assert (reward[:, :3].mean(1) < 1 / 3).all(), reward[:, :3]
    assert (reward[:, -10:].mean(1) > 0.8).all(), reward[:, -10:]
