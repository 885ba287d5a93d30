"""Adversarial principles: who learns in a duel, what labelled examples change, and the strict judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import adversarial_rules as rules
from experiments.reward_models.parts import attribute_rewards
from experiments.reward_models.parts import attribute_text as text
from tests import close


def _held(stamps):
    return [int(k) for k in np.argsort(np.asarray(stamps)) if stamps[k] > 0]


def test_worked_duels():
    start = rules.started((0, 2))
    fooled = rules.duel(start, jnp.array(5))
    assert set(_held(fooled.rules)) == {0, 2, 5} and not fooled.avoided.any()
    seen = rules.duel(fooled, jnp.array(5))
    assert _held(seen.avoided) == [5] and _held(seen.rules) == _held(fooled.rules)
    with pytest.raises(ValueError, match="without rules"):
        rules.started(())


def test_at_most_ten_of_fifty_rules_and_the_oldest_goes():
    assert len(rules.RULES) == 50 > rules.MOST == 10
    stamps = rules.started((7,)).rules
    for k, rule in enumerate(range(10, 22)):
        stamps = rules.learnt(stamps, jnp.array(rule), jnp.array(2 + k))
    assert _held(stamps) == list(range(12, 22))
    again = rules.learnt(stamps, jnp.array(15), jnp.array(99))
    assert (again == stamps).all()


def test_reflection_adds_and_drops():
    relevant = [k for k, (quality, level) in enumerate(rules.RULES) if text.NAMES[quality] == "relevant"]
    scores = jnp.array([1.0, 1.0, 0.1, 1.0, 1.0])
    taught = rules.reflected(rules.started((0,)), scores, jnp.array(False))
    # of the rules on the worst quality the one that asks for least: relevant >= 0.15
    assert _held(taught.rules) == [0, relevant[1]] and rules.RULES[relevant[1]][1] == 0.15
    assert _held(rules.reflected(taught, scores, jnp.array(True)).rules) == [0]  # it was good after all: the rule goes
    assert _held(rules.reflected(taught, scores, jnp.array(False)).rules) == _held(taught.rules)  # called bad already
    perfect = rules.reflected(rules.started((0,)), jnp.ones(5), jnp.array(False))
    assert _held(perfect.rules) == [0], "what breaks no rule explains nothing"


def test_play_differs_by_seed_and_reflection_drops_the_strict_ones():
    games = jax.jit(
        lambda key, n: rules.play(text.LANGUAGE, key, (2, 12), rounds=4, duels=12, examples=3 * n).rules,
        static_argnums=1,
    )
    found = [np.asarray(games(jax.random.key(seed), 0)) > 0 for seed in (0, 1)]
    assert all(x.sum() == rules.MOST for x in found) and (found[0] != found[1]).any()
    assert _held(rules.play(text.LANGUAGE, jax.random.key(0), (2, 12), rounds=0).rules) == [2, 12]
    strict = np.asarray([level for _, level in rules.RULES])
    kept = np.stack([np.asarray(games(jax.random.key(seed), 4)) > 0 for seed in range(8)])
    wild = np.stack([np.asarray(games(jax.random.key(seed), 0)) > 0 for seed in range(8)])
    mean = [np.mean([strict[row].mean() for row in rows if row.any()]) for rows in (kept, wild)]
    assert mean[0] < mean[1], "examples of good replies take out the rules that ask too much"


def test_a_detector_reads_what_its_reader_sees():
    scores = jnp.array([[1.0, 0.5, 0.5, 0.5, 0.9], [1.0, 0.0, 0.5, 0.5, 0.9]])
    assert rules.strict_label(scores).tolist() == [True, False]  # any defect: 0
    chosen = jnp.zeros(50, bool).at[jnp.array([0, 12, 13])].set(True)
    close.assert_near(rules.kept_share(scores, chosen), [1.0, 1 / 3])
    assert rules.kept_share(scores, chosen & ~chosen).tolist() == [1.0, 1.0]
    prompts, replies = text.draw_behaviour(jax.random.key(0), 6)
    reward = attribute_rewards.init_reward(text.LANGUAGE, jax.random.key(1), outputs=5)
    params = {"reward": reward, "rules": chosen.astype(jnp.float32)}
    read = jnp.clip(attribute_rewards.scores(text.LANGUAGE, reward, prompts, replies), 0.0, 1.0)
    close.assert_near(rules.detector(text.LANGUAGE, params, prompts, replies), rules.kept_share(read, chosen))


@pytest.mark.slow
def test_labels_order_pairs():
    pairs = rules.draw_labelled_pairs(text.LANGUAGE, jax.random.key(0), 400, error_rate=0.0, strict=True)
    first, second = (rules.strict_label(text.attributes(pairs.prompts, x)) for x in (pairs.first, pairs.second))
    assert not (second & ~first).any() and (first & ~second).any()
