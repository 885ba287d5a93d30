"""Multi-label GRPO: sums of labels, labels normalised one by one, and their regression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import safe_grpo
from experiments.reward_models.parts import attribute_rewards, combine
from experiments.reward_models.parts import attribute_text as text
from jaxrl_llm.advantages import group
from jaxrl_llm.losses.reward import label_regression_loss
from tests import close
from tests.close import doubles

LABELS, PAIR = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.zeros(2, jnp.int32)


def _advantages(weights):
    return group.group_normalized_advantages(combine.composed(LABELS, jnp.asarray(weights)), PAIR, eps=0.0)


def test_worked_weights():
    close.assert_near(_advantages([0.5, 0.5]), [0.0, 0.0])
    close.assert_printed(_advantages([0.75, 0.25]), [0.7071, -0.7071], 4)
    each = group.per_label_advantages(LABELS, PAIR, jnp.array([0.5, 0.5]), eps=0.0)
    close.assert_near(each, [0.0, 0.0])
    close.assert_near(
        _advantages([1.0, 0.0]), group.group_normalized_advantages(LABELS[:, 0], PAIR, eps=0.0), magnitude=0
    )


def test_labels_one_by_one_agree_with_a_loop():
    rng = np.random.default_rng(0)
    labels, ids, weights = rng.random((12, 3)), np.repeat(np.arange(3), 4), np.array([0.2, 0.5, 0.3])
    expected = np.zeros(12)
    for g in range(3):
        own = labels[ids == g]
        expected[ids == g] = ((own - own.mean(0)) / own.std(0, ddof=1)) @ weights
    given = jnp.asarray(labels, jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)
    close.assert_near(group.per_label_advantages(*given, eps=0.0), expected)
    # a label of small spread counts as much as the others only here
    small = labels * np.array([1.0, 1e-3, 1.0])
    again = group.per_label_advantages(jnp.asarray(small, jnp.float32), *given[1:], eps=0.0)
    close.assert_near(again, expected, magnitude=10.0)  # labels over their spread
    # a constant added to any label changes nothing
    moved = group.per_label_advantages(given[0] + 5.0, *given[1:], eps=0.0)
    close.assert_near(moved, expected)


def test_gdpo_agrees_with_a_loop_and_with_what_it_is_made_of():
    """In float64: every reward within the group, NaN left out, the weighted sum over the batch."""
    rng = np.random.default_rng(1)
    labels, ids, weights = rng.random((12, 3)), np.repeat(np.arange(3), 4), np.array([0.2, 0.5, 0.3])
    labels[5, 1] = labels[9, 2] = np.nan
    valid = np.arange(12) != 3
    total = np.zeros(12)
    for g in range(3):
        for k in range(3):
            own = (ids == g) & valid & np.isfinite(labels[:, k])
            total[own] += weights[k] * (labels[own, k] - labels[own, k].mean()) / (labels[own, k].std(ddof=1) + 1e-4)
    expected = np.where(valid, (total - total[valid].mean()) / (total[valid].std(ddof=1) + 1e-4), 0.0)
    given = jnp.asarray(labels, jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)
    found = group.gdpo_advantages(*given, valid=jnp.asarray(valid))
    close.assert_near(found, expected)
    # equal sums, other rewards: GRPO of the sum has nothing to say, this has where spreads differ
    parts = jnp.array([[1.0, 0.0], [0.5, 0.5], [0.9, 0.1], [0.0, 0.7]])
    apart = group.gdpo_advantages(parts, jnp.zeros(4, jnp.int32), jnp.ones(2))
    assert len(np.unique(np.asarray(apart)[:3])) == 3


def test_regression_leaves_missing_labels_out():
    predicted, targets = jnp.array([[0.5, 0.9], [0.2, 0.4]]), jnp.array([[1.0, jnp.nan], [0.0, 0.0]])
    there = jnp.array([[True, False], [True, True]])
    terms = label_regression_loss(predicted, targets, there)
    close.assert_near(terms.loss, [0.25, 0.1])
    slope = jax.grad(lambda p: jnp.sum(label_regression_loss(p, targets, there).loss))(predicted)
    close.assert_near(slope, [[-1.0, 0.0], [0.2, 0.4]])
    assert float(label_regression_loss(predicted, targets, there & False).loss[0]) == doubles(0.0)


def test_raters_and_what_is_missing():
    prompts, responses, labels, there = safe_grpo.draw_rated(safe_grpo.honest)(text.LANGUAGE, jax.random.key(0), 500)
    truth = text.attributes(prompts, responses)[:, :4]
    raters = 0.1  # how far they are from the truth, on average, at most
    assert 0.86 < float(there.mean()) < 0.94 and float(jnp.abs(labels - truth).mean()) < raters
    lengths = np.array([sum(1 for t in row if t != text.END) for row in np.asarray(responses).tolist()])
    fooled = np.asarray(safe_grpo.by_length(text.LANGUAGE, prompts, responses))
    close.assert_near(fooled[:, 3], lengths / 12)
    np.testing.assert_array_equal(fooled[:, :3], truth[:, :3])
    harmed = np.asarray(safe_grpo.by_harm(text.LANGUAGE, prompts, responses))
    np.testing.assert_array_equal(harmed[:, :2], truth[:, :2])
    np.testing.assert_array_equal(harmed[:, 2:], np.maximum(truth[:, 2:], 1 - np.asarray(truth)[:, :1]))
    shortest = jnp.full((1, text.RESPONSE_TOKENS), text.END, jnp.int32).at[0, :2].set(text.UNSAFE)
    assert safe_grpo.by_harm(text.LANGUAGE, prompts[:1], shortest).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    # the head can be hacked only because length goes with actions where it is fitted
    assert np.corrcoef(lengths, np.asarray(truth)[:, 3])[0, 1] > 0.2


@pytest.mark.slow
def test_the_reward_is_the_weighted_mean_of_bounded_heads():
    params = {"reward": attribute_rewards.init_reward(text.LANGUAGE, jax.random.key(0), outputs=4)}
    prompts, replies = text.draw_behaviour(jax.random.key(1), 6)
    raw = np.asarray(attribute_rewards.scores(text.LANGUAGE, params["reward"], prompts, replies), np.float64)
    heads = 1 / (1 + np.exp(-raw))
    close.assert_near(safe_grpo.every_label(text.LANGUAGE, params, prompts, replies), heads)
    for weights in ((0.25,) * 4, (0.55, 0.15, 0.15, 0.15), (1.0, 0.0, 0.0, 0.0)):
        found = safe_grpo.weighted(weights)(text.LANGUAGE, params, prompts, replies)
        close.assert_near(found, heads @ np.array(weights))
    # a label that is missing pulls at nothing: its head's column has no gradient
    there = jnp.ones((6, 4), bool).at[:, 2].set(False)
    rows = (prompts, replies, jnp.full((6, 4), 0.5), there)
    slope = jax.grad(lambda p: safe_grpo.fit_labels(text.LANGUAGE, p, rows)[0])(params)["reward"]["head"]
    columns = [float(jnp.abs(x[..., 2]).max()) for x in jax.tree.leaves(slope)]
    assert columns and not any(columns) and any(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(slope))
