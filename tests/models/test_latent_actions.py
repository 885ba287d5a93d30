"""Latent actions: straight-through choice, who sees which token, what stays frozen, the token distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import latent_code_training as learning
from experiments.policy_gradient.parts import latent_codes as latent
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Rewards, Trajectories
from tests import close
from tests.close import singles
from tests.models_for_tests import dense_rows, small_config, small_model

K = 5
rng = np.random.default_rng(2)


def _case():
    policy, model, config = small_model()
    params = latent.init_latent(model, config.hidden_size, jax.random.key(0), codes=K, hidden=8)
    params["policy"]["out"] = params["policy"]["out"] * 20  # a policy that prefers some codes
    params["merge"]["out"] = params["merge"]["out"] * 20
    tokens = jnp.asarray(rng.integers(3, 20, (2, 6)), jnp.int32)
    segments, positions = dense_rows(2, 6)
    zeros = jnp.zeros(2, jnp.int32)
    mask = jnp.ones((2, 6), bool).at[:, 0].set(False)
    rows = Trajectories(tokens, segments, positions, mask, jnp.zeros((2, 6)), zeros > 0, zeros, zeros)
    return policy, params, rows


def test_straight_through_is_hard_forward_and_soft_backward():
    logits, noise = (jnp.asarray(rng.normal(size=(2, 3, K)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.normal(size=(2, 3, K)), jnp.float32)
    got = latent.straight_through(logits, noise)
    close.assert_near(got, jax.nn.one_hot(jnp.argmax(logits + noise, -1), K))
    gradient = jax.grad(lambda x: jnp.sum(weights * latent.straight_through(x, noise)))(logits)
    want = jax.grad(lambda x: jnp.sum(weights * jax.nn.softmax((x + noise) / 2.0, axis=-1)))(logits)
    close.assert_near(gradient, want)
    with pytest.raises(ValueError, match="temperature=0"):
        latent.straight_through(logits, noise, temperature=0.0)


def test_usage_is_least_for_even_codes():
    """K = 64 even codes: -log 64."""
    even = latent.code_usage(jnp.zeros((1, 1, 64)))
    close.assert_near(even[0, 0], -np.log(64))
    other = latent.code_usage(jnp.asarray(rng.normal(size=(1, 9, 64)), jnp.float32))
    assert (other > even[0, 0]).all()
    close.assert_near(latent.code_usage(100 * jax.nn.one_hot(jnp.array([[3]]), 64))[0, 0], 0)


def test_the_inverse_model_looks_at_the_token_and_the_policy_does_not():
    policy, params, rows = _case()

    def both(tokens):
        hidden = policy.hidden(params["model"], tokens, rows.positions, rows.segment_ids)
        before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
        return latent.inverse_logits(params, hidden), latent.policy_logits(params, before)

    changed = rows.tokens.at[:, 3].set((rows.tokens[:, 3] + 1) % 17 + 3)
    (inverse, acting), (inverse_2, acting_2) = both(rows.tokens), both(changed)
    np.testing.assert_array_equal(inverse[:, :3], inverse_2[:, :3])
    assert (jnp.abs(inverse[:, 3] - inverse_2[:, 3]).max(-1) > 1e-6).all()
    np.testing.assert_array_equal(acting[:, :4], acting_2[:, :4])
    assert (jnp.abs(acting[:, 4] - acting_2[:, 4]).max(-1) > 1e-6).all()


def test_tokens_are_drawn_as_by_a_code_and_then_its_token():
    policy, params, rows = _case()
    hidden = policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    got = jax.nn.softmax(latent.token_logits(policy, params, hidden, sharpness=2.0), axis=-1)
    chances = jax.nn.softmax(latent.policy_logits(params, hidden), axis=-1)
    want = 0.0
    for k in range(K):
        action = jnp.broadcast_to(params["codes"][k], hidden.shape)
        state = latent.merged(params, hidden, action)
        want = want + chances[..., k, None] * jax.nn.softmax(2.0 * policy.unembed(params["model"], state), axis=-1)
    close.assert_near(got, want, terms=close.forward_sums(small_config(), 6))
    with pytest.raises(ValueError, match="codes=1"):
        latent.init_latent({}, 4, jax.random.key(0), codes=1)


def test_reward_moves_the_policy_over_codes_alone():
    policy, params, rows = _case()
    acting = latent.make_latent_policy(policy)

    def loss(params):
        logp, _ = score_tokens(acting, params, rows)
        return jnp.sum(jnp.where(rows.mask, logp, 0.0))

    gradient = jax.grad(loss)(params)
    assert all(np.asarray(g).any() for g in jax.tree.leaves(gradient.pop("policy")))
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient))
    assert np.isfinite(loss(params)) and builders is not None


@pytest.mark.slow
def test_learning_the_world():
    """The loss falls, codes are told apart by the tokens they bring, the language model stays."""
    policy, params, rows = _case()
    noise = jnp.zeros((2, 6, K))
    gradient = jax.grad(lambda p: learning.world_loss(policy, p, rows, noise)[0])(params)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient["model"]))
    assert all(np.asarray(g).any() for k in ("inverse", "merge", "policy") for g in jax.tree.leaves(gradient[k]))
    first, metrics = learning.world_loss(policy, params, rows, noise)
    numbers = {"steps": 60, "rows_per_step": 4, "learning_rate": 1e-2}
    learned = jax.jit(lambda p: learning.learn_world(policy, p, rows, jax.random.key(1), **numbers))(params)
    last, after = learning.world_loss(policy, learned, rows, noise)
    assert last < first and after["latent/world"] < 0.8 * metrics["latent/world"]
    jax.tree.map(np.testing.assert_array_equal, learned["model"], params["model"])


def test_distinct_responses():
    tokens = jnp.array([[1, 2, 3], [1, 2, 9], [1, 2, 3], [4, 4, 4], [5, 5, 5], [6, 6, 6]])
    mask = jnp.array([[True, True, False]] * 6)
    # three of one kind (the last token does not count), three kinds: 1/3 and 1
    assert float(learning.distinct_fraction(tokens, mask, 3)) == singles(2 / 3)


def test_codes_drawn_behind_their_tokens_follow_the_posterior():
    """pi(k | s) W(token | s, k), made to sum to 1: 4,000 draws of every token's code against the enumerated law."""
    policy, params, rows = _case()
    hidden = policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    keys = jax.random.split(jax.random.key(3), 4000)
    draw = jax.jit(jax.vmap(lambda k: latent.drawn_codes(policy, params, before, rows.tokens, k, sharpness=2.0)))
    seen = np.stack([(np.asarray(draw(keys)) == k).mean(0) for k in range(K)], axis=-1)
    chances = np.asarray(jax.nn.softmax(latent.policy_logits(params, before), axis=-1), np.float64)
    want = np.zeros((2, 6, K))
    for k in range(K):
        action = jnp.broadcast_to(params["codes"][k], before.shape)
        world = jax.nn.softmax(2.0 * policy.unembed(params["model"], latent.merged(params, before, action)), axis=-1)
        likelihood = jnp.take_along_axis(world, rows.tokens[:, :, None], axis=-1)[:, :, 0]
        want[:, :, k] = chances[:, :, k] * np.asarray(likelihood, np.float64)
    marginal = np.exp(np.asarray(latent.token_logits(policy, params, before, sharpness=2.0)))
    picked = np.take_along_axis(marginal, np.asarray(rows.tokens)[:, :, None], axis=-1)[:, :, 0]
    sums = 2 * close.forward_sums(small_config(), 6)
    close.assert_relative(want.sum(-1), picked, terms=sums)  # together they are the chance of the token
    want /= want.sum(-1, keepdims=True)
    assert np.abs(want - chances).max() > 0.05, "the token says something about the code"
    close.assert_share(seen, want, 4000)


