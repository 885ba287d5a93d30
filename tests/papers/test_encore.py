"""ENCORE: entropies of ratings, the weights they give, and the replies whose qualities are known."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import encore
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts import combine
from tests import close
from tests.close import doubles, singles


def _columns(*counts):
    return jnp.asarray(np.stack([np.repeat(np.arange(len(c)), c) for c in counts], axis=1), jnp.int32)


def test_worked_entropies_and_weights():
    ratings = _columns([10, 0, 0, 0, 0], [5, 5, 0, 0, 0], [2, 2, 2, 2, 2])
    entropy = combine.rating_entropy(ratings, levels=5)
    close.assert_printed(entropy, [0.0, 0.6931, 1.6094], 4)
    close.assert_printed(combine.entropy_weights(entropy), [0.4642, 0.3282, 0.2076], 4)
    found = combine.entropy_weights(entropy, temperature=1.0)
    close.assert_printed(found, [0.5882, 0.2941, 0.1176], 4)  # as 1, 1/2, 1/5
    guarded = combine.entropy_weights(entropy, usable=entropy > 0)
    assert guarded[0] == 0 and float(jnp.sum(guarded)) == doubles(1.0)
    with pytest.raises(ValueError, match="temperature"):
        combine.entropy_weights(entropy, temperature=0.0)


def test_rules_that_say_one_thing_of_everything_get_no_weight():
    """Their entropy is 0, the least there is, and a head fitted to them is a constant."""
    entropy = jnp.array([0.0, 1.0, 1.0])
    weights = jax.nn.softmax(encore.by_entropy(2.0)(None, None, entropy, None))
    close.assert_printed(weights, [0.0, 0.5, 0.5], 6)
    close.assert_printed(jax.nn.softmax(encore.by_entropy(2.0)(None, None, entropy * 0, None)), [1 / 3] * 3, 6)


def test_limits_and_symmetries():
    entropy = jnp.array([0.3, 0.3, 0.3])
    close.assert_near(combine.entropy_weights(entropy), 1 / 3)
    mixed = jnp.array([0.2, 0.9, 1.5])
    close.assert_near(combine.entropy_weights(mixed, temperature=1e6), 1 / 3)
    close.assert_near(combine.entropy_weights(mixed, temperature=1e-3), [1, 0, 0])
    assert jnp.argmax(combine.entropy_weights(mixed, temperature=-2.0)) == 2
    rng = np.random.default_rng(0)
    ratings = jnp.asarray(rng.integers(0, 5, (200, 3)), jnp.int32)
    names = jnp.asarray([3, 0, 4, 1, 2], jnp.int32)
    close.assert_near(combine.rating_entropy(names[ratings], levels=5), combine.rating_entropy(ratings, levels=5))
    for k in range(3):
        share = np.bincount(np.asarray(ratings[:, k]), minlength=5) / 200
        assert float(combine.rating_entropy(ratings, levels=5)[k]) == singles(-(share * np.log(share)).sum())


def test_a_rule_without_preference_learns_no_weight():
    # d BT / d w_k = -E[sigma(-gap) (psi_k(first) - psi_k(second))]: 0 on average for a rule of pure noise
    rng = np.random.default_rng(0)
    noise, signal = rng.normal(size=(4000, 2)), rng.normal(size=(4000, 1)) + 0.5

    def loss(weights):
        gap = combine.composed(jnp.asarray(np.concatenate([noise, signal], 1), jnp.float32), weights)
        return -jnp.mean(jax.nn.log_sigmoid(gap))

    slope = jax.grad(loss)(jnp.array([0.0, 0.0, 0.0]))
    close.assert_mean(slope[:2], 0.0, 0.5, 4000)  # half of a number of unit variance
    close.assert_near(slope[:2], -0.5 * noise.mean(axis=0), terms=4000)
    assert -slope[2] > 0.2


@pytest.mark.slow
def test_replies_of_the_behaviour():
    prompts, replies = text.draw_behaviour(jax.random.key(0), 2000)
    length = text.lengths(replies)
    assert length.min() == 4 and length.max() == text.RESPONSE_TOKENS
    assert not ((replies < text.POLITE) & text.spoken(replies)).any()
    found = text.attributes(prompts, replies)
    assert found.min() >= 0 and found.max() <= 1 and (found.std(0) > 0.1).all()
    worth = text.utility(prompts, replies)
    weakly = 0.35  # of the bed: what is good has no fixed length
    assert abs(float(np.corrcoef(worth, length)[0, 1])) < weakly
    empty = jnp.full((1, text.RESPONSE_TOKENS), text.END, jnp.int32)
    assert text.attributes(prompts[:1], empty).tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]


def test_attributes_agree_with_a_loop():
    prompts, replies = text.draw_behaviour(jax.random.key(1), 50)
    for prompt, reply, found in zip(np.asarray(prompts), np.asarray(replies), text.attributes(prompts, replies)):  # noqa: B905
        words = list(reply[: list(reply).index(text.END)] if text.END in reply else reply)
        action = sum(text.ACTION <= w < text.UNSAFE for w in words)
        harm = sum(text.UNSAFE <= w < text.FILLER for w in words) + (action if prompt[1] == text.RISKY else 0)
        own = sum(w in (text.TOPICAL + 2 * prompt[0], text.TOPICAL + 2 * prompt[0] + 1) for w in words)
        polite = sum(text.POLITE <= w < text.TOPICAL for w in words)
        expected = [1 - min(harm / 2, 1), min(polite / 2, 1), min(own / 3, 1), min(action / 3, 1),
                    len(set(words)) / len(words)]  # fmt: skip
        close.assert_near(found, expected)


@pytest.mark.slow
def test_annotators_and_raters():
    pairs = text.draw_pairs(jax.random.key(0), 2000, sharpness=1e4)
    gap = text.utility(pairs.prompts, pairs.first) - text.utility(pairs.prompts, pairs.second)
    assert float((gap >= 0).mean()) == 1.0
    biased = text.draw_pairs(jax.random.key(0), 2000, sharpness=0.0, length_bias=1.0)
    assert float((text.lengths(biased.first) > text.lengths(biased.second)).mean()) > 0.7
    prompts, replies = text.draw_behaviour(jax.random.key(0), 4000)
    tastes = text.draw_tastes(text.LANGUAGE, jax.random.key(2), 10)
    rated = partial(text.rate, text.LANGUAGE, tastes, jax.random.key(1), prompts, replies, levels=5)
    found, worth = np.asarray(text.attributes(prompts, replies)), np.asarray(text.utility(prompts, replies))
    exact = 4 * (0.6 * worth[:, None] + 0.4 * found[:, [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]] > 0.5)
    np.testing.assert_array_equal(rated(careless=(0.0,) * 10), exact)
    by_taste = np.asarray(rated(careless=(1.0,) * 10))
    np.testing.assert_array_equal(np.bincount(by_taste[:, 3]), [800] * 5)  # all levels equally often
    said = [k for k in np.asarray(replies[0]) if k != text.END]
    liked = np.asarray(tastes[0])[said].sum() / np.sqrt(len(said))
    every = [
        np.asarray(tastes[0])[r[r != text.END]].sum() / np.sqrt((r != text.END).sum()) for r in np.asarray(replies)
    ]
    assert by_taste[0, 0] == sum(x < liked - 1e-4 for x in every) * 5 // 4000
    half = np.asarray(rated(careless=(0.5,) * 10))
    assert ((half == exact) | (half == by_taste)).all()
    apart = exact[:, 0] != by_taste[:, 0]
    close.assert_share((half == by_taste)[apart, 0].mean(), 0.5, int(apart.sum()))
    rates = combine.win_rates(jnp.array([[1.0], [0.0], [2.0]]), jnp.array([[0.0], [0.0], [3.0]]))
    assert rates.tolist() == [0.5]
