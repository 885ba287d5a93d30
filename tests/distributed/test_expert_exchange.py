"""Tokens that go to their experts compute what they would at home: values, gradients, and however uneven the choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed import expert_exchange as exchange
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.model_parallel import make_experts
from jaxrl_llm.models import mlp
from jaxrl_llm.planning import chips, compiled
from tests import close

ROWS, WIDTH, INNER = 16, 6, 4


def _made(experts, per_token, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"gate": (experts, WIDTH, INNER), "up": (experts, WIDTH, INNER), "down": (experts, INNER, WIDTH)}
    layer = {f"experts_{n}": jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    x, out = (jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.uniform(size=(ROWS, per_token)), jnp.float32)
    chosen = np.stack([rng.permutation(experts)[:per_token] for _ in range(ROWS)])
    return layer, x, weights, jnp.asarray(chosen, jnp.int32), out


def _both(experts_fn, layer, x, weights, chosen, out):
    def loss(layer, x, weights):
        found = experts_fn(jax.nn.silu, layer, x, weights, chosen)
        return jnp.sum(found * out), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(layer, x, weights)
    return found, gradients


@pytest.mark.parametrize(
    ("spec", "experts", "per_token"),
    [("expert=8", 16, 2), ("data=2,expert=4", 8, 3), ("fsdp=2,expert=2,tensor=2", 4, 2), ("expert=4", 8, 8)],
)
def test_as_every_expert_on_every_token(spec, experts, per_token):
    given = _made(experts, per_token)
    want = _both(mlp.dense_experts, *given)
    sent = make_experts(meshes.parse_mesh(spec), exchange=True)
    for a, b in zip(jax.tree.leaves(_both(sent, *given)), jax.tree.leaves(want), strict=True):
        close.assert_same_sums(a, b, ROWS * per_token * WIDTH * INNER)


@pytest.mark.parametrize("alike", [0, 5])
def test_nothing_is_dropped_where_all_choose_the_same(alike):
    layer, x, weights, chosen, out = _made(8, 2)
    chosen = jnp.broadcast_to(jnp.array([alike, alike ^ 1], jnp.int32), chosen.shape)  # both on one device
    sent = make_experts(meshes.parse_mesh("expert=4"), exchange=True)
    want = _both(mlp.dense_experts, layer, x, weights, chosen, out)
    got = _both(sent, layer, x, weights, chosen, out)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close.assert_same_sums(a, b, ROWS * 2 * WIDTH * INNER)


def test_each_token_goes_once_to_each_of_its_devices():
    """Two devices of two experts; three tokens each, all of the first to itself, of the second two to the other."""
    chosen = jnp.array([[0, 1], [1, 0], [0, 1], [0, 3], [2, 3], [1, 0]], jnp.int32)
    rows = jnp.array([[1.0], [2], [3], [4], [5], [6]])
    mesh = meshes.parse_mesh("expert=2")

    def local(rows, chosen):
        way = exchange.routes(chosen, 2, 2, "expert")
        got = exchange.sent(rows, way, exchange.collected, "expert")
        back = exchange.returned(10 * got, way, exchange.collected, "expert")
        return got, back, way.count, way.first

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("expert"),) * 2, out_specs=(P("expert"),) * 4, check_vma=False)
    got, back, count, first = run(rows, chosen)
    assert count.tolist() == [3, 0, 2, 2], "of the second device two to the first, two to itself"
    # room for three rows of each source, on each of the two
    assert got[:, 0].tolist() == [1, 2, 3, 4, 6, 0, 0, 0, 0, 4, 5, 0]
    assert back[:, 0].tolist() == [10, 20, 30, 80, 50, 60], "one sum of each device that it went to"
    assert first.tolist() == [[True, False]] * 3 + [[True, True], [True, False], [True, False]]


@pytest.mark.parametrize(
    ("platform", "kind", "parts", "per_token", "sent"),
    [
        ("cpu", "cpu", 8, 2, False), ("tpu", "TPU v5", 8, 2, True), ("tpu", "TPU v5", 16, 8, False),
        ("tpu", "TPU v5", 64, 8, True), ("tpu", "TPU v5 lite", 16, 2, True), ("tpu", "TPU v5 lite", 32, 2, False),
        ("gpu", "NVIDIA H100 80GB HBM3", 8, 2, False),
    ],
)  # fmt: skip
def test_only_where_there_is_a_program_and_the_links_gain(platform, kind, parts, per_token, sent):
    assert exchange.pays(platform, kind, parts, parts, per_token) is sent


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
@pytest.mark.parametrize("name", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "v7x:2x2x1"])
def test_the_compiler_has_it_for_four_generations(name):
    """Forward and backward, on eight chips: rows of ragged size, and no row of a token to where it has no expert."""
    topology = chips.parse(name)
    mesh = meshes.parse_mesh("expert=8", compiled.devices(topology))
    shapes = {"gate": (16, 256, 128), "up": (16, 256, 128), "down": (16, 128, 256)}
    layer = {f"experts_{n}": jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    weights, chosen = jax.ShapeDtypeStruct((512, 2), jnp.float32), jax.ShapeDtypeStruct((512, 2), jnp.int32)
    experts = make_experts(mesh)

    def loss(layer, x, weights, chosen):
        return jnp.sum(experts(jax.nn.silu, layer, x, weights, chosen).astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(layer, x, weights, chosen)
    asked = lowered.as_text()
    assert "ragged_all_to_all" in asked and "all_gather" not in asked
    compiled_program = lowered.compile()
    assert compiled_program.memory_analysis().temp_size_in_bytes > 0
    if name == "v5e:2x4":  # of the others this jaxlib cannot read the program that the compiler gives back
        assert "ragged-all-to-all-start" in compiled_program.as_text()
