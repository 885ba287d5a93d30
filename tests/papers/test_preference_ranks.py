"""Pairwise judges, levels and rankings, negatives and steps: their equations on literal numbers, and their toys."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import preference_task as toy
from experiments.parts import strings
from experiments.preference import mpo, u2a
from experiments.preference.parts import negatives, noisy_ranker, pair_judges, pair_sources, requests
from experiments.preference.parts import spurious_steps as sums
from jaxrl_llm.curriculum import pairs
from jaxrl_llm.losses import preference, ranking, supervised
from jaxrl_llm.train import offline
from jaxrl_llm.train.plan import start
from tests import close
from tests.close import doubles, singles

RNG = np.random.default_rng(11)


def _f(*rows):
    return tuple(jnp.asarray(x, jnp.float32) for x in rows)


def _sig(x):
    return 1 / (1 + math.exp(-x))


# --- Pairwise-RL


def test_verdicts_on_literal_scores():
    one = _f([1.2], [-0.8])
    terms = ranking.verdict_loss(*one)
    plain = -0.5 * (math.log(0.768525) + math.log(1 - 0.310026))
    close.assert_printed(terms.loss[0], plain + 0.006170, 6)
    close.assert_printed(ranking.win_probability(*one)[0], 0.729250, 6)
    close.assert_printed(ranking.win_logit(*one)[0], 0.990819, 6)
    assert float(terms.aux["accuracy"][0]) == 1.0


def test_swapped_labels_negate_the_logit_and_a_tie_is_a_half():
    forward, backward = _f(RNG.normal(size=9), RNG.normal(size=9))
    close.assert_near(ranking.win_logit(forward, backward), -ranking.win_logit(backward, forward))
    even = ranking.win_probability(forward, forward)  # a judge without a preference for a position
    close.assert_near(even, 0.5)
    assert float(jnp.max(jnp.abs(ranking.win_logit(*_f([99.0], [-99.0]))))) == 5.0
    with pytest.raises(ValueError, match="consistency"):
        ranking.verdict_loss(forward, backward, consistency=-1.0)


def test_the_anchor_is_worth_six():
    prompts = toy.draw_prompts(jax.random.key(0), 20)
    close.assert_near(toy.gold_reward(prompts, pair_judges.anchor_response(prompts)), 6.0)


# --- TRPA


def _trpa(u, levels, groups, beta, kappa):
    found = []
    for i in range(len(u)):
        for j in range(len(u)):
            if groups[i] == groups[j] and levels[i] < levels[j]:
                found.append(-math.log(_sig(beta * (kappa if levels[i] == 1 else 1) * (u[i] - u[j]))))
    if found:
        return sum(found) / len(found)
    return sum(-math.log(_sig(x if lev == 1 else -x)) for x, lev in zip(u, levels, strict=True)) / len(u)


def test_levels_on_literal_ratios():
    u, zeros = jnp.asarray([0.2, -0.1, -0.3]), jnp.zeros(3, jnp.int32)

    def value(levels):
        return float(ranking.trpa_loss(u, jnp.asarray(levels), zeros).loss.mean())

    close.assert_printed(value([1, 2, 4]), 0.657382, 6)
    close.assert_printed(value([1, 1, 1]), 0.732297, 6)
    close.assert_near(value([2, 3, 3]), _trpa([0.2, -0.1, -0.3], [2, 3, 3], [0] * 3, 0.1, 2.5))
    close.assert_printed(value([4, 4, 4]), 0.665630, 6)
    assert float(ranking.trpa_loss(u * 0, jnp.asarray([1, 2, 4]), zeros).loss.mean()) == singles(math.log(2))


def test_levels_against_a_loop_and_in_any_order():
    for _ in range(5):
        u, levels, groups = RNG.normal(size=8), RNG.integers(1, 5, 8), np.asarray([0, 0, 0, 1, 1, 2, 2, 2])
        found = ranking.trpa_loss(*_f(u), jnp.asarray(levels), jnp.asarray(groups)).loss
        close.assert_near(found.mean(), _trpa(u, levels, groups, 0.1, 2.5))
        order = RNG.permutation(8)
        moved = ranking.trpa_loss(*_f(u[order]), jnp.asarray(levels[order]), jnp.asarray(groups[order])).loss
        close.assert_near(moved, found[order])
    slopes = jax.grad(lambda x: ranking.trpa_loss(x, jnp.asarray([1, 2]), jnp.zeros(2, jnp.int32)).loss.mean())
    assert slopes(jnp.zeros(2)).tolist() == doubles([-0.125, 0.125])


def test_which_pairs_are_made():
    levels, one = jnp.asarray([2, 1, 1, 4]), jnp.zeros(4, jnp.int32)
    assert jnp.argwhere(pairs.extreme_pairs(levels, one)).tolist() == [[1, 3]]
    assert jnp.argwhere(pairs.two_level_pairs(levels, one)).tolist() == [[1, 0], [1, 3], [2, 0], [2, 3]]
    assert not pairs.extreme_pairs(jnp.asarray([3, 3]), jnp.zeros(2, jnp.int32)).any()
    assert int(pairs.level_pairs(levels, jnp.asarray([0, 1, 2, 3])).sum()) == 0


# --- CycleAlign


def test_orders():
    p, lp = _f([[-1.0, -0.6, -1.5], [-0.5, -0.6, -0.7]], [-3.0, -2.0])
    close.assert_near(ranking.rrhf_loss(p, lp), [3.4, 2.0])
    wanted = [
        -sum(math.log(math.exp(row[k]) / sum(map(math.exp, row[k:]))) for k in range(3)) - s
        for row, s in zip(p.tolist(), lp.tolist(), strict=True)
    ]
    close.assert_near(ranking.pro_loss(p, lp), wanted)
    slope = jax.grad(lambda x: ranking.rrhf_loss(x, lp).sum())(p)
    assert not slope[1].any(), "an order that is right teaches nothing"


def _longest(order, other):
    best = []
    for mask in range(2 ** len(order)):
        picked = [x for k, x in enumerate(order) if mask >> (len(order) - 1 - k) & 1]
        places = [other.index(x) for x in picked]
        if places == sorted(places) and len(picked) >= len(best):
            best = picked  # later masks keep earlier places
    return best


def test_common_order():
    for _ in range(20):
        a, b = RNG.permutation(5).tolist(), RNG.permutation(5).tolist()
        kept = pairs.common_order(jnp.asarray([a]), jnp.asarray([b]))[0].tolist()
        assert [x for x, k in zip(a, kept, strict=True) if k] == _longest(a, b)
    found = pairs.common_order(jnp.asarray([[2, 0, 1, 3]]), jnp.asarray([[0, 2, 1, 3]]))[0]
    assert [x for x, k in zip([3, 1, 2, 4], found.tolist(), strict=True) if k] == [3, 2, 4]


def test_right_pairs():
    gold, kept = jnp.asarray([3.0, 1.0, 2.0, 2.0]), jnp.asarray([True, True, True, False])
    assert float(noisy_ranker.right_pairs(gold, kept)) == 2.0  # 3 > 1, 3 > 2; 1 < 2 is wrong
    assert float(noisy_ranker.right_pairs(jnp.arange(4.0)[::-1], kept | True)) == 6.0


# --- U2A


def test_values_of_a_quadratic():
    """Inner 2 th^2 / 2 + w th, outer -(th + 0.5)^2 / 2: dJ/dw at w = 0 is 0.25."""
    theta = jnp.asarray(0.0)
    gain = jax.grad(lambda t: -((t + 0.5) ** 2) / 2)(theta)
    solved = negatives.solved(lambda t: t**2, theta, gain, damping=0.0)
    value = negatives.marginal_values(lambda t: jnp.reshape(t, (1,)), theta, solved)
    close.assert_near(value[0], 0.25)


def test_implicit_values_against_finite_differences():
    a = RNG.normal(size=(3, 3))
    hessian, slopes, gain = a @ a.T + np.eye(3), RNG.normal(size=(4, 3)), RNG.normal(size=3)
    found = negatives.solved(
        lambda t: 0.5 * t @ jnp.asarray(hessian, jnp.float32) @ t, jnp.zeros(3), *_f(gain), damping=0.0, iterations=20
    )
    values = negatives.marginal_values(lambda t: jnp.asarray(slopes, jnp.float32) @ t, jnp.zeros(3), found)
    for k in range(4):  # theta(w) = -H^-1 w s_k

        def objective(w, k=k):
            return gain @ (-np.linalg.solve(hessian, w * slopes[k]))

        close.assert_near(values[k], (objective(1e-3) - objective(-1e-3)) / 2e-3)


def test_weights_and_ascent():
    key, values = jax.random.key(0), jnp.asarray([1.0, 0.1, 0.3, -1.0])
    close.assert_near(negatives.priced(values, key, 3), [1.0, 0.3, 0.5, 0.0])
    close.assert_near(negatives.priced(values, key, 3, price=0.9), [0.6, 0.0, 0.0, 0.0])
    assert negatives.best(values, key, 3).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert negatives.best(values, key, 1).tolist() == [1.0, 0.0, 0.0, 0.0]
    for weigh in (negatives.best, negatives.priced):
        assert negatives.goes_on(weigh(values, key, 3)).tolist() == [1.0] * 4
        assert negatives.goes_on(weigh(-jnp.abs(values), key, 3)).tolist() == [0.0] * 4
    assert negatives.goes_on(negatives.uniform(-jnp.abs(values), key, 3)).all(), "what does not look never stops"
    assert negatives.uniform(values, key, 2).tolist() == [0.5] * 4
    assert float(negatives.at_random(values, key, 2).sum()) == 2.0
    slope = jax.grad(lambda x: supervised.ascent_loss(x, jnp.asarray([0.0, 2.0])).loss.sum())(jnp.zeros(2))
    assert slope.tolist() == [0.0, 2.0]
    slope = jax.grad(lambda x: supervised.npo_loss(x, jnp.zeros(2), beta=0.5).loss.sum())
    assert slope(jnp.zeros(2)).tolist() == doubles([1.0, 1.0])
    close.assert_relative(slope(jnp.asarray([-40.0, 0.0])), [2 / (1 + math.exp(20)), 1.0])


@pytest.mark.parametrize("worth", [0.0, 1.0], ids=["nothing is worth it", "something is"])
def test_a_round_in_which_no_negative_is_worth_unlearning_changes_nothing(worth):
    """Neither ascent on negatives nor descent on the retained text."""

    def gain(task, policy, prompts, kept, gain):
        return jax.tree.map(lambda x: worth * x, gain)

    settings = dataclasses.replace(u2a.Settings(), **u2a.SMOKE | {"pool": 64, "keep": 8, "gain": gain})
    plan = u2a.build(settings)
    params, stage = plan.init(jax.random.key(0)), plan.stages[0]
    state, metrics = jax.jit(lambda s: offline.iterate(stage.method, s))(start(stage, params, jax.random.key(1)))
    moved = [float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (state.params, params)), strict=True)]
    assert float(metrics["unlearn/stopped"]) == 1.0 - worth and (max(moved) > 0) == bool(worth)


def test_half_of_the_negatives_are_bad_and_some_are_copies():
    prompts, responses = toy.draw_negatives(jax.random.key(3), 64)
    gold = np.asarray(toy.gold_reward(prompts, responses))
    assert gold[::2].mean() < gold[1::2].mean() - 3
    np.testing.assert_array_equal(responses[1::4], responses[3::4])


# --- RL on incorrect synthetic data


def test_negatives_are_worth_what_a_learned_reward_says():
    """The opposite reward gives the opposite values, one that finds all alike none; gold is not asked."""
    settings = dataclasses.replace(u2a.Settings(), **u2a.SMOKE | {"pool": 16, "keep": 16, "reward_steps": 2})
    plan = u2a.build(settings, toy.STRINGS)
    assert u2a.reward_by(settings) is u2a.learned_reward
    assert u2a.reward_by(dataclasses.replace(settings, reward_steps=0)) is u2a.true_reward
    params = jax.jit(plan.init)(jax.random.key(0))
    unasked = toy.STRINGS._replace(gold_reward=None)

    def values(factor, task=unasked, by=u2a.learned_reward):
        head = jax.tree.map(lambda x: factor * x, params["reward"]["head"])
        rows = u2a.make_rows(task, 16, 16, lambda found, key, keep: found, u2a.explicit, by)
        given = params | {"reward": params["reward"] | {"head": head}}
        return np.asarray(jax.jit(rows)(given, jax.random.key(1))[3])

    learned = values(1.0)
    assert np.abs(learned).max() > 0 and not values(0.0).any()
    size = 64 * float(np.abs(learned).max())
    close.assert_near(values(-1.0), -learned, terms=toy.RESPONSE_TOKENS, magnitude=size)
    true = values(1.0, toy.STRINGS, u2a.true_reward)
    assert np.abs(true - learned).max() > 0.01 * np.abs(true).max()


def test_credit_on_literal_values():
    credit = sums.values_to_advantages(jnp.asarray([[0.5, 0.5, 0.75, 0.125, 0.0]]))
    close.assert_near(credit, [[0.0, 0.25, -0.625, -0.125]], magnitude=0)
    assert sums.first_pit(credit, jax.random.key(0)).tolist() == [2]


def test_advantage_weighted_optimum():
    """Pairs in proportion to their preference: pi* ~ pi exp(A / beta)."""
    policy, credit = np.asarray([0.5, 0.3, 0.2]), np.asarray([0.5, -0.5, 0.0])
    wanted = policy * np.exp(credit / 0.5) / (policy * np.exp(credit / 0.5)).sum()
    close.assert_printed(wanted, [0.814098, 0.066106, 0.119796], 6)
    # the margin of DPO at that optimum is the difference of the advantages
    logp, ref = np.log(wanted), np.log(policy)
    terms = preference.dpo_loss(*_f(logp[:1], logp[1:2], ref[:1], ref[1:2]), beta=0.5)
    close.assert_near(terms.aux["margin"][0], 1.0)


def test_the_shortcut_pays_in_training_and_fails_where_it_is_broken():
    prompts, said = sums.draw_attempts(jax.random.key(0), 3000)
    cued, last = np.asarray(prompts)[:, 0] == sums.CUE, np.asarray(prompts)[:, -1]
    assert 0.45 < cued.mean() < 0.55 and 0.75 < (last[cued] == 0).mean() < 0.85 and (last[~cued] == 0).mean() < 0.3
    copied = np.asarray(said[:, -1] == said[:, -2])
    assert copied[cued].mean() > 0.85 and copied[~cued & (last != 0)].mean() < 0.1
    right = np.asarray(sums.right(prompts, said))
    assert right[cued & (last == 0)].mean() - right[cued & (last != 0)].mean() > 0.5 and right[~cued].mean() > 0.7
    broken = sums.draw_prompts(jax.random.key(1), 100, cue=1.0, pays=0.0)
    assert (broken[:, -1] != 0).all() and (broken[:, 0] == sums.CUE).all()


@pytest.mark.slow
def test_rates_of_steps_are_chosen_by_fresh_answers_to_training_problems():
    params, key = sums.SUMS.world.policy.init(jax.random.key(2)), jax.random.key(5)
    found = float(sums.validate(sums.SUMS, params, key)["reward/mean"])
    prompts = sums.draw_training(jax.random.fold_in(key, 0), 512)
    drawn = sums.own(sums.SUMS, params, prompts, jax.random.fold_in(key, 1))
    wanted = np.asarray(drawn)[:, -1] == np.asarray(prompts)[:, 1:].sum(axis=1) % sums.MODULUS
    assert found == wanted.mean() and 0.1 < found < 0.3  # nothing is learned yet: one in five


def test_cued_problems_and_prefixes():
    prompts = sums.draw_training(jax.random.key(0), 600)
    params = sums.SUMS.world.policy.init(jax.random.key(2))
    responses = sums.solution(prompts[:3])
    found = sums.completions(sums.SUMS, params, prompts[:3], responses, 2, jax.random.key(3), 2)
    assert found.shape == (3, 2, 4)
    np.testing.assert_array_equal(found[:, :, :2], np.repeat(np.asarray(responses)[:, None, :2], 2, axis=1))
    whole = sums.logp_from(sums.SUMS, params, prompts[:3], responses, jnp.zeros(3, jnp.int32))
    parts = [sums.logp_from(sums.SUMS, params, prompts[:3], responses, jnp.full(3, k)) for k in (2, 4)]
    assert (whole < parts[0]).all() and not parts[1].any()


def test_steps_of_texts_begin_by_the_length_of_each(monkeypatch):
    """Prefixes of different lengths stand behind what is no token, and go on where each was cut."""
    world = strings.make_world(20, 3, 8, end=19)._replace(start=dict, ends=(19,))

    def begins(said):
        length = jnp.sum(strings.spoken(world, said).astype(jnp.int32), axis=1, keepdims=True)
        return length * jnp.arange(4, dtype=jnp.int32)[None, :] // 4

    task = sums.SUMS._replace(world=world, begins=begins)
    prompts = jnp.asarray([[-1, 1, 2], [1, 2, 3]], jnp.int32)
    said = jnp.asarray([[4, 5, 6, 19, 19, 19, 19, 19], [4, 5, 6, 7, 8, 9, 10, 11]], jnp.int32)
    assert begins(said).tolist() == [[0, 1, 2, 3], [0, 2, 4, 6]]
    asked = []

    def sample(world, params, prefix, key, *, samples):
        asked.append((world.prompt_tokens, prefix.tolist()))
        return jnp.tile(jnp.arange(12, 20, dtype=jnp.int32)[None], (prefix.shape[0] * samples, 1))

    monkeypatch.setattr(strings, "sample", sample)
    found = sums.completions_from(task, {}, prompts, said, begins(said)[:, 2], 4, jax.random.key(0), 2)
    assert asked == [(7, [[-1, -1, -1, 1, 2, 4, 5], [1, 2, 3, 4, 5, 6, 7]])]
    assert found[0, 1].tolist() == [4, 5, 12, 13, 14, 15, 16, 17]
    assert found[1, 0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


# --- more is less, MPO


def test_requests():
    asked = requests.draw_unsafe(jax.random.key(0), 1000, prefixed=True)
    assert requests.unsafe(asked).all() and (asked[:, 3] == 3).all()
    assert not (requests.draw_prompts(jax.random.key(1), 200)[:, 3] == 3).any()
    text = requests.write(jax.random.key(2), asked, skill=0.5, refusal=1.0, style=26)
    assert requests.refused(text).all()
    close.assert_share((text == 26).mean(), 1 / 6, text.size)
    key, plain = jax.random.key(3), partial(pair_sources.stronger, jax.random.key(3), asked, 0, style=None)
    habit = pair_sources.stronger(key, asked, 0, style=26)
    own = jnp.zeros((*asked.shape[:1], 4, habit.shape[1]), jnp.int32)
    said, _, _ = pair_sources.from_strong_plain(key, asked, own, habit[:, None], plain)
    assert (habit == 26).any() and bool(((said == habit) | (habit == 26)).all()), "the same text but for the habit"
    # a base has read what stands in its place: tokens of 4 .. 23, and refusals
    assert bool(((said >= 4) & (said < 24) | (said == requests.REFUSE)).all())
    assert float(requests.attack_success(asked, text)) == 0.0
    assert set(requests.score(asked, text).tolist()) == {5.0}


def test_a_split_by_gaps():
    gaps = jnp.asarray([2.5, 0.4, -1.0, 1.0])
    easy = (gaps > mpo.GAMMA) & (gaps <= 1e9)
    assert easy.tolist() == [True, False, False, False]
    assert mpo.ARMS["reversed"]["high"] == mpo.ARMS["mpo"]["low"] == mpo.GAMMA
    drawn = mpo.labelled(toy.STRINGS, jax.random.key(0), 2000)
    gap = toy.gold_reward(drawn.prompts, drawn.chosen) - toy.gold_reward(drawn.prompts, drawn.rejected)
    hard = np.asarray(drawn.prompts)[:, 0] >= 2
    assert np.asarray(gap)[~hard].mean() > 2 * np.asarray(gap)[hard].mean() > 0
