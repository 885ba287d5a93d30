"""Worked examples and independent float64 loops for the policy losses."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import losses
from jaxrl_llm.losses import policy, sequence
from tests import close


def _case(seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((6, 7)) < 0.7
    old = -rng.random((6, 7)) * 2
    return old + 0.4 * rng.normal(size=(6, 7)), old, rng.normal(size=(6, 1)).repeat(7, 1), mask


def _loop(function):
    """Applies ``function(rho, A, logp) -> loss`` to each masked token in float64."""
    logp, old, advantages, mask = _case()
    out = np.zeros(mask.shape)
    for b, t in zip(*np.nonzero(mask), strict=True):
        out[b, t] = function(math.exp(logp[b, t] - old[b, t]), advantages[b, t], logp[b, t])
    return out


def _ppo(low, high, dual=None):
    def loss(rho, a, _):
        value = min(rho * a, min(max(rho, 1 - low), 1 + high) * a)
        if dual is not None and a < 0:
            value = max(value, dual * a)
        return -value

    return loss


LOOPS = [
    (policy.clipped_policy_loss, {}, _ppo(0.2, 0.2)),
    (policy.clipped_policy_loss, {"clip_low": 0.1, "clip_high": 0.3}, _ppo(0.1, 0.3)),
    (policy.clipped_policy_loss, {"dual_clip": 1.1}, _ppo(0.2, 0.2, 1.1)),
    (policy.cispo_loss, {"clip_high": 0.3}, lambda rho, a, logp: -min(max(rho, 0), 1.3) * a * logp),
    (
        policy.cispo_loss,
        {"clip_low": 0.2, "clip_high": 0.3},
        lambda rho, a, logp: -min(max(rho, 0.8), 1.3) * a * logp,
    ),
    (
        policy.sapo_loss,
        {"tau_positive": 1.0, "tau_negative": 1.5},
        lambda rho, a, _: -4 / (1.0 if a > 0 else 1.5) / (1 + math.exp(-(1.0 if a > 0 else 1.5) * (rho - 1))) * a,
    ),
]


def _arrays():
    return [jnp.asarray(x, jnp.float32) for x in _case()[:3]] + [jnp.asarray(_case()[3])]


@pytest.mark.parametrize("loss, options, loop", LOOPS)
def test_token_losses_against_float64(loss, options, loop):
    close.assert_near(loss(*_arrays(), **options).loss, _loop(loop))


def _sequence_loop(kind, **options):
    logp, old, advantages, mask = _case()
    out = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        where, a = np.nonzero(mask[b])[0], advantages[b, 0]
        d = (logp - old)[b, where]
        if kind == "gmpo":
            clip, sign = options["clip"], np.sign(a)
            d = sign * np.minimum(sign * d, sign * np.clip(d, -clip, clip))
            out[b, where] = -math.exp(d.mean()) * a
        else:
            out[b, where] = _ppo(options["clip_low"], options["clip_high"])(math.exp(d.mean()), a, 0)
    return out


@pytest.mark.parametrize("loss", [sequence.gspo_loss, sequence.gspo_token_loss])
def test_gspo_against_float64(loss):
    options = {"clip_low": 0.05, "clip_high": 0.08}
    close.assert_near(loss(*_arrays(), **options).loss, _sequence_loop("gspo", **options))


def test_gmpo_against_float64():
    close.assert_near(
        sequence.gmpo_loss(*_arrays(), clip_low=0.2, clip_high=0.2).loss, _sequence_loop("gmpo", clip=0.2)
    )


def test_sequence_ratio_is_a_product_not_a_sum():
    """Trap 39: two tokens with ratios 2 and 1/2 have geometric mean 1, not 1.25."""
    logp, old = jnp.log(jnp.array([[0.4, 0.2]])), jnp.log(jnp.array([[0.2, 0.4]]))
    ones = jnp.ones((1, 2))
    close.assert_near(sequence.gspo_loss(logp, old, ones, ones > 0).aux["ratio"], 1.0)
    total = sequence.sequence_log_ratio(jnp.log(jnp.array([[0.4, 0.4]])), old, ones > 0)
    close.assert_near(jnp.exp(total), 2.0)


def test_clip_fraction_counts_only_where_clipping_acted():
    """Trap 38: outside the bound on the harmless side the gradient stays, so it is not clipped."""
    ratio = jnp.array([[1.5, 1.5, 0.5, 0.5]])
    advantages = jnp.array([[1.0, -1.0, 1.0, -1.0]])
    terms = policy.clipped_policy_loss(jnp.log(ratio), jnp.zeros((1, 4)), advantages, jnp.ones((1, 4), bool))
    assert terms.aux["clipped"].tolist() == [[1.0, 0.0, 0.0, 1.0]]
    # a weight is bounded whatever the sign
    weighed = policy.cispo_loss(
        jnp.log(ratio), jnp.zeros((1, 4)), advantages, jnp.ones((1, 4), bool), clip_low=0.4, clip_high=0.6
    )
    assert weighed.aux["clipped"].tolist() == [[0.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda *a: policy.clipped_policy_loss(*a, clip_low=1.0), "clip_low"),
        (lambda *a: policy.clipped_policy_loss(*a, clip_high=-0.1), "clip_high"),
        (lambda *a: policy.clipped_policy_loss(*a, dual_clip=0.5), "dual_clip"),
        (lambda *a: sequence.gmpo_loss(*a, clip_low=0.0), "clip_low"),
        (lambda *a: policy.sapo_loss(*a, tau_negative=0.0), "tau_negative"),
    ],
)
def test_mistakes_are_named(call, name):
    with pytest.raises(ValueError, match=f"{name}="):
        call(*_arrays())


AT_A_BOUND = {
    "ppo, low": partial(losses.clipped_policy_loss, clip_low=0.0),
    "ppo, high": partial(losses.clipped_policy_loss, clip_high=0.0),
    "ppo, both": partial(losses.clipped_policy_loss, clip_low=0.0, clip_high=0.0),
    "ppo, dual": partial(losses.clipped_policy_loss, clip_low=0.0, dual_clip=3.0),
    "gspo": partial(losses.gspo_loss, clip_low=0.0, clip_high=0.0),
    "gspo, token": partial(losses.gspo_token_loss, clip_low=0.0, clip_high=0.0),
    "loop": partial(losses.loop_loss, eps=0.0),
    "dcpo": partial(losses.dcpo_loss, clip_low=0.0, clip_high=0.0),
    "bapo": partial(losses.bapo_loss, low=(1.0, 1.0), high=(1.0, 1.0)),
}


CUT_ONE_SIDE = {"ppo, low": (-2.0,), "ppo, high": (2.0,), "ppo, dual": (-2.0,)}  # advantages whose tokens are cut


@pytest.mark.parametrize("name", AT_A_BOUND)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_ratio_on_its_bound_has_the_whole_gradient(name, advantage):
    """Where the weights are those that sampled every ratio is 1: also a bound of exactly 1 cuts nothing there."""
    old, mask = jnp.array([[-0.5], [-1.0]]), jnp.ones((2, 1), bool)
    given = jnp.full((2, 1), advantage)
    slope = jax.grad(lambda x: jnp.sum(AT_A_BOUND[name](x, old, given, mask).loss))(old)
    assert slope.tolist() == [[-advantage], [-advantage]]
    terms = AT_A_BOUND[name](old, old, given, mask)
    assert terms.loss.tolist() == [[-advantage], [-advantage]] and not terms.aux["clipped"].any()
    if advantage in CUT_ONE_SIDE.get(name, (advantage,)):
        beyond = old + 0.1 * jnp.sign(given)
        assert not jax.grad(lambda x: jnp.sum(AT_A_BOUND[name](x, old, given, mask).loss))(beyond).any()
