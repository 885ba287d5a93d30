"""Products of groups by the kernel: as a float64 loop over rows has them, with gradients, alone and on a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.model_parallel import make_experts
from jaxrl_llm.models import mlp
from jaxrl_llm.models.kernels import attention_kernels
from jaxrl_llm.models.kernels.grouped import by_kernel, grouped
from jaxrl_llm.planning import chips, compiled
from tests import close

KERNEL = partial(by_kernel, interpret=True)


def _made(sizes, rows, d=128, f=256, seed=3):
    rng = np.random.default_rng(seed)
    shapes = ((rows, d), (len(sizes), d, f), (rows, f))
    return *(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes), jnp.asarray(sizes, jnp.int32)


def _loop(x, matrices, sizes):
    """In float64, row by row; rows of no group are left at 0."""
    found, of_row = np.zeros((len(x), matrices.shape[2])), np.repeat(np.arange(len(sizes)), sizes)
    for i, group in enumerate(of_row):
        found[i] = np.asarray(x[i], np.float64) @ np.asarray(matrices[group], np.float64)
    return found


@pytest.mark.parametrize(
    ("sizes", "rows", "f"),
    [([3, 0, 7, 1], 11, 256), ([0, 0, 5, 0], 20, 256), ([130, 1, 0, 125], 256, 192), ([700, 600], 1300, 256)],
    ids=["handfuls", "rows of no group", "over tiles, in part", "many"],
)
def test_as_a_loop_over_rows(sizes, rows, f):
    """192 columns: a quarter of 768, as they lie along ``tensor``."""
    x, matrices, out, counts = _made(sizes, rows, f=f)
    mine = (np.arange(rows) < sum(sizes))[:, None]

    def loss(x, matrices, product):
        found = jnp.where(mine, product(x, matrices, counts), 0)  # what lies beyond the last group is anything
        return jnp.sum(found * out), found

    def both(product):
        return jax.jit(jax.value_and_grad(partial(loss, product=product), (0, 1), has_aux=True))(x, matrices)

    (_, found), slopes = both(KERNEL)
    close.assert_same_sums(found, _loop(x, matrices, sizes), x.shape[1])
    of_rows, want = (np.where(mine, one[0], 0) for one in (slopes, both(grouped)[1]))  # those beyond are anything, too
    close.assert_same_sums(of_rows, want, matrices.shape[2])
    of_row = np.repeat(np.arange(len(sizes)), sizes)
    for group in range(len(sizes)):
        own = np.flatnonzero(of_row == group)
        want = np.asarray(x, np.float64)[own].T @ np.asarray(out, np.float64)[own]
        close.assert_same_sums(slopes[1][group], want, max(rows, 1))


def test_axes_that_the_kernel_cannot_cut_are_left_to_xla():
    x, matrices, _, sizes = _made([2, 3], 5, d=48, f=40)
    np.testing.assert_array_equal(KERNEL(x, matrices, sizes), grouped(x, matrices, sizes))


def test_who_has_it():
    assert attention_kernels.make_grouped("auto", platform="cpu") is grouped
    assert attention_kernels.make_grouped("auto", platform="gpu") is grouped
    assert attention_kernels.make_grouped("auto", platform="tpu").keywords == {"interpret": False}
    assert attention_kernels.make_grouped("pallas", platform="cpu").keywords == {"interpret": True}


@pytest.mark.parametrize(
    ("spec", "exchange", "few"),
    [("", False, 0), ("data=2,expert=4", False, 0), ("data=2,expert=4", False, 256), ("expert=4,tensor=2", False, 256),
     ("expert=4,tensor=2", True, 256)],
)  # fmt: skip
def test_experts_are_computed_by_it(spec, exchange, few):
    """Values and gradients of every expert on every token, on one device and where experts lie on several."""
    rng, experts, width, inner, rows, per_token = np.random.default_rng(5), 8, 128, 256, 32, 2
    shapes = {"gate": (experts, width, inner), "up": (experts, width, inner), "down": (experts, inner, width)}
    layer = {f"experts_{n}": jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    x, out = (jnp.asarray(rng.normal(size=(rows, width)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.uniform(size=(rows, per_token)), jnp.float32)
    chosen = jnp.asarray(np.stack([rng.permutation(experts)[:per_token] for _ in range(rows)]), jnp.int32)

    def both(experts_fn):
        def loss(layer, x, weights):
            found = experts_fn(jax.nn.silu, layer, x, weights, chosen)
            return jnp.sum(found * out), found

        (_, found), slopes = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(layer, x, weights)
        return found, slopes

    kernel = attention_kernels.make_grouped("pallas", platform="cpu")
    own = make_experts(meshes.parse_mesh(spec), kernel, exchange=exchange, few=few) if spec else None
    jaxpr = str(jax.make_jaxpr(partial(own or mlp.dense_experts, jax.nn.silu))(layer, x, weights, chosen))
    assert ("sort" in jaxpr) == (bool(spec) and (exchange or not few)), "few rows go through all experts as they come"
    got = both(own or partial(mlp.grouped_experts, grouped_fn=kernel))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(both(mlp.dense_experts)), strict=True):
        close.assert_same_sums(a, b, rows * per_token * width * inner)


@pytest.mark.parametrize(("rows", "few"), [(64, True), (60, False), (68, False)])
def test_few_rows_are_those_that_choose_every_expert_and_no_more(rows, few):
    """60 rows choose 120 of 128 experts: fewer are read where rows are sorted; 68 are more than ``few``."""
    layer = {f"experts_{n}": jnp.zeros((128, 8, 8)) for n in ("gate", "up", "down")}
    kernel = attention_kernels.make_grouped("pallas", platform="cpu")
    experts = make_experts(meshes.parse_mesh("expert=4"), kernel, exchange=False, few=64)
    weights, chosen = jnp.zeros((rows, 2)), jnp.zeros((rows, 2), jnp.int32)
    jaxpr = str(jax.make_jaxpr(partial(experts, jax.nn.silu))(layer, jnp.zeros((rows, 8)), weights, chosen))
    assert ("sort" not in jaxpr) == few


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
@pytest.mark.parametrize("name", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "v7x:2x2x1"])
def test_the_compiler_has_it_for_four_generations(name):
    """Forward and backward, experts on four of eight devices."""
    mesh = meshes.parse_mesh("data=2,expert=4", compiled.devices(chips.parse(name)))
    shapes = {"gate": (16, 256, 192), "up": (16, 256, 192), "down": (16, 192, 256)}
    layer = {f"experts_{n}": jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    weights, chosen = jax.ShapeDtypeStruct((512, 2), jnp.float32), jax.ShapeDtypeStruct((512, 2), jnp.int32)
    experts = make_experts(mesh, attention_kernels.make_grouped("auto", platform="tpu"), exchange=False, few=0)

    def loss(layer, x, weights, chosen):
        return jnp.sum(experts(jax.nn.silu, layer, x, weights, chosen).astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(layer, x, weights, chosen)
    asked = lowered.as_text()
    assert "tpu_custom_call" in asked and "ragged_dot" not in asked
    assert lowered.compile().memory_analysis().temp_size_in_bytes > 0
