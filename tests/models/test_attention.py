"""Attention against a float64 loop, and in blocks against all queries at once: values, gradients, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import attend, attend_after, repeated
from tests import close

rng = np.random.default_rng(11)


def _inputs(rows=2, queries=13, columns=17, heads=4, groups=2, width=4):
    q = jnp.asarray(rng.normal(size=(rows, queries, heads, width)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(rows, groups, columns, width)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((rows, queries, columns)) < 0.6).at[:, :, 0].set(True)
    return q, k, v, mask


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_against_a_loop(softcap):
    q, k, v, mask = _inputs()
    got = np.asarray(attend(q, k, v, mask, scale=0.3, softcap=softcap))
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for b, s, h in np.ndindex(*got.shape[:3]):
        seen = np.flatnonzero(np.asarray(mask)[b, s])
        scores = k[b, h // 2, seen] @ q[b, s, h] * 0.3
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        want = weights / weights.sum() @ v[b, h // 2, seen]
        close.assert_near(got[b, s, h], want, terms=4 + 2 * 17, magnitude=np.abs(v).max())


@pytest.mark.parametrize("queries", [9, 12, 13])
def test_blocks_change_neither_value_nor_gradient(queries):
    q, k, v, mask = _inputs(queries=queries)

    def loss(block):
        return lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v, mask, softcap=2.0, block=block)))

    whole, parts = (jax.value_and_grad(loss(block), (0, 1, 2))(q, k, v) for block in (64, 4))
    close.assert_same_sums(parts, whole, close.attention_sums(queries, 17, 4, 2))


def test_a_row_without_any_visible_key_is_finite():
    q, k, v, mask = _inputs()
    mask = mask.at[0].set(False)
    for block in (64, 4):
        gradient = jax.grad(lambda q, block=block: jnp.sum(attend(q, k, v, mask, block=block)))(q)
        assert bool(jnp.all(jnp.isfinite(gradient)))


def test_blocks_need_less_memory():
    """The scores of 2,048 queries and keys exist in blocks of 128, in the backward pass too."""
    shape = (1, 2048, 2, 8)
    q, kv = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (1, 2, 2048, 8)))
    mask = jax.ShapeDtypeStruct((1, 2048, 2048), bool)

    def size(block):
        grad = jax.grad(lambda q, k, v, mask: jnp.sum(attend(q, k, v, mask, block=block)), (0, 1, 2))
        return jax.jit(grad).lower(q, kv, kv, mask).compile().memory_analysis().temp_size_in_bytes

    scores = 2 * 2048 * 2048 * 4
    assert size(4096) > scores > 3 * size(128)


def _groups(times=3, queries=13):
    """Queries and own keys of six rows, and what each three of them share."""
    q, k, v, mask = _inputs(rows=2 * times, queries=queries)
    _, shared_k, shared_v, _ = _inputs(columns=5)
    return q, k, v, mask, shared_k, shared_v, jnp.asarray(rng.random((2 * times, queries, 5)) < 0.6)


@pytest.mark.parametrize("block", [64, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_shared_keys_are_those_of_every_row(softcap, block):
    """Values, and gradients of queries, own keys and shared ones, against the shared ones repeated."""
    arrays = _groups()
    settings = {"scale": 0.3, "softcap": softcap}

    def loss(run):
        def of(q, k, v, before_k, before_v):
            return jnp.sum(jnp.sin(run(q, k, v, arrays[3], before_k, before_v, arrays[6], **settings)))

        return jax.value_and_grad(of, (0, 1, 2, 3, 4))(*arrays[:3], *arrays[4:6])

    got, want = loss(functools.partial(attend_after, block=block)), loss(repeated(attend))
    close.assert_same_sums(got, want, close.attention_sums(13, 17 + 5, 4, 2 * 3))


def test_rows_that_see_only_one_part_or_nothing():
    q, k, v, mask, shared_k, shared_v, shared_mask = _groups()
    nothing = jnp.zeros_like(mask), jnp.zeros_like(shared_mask)
    own = attend_after(q, k, v, mask, shared_k, shared_v, nothing[1])
    close.assert_near(own, attend(q, k, v, mask), terms=4 + 2 * 17)
    shared = attend_after(q, k, v, nothing[0], shared_k, shared_v, shared_mask.at[:, :, 0].set(True))
    wanted = attend(q, *(jnp.repeat(x, 3, axis=0) for x in (shared_k, shared_v)), shared_mask.at[:, :, 0].set(True))
    close.assert_near(shared, wanted, terms=4 + 2 * (17 + 5))
    gradient = jax.grad(lambda q: jnp.sum(attend_after(q, k, v, nothing[0], shared_k, shared_v, nothing[1])))(q)
    assert bool(jnp.all(jnp.isfinite(gradient)))
