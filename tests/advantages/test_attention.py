"""Attention credit: worked numbers, float64 loops, the model's own maps, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts.attention_maps import attention_maps, attention_weights, rhythm
from jaxrl_llm.advantages import attention
from jaxrl_llm.models import attention as model_attention
from tests import close
from tests.models_for_tests import dense_rows, small_model

rng = np.random.default_rng(9)
EXAMPLE = jnp.array([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.4, 0.1, 0.1, 0.4]]])
MASK = (np.arange(7)[None] >= 2) & (np.arange(7)[None] < np.array([7, 5, 4])[:, None])


def _maps():
    raw = np.tril(rng.random((2, 3, 2, 7, 7)))
    return jnp.asarray(raw / raw.sum(-1, keepdims=True), jnp.float32)


def test_maps_of_a_model_are_what_its_attention_uses():
    policy, params, config = small_model()
    tokens = jnp.asarray(rng.integers(3, 20, (2, 6)), jnp.int32)
    segments, positions = dense_rows(2, 6)
    segments = segments.at[0, 0].set(0)  # a padded column
    maps = attention_maps(config, params, tokens, positions, segments)
    assert maps.shape == (2, 2, 4, 6, 6)
    assert not np.asarray(jnp.triu(maps[:, 1], 1)).any()
    close.assert_near(maps[:, 1].sum(-1), 1.0)
    assert not np.asarray(maps[:, 0, :, 1:, 0]).any()
    # the weights applied to the values are the model's attention
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 6, 4, 4), (2, 2, 6, 4), (2, 2, 6, 4)))
    mask = model_attention.attention_mask(positions, segments, positions, segments)
    spread = jnp.repeat(v, 2, axis=1)
    want = jnp.einsum("bhsc,bhck->bshk", attention_weights(q, k, mask), spread)
    close.assert_near(want[1], model_attention.attend(q, k, v, mask)[1])


@pytest.mark.parametrize("most_bytes, queries", [(2**28, 128), (1, 3)])
def test_the_rhythm_read_in_parts_is_that_of_whole_maps(most_bytes, queries):
    """Three rows of 9 tokens; with ``most_bytes`` 1 a row at a time, with 3 queries in three parts."""
    _, params, config = small_model()
    tokens = jnp.asarray(np.random.default_rng(4).integers(3, 20, (3, 9)), jnp.int32)
    segments, positions = dense_rows(3, 9)
    mask = jnp.asarray((np.arange(9)[None] >= 2) & (np.arange(9)[None] < np.array([9, 7, 5])[:, None]))
    maps = attention.response_maps(attention_maps(config, params, tokens, positions, segments), mask)
    near, far = attention.local_and_global(maps, mask, fraction=0.3)
    want = attention.backward_distance(near, mask, window=3), attention.forward_influence(far, mask, low=1, high=4)
    numbers = {"window": 3, "low": 1, "high": 4, "fraction": 0.3, "most_bytes": most_bytes, "queries": queries}
    found = rhythm(config, params, tokens, positions, segments, mask, **numbers)
    for mine, other in zip(found, want, strict=True):
        assert float(jnp.max(jnp.abs(other))) > 0.05
        close.assert_near(mine, other)


def test_response_maps_spans_and_split():
    maps, mask = _maps(), jnp.asarray(MASK)
    inside = attention.response_maps(maps, mask)
    rows = np.asarray(inside.sum(-1))
    close.assert_near(rows[:, MASK.nonzero()[0], :, MASK.nonzero()[1]], 1.0)
    assert all(not np.asarray(inside[:, b, :, :, s]).any() for b, s in zip(*np.nonzero(~MASK), strict=True))
    spans = attention.attention_spans(inside, mask)
    for layer in range(2):
        for head in range(2):
            total = [
                sum(float(inside[layer, b, head, t, s]) * (t - s) for s in range(7))
                for b in range(3) for t in range(7) if MASK[b, t]
            ]  # fmt: skip
            close.assert_near(spans[layer, head], np.mean(total))
    near, far = attention.local_and_global(inside, mask, fraction=0.25)
    order = np.argsort(np.asarray(spans).ravel())
    for got, k in ((near, order[0]), (far, order[-1])):
        close.assert_near(got, inside[k // 2, :, k % 2])


def test_influence_and_distance_against_loops():
    maps, mask = attention.response_maps(_maps(), jnp.asarray(MASK))[0, :, 0], jnp.asarray(MASK)
    waad = attention.backward_distance(maps, mask, window=2)
    fai = attention.forward_influence(maps, mask, low=1, high=2)
    for b in range(3):
        for t in range(7):
            want = sum(float(maps[b, t, s]) * min(t - s, 2) for s in range(t + 1)) if MASK[b, t] else 0.0
            close.assert_near(waad[b, t], want)
            later = [float(maps[b, u, t]) for u in range(t + 1, min(t + 2, 6) + 1) if MASK[b, u]]
            want = np.mean(later) if later and MASK[b, t] else 0.0
            close.assert_near(fai[b, t], want)
    # a map that looks only at itself reaches nowhere
    identity = jnp.broadcast_to(jnp.eye(7), (3, 7, 7))
    assert not np.asarray(attention.backward_distance(identity, mask)).any()


def test_preplan_tokens_of_the_worked_example():
    """WAAD = [0, .5, .7, 1.1]: differences [.5, .2, .4, 0]; 40 % of 4 tokens are 2."""
    mask = jnp.ones((1, 4), bool)
    waad = attention.backward_distance(EXAMPLE, mask, window=2)
    assert attention.preplan_tokens(waad, mask)[0].tolist() == [True, False, True, False]
    assert attention.top_of_each(jnp.zeros((1, 4)), mask, fraction=0.4)[0].tolist() == [True, True, False, False]
    chosen = attention.top_of_each(jnp.asarray(rng.random((3, 7)), jnp.float32), jnp.asarray(MASK), fraction=0.4)
    assert chosen.sum(1).tolist() == [2, 2, 1] and not np.asarray(chosen)[~MASK].any()


def test_coupled_credit():
    mask = jnp.ones((1, 6), bool)
    preplan = jnp.array([[False, True, False, False, True, False]])
    anchors = jnp.array([[True, False, True, True, True, False]])
    waad = jnp.array([[0.0, 1.0, 0.1, 0.9, 1.0, 0.0]])
    got = attention.coupled_credit(preplan, anchors, waad, mask, amplify=1.5, share=0.5)
    # 0: no preplan token before it, keeps all; 2: inside a chunk, hands half to 1; 3: not dominated; 4: preplan itself
    close.assert_near(got[0], [1.5, 1.25, 1.25, 1.5, 1.5, 1.0])
    # no share: the anchors alone; no amplification: GRPO; many bonuses are capped
    alone = attention.coupled_credit(preplan, anchors, waad, mask, share=0.0)
    close.assert_near(alone, attention.amplified(anchors, mask))
    plain = attention.coupled_credit(preplan, anchors, waad, mask, amplify=1.0)
    np.testing.assert_array_equal(plain, jnp.ones((1, 6)))
    many = attention.coupled_credit(
        jnp.arange(6)[None] == 0, jnp.arange(6)[None] > 0, jnp.zeros((1, 6)).at[0, 0].set(9.0), mask, share=1.0
    )
    close.assert_near(many[0], [1.5, 1, 1, 1, 1, 1])


def test_refusals_and_no_gradient():
    policy, params, config = small_model()
    tokens = jnp.ones((1, 3), jnp.int32)
    segments, positions = dense_rows(1, 3)
    gradient = jax.grad(lambda p: jnp.sum(attention_maps(config, p, tokens, positions, segments) ** 2))(params)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient))
    mask = jnp.ones((1, 4), bool)
    with pytest.raises(ValueError, match="window=0"):
        attention.backward_distance(EXAMPLE, mask, window=0)
    with pytest.raises(ValueError, match="low=0"):
        attention.forward_influence(EXAMPLE, mask, low=0)
    with pytest.raises(ValueError, match="fraction=0"):
        attention.top_of_each(jnp.zeros((1, 4)), mask, fraction=0.0)
    with pytest.raises(ValueError, match="amplify=0.5"):
        attention.coupled_credit(mask, mask, jnp.zeros((1, 4)), mask, amplify=0.5)
