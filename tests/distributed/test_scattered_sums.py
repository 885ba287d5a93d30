"""Gradients summed on their way around a ring: those of the plain product, on every kind of mesh."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed import rules, scattered_sums
from jaxrl_llm.distributed.mesh import parse_mesh
from jaxrl_llm.models import lora
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.layers import plain_product
from tests import close
from tests.models_for_tests import small_config

MESHES = ("fsdp=8", "fsdp=2", "data=2,fsdp=4", "fsdp=4,tensor=2", "fsdp=2,expert=2,tensor=2", "fsdp=2,context=2,data=2")


def _case(name, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(len(name)), 3)
    width, inner = 16, 32
    shape = (inner, width) if name == "down" else (width, inner)
    x = jax.random.normal(keys[0], (8, 4, shape[0]), dtype)
    return x, jax.random.normal(keys[1], shape), jax.random.normal(keys[2], (8, 4, shape[1]), dtype)


def _gradients(product, mesh, name, dtype=jnp.float32):
    x, weight, slopes = _case(name, dtype)

    def loss(x, weight):
        return jnp.sum(jnp.sin(product(x, weight, name).astype(jnp.float32)) * slopes.astype(jnp.float32))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, rules.shard({name: weight[None]}, mesh)[name][0])


@pytest.mark.parametrize("name", ["gate", "down"])
@pytest.mark.parametrize("spec", MESHES)
def test_values_and_gradients_are_those_of_the_plain_product(spec, name):
    mesh = parse_mesh(spec)
    found = _gradients(scattered_sums.make_product(mesh, least=(2, 1)), mesh, name)
    expected = _gradients(plain_product, mesh, name)
    # the gradient adds up 32 tokens, of slopes that are sums over the other axis of the matrix; the value all of it
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        close.assert_same_sums(one, other, 32 + 32 + 8 * 4 * 32)


@pytest.mark.parametrize("spec", ["fsdp=8", "data=4,fsdp=2"])
def test_bfloat16_is_no_further_from_float32_than_the_plain_product_is(spec):
    mesh, errors = parse_mesh(spec), {}
    exact = _gradients(plain_product, mesh, "gate")[1][1]
    for kind, product in (("ring", scattered_sums.make_product(mesh, least=(2, 1))), ("plain", plain_product)):
        found = _gradients(product, mesh, "gate", jnp.bfloat16)[1][1]
        assert found.dtype == jnp.float32
        errors[kind] = float(jnp.sqrt(jnp.mean((found - exact) ** 2) / jnp.mean(exact**2)))
    assert errors["ring"] < max(1.2 * errors["plain"], 0.01)


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6, 7), (3, 1, 4, 0, 5, 2, 7, 6)])
def test_any_order_of_the_devices_gives_the_sum(order, cut):
    mesh = parse_mesh("fsdp=8")
    x, slopes = (jax.random.normal(jax.random.key(i), (16, width)) for i, width in enumerate((16, 24)))
    run = jax.shard_map(
        partial(scattered_sums.scattered_sum, order=order, cut=cut),
        mesh=mesh, in_specs=P("fsdp", None), out_specs=P("fsdp", None) if cut == 0 else P(None, "fsdp"),
    )  # fmt: skip
    close.assert_same_sums(jax.jit(run)(x, slopes), x.T @ slopes, 16)


def test_a_gradient_travels_to_neighbours_and_is_summed_by_no_collective():
    mesh = parse_mesh("fsdp=8")
    product = scattered_sums.make_product(mesh, least=(2, 1))
    x, weight, _ = _case("gate")

    def summed(product):
        placed = rules.shard({"gate": weight[None]}, mesh)["gate"]
        one = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(product(rules.shard_batch(x, mesh), w[0], "gate")))))
        return one.lower(placed).compile().as_text()

    ring, plain = summed(product), summed(plain_product)
    assert ring.count(" collective-permute(") == 7
    assert not any(f" {op}(" in ring for op in ("reduce-scatter", "all-reduce"))
    assert any(f" {op}(" in plain for op in ("reduce-scatter", "all-reduce"))


def test_what_does_not_divide_is_the_plain_product():
    mesh = parse_mesh("fsdp=8")
    x, weight, _ = _case("gate")
    for product, rows in ((scattered_sums.make_product(mesh), 8), (scattered_sums.make_product(mesh, least=(2, 1)), 3)):
        text = jax.jit(jax.grad(lambda w: jnp.sum(product(x[:rows], w, "gate")))).lower(weight).as_text()  # noqa: B023
        assert "collective_permute" not in text


@pytest.mark.parametrize("grid", [(2, 4), (4, 4), (3, 2), (8, 8), (2, 2, 2), (4, 4, 4), (3, 2, 3), (1, 2, 2)])
def test_each_is_a_neighbour_of_the_next_and_the_last_of_the_first(grid):
    places = list(itertools.product(*(range(2, 2 + side) for side in grid)))
    np.random.default_rng(0).shuffle(places)
    order = scattered_sums.ring_order([tuple(map(int, place)) for place in places])
    assert sorted(order) == list(range(len(places)))
    for one, next_one in zip(order, order[1:] + order[:1], strict=True):
        assert sum(abs(a - b) for a, b in zip(places[one], places[next_one], strict=True)) == 1


@pytest.mark.parametrize("places", [[(0, 0), (1, 0), (2, 0)], [(0, 0), (0, 1), (1, 0)], [(0, 0)] * 2])
def test_places_without_a_way_around_stay_as_they_are(places):
    assert scattered_sums.ring_order(places) == list(range(len(places)))


@pytest.mark.parametrize("remat", [False, True])
def test_a_whole_decoder_has_the_gradients_of_the_plain_one(remat):
    config = small_config()
    mesh = parse_mesh("data=2,fsdp=4")
    params = rules.shard(make_policy(config).init(jax.random.key(0)), mesh)
    tokens = jax.random.randint(jax.random.key(1), (8, 6), 0, config.vocab_size)
    places = (jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (8, 6)), jnp.ones((8, 6), jnp.int32))

    def gradients(**settings):
        policy = make_policy(config, remat=remat, place=rules.make_place(mesh), **settings)
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(policy.hidden(p, tokens, *places)))))(params)

    found = gradients(product_fn=scattered_sums.make_product(mesh, least=(2, 1)))
    close.assert_same_sums(found, gradients(), close.gradient_sums(config, 8, 6))


@pytest.mark.parametrize("remat", [False, True])
def test_a_frozen_matrix_is_summed_around_no_ring(remat):
    config, thin = small_config(), lora.Lora(2)
    mesh = parse_mesh("fsdp=8")
    product = scattered_sums.make_product(mesh, least=(2, 1))
    inner = make_policy(config, remat=remat, place=rules.make_place(mesh), product_fn=product)
    policy = lora.make_policy(inner, config, thin)
    params = rules.shard(policy.init(jax.random.key(0)), mesh)
    tokens = jnp.ones((8, 6), jnp.int32)

    def text(run, *given):
        summed = jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(run(*given, tokens, tokens, tokens)))))
        return summed.lower(*given).compile().as_text()

    def adapted(thin, base, *rows):
        return policy.hidden({"base": base, "lora": thin}, *rows)

    assert "/ppermute" not in text(adapted, params["lora"], params["base"])
    assert "/ppermute" in text(inner.hidden, params["base"])
