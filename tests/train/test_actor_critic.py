"""PPO with a value head: values and returns in the batch, gradients reach both, equality with the critic-free loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.advantages import returns, whiten
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import heads
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import fused
from jaxrl_llm.train.methods import actor_critic, builders
from jaxrl_llm.train.online import init_state
from jaxrl_llm.types import Batch, Policy, Rewards
from tests import close

SETTINGS = recipes.OnlineSettings(
    levels=(1,), train_problems=16, eval_problems=8, max_new_tokens=12, group_size=2, prompts_per_step=2, steps=2
)


def _case():
    found = recipes.bench(SETTINGS)
    ids = jnp.arange(2, dtype=jnp.int32)
    rollout = recipes.rollout_of_model(found.model, group_size=2, max_new_tokens=12, temperature=1.0)
    keys = sample_keys(jax.random.key(0), 0, ids, 2)
    rows = rollout(found.model.params, found.train.tokens[ids], found.train.valid[ids], keys, ids)
    head = heads.init_head(found.model.config.hidden_size, jax.random.key(1), scale=0.1)
    return found, {"model": found.model.params, "value": head}, rows


@pytest.mark.slow
def test_batch_holds_values_and_returns():
    found, params, rows = _case()
    rewards = Rewards(jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool))
    batch = actor_critic.make_value_estimate(found.model.policy, lam=0.9, bootstrap=True)(params, {}, rows, rewards)
    logp, _, values, _ = actor_critic.score_with_values(found.model.policy, params, rows)
    paid = returns.at_last_token(rewards.value, rows.mask)
    # a cut response is worth what the head says after its last token, an ended one nothing more
    hidden = found.model.policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    after = heads.token_values(params["value"], hidden)
    last = [int(np.nonzero(np.asarray(m))[0][-1]) for m in rows.mask]
    end = jnp.stack([jnp.where(rows.truncated[b], after[b, t], 0.0) for b, t in enumerate(last)])
    assert rows.truncated.any() and not rows.truncated.all()
    advantages, targets = returns.gae_advantages(paid, values, end, rows.mask, gamma=1.0, lam=0.9)
    # the same functions of the same arrays, one operation after another: equal on any processor
    np.testing.assert_array_equal(batch.extras["returns"], targets)
    np.testing.assert_array_equal(batch.advantages, whiten.whitened_tokens(advantages, rows.mask))
    np.testing.assert_array_equal(batch.old_logp, logp)
    # where the reward was final nothing follows, cut or not
    batch = actor_critic.make_value_estimate(found.model.policy, lam=0.9)(params, {}, rows, rewards)
    _, targets = returns.gae_advantages(paid, values, jnp.zeros(4), rows.mask, gamma=1.0, lam=0.9)
    np.testing.assert_array_equal(batch.extras["returns"], targets)


@pytest.mark.slow
def test_without_the_value_it_is_the_policy_loss_and_each_mask_counts_its_own():
    found, params, rows = _case()
    rewards = Rewards(jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool))
    batch = actor_critic.make_value_estimate(found.model.policy)(params, {}, rows, rewards)
    plain = builders.make_policy_loss(found.model.policy, clipped_policy_loss, anchor=builders.stored_anchor)
    loss = actor_critic.make_actor_critic_loss(found.model.policy, value_weight=0.0)
    want, gradient = jax.value_and_grad(lambda p: plain(p, batch)[0])(params["model"])
    got, other = jax.value_and_grad(lambda p: loss(p, batch)[0])(params)
    back = close.gradient_sums(found.model.config, *rows.mask.shape)
    close.assert_same_sums(got, want, back, magnitude=float(jnp.abs(batch.advantages).max()))
    close.assert_same_sums(other["model"], gradient, back)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(other["value"]))
    # no policy token: only the head's loss is left, and the policy learns from it through the shared states
    none = actor_critic.make_actor_critic_loss(
        found.model.policy, policy_tokens=lambda b: jnp.zeros_like(b.mask), value_weight=1.0
    )
    value, other = jax.value_and_grad(lambda p: none(p, batch)[0])(params)
    assert float(value) > 0 and np.asarray(other["value"]["weight"]).any()
    doubled = actor_critic.make_actor_critic_loss(
        found.model.policy, value_weight=0.0, token_weights=lambda b: 2.0 * jnp.ones(b.mask.shape)
    )
    largest = float(jnp.abs(batch.advantages).max())
    close.assert_same_sums(doubled(params, batch)[0], 2 * want, back, magnitude=2 * largest)


@pytest.mark.slow
def test_it_runs_in_the_fused_loop():
    found = recipes.bench(SETTINGS)
    online = recipes.make_online(
        SETTINGS,
        found,
        estimate=actor_critic.make_value_estimate(found.model.policy),
        loss=actor_critic.make_actor_critic_loss(found.model.policy),
        tx=optax.adam(1e-3),
        actor=recipes.model_of,
    )
    plan = recipes.with_heads(found, recipes.one_stage(SETTINGS, found, online), value=1, cot=4)
    params = plan.init(jax.random.key(0))
    assert params["cot"]["weight"].shape[1] == 4 and not np.asarray(params["value"]["weight"]).any()
    state, metrics = fused.run(online, init_state(online, jax.tree.map(jnp.copy, params), jax.random.key(0)), 2)
    assert np.isfinite(metrics["loss/total"]).all() and metrics["value/value_error"].shape == (2,)
    assert recipes._of_model(recipes.make_measure(SETTINGS)) is plan.measure  # arms share one program


def test_the_critic_alone_moves_its_head_and_nothing_below():
    """Two rows of states ``E[token]``: V_t = w . E[token before] + b, loss and gradient by a loop in float64."""
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 6, (2, 5)), np.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], bool)
    states, weight, targets = rng.normal(size=(6, 3)), rng.normal(size=(3, 1)), rng.normal(size=(2, 5))
    policy = Policy(*[None] * len(Policy._fields))._replace(
        hidden=lambda model, tokens, positions, segment_ids: model["states"][tokens]
    )
    single, empty = jnp.float32, jnp.zeros((2, 5), jnp.float32)
    batch = Batch(
        jnp.asarray(tokens, jnp.int32), jnp.ones((2, 5), jnp.int32), jnp.tile(jnp.arange(5, dtype=jnp.int32), (2, 1)),
        jnp.asarray(mask), *[empty] * 4, jnp.arange(2, dtype=jnp.int32), jnp.float32(6),
        {"values": empty, "returns": jnp.asarray(targets, single)},
    )  # fmt: skip
    params = {"model": {"states": jnp.asarray(states, single)},
              "value": {"weight": jnp.asarray(weight, single), "bias": jnp.full((1,), 0.5, single)}}  # fmt: skip
    loss = actor_critic.make_critic_loss(policy)
    (got, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
    want, slope, error = 0.0, np.zeros(3), 0.0
    for b, t in zip(*np.nonzero(mask), strict=True):
        before = states[tokens[b, t - 1]]
        miss = float(before @ weight[:, 0] + 0.5 - targets[b, t])
        want, slope, error = want + miss**2 / 2 / 6, slope + miss * before / 6, error + abs(miss) / 6
    close.assert_near(got, want, terms=20, magnitude=2 * want)
    close.assert_near(gradient["value"]["weight"][:, 0], slope, terms=20, magnitude=4.0)
    close.assert_near(metrics["value/value_error"], error, terms=20)
    assert not np.asarray(gradient["model"]["states"]).any()
