"""Adversarial principles: who learns in a duel, what labelled examples change, and the strict judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import adversarial_rules as rules
from experiments.reward_models.parts import attribute_text as text


def test_worked_duels():
    start = rules.Strategies((), (0, 2))
    fooled = rules.duel(start, 5)
    assert fooled == rules.Strategies((), (0, 2, 5))
    assert rules.duel(fooled, 5) == rules.Strategies((5,), (0, 2, 5))


def test_at_most_ten_rules_without_repeats():
    assert len(rules.merged(range(10), (10,))) == 10
    assert rules.merged((3, 1, 3), (1, 2)) == (3, 1, 2)


def test_reflection_adds_and_drops():
    # rule 4: relevant >= 0.25
    quality, level = rules.RULES[4]
    assert text.NAMES[quality] == "relevant" and level == 0.25
    scores = [1.0, 1.0, 0.1, 1.0, 1.0]
    learnt = rules.reflected(rules.Strategies((), (0,)), scores, False)
    assert [rules.RULES[r][0] for r in learnt.rules] == [0, quality]
    assert rules.reflected(learnt, scores, True).rules == (0,)  # it was good after all: the rule goes
    assert rules.reflected(learnt, scores, False) == learnt  # already called bad


@pytest.mark.slow
def test_play_finds_rules_and_reflection_drops_the_strict_ones():
    found = rules.play((0, 2), rounds=12, examples=0)
    assert len(found.rules) == rules.MOST
    assert rules.play((0, 2), rounds=0).rules == (0, 2)
    assert rules.play((0, 2), rounds=12) == rules.play((0, 2), rounds=12)
    assert set(rules.play((0, 2), rounds=12).rules) != set(found.rules)


@pytest.mark.slow
def test_detector_and_strict_judge():
    scores = jnp.array([[1.0, 0.5, 0.5, 0.5, 0.9], [1.0, 0.0, 0.5, 0.5, 0.9]])
    assert rules.strict_label(scores).tolist() == [True, False]  # any defect: 0
    assert rules.kept_rules(scores, (0, 2, 3)).tolist() == [[True, True, True], [True, False, False]]
    prompts, replies = text.draw_behaviour(jax.random.key(0), 30)
    detector = rules.make_detector((0, 2, 3))
    found = text.attributes(prompts, replies)
    expected = [np.mean([not rules.breaks(row.tolist(), r) for r in (0, 2, 3)]) for row in np.asarray(found)]
    np.testing.assert_allclose(detector(None, prompts, replies), expected, atol=1e-6)
    with pytest.raises(ValueError, match="without rules"):
        rules.make_detector(())


@pytest.mark.slow
def test_labels_order_pairs():
    pairs = rules.draw_labelled_pairs(jax.random.key(0), 400, error_rate=0.0, strict=True)
    first, second = (rules.strict_label(text.attributes(pairs.prompts, x)) for x in (pairs.first, pairs.second))
    assert not (second & ~first).any() and (first & ~second).any()
