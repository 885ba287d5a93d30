"""Variants of pairwise and judged losses: against float64 loops of one pair, and what their gradients do."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs, reduce
from jaxrl_llm.losses import distill, ranking
from jaxrl_llm.losses import preference as pref
from tests import close
from tests.reference import variants as ref

ALPHA = partial(pref.f_dpo_loss, slope=partial(pref.alpha_divergence_slope, alpha=0.5))
# function, settings, the loss of one pair from its log-ratios
PAIRS = {
    "exo": (pref.exo_loss, {"beta": 0.4, "label_smoothing": 0.05}, lambda w, y: ref.exo(w, y, 0.4, 0.05)),
    "nca": (pref.nca_loss, {"beta": 0.4}, lambda w, y: ref.nca(w, y, 0.4)),
    "discopop": (pref.discopop_loss, {"beta": 0.2, "tau": 0.3}, lambda w, y: ref.discopop(w, y, 0.2, 0.3)),
    "reverse": (
        partial(pref.f_dpo_loss, slope=pref.reverse_kl_slope),
        {"beta": 0.2},
        lambda w, y: ref.f_dpo(w, y, 0.2, "reverse"),
    ),
    "forward": (
        partial(pref.f_dpo_loss, slope=pref.forward_kl_slope),
        {"beta": 0.2},
        lambda w, y: ref.f_dpo(w, y, 0.2, "forward"),
    ),
    "js": (pref.f_dpo_loss, {"beta": 0.6}, lambda w, y: ref.f_dpo(w, y, 0.6, "jensen_shannon")),
    "alpha": (ALPHA, {"beta": 0.6}, lambda w, y: ref.f_dpo(w, y, 0.6, "alpha")),
    "dpop": (pref.dpop_loss, {"beta": 0.3, "penalty": 2.0}, lambda w, y: ref.dpop(w, y, 0.3, 2.0)),
    "cal_dpo": (pref.cal_dpo_loss, {"beta": 0.5, "weight": 0.5}, lambda w, y: ref.cal_dpo(w, y, 0.5, 0.5)),
}


def _case(seed=0, n=7):
    return [-0.2 - 3 * x for x in np.random.default_rng(seed).random((4, n))]


def _jax(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def _slopes(loss, *args):
    return jax.grad(lambda *a: loss(*a).loss.sum(), (0, 1))(*args)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_against_float64(name):
    function, settings, form = PAIRS[name]
    chosen, rejected, ref_chosen, ref_rejected = case = _case()
    want = [form(w, y) for w, y in zip(chosen - ref_chosen, rejected - ref_rejected, strict=True)]
    close.assert_near(function(*_jax(case), **settings).loss, want)
    for far in (-200.0, 200.0):
        value, gradient = jax.value_and_grad(lambda c, f=far: function(c + f, *_jax(case)[1:], **settings).loss.sum())(
            _jax(case)[0]
        )
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_exo_has_its_least_value_at_the_smoothed_label_and_dpo_has_none():
    """h* = log((1 - e) / e); below it the pair's margin is raised, above it lowered."""
    z, best = jnp.zeros(3), math.log(0.9 / 0.1)
    h = jnp.asarray([best - 1, best, best + 1], jnp.float32)
    loss = partial(pref.exo_loss, beta=1.0, label_smoothing=0.1)
    close.assert_near(loss(h, z, z, z).loss[1], 0.0)
    slope = np.asarray(_slopes(loss, h, z, z, z)[0])
    close.assert_near(slope[1], 0.0)
    assert slope[0] < -1e-2 and slope[2] > 1e-2


def test_nca_holds_the_chosen_response_where_dpo_lets_it_fall():
    """At zero ratios DPO pulls both alike; NCA pulls the chosen one up by 1/4 and the rejected one down by 1/4."""
    z = jnp.zeros(1)
    slopes = _slopes(partial(pref.nca_loss, beta=1.0), z, z, z, z)
    close.assert_near([s[0] for s in slopes], [-0.25, 0.25])
    # a rejected response far below the reference no longer trains anything
    low = _slopes(partial(pref.nca_loss, beta=1.0), z, z - 50.0, z, z)
    close.assert_relative(low[1], [0.5 * ref.sigmoid(-50.0)])


