"""Three foreign models: a plain function, Flax and Equinox; each must generate what it scores."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm import logprobs
from jaxrl_llm.models.adapters import policy_from_forward, policy_from_nnx
from jaxrl_llm.rollout.generate import generate
from tests import close
from tests.models_for_tests import dense_rows, small_model

VOCAB, WIDTH = 11, 8


def _mean_of_past(x, positions, segment_ids):
    """Attention with equal weights, under the one rule."""
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids > 0)[:, None, :]
    seen = same & (positions[:, None, :] <= positions[:, :, None])
    weights = seen.astype(x.dtype) / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1).astype(x.dtype)
    return x + weights @ x


def _plain_policy():
    def init(key):
        keys = jax.random.split(key, 2)
        return {"table": jax.random.normal(keys[0], (VOCAB, WIDTH)), "out": jax.random.normal(keys[1], (WIDTH, VOCAB))}

    def forward(params, tokens, positions, segment_ids):
        return _mean_of_past(params["table"][tokens], positions, segment_ids) @ params["out"]

    return policy_from_forward(forward, VOCAB, init)


class _Flax(nnx.Module):
    def __init__(self, rngs, dropout=False):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if dropout else None

    def __call__(self, tokens, positions, segment_ids):
        x = _mean_of_past(self.embed(tokens), positions, segment_ids)
        return self.out(jax.nn.silu(x))


class _Equinox(eqx.Module):
    table: jax.Array
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.table = jax.random.normal(keys[0], (VOCAB, WIDTH))
        self.out = eqx.nn.Linear(WIDTH, VOCAB, key=keys[1])

    def __call__(self, tokens, positions, segment_ids):
        x = _mean_of_past(self.table[tokens], positions, segment_ids)
        return jax.vmap(jax.vmap(self.out))(x)


def _equinox_policy():
    _, static = eqx.partition(_Equinox(jax.random.key(0)), eqx.is_inexact_array)
    return policy_from_forward(
        lambda params, *inputs: eqx.combine(params, static)(*inputs),
        VOCAB,
        lambda key: eqx.filter(_Equinox(key), eqx.is_inexact_array),
    )


POLICIES = {"plain": _plain_policy, "flax": lambda: policy_from_nnx(_Flax, VOCAB), "equinox": _equinox_policy}


@pytest.mark.parametrize("kind", POLICIES)
def test_generator_and_scorer_agree(kind):
    policy = POLICIES[kind]()
    params = policy.init(jax.random.key(2))
    prompts = jnp.array([[0, 3, 4], [1, 5, 6]], jnp.int32)
    valid = jnp.array([[False, True, True], [True, True, True]])
    out = jax.jit(
        lambda p: generate(
            policy,
            p,
            prompts,
            valid,
            jax.random.split(jax.random.key(5), 6),
            group_size=3,
            max_new_tokens=5,
            eos_ids=(2,),
        )
    )(params)
    logits = policy.unembed(params, policy.hidden(params, out.tokens, out.positions, out.segment_ids))
    logp = logprobs.token_logprobs(logits, out.tokens)
    mask = np.asarray(out.mask)
    assert mask.any(axis=1).all()
    close.assert_near(np.asarray(logp)[mask], np.asarray(out.sampler_logp)[mask])


@pytest.mark.parametrize("kind", POLICIES)
def test_parameters_are_a_tree_with_gradients(kind):
    policy = POLICIES[kind]()
    params = policy.init(jax.random.key(2))
    tokens = jnp.array([[1, 2, 3, 4]], jnp.int32)
    segments, positions = dense_rows(1, 4)

    def loss(p):
        return logprobs.token_logprobs(policy.unembed(p, policy.hidden(p, tokens, positions, segments)), tokens).sum()

    gradient = jax.jit(jax.grad(loss))(params)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradient))
    # seeds are an axis of the tree
    many = jax.vmap(policy.init)(jax.random.split(jax.random.key(0), 3))
    assert jax.vmap(loss)(many).shape == (3,)


@pytest.mark.slow
def test_decoder_through_the_adapter_equals_its_own_cache():
    own, params, config = small_model()
    foreign = policy_from_forward(
        lambda p, *inputs: own.unembed(p, own.hidden(p, *inputs)), config.vocab_size, own.init
    )
    prompts = jnp.array([[0, 3, 4], [1, 5, 6]], jnp.int32)
    valid = jnp.array([[False, True, True], [True, True, True]])
    keys = jax.random.split(jax.random.key(5), 4)
    a, b = (
        generate(p, params, prompts, valid, keys, group_size=2, max_new_tokens=6, eos_ids=(2,)) for p in (own, foreign)
    )
    np.testing.assert_array_equal(a.tokens, b.tokens)
    close.assert_same_forward(a.sampler_logp, b.sampler_logp)


def test_logits_of_another_shape_are_refused():
    policy = policy_from_forward(lambda p, tokens, *_: jnp.zeros((*tokens.shape, 7)), VOCAB, lambda key: {})
    segments, positions = dense_rows(1, 4)
    with pytest.raises(ValueError, match=r"shape \(1, 4, 7\).*vocab_size=11"):
        policy.hidden({}, jnp.zeros((1, 4), jnp.int32), positions, segments)


def test_flax_state_that_is_no_parameter_is_named():
    policy = policy_from_nnx(lambda rngs: _Flax(rngs, dropout=True), VOCAB)
    with pytest.raises(ValueError, match="no nnx.Param: dropout/rngs"):
        policy.init(jax.random.key(0))
