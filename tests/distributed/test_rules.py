import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm import logprobs
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import FAMILIES, dense_rows, small_config, small_model

# data, fsdp, tensor; the other axes are in test_parts.py
SHAPES = [s for s in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)) if np.prod(s) == 8] + [(1, 1, 2)]


def _mesh(shape):
    return meshes.parse_mesh(",".join(f"{a}={n}" for a, n in zip(("data", "fsdp", "tensor"), shape, strict=True)))


def _placed(tree):
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def test_decoder_leaves_by_hand():
    _, params, _ = small_model("llama")
    placed = _placed(rules.shard(params, _mesh((2, 2, 2))))
    assert placed["embed"] == P("tensor", "fsdp") and placed["head"] == P("fsdp", "tensor")
    assert placed["layers"]["q"] == placed["layers"]["up"] == P(None, "fsdp", "tensor")
    assert placed["layers"]["o"] == placed["layers"]["down"] == P(None, "tensor", "fsdp")
    assert placed["final_norm"] == placed["layers"]["input_norm"] == P()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_device_holds_its_share(family):
    _, params, config = small_model(family)
    sharded = rules.shard(params, _mesh((1, 4, 2)))
    shard = sharded["layers"]["gate"].addressable_shards[0].data
    assert shard.shape == (config.num_layers, config.hidden_size // 4, config.intermediate_size // 2)
    jax.tree.map(np.testing.assert_array_equal, sharded, params)


def test_a_dimension_that_does_not_divide_is_whole():
    tree = {"embed": jnp.zeros((70, 16)), "layers": {"q": jnp.zeros((2, 6, 8))}, "other": jnp.zeros((8, 8))}
    placed = _placed(rules.shard(tree, _mesh((1, 4, 2))))
    assert placed["embed"] == P("tensor", "fsdp")  # 70 = 2 x 35
    assert placed["layers"]["q"] == P(None, None, "tensor") and placed["other"] == P()


def test_optimiser_moments_lie_where_their_parameters_lie():
    _, params, _ = small_model()
    state = optax.adam(1e-3).init(params)
    placed = rules.shard(state, _mesh((1, 2, 4)))
    assert placed[0].mu["layers"]["down"].sharding.spec == P(None, "tensor", "fsdp")
    assert placed[0].count.sharding.is_fully_replicated


def _batch(rows=8):
    segments, positions = dense_rows(rows, 6)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (rows, 6)), jnp.int32)
    zeros = jnp.zeros((rows, 6))
    return Batch(
        tokens, segments, positions, segments > 0, zeros, zeros, zeros, zeros, jnp.arange(rows, dtype=jnp.int32),
        jnp.float32(48.0), {"weights": zeros},
    )  # fmt: skip


def test_batch_rows_are_split_and_scalars_copied():
    mesh = _mesh((2, 2, 2))
    batch = rules.shard_batch(_batch(), mesh)
    assert batch.tokens.addressable_shards[0].data.shape == (2, 6)
    assert batch.group_ids.addressable_shards[0].data.shape == (2,)
    assert batch.total.sharding.is_fully_replicated
    with pytest.raises(ValueError, match=r"\.tokens has 6 rows, no multiple of data x fsdp x expert = 4"):
        rules.shard_batch(_batch(6), mesh)


def _loss(policy):
    def loss(params, batch):
        hidden = policy.hidden(params, batch.tokens, batch.positions, batch.segment_ids)
        logp = logprobs.token_logprobs(policy.unembed(params, hidden), batch.tokens)
        return -jnp.sum(logp) / batch.total, logp

    return jax.value_and_grad(loss, has_aux=True)


@functools.cache
def _alone(family):
    policy, params, _ = small_model(family)
    return jax.jit(_loss(policy))(params, _batch())