def test_bco_is_a_classifier_whose_slope_is_its_mistake():
    logp, good = jnp.asarray([1.0, -2.0, 0.5]), jnp.asarray([True, False, False])
    slope = jax.grad(lambda x: pref.bco_loss(x, jnp.zeros(3), good, jnp.float32(0.2), beta=0.5).loss.sum())(logp)
    chance = [ref.sigmoid(0.5 * x - 0.2) for x in (1.0, -2.0, 0.5)]
    close.assert_near(slope, [0.5 * (p - g) for p, g in zip(chance, (1, 0, 0), strict=True)])
    want = [-math.log(p if g else 1 - p) for p, g in zip(chance, (1, 0, 0), strict=True)]
    got = pref.bco_loss(logp, jnp.zeros(3), good, jnp.float32(0.2), beta=0.5).loss
    close.assert_near(got, want)


def test_unpaired_apo_adds_up_to_the_paired_one():
    w, y, rw, ry = _jax(_case())
    ones = jnp.ones(7, bool)
    apart = pref.apo_zero_unpaired_loss(w, rw, ones).loss + pref.apo_zero_unpaired_loss(y, ry, ~ones).loss
    close.assert_near(apart, pref.apo_zero_loss(w, y, rw, ry).loss)


@pytest.mark.parametrize("e", [0.0, 0.2])
def test_aot_against_float64(e):
    w, y, rw, ry = case = _case()
    paired = pref.aot_loss(*_jax(case), beta=0.5, label_smoothing=e).loss
    close.assert_relative(paired, ref.aot(w - y, rw - ry, 0.5, e))
    unpaired = pref.aot_unpaired_loss(*_jax(case), beta=0.5, label_smoothing=e).loss
    close.assert_relative(unpaired, ref.aot(w - rw, y - ry, 0.5, e))


def test_aot_looks_at_the_distribution_and_dpo_at_the_pairs():
    """Shuffling the reference's margins among the pairs changes DPO's loss and not AOT's; one pair is DPO."""
    w, y, rw, ry = _jax(_case())
    order = jnp.asarray([3, 0, 6, 1, 5, 2, 4])
    args = (w, y, rw[order], ry[order])
    close.assert_relative(pref.aot_loss(*args).loss, pref.aot_loss(w, y, rw, ry).loss)
    assert np.abs(pref.dpo_loss(*args).loss - pref.dpo_loss(w, y, rw, ry).loss).max() > 1e-3
    one = [x[:1] for x in (w, y, rw, ry)]
    for function in (pref.aot_loss, pref.aot_unpaired_loss):
        close.assert_relative(function(*one).loss, pref.dpo_loss(*one).loss)
    slopes = jax.grad(lambda a: pref.aot_unpaired_loss(w, a, rw, ry).loss.sum())(y)
    assert (np.asarray(slopes) > 0).all(), "each rejected response is pushed down, through the sort"


def test_discopop_between_logistic_and_exponential():
    h = jnp.asarray([-30.0, 30.0])
    z = jnp.zeros(2)
    got = pref.discopop_loss(h, z, z, z, beta=0.1, tau=0.05).loss
    close.assert_relative(got, [ref.logistic(-3.0), math.exp(-3.0)])


def test_length_normalisation_is_dpo_of_means():
    w, y, rw, ry = _jax(_case())
    a, b = jnp.arange(1.0, 8.0), jnp.arange(7.0, 0.0, -1.0)
    got = pref.length_normalised_dpo_loss(w, y, rw, ry, a, b, beta=2.0)
    close.assert_relative(got.loss, pref.dpo_loss(w / a, y / b, rw / a, ry / b, beta=2.0).loss)


