import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages.group import group_sum
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_policy_loss, sampler_anchor
from jaxrl_llm.train.step import accumulate, make_update, trained_first
from jaxrl_llm.types import Batch, TrainState
from tests import close
from tests.models_for_tests import dense_rows, small_config, small_model


@functools.cache
def _batch(mode="token_mean"):
    rng = np.random.default_rng(0)
    segments, positions = dense_rows(8, 6)
    mask = jnp.asarray(rng.random((8, 6)) < 0.6).at[:, 0].set(False)
    arrays = [jnp.asarray(rng.normal(size=(8, 6)), jnp.float32) for _ in range(2)]
    old = -jnp.abs(arrays[1])
    return Batch(
        tokens=jnp.asarray(rng.integers(0, 24, (8, 6)), jnp.int32), segment_ids=segments, positions=positions,
        mask=mask, advantages=arrays[0], old_logp=old, sampler_logp=old, ref_logp=old,
        group_ids=jnp.arange(8, dtype=jnp.int32), total=reduce.denominator(mask, mode=mode), extras={},
    )  # fmt: skip


def _state(tx):
    _, params, _ = small_model()
    params = jax.tree.map(jnp.copy, params)
    return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})


def _loss(mode="token_mean"):
    policy, _, _ = small_model()
    return make_policy_loss(policy, clipped_policy_loss, reduction=mode, length_tokens=5, anchor=sampler_anchor)


@pytest.mark.parametrize("mode", reduce.MODES)
@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_micro_batches_give_the_whole_gradient(mode, parts):
    """Trap 11: one batch of 8 and eight of 1 have the same gradient and metrics."""
    _, params, _ = small_model()
    batch = _batch(mode)
    whole = accumulate(_loss(mode), params, batch, 1)
    split = accumulate(_loss(mode), params, batch, parts)
    back = close.gradient_sums(small_config(), 8, 6)
    close.assert_same_sums(split[0], whole[0], back)
    close.assert_same_sums(split[1], whole[1], back, magnitude=float(jnp.abs(batch.advantages).max()))
    close.assert_same_figures(split[2], whole[2], back)


@pytest.mark.parametrize("batched", [False, True])
def test_parts_of_weights_in_bfloat16_add_up_in_float32(batched):
    """A sum of ones in bfloat16 ends at 256: there one more is half of the last bit."""
    params, rows = {"w": jnp.zeros((), jnp.bfloat16)}, 512
    ones = jnp.ones((rows, 1))
    batch = Batch(*[ones] * len(Batch._fields))._replace(
        mask=ones > 0, group_ids=jnp.arange(rows, dtype=jnp.int32), total=jnp.ones(()), extras={}
    )

    def loss(params, part):
        x = part.tokens if batched else part
        return jnp.sum(params["w"].astype(jnp.float32) * x), {}

    grads, _, _ = jax.jit(lambda p, x: accumulate(loss, p, x, rows))(params, batch if batched else ones)
    assert grads["w"].dtype == jnp.bfloat16 and float(grads["w"]) == 512.0


def test_clipping_comes_after_accumulation():
    """Trap 28: the update of sgd has exactly the bound as norm, whatever the parts."""
    tx = optax.sgd(1.0)
    for parts in (1, 8):
        before = _state(tx)
        after, metrics = make_update(_loss(), tx, microbatches=parts, max_grad_norm=1e-3)(before, _batch())
        moved = optax.global_norm(jax.tree.map(jnp.subtract, after.params, before.params))
        assert float(metrics["grad/norm"]) > 1e-2
        # of each parameter half a unit in the last place is lost, and the norm is a sum over all of them
        size, number = float(optax.global_norm(before.params)), sum(x.size for x in jax.tree.leaves(before.params))
        assert abs(float(moved) - 1e-3) < close.bound(1, size) + close.bound(number, 1e-3)


def test_every_leaf_moves_and_masked_advantages_do_nothing():
    tx = optax.adam(1e-2)
    state, _ = make_update(_loss(), tx)(_state(tx), _batch())
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), state.params, _state(tx).params)
    ):
        assert float(leaf) > 0, path
    poisoned = _batch()._replace(advantages=jnp.where(_batch().mask, _batch().advantages, jnp.nan))
    again, _ = make_update(_loss(), tx)(_state(tx), poisoned)
    jax.tree.map(np.testing.assert_array_equal, state.params, again.params)


