"""A policy of 3 tokens x 3 steps, 27 sequences: the exact expected gradient of each estimator is what it claims."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.losses import correction, entropy, kl, off_policy, policy, sequence

SEQUENCES = np.array(list(itertools.product(range(3), repeat=3)), np.int32)
MASK = jnp.ones((27, 3), bool)
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
    np.testing.assert_allclose(got, -objective_gradient(), atol=2e-6)


def _sequence_kl(x, y):
    return jnp.sum(probabilities(x) * (log_probs(x) - log_probs(y)).sum(1))


REF_LOGP = log_probs(REFERENCE)


def test_kl_values():
    exact = float(_sequence_kl(LOGITS, REFERENCE))
    weights = probabilities(LOGITS)[:, None]
    for estimator in (kl.k1, kl.k3):
        assert float(jnp.sum(weights * estimator(OLD, REF_LOGP, MASK))) == pytest.approx(exact, abs=1e-5)
    assert float(jnp.min(kl.k3(OLD, REF_LOGP, MASK))) >= 0 and float(jnp.min(kl.absolute(OLD, REF_LOGP, MASK))) >= 0
    assert float(jnp.sum(weights * kl.k2(OLD, REF_LOGP, MASK))) != pytest.approx(exact, abs=1e-3)


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
    np.testing.assert_allclose(got, _token_kl_gradient("reverse"), atol=2e-6)
    got = expected_gradient(lambda logp: kl.k3_gradient_terms(logp, REF_LOGP, MASK))
    np.testing.assert_allclose(got, _token_kl_gradient("forward"), atol=2e-6)


def test_weighted_gradient_terms_are_right_off_policy():
    behaviour = jnp.asarray(np.random.default_rng(5).normal(size=(13, 3)), jnp.float32) * 0.3 + LOGITS
    old = log_probs(behaviour)
    prefix = jnp.cumsum(jnp.concatenate([jnp.zeros((27, 1)), (OLD - old)[:, :-1]], axis=1), axis=1)
    # sampled from the behaviour policy; prefixes are reweighted so that only the token's own ratio is tested
    weights = jnp.exp(old.sum(1))[:, None] * jnp.exp(prefix)
    got = jax.grad(lambda x: jnp.sum(weights * kl.weighted_kl_gradient_terms(log_probs(x), old, REF_LOGP, MASK)))(
        LOGITS
    )
    np.testing.assert_allclose(got, _token_kl_gradient("reverse"), atol=3e-6)


def test_k1_in_the_reward_follows_the_sequence_kl():
    penal = kl.kl_in_reward(jnp.zeros((27, 3)), OLD, REF_LOGP, MASK, coefficient=1.0)
    to_go = jnp.cumsum(penal[:, ::-1], axis=1)[:, ::-1]
    got = expected_gradient(lambda logp: policy.reinforce_loss(logp, to_go, MASK).loss)
    want = jax.grad(_sequence_kl)(LOGITS, REFERENCE)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_leave_one_out_baseline_is_unbiased():
    """All 27 x 27 pairs of samples: each is judged against the other one's reward."""
    p = probabilities(LOGITS)
    pairs = jax.lax.stop_gradient(p[:, None] * p[None, :])
    # seen from sample i: sum_j p_i p_j (r_i - r_j); the pair's second sample gives the same by symmetry
    advantages = jnp.sum(pairs * (REWARDS[:, None] - REWARDS[None, :]), axis=1)[:, None] * jnp.ones((27, 3))
    got = jax.grad(lambda x: policy.reinforce_loss(log_probs(x), advantages, MASK).loss.sum())(LOGITS)
    np.testing.assert_allclose(got, -objective_gradient(), atol=2e-6)


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
    np.testing.assert_allclose(jax.grad(bonus)(LOGITS), want, atol=2e-6)
    exact = float(jnp.sum(_visits() * _row_entropy(LOGITS)[ROW]))
    assert float(jnp.sum(_visits() * entropy.sampled_entropy(OLD, MASK))) == pytest.approx(exact, abs=1e-5)


def test_entropy_in_the_reward_follows_the_entropy_of_the_sequence():
    """``-logp`` as a reward to go: the score-function gradient of the whole sequence's entropy."""
    surprise = entropy.sampled_entropy(OLD, MASK)
    to_go = jnp.cumsum(surprise[:, ::-1], axis=1)[:, ::-1]
    got = expected_gradient(lambda logp: policy.reinforce_loss(logp, to_go, MASK).loss)
    want = jax.grad(lambda x: jnp.sum(probabilities(x) * log_probs(x).sum(1)))(LOGITS)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_sequence_weights_make_another_sampler_unbiased():
    """Samples of another policy, weighted by pi/mu of the whole sequence; token weights alone are not enough."""
    sampler = log_probs(LOGITS + 0.5 * jnp.asarray(np.random.default_rng(7).normal(size=(13, 3)), jnp.float32))
    drawn = jnp.exp(sampler.sum(1))[:, None]

    def gradient(level):
        weights = correction.mismatch_ratio(OLD, sampler, MASK, level=level)
        return jax.grad(
            lambda x: jnp.sum(drawn * weights * policy.reinforce_loss(log_probs(x), ADVANTAGES, MASK).loss)
        )(LOGITS)

    np.testing.assert_allclose(gradient("sequence"), -objective_gradient(), atol=3e-6)
    assert np.abs(np.asarray(gradient("token") + objective_gradient())).max() > 1e-3