def test_divergences_meet_dpo_at_the_reference():
    """f'' of all is 1 at t = 1 (1/2 for Jensen-Shannon): the same slope there, up to that factor."""
    z = jnp.full((1,), -2.0)
    slopes = [
        float(_slopes(partial(pref.f_dpo_loss, slope=s), z, z, z, z)[0][0])
        for s in (pref.reverse_kl_slope, pref.forward_kl_slope, pref.jensen_shannon_slope)
    ]
    close.assert_near(slopes, [-0.05, -0.05, -0.025])
    w, y, rw, ry = _jax(_case())
    same = pref.f_dpo_loss(w, y, rw, ry, slope=pref.reverse_kl_slope).loss
    close.assert_relative(same, pref.dpo_loss(w, y, rw, ry).loss)
    alpha = 0.999  # the limit is reached to first order in 1 - alpha
    near = pref.f_dpo_loss(w, y, rw, ry, slope=partial(pref.alpha_divergence_slope, alpha=alpha)).loss
    np.testing.assert_allclose(near, same, rtol=1 - alpha)


def test_wpo_weighs_without_a_gradient():
    w, y, rw, ry = _jax(_case())
    weights = jnp.linspace(0.1, 1.0, 7)
    plain = _slopes(pref.dpo_loss, w, y, rw, ry)[0]
    got = jax.grad(lambda x: pref.wpo_loss(x, y, rw, ry, weights).loss.sum())(w)
    close.assert_relative(got, weights * plain)
    # a uniform policy: every token has p = sum p^2, so a response of its own has weight 1
    logits = jnp.zeros((2, 4, 5))
    tokens = jnp.ones((2, 4), jnp.int32)
    logp, collision = logprobs.token_logprobs(logits, tokens), logprobs.token_collision(logits)
    mask = jnp.ones((2, 4), bool).at[:, 0].set(False)
    close.assert_relative(pref.wpo_weights(logp, collision, mask), 1.0)
    loop = [[0.0] + [sum(p * p for p in np.full(5, 0.2))] * 3] * 2
    close.assert_relative(collision, loop)


def test_length_desensitised_sums():
    rng = np.random.default_rng(0)
    logp, mask, shared = -rng.random((4, 6)), rng.random((4, 6)) < 0.7, np.asarray([0, 1, 3, 6])
    want = []
    for b in range(4):
        own = [logp[b, t] for t in range(6) if mask[b, t]]
        want.append(sum(own[: shared[b]]) + 0.3 * sum(own[shared[b] :]))
    args = jnp.asarray(logp, jnp.float32), jnp.asarray(mask), jnp.asarray(shared)
    close.assert_near(pref.length_desensitised_logp(*args, alpha=0.3), want)
    whole = pref.length_desensitised_logp(*args, alpha=1.0)
    close.assert_relative(whole, reduce.sequences(args[0], args[1]))


def test_alphapo_and_smoothing_against_float64():
    w, y = _case()[:2]
    got = pref.alphapo_loss(*_jax((w, y)), beta=1.5, gamma=0.3, alpha=0.5).loss
    close.assert_relative(got, [ref.alphapo(a, b, 1.5, 0.3, 0.5) for a, b in zip(w, y, strict=True)])
    alpha = 1e-3  # (1 - p^-alpha) / alpha = log p - alpha (log p)^2 / 2: the logit is off by beta times that of both
    near = pref.alphapo_loss(*_jax((w, y)), beta=2.0, gamma=1.0, alpha=alpha).loss
    apart = 2.0 * alpha * np.maximum(np.square(w), np.square(y)).max() / 2
    np.testing.assert_allclose(near, pref.simpo_loss(*_jax((w, y)), beta=2.0, gamma=1.0).loss, rtol=0, atol=apart)
    simpo = pref.simpo_loss(*_jax((w, y)), beta=2.0, gamma=1.0, label_smoothing=0.1).loss
    close.assert_relative(simpo, [ref.logistic(2 * (a - b) - 1, 0.1) for a, b in zip(w, y, strict=True)])
    cpo = pref.cpo_loss(*_jax((w, y)), beta=0.5, label_smoothing=0.1).loss
    want = [ref.logistic(0.5 * (a - b), 0.1) - a for a, b in zip(w, y, strict=True)]
    close.assert_relative(cpo, want)


