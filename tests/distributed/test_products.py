"""Products whose weights' gradients come back by an all-to-all: those of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.products import make_product
from jaxrl_llm.models.decoder import make_policy
from tests import close
from tests.models_for_tests import small_model


def _results(product, name, x, weight, slope):
    def loss(x, weight):
        return jnp.sum(product(x, weight, name).astype(jnp.float32) * slope)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight)


@pytest.mark.parametrize("spec", ["fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2", "fsdp=2,expert=4"])
@pytest.mark.parametrize("name", ["q", "down"])
def test_gradients_are_those_of_the_plain_product(spec, name):
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, slope = (jax.random.normal(k, s) for k, s in zip(keys, ((16, 24), (24, 32), (16, 32)), strict=True))
    product = make_product(meshes.parse_mesh(spec))
    traced = str(jax.make_jaxpr(lambda *given: _results(product, name, *given))(x, weight, slope))
    assert "all_to_all" in traced
    got = _results(product, name, x, weight, slope)
    want = _results(lambda x, w, _: x @ w, name, x, weight, slope)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_sum_is_in_float32():
    """In bfloat16 each device rounds its own part alone: nearer to the truth than sums that are rounded on the way."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, slope = (jax.random.normal(k, (64, 8)).astype(jnp.bfloat16) for k in keys)
    weight = jnp.zeros((8, 8), jnp.float32)
    product = make_product(meshes.parse_mesh("fsdp=8"))
    got = _results(product, "q", x, weight, slope.astype(jnp.float32))[1]
    parts = np.einsum("psd,psf->pdf", *(np.asarray(a, np.float64).reshape(8, 8, 8) for a in (x, slope)))
    rounded = np.asarray(jnp.asarray(parts, jnp.float32).astype(jnp.bfloat16), np.float64).sum(0)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, rounded, atol=2e-2)
    np.testing.assert_allclose(got, parts.sum(0), atol=6e-2)


@pytest.mark.parametrize("spec", ["data=8", "fsdp=4,context=2", "fsdp=8"])
def test_what_does_not_divide_is_left_to_the_compiler(spec):
    x, weight = jnp.ones((16 if spec != "fsdp=8" else 12, 24)), jnp.ones((24, 32))
    product = make_product(meshes.parse_mesh(spec))
    assert "all_to_all" not in str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(product(x, w, "q"))))(weight))
    assert "all_to_all" not in str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(product(x, w, "router"))))(weight))


def test_a_decoder_learns_the_same():
    """Loss and gradients of every parameter, recomputed in the backward pass."""
    _, params, config = small_model("qwen3")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], (8, 12))

    def step(policy, params):
        def loss(params):
            logits = policy.unembed(params, policy.hidden(params, tokens, positions, jnp.ones_like(tokens)))
            return jnp.sum(jnp.sin(logits))

        return jax.jit(jax.value_and_grad(loss))(params)

    want = step(make_policy(config), params)
    mesh = meshes.parse_mesh("fsdp=4,tensor=2")
    policy = make_policy(config, remat=True, place=rules.make_place(mesh), product_fn=make_product(mesh))
    got = step(policy, rules.shard(params, mesh))
    sums = close.gradient_sums(config, *tokens.shape) + tokens.size * config.padded_vocab_size
    close.assert_same_sums(got, want, sums)
