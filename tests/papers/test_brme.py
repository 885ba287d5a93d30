"""Reward ensembles: the surest head, the worst case, and heads that know how sure they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import brme
from experiments.reward_models.parts import attribute_rewards, combine
from experiments.reward_models.parts import attribute_text as text
from jaxrl_llm.losses.reward import bradley_terry_loss, gaussian_reward_loss
from tests import close
from tests.close import singles

MEANS, DEVIATIONS = jnp.array([[0.9, 0.2, 0.5]]), jnp.array([[0.1, 0.3, 0.2]])


def test_worked_mix():
    assert float(combine.nominal_rewards(MEANS, DEVIATIONS)[0]) == singles(0.9)
    for share, expected in ((1.0, 0.9), (0.6, 0.62), (0.0, 0.2)):
        assert float(combine.robust_rewards(MEANS, DEVIATIONS, share=share)[0]) == singles(expected)
    with pytest.raises(ValueError, match="share=1.5"):
        combine.robust_rewards(MEANS, DEVIATIONS, share=1.5)


def test_one_head_and_more_heads():
    one = MEANS[:, :1], DEVIATIONS[:, :1]
    same = jnp.repeat(MEANS[:, :1], 4, axis=1), jnp.repeat(DEVIATIONS[:, :1], 4, axis=1)
    for share in (0.0, 0.3, 1.0):
        for heads in (one, same):
            assert float(combine.robust_rewards(*heads, share=share)[0]) == singles(0.9)
    # another head can only lower the reward while the surest one stays
    rng = np.random.default_rng(0)
    means, deviations = jnp.asarray(rng.normal(size=(50, 6)), jnp.float32), jnp.linspace(0.1, 0.6, 6)
    deviations = jnp.broadcast_to(deviations, (50, 6))
    values = [combine.robust_rewards(means[:, :h], deviations[:, :h], share=0.6) for h in range(1, 7)]
    assert all((b <= a).all() for a, b in zip(values, values[1:], strict=False))
    close.assert_near(combine.lower_bound_rewards(means, weight=0.0), np.mean(means, 1))
    low = combine.lower_bound_rewards(means, weight=2.0)
    close.assert_near(low, np.mean(means, 1) - 2 * np.std(means, 1))


def test_the_worst_of_many_useless_rewards_varies_less():
    means = jnp.asarray(np.random.default_rng(0).normal(size=(4000, 64)), jnp.float32)
    spread = [float(jnp.std(jnp.min(means[:, :h], axis=1))) for h in (1, 4, 64)]
    assert spread[0] > spread[1] > spread[2]


def test_deviations_learn_the_error():
    target, mean = jnp.array([1.0, 3.0]), jnp.array([[0.5], [1.0]])
    loss = gaussian_reward_loss(mean, jnp.log(jnp.array([[0.5], [2.0]])), target)
    close.assert_near(loss.loss, 0.5 + np.log([0.5, 2.0]))
    slope = jax.grad(lambda s: jnp.sum(gaussian_reward_loss(mean, s, target).loss))(jnp.log(jnp.array([[0.5], [2.0]])))
    close.assert_near(slope, 0.0)  # sigma equals the error
    assert np.isfinite(gaussian_reward_loss(mean, jnp.array([[-1e9], [1e9]]), target).loss).all()


@pytest.mark.slow
def test_every_head_fits_its_own_bootstrap():
    key = jax.random.key(0)
    pairs, counts, noise = attribute_rewards.draw_bootstraps(text.LANGUAGE, key, 8, heads=3, flip_rate=0.1)
    assert counts.shape == (8, 3) and noise.shape == (8, 2, 3) and float(counts.min()) >= 0
    params = {"reward": attribute_rewards.init_reward(text.LANGUAGE, key, outputs=6)}
    value, _ = attribute_rewards.ensemble_loss(text.LANGUAGE, params, (pairs, counts, noise))
    both = [
        attribute_rewards.scores(text.LANGUAGE, params["reward"], pairs.prompts, x) for x in (pairs.first, pairs.second)
    ]
    expected = 0.0
    for h in range(3):
        drawn = [x[:, h] + jnp.exp(jnp.clip(x[:, 3 + h], -3, 1)) * noise[:, s, h] for s, x in enumerate(both)]
        expected += float(jnp.sum(counts[:, h] * bradley_terry_loss(*drawn).loss)) / 8
    # deviations learn how far a head lies from the mean of all, each without its own mean
    raw = np.concatenate([np.asarray(x, np.float64) for x in both])
    mean = raw[:, :3] - raw[:, :3].mean(0)
    gap = (mean - mean.mean(1, keepdims=True)) / np.exp(np.clip(raw[:, 3:], -5, 3))
    expected += (0.5 * gap**2 + np.clip(raw[:, 3:], -5, 3)).sum(1).mean()
    close.assert_near(value, expected, terms=200)
    assert not attribute_rewards.constant(text.LANGUAGE, params, pairs.prompts, pairs.first).any()


def test_deviations_learn_how_far_a_head_lies_from_all():
    """By preferences alone every deviation falls to its bound, and the surest head is always the first."""
    mean = jnp.array([[1.0, 2.0, 9.0], [3.0, 2.0, 5.0]])  # less their means: [-1, 0, 2], [1, 0, -2]
    spread = jnp.log(jnp.array([[4 / 3, 1 / 3, 5 / 3]] * 2))  # what they lie from 1/3 and -1/3
    slope = jax.grad(lambda x: jnp.sum(attribute_rewards.calibration(x)))(jnp.concatenate([mean, spread], axis=1))
    close.assert_near(slope, jnp.zeros((2, 6)))  # of the means none at all, of deviations none where they are right
    low = jax.grad(lambda x: jnp.sum(attribute_rewards.calibration(x)))(jnp.concatenate([mean, spread - 1], axis=1))
    assert (np.asarray(low)[:, 3:] < 0).all()  # too sure: they grow


def test_the_best_policy_at_a_kl_is_the_start_tilted():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(5, 32)) * np.array([[1.0], [2.0], [0.5], [0.0], [1.0]])
    for nats in (0.5, 1.0, 2.0):
        found = attribute_rewards.tilted_weights(jnp.asarray(scores, jnp.float32), nats)
        close.assert_near(jnp.sum(found, axis=1), np.ones(5), terms=32)
        # one t for all rows, found here on a grid in float64
        grid = np.exp(np.linspace(-3, 6, 200_001))
        low, high = 0, len(grid) - 1
        while high - low > 1:
            middle = (low + high) // 2
            w = np.exp(grid[middle] * (scores - scores.max(1, keepdims=True)))
            w /= w.sum(1, keepdims=True)
            spent = np.sum(np.where(w > 0, w * np.log(np.maximum(32 * w, 1e-300)), 0.0)) / 5
            low, high = (middle, high) if spent < nats else (low, middle)
        close.assert_near(found, w, terms=2**12)
        close.assert_near(found[3], np.full(32, 1 / 32))  # of equal scores
    # who has any other weights at that KL earns less: some tilted by other scores
    other = attribute_rewards.tilted_weights(jnp.asarray(scores + rng.normal(size=scores.shape), jnp.float32), 2.0)
    assert float(jnp.sum(other * scores)) < float(jnp.sum(found * scores))
    with pytest.raises(ValueError, match=r"nats=4.0 must lie between 0 and log\(32\) = 3.466; give more replies"):
        attribute_rewards.tilted_weights(jnp.zeros((2, 32)), 4.0)


def test_proxies_are_asked_of_the_same_replies(monkeypatch):
    task, asked = text.LANGUAGE, []

    def drawn(world, params, prompts, key, samples):
        asked.append(int(params))
        return task.draw_behaviour(key, prompts.shape[0] * samples)[1]

    monkeypatch.setattr(attribute_rewards.strings, "sample", drawn)
    params, key = {"start": 7, "model": 1}, jax.random.key(0)
    of = {
        proxy: attribute_rewards.tilted(proxy, (1.0, 3.0), prompts=8, samples=64)(task, params, key)
        for proxy in (attribute_rewards.constant, attribute_rewards.known)
    }
    plain, truth = of.values()
    assert plain.keys() == truth.keys() == {"tilted/utility_1", "tilted/utility_3"} and asked == [7, 7]
    prompts = jnp.repeat(task.draw_prompts(jax.random.fold_in(key, 0), 8), 64, axis=0)
    mean = jnp.mean(task.utility(prompts, task.draw_behaviour(jax.random.fold_in(key, 1), 512)[1]))
    for value in plain.values():  # a reward that says nothing leaves the start
        close.assert_near(value, mean, terms=512)
    assert float(mean) < float(truth["tilted/utility_1"]) < float(truth["tilted/utility_3"])
    # of one seed all arms are fitted to the same pairs
    own = brme.same_pairs(task, key, 6, **brme.BIASED)
    jax.tree.map(
        np.testing.assert_array_equal, own, attribute_rewards.draw_bootstraps(task, key, 6, heads=3, **brme.BIASED)[0]
    )
    assert brme.ARMS.keys() >= {"single", "brme"} and max(brme.TILTS) < np.log(brme.Settings().samples)


def test_loaded_weights_read_replies_in_parts(monkeypatch):
    task, key = text.LANGUAGE, jax.random.key(0)
    reward = attribute_rewards.init_reward(task, key, outputs=2)
    given = task.draw_behaviour(key, 7)
    seen = []

    def hidden(params, tokens, *rest):
        seen.append(tokens.shape[0])
        return task.world.policy.hidden(params, tokens, *rest)

    policy = task.world.policy._replace(hidden=hidden)
    loaded = task._replace(world=task.world._replace(policy=policy, start=lambda: reward["model"]))
    whole = attribute_rewards.scores(loaded, reward, *given)
    monkeypatch.setattr(attribute_rewards, "READ_AT_ONCE", 3)
    close.assert_near(attribute_rewards.scores(loaded, reward, *given), whole, terms=200)
    assert seen[0] == 7 and set(seen[1:]) == {3}


def test_a_useless_reward_is_drawn_with_the_seed():
    """What it pays is in the parameters, those of two seeds differ, and no gradient leads to it."""
    task = text.LANGUAGE
    prompts = jnp.zeros((2, text.PROMPT_TOKENS), jnp.int32)
    said = jnp.full((2, text.RESPONSE_TOKENS), text.END, jnp.int32).at[0, :3].set(jnp.array([8, 8, 20]))
    weights = jnp.zeros(task.size).at[8].set(0.25).at[20].set(-1.0).at[text.END].set(9.0)
    assert attribute_rewards.arbitrary(task, {"noise": weights}, prompts, said).tolist() == [-0.5, 0.0]
    settings = dataclasses.replace(brme.Settings(), **brme.SMOKE | brme.ARMS["random"])
    init = jax.jit(brme.build(settings, task).init)
    first, second = (init(jax.random.key(seed))["noise"] for seed in (0, 1))
    assert first.shape == (task.size,) and int((first == second).sum()) == 0
    slope = jax.grad(lambda noise: attribute_rewards.arbitrary(task, {"noise": noise}, prompts, said).sum())(first)
    assert not slope.any()
