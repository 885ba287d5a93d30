"""Roll-in and roll-out: cut lengths, the joined responses, equality with a plain rollout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import roll_in_out
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout.keys import sample_keys
from tests import close

SETTINGS = recipes.OnlineSettings(levels=(2,), train_problems=16, eval_problems=8, max_new_tokens=12, group_size=2)


def test_cut_lengths_are_uniform():
    """l = 5: each of 1, 2, 3, 4 a quarter of the time; l < 2: nothing; share 0: nothing."""
    key = jax.random.key(0)
    chance, place = jax.random.uniform(key, (2, 8000))
    cut = np.asarray(roll_in_out.cut_lengths(jnp.full(8000, 5), chance, place, share=1.0))
    close.assert_share(np.bincount(cut, minlength=5) / 8000, [0, 0.25, 0.25, 0.25, 0.25], 8000)
    some = np.asarray(roll_in_out.cut_lengths(jnp.full(8000, 5), chance, place, share=0.6))
    close.assert_share((some > 0).mean(), 0.6, 8000)
    for length in (0, 1):
        assert not np.asarray(
            roll_in_out.cut_lengths(jnp.full(4, length), jnp.zeros(4), jnp.full(4, 0.9), share=1.0)
        ).any()
    with pytest.raises(ValueError, match="share=1.5"):
        roll_in_out.cut_lengths(jnp.full(4, 3), jnp.zeros(4), jnp.zeros(4), share=1.5)


@pytest.mark.slow
def test_a_mixed_rollout_keeps_the_roll_in_and_continues_it():
    found = recipes.bench(SETTINGS)
    model, ids = found.model, jnp.arange(4, dtype=jnp.int32)
    numbers = {"max_new_tokens": 12, "temperature": 1.0}
    begin, end = (recipes.rollout_of_model(model, group_size=n, **numbers) for n in (2, 1))
    writer = roll_in_out.Writer(begin, end)
    keys = sample_keys(jax.random.key(0), 0, ids, 2)
    # a second policy that writes one token for ever
    params = model.params
    other = jax.tree.map(lambda x: jnp.zeros_like(x), params)
    arguments = found.train.tokens[ids], found.train.valid[ids], keys, ids
    plain = begin(params, *arguments)
    mixed = roll_in_out.make_mixed_rollout(writer, writer, new_tokens=12, share=1.0, pad_id=model.tokenizer.pad_id)
    rows, prefix = mixed(params, other, *arguments)
    kept = np.asarray(prefix).sum(1)
    length = np.asarray(plain.mask).sum(1)
    assert ((kept >= 1) & (kept <= length - 1))[length >= 2].all()
    np.testing.assert_array_equal(np.where(prefix, rows.tokens, 0), np.where(prefix, plain.tokens, 0))
    np.testing.assert_array_equal(np.where(prefix, rows.sampler_logp, 0), np.where(prefix, plain.sampler_logp, 0))
    # what follows is the other policy's: every token equally likely
    after = np.asarray(rows.mask & ~prefix)
    flat = np.asarray(rows.sampler_logp)[after]
    close.assert_near(flat, -np.log(model.config.vocab_size), terms=model.config.vocab_size)
    np.testing.assert_array_equal(rows.problem_ids, plain.problem_ids)
    whole = roll_in_out.whole_response(rows, new_tokens=12)
    np.testing.assert_array_equal(whole, rows.mask)
    none = roll_in_out.make_mixed_rollout(writer, writer, new_tokens=12, share=0.0, pad_id=0)
    again, prefix = none(other, params, *arguments)
    jax.tree.map(np.testing.assert_array_equal, again, plain)
    assert not np.asarray(prefix).any()
