"""PF-PPO: weights of each filter, the reliability that ranks them, and the average over resampled buffers."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient import pf_ppo
from experiments.policy_gradient.parts import linear_reward_model
from jaxrl_llm.advantages import selection, whiten
from jaxrl_llm.experiment import curricula, recipes
from tests import close

rng = np.random.default_rng(6)
IDS = jnp.zeros(5, jnp.int32)
SCORES = jnp.array([0.1, 0.9, 0.3, 0.2, 0.0])


def test_weights_of_the_filters():
    """BR of five: .5 for the best, .125 for the others; BW: two of a prompt; BoN: one; |R|^2 of .9, -.3, .1."""
    shares = {f: f(SCORES, IDS) / f(SCORES, IDS).sum() for f in (
        selection.best_random_weights, selection.best_worst_weights, selection.best_weights)}  # fmt: skip
    wanted = [0.125, 0.5, 0.125, 0.125, 0.125], [0, 0.5, 0, 0, 0.5], [0, 1, 0, 0, 0]
    for got, want in zip(shares.values(), wanted, strict=True):
        close.assert_near(got, want)
    power = selection.power_weights(jnp.array([0.9, -0.3, 0.1]), jnp.zeros(3, jnp.int32))
    close.assert_printed(power / power.sum(), [0.8901, 0.0989, 0.0110], 4)
    # two prompts are filtered apart, whatever their level
    two = selection.best_worst_weights(jnp.array([1.0, 2.0, 3.0, 11.0, 12.0, 13.0]), jnp.array([0, 0, 0, 1, 1, 1]))
    assert two.tolist() == [1, 0, 1, 1, 0, 1]


def test_reliability_prefers_the_ends():
    """A score that is noise in the middle: R^2 of best and worst exceeds that of all."""
    score, truth = jnp.array([0.1, 0.4, 0.8]), jnp.array([0.0, 0.0, 1.0])
    close.assert_printed(selection.reliability(score, truth, jnp.ones(3)), 0.8176, 4)
    scores = jnp.asarray(rng.normal(size=400), jnp.float32)
    right = jnp.where(jnp.abs(scores) < 1, jnp.asarray(rng.random(400) < 0.5), scores > 0).astype(jnp.float32)
    ids = jnp.arange(400, dtype=jnp.int32) // 5
    every, ends = selection.equal_weights(scores, ids), selection.best_worst_weights(scores, ids)
    assert selection.reliability(scores, right, ends) > selection.reliability(scores, right, every) + 0.1


def test_whitening_of_what_is_kept():
    """Integer weights are copies: the same as whitening the buffer with its rows written out."""
    values, mask = rng.normal(size=(4, 3)), rng.random((4, 3)) < 0.8
    weights = np.array([2, 0, 1, 3])
    got = whiten.reweighted_tokens(
        jnp.asarray(np.where(mask, values, np.nan), jnp.float32), jnp.asarray(weights, jnp.float32), jnp.asarray(mask)
    )
    copies = np.repeat(values, weights, axis=0)[np.repeat(mask, weights, axis=0)]
    want = np.where(mask, (values - copies.mean()) / copies.std(), 0.0)
    close.assert_near(got, want)
    plain = whiten.whitened_tokens(jnp.asarray(values, jnp.float32), jnp.asarray(mask))
    same = whiten.reweighted_tokens(jnp.asarray(values, jnp.float32), jnp.full(4, 0.3), jnp.asarray(mask))
    close.assert_near(same, plain)
    nothing = whiten.reweighted_tokens(jnp.asarray(values, jnp.float32), jnp.zeros(4), jnp.asarray(mask))
    np.testing.assert_array_equal(nothing, jnp.zeros((4, 3)))


def test_expected_counts_are_the_mean_of_resampled_buffers():
    weights = selection.best_random_weights(SCORES, IDS)
    uniforms = jax.random.uniform(jax.random.key(0), (4000, 5))
    rows = jax.vmap(lambda u: selection.resampled(weights, u))(uniforms)
    counts = jnp.sum(jax.nn.one_hot(rows, 5), axis=(0, 1)) / 4000
    close.assert_share(counts / 5, selection.expected_counts(weights) / 5, 5 * 4000)


def test_noise_belongs_to_the_response_and_has_its_deviation():
    features = jnp.asarray(rng.normal(size=(4000, 3)), jnp.float32)
    model = linear_reward_model.LinearReward(jnp.array([1.0, 0.0, 0.0]), jnp.float32(0), jnp.float32(1))
    plain, found = pf_ppo.fitted(model, features, None), pf_ppo.noisy(model, features, None, deviation=2.0)
    noise = np.asarray((found - plain) / 2)
    again = pf_ppo.noisy(model, features[::-1], None, deviation=2.0)[::-1]
    np.testing.assert_array_equal(found, again)
    close.assert_share((np.abs(noise) < 1).mean(), 0.6827, 4000)
    close.assert_share((noise > 0).mean(), 0.5, 4000)
    np.testing.assert_array_equal(pf_ppo.noisy(model, features, None, deviation=0.0), plain)


def test_one_response_each_is_as_many_rollouts():
    settings = pf_ppo.Settings(prompts_per_step=7, group_size=3)
    alone = pf_ppo.ARMS["ppo_s"]["drawn"](settings)
    assert (alone.prompts_per_step, alone.group_size) == (21, 1) and pf_ppo.several_each(settings) is settings


def test_the_reward_model_reads_a_part_of_its_samples_at_a_time_and_is_measured_on_other_problems(monkeypatch):
    settings = pf_ppo.Settings(levels=(1,), train_problems=16, eval_problems=4, max_new_tokens=10, prompts_per_step=2,
                               group_size=5, fit_problems=4)  # fmt: skip
    asked, seen = [], []
    train_score, fit_linear = curricula.train_score, linear_reward_model.fit_linear

    def judged(found):
        judge = train_score(found)
        return lambda answers, rows: asked.append(rows.problem_ids) or judge(answers, rows)

    monkeypatch.setattr(curricula, "train_score", judged)
    monkeypatch.setattr(
        linear_reward_model,
        "fit_linear",
        lambda *given, valid: seen.append((*given, valid)) or fit_linear(*given, valid=valid, steps=2),
    )
    for at_once in (128, 3):
        monkeypatch.setattr(pf_ppo, "AT_ONCE", at_once)
        (stage,) = pf_ppo.build(settings).stages
        stage.extras(None, jax.random.key(0))
    assert [ids.tolist() for ids in asked[:2]] == [[k for k in range(a, a + 4) for _ in range(5)] for a in (0, 4)]
    assert asked[2].shape == (15,), "three problems of five responses are judged together"
    (whole, truth, groups, known), (parts, truth_2, groups_2, _) = seen
    assert known.all()
    bench = recipes.bench(settings)
    width = bench.train.tokens.shape[1] + 10
    close.assert_same_sums(parts, whole, 10 * close.forward_sums(bench.model.config, width))
    np.testing.assert_array_equal(truth, truth_2)
    np.testing.assert_array_equal(groups, groups_2)
    assert groups.tolist() == [k for k in range(4) for _ in range(5)]