def test_the_gradient_is_that_of_the_drawn_code():
    """-A grad log pi(k | s) at the first update, in the policy over codes alone; and a pull to where it began."""
    policy, params, rows = _case()
    slots = learning.make_code_slots(
        policy, lambda rows, rewards: jnp.where(rows.mask, 0.7, 0.0), clipped_policy_loss, sharpness=2.0
    )
    rewards = Rewards(jnp.ones(2), jnp.ones(2, bool))
    batch = slots["estimate"](params, learning.keep_policy(params, jax.random.key(0)), rows, rewards)
    gradient = jax.grad(lambda p: slots["loss"](p, batch)[0])(params)
    moved = {name for name, x in gradient.items() if any(np.asarray(y).any() for y in jax.tree.leaves(x))}
    assert moved == {"policy"}
    hidden = policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))

    def direct(part):
        logp, _ = latent.code_logp(params | {"policy": part}, before, batch.extras["codes"])
        return -0.7 * jnp.sum(jnp.where(rows.mask, logp, 0.0)) / jnp.sum(rows.mask, dtype=jnp.float32)

    want = jax.grad(direct)(params["policy"])
    close.assert_same_sums(gradient["policy"], want, close.gradient_sums(small_config(), 2, 6))
    used = slots["loss"](params, batch)[1]["codes/used"]
    assert 1 / K < float(used) <= 1.0
    held = learning.make_code_slots(
        policy, lambda rows, rewards: jnp.zeros(rows.mask.shape), clipped_policy_loss, sharpness=2.0, kl_weight=1.0
    )
    away = params | {"policy": jax.tree.map(lambda x: 1.5 * x, params["policy"])}
    batch = held["estimate"](away, learning.keep_policy(params, jax.random.key(0)), rows, rewards)
    pull = jax.grad(lambda p: held["loss"](p, batch)[0])(away)["policy"]
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(pull)) > 1e-3
