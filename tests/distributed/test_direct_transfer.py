"""Weights from mesh to mesh: every element once, bit for bit, nothing on the host, nobody waits."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import array as arrays
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed import direct_transfer

BEFORE = (((4,), ("fsdp",)), ((2, 2), ("data", "fsdp")), ((1,), ("data",)))
AFTER = (((4,), ("tensor",)), ((2, 2), ("data", "tensor")), ((1,), ("data",)), ((2,), ("tensor",)))
SHAPES = ((), (8,), (4, 8), (4, 8, 2))


def mesh_of(kind, first):
    shape, names = kind
    size = int(np.prod(shape))
    return Mesh(np.asarray(jax.devices()[first : first + size]).reshape(shape), names)


def layouts(mesh, shape):
    """Every way to give each axis of the mesh to an axis of the array, or to none."""
    names = mesh.axis_names
    for places in itertools.product(range(-1, len(shape)), repeat=len(names)):
        spec = [tuple(n for n, p in zip(names, places, strict=True) if p == k) or None for k in range(len(shape))]
        cuts = [int(np.prod([mesh.shape[n] for n in part or ()])) for part in spec]
        if all(size % cut == 0 for size, cut in zip(shape, cuts, strict=True)):
            yield NamedSharding(mesh, P(*spec))


def pairs(shape):
    for one, other in itertools.product(BEFORE, AFTER):
        yield from itertools.product(layouts(mesh_of(one, 0), shape), layouts(mesh_of(other, 4), shape))


@pytest.fixture
def no_host(monkeypatch):
    """Whoever asks for the value of an array on the host is told no."""

    def refused(self):
        raise AssertionError("an array was copied to the host")

    monkeypatch.setattr(arrays.ArrayImpl, "_value", property(refused))
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        yield


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_fills_every_box_once_from_who_has_it(shape):
    for before, after in pairs(shape):
        held, wanted = (direct_transfer._boxes(shape, sharding) for sharding in (before, after))
        filled = [np.zeros(shape, int) for _ in wanted]
        for source, target, box in direct_transfer.plan(shape, before, after):
            where = tuple(slice(*ends) for ends in box)
            assert all(a >= c and b <= d for (a, b), (c, d) in zip(box, held[source][1], strict=True))
            filled[target][where] += 1
        for (_, box), count in zip(wanted, filled, strict=True):
            inside = np.zeros(shape, int)
            inside[tuple(slice(*ends) for ends in box)] = 1
            np.testing.assert_array_equal(count, inside)


def test_holders_of_the_same_part_send_by_turns():
    before, after = (NamedSharding(mesh_of(kind, k), P()) for kind, k in ((BEFORE[0], 0), (AFTER[0], 4)))
    assert sorted(p.source for p in direct_transfer.plan((8,), before, after)) == [0, 1, 2, 3]
    tree = {"w": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}
    assert direct_transfer.sent_bytes(tree, {"w": before}, {"w": after}) == 4 * 8 * 2
    halves = NamedSharding(after.mesh, P("tensor"))
    assert direct_transfer.sent_bytes(tree, {"w": before}, {"w": halves}) == 8 * 2


def bits(shape, dtype):
    """Numbers of all kinds, not numbers among them."""
    rng = np.random.default_rng(len(shape))
    raw = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_arrives_bit_for_bit_and_not_through_the_host(shape, dtype, request):
    values = bits(shape, jnp.dtype(dtype))
    some = list(pairs(shape))[:: max(1, len(list(pairs(shape))) // 12)]
    here = [jax.device_put(values, before) for before, _ in some]
    request.getfixturevalue("no_host")
    there = [direct_transfer.send(x, after) for x, (_, after) in zip(here, some, strict=True)]
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(arrays.ArrayImpl, "_value", _VALUE)
        for found, (_, after) in zip(there, some, strict=True):
            assert found.sharding == after and found.dtype == values.dtype
            for shard in found.addressable_shards:
                want = np.ascontiguousarray(values[shard.index])
                assert np.array(shard.data).tobytes() == want.tobytes()


_VALUE = arrays.ArrayImpl._value


def test_a_copy_on_the_host_would_be_seen(no_host):
    """What ``device_put`` does between layouts that cut an array differently, and why there is this module."""
    before, after = (NamedSharding(mesh_of(kind, k), P()) for kind, k in ((BEFORE[0], 0), (AFTER[0], 4)))
    x = jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(before.mesh, P("fsdp")))
    with pytest.raises(AssertionError, match="copied to the host"):
        jax.device_put(x, NamedSharding(after.mesh, P(None, "tensor")))
    with pytest.raises(AssertionError, match="copied to the host"):
        np.array(x)


def test_keys_travel_and_a_device_that_both_have_is_no_journey():
    after = NamedSharding(mesh_of(AFTER[1], 4), P())
    key = direct_transfer.send(jax.random.key(7), after)
    assert key.sharding.device_set == after.device_set
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))
    x = jnp.arange(4.0)
    assert direct_transfer.send({"x": x}, {"x": SingleDeviceSharding(jax.devices()[0])})["x"].tolist() == x.tolist()


@jax.jit
def long_way(x):
    """Seconds of work, whose result is ``x``."""
    big = jnp.ones((1024, 1024), jnp.float32) * x[0, 0]
    done = jax.lax.fori_loop(0, 60, lambda _, m: jnp.tanh(m @ m * 1e-4), big)
    return x + 0.0 * done[0, 0]


def update(params):
    return jax.tree.map(lambda w: w * 2.0 + 1.0, params)


def weights_on(mesh):
    return {"w": jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(mesh, P()))}


def test_the_next_update_is_dispatched_at_once_and_changes_nothing_that_is_under_way():
    """Weights that are still being computed are sent, then donated to the next update; all before there is a value."""
    before, after = mesh_of(BEFORE[2], 0), mesh_of(AFTER[3], 4)
    hand = direct_transfer.make_send(lambda tree: {"w": NamedSharding(after, P(None, "tensor"))})
    donated = jax.jit(update, donate_argnums=0)
    ready = hand(weights_on(before))
    jax.block_until_ready([donated({"w": long_way(weights_on(before)["w"])}), ready])  # all is compiled
    params = {"w": long_way(weights_on(before)["w"])}
    there = hand(params)
    params = donated(params)
    there_too = hand(params)
    waiting = [not x.is_ready() for x in (there["w"], params["w"], there_too["w"])]
    want = weights_on(before)
    np.testing.assert_array_equal(there["w"], want["w"])
    np.testing.assert_array_equal(there_too["w"], update(want)["w"])
    np.testing.assert_array_equal(params["w"], update(want)["w"])
    assert all(waiting)


def test_updates_go_on_while_the_generator_is_busy():
    """It generates for as long as three updates take, and their weights arrive all the same."""
    before, after = mesh_of(BEFORE[2], 0), mesh_of(AFTER[3], 4)
    hand = direct_transfer.make_send(lambda tree: {"w": NamedSharding(after, P("tensor"))})
    params, donated = weights_on(before), jax.jit(update, donate_argnums=0)
    over, entered = threading.Event(), threading.Event()

    def busy(x):
        entered.set()
        assert over.wait(120)
        return x

    def generate():
        there = jax.device_put(jnp.zeros(()), after.devices.flat[0])
        jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(busy, x, x))(there))

    thread = threading.Thread(target=generate)
    thread.start()
    assert entered.wait(120)
    sent = []
    for _ in range(3):
        params = jax.block_until_ready(donated(params))
        sent.append(hand(params))
    assert thread.is_alive() and not over.is_set()
    over.set()
    thread.join(120)
    want = jax.tree.map(np.array, weights_on(before))
    for found in sent:
        want = update(want)
        np.testing.assert_array_equal(found["w"], want["w"])


def test_what_travels_may_be_lighter_than_what_trains():
    before, after = mesh_of(BEFORE[1], 0), mesh_of(AFTER[1], 4)
    x = jax.device_put(jnp.linspace(0.0, 1.0, 32).reshape(4, 8), NamedSharding(before, P("data", "fsdp")))
    hand = direct_transfer.make_send(
        lambda tree: jax.tree.map(lambda _: NamedSharding(after, P("tensor")), tree), lambda w: w.astype(jnp.bfloat16)
    )
    found = hand(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, x.astype(jnp.bfloat16))
