"""Weights in pieces: whole and exact on arrival, resumed where they were cut, checked, by the shards of devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed import weight_transfer
from jaxrl_llm.train.step import trained_part


def weights():
    big = jax.random.normal(jax.random.key(0), (6, 5))
    layers = [big, {"half": big[:2].astype(jnp.bfloat16)}]
    return {"layers": layers, "step": jnp.int32(3), "zero": np.zeros((0, 4), np.float32)}


def source(contents, *, most=None, damage=None):
    """A fetch that breaks after ``most`` pieces, and the names that it was asked for."""
    asked = []

    def fetch(version, names):
        asked.extend(names)
        if most is not None and len(asked) > most:
            raise ConnectionError("the line is dead")
        found = {name: contents[name] for name in names}
        return {n: x ^ 1 if n == damage else x for n, x in found.items()}

    return fetch, asked


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_whole_transfer_by_hand():
    manifest, contents = weight_transfer.pack(weights(), 7, piece_bytes=48)  # rows of 20 bytes: two of them a piece
    first = [p for p in manifest.pieces if p.leaf == 0]
    assert [p.box for p in first] == [((0, 2), (0, 5)), ((2, 4), (0, 5)), ((4, 6), (0, 5))]
    assert first[1].name == "['layers'][0][[2, 4], [0, 5]]" and first[1].nbytes == 40
    arrival = weight_transfer.Arrival()
    found = weight_transfer.receive(arrival, manifest, source(contents)[0])
    assert (found.version, found.sent_bytes, found.kept_bytes) == (7, 120 + 20 + 4, 0)
    same(arrival.tree(), weights())


@pytest.mark.parametrize("most", range(5))
def test_a_transfer_cut_anywhere_sends_the_rest_only(most):
    manifest, contents = weight_transfer.pack(weights(), 0, piece_bytes=40)
    total = sum(p.nbytes for p in manifest.pieces)
    arrival, (fetch, before) = weight_transfer.Arrival(), source(contents, most=most)
    with pytest.raises(
        weight_transfer.Cut, match=r"version 0 cut after \d+ of 144 bytes \(ConnectionError: the line is dead"
    ):
        weight_transfer.receive(arrival, manifest, fetch, batch_bytes=1)
    with pytest.raises(ValueError, match=f"{len(manifest.pieces) - most} of {len(manifest.pieces)} pieces are missing"):
        arrival.tree()
    fetch, after = source(contents)
    found = weight_transfer.receive(arrival, manifest, fetch, batch_bytes=1)
    assert len(before[:most]) + len(after) == len(manifest.pieces) and found.sent_bytes + found.kept_bytes == total
    same(arrival.tree(), weights())


def test_what_did_not_change_is_not_sent_again():
    old, new = weights(), weights()
    new["layers"][0] = new["layers"][0].at[5, 0].add(1.0)
    arrival, (manifest, contents) = weight_transfer.Arrival(), weight_transfer.pack(old, 0, piece_bytes=40)
    weight_transfer.receive(arrival, manifest, source(contents)[0])
    before = arrival.tree()
    later, contents = weight_transfer.pack(new, 1, piece_bytes=40)
    assert weight_transfer.fingerprint(manifest) != weight_transfer.fingerprint(later)
    found = weight_transfer.receive(arrival, later, source(contents)[0])
    assert (found.sent_bytes, found.kept_bytes) == (40, 104)
    same(arrival.tree(), new)
    same(before, old)  # what is in use is not written over


def test_what_is_known_not_to_change_is_not_read_again():
    """The base of an adapter: neither from the device, nor into the memory of who receives it."""
    frozen = jnp.arange(12.0).reshape(3, 4)

    def version(k):
        return {"base": {"w": frozen}, "lora": jnp.full((2, 2), float(k))}

    arrival, packed = weight_transfer.Arrival(), weight_transfer.pack(version(0), 0, piece_bytes=16)
    seen, copies = [], []
    for k in range(4):
        if k:
            if k == 1:
                kept = np.array(frozen)
                frozen.delete()  # whoever reads it raises
            changed = partial(trained_part, trained="lora")
            packed = weight_transfer.pack(version(k), k, piece_bytes=16, before=packed, changed=changed)
        found = weight_transfer.receive(arrival, packed[0], source(packed[1])[0])
        assert (found.sent_bytes, found.kept_bytes) == ((16, 48) if k else (64, 0))
        seen.append(arrival.tree())
        copies.append(arrival.host_tree())
    for k, trees in enumerate(zip(seen, copies, strict=True)):
        for tree in trees:
            same(tree, {"base": {"w": kept}, "lora": np.full((2, 2), float(k), np.float32)})
    for found in (seen, copies):
        assert found[1]["base"]["w"] is found[2]["base"]["w"] is found[3]["base"]["w"]
        assert found[2]["lora"] is not found[3]["lora"]


def test_pieces_of_another_cut_are_not_taken_for_what_lies_there():
    """Weights go and come back, the second time in other pieces; what lies there then is of neither."""
    arrival, tree = weight_transfer.Arrival(), weights()
    other = jax.tree.map(lambda x: x + np.ones((), x.dtype), tree)
    for version, (sent, size) in enumerate([(tree, 2**20), (other, 48), (tree, 2**20)]):
        manifest, contents = weight_transfer.pack(sent, version, piece_bytes=size)
        weight_transfer.receive(arrival, manifest, source(contents)[0])
        same(arrival.tree(), sent)


def test_damaged_and_foreign_pieces_are_refused():
    manifest, contents = weight_transfer.pack(weights(), 0)
    name = manifest.pieces[0].name
    arrival = weight_transfer.Arrival()
    with pytest.raises(weight_transfer.Cut, match="arrived damaged .120 of 120 bytes.; fetch it again"):
        weight_transfer.receive(arrival, manifest, source(contents, damage=name)[0])
    with pytest.raises(ValueError, match="piece other is not part of this version"):
        arrival.accept("other", contents[name])
    with pytest.raises(ValueError, match="are missing"):
        arrival.tree()


def test_shards_leave_and_arrive_as_devices_hold_them():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    value = jnp.arange(32.0).reshape(8, 4)
    rows, both = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("y", "x"))
    manifest, contents = weight_transfer.pack({"w": jax.device_put(value, rows)}, 0)
    assert [p.box for p in manifest.pieces] == [((0, 4), (0, 4)), ((4, 8), (0, 4))]  # replicas once
    arrival = weight_transfer.Arrival()
    weight_transfer.receive(arrival, manifest, source(contents)[0])
    found = arrival.tree({"w": both})["w"]
    assert found.sharding == both
    np.testing.assert_array_equal(found, value)