def test_tpo_imitates_the_gold_response():
    w, y, gold = _jax(_case()[:3])
    got = pref.tpo_loss(w, y, gold, beta=0.3, gamma=0.2, likelihood_weight=0.7)
    want = [
        ref.logistic(0.3 * (a - b) - 0.2) - 0.7 * g
        for a, b, g in zip(*(np.asarray(x, np.float64) for x in (w, y, gold)), strict=True)
    ]
    close.assert_relative(got.loss, want)
    np.testing.assert_array_equal(jax.grad(lambda g: pref.tpo_loss(w, y, g).loss.sum())(gold), -1.0)


def test_xpo_lowers_what_the_reference_wrote():
    w, y, rw, ry = _jax(_case())
    slope = jax.grad(lambda x: pref.xpo_loss(w, y, rw, ry, x, alpha=0.2).loss.sum())(y)
    close.assert_relative(slope, np.full(slope.shape, 0.2))
    plain = pref.dpo_loss(w, y, rw, ry, beta=0.1).loss
    close.assert_relative(pref.xpo_loss(w, y, rw, ry, y, alpha=0.2).loss, plain + 0.2 * y)


def test_dpop_pulls_a_fallen_chosen_response_up_harder():
    z = jnp.zeros(1)
    loss = partial(pref.dpop_loss, beta=1.0, penalty=4.0)
    for chosen, factor in ((-1.0, 5.0), (1.0, 1.0)):
        chosen = jnp.full((1,), chosen)
        slopes = _slopes(loss, chosen, z, z, z)
        close.assert_relative(-slopes[0] / slopes[1], factor)
    np.testing.assert_array_equal(loss(z + 1, z, z, z).loss, pref.dpo_loss(z + 1, z, z, z, beta=1.0).loss)


def test_tdpo_with_the_sequential_kl_of_logits():
    """Both forms on enumerated next-token distributions; TDPO2 has no gradient through the chosen response's KL."""
    rng = np.random.default_rng(1)
    student, teacher = (jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float32) for _ in range(2))
    mask = jnp.asarray([[True, True, False], [True, True, True]])
    found = reduce.sequences(distill.forward_kl_loss(student, teacher, mask).loss, mask)
    p, q = (np.exp(np.asarray(x, np.float64)) for x in (student, teacher))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kls = [sum(sum(q[b, t] * np.log(q[b, t] / p[b, t])) for t in range(3) if mask[b, t]) for b in range(2)]
    close.assert_relative(found, kls)
    w, y, rw, ry = _jax(_case(n=2))
    ratios = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in ((w, rw), (y, ry))]
    for function, alpha in ((pref.tdpo1_loss, 1.0), (partial(pref.tdpo2_loss, alpha=0.4), 0.4)):
        got = function(w, y, rw, ry, found, 2 * found, beta=0.5).loss
        want = [ref.tdpo(*ratios_, 0.5, k, 2 * k, alpha) for *ratios_, k in zip(*ratios, kls, strict=True)]
        close.assert_relative(got, want)
    slopes = [
        jax.grad(lambda k, f=f: f(w, y, rw, ry, k, found).loss.sum())(found) for f in (pref.tdpo1_loss, pref.tdpo2_loss)
    ]
    assert (np.asarray(slopes[0]) < 0).all() and not np.asarray(slopes[1]).any()


def test_cal_dpo_stops_at_its_scale():
    """r_w = 1/(2 beta) = -r_l: only the logistic term is left, and calibration pulls back what lies beyond."""
    z = jnp.zeros(1)
    beyond = _slopes(partial(pref.cal_dpo_loss, beta=0.1), z + 8.0, z - 8.0, z, z)
    close.assert_near([s[0] for s in beyond], [6.0, -6.0])
    # DPO would push on
    assert float(_slopes(pref.dpo_loss, z + 8.0, z - 8.0, z, z)[0][0]) < 0


