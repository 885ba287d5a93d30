"""Rollouts in pieces: a deadline, a pause, other weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.rollout import partial, slots
from tests.models_for_tests import small_model
from tests.rollout.test_slots import IDS, PROMPTS, VALID, _engine, _keys, _whole


def _part(steps):
    engine, params, run = _engine()
    return run(params, engine.start(PROMPTS, VALID, _keys()), jnp.int32(steps))


def test_a_deadline_and_what_it_leaves():
    engine, params, run = _engine()
    times = iter((0.0, 1.0, 2.0, 3.0, 4.0, 5.0))
    start = engine.start(PROMPTS, VALID, _keys())
    cut = partial.run_until(run, params, start, seconds=2.5, steps=2, clock=lambda: next(times))
    assert int(cut.step) == 6  # three pieces
    rows, done = engine.result(cut, IDS), np.asarray(slots.finished(cut))
    assert done.any() and not done.all()
    lengths = np.asarray(rows.mask.sum(axis=1))
    assert (lengths == np.asarray(cut.length)).all() and (lengths == 0).any()  # some never began
    assert np.asarray(rows.truncated)[~done].all()
    there = np.asarray(rows.mask)[:, PROMPTS.shape[1] :]
    np.testing.assert_array_equal(np.where(there, cut.tokens, 0), np.where(there, _whole().tokens, 0))
    rest = partial.run_until(run, params, cut, seconds=1e9, steps=50)
    jax.tree.map(np.testing.assert_array_equal, engine.result(rest), engine.result(_whole()))
    with pytest.raises(ValueError, match="steps=0"):
        partial.run_until(run, params, cut, seconds=1.0, steps=0)


def test_kept_in_a_file_and_resumed_bit_for_bit(tmp_path):
    engine, params, run = _engine()
    cut = _part(5)
    flat, form = jax.tree.flatten(cut)
    np.savez(tmp_path / "cut.npz", *[np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in flat])
    with np.load(tmp_path / "cut.npz") as file:
        read = [jnp.asarray(file[name]) for name in file.files]
    back = [jax.random.wrap_key_data(x) if _is_key(old) else x for old, x in zip(flat, read, strict=True)]
    found = run(params, jax.tree.unflatten(form, back), steps=jnp.int32(100))
    jax.tree.map(np.testing.assert_array_equal, engine.result(found), engine.result(_whole()))


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_renewed_by_the_same_weights_changes_nothing():
    engine, params, run = _engine()
    policy = small_model()[0]
    renew = jax.jit(functools.partial(partial.renewed, policy))
    for steps in (1, 7, 12):
        cut = _part(steps)
        again = renew(params, cut)
        alive = np.asarray(cut.slots.alive)
        assert alive.any()
        np.testing.assert_allclose(again.slots.logits[alive], cut.slots.logits[alive], atol=1e-5)
        rest = run(params, again, steps=jnp.int32(100))
        np.testing.assert_array_equal(rest.tokens, _whole().tokens)


def test_the_rest_is_of_the_new_weights():
    engine, params, run = _engine()
    policy, _, _ = small_model()
    other = jax.tree.map(lambda x: x * 1.3, params)
    cut = _part(6)
    rows = engine.result(run(other, partial.renewed(policy, other, cut), steps=jnp.int32(100)), IDS)
    before = np.arange(rows.mask.shape[1]) - PROMPTS.shape[1] < np.asarray(cut.length)[:, None]
    assert slots.finished(cut).any() and (np.asarray(cut.length) == 0).any()

    @jax.jit
    def score(weights):
        hidden = policy.hidden(weights, rows.tokens, rows.positions, rows.segment_ids)
        return logprobs.token_logprobs(policy.unembed(weights, hidden), rows.tokens, segment_ids=rows.segment_ids)

    for weights, part in ((params, before), (other, ~before)):
        logp = score(weights)
        keep = np.asarray(rows.mask) & part
        assert keep.any()
        np.testing.assert_allclose(np.asarray(logp)[keep], np.asarray(rows.sampler_logp)[keep], atol=1e-4)