def test_ema_follows():
    tx = optax.sgd(0.1)
    start = _state(tx)
    start = start._replace(extras={"ema": jax.tree.map(jnp.copy, start.params)})
    after, _ = make_update(_loss(), tx, ema_decay=0.9)(start, _batch())
    want = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, start.params, after.params)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: close.assert_near(a, b, terms=2, magnitude=largest), after.extras["ema"], want)


def test_donated_state_is_gone_and_the_second_step_compiles_nothing():
    """Traps 24 and 25."""
    tx = optax.adam(1e-3)
    update = jax.jit(make_update(_loss(), tx), donate_argnums=0)
    first = _state(tx)
    second, _ = update(first, _batch())
    assert first.params["embed"].is_deleted()
    update(second, _batch())
    assert update._cache_size() == 1


def test_parts_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="microbatches=3"):
        accumulate(_loss(), small_model()[1], _batch(), 3)


def test_a_loss_that_compares_the_members_of_a_group_may_be_split():
    """Groups are numbered anew in each part; what is a scalar of ``extras`` belongs to the step."""

    def loss(scale, batch):
        sums = reduce.sequences(batch.advantages * scale, batch.mask)
        gap = sums - group_sum(sums, batch.group_ids) / 2
        return jnp.sum(gap**2) / batch.extras["count"], {}

    ids = jnp.asarray([3, 3, 0, 0, 7, 7, 5, 5], jnp.int32)
    batch = _batch()._replace(group_ids=ids, extras={"count": jnp.float32(8)})
    whole, split = (accumulate(loss, jnp.float32(1.5), batch, parts) for parts in (1, 4))
    assert float(whole[1]) > 0.1
    close.assert_same_sums(split[:2], whole[:2], 2 * (6 + 2 + 8))  # columns, members and rows, and their squares


def test_parts_of_groups_that_do_not_train_are_skipped_and_change_nothing():
    """The first half of the groups is masked: the rows are reordered, the sums are those of one batch."""
    _, params, _ = small_model()
    batch = _batch()
    mask = batch.mask & (jnp.arange(8) >= 4)[:, None]
    batch = batch._replace(
        mask=mask, group_ids=jnp.arange(8, dtype=jnp.int32) // 2, total=reduce.denominator(mask, mode="token_mean")
    )
    assert trained_first(batch).group_ids.tolist() == [2, 2, 3, 3, 0, 0, 1, 1]
    whole, split = (accumulate(_loss(), params, batch, parts) for parts in (1, 4))
    back = close.gradient_sums(small_config(), 8, 6)
    close.assert_same_sums(split[0], whole[0], back)
    close.assert_same_sums(split[1:], whole[1:], back, magnitude=float(jnp.abs(batch.advantages).max()))

    def counted(params, rows):
        jax.debug.callback(lambda: calls.append(1))
        return _loss()(params, rows)

    calls = []
    jax.block_until_ready(jax.jit(lambda p, b: accumulate(counted, p, b, 4))(params, batch))
    jax.effects_barrier()
    assert len(calls) == 2  # of four parts


def test_nothing_trains():
    """A batch without a masked token gives zero gradients, in parts and whole."""
    _, params, _ = small_model()
    batch = _batch()
    batch = batch._replace(mask=jnp.zeros_like(batch.mask), total=jnp.ones(()))
    for parts in (1, 4):
        assert all(not np.any(np.asarray(g)) for g in jax.tree.leaves(accumulate(_loss(), params, batch, parts)[0]))


@pytest.mark.parametrize(("slope", "moved", "skipped"), [(2.0, [0.0, 0.0], 0.0), (np.inf, [1.0, 1.0], 1.0)])
def test_the_gradient_decides_whether_an_update_is_left_out(slope, moved, skipped):
    """Not the loss: a term without a gradient, which is no number here, changes no update."""

    def loss(params, rows):
        return jnp.sum(params * rows) + jax.lax.stop_gradient(jnp.float32(jnp.nan)), {}

    tx = optax.sgd(0.5)
    state = TrainState(jnp.ones(2), tx.init(jnp.ones(2)), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})
    new, metrics = make_update(loss, tx, max_grad_norm=None)(state, jnp.full((2,), slope, jnp.float32))
    assert new.params.tolist() == moved
    assert float(metrics["update/skipped"]) == skipped and np.isnan(float(metrics["loss/total"]))
