"""Muon on stacked layers, and weights in bfloat16 that small updates still move."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models.spec import matrix_shapes
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.methods.builders import make_policy_loss
from jaxrl_llm.train.optimisers import muon, rounded, stochastic_rounding
from jaxrl_llm.train.step import make_update
from jaxrl_llm.types import TrainState
from tests import close
from tests.models_for_tests import small_model
from tests.traps.tables import random_batch


def _state(tx, params):
    return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})


def _step(tx, family="qwen3", dtype=jnp.float32):
    policy, params, config = small_model(family)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    update = make_update(make_policy_loss(policy, clipped_policy_loss), tx(config))
    return params, update, _state(tx(config), params)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_muon_moves_every_matrix_of_a_layer_by_an_orthogonal_one(family, tmp_path):
    _, params, config = small_model(family)
    tx = muon(config, 0.01, ns_steps=10)
    state, leaves = tx.init(params), jax.tree.leaves(params)
    keys = jax.tree.unflatten(jax.tree.structure(params), list(jax.random.split(jax.random.key(0), len(leaves))))
    grads = jax.tree.map(lambda x, key: jax.random.normal(key, x.shape), params, keys)
    with jax.numpy_dtype_promotion("standard"):
        moved, after = jax.jit(tx.update)(grads, state, params)
    # Adam's first step, g / (|g| + 1e-8) and a factor below 2 of all: signs, but for the smallest gradients
    smallest = min(float(jnp.abs(x).min()) for x in jax.tree.leaves(grads))
    signs = 2 * (1e-8 / smallest + close.bound(close.OPERATIONS, 1.0))
    for name in matrix_shapes(config):
        stacked = np.asarray(moved["layers"][name], np.float64) / 0.01
        for matrix in stacked.reshape(-1, *stacked.shape[-2:]):
            if name == "router":
                assert np.ptp(np.abs(matrix)) < signs  # the first step of Adam
                continue
            values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(matrix.shape) ** 0.5)
            assert 0.5 < values.min() and values.max() < 1.3, (name, values)
    for name in ("embed", "final_norm"):
        size = np.abs(moved[name])
        assert np.ptp(size) < 0.01 * signs and 0.009 < size.mean() < 0.016  # optax looks a step ahead here as well
    # its state is kept like any other, and lies on a mesh like the parameters
    whole = TrainState(params, after, jnp.int32(1), jax.random.key(0), (), {})
    checkpoint.save(tmp_path, whole)
    again = checkpoint.restore(checkpoint.latest(tmp_path), whole._replace(opt_state=state))
    jax.tree.map(np.testing.assert_array_equal, again.opt_state, after)
    placed = rules.shard(after, meshes.parse_mesh("fsdp=2,tensor=2"))
    shares = [x.addressable_shards[0].data.size / x.size for x in jax.tree.leaves(placed) if x.size > 300]
    assert shares and max(shares) == 0.25


def test_rounding_is_unbiased_and_keeps_what_needs_none():
    exact = jnp.asarray([1.0, -2.5, 0.0, jnp.inf, -jnp.inf, 3e38], jnp.float32).astype(jnp.bfloat16)
    found = rounded(exact.astype(jnp.float32), jax.random.key(0))
    np.testing.assert_array_equal(found.astype(jnp.float32), exact.astype(jnp.float32))
    assert np.isnan(rounded(jnp.asarray([jnp.nan]), jax.random.key(0)).astype(jnp.float32)).all()
    x = jax.random.normal(jax.random.key(1), (64,))
    many = jax.vmap(lambda key: rounded(x, key).astype(jnp.float32))(jax.random.split(jax.random.key(2), 2000))
    near = np.abs(np.asarray(many) / np.asarray(x) - 1).max()
    # a draw is one of the two neighbours, at most 2**-7 of the number apart: their share decides the mean
    apart = float(jnp.finfo(jnp.bfloat16).eps)
    allowed = apart * close.of_draws(0.5, 2000, comparisons=64)
    assert near < apart and np.abs(np.asarray(many.mean(axis=0) / x) - 1).max() < allowed


def test_small_updates_add_up():
    """A hundred steps of a thousandth of a weight: lost by rounding to the nearest, kept in the mean."""
    params = {"w": jnp.ones((512,), jnp.bfloat16), "scale": jnp.ones((4,), jnp.float32)}
    grads = jax.tree.map(jnp.ones_like, params)
    for tx, lost in ((optax.sgd(1e-3), True), (stochastic_rounding(optax.sgd(1e-3)), False)):
        update = make_update(lambda p, g: (sum(jnp.sum((p[k] * g[k]).astype(jnp.float32)) for k in p), {}), tx,
                             max_grad_norm=None)  # fmt: skip
        run = jax.jit(lambda s, u=update: jax.lax.scan(lambda s, _: (u(s, grads)[0], None), s, None, 100)[0])
        after = run(_state(tx, params)).params
        assert after["w"].dtype == jnp.bfloat16
        # 512 weights of 100 draws each between neighbours 2**-8 apart: 100 times their share decides the mean
        allowed = 100 * 2**-8 * close.of_draws(0.5, 512 * 100)
        assert abs(float(after["w"].astype(jnp.float32).mean()) - (1.0 if lost else 0.9)) < allowed
        close.assert_near(after["scale"], np.full(4, 0.9), terms=100)


def test_adamw_in_bfloat16_follows_its_float32_masters():
    """The whole update: moments in float32, a tree of two kinds of leaves, close to the step with masters."""
    moved = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        tx = optax.adamw(1e-2) if dtype == jnp.float32 else stochastic_rounding(optax.adamw(1e-2))
        params, update, state = _step(lambda _, tx=tx: tx, dtype=dtype)
        after, _ = jax.jit(update)(state, random_batch())
        inner = state.opt_state if dtype == jnp.float32 else state.opt_state.inner
        assert {str(x.dtype) for x in jax.tree.leaves(inner)} <= {"float32", "int32"}
        assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype(dtype)}
        moved[dtype] = np.concatenate(
            [np.ravel(a.astype(jnp.float32) - b.astype(jnp.float32)) for a, b in
             zip(jax.tree.leaves(after.params["layers"]), jax.tree.leaves(params["layers"]), strict=True)]
        )  # fmt: skip
    assert np.corrcoef(*moved.values())[0, 1] > 0.9
    with pytest.raises(ValueError, match="parameters of float16 are neither bfloat16 nor float32"):
        stochastic_rounding(optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.float16)})
