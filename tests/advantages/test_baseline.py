"""Optimal token baselines, pass@k by best minus second, length-adaptive GAE, smoothed advantages: loops and facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import baseline, group, returns
from tests import close
from tests.reference import variants as ref

IDS = jnp.asarray([0, 0, 0, 1, 1, 1])
GROUPS = ([0, 1, 2], [3, 4, 5])


def _case(seed=0, holes=True):
    rng = np.random.default_rng(seed)
    mask = rng.random((6, 5)) < 0.7 if holes else np.arange(5)[None, :] < np.asarray([5, 5, 4, 3, 3, 2])[:, None]
    mask[:, 0] = True
    p = rng.uniform(0.1, 0.9, (6, 5))
    collision = p**2 + rng.random((6, 5)) * (1 - p) ** 2  # of the token itself, and of what the others may have
    return rng.normal(size=(6, 5)), p, collision, mask


def _jax(case):
    rewards, p, collision, mask = case
    return *(jnp.asarray(x, jnp.float32) for x in (rewards, np.log(p), collision)), IDS, jnp.asarray(mask)


def _rows(case, rows):
    rewards, p, collision, mask = case
    return [[(rewards[b, t], p[b, t], collision[b, t]) for t in range(5) if mask[b, t]] for b in rows]


def test_by_trained_token_against_a_loop():
    case = _case()
    found = np.asarray(baseline.optimal_trained_token_advantages(*_jax(case), lone_tokens=False))
    for rows in GROUPS:
        for b, want in zip(rows, ref.optimal_token(_rows(case, rows)), strict=True):
            close.assert_near(found[b][case[3][b]], want)


def test_both_forms_agree_without_holes_and_tails_are_told_apart():
    case = _case(holes=False)
    args = _jax(case)
    plain = baseline.optimal_token_advantages(*args)
    close.assert_near(plain, baseline.optimal_trained_token_advantages(*args, lone_tokens=False))
    # the last places of the second group's rows 3 and 4 are shared, those of no row alone; of one response all are
    alone = [x[:1] for x in args]
    assert not np.asarray(baseline.optimal_token_advantages(*alone)).any()
    kept = baseline.optimal_token_advantages(*alone, lone_tokens=True)
    close.assert_relative(kept, returns.discounted_returns(alone[0], alone[4]))


def test_equal_returns_give_exactly_nothing_and_weights_are_squared():
    rewards, logp, collision, ids, mask = _jax(_case(holes=False))
    last = returns.at_last_token(jnp.full((6,), 10000.1), mask)
    shared = mask.at[0, 4].set(True)
    found = baseline.optimal_token_advantages(last, logp, collision, ids, shared)
    assert not np.asarray(found).any()
    w = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, (6, 5)), jnp.float32)
    one = baseline.optimal_token_advantages(rewards, logp, collision, ids, mask, weights=w)
    # the energy w^2 e of a token is that of a collision of e' with 1 - 2 p + c' = w^2 (1 - 2 p + c)
    energy = w**2 * (1 - 2 * jnp.exp(logp) + collision)
    other = baseline.optimal_token_advantages(rewards, logp, energy - 1 + 2 * jnp.exp(logp), ids, mask)
    close.assert_near(one, other)


def test_the_baseline_has_the_least_variance_on_an_enumerated_bandit():
    """One token of three: among all constants, E[W G] / E[W] makes the variance of the gradient least."""
    logits, reward = np.asarray([0.8, -0.4, 0.1]), np.asarray([1.0, 0.0, 3.0])
    p = np.exp(logits) / np.exp(logits).sum()
    scores = np.eye(3) - p[None]
    energy = (scores**2).sum(1)
    close.assert_relative(energy, 1 - 2 * p + (p**2).sum())  # the closed form of the docstring

    def variance(b):
        each = (reward - b)[:, None] * scores
        mean = (p[:, None] * each).sum(0)
        return (p * ((each - mean) ** 2).sum(1)).sum()

    # a group in which every token occurs as often as it is likely
    counts = np.asarray([5, 2, 3])
    rows = np.repeat(np.arange(3), counts)
    q = counts / counts.sum()
    logp, collision = np.log(p[rows])[:, None], np.full((10, 1), (p**2).sum())
    args = (jnp.asarray(x, jnp.float32) for x in (reward[rows][:, None], logp, collision))
    found = baseline.optimal_token_advantages(*args, jnp.zeros(10, jnp.int32), jnp.ones((10, 1), bool))
    b = float(reward[rows[0]] - found[0, 0])
    close.assert_near(b, float((q * energy * reward).sum() / (q * energy).sum()))
    best = float((p * energy * reward).sum() / (p * energy).sum())
    tried = [variance(x) for x in np.linspace(best - 1, best + 1, 41)]
    assert variance(best) <= min(tried) + 1e-12 and variance(best) < variance(float(p @ reward)) - 1e-3


@pytest.mark.parametrize("std", [True, False])
def test_best_minus_second_against_a_loop(std):
    rewards = np.asarray([0.5, 2.0, -1.0, 0.0, 0.1, 0.4])
    got = group.best_minus_second_advantages(jnp.asarray(rewards, jnp.float32), IDS, std=std, eps=0.0)
    want = [x for rows in GROUPS for x in ref.best_minus_second(rewards[rows], std)]
    close.assert_relative(got, want)
    shifted = np.float32(rewards * 8 + 10000)  # the reference sees what is left of the rewards so far from 0
    far = group.best_minus_second_advantages(jnp.asarray(shifted), IDS, std=std, eps=0.0)
    close.assert_near(far, [x for rows in GROUPS for x in ref.best_minus_second(np.float64(shifted)[rows], std)])
    tie = group.best_minus_second_advantages(jnp.asarray([1.0, 1.0, 0.0, 2.0, 0.0, 0.0]), IDS, std=False)
    assert tie.tolist() == [0.0, 0.0, 0.0, 2.0, 0.0, 0.0]
    valid = jnp.asarray([True, False, True, True, False, False])
    some = group.best_minus_second_advantages(jnp.asarray(rewards, jnp.float32), IDS, valid=valid, std=False)
    close.assert_near(some, [1.5, 0, 0, 0, 0, 0])


def test_best_minus_second_is_the_gradient_of_the_expected_best():
    """Two draws from an enumerated choice: its mean is that of ``E[max]``, which no baseline of the mean has."""
    logits, reward = jnp.asarray([0.4, -0.3, 0.1]), jnp.asarray([0.0, 1.0, 3.0])
    p = jax.nn.softmax(logits)

    def best(x):
        q = jax.nn.softmax(x)
        return jnp.sum(q[:, None] * q[None, :] * jnp.maximum(reward[:, None], reward[None, :]))

    total = jnp.zeros(3)
    for i in range(3):
        for j in range(3):
            a = group.best_minus_second_advantages(reward[jnp.asarray([i, j])], jnp.zeros(2, jnp.int32), std=False)
            score = jnp.eye(3)[jnp.asarray([i, j])] - p[None, :]
            total = total + p[i] * p[j] * jnp.sum(a[:, None] * score, axis=0)
    close.assert_near(total, jax.grad(best)(logits))


def test_length_adaptive_gae_against_a_loop():
    rng = np.random.default_rng(0)
    rewards, values, bootstrap = rng.normal(size=(4, 6)), rng.normal(size=(4, 6)), np.asarray([0.0, 0.5, 0.0, -1.0])
    mask = np.asarray([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], bool)
    args = (jnp.asarray(x, jnp.float32) for x in (rewards, values, bootstrap))
    advantages, targets = returns.length_adaptive_gae_advantages(*args, jnp.asarray(mask), alpha=0.5)
    for b in range(4):
        own = [x[b][mask[b]].tolist() for x in (rewards, values)]
        lam = max(1 - 1 / (0.5 * mask[b].sum()), 0.0)
        close.assert_near(advantages[b][mask[b]], ref.gae(*own, bootstrap[b], lam))
        whole = [a + v for a, v in zip(ref.gae(*own, bootstrap[b], 1.0), own[1], strict=True)]
        close.assert_near(targets[b][mask[b]], whole)
    with pytest.raises(ValueError, match="alpha=0.0"):
        returns.length_adaptive_gae_advantages(
            jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.zeros(1), jnp.ones((1, 2), bool), alpha=0.0
        )


def test_smoothed_advantages_against_a_loop_over_steps():
    rng = np.random.default_rng(0)
    now = group.RewardStatistics(jnp.zeros(6), jnp.zeros(6), jnp.zeros(6))
    kept = {g: (0, 0.0, 0.0) for g in (0, 1)}
    for step in range(5):
        rewards = (rng.random(6) < 0.5).astype(float) if step != 2 else np.ones(6)
        got, now = group.smoothed_advantages(jnp.asarray(rewards, jnp.float32), IDS, now)
        for g, rows in enumerate(GROUPS):
            steps, mean, deviation = kept[g]
            want, mean, deviation = ref.smoothed(rewards[rows], steps, mean, deviation)
            kept[g] = (steps + 1, mean, deviation)
            close.assert_near(np.asarray(got)[rows], want)
            close.assert_near(np.asarray(now.deviation)[rows], deviation)
        if step == 2:  # all right, but not at every step so far: GRPO would learn nothing
            assert np.abs(got).min() > 0.05
    first, _ = group.smoothed_advantages(
        jnp.asarray([1.0, 0, 0, 1, 1, 0]), IDS, group.RewardStatistics(*(jnp.zeros(6),) * 3)
    )
    plain = group.group_normalized_advantages(jnp.asarray([1.0, 0, 0, 1, 1, 0]), IDS, eps=0.0)
    close.assert_relative(first, plain)
    assert float(now.steps[0]) == 5.0
    # a group that nobody could judge has had no step; the other one has
    valid = np.asarray(IDS == IDS[0])
    _, after = group.smoothed_advantages(jnp.ones(6), IDS, now, valid=jnp.asarray(valid))
    for kept, old in zip(after, now, strict=True):
        np.testing.assert_array_equal(np.asarray(kept)[~valid], np.asarray(old)[~valid])
    assert np.asarray(after.steps).tolist() == np.where(valid, 6.0, 5.0).tolist()


@pytest.mark.parametrize("name", ["optimal_token_advantages", "optimal_trained_token_advantages"])
def test_a_reward_that_failed_is_in_no_baseline(name):
    """The others get what they get without the row; the failed one gets 0, whatever its reward."""
    function = getattr(baseline, name)
    rewards, logp, collision, ids, mask = _jax(_case(holes=False))
    valid = jnp.asarray([True, False, True, True, True, True])
    found = np.asarray(function(rewards.at[1].set(jnp.nan), logp, collision, ids, mask, valid=valid))
    kept = np.asarray([0, 2, 3, 4, 5])
    without = np.asarray(function(*(x[kept] for x in (rewards, logp, collision, ids, mask))))
    close.assert_near(found[kept], without)
    assert not found[1].any()