def test_sppo_against_the_formula_and_its_fixed_point():
    logp, old, chance = jnp.asarray([-1.0, -2.0]), jnp.asarray([-1.5, -1.0]), jnp.asarray([0.9, 0.2])
    terms = ranking.sppo_loss(logp, old, chance, eta=3.0)
    want = [(p - q - 3 * (c - 0.5)) ** 2 for p, q, c in ((-1.0, -1.5, 0.9), (-2.0, -1.0, 0.2))]
    close.assert_relative(terms.loss, want)
    there = old + 3.0 * (chance - 0.5)
    rounding = close.near(there, there, terms=3, magnitude=0.0)
    assert float(ranking.sppo_loss(there, old, chance, eta=3.0).loss.max()) <= rounding**2
    assert not np.asarray(jax.grad(lambda c: ranking.sppo_loss(logp, old, c, eta=3.0).loss.sum())(chance)).any()


def test_nash_md_descends_the_regularised_game_on_an_enumerated_policy():
    """sum_a pi(a) grad terms(a) is the gradient of ``-P(pi beats mu) + beta KL(pi || ref)``."""
    logits, reference = jnp.asarray([0.5, -0.2, 0.1]), jnp.asarray([-0.3, 0.4, 0.0])
    chance = jnp.asarray([0.8, 0.3, 0.6])
    pi, mask = jax.nn.softmax(logits), jnp.ones((3, 1), bool)
    ref_logp = jax.nn.log_softmax(reference)[:, None]

    def sampled(x):
        terms = ranking.nash_md_loss(jax.nn.log_softmax(x)[:, None], ref_logp, chance, mask, beta=0.3)
        return jnp.sum(pi * terms.loss[:, 0])

    def whole(x):
        p, log_p = jax.nn.softmax(x), jax.nn.log_softmax(x)
        return -jnp.sum(p * chance) + 0.3 * jnp.sum(p * (log_p - ref_logp[:, 0]))

    close.assert_near(jax.grad(sampled)(logits), jax.grad(whole)(logits))


def test_geometric_mixture_against_products():
    p, q = np.asarray([0.7, 0.2, 0.1]), np.asarray([0.1, 0.3, 0.6])
    product = p**0.75 * q**0.25
    got = jnp.exp(
        ranking.geometric_mixture(
            jnp.log(jnp.asarray(p, jnp.float32)) + 2.0, jnp.log(jnp.asarray(q, jnp.float32)), share=0.25
        )
    )
    close.assert_relative(got, product / product.sum())
    hard = jnp.asarray([0.0, -jnp.inf])
    np.testing.assert_array_equal(ranking.geometric_mixture(jnp.zeros(2), hard, share=1.0), [0.0, -jnp.inf])


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda z: pref.exo_loss(z, z, z, z, label_smoothing=0.0), "label_smoothing"),
        (lambda z: pref.aot_loss(z, z, z, z, label_smoothing=0.5), "label_smoothing"),
        (lambda z: pref.simpo_loss(z, z, label_smoothing=-0.1), "label_smoothing"),
        (lambda z: pref.discopop_loss(z, z, z, z, tau=1.0), "tau"),
        (lambda z: pref.dpop_loss(z, z, z, z, penalty=-1.0), "penalty"),
        (lambda z: pref.alphapo_loss(z, z, alpha=0.0), "alpha"),
        (lambda z: pref.alpha_divergence_slope(z, alpha=1.0), "alpha"),
        (lambda z: pref.length_desensitised_logp(z[None], z[None] > 0, z.astype(int), alpha=2.0), "alpha"),
        (lambda z: ranking.sppo_loss(z, z, z, eta=0.0), "eta"),
        (lambda z: ranking.geometric_mixture(z, z, share=1.5), "share"),
        (lambda z: pref.nca_loss(z, z, z, z, beta=0.0), "beta"),
    ],
)
def test_mistakes_are_named(call, name):
    with pytest.raises(ValueError, match=f"{name}="):
        call(jnp.zeros(1))
