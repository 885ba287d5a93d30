"""Variants of policy losses, their weights and masks: against float64 loops, and what their gradients do."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import off_policy as baselines
from jaxrl_llm.losses import correction, distill, entropy, off_policy, policy, sequence
from tests import close
from tests.close import doubles
from tests.reference import losses as loops
from tests.reference import variants as ref


def _case(seed=0, spread=0.4):
    rng = np.random.default_rng(seed)
    mask = rng.random((6, 5)) < 0.7
    mask[:, 0], mask[:, 1] = False, True
    old = -0.05 - 2 * rng.random((6, 5))
    logp = old + spread * rng.normal(size=(6, 5))
    advantages = np.repeat(rng.normal(size=(6, 1)), 5, axis=1)
    return logp, old, advantages, mask


def _jax(case):
    return [jnp.asarray(x, jnp.float32) for x in case[:3]] + [jnp.asarray(case[3])]


def _logs(case, b):
    logp, old, _, mask = case
    return [logp[b, t] - old[b, t] for t in range(5) if mask[b, t]]


def _slope(loss, case):
    logp, old, advantages, mask = _jax(case)
    return jax.grad(lambda x: loss(x, old, advantages, mask).loss.sum())(logp)


def test_ce_gppo_against_a_loop_and_ppo_where_nothing_is_kept():
    case = _case()
    logp, old, a, mask = case
    weights = {"low_weight": 0.3, "high_weight": 0.6}
    want = loops.each(
        mask, lambda b, t: ref.ce_gppo_slope(math.exp(logp[b, t] - old[b, t]), a[b, t], 0.2, 0.28, 0.3, 0.6)
    )
    loss = partial(policy.ce_gppo_loss, clip_high=0.28)
    close.assert_near(_slope(partial(loss, **weights), case), want)
    ppo = _slope(partial(policy.clipped_policy_loss, clip_high=0.28), case)
    close.assert_near(_slope(partial(loss, low_weight=0.0, high_weight=0.0), case), ppo)
    clipped = loss(*_jax(case)).aux["clipped"]
    np.testing.assert_array_equal(clipped, policy.clipped_policy_loss(*_jax(case), clip_high=0.28).aux["clipped"])
    assert 0 < float(clipped.sum()) < mask.sum()


def test_dcpo_against_a_loop_and_its_bounds_by_probability():
    case = _case(spread=1.0)
    logp, old, a, mask = case

    def one(b, t):
        return ref.clipped(math.exp(logp[b, t] - old[b, t]), a[b, t], *ref.dcpo_bounds(old[b, t], 0.16, 0.2, 10.0))

    close.assert_near(policy.dcpo_loss(*_jax(case)).loss, loops.each(mask, one))
    # at the bound the probability has moved by clip / ratio: |p - q| rho = clip
    for q in (0.9, 0.3, 0.05):
        low, high = ref.dcpo_bounds(math.log(q), 0.04, 0.2, 1e9)
        assert abs(q * high - q) * high == doubles(0.2)
        assert q < 0.16 or abs(q * low - q) * low == doubles(0.04)
    # a token that was unlikely may move much further than a likely one
    assert ref.dcpo_bounds(math.log(0.01), 0.16, 0.2, 10.0)[1] > 2 * ref.dcpo_bounds(math.log(0.9), 0.16, 0.2, 10.0)[1]
    # but no further than ``most``: of a thousandth the bound would be 14.65, and the ratio is 20.1
    rare, one = jnp.log(jnp.full((1, 1), 1e-3)), jnp.ones((1, 1))
    bounded = [policy.dcpo_loss(rare + 3.0, rare, one, one > 0, **more).loss.item() for more in ({}, {"most": 4.0})]
    assert bounded == [-10.0, -4.0]


@pytest.mark.parametrize("target", [0.05, 0.5, 1.0, 50.0])
def test_bapo_bounds_against_the_search_by_steps(target):
    rng = np.random.default_rng(3)
    ratio, a = np.exp(0.8 * rng.normal(size=(4, 6))), rng.normal(size=(4, 6)) - 0.3
    mask = rng.random((4, 6)) < 0.8
    tokens = [(ratio[i], a[i]) for i in zip(*np.nonzero(mask), strict=True)]
    want = ref.bapo_bounds(tokens, (0.6, 0.9), (1.2, 3.0), 0.05, target)
    got = policy.bapo_bounds(*(jnp.asarray(x, jnp.float32) for x in (ratio, a)), jnp.asarray(mask), target=target)
    close.assert_relative([float(x) for x in got], want)


def test_bapo_is_the_clipped_surrogate_between_its_bounds():
    case = _case(1, spread=0.8)
    logp, old, a, mask = case
    terms = policy.bapo_loss(*_jax(case), target=2.0)
    low, high = float(terms.aux["low"].max()), float(terms.aux["high"].max())
    assert 0.6 < low <= 0.9 or 1.2 < high <= 3.0
    want = loops.each(mask, lambda b, t: ref.clipped(math.exp(logp[b, t] - old[b, t]), a[b, t], low, high))
    close.assert_near(terms.loss, want)
    slope = _slope(partial(policy.bapo_loss, target=2.0), case)
    assert not np.asarray(slope)[np.asarray(terms.aux["clipped"]) > 0].any()
    kept = np.asarray(mask) & (np.asarray(terms.aux["clipped"]) == 0)
    assert (np.asarray(slope)[kept] != 0).all()


def test_vespo_against_a_loop_and_at_the_ends():
    case = _case()
    logp, _, a, mask = case

    def one(b, t):
        return -ref.vespo_weight(_logs(case, b), a[b, t], (2.0, 3.0), (3.0, 2.0)) * a[b, t] * logp[b, t]

    close.assert_near(sequence.vespo_loss(*_jax(case)).loss, loops.each(mask, one))
    logp, old, a, mask = _jax(case)
    # on-policy it is REINFORCE; far off on either side, nothing
    slope = jax.grad(lambda x: sequence.vespo_loss(x, old, a, mask).loss.sum())
    close.assert_near(slope(old), jnp.where(mask, -a, 0.0))
    for far in (5.0, -10.0):  # next to nothing: w^k e^(rate (1 - w)), by either sign
        most = max(ref.vespo_weight([far], a, (2.0, 3.0), (3.0, 2.0)) for a in (1.0, -1.0))
        assert float(jnp.abs(slope(old + far)).max()) <= 2 * most * float(jnp.abs(a).max())


@pytest.mark.parametrize("cap", [1.0, 0.5])
def test_topr_against_a_loop(cap):
    case = _case()
    logp, _, a, mask = case
    want = loops.each(mask, lambda b, t: -ref.topr_weight(_logs(case, b), a[b, t], cap) * a[b, t] * logp[b, t])
    close.assert_near(off_policy.topr_loss(*_jax(case), cap=cap).loss, want)
    logp, old, a, mask = _jax(case)
    slope = jax.grad(lambda x: off_policy.topr_loss(x, old, a, mask).loss.sum())(old - 10.0)
    close.assert_near(slope, jnp.where(mask & (a > 0), -a, 0.0))


def test_gvpo_against_a_loop_and_its_zero_sum_weights():
    rng = np.random.default_rng(5)
    logp, old, _, mask = case = _case()
    rewards, ids = rng.random(6), np.asarray([0, 0, 0, 1, 1, 1])
    args = jnp.asarray(rewards, jnp.float32), jnp.asarray(ids), jnp.asarray(mask)
    terms = off_policy.gvpo_loss(*_jax(case)[:2], *args, beta=0.4)
    got = reduce.tokens(terms.loss, args[2], mode="seq_mean") * 6 / 3  # the mean over sequences, of two groups
    sums = np.asarray([sum(_logs(case, b)) for b in range(6)])
    want = sum(ref.gvpo(list(sums[ids == g]), list(rewards[ids == g]), 0.4) for g in (0, 1))
    close.assert_relative(got, want)

    def whole(x):
        loss = off_policy.gvpo_loss(x, _jax(case)[1], *args, beta=0.4).loss
        return reduce.tokens(loss, args[2], mode="seq_mean")

    slope = np.asarray(jax.grad(whole)(_jax(case)[0]))
    each = [slope[b][mask[b]][0] for b in range(6)]  # of a sequence's log-probability, the same at all its tokens
    close.assert_near([sum(each[:3]), sum(each[3:])], 0.0)
    assert np.abs(each).max() > 1e-2


def test_gvpo_and_a_star_po_are_zero_at_the_optimum_of_the_regularised_reward():
    """pi* = ref exp(r / beta) / Z on an enumerated choice of four: the target of both, without a gradient left."""
    rewards, beta = jnp.asarray([1.0, 0.0, 0.5, 0.2]), 0.5
    ref_logp = jax.nn.log_softmax(jnp.asarray([0.3, -0.2, 0.0, 0.8]))[:, None]
    best = jax.nn.log_softmax(ref_logp[:, 0] + rewards / beta)[:, None]
    mask, ids = jnp.ones((4, 1), bool), jnp.zeros(4, jnp.int32)
    terms = off_policy.gvpo_loss(best, ref_logp, rewards, ids, mask, beta=beta)
    close.assert_near(jnp.sqrt(jnp.abs(terms.loss)), 0.0)  # a square
    value = beta * jax.nn.logsumexp(ref_logp[:, 0] + rewards / beta)  # V* exactly, by enumeration
    terms = off_policy.a_star_po_loss(best, ref_logp, rewards, jnp.full(4, value), mask, beta=beta)
    close.assert_near(jnp.sqrt(jnp.abs(terms.loss)), 0.0)
    away = off_policy.a_star_po_loss(ref_logp, ref_logp, rewards, jnp.full(4, value), mask, beta=beta)
    close.assert_relative(away.loss[:, 0], (rewards - value) ** 2)
    # by samples of the reference instead: the estimate that the docstring names
    estimate = baselines.log_mean_exp_baseline(rewards, ids, tau=beta)
    close.assert_relative(estimate, beta * np.log(np.mean(np.exp(np.asarray(rewards) / beta))))


def test_rejection_masks_against_loops():
    old, sampler, _, mask = case = _case(2, spread=0.6)
    distances = {"k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    functions = {"k2": correction.k2_distance, "k3": correction.k3_distance}
    for name, distance in distances.items():
        far = [[distance(x) for x in _logs(case, b)] for b in range(6)]
        over = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": max}
        for how, pick in over.items():
            most = float(np.median([pick(x) for x in far])) * 1.01
            args = (jnp.asarray(x, jnp.float32) for x in (old, sampler))
            got = correction.rejection_mask(*args, jnp.asarray(mask), most=most, distance=functions[name], over=how)
            want = loops.each(mask, lambda b, t, f=far, p=pick, m=most: float(p(f[b]) <= m))
            np.testing.assert_array_equal(np.asarray(got, float), want)
            assert 0 < np.asarray(got).sum() < mask.sum()


def test_the_k3_distance_of_small_ratios():
    near = jnp.array([[1e-3, 1e-4, -1e-4, 0.0]], jnp.float32)
    want = np.array([[5.0016671e-7, 5.0001667e-9, 4.9998333e-9, 0.0]])
    close.assert_near(1e8 * correction.k3_distance(near)[:, 1:], 1e8 * want[:, 1:], magnitude=1e8 * 1e-4)
    close.assert_near(1e6 * correction.k3_distance(near)[:, :1], 1e6 * want[:, :1], magnitude=1e6 * 1e-3)
    drawn = jnp.asarray(1e-4 * np.random.default_rng(0).normal(size=(1, 4000)), jnp.float32)
    assert (np.asarray(correction.k3_distance(drawn)) >= 0).all()


def test_normalised_weights():
    _, _, _, mask = _case()
    rng = np.random.default_rng(0)
    weights = np.repeat(rng.random((6, 1)), 5, axis=1)
    ids = jnp.asarray([0, 0, 0, 1, 1, 1])
    found = correction.self_normalised_weights(jnp.asarray(weights, jnp.float32), ids, jnp.asarray(mask))
    for rows in (range(3), range(3, 6)):
        total = sum(weights[b, 0] for b in rows)
        want = loops.each(mask, lambda b, t, s=total: 3 * weights[b, 0] / s)
        close.assert_relative(np.asarray(found)[list(rows)], want[list(rows)])
    batch = correction.batch_normalised_weights(jnp.asarray(weights, jnp.float32), jnp.asarray(mask))
    close.assert_relative(np.asarray(batch)[mask].mean(), 1.0)
    nothing = correction.batch_normalised_weights(jnp.zeros((6, 5)), jnp.asarray(mask))
    assert not np.asarray(nothing).any()


def test_self_normalised_weights_estimate_the_right_mean_where_truncated_ones_do_not():
    """An enumerated choice, drawn by another policy: the mean reward under pi, many samples."""
    rng = np.random.default_rng(0)
    mu, pi, reward = np.asarray([0.7, 0.2, 0.1]), np.asarray([0.2, 0.3, 0.5]), np.asarray([0.0, 0.5, 1.0])
    drawn = rng.choice(3, 20_000, p=mu)
    ratio = jnp.asarray((pi / mu)[drawn][:, None], jnp.float32)
    mask, ids = jnp.ones((20_000, 1), bool), jnp.zeros(20_000, jnp.int32)
    own = correction.self_normalised_weights(ratio, ids, mask)[:, 0]
    mean = pi @ reward
    deviation = np.sqrt((mu * (pi / mu * (reward - mean)) ** 2).sum())  # of the ratio of two sums, to first order
    close.assert_mean(jnp.sum(own * reward[drawn]) / 20_000, mean, deviation, 20_000)
    cut = correction.truncated_weights(ratio, mask)[:, 0]
    assert abs(float(jnp.sum(cut * reward[drawn]) / 20_000) - float(pi @ reward)) > 0.1


SWING = 0.1  # of an entropy of 0.3, whose coefficient moves by steps of a size


def test_the_entropy_controller_holds_a_floor():
    """A bonus raises the entropy by its coefficient, training lowers it: it ends near the target, from either side."""
    for entropy_now in (0.05, 0.6):
        coefficient, now, seen = jnp.float32(0.0), entropy_now, []
        for _ in range(400):
            now += 0.2 * float(entropy.applied_entropy_coefficient(coefficient, jnp.float32(now), target=0.3)) - 0.004
            coefficient = entropy.adapted_entropy_coefficient(coefficient, jnp.float32(now), target=0.3, step=0.005)
            seen.append(now)
        assert abs(np.mean(seen[200:]) - 0.3) < SWING and min(seen[200:]) > 0.3 - 2 * SWING


def test_at_its_target_an_entropy_has_its_bonus_which_grows():
    at = jnp.float32(0.25)
    assert float(entropy.adapted_entropy_coefficient(jnp.float32(0.5), at, target=0.25, step=0.125)) == 0.625
    assert float(entropy.applied_entropy_coefficient(jnp.float32(0.5), at, target=0.25)) == 0.5


def test_opd_weights_against_a_loop():
    logp, old, teacher, mask = _case()
    args = [jnp.asarray(x, jnp.float32) for x in (logp, teacher - 3.0, old)] + [jnp.asarray(mask)]
    terms = distill.iw_opd_loss(*args, gamma=0.8)
    for b in range(6):
        where = np.flatnonzero(mask[b])
        gaps = [teacher[b, t] - 3.0 - old[b, t] for t in where]
        close.assert_relative(terms.aux["weight"][b][where], ref.opd_weights(gaps, 0.8))
        want = [-w * g * logp[b, t] for w, g, t in zip(ref.opd_weights(gaps, 0.8), gaps, where, strict=True)]
        close.assert_near(terms.loss[b][where], want)
    # without the position's weight and on-policy it is the sampled reverse KL
    plain = distill.iw_opd_loss(args[0], args[1], args[0], args[3], gamma=0.0).loss
    close.assert_near(plain, distill.sampled_reverse_kl_loss(*args[:2], args[3]).loss)


@pytest.mark.parametrize(("gamma", "normalised"), [(1.0, True), (0.9, True), (0.9, False)])
def test_minillm_against_a_loop(gamma, normalised):
    logp, old, teacher, mask = _case()
    args = [jnp.asarray(x, jnp.float32) for x in (logp, teacher - 3.0, old)] + [jnp.asarray(mask)]
    terms = distill.minillm_loss(*args, gamma=gamma, length_normalised=normalised)
    for b in range(6):
        where = np.flatnonzero(mask[b])
        gaps = [teacher[b, t] - 3.0 - old[b, t] for t in where]
        want = np.array(ref.minillm_advantages(gaps, gamma, normalised))
        close.assert_relative(terms.aux["advantage"][b][where], want)
        ratio = np.exp(logp[b][where] - old[b][where])
        loss = -np.minimum(ratio * want, np.clip(ratio, 0.8, 1.2) * want)
        close.assert_near(terms.loss[b][where], loss, magnitude=10.0)
    # of each token alone, on-policy: the gradient of the sampled reverse KL
    on = args[0], args[1], args[0], args[3]
    slopes = [jax.grad(lambda x, f=f: jnp.sum(f(x)))(args[0]) for f in (
        lambda x: distill.minillm_loss(x, *on[1:], gamma=0.0).loss,
        lambda x: distill.sampled_reverse_kl_loss(x, args[1], args[3]).loss,
    )]  # fmt: skip
    close.assert_near(*slopes, magnitude=10.0)
    with pytest.raises(ValueError, match="gamma=1.5"):
        distill.minillm_loss(*args, gamma=1.5)


def test_luspo_is_gspo_summed_over_the_tokens_of_a_response():
    """Each surrogate by the length of its response, and their mean."""
    logp, old, advantages, mask = _case()
    spread = np.broadcast_to(advantages[:, :1], mask.shape)
    args = [jnp.asarray(x, jnp.float32) for x in (logp, old, spread)] + [jnp.asarray(mask)]
    found = reduce.tokens(sequence.gspo_loss(*args, clip_low=0.2, clip_high=0.2).loss, args[3], mode="seq_sum")
    want = []
    for b in range(6):
        where = np.flatnonzero(mask[b])
        ratio = np.exp(np.mean(logp[b][where] - old[b][where]))
        bounded = np.clip(ratio, 0.8, 1.2)
        want.append(-min(ratio * spread[b, 0], bounded * spread[b, 0]) * len(where))
    close.assert_relative(found, np.mean(want))


def test_top_k_is_the_whole_divergence_at_full_support_and_with_its_tail_between():
    rng = np.random.default_rng(0)
    student, teacher = (jnp.asarray(rng.normal(size=(2, 3, 6)), jnp.float32) for _ in range(2))
    mask = jnp.ones((2, 3), bool).at[0, 2].set(False)
    whole = distill.reverse_kl_loss(student, teacher, mask).loss
    for tail in (False, True):
        got = distill.top_k_distillation_loss(student, teacher, mask, k=6, tail=tail).loss
        close.assert_near(got, whole)
    coarse = distill.top_k_distillation_loss(student, teacher, mask, k=2, tail=True).loss
    assert (np.asarray(coarse) <= np.asarray(whole) + 1e-6).all(), "merging outcomes never adds divergence"
    zeros = jnp.zeros((2, 3))
    for loss in (distill.sdpo_loss, partial(distill.sdft_loss, k=3)):
        slope = jax.grad(lambda s, f=loss: f(s, student + 1.0, zeros, zeros, mask).loss.sum())(student)
        close.assert_near(slope, 0.0)  # a teacher that agrees
        taught = jax.grad(lambda t, f=loss: f(student, t, zeros, zeros, mask).loss.sum())(teacher)
        assert not np.asarray(taught).any()
        old = loss(student, teacher, zeros, zeros - 9.0, mask).loss
        close.assert_relative(old, 2.0 * loss(student, teacher, zeros, zeros, mask).loss)


def test_pieces_of_two_tokenizers():
    """A text of three letters, by letters and as one word: the merged chances of both are those of the same pieces."""
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(1, 4, 5)), np.asarray([[2, 0, 3, 1]])
    spans = np.asarray([[[0, 1], [1, 4], [4, 4]]])
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logp = np.take_along_axis(logs, tokens[..., None], -1)[..., 0]
    got = distill.merged_log_probs(*(jnp.asarray(x, jnp.float32) for x in (logits, logp)), jnp.asarray(spans))
    close.assert_relative(got[0, 0], logs[0, 0])
    close.assert_relative(got[0, 1], [logp[0, 1] + logp[0, 2] + x for x in logs[0, 3]])
    assert np.isneginf(np.asarray(got[0, 2])).all()
    # the chance of what was written is that of the whole piece
    close.assert_relative(got[0, 1, 1], logp[0, 1:].sum())


def test_universal_distillation_against_a_loop_and_at_equality():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(4), (2, 3)), rng.dirichlet(np.ones(6), (2, 3))
    mask = np.asarray([[True, True, False], [True, True, True]])
    student, teacher = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (p, q))

    def one(b, t):
        left, right = sorted([*p[b, t], 0.0, 0.0], reverse=True), sorted(q[b, t], reverse=True)
        return sum(abs(x - y) for x, y in zip(left, right, strict=True))

    close.assert_relative(distill.uld_loss(student, teacher, jnp.asarray(mask)).loss, loops.each(mask, one))
    same = distill.gold_loss(student, student, jnp.asarray(mask), jnp.arange(2), jnp.arange(2))
    close.assert_near(same.loss, 0.0)
    slope = jax.grad(
        lambda s: distill.gold_loss(
            s, student, jnp.asarray(mask), jnp.arange(4), jnp.arange(4), matched_weight=1.0, unmatched_weight=0.0
        ).loss.sum()
    )(student + 0.3)
    assert (np.asarray(slope)[mask] != 0).all() and not np.asarray(slope)[~mask].any()


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x, m: policy.ce_gppo_loss(x, x, x, m, low_weight=-1.0), "low_weight"),
        (lambda x, m: policy.dcpo_loss(x, x, x, m, most=1.0), "most"),
        (lambda x, m: policy.bapo_loss(x, x, x, m, low=(0.9, 0.6)), "low"),
        (lambda x, m: policy.bapo_loss(x, x, x, m, step=0.0), "step"),
        (lambda x, m: sequence.vespo_loss(x, x, x, m, decay=(0.0, 1.0)), "decay"),
        (lambda x, m: off_policy.topr_loss(x, x, x, m, cap=0.0), "cap"),
        (lambda x, m: correction.rejection_mask(x, x, m, most=1.0, over="median"), "over"),
        (lambda x, m: correction.rejection_mask(x, x, m, most=-1.0), "most"),
        (lambda x, m: correction.batch_normalised_weights(x, m, level="row"), "level"),
        (lambda x, m: distill.iw_opd_loss(x, x, x, m, gamma=-1.0), "gamma"),
        (lambda x, m: distill.sampled_self_distillation_loss(x, x, x, m, cap=0.0), "cap"),
        (lambda x, m: distill.top_k_distillation_loss(x[..., None], x[..., None], m, k=2), "k"),
        (lambda x, m: entropy.adapted_entropy_coefficient(x[0, 0], x[0, 0], target=0.1, step=0.0), "step"),
    ],
)
def test_mistakes_are_named(call, name):
    with pytest.raises(ValueError, match=f"{name}="):
        call(jnp.zeros((1, 2)), jnp.ones((1, 2), bool))
