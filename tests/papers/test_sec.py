"""Self-evolving curriculum: TD(0) over categories by the mean absolute advantage."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import sec
from experiments.curriculum.parts import bandit, domains
from experiments.curriculum.parts.categories import spending
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import arms, recipes
from tests import close
from tests.verifiers.test_labels import _rows


def test_worked_updates():
    code, paper = (bandit.make_td(rate=0.5, temperature=0.4, decay_unsampled=d) for d in (True, False))
    state = code.learn(code.init(3), jnp.array([0, 1]), jnp.array([0.8, 0.4]), jnp.ones(2))
    close.assert_near(state, [0.4, 0.2, 0.0])
    close.assert_printed(code.probs(state), [0.5065, 0.3072, 0.1863], 4)
    more = jnp.array([1, 2]), jnp.array([0.6, 0.2]), jnp.ones(2)
    close.assert_near(code.learn(state, *more), [0.2, 0.4, 0.1])
    close.assert_near(paper.learn(state, *more), [0.4, 0.4, 0.1])


def test_equal_values_are_uniform_and_degenerate_groups_teach_zero():
    arms = bandit.make_td(temperature=0.2)
    close.assert_near(arms.probs(jnp.full(5, 0.3)), 0.2)
    signal = bandit.mean_absolute_advantage(jnp.array([0.0, 1.0]), 8)
    assert signal.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("std", [True, False])
def test_the_signal_is_the_mean_absolute_advantage(std):
    for size in (2, 8):
        for right in range(size + 1):
            rewards, ids = jnp.array([1.0] * right + [0.0] * (size - right)), jnp.zeros(size, jnp.int32)
            estimate = partial(group.group_normalized_advantages, eps=0.0) if std else group.dr_grpo_advantages
            expected = jnp.abs(estimate(rewards, ids)).mean()
            found = bandit.mean_absolute_advantage(jnp.array([right / size]), size, std=std)
            close.assert_near(found[0], expected)


def test_updates_agree_with_a_loop():
    rng = np.random.default_rng(0)
    arms = bandit.make_td(rate=0.3, decay_unsampled=False)
    state, expected = arms.init(4), np.zeros(4)
    for _ in range(6):
        category, signal, weight = rng.integers(0, 4, 5), rng.random(5), (rng.random(5) < 0.7).astype(float)
        for c in set(category[weight > 0]):
            mine = signal[(category == c) & (weight > 0)]
            expected[c] = 0.3 * mine.mean() + 0.7 * expected[c]
        signal[weight == 0] = np.nan
        args = jnp.asarray(category), jnp.asarray(signal, jnp.float32), jnp.asarray(weight, jnp.float32)
        state = arms.learn(state, *args)
    close.assert_near(state, expected, magnitude=0)


def test_draws_follow_the_category_probabilities_and_are_uniform_inside():
    categories = np.array([0, 1, 0, 1, 1, 2])
    arms = bandit.make_schedule(lambda step, count: jnp.array([1.0, 3.0, 0.0]))
    sampler = bandit.make_categories(categories, arms, signal=lambda p: p)
    ids, state = sampler.draw(sampler.init(6), jax.random.key(0), 6000)
    share = np.bincount(np.asarray(ids), minlength=6) / 6000
    close.assert_share(share, [0.125, 0.25, 0.125, 0.25, 0.25, 0.0], 6000)
    assert share[5] == 0
    close.assert_near(
        state.drawn, 6000 * np.array([share[0] + share[2], share[1] + share[3] + share[4], 0]), magnitude=0
    )
    with pytest.raises(ValueError, match="needs a prompt"):
        bandit.make_categories(np.array([0, 2]), arms, signal=lambda p: p)


def test_mass_moves_from_solved_to_learnable_categories():
    arms = bandit.make_td(rate=0.5, temperature=0.3)
    signal = partial(bandit.mean_absolute_advantage, group_size=8)
    sampler = bandit.make_categories(np.repeat(np.arange(3), 4), arms, signal=signal)
    state, means = sampler.init(12), jnp.repeat(jnp.array([1.0, 0.5, 0.0]), 4)  # solved, learnable, hopeless
    for k in range(20):
        ids, state = sampler.draw(state, jax.random.key(k), 8)
        state = sampler.update(state, ids, means[ids], jnp.ones(8, bool))
    chances = arms.probs(state.arms)
    assert float(chances[1]) > 0.8
    # nothing valid: as if nothing had been sampled
    same = bandit.make_categories(np.repeat(np.arange(3), 4), bandit.make_td(decay_unsampled=False), signal=signal)
    kept = same.update(state, ids, jnp.full(8, jnp.nan), jnp.zeros(8, bool))
    np.testing.assert_array_equal(kept.arms, state.arms)


def test_a_fixed_order_walks_through_the_categories():
    arms = bandit.make_schedule(bandit.make_ordered_weights(6))
    back = bandit.make_schedule(bandit.make_ordered_weights(6, backwards=True))
    state, seen, reverse = arms.init(3), [], []
    for _ in range(8):
        seen.append(int(jnp.argmax(arms.probs(state))))
        reverse.append(int(jnp.argmax(back.probs(state))))
        state = arms.learn(state, None, None, None)
    assert seen == [0, 0, 1, 1, 2, 2, 2, 2] and reverse == [2, 2, 1, 1, 0, 0, 0, 0]


def test_progress_against_a_loop_and_leave_one_out_by_counting():
    arms, rng = sec.make_progress(rate=0.5, temperature=0.4), np.random.default_rng(1)
    state, worth, last = arms.init(3), np.zeros(3), np.zeros(3)
    for _ in range(6):
        category, rewards = rng.integers(0, 3, 5), rng.random(5)
        weight = (rng.random(5) < 0.8).astype(float)
        state = arms.learn(state, jnp.asarray(category), *(jnp.asarray(x, jnp.float32) for x in (rewards, weight)))
        for c in range(3):
            mine = (category == c) & (weight > 0)
            gain = abs(rewards[mine].mean() - last[c]) if mine.any() else 0.0
            worth[c] = 0.5 * gain + 0.5 * worth[c]
            last[c] = rewards[mine].mean() if mine.any() else last[c]
        close.assert_near(state[0], worth)
        close.assert_near(arms.probs(state), np.exp(worth / 0.4) / np.exp(worth / 0.4).sum())
    for right in range(9):
        rewards = np.array([1.0] * right + [0.0] * (8 - right))
        away = np.mean([abs(r - (rewards.sum() - r) / 7) for r in rewards])
        found = sec.leave_one_out_advantage(jnp.asarray([right / 8]), 8)
        close.assert_near(found[0], away)


def test_two_domains_are_judged_by_their_own_rule_on_the_device():
    """A solution is right for its own problem alone, whichever domain that is of."""
    one = recipes.OnlineSettings(data="countdown", levels=(2,), train_problems=6, eval_problems=2, max_new_tokens=14)
    other = domains.code_settings(one, "chain", "plain", (2,))
    found = domains.open_domains(one, other)
    first, second = recipes.solved_problems(one)[0].solution, recipes.solved_problems(other)[0].solution
    _, rows = _rows([first, second, second, first])
    ids = jnp.array([0, 6, 0, 6])
    answers = jax.tree.map(lambda x: x[ids], found.joint.train.answers)
    rewards = jax.jit(found.joint.score)(answers, rows)
    assert rewards.value.tolist() == [1.0, 1.0, 0.0, 0.0] and rewards.valid.all()
    assert found.joint.train.answers.domain.tolist() == [0] * 6 + [1] * 6


def test_sec_2d_has_one_bandit_over_domains_and_difficulties(monkeypatch):
    """Four categories of Countdown and three of chains; the arms beside it are what they were."""
    base, seen = sec.Settings(**sec.EMBEDDED | sec.SMOKE), []
    resolved = arms.resolve(sec, base, ())
    assert [name for name, one in resolved.items() if one.chain_levels] == ["uniform_2d", "sec_2d"]
    assert resolved["sec_2d"].bandit_temperature == 0.2 and resolved["sec_2d"].chain_levels == (3, 4, 5)
    monkeypatch.setattr(
        sec, "spending", lambda categories, rows: seen.append((categories, rows)) or spending(*seen[-1])
    )
    (stage,) = sec.build(resolved["sec_2d"]).stages
    ((categories, rows),), level = seen, np.asarray(stage.method.problems.level)[seen[0][1]]
    chains = rows >= 48
    assert chains.sum() == 48 and set(level[~chains].tolist()) == {2, 3}
    assert set(categories[~chains].tolist()) == {0, 1, 2, 3}
    assert (categories[chains] == level[chains] + 1).all() and set(level[chains].tolist()) == {3, 4, 5}
    batch = types.SimpleNamespace(extras={"category": jnp.zeros((4,), jnp.int32)})
    drawn = set(stage.method.figures(batch, {}))
    assert drawn == {f"drawn/{k}" for k in range(7)}


def test_what_the_bandit_draws_is_in_the_figure():
    found = sec.build(sec.Settings(**sec.EMBEDDED | sec.SMOKE)).stages[0].method
    batch = types.SimpleNamespace(extras={"category": jnp.zeros((4,), jnp.int32)})
    drawn = list(found.figures(batch, {}))
    assert drawn == [f"drawn/{k}" for k in range(4)] and set(drawn) <= set(sec.CURVES)
