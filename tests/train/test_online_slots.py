"""The two slots for methods with a memory: whose samples train, and what the state keeps between iterations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import fused
from jaxrl_llm.train.methods.builders import make_policy_loss, mismatch_weights
from jaxrl_llm.train.online import begin, iterate
from tests import close
from tests.traps.tables import fresh_params, online, same, start, table_policy


@pytest.mark.slow
def test_a_stale_actor_samples_with_the_weights_of_the_last_synchronisation():
    method = online(**recipes.stale_actor(every=2))
    state, states = start(method, behaviour=fresh_params()), []
    for _ in range(3):
        states.append(state)
        state, _ = iterate(method, state)
    # iterations 0 and 1 sample with the first weights, iteration 2 with those after iteration 1
    same(states[1].extras["behaviour"], states[0].params)
    assert np.abs(np.asarray(states[1].params["table"] - states[0].params["table"])).max() > 1e-4
    same(states[2].extras["behaviour"], states[2].params)
    old = begin(online(), states[1]._replace(params=states[0].params)).trajectories
    same(begin(method, states[1]).trajectories, old)


def test_every_step_synchronised_is_on_policy():
    method = online(**recipes.stale_actor(every=1))
    state, metrics = fused.run(method, start(method, behaviour=fresh_params()), 3)
    plain, plain_metrics = fused.run(online(), start(online()), 3)
    same(state.params, plain.params)
    same(metrics, plain_metrics)
    with pytest.raises(ValueError, match="every=0"):
        recipes.stale_actor(every=0)


def test_remember_sees_the_finished_iteration():
    def remember(state, batch, trajectories, rewards):
        seen = state.extras["seen"].at[state.step - 1].set(jnp.sum(rewards.value))
        return state.extras | {"seen": seen}

    method = online(remember=remember)
    state, metrics = fused.run(method, start(method, seen=jnp.zeros(3)), 3)
    rows = method.prompts_per_step * method.group_size
    close.assert_near(state.extras["seen"], metrics["reward/mean"] * rows, terms=rows, magnitude=rows)


def test_token_weights_scale_the_loss_and_carry_no_gradient():
    policy = table_policy()

    def two(weight):
        loss = make_policy_loss(policy, clipped_policy_loss, token_weights=weight)
        method = online(loss=loss, max_grad_norm=None)
        return fused.run(method, start(method), 1)

    half, metrics = two(lambda logp, entropy, batch: 0.5 * jnp.exp(logp - jax.lax.stop_gradient(logp)))
    whole, plain = two(None)
    for name in ("grad/norm", "loss/total"):  # a factor of exactly 1/2 rounds nothing, a sum in another order does
        tokens = float(plain["tokens/generated"][0])
        close.assert_near(metrics[name][0], 0.5 * float(plain[name][0]), terms=int(tokens) + policy.vocab_size)
    assert half.params["table"].shape == whole.params["table"].shape


def test_mismatch_weights_by_hand():
    """The trainer gives the sampled tokens 2, 1/2 and 9 times the sampler's probability; 9 is cut to the cap."""
    sampler, mask = jnp.log(jnp.array([[0.4, 0.4, 0.1, 0.1]])), jnp.array([[True, True, True, False]])
    batch = types.SimpleNamespace(sampler_logp=sampler, mask=mask)
    logp = sampler + jnp.log(jnp.array([[2.0, 0.5, 9.0, 9.0]]))
    close.assert_near(mismatch_weights(cap=3.0)(logp, None, batch), [[2.0, 0.5, 3.0, 0.0]])
    close.assert_near(mismatch_weights()(sampler, None, batch), [[1.0, 1.0, 1.0, 0.0]])
