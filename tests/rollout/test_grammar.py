"""Decoding within a grammar: choices among texts, and the trainer's scores of them, a chunk at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from tests import close
from tests.models_for_tests import small_config, small_model

END = 2
TEXTS = [(5, 6), (5, 7, 8), (5,), (9, 9)]
PROMPTS = jnp.array([[0, 7, 8], [9, 3, 1]], jnp.int32)


@pytest.fixture(scope="module")
def drawn():
    policy, params, config = small_model()
    keys, ids = sample_keys(jax.random.key(0), 0, jnp.arange(2, dtype=jnp.int32), 64), jnp.arange(2, dtype=jnp.int32)
    found = grammars.choices(TEXTS, end=END)
    how = {"group_size": 64, "max_new_tokens": 5, "eos_ids": (END,), "grammar": found}
    rows = jax.jit(lambda p: generate(policy, p, PROMPTS, PROMPTS > 0, keys, problem_ids=ids, **how))(params)
    return policy, params, found, rows


def test_every_response_is_one_of_the_texts(drawn):
    _, _, _, rows = drawn
    tokens, mask = np.asarray(rows.tokens), np.asarray(rows.mask)
    said = {tuple(line[there].tolist()) for line, there in zip(tokens, mask, strict=True)}
    assert said == {(*text, END) for text in TEXTS} and not np.asarray(rows.truncated).any()


def test_the_trainer_scores_what_was_drawn_in_chunks_of_any_size(drawn):
    policy, params, found, rows = drawn
    for chunk in (1, 3, 128):
        logp, entropy = jax.jit(grammars.score_legal(found, chunk=chunk), static_argnums=0)(policy, params, rows)
        close.assert_same_forward(jnp.where(rows.mask, logp, 0.0), rows.sampler_logp)
        assert float(jnp.max(jnp.where(rows.mask, entropy, 0.0))) <= np.log(3) + 1e-5  # three may follow the 5
    whole = jnp.exp(jnp.sum(jnp.where(rows.mask, logp, 0.0), axis=1))
    first = {tuple(np.asarray(t)[np.asarray(m)]): float(w) for t, m, w in
             zip(rows.tokens[:64], rows.mask[:64], whole[:64], strict=True)}  # fmt: skip
    close.assert_near(sum(first.values()), 1.0, terms=5 * close.forward_sums(small_config(), 8))


def test_the_slope_is_that_of_the_shares_of_what_is_allowed(drawn):
    """Against logits cut to the allowed tokens, without -inf."""
    policy, params, found, rows = drawn
    few = jax.tree.map(lambda x: x[:2], rows._replace(extras={}))
    score = grammars.score_legal(found, chunk=2)

    def total(p):
        return jnp.sum(jnp.where(few.mask, score(policy, p, few)[0], 0.0))

    def plain(p):
        logits = policy.unembed(p, policy.hidden(p, few.tokens, few.positions, few.segment_ids))
        state, value = grammars.states(found, few.tokens, few.mask), 0.0
        for b, t in np.argwhere(np.asarray(few.mask)):
            ids = found.tokens[int(state[b, t - 1])]
            ids = ids[ids >= 0]
            value += jax.nn.log_softmax(logits[b, t - 1, ids])[np.flatnonzero(ids == int(few.tokens[b, t]))[0]]
        return value

    got, want = jax.grad(total)(params), jax.grad(plain)(params)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(got))
    close.assert_same_sums(got, want, close.gradient_sums(small_config(), 2, 8))


def test_what_is_no_grammar():
    for texts in ([], [(1,), ()]):
        with pytest.raises(ValueError, match="at least one token"):
            grammars.choices(texts, end=END)
    for rows in ({0: {}}, {0: {1: 3}}, {1: {1: 1}}):
        with pytest.raises(ValueError, match="must hold a token"):
            grammars.listed(rows)
    repeated = grammars.choices([(4,), (4,)], end=END)
    assert np.array_equal(repeated.tokens, grammars.choices([(4,)], end=END).tokens)
    # a thousand names of a vocabulary of 150,000 are small
    names = np.random.default_rng(0).integers(3, 150_000, (1000, 4)).tolist()
    assert sum(x.nbytes for x in grammars.choices(names, end=END)) < 60e6
