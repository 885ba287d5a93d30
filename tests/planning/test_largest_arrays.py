"""The largest array of a step: found in loops and calls, refused where it does not fit; parts stay small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import attention_maps, latent_code_training, latent_codes
from jaxrl_llm import logprobs
from jaxrl_llm.advantages import effective_rank
from jaxrl_llm.errors import UserError
from jaxrl_llm.planning import largest_arrays
from jaxrl_llm.train.methods import supervised
from tests import close
from tests.models_for_tests import dense_rows, small_model


def _largest(function, *arguments):
    return largest_arrays.largest([jax.make_jaxpr(function)(*arguments)])


def test_arrays_are_found_inside_calls_and_loops_and_elementwise_work_is_not_counted():
    def step(x):
        wide = jnp.broadcast_to(x[:, None, None], (4, 1000, 1000)) * 2  # fused into the sum
        _, found = jax.lax.scan(lambda c, y: (c, jax.jit(jnp.matmul)(y[:, None], y[None])), 0, jnp.ones((3, 5)))
        return jnp.sum(wide) + jnp.sum(found)

    found = _largest(step, jnp.ones((4,)))
    assert (found.shape, found.bytes, found.dtype) == ((3, 5, 5), 300, "float32")
    assert "test_largest_arrays.py" in found.where and "float32[3,5,5] of 300 B" in str(found)


def test_what_does_not_fit_is_one_line_that_says_what_to_lower(monkeypatch):
    monkeypatch.setattr(largest_arrays, "memory", lambda devices: 1000 * devices)
    traced = [jax.make_jaxpr(jnp.matmul)(jnp.ones((30, 2)), jnp.ones((2, 20)))]
    assert largest_arrays.check("grpo", traced, 3).bytes == 2400
    with pytest.raises(UserError, match=r"arm grpo forms float32\[30,20\] of 2.3 KiB .* lower --prompts-per-step"):
        largest_arrays.check("grpo", traced, 2)


def test_the_memory_of_this_machine_is_known():
    assert 2**28 < largest_arrays.memory(1) < 2**50


def test_mean_log_probabilities_never_form_all_logits():
    hidden, head = jnp.ones((2, 64, 4)), jnp.ones((4, 500))
    tokens = jnp.zeros((2, 64), jnp.int32)

    def loss(hidden):
        parts = logprobs.chunked(hidden, lambda h: h @ head, tokens, chunk=8, figure=logprobs.mean_logprob)
        return sum(jnp.sum(x) for x in parts)

    found = _largest(jax.grad(loss), hidden)
    assert found.bytes < 2 * 64 * 500 * 4 // 4, found
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 64, 4), (4, 500)))
    tokens = jnp.asarray(rng.integers(0, 500, (2, 64)), jnp.int32)
    whole = hidden @ head
    want = logprobs.token_logprobs(whole, tokens), logprobs.mean_logprobs(whole)
    got = logprobs.chunked(hidden, lambda h: h @ head, tokens, chunk=8, figure=logprobs.mean_logprob)
    for mine, other in zip(got, want, strict=True):
        close.assert_near(mine, other, terms=4 + 500)


def test_attention_figures_never_form_the_maps():
    _, params, config = small_model()
    rows, width = 6, 40
    segments, positions = dense_rows(rows, width)
    tokens, mask = jnp.ones((rows, width), jnp.int32), jnp.ones((rows, width), bool)

    def figures(params):
        numbers = {"queries": 8, "most_bytes": 1}
        return attention_maps.rhythm(config, params, tokens, positions, segments, mask, **numbers)

    maps = 4 * config.num_layers * rows * config.num_heads * width * width
    assert _largest(figures, params).bytes <= maps // (rows * config.num_layers)
    whole = _largest(lambda p: attention_maps.attention_maps(config, p, tokens, positions, segments), params)
    assert whole.bytes == maps, "the reference forms them"


def test_ranks_of_prefixes_are_read_from_few_states():
    hidden, mask = jnp.ones((3, 200, 64)), jnp.ones((3, 200), bool)
    found = _largest(lambda h: effective_rank.rank_figures(h, mask, stride=20, most=16), hidden)
    assert found.bytes < hidden.nbytes // 4, "no matrix of all states, nor one for every prefix at once"


def test_codes_are_unembedded_few_at_a_time():
    policy, params, config = small_model()
    codes, rows, width = 32, 4, 24
    latent = latent_codes.init_latent(params, config.hidden_size, jax.random.key(0), codes=codes)
    states = jnp.ones((rows, width, config.hidden_size))

    def logits(states):
        return latent_codes.token_logits(policy, latent, states, most_logits=rows * width * config.padded_vocab_size)

    wide = 4 * rows * width * codes * config.padded_vocab_size
    assert _largest(logits, states).bytes < wide // 4
    at_once = latent_codes.token_logits(policy, latent, states)
    close.assert_same_forward(logits(states), at_once, config)


def test_codes_behind_tokens_and_the_world_are_unembedded_for_few_states_at_a_time():
    policy, params, config = small_model()
    codes, rows, width = 4, 4, 24
    table = 0.1 * jax.random.normal(jax.random.key(4), (config.hidden_size, 4096))  # wider than all else
    policy = policy._replace(vocab_size=4096, unembed=lambda params, h: h @ table)
    latent = latent_codes.init_latent(params, config.hidden_size, jax.random.key(0), codes=codes)
    states = jax.random.normal(jax.random.key(1), (rows, width, config.hidden_size))
    tokens = jax.random.randint(jax.random.key(2), (rows, width), 3, 20, jnp.int32)

    def drawn(states, most):
        where = latent, states, tokens, jax.random.key(3)
        return latent_codes.drawn_codes(policy, *where, most_logits=most)

    whole = 4 * rows * width * policy.vocab_size  # bytes of the logits of all states
    few = 8 * policy.vocab_size
    assert _largest(lambda s: drawn(s, few), states).bytes < whole // 4
    np.testing.assert_array_equal(drawn(states, few), drawn(states, 2**27))
    segments, positions = dense_rows(rows, width)
    mask = jnp.ones((rows, width), bool).at[:, 0].set(False)
    text = supervised.SupervisedRows(tokens, segments, positions, mask)
    noise = jnp.zeros((rows, width, codes))

    def loss(params, chunk):
        return latent_code_training.world_loss(policy, params, text, noise, chunk=chunk)[0]

    small = _largest(jax.grad(lambda p: loss(p, 4)), latent).bytes
    assert small < _largest(jax.grad(lambda p: loss(p, 128)), latent).bytes and small < whole // 2
    close.assert_same_forward(loss(latent, 4), loss(latent, 128), config, columns=width)
