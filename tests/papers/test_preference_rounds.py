"""Pairs of rounds, labels by worth, a judge as control variate, average references: their equations and limits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import preference_task as toy
from experiments.preference.parts import active
from jaxrl_llm.curriculum import pairs
from jaxrl_llm.losses import preference
from jaxrl_llm.models.merging import soup
from tests import close

RNG = np.random.default_rng(3)
SCORES = jnp.asarray([[0.2, 1.5, -0.3, 0.9], [1.0, 1.0, 1.0, 1.0]])


def UNUSED():  # noqa: N802
    raise AssertionError("what is not used is not computed")


def _f(*rows):
    return tuple(jnp.asarray(x, jnp.float32) for x in rows)


# --- RLHF workflow


def test_pairs_of_a_round():
    key = jax.random.key(0)
    assert [x.tolist() for x in pairs.best_and_worst(SCORES)] == [[1, 0], [2, 0], [True, False]]
    assert [x[0].tolist() for x in pairs.best_and_second(SCORES)] == [1, 3, True]
    chosen, other, kept = pairs.best_and_random(jnp.tile(SCORES[:1], (60, 1)), key)
    assert set(chosen.tolist()) == {1} and set(other.tolist()) == {0, 2, 3} and kept.all()
    chosen, other, kept = pairs.any_two(jnp.tile(SCORES, (60, 1)), key)
    assert all(SCORES[0, a] > SCORES[0, b] for a, b in zip(chosen[::2].tolist(), other[::2].tolist(), strict=True))
    assert kept[::2].all() and not kept[1::2].any() and (chosen != other).all()
    picked = pairs.pick(jnp.arange(24).reshape(2, 4, 3), jnp.asarray([1, 3]))
    assert picked.tolist() == [[3, 4, 5], [21, 22, 23]]


def test_round_robin_averages_both_orders():
    p = RNG.random((5, 4, 4))
    wins = np.zeros((5, 4))
    for n in range(5):
        for i in range(4):
            wins[n, i] = sum((p[n, i, j] + 1 - p[n, j, i]) / 2 > 0.5 for j in range(4) if j != i)
    np.testing.assert_array_equal(pairs.round_robin_wins(*_f(p)), wins)
    np.testing.assert_array_equal(wins.sum(1), 6)


def test_smoothed_labels():
    z = jnp.zeros(1)
    close.assert_printed(preference.dpo_loss(z + 10, z, z, z, beta=0.1, label_smoothing=0.1).loss[0], 0.413262, 6)


# --- SHARP


def test_ratios_on_literal_margins():
    h, half = jnp.asarray([0.5, 2.0]), jnp.full(2, 0.5)
    close.assert_printed(active.sharpe_ratio(h, half), [4.082955, 1.313032], 6, magnitude=4.1**2)
    close.assert_printed(active.w_sharp(h, UNUSED, UNUSED), [3.958602, 0.850915], 6, magnitude=4.0**2)
    p = jnp.log(jnp.asarray([0.6 / 0.4]))
    close.assert_printed(active.sharpe_ratio(p, half[:1])[0], 4.999950, 6, magnitude=5.0**2)
    close.assert_printed(active.w_sharp(p, UNUSED, UNUSED)[0], 4.898929, 6, magnitude=5.0**2)


def test_ratio_is_the_mean_over_the_deviation_of_the_two_gradient_norms():
    for h, q, norm in RNG.uniform([-2, 0.1, 0.1], [2, 0.9, 9], (20, 3)):
        p = 1 / (1 + math.exp(-h))
        first, second = 0.1 * (1 - p) * norm, 0.1 * p * norm
        mean = q * first + (1 - q) * second
        deviation = math.sqrt(q * (first - mean) ** 2 + (1 - q) * (second - mean) ** 2)
        wanted = mean / (deviation + 0.1 * norm * active.EPS)
        found = active.sharpe_ratio(*_f([h], [q]))[0]
        # 1 - 2 p cancels
        close.assert_near(found, wanted, magnitude=max(1.0, wanted**2))
        close.assert_near(active.sharpe_ratio(*_f([-h], [1 - q]))[0], float(found), magnitude=max(1.0, wanted**2))


def test_own_prior_orders_as_entropy_and_a_constant_worth_is_a_uniform_choice():
    h = jnp.asarray(RNG.normal(size=40), jnp.float32)
    key = jax.random.key(1)
    chosen = [set(active.top(f(h, UNUSED, UNUSED), key, 10).tolist()) for f in (active.w_sharp, active.open_pair)]
    assert chosen[0] == chosen[1] == set(np.argsort(np.abs(np.asarray(h)))[:10].tolist())
    assert set(active.top(active.certain_pair(h, UNUSED, UNUSED), key, 5).tolist()).isdisjoint(chosen[0])
    counts = np.zeros(8)
    for k in range(200):
        counts[np.asarray(active.top(active.any_pair(h[:8], UNUSED, UNUSED), jax.random.key(k), 2))] += 1
    assert counts.sum() == 400 and counts.min() > 25
    close.assert_near(
        active.w_sharp_judged(h, lambda: jnp.full(40, 0.5), UNUSED), active.sharp(h, UNUSED, UNUSED), magnitude=0
    )
    close.assert_near(active.expected_slope(h * 0, UNUSED, lambda: h + 9), 0.5 * (h + 9), magnitude=0)
    with pytest.raises(ValueError, match="pool"):
        active.top(h, key, 41)


# --- VRPO


def test_literal_loss_and_limits():
    one = _f([1.0], [0.7], [-0.5], [0.4])
    close.assert_printed(preference.vrpo_loss(*one).loss[0], 0.374077, 6)
    close.assert_near(preference.ramp(jnp.asarray([0.0, 2.0, -0.5, -2.0])), [1.0, 0.0, 1.5, 1.5], magnitude=0)
    h, g = _f(RNG.normal(size=9), RNG.random(9))
    for phi in (preference.logistic, preference.ramp):
        same = preference.vrpo_loss(h, g, h, g, phi=phi)
        close.assert_near(same.loss, phi(h))  # the fresh pair in place of the labelled one
    slopes = jax.grad(lambda *x: jnp.sum(preference.vrpo_loss(*x).loss), (0, 1, 2, 3))(h, g, -h, g)
    assert not slopes[1].any() and not slopes[3].any() and slopes[0].any() and slopes[2].any()


def test_unbiased_where_the_judge_or_the_pairs_are_right():
    """Expectation over labels (law p) and fresh pairs of the same law, by enumeration."""
    h, p = RNG.normal(size=50), RNG.uniform(0.1, 0.9, 50)
    plain = np.mean([q * np.log1p(np.exp(-x)) + (1 - q) * np.log1p(np.exp(x)) for x, q in zip(h, p, strict=True)])
    for judge in (p, np.full(50, 0.5)):
        won = preference.vrpo_loss(*_f(h, judge, h, judge)).loss
        lost = preference.vrpo_loss(*_f(-h, 1 - judge, h, judge)).loss
        close.assert_near(jnp.mean(p * won + (1 - p) * lost), plain, magnitude=0)


def test_labels_with_a_cycle():
    prompts = jnp.zeros((3, 4), jnp.int32)
    y = jnp.asarray([[4, 6], [5, 6], [6, 6]], jnp.int32)  # good, bad, neutral
    gold = np.asarray(toy.gold_reward(prompts, y))
    for i in range(3):
        for j in range(3):
            cycle = (0, 1, -1)[(int(y[i, 0]) - int(y[j, 0])) % 3]
            wanted = 0.6 / (1 + math.exp(-(gold[i] - gold[j] + 2 * cycle))) + 0.2
            found = toy.chance(prompts[:1], y[i : i + 1], y[j : j + 1], flip_rate=0.2, cycle=2.0)
            close.assert_near(found[0], wanted)


# --- SALSA


def test_soup():
    trees = [
        {"a": jnp.asarray([1.0, 3.0]), "b": {"c": jnp.ones(2)}},
        {"a": jnp.asarray([3.0, 5.0]), "b": {"c": jnp.ones(2)}},
    ]
    mixed = soup(trees, [0.5, 0.5])
    assert mixed["a"].tolist() == [2.0, 4.0] and mixed["b"]["c"].tolist() == [1.0, 1.0]
    assert soup(trees, [1.0, 0.0])["a"].tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match="add up"):
        soup(trees, [0.5, 0.6])
    with pytest.raises(ValueError, match="one weight a tree"):
        soup(trees, [1.0])
