"""RPO's two forms against float64 loops and their gradients; the toy preferences behind the experiment."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import preference_task as toy
from experiments.parts import strings
from jaxrl_llm.losses import preference
from tests import close
from tests.close import singles

RNG = np.random.default_rng(0)
FOUR = [RNG.uniform(-60, -5, 9) for _ in range(4)]
BASELINE, TOKENS = RNG.uniform(-60, -5, 9), RNG.integers(1, 30, 9).astype(float)


def _jax(*arrays):
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def _dpo(w, y, rw, ry, beta):
    h = beta * ((w - rw) - (y - ry))
    return math.log1p(math.exp(-h)) if h > -30 else -h


def test_forms_against_float64():
    rows = list(zip(*FOUR, BASELINE, TOKENS, strict=True))
    found = preference.rpo_loss(*_jax(*FOUR), beta=0.1, eta=0.2, baseline_logp=_jax(BASELINE)[0]).loss
    expected = [_dpo(w, y, rw, ry, 0.1) - 0.2 * 0.1 * b for w, y, rw, ry, b, _ in rows]
    close.assert_near(found, expected, magnitude=0)
    found = preference.rpo_mean_loss(*_jax(*FOUR), *_jax(TOKENS), beta=0.1, weight=0.2).loss
    expected = [_dpo(w, y, rw, ry, 0.1) - 0.2 * w / n for w, y, rw, ry, _, n in rows]
    close.assert_near(found, expected, magnitude=0)


def test_forms_agree_at_one_length():
    """eta beta times the sum is weight times the mean where weight = eta beta T."""
    lengths = jnp.full((9,), 12.0)
    left = preference.rpo_loss(*_jax(*FOUR), beta=0.1, eta=0.5).loss
    right = preference.rpo_mean_loss(*_jax(*FOUR), lengths, beta=0.1, weight=0.5 * 0.1 * 12).loss
    close.assert_near(left, right, magnitude=0)


def test_gradients():
    """The rejected response feels DPO alone; a baseline takes the extra pull of eta beta from the chosen one."""
    w, y, rw, ry = _jax(*FOUR)
    base = _jax(BASELINE)[0]

    def slopes(f):
        return jax.grad(lambda *x: jnp.sum(f(*x)), argnums=(0, 1, 2))(w, y, base)

    dpo = slopes(lambda w, y, b: preference.dpo_loss(w, y, rw, ry, beta=0.1).loss)
    rpo = slopes(lambda w, y, b: preference.rpo_loss(w, y, rw, ry, beta=0.1, eta=0.3).loss)
    other = slopes(lambda w, y, b: preference.rpo_loss(w, y, rw, ry, beta=0.1, eta=0.3, baseline_logp=b).loss)
    mean = slopes(lambda w, y, b: preference.rpo_mean_loss(w, y, rw, ry, _jax(TOKENS)[0], beta=0.1, weight=0.3).loss)
    for found in (rpo, other, mean):
        close.assert_near(found[1], dpo[1])
    close.assert_near(rpo[0] - dpo[0], np.full(9, -0.03))
    close.assert_near(other[0], dpo[0])
    close.assert_near(other[2], np.full(9, -0.03))
    close.assert_near(mean[0] - dpo[0], -0.3 / TOKENS)


def test_texts_are_counted_to_their_end():
    """Of a table as wide as its longest text; ten tokens and one are not both as long as the table."""
    short = jnp.asarray([[5, 6, 9, 9], [9, 9, 9, 9], [5, 6, 7, 8]])
    world = toy.STRINGS.world._replace(end=9, response_tokens=4)
    assert strings.token_counts(world, short) == 4  # generated strings are of one length
    text = world._replace(start=lambda: {})
    assert strings.token_counts(text, short).tolist() == [3, 1, 4]


def test_an_empty_response_is_harmless():
    z = jnp.zeros(1)
    assert float(preference.rpo_mean_loss(z, z, z, z, z).loss[0]) == singles(math.log(2))


def _gold(prompt, response):
    total = 0.0
    for k, token in enumerate(response):
        if 4 <= token < 31:
            total += (token % 4 == prompt[0]) - (token % 4 == (prompt[0] + 1) % 4)
        total -= 0.1 * (k > 0 and token == response[k - 1])
    return total


def test_gold_against_a_loop():
    prompts, responses = RNG.integers(0, 4, (50, 4)), RNG.integers(0, 32, (50, 12))
    responses[:, 5] = responses[:, 4]
    found = toy.gold_reward(jnp.asarray(prompts, jnp.int32), jnp.asarray(responses, jnp.int32))
    expected = [_gold(p, r) for p, r in zip(prompts.tolist(), responses.tolist(), strict=True)]
    close.assert_near(found, expected)


def test_data():
    pairs = jax.jit(lambda k: toy.draw_pairs(k, 2000))(jax.random.key(0))
    both = jnp.concatenate([pairs.chosen, pairs.rejected])
    assert not toy.uncovered(both).any() and set(np.unique(both)) == {*range(4, 24), 31}
    gold = toy.gold_reward(pairs.prompts, pairs.chosen), toy.gold_reward(pairs.prompts, pairs.rejected)
    assert float(gold[0].mean() - gold[1].mean()) > 1.0
    # style goes with the gold reward in the data, though it is worth nothing
    count = jnp.sum((both == toy.STYLE).astype(jnp.float32), axis=1)
    assert float(jnp.corrcoef(count, jnp.concatenate(gold))[0, 1]) > 0.1


def test_labels_follow_bradley_terry_and_flips():
    gold = {}
    for rate in (0.0, 0.3):
        pairs = toy.draw_pairs(jax.random.key(1), 4000, flip_rate=rate)
        gap = toy.gold_reward(pairs.prompts, pairs.chosen) - toy.gold_reward(pairs.prompts, pairs.rejected)
        size = np.abs(np.asarray(gap, np.float64))
        gold[rate] = np.mean(np.asarray(gap) > 0), np.mean((1 - rate) / (1 + np.exp(-size)) + rate / (1 + np.exp(size)))
        ties = np.mean(size == 0)
        close.assert_share(gold[rate][0] + ties / 2, gold[rate][1], 4000)
    with pytest.raises(ValueError, match="flip_rate"):
        toy.draw_pairs(jax.random.key(1), 4, flip_rate=0.5)
