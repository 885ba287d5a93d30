"""A policy of 3 tokens x 3 steps, 27 sequences: the exact expected gradient of each estimator is what it claims."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.advantages import group, returns
from jaxrl_llm.losses import correction, distill, entropy, kl, off_policy, policy, sequence
from tests import close

SEQUENCES = np.array(list(itertools.product(range(3), repeat=3)), np.int32)
MASK = jnp.ones((27, 3), bool)
SUMS = 27 * 3  # every token of every sequence
rng = np.random.default_rng(0)
# logits of the next token after every prefix: rows 0; 1..3; 4..12
LOGITS = jnp.asarray(rng.normal(size=(13, 3)), jnp.float32)
REFERENCE = jnp.asarray(rng.normal(size=(13, 3)), jnp.float32)
REWARDS = jnp.asarray(rng.normal(size=27), jnp.float32)
ROW = jnp.asarray(
    np.stack([np.zeros(27), 1 + SEQUENCES[:, 0], 4 + 3 * SEQUENCES[:, 0] + SEQUENCES[:, 1]], 1), jnp.int32
)
TOKENS = jnp.asarray(SEQUENCES)


def log_probs(logits):
    return jnp.take_along_axis(jax.nn.log_softmax(logits)[ROW], TOKENS[..., None], axis=-1)[..., 0]


def probabilities(logits):
    return jnp.exp(log_probs(logits).sum(1))


def expected_gradient(terms):
    """Gradient of ``sum_y sg(pi(y)) terms(y)``: what infinitely many on-policy samples would average to."""
    weights = jax.lax.stop_gradient(probabilities(LOGITS))
    return jax.grad(lambda x: jnp.sum(weights[:, None] * terms(log_probs(x))))(LOGITS)


def objective_gradient():
    return jax.grad(lambda x: jnp.sum(probabilities(x) * REWARDS))(LOGITS)


OLD = log_probs(LOGITS)
ADVANTAGES = jnp.broadcast_to(REWARDS[:, None], (27, 3))
BASELINE = jnp.sum(probabilities(LOGITS) * REWARDS)
EACH = jnp.broadcast_to(jnp.arange(1, 4, dtype=jnp.int32)[None, :], (27, 3))
LOSSES = {
    "reinforce": lambda logp, a: policy.reinforce_loss(logp, a, MASK),
    "clipped": lambda logp, a: policy.clipped_policy_loss(logp, OLD, a, MASK),
    "cispo": lambda logp, a: policy.cispo_loss(logp, OLD, a, MASK),
    "sapo": lambda logp, a: policy.sapo_loss(logp, OLD, a, MASK),
    "kl_cov": lambda logp, a: entropy.kl_cov_loss(logp, OLD, a, MASK, fraction=0.3),
    "decoupled": lambda logp, a: off_policy.decoupled_policy_loss(logp, OLD, OLD, a, MASK),
    "gspo": lambda logp, a: sequence.gspo_loss(logp, OLD, a, MASK),
    "gspo_token": lambda logp, a: sequence.gspo_token_loss(logp, OLD, a, MASK),
    "gmpo": lambda logp, a: sequence.gmpo_loss(logp, OLD, a, MASK),
    "loop": lambda logp, a: sequence.loop_loss(logp, OLD, a, MASK, segment_ids=EACH),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("baseline", [0.0, "mean"])
def test_policy_losses_follow_the_objective(name, baseline):
    shift = BASELINE if baseline == "mean" else 0.0
    got = expected_gradient(lambda logp: LOSSES[name](logp, ADVANTAGES - shift).loss)
    close.assert_near(got, -objective_gradient(), terms=SUMS)


def _sequence_kl(x, y):
    return jnp.sum(probabilities(x) * (log_probs(x) - log_probs(y)).sum(1))


REF_LOGP = log_probs(REFERENCE)


def test_kl_values():
    exact = float(_sequence_kl(LOGITS, REFERENCE))
    weights = probabilities(LOGITS)[:, None]
    for estimator in (kl.k1, kl.k3):
        close.assert_near(jnp.sum(weights * estimator(OLD, REF_LOGP, MASK)), exact, terms=SUMS)
    assert float(jnp.min(kl.k3(OLD, REF_LOGP, MASK))) >= 0 and float(jnp.min(kl.absolute(OLD, REF_LOGP, MASK))) >= 0
    assert abs(float(jnp.sum(weights * kl.k2(OLD, REF_LOGP, MASK))) - exact) > 1e-3


def test_value_estimators_carry_no_gradient():
    for estimator in (kl.k1, kl.k2, kl.k3, kl.absolute):
        assert not np.asarray(jax.grad(lambda x, f=estimator: f(x, REF_LOGP, MASK).sum())(OLD)).any()


def _token_kl_gradient(direction):
    """Gradient of the sum over visited prefixes of the next-token KL, prefixes weighted by the fixed policy."""
    weights = jax.lax.stop_gradient(probabilities(LOGITS))

    def value(x):
        p, q = jax.nn.log_softmax(x)[ROW], jax.nn.log_softmax(REFERENCE)[ROW]
        each = jnp.sum(jnp.exp(p) * (p - q) if direction == "reverse" else jnp.exp(q) * (q - p), axis=-1)
        return jnp.sum(weights[:, None] * each)

    return jax.grad(value)(LOGITS)


def test_gradient_terms_have_the_gradient_they_claim():
    got = expected_gradient(lambda logp: kl.kl_gradient_terms(logp, REF_LOGP, MASK))
    close.assert_near(got, _token_kl_gradient("reverse"), terms=SUMS)
    got = expected_gradient(lambda logp: kl.k3_gradient_terms(logp, REF_LOGP, MASK))
    close.assert_near(got, _token_kl_gradient("forward"), terms=SUMS)


def test_weighted_gradient_terms_are_right_off_policy():
    behaviour = jnp.asarray(np.random.default_rng(5).normal(size=(13, 3)), jnp.float32) * 0.3 + LOGITS
    old = log_probs(behaviour)
    prefix = jnp.cumsum(jnp.concatenate([jnp.zeros((27, 1)), (OLD - old)[:, :-1]], axis=1), axis=1)
    # sampled from the behaviour policy; prefixes are reweighted so that only the token's own ratio is tested
    weights = jnp.exp(old.sum(1))[:, None] * jnp.exp(prefix)
    got = jax.grad(lambda x: jnp.sum(weights * kl.weighted_kl_gradient_terms(log_probs(x), old, REF_LOGP, MASK)))(
        LOGITS
    )
    close.assert_near(got, _token_kl_gradient("reverse"), terms=SUMS)


def test_k1_in_the_reward_follows_the_sequence_kl():
    penal = kl.kl_in_reward(jnp.zeros((27, 3)), OLD, REF_LOGP, MASK, coefficient=1.0)
    to_go = jnp.cumsum(penal[:, ::-1], axis=1)[:, ::-1]
    got = expected_gradient(lambda logp: policy.reinforce_loss(logp, to_go, MASK).loss)
    want = jax.grad(_sequence_kl)(LOGITS, REFERENCE)
    close.assert_near(got, want, terms=SUMS)


@functools.cache
def _groups(size):
    """Every group of ``size`` samples: the sequences ``[27^size, size]`` and the probability of drawing them."""
    members = np.array(list(itertools.product(range(27), repeat=size)))
    return members, np.prod(np.asarray(probabilities(LOGITS))[members], axis=1)


def _group_gradient(estimate, rewards, size):
    """Ascent direction of ``estimate(rewards of a group)``: mean over the members, expectation over all groups."""
    members, chance = _groups(size)
    found = np.asarray(jax.jit(jax.vmap(estimate))(rewards[members]))
    each = np.bincount(members.ravel(), (chance[:, None] * found).ravel() / size, minlength=27)
    weights = jnp.asarray(each, jnp.float32)[:, None] * jnp.ones((27, 3))
    return -jax.grad(lambda x: jnp.sum(policy.reinforce_loss(log_probs(x), weights, MASK).loss))(LOGITS)


ONE = {n: jnp.zeros((n,), jnp.int32) for n in (2, 3)}  # the members of one group, which is the whole batch here
BEATEN = jnp.sum(probabilities(LOGITS)[None, :] * jnp.sign(REWARDS[:, None] - REWARDS[None, :]), axis=1)
RIGHT = (REWARDS > 0.5).astype(jnp.float32)


def _reward_gradient():
    return objective_gradient()


def _win_gradient():
    """Of the chance that a sample beats one of the policy as it is, less the chance that it loses to it."""
    return jax.grad(lambda x: jnp.sum(probabilities(x) * BEATEN))(LOGITS)


def _pass_at_2_gradient():
    return jax.grad(lambda x: 1.0 - (1.0 - jnp.sum(probabilities(x) * RIGHT)) ** 2)(LOGITS)


ESTIMATORS = {
    # (estimate, rewards, members of a group, its claim, factor); a baseline with the sample itself in it costs 1 / G
    "rloo": (lambda r: group.rloo_advantages(r, ONE[2]), REWARDS, 2, _reward_gradient, 1.0),
    "rloo of three": (lambda r: group.rloo_advantages(r, ONE[3]), REWARDS, 3, _reward_gradient, 1.0),
    "remax": (lambda r: group.remax_advantages(r, jnp.full((2,), 0.7)), REWARDS, 2, _reward_gradient, 1.0),
    "dr_grpo": (lambda r: group.dr_grpo_advantages(r, ONE[2]), REWARDS, 2, _reward_gradient, 1 / 2),
    "dr_grpo of three": (lambda r: group.dr_grpo_advantages(r, ONE[3]), REWARDS, 3, _reward_gradient, 2 / 3),
    "gpg": (lambda r: group.gpg_advantages(r, ONE[2]), REWARDS, 2, _reward_gradient, 1 / 2),
    "opo": (lambda r: group.opo_advantages(r, ONE[2], jnp.full((2,), 3.0)), REWARDS, 2, _reward_gradient, 1 / 2),
    # divided by the deviation of two, a difference is its sign
    "grpo": (lambda r: group.group_normalized_advantages(r, ONE[2], ddof=0, eps=0.0), REWARDS, 2, _win_gradient, 1.0),
    "grpo, ddof 1": (
        lambda r: group.group_normalized_advantages(r, ONE[2], eps=0.0), REWARDS, 2, _win_gradient, 0.5**0.5
    ),
    "reinforce_pp": (lambda r: group.reinforce_pp_advantages(r, eps=0.0), REWARDS, 2, _win_gradient, 1.0),
    "reinforce_pp_baseline": (
        lambda r: group.reinforce_pp_baseline_advantages(r, ONE[2], eps=0.0), REWARDS, 2, _win_gradient, 1.0
    ),
    # of three members exactly two must be wrong to say anything: one deviation for all, sqrt(2) / 3
    "pass_at_k": (
        lambda r: group.pass_at_k_advantages(r, ONE[3], k=2, eps=0.0), RIGHT, 3, _pass_at_2_gradient, 0.125**0.5
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_of_groups_follow_what_they_claim(name):
    estimate, rewards, size, claim, factor = ESTIMATORS[name]
    close.assert_near(_group_gradient(estimate, rewards, size), factor * claim(), terms=SUMS)


def _state_values():
    """Expected reward before each token is chosen, ``[27, 3]``."""
    p, alike = np.asarray(probabilities(LOGITS), np.float64), np.ones((27, 27), bool)
    columns = []
    for t in range(3):
        weights = np.where(alike, p[None, :], 0.0)
        columns.append(weights @ np.asarray(REWARDS, np.float64) / weights.sum(1))
        alike &= SEQUENCES[:, None, t] == SEQUENCES[None, :, t]
    return jnp.asarray(np.stack(columns, 1), jnp.float32)


RIGHT_VALUES = _state_values()
# any function of the prefix is a baseline; only lam = 1 does not care that it is not the value
WRONG_VALUES = jnp.asarray(rng.normal(size=13), jnp.float32)[ROW]
FROM_REWARDS = (returns.at_last_token(REWARDS, MASK), RIGHT_VALUES, jnp.zeros((27,)), MASK)
WITH_WRONG_VALUES = (FROM_REWARDS[0], WRONG_VALUES, *FROM_REWARDS[2:])
ALONG = {
    "gae, lam 0": lambda: returns.gae_advantages(*FROM_REWARDS, lam=0.0)[0],
    "gae": lambda: returns.gae_advantages(*FROM_REWARDS, lam=0.7)[0],
    "gae, lam 1, any values": lambda: returns.gae_advantages(*WITH_WRONG_VALUES, lam=1.0)[0],
    "lambda returns": lambda: returns.lambda_returns(*FROM_REWARDS, lam=0.7) - RIGHT_VALUES,
    "lambda returns, lam 1": lambda: returns.lambda_returns(*WITH_WRONG_VALUES, lam=1.0) - WRONG_VALUES,
    "two-step returns": lambda: returns.n_step_returns(*FROM_REWARDS, steps=2),
    "reward to go": lambda: returns.discounted_returns(FROM_REWARDS[0], MASK),
}


@pytest.mark.parametrize("name", ALONG)
def test_advantages_along_a_sequence_follow_the_objective(name):
    got = expected_gradient(lambda logp: policy.reinforce_loss(logp, ALONG[name](), MASK).loss)
    close.assert_near(got, -objective_gradient(), terms=SUMS)


def test_wrong_values_bias_the_short_horizon():
    got = expected_gradient(
        lambda logp: policy.reinforce_loss(logp, returns.gae_advantages(*WITH_WRONG_VALUES, lam=0.0)[0], MASK).loss
    )
    assert np.abs(np.asarray(got + objective_gradient())).max() > 1e-2


def test_a_cut_sequence_with_the_right_bootstrap_loses_nothing():
    """All sequences are cut after two tokens: the gradient of the choices made so far is that of the whole episodes."""
    kept = MASK.at[:, 2].set(False)
    advantages, _ = returns.gae_advantages(jnp.zeros((27, 3)), RIGHT_VALUES, RIGHT_VALUES[:, 2], kept, lam=0.7)
    got = expected_gradient(lambda logp: policy.reinforce_loss(logp, advantages, kept).loss)
    want = -objective_gradient().at[4:].set(0.0)
    close.assert_near(got, want, terms=SUMS)


def test_distillation_on_the_students_samples():
    """From the samples alone the gradient is that of the whole distributions; forward KL is the teacher's."""
    got = expected_gradient(lambda logp: distill.sampled_reverse_kl_loss(logp, REF_LOGP, MASK).loss)
    close.assert_near(got, _token_kl_gradient("reverse"), terms=SUMS)
    for name, loss in (("reverse", distill.reverse_kl_loss), ("forward", distill.forward_kl_loss)):
        got = jax.grad(lambda x, f=loss: jnp.sum(_visits() * f(x[ROW], REFERENCE[ROW], MASK).loss))(LOGITS)
        close.assert_near(got, _token_kl_gradient(name), err_msg=name, terms=SUMS)


