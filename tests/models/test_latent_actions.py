"""Latent actions: straight-through choice, who sees which token, what stays frozen, the token distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import latent_code_layers
from experiments.policy_gradient.parts import latent_code_training as learning
from experiments.policy_gradient.parts import latent_codes as latent
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Rewards, Trajectories
from tests import close
from tests.close import singles
from tests.models_for_tests import dense_rows, small_config, small_model

K = 5
rng = np.random.default_rng(2)
LAYERS = latent_code_layers.transformers(small_config(), codes=K, layers=1)
FORMS = pytest.mark.parametrize("form", [latent.PERCEPTRONS, LAYERS], ids=["perceptrons", "layers"])


def _case(form=latent.PERCEPTRONS):
    policy, model, config = small_model()
    params = latent.init_latent(model, config.hidden_size, jax.random.key(0), codes=K, form=form)
    if form is latent.PERCEPTRONS:
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


@FORMS
def test_the_inverse_model_looks_at_the_token_and_the_policy_does_not(form):
    policy, params, rows = _case(form)

    def both(tokens):
        hidden = policy.hidden(params["model"], tokens, rows.positions, rows.segment_ids)
        before = learning.states_before(policy, form, params, rows._replace(tokens=tokens))
        read = form.read(params["inverse"], hidden, rows.positions, rows.segment_ids)
        return read, form.chances(params["policy"], before)

    changed = rows.tokens.at[:, 3].set((rows.tokens[:, 3] + 1) % 17 + 3)
    (inverse, acting), (inverse_2, acting_2) = both(rows.tokens), both(changed)
    np.testing.assert_array_equal(inverse[:, :3], inverse_2[:, :3])
    assert (jnp.abs(inverse[:, 3] - inverse_2[:, 3]).max(-1) > 1e-6).all()
    np.testing.assert_array_equal(acting[:, :4], acting_2[:, :4])
    assert (jnp.abs(acting[:, 4] - acting_2[:, 4]).max(-1) > 1e-6).all()


@FORMS
def test_tokens_are_drawn_as_by_a_code_and_then_its_token(form):
    policy, params, rows = _case(form)
    hidden = policy.hidden(params["model"], rows.tokens, rows.positions, rows.segment_ids)
    states = form.states(params["policy"], hidden, rows.positions, rows.segment_ids)
    got = jax.nn.softmax(latent.token_logits(policy, params, states, sharpness=2.0, form=form), axis=-1)
    chances = jax.nn.softmax(form.chances(params["policy"], states), axis=-1)
    want = 0.0
    for k in range(K):
        action = jnp.broadcast_to(params["codes"][k], hidden.shape)
        state = form.merged(params["merge"], hidden, action)
        want = want + chances[..., k, None] * jax.nn.softmax(2.0 * policy.unembed(params["model"], state), axis=-1)
    close.assert_near(got, want, terms=close.forward_sums(small_config(), 6))
    with pytest.raises(ValueError, match="codes=1"):
        latent.init_latent({}, 4, jax.random.key(0), codes=1)


@FORMS
def test_reward_moves_the_policy_over_codes_alone(form):
    policy, params, rows = _case(form)
    acting = latent.make_latent_policy(policy, form=form)

    def loss(params):
        logp, _ = score_tokens(acting, params, rows)
        return jnp.sum(jnp.where(rows.mask, logp, 0.0))

    gradient = jax.grad(loss)(params)
    assert all(np.asarray(g).any() for g in jax.tree.leaves(gradient.pop("policy")))
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient))
    assert np.isfinite(loss(params)) and builders is not None


@pytest.mark.slow
@FORMS
def test_learning_the_world(form):
    """The loss falls, codes are told apart by the tokens they bring, the language model stays."""
    policy, params, rows = _case(form)
    noise = jnp.zeros((2, 6, K))
    gradient = jax.grad(lambda p: learning.world_loss(policy, p, rows, noise, form=form)[0])(params)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient["model"]))
    assert all(np.asarray(g).any() for k in ("inverse", "merge", "policy") for g in jax.tree.leaves(gradient[k]))
    first, metrics = learning.world_loss(policy, params, rows, noise, form=form)
    numbers = {"steps": 60, "rows_per_step": 4, "learning_rate": 1e-2, "form": form}
    learned = jax.jit(lambda p: learning.learn_world(policy, p, rows, jax.random.key(1), **numbers))(params)
    last, after = learning.world_loss(policy, learned, rows, noise, form=form)
    assert last < first and after["latent/world"] < 0.8 * metrics["latent/world"]
    jax.tree.map(np.testing.assert_array_equal, learned["model"], params["model"])
    tuned = jax.jit(
        lambda p: learning.learn_world(policy, p, rows, jax.random.key(1), **numbers, trained=learning.GUIDED)
    )(params)
    same = {k for k in params if jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), tuned[k], params[k]))}
    assert same == {"model", "inverse", "codes"}, "what the codes mean stays"


def test_distinct_responses():
    tokens = jnp.array([[1, 2, 3], [1, 2, 9], [1, 2, 3], [4, 4, 4], [5, 5, 5], [6, 6, 6]])
    mask = jnp.array([[True, True, False]] * 6)
    # three of one kind (the last token does not count), three kinds: 1/3 and 1
    assert float(learning.distinct_fraction(tokens, mask, 3)) == singles(2 / 3)


@FORMS
def test_codes_drawn_behind_their_tokens_follow_the_posterior(form):
    """pi(k | s) W(token | s, k), made to sum to 1: 4,000 draws of every token's code against the enumerated law."""
    policy, params, rows = _case(form)
    before = learning.states_before(policy, form, params, rows)
    keys, how = jax.random.split(jax.random.key(3), 4000), {"sharpness": 2.0, "form": form}
    draw = jax.jit(jax.vmap(lambda k: latent.drawn_codes(policy, params, before, rows.tokens, k, **how)))
    seen = np.stack([(np.asarray(draw(keys)) == k).mean(0) for k in range(K)], axis=-1)
    chances = np.asarray(jax.nn.softmax(form.chances(params["policy"], before), axis=-1), np.float64)
    want, text = np.zeros((2, 6, K)), latent.text_of(params, before)
    for k in range(K):
        state = form.merged(params["merge"], text, jnp.broadcast_to(params["codes"][k], text.shape))
        world = jax.nn.softmax(2.0 * policy.unembed(params["model"], state), axis=-1)
        likelihood = jnp.take_along_axis(world, rows.tokens[:, :, None], axis=-1)[:, :, 0]
        want[:, :, k] = chances[:, :, k] * np.asarray(likelihood, np.float64)
    marginal = np.exp(np.asarray(latent.token_logits(policy, params, before, **how)))
    picked = np.take_along_axis(marginal, np.asarray(rows.tokens)[:, :, None], axis=-1)[:, :, 0]
    sums = 2 * close.forward_sums(small_config(), 6)
    close.assert_relative(want.sum(-1), picked, terms=sums)  # together they are the chance of the token
    want /= want.sum(-1, keepdims=True)
    assert np.abs(want - chances).max() > 0.05, "the token says something about the code"
    close.assert_share(seen, want, 4000)


