"""Attention by a ring: values and gradients of attention to all keys at once, plain and by the kernel."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.model_parallel import make_attend
from jaxrl_llm.distributed.ring import Parts
from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import Seen
from jaxrl_llm.models.kernels import attention_kernels
from jaxrl_llm.planning import chips, compiled, known_models, phases
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.planning.work import Work
from tests import close

COLUMNS = 64
SUMS = close.attention_sums(COLUMNS, COLUMNS, 8, 2)  # of ``_case``


def _case(dtype=jnp.float32, width=8):
    """Four rows of four heads on two: one whole, one padded before, one behind, one of three packed sequences."""
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (4, COLUMNS, 4, width), dtype)
    k, v = (jax.random.normal(key, (4, 2, COLUMNS, width), dtype) for key in keys[1:3])
    segments = np.ones((4, COLUMNS), np.int32)
    segments[1, :21], segments[2, 30:], segments[3, 9:40], segments[3, 40:] = 0, 0, 2, 3
    positions = [np.concatenate([np.arange((row == s).sum()) for s in dict.fromkeys(row)]) for row in segments]
    places = jnp.asarray(np.stack(positions), jnp.int32), jnp.asarray(segments)
    return q, k, v, Seen(*places, *places), jax.random.normal(keys[3], q.shape, dtype)


def _parts(name):
    return Parts(*attention_kernels.make_parts(name, platform="cpu"))


def _results(attend, q, k, v, weights, real):
    """The output where anybody is seen, and gradients of a sum that weighs it."""

    def loss(q, k, v):
        out = jnp.where(real, attend(q, k, v).astype(jnp.float32), 0.0)
        return jnp.sum(out * weights.astype(jnp.float32)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *grads


CASES = [
    ("context=8", "xla", True, None, 0), ("data=2,context=4", "xla", True, 1.5, 0),
    ("context=2,tensor=4", "xla", True, None, 17), ("context=2,fsdp=2,tensor=2", "pallas", True, 1.5, 17),
    ("context=4,tensor=2", "pallas", False, None, 0),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "name", "positions", "softcap", "window"), CASES)
def test_values_and_gradients_are_those_of_all_keys_at_once(spec, name, positions, softcap, window):
    q, k, v, seen, weights = _case()
    seen = seen._replace(window=window) if window else seen
    dense = seen.dense()
    real = jnp.any(dense, axis=2)[..., None, None]
    settings = {"softcap": softcap, "scale": 0.4}
    want = _results(lambda *x: attention.attend(*x, dense, **settings), q, k, v, weights, real)
    mesh = meshes.parse_mesh(spec)
    attend = make_attend(mesh, attention.attend, parts=_parts(name))
    mask = seen if positions else dense
    traced = str(jax.make_jaxpr(lambda *x: attend(*x, mask, **settings))(q, k, v))
    assert "ppermute" in traced and "all_gather" not in traced
    got = _results(lambda *x: attend(*x, mask, **settings), q, k, v, weights, real)
    close.assert_same_sums(got, want, SUMS)


def test_in_bfloat16_a_ring_is_about_as_near_to_the_truth_as_one_device():
    """Parts are put together in float32."""
    q, k, v, seen, weights = _case(jnp.bfloat16)
    dense = seen.dense()
    real = jnp.any(dense, axis=2)[..., None, None]
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    truth = _results(lambda *x: attention.attend(*x, dense), *wide, weights, real)
    ring = make_attend(meshes.parse_mesh("context=8"), attention.attend, parts=_parts("xla"))
    here = _results(lambda *x: attention.attend(*x, dense), q, k, v, weights, real)
    got = _results(lambda *x: ring(*x, dense), q, k, v, weights, real)
    for one, alone, right in zip(got, here, truth, strict=True):
        off = [np.abs(np.asarray(x, np.float64) - np.asarray(right, np.float64)).max() for x in (one, alone)]
        assert one.dtype == alone.dtype and off[0] <= 3 * off[1] + 1e-3


@pytest.mark.parametrize("name", ["xla", "pallas"])
def test_parts_of_the_keys_put_together_are_the_whole(name):
    """By hand, without a mesh; in blocks of queries too."""
    q, k, v, seen, grad = _case()
    part, gradients = attention_kernels.make_parts(name, platform="cpu")
    cut = [
        (k[:, :, a:b], v[:, :, a:b], Seen(*seen[:2], seen.key_positions[:, a:b], seen.key_segments[:, a:b]))
        for a, b in ((0, 24), (24, COLUMNS))
    ]
    run, back = (jax.jit(partial(fn, block=16)) for fn in (part, gradients))
    (out, lse), (more, added) = (run(q, *each) for each in cut)
    total = jnp.logaddexp(lse, added)
    whole = sum(jnp.swapaxes(jnp.exp(s - total), 1, 2)[..., None] * x for x, s in ((out, lse), (more, added)))
    want, pull = jax.vjp(lambda *x: attention.attend(*x, seen.dense()), q, k, v)
    real = np.asarray(jnp.any(seen.dense(), axis=2))
    close.assert_same_sums(whole[real], want[real], SUMS)
    grad = jnp.where(real[..., None, None], grad, 0.0)
    delta = jnp.swapaxes(jnp.sum(grad * whole, axis=-1), 1, 2)
    found = [back(q, *each, total, delta, grad) for each in cut]
    joined = (jnp.concatenate([f[i] for f in found], axis=2) for i in (1, 2))
    got = (found[0][0] + found[1][0], *joined)
    close.assert_same_sums(got, pull(grad), SUMS)


def test_a_device_never_holds_a_whole_row():
    """By XLA's buffers: of twice as many devices along context each needs little more than half."""
    peaks = {}
    for devices in (2, 8):
        mesh = meshes.parse_mesh(f"context={devices},data={8 // devices}")
        sharding = jax.NamedSharding(mesh, jax.P("data", "context"))
        q = jax.ShapeDtypeStruct((8 // devices, 4096, 2, 32), jnp.float32, sharding=sharding)
        keys = jax.NamedSharding(mesh, jax.P("data", None, "context"))
        k = jax.ShapeDtypeStruct((8 // devices, 2, 4096, 32), jnp.float32, sharding=keys)
        places = jax.ShapeDtypeStruct((8 // devices, 4096), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P("data")))
        attend = make_attend(mesh, attention.attend, parts=_parts("xla"))

        def loss(q, k, v, places, attend=attend):
            return jnp.sum(attend(q, k, v, Seen(places, places + 1, places, places + 1)))

        found = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k, places).compile().memory_analysis()
        peaks[devices] = found.temp_size_in_bytes
    assert peaks[8] < 0.4 * peaks[2], peaks


@pytest.mark.slow
@pytest.mark.skipif(not compiled.available(), reason="needs libtpu (extra plan)")
def test_long_rows_of_a_large_model_compile_for_a_slice():
    """Four layers of Qwen3-8B, rows of 131,072 tokens, an update on 64 chips with eight along context."""
    topology = chips.parse("v5p:4x4x4")
    config = dataclasses.replace(known_models.shape_of("Qwen3-8B"), num_layers=8, max_positions=131072)
    train = Sizes(fsdp=8, context=8)
    work = Work(prompt=3072, response=128000, rows=8, rollout_rows=8)
    phase = phases.update_phase(config, train.mesh(compiled.devices(topology)), work)
    found = compiled.of_phase(phase, -1.0, chip=topology.chip)
    assert found.fits and found.working > 0
    assert found.schedule.computing > 0 and found.schedule.kernels > 0 and found.schedule.unknown_loops == 0