def _visits():
    return jax.lax.stop_gradient(probabilities(LOGITS))[:, None]


def _row_entropy(x):
    logp = jax.nn.log_softmax(x)
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def test_entropy_bonus_has_the_gradient_of_the_exact_entropy():
    """Exact entropies come from full logits; what samples estimate of them, ``-logp``, has the same mean."""

    def bonus(x):
        # the logits that a model returns: at index t-1 those that choose token t
        logits = jnp.concatenate([x[ROW], jnp.zeros((27, 1, 3))], axis=1)
        exact = logprobs.token_entropy(logits)
        mask = jnp.concatenate([jnp.zeros((27, 1), bool), MASK], axis=1)
        return jnp.sum(_visits() * entropy.entropy_bonus_terms(exact, mask))

    want = jax.grad(lambda x: -jnp.sum(_visits() * _row_entropy(x)[ROW]))(LOGITS)
    close.assert_near(jax.grad(bonus)(LOGITS), want, terms=SUMS)
    exact = float(jnp.sum(_visits() * _row_entropy(LOGITS)[ROW]))
    close.assert_near(jnp.sum(_visits() * entropy.sampled_entropy(OLD, MASK)), exact, terms=SUMS)


def test_entropy_in_the_reward_follows_the_entropy_of_the_sequence():
    """``-logp`` as a reward to go: the score-function gradient of the whole sequence's entropy."""
    surprise = entropy.sampled_entropy(OLD, MASK)
    to_go = jnp.cumsum(surprise[:, ::-1], axis=1)[:, ::-1]
    got = expected_gradient(lambda logp: policy.reinforce_loss(logp, to_go, MASK).loss)
    want = jax.grad(lambda x: jnp.sum(probabilities(x) * log_probs(x).sum(1)))(LOGITS)
    close.assert_near(got, want, terms=SUMS)


def test_sequence_weights_make_another_sampler_unbiased():
    """Samples of another policy, weighted by pi/mu of the whole sequence; token weights alone are not enough."""
    sampler = log_probs(LOGITS + 0.5 * jnp.asarray(np.random.default_rng(7).normal(size=(13, 3)), jnp.float32))
    drawn = jnp.exp(sampler.sum(1))[:, None]

    def gradient(level):
        weights = correction.mismatch_ratio(OLD, sampler, MASK, level=level)
        return jax.grad(
            lambda x: jnp.sum(drawn * weights * policy.reinforce_loss(log_probs(x), ADVANTAGES, MASK).loss)
        )(LOGITS)

    close.assert_near(gradient("sequence"), -objective_gradient(), terms=SUMS)
    assert np.abs(np.asarray(gradient("token") + objective_gradient())).max() > 1e-3