@pytest.mark.parametrize("shape", SHAPES)
def test_any_mesh_gives_the_one_device_step(shape):
    """Forward, loss and gradient of every mesh; each family gets a third of them."""
    family = FAMILIES[SHAPES.index(shape) % len(FAMILIES)]
    policy, params, config = small_model(family)
    mesh, batch = _mesh(shape), _batch()
    (value, logp), gradient = _alone(family)
    (value_, logp_), gradient_ = jax.jit(_loss(policy))(rules.shard(params, mesh), rules.shard_batch(batch, mesh))
    forward, back = close.forward_sums(config, 6), close.gradient_sums(config, 8, 6)
    close.assert_same_sums(logp_, logp, forward)
    close.assert_same_sums(value_, value, forward + logp.size)
    close.assert_same_sums(gradient_, gradient, back)


def test_the_bound_sees_one_row_that_is_lost():
    """What the comparison above is for: a shard whose rows do not arrive, or count twice."""
    policy, params, config = small_model()
    batch, back = _batch(), close.gradient_sums(small_model()[2], 8, 6)
    (value, _), gradient = _alone("qwen3")
    seven = jax.tree.map(lambda x: x[:7] if x.ndim else x, batch)
    (value_, _), gradient_ = jax.jit(_loss(policy))(params, seven)
    with pytest.raises(AssertionError):
        close.assert_same_sums(value_, value, close.forward_sums(config, 6) + 48)
    for name in ("q", "down", "gate"):
        with pytest.raises(AssertionError):
            close.assert_same_sums(gradient_["layers"][name], gradient["layers"][name], back)


def test_constraints_inside_jit():
    policy, params, config = small_model()
    mesh, batch = _mesh((2, 2, 2)), _batch()

    @jax.jit
    def step(params, batch):
        params, batch = rules.constrain(params, mesh), rules.constrain_batch(batch, mesh)
        (_, logp), gradient = _loss(policy)(params, batch)
        return logp, rules.constrain(gradient, mesh)

    logp, gradient = step(rules.shard(params, mesh), jax.device_put(batch, meshes.replicated(mesh)))
    assert logp.addressable_shards[0].data.shape == (2, 6)
    assert gradient["layers"]["q"].sharding.spec == P(None, "fsdp", "tensor")
    (_, want), _ = _alone("qwen3")
    close.assert_same_sums(logp, want, close.forward_sums(config, 6))


def test_fully_sharded_parameters_are_gathered_layer_by_layer():
    """Inside the scan no device ever holds all layers of a matrix."""
    policy, params, config = small_model("llama")
    mesh, batch = _mesh((1, 8, 1)), _batch()
    params, batch = rules.shard(params, mesh), rules.shard_batch(batch, mesh)
    text = jax.jit(_loss(policy)).lower(params, batch).compile().as_text()
    whole = f"f32[{config.num_layers},{config.hidden_size},{config.intermediate_size}]"
    assert "all-gather" in text and whole not in text


def test_cache_rows_over_the_batch_axes_and_heads_over_tensor():
    for layers, before in ((2, ()), (7, (None,))):  # a tuple, or an axis
        policy = make_policy(small_config(num_layers=layers), cache_dtype=jnp.int8)
        cache = jax.eval_shape(lambda policy=policy: policy.init_cache(8, 6))
        specs = jax.tree.map(lambda x: x.spec, rules.cache_shardings(cache, _mesh((2, 2, 2))))
        for name in ("k", "v", "k_scale", "v_scale"):
            found = set(specs[name]) if layers == 2 else {specs[name]}
            assert found == {P(*before, meshes.BATCH, "tensor")}
        assert specs["positions"] == P(meshes.BATCH)
        # two heads do not divide over four devices
        found = rules.cache_shardings(cache, _mesh((1, 2, 4)))["k"]
        assert (found[1] if layers == 2 else found).spec == P(*before, meshes.BATCH, None)


def test_adapters_lie_along_their_matrices():
    tree = {"q_lora_a": jnp.zeros((2, 16, 2)), "q_lora_b": jnp.zeros((2, 2, 16)), "down_lora_a": jnp.zeros((2, 32, 2))}
    placed = _placed(rules.shard(tree, _mesh((1, 4, 2))))
    assert placed == {"q_lora_a": P(None, "fsdp", None), "q_lora_b": P(None, None, "tensor"),
                      "down_lora_a": P(None, "tensor", None)}  # fmt: skip