@FORMS
def test_the_gradient_is_that_of_the_drawn_code(form):
    """-A grad log pi(k | s) at the first update, in the policy over codes alone; and a pull to where it began."""
    policy, params, rows = _case(form)
    slots = learning.make_code_slots(
        policy, lambda rows, rewards: jnp.where(rows.mask, 0.7, 0.0), clipped_policy_loss, sharpness=2.0, form=form
    )
    rewards = Rewards(jnp.ones(2), jnp.ones(2, bool))
    batch = slots["estimate"](params, learning.keep_policy(params, jax.random.key(0)), rows, rewards)
    gradient = jax.grad(lambda p: slots["loss"](p, batch)[0])(params)
    moved = {name for name, x in gradient.items() if any(np.asarray(y).any() for y in jax.tree.leaves(x))}
    assert moved == {"policy"}

    def direct(part):
        changed = params | {"policy": part}
        before = learning.states_before(policy, form, changed, rows)
        logp, _ = latent.code_logp(changed, before, batch.extras["codes"], form=form)
        return -0.7 * jnp.sum(jnp.where(rows.mask, logp, 0.0)) / jnp.sum(rows.mask, dtype=jnp.float32)

    want = jax.grad(direct)(params["policy"])
    close.assert_same_sums(gradient["policy"], want, close.gradient_sums(small_config(), 2, 6))
    used = slots["loss"](params, batch)[1]["codes/used"]
    assert 1 / K < float(used) <= 1.0
    held = learning.make_code_slots(
        policy, lambda rows, rewards: jnp.zeros(rows.mask.shape), clipped_policy_loss, sharpness=2.0, kl_weight=1.0,
        form=form,
    )  # fmt: skip
    away = params | {"policy": jax.tree.map(lambda x: 1.5 * x, params["policy"])}
    batch = held["estimate"](away, learning.keep_policy(params, jax.random.key(0)), rows, rewards)
    pull = jax.grad(lambda p: held["loss"](p, batch)[0])(away)["policy"]
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(pull)) > 1e-3


