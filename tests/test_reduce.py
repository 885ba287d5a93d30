import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from tests import close
from tests.close import doubles, singles

TERMS = jnp.array([[1.0, 3.0, 7.0], [5.0, 9.0, 2.0], [4.0, 4.0, 4.0]])
MASK = jnp.array([[True, True, False], [True, False, False], [False, False, False]])
# row 0 keeps 1 + 3, row 1 keeps 5, row 2 keeps nothing
BY_HAND = {"token_mean": 9 / 3, "seq_mean": (2 + 5) / 2, "seq_sum": (4 + 5) / 2, "constant": 9 / (3 * 10)}


@pytest.mark.parametrize("mode", reduce.MODES)
def test_by_hand(mode):
    assert float(reduce.tokens(TERMS, MASK, mode=mode, length_tokens=10)) == singles(BY_HAND[mode])


@pytest.mark.parametrize("mode", reduce.MODES)
def test_micro_batches_and_devices_add_up(mode):
    rng = np.random.default_rng(0)
    terms, mask = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32), jnp.asarray(rng.random((8, 5)) < 0.6)
    total = reduce.denominator(mask, mode=mode)
    whole = reduce.tokens(terms, mask, mode=mode, total=total, length_tokens=5)
    parts = [
        reduce.tokens(terms[i : i + 1], mask[i : i + 1], mode=mode, total=total, length_tokens=5) for i in range(8)
    ]
    close.assert_near(sum(parts), whole)
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    placed = jax.device_put((terms, mask), sharding)
    sharded = jax.jit(lambda a, b: reduce.tokens(a, b, mode=mode, length_tokens=5))(*placed)
    close.assert_near(sharded, reduce.tokens(terms, mask, mode=mode, length_tokens=5))


@pytest.mark.parametrize("mode", reduce.MODES)
def test_packed_equals_unpacked(mode):
    packed_terms = jnp.array([[1.0, 3.0, 5.0, 2.0, 8.0, 0.0]])
    packed_mask = jnp.array([[True, True, False, True, True, False]])
    segments = jnp.array([[1, 1, 1, 2, 2, 0]])
    terms = jnp.array([[1.0, 3.0, 5.0], [2.0, 8.0, 0.0]])
    mask = jnp.array([[True, True, False], [True, True, False]])
    a = reduce.tokens(packed_terms, packed_mask, mode=mode, length_tokens=3, segment_ids=segments)
    b = reduce.tokens(terms, mask, mode=mode, length_tokens=3)
    assert float(a) == doubles(float(b))


@pytest.mark.parametrize("mode", reduce.MODES)
def test_nan_outside_the_mask_is_harmless(mode):
    poisoned = jnp.where(MASK, TERMS, jnp.nan)
    value, gradient = jax.value_and_grad(lambda x: reduce.tokens(x, MASK, mode=mode, length_tokens=10))(poisoned)
    assert float(value) == singles(BY_HAND[mode])
    assert np.isfinite(gradient).all() and (np.asarray(gradient)[~np.asarray(MASK)] == 0).all()


def test_sequences_without_a_token_count_for_a_constant_alone():
    """Two packed sequences and padding; of the second nothing is trained."""
    ids, mask = jnp.array([[1, 1, 2, 2, 0]]), jnp.array([[True, False, False, False, False]])
    found = {mode: float(reduce.denominator(mask, mode=mode, segment_ids=ids)) for mode in reduce.MODES}
    assert found == {"token_mean": 1.0, "seq_mean": 1.0, "seq_sum": 1.0, "constant": 2.0}


def test_empty_mask_gives_zero():
    assert float(reduce.tokens(TERMS, jnp.zeros_like(MASK), mode="seq_mean")) == 0.0


def test_sequences_segments_scalars_metrics():
    np.testing.assert_array_equal(reduce.sequences(TERMS, MASK), [4, 5, 0])
    np.testing.assert_array_equal(reduce.sequences(TERMS, MASK, mode="mean"), [2, 5, 0])
    spread = reduce.segments(jnp.array([[1.0, 3.0, 4.0, 9.0]]), jnp.ones((1, 4), bool), jnp.array([[1, 1, 2, 0]]))
    np.testing.assert_array_equal(spread[0, :3], [2, 2, 4])
    assert float(reduce.scalars(jnp.array([1.0, 9.0]), jnp.array([True, False]))) == 1.0
    assert float(reduce.metrics({"x": TERMS}, MASK, prefix="p")["p/x"]) == 3.0


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="token_mean"):
        reduce.tokens(TERMS, MASK, mode="mean")
    with pytest.raises(ValueError, match="length_tokens"):
        reduce.tokens(TERMS, MASK, mode="constant")
