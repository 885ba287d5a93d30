"""Episodic memory: worked numbers, overwriting, a plain-Python memory, empty memories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import episodic_memory
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from tests import close

rng = np.random.default_rng(13)


def _units(n, d=6):
    x = rng.normal(size=(n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_against_a_list_of_lists():
    """Three queries in room for two, five responses in room for three: the oldest go."""
    keys = _units(3)
    which = np.array([0, 0, 1, 0, 0, 0, 1, 2, 2, 0])
    responses, chosen = _units(10), rng.random(10) < 0.8
    opened = 0
    slots: list = [None, None]
    for k, response, wanted in zip(which, responses, chosen, strict=True):
        if not wanted:
            continue
        found = next((s for s in slots if s is not None and s[0] == k), None)
        if found is None:
            found = slots[opened % 2] = (k, [])
            opened += 1
        found[1].append(response)
    got = episodic_memory.remembered(
        episodic_memory.empty_memory(2, 3, 6),
        *(jnp.asarray(x, jnp.float32) for x in (keys[which], responses)),
        jnp.asarray(chosen),
    )
    for asked in range(3):
        probe = _units(1)
        near, found = episodic_memory.closeness(
            got, *(jnp.asarray(x, jnp.float32) for x in (keys[asked : asked + 1], probe))
        )
        held = [s for s in slots if s is not None]
        nearest = max(held, key=lambda s: float(keys[s[0]] @ keys[asked]))
        want = max(float(probe[0] @ r) for r in nearest[1][-3:])
        assert bool(found[0])
        close.assert_near(near[0], want, terms=probe.size)
    assert int(got.opened) == opened


def test_worked_example_of_rewards():
    """Bank {[1, 0], [0, 1]}, response [0.6, 0.8]: closeness 0.8, novelty 0.2."""
    key, bank = jnp.array([[1.0, 0.0]]), jnp.eye(2)
    full = episodic_memory.remembered(
        episodic_memory.empty_memory(2, 4, 2), jnp.repeat(key, 2, axis=0), bank, jnp.array([True, True])
    )
    empty = episodic_memory.empty_memory(2, 4, 2)
    responses = jnp.array([[0.6, 0.8], [1.0, 0.0], [0.7071068, 0.7071068]])
    queries, ids = jnp.repeat(key, 3, axis=0), jnp.zeros(3, jnp.int32)
    near, _ = episodic_memory.closeness(full, queries, responses)
    half = np.sqrt(0.5)
    close.assert_near(near, [0.8, 1.0, half])
    histories = (episodic_memory.first_history(),) * 2

    def paid(successes, failures, **weights):
        terms = episodic_memory.nearness(successes, failures, queries, responses)
        return episodic_memory.paid(terms, histories, ids, **({"resemble": 0.0, "avoid": 0.0} | weights))[0]

    close.assert_near(paid(full, empty, resemble=1.0), [(0.8 - half) / (1 - half), 1.0, 0.0])
    close.assert_near(paid(empty, full, avoid=1.0), [1 - (0.8 - half) / (1 - half), 0.0, 1.0])
    # nothing remembered: GRPO's rewards are left alone
    assert not np.asarray(paid(empty, empty, resemble=1.0, avoid=1.0)).any()
    assert not np.asarray(episodic_memory.group_min_max(jnp.full(3, 0.3), ids)).any()


def test_embedding_counts_ngrams():
    tokens = jnp.array([[5, 6, 7, 5, 6], [9, 9, 5, 6, 7], [5, 6, 7, 5, 6]], jnp.int32)
    mask = jnp.array([[True] * 5, [False, False, True, True, True], [True, False, False, False, False]])
    got = episodic_memory.ngram_embedding(tokens, mask, width=512)
    close.assert_near(jnp.sum(got**2, axis=1), [1.0, 1.0, 0.0])
    # (5,6) twice, (6,7), (7,5) against (5,6), (6,7): cosine 3 / sqrt(6 * 2)
    close.assert_near(got[0] @ got[1], 3 / np.sqrt(12))
    # where the text stands in the row does not matter
    shifted = episodic_memory.ngram_embedding(tokens[1:2, 2:], jnp.ones((1, 3), bool), width=512)
    close.assert_near(shifted[0], got[1])


def test_refusals():
    with pytest.raises(ValueError, match="responses=0"):
        episodic_memory.empty_memory(1, 0, 2)
    with pytest.raises(ValueError, match="neighbours=3"):
        episodic_memory.closeness(
            episodic_memory.empty_memory(2, 1, 2), jnp.zeros((1, 2)), jnp.zeros((1, 2)), neighbours=3
        )
    with pytest.raises(ValueError, match="n=0"):
        episodic_memory.ngram_embedding(jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool), n=0)


def test_states_of_a_model_against_a_loop():
    """Each text by itself, without padding and without what stands before it; equal texts have cosine 1."""
    model = recipes.bench(recipes.OnlineSettings(train_problems=4, eval_problems=4, max_new_tokens=12)).model
    encode, width = episodic_memory.make_encoder("base", model, width=9, tokens=12)
    assert width == model.config.hidden_size
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(3, model.config.vocab_size, (4, 12)), jnp.int32)
    tokens = tokens.at[3, 6:9].set(tokens[0, 2:5])
    mask = np.zeros((4, 12), bool)
    mask[0, 2:5], mask[1, :7], mask[3, 6:9] = True, True, True  # the third has no token
    found = np.asarray(encode(tokens, jnp.asarray(mask)))
    for row in (0, 1, 3):
        text = tokens[row][mask[row]][None]
        ones = jnp.ones(text.shape, jnp.int32)
        alone = np.asarray(model.policy.hidden(model.params, text, jnp.cumsum(ones, 1) - 1, ones), np.float64)[0]
        want = alone.mean(0) / np.linalg.norm(alone.mean(0))
        close.assert_same_forward(found[row], want, model.config, columns=12)
    assert not found[2].any()
    close.assert_same_forward(found[0] @ found[3], 1.0, model.config, columns=12)
    slope = jax.grad(lambda p: jnp.sum(episodic_memory.state_embedding(model.policy, p, tokens, jnp.asarray(mask))))
    assert not any(x.any() for x in jax.tree.leaves(slope(model.params)))  # rewards have no gradient


def test_an_encoder_reads_the_tokens_of_the_policy():
    model = recipes.bench(recipes.OnlineSettings(train_problems=4, eval_problems=4, max_new_tokens=12)).model
    encode, width = episodic_memory.make_encoder("tiny", model, width=9, tokens=12)
    tokens = jnp.ones((2, 12), jnp.int32) * 5
    assert encode(tokens, tokens > 0).shape == (2, width) and width > model.config.hidden_size
    pairs, nine = episodic_memory.make_encoder("", model, width=9, tokens=12)
    np.testing.assert_array_equal(
        pairs(tokens, tokens > 0), episodic_memory.ngram_embedding(tokens, tokens > 0, width=nine)
    )
    with pytest.raises(UserError, match="^--encoder-model tiny has 512 positions, and a row takes up to 600"):
        episodic_memory.make_encoder("tiny", model, width=9, tokens=600)
    with pytest.raises(UserError, match="^--encoder-model no/such: no bundled model"):
        episodic_memory.make_encoder("no/such", model, width=9, tokens=12)