@FORMS
def test_what_is_drawn_with_caches_is_what_is_scored(form):
    """Prompts of different lengths, padded on the left, whose cache a group shares: both caches are read right."""
    policy, params, _ = _case(form)
    acting = latent.make_latent_policy(policy, sharpness=2.0, form=form)
    prompts = jnp.array([[0, 0, 5, 9], [7, 4, 11, 3]])
    keys = jax.random.split(jax.random.key(5), 4)
    drawn = jax.jit(
        lambda p: generate(acting, p, prompts, prompts > 0, keys, group_size=2, max_new_tokens=5, eos_ids=(2,))
    )(params)
    logp, _ = score_tokens(acting, params, drawn)
    close.assert_same_forward(jnp.where(drawn.mask, logp, 0.0), drawn.sampler_logp, small_config())


def test_the_policy_of_layers_reads_what_was_before_the_last_state():
    """A perceptron over the state of an earlier token is not told it; layers attend to it."""
    _, params, rows = _case(LAYERS)
    hidden = jnp.asarray(rng.normal(size=(1, 4, 16)), jnp.float32)
    segments, positions = dense_rows(1, 4)

    def last(form, part, hidden):
        return form.chances(part, form.states(part, hidden, positions, segments))[0, -1]

    other = hidden.at[0, 1].add(1.0)
    moved = jnp.abs(last(LAYERS, params["policy"], other) - last(LAYERS, params["policy"], hidden))
    assert float(moved.max()) > 1e-3
    part = latent.PERCEPTRONS.init_part(16, K, jax.random.key(0))
    np.testing.assert_array_equal(last(latent.PERCEPTRONS, part, other), last(latent.PERCEPTRONS, part, hidden))


def test_the_world_model_begins_as_the_language_model():
    """Matrices that end a layer and are 0 leave the state; one layer by hand in float64."""
    config = small_config()
    merge = latent_code_layers.init_merge(config, 2, 16, jax.random.key(1))
    text, action = (jnp.asarray(rng.normal(size=(3, 16)), jnp.float32) for _ in range(2))
    still = merge | {"down": jnp.zeros_like(merge["down"])}
    np.testing.assert_array_equal(latent_code_layers.merged_by_layers(config, still, text, action), text)
    state = np.asarray(text, np.float64)
    for i in range(2):
        gate, up, down = (np.asarray(merge[name][i], np.float64) for name in ("gate", "up", "down"))
        norm = state / np.sqrt((state**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        x = np.concatenate([norm, np.asarray(action, np.float64)], axis=-1)
        a = x @ gate
        state = state + (a / (1 + np.exp(-a)) * (x @ up)) @ down
    close.assert_same_forward(latent_code_layers.merged_by_layers(config, merge, text, action), state, config)


def test_layers_are_at_least_one():
    with pytest.raises(ValueError, match="layers=0"):
        latent_code_layers.transformers(small_config(), codes=K, layers=0)
