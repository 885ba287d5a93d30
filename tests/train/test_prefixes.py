import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import packing
from jaxrl_llm.train.methods.builders import make_policy_loss, stored_anchor
from jaxrl_llm.train.methods.prefixes import grown, prefix_trees
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import small_config, small_model
from tests.train.test_packing import assert_same_scores, laid, planned, scored

T, BLOCK = 20, 4


def rows_from(lines, *, prompt=3, group=8, seed=0) -> Batch:
    """Sequences of tokens as rows, the first tokens of each no part of the mask."""
    shape = (len(lines), T)
    tokens, segments, mask = (np.zeros(shape, kind) for kind in (np.int32, np.int32, bool))
    for k, line in enumerate(lines):
        begin = k % 3  # left pads, of which nothing may be seen
        tokens[k] = 23
        tokens[k, begin : begin + len(line)] = line
        segments[k, begin : begin + len(line)] = 1
        mask[k, begin + prompt : begin + len(line)] = True
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0).astype(np.int32)
    rng = np.random.default_rng(seed)
    normal = [jnp.asarray(np.where(mask, 0.1 * rng.standard_normal(shape), 0.0), jnp.float32) for _ in range(4)]
    return Batch(
        tokens=jnp.asarray(tokens), segment_ids=jnp.asarray(segments), positions=jnp.asarray(positions),
        mask=jnp.asarray(mask), advantages=10 * normal[0], old_logp=normal[1] - 3.0, sampler_logp=normal[2] - 3.0,
        ref_logp=normal[3], group_ids=jnp.asarray(np.arange(len(lines)) // group, jnp.int32),
        total=jnp.float32(mask.sum()), extras={},
    )  # fmt: skip


def branches(count=16, group=8, seed=1) -> Batch:
    """Groups with a prompt each that part at once or late, some twice the same, some the beginning of others."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count // group):
        stems = [rng.integers(2, 20, T)]
        for _ in range(group - 1):
            old = stems[rng.integers(len(stems))]
            at = rng.integers(3, len(old))
            stems.append(np.concatenate([old[:at], rng.integers(2, 20, T - at)]))
        lines += [stem[: rng.integers(6, T - 2)] for stem in stems]
        lines[-1] = lines[-2].copy()
        lines[-3] = lines[-4][:5]
    return rows_from(lines, group=group)


def turns() -> Batch:
    """Each row is the one before it and one turn more."""
    line = np.random.default_rng(2).integers(2, 20, T - 2)
    return rows_from([line[:k] for k in (4, 6, 9, 13, 18)], group=5)


def small_trees(rows, **settings):
    return prefix_trees(rows, block=BLOCK, **settings)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [branches, turns])
def test_trees_score_as_flat_rows(family, make):
    policy, params, _ = small_model(family)
    rows = make()
    layout = packing.only_part(planned(rows, small_trees))
    assert layout.pages is not None
    assert_same_scores(scored(policy, params, laid(rows, layout)), scored(policy, params, rows), family, rows)


def test_what_is_shared_lies_once():
    """Every token of the trees once, whatever the order of the rows."""
    rows = turns()
    layout = planned(rows, small_trees)
    assert (layout.source >= 0).sum() == 18 and (layout.target >= 0).sum() == 15
    rows = jax.tree.map(np.asarray, branches())
    found = packing.rows_of(rows)
    each = [len(one.columns) for one in packing.sequences(found)]
    for order in (np.arange(16), np.random.default_rng(0).permutation(16)):
        turned = jax.tree.map(lambda x, order=order: x[order] if x.ndim else x, found)
        (first, second) = packing.by_group(list(packing.sequences(turned)), turned.group_ids)
        blocks = [len(grown(turned, group, BLOCK).chains) for group in (first, second)]
        assert sum(blocks) * BLOCK < 0.8 * sum(each)
        for group in (first, second):
            tree = grown(turned, group, BLOCK)
            for one, columns in zip(tree.sequences, tree.columns, strict=True):
                chain = np.asarray(tree.chains[columns[-1] // BLOCK])
                seen = (chain[:, None] * BLOCK + np.arange(BLOCK)).ravel()
                assert np.isin(columns, seen).all() and len(set(columns)) == len(one.columns)


@pytest.mark.parametrize("parts", [1, 2])
def test_an_update_on_trees_is_the_update(parts):
    policy, params, _ = small_model()
    rows = branches()
    slot = make_policy_loss(policy, clipped_policy_loss, anchor=stored_anchor)
    layout = planned(rows, small_trees, parts=parts)
    assert layout.pages is not None and len(layout.source) == parts
    run = jax.jit(lambda rows: accumulate(slot, params, rows, parts))
    (grads, value, metrics), (flat_grads, flat, flat_metrics) = run(laid(rows, layout)), run(rows)
    sums = close.gradient_sums(small_config(), *rows.mask.shape)
    close.assert_same_sums(grads, flat_grads, sums)
    close.assert_same_sums(value, flat, sums, magnitude=5.0)
    assert metrics.keys() == flat_metrics.keys()


def test_a_row_for_every_device():
    """A group is split over rows where one cannot hold it; what it shares is then computed in each."""
    policy, params, _ = small_model()
    rng = np.random.default_rng(4)
    prompt = rng.integers(2, 20, 8)
    rows = rows_from([np.concatenate([prompt, rng.integers(2, 20, 8)]) for _ in range(8)], prompt=8)
    layout = planned(rows, small_trees, shards=4)
    assert layout.pages is not None and layout.source.shape == (1, 4, 6 * BLOCK)
    assert (layout.source >= 0).sum(axis=2).tolist() == [[8 + 2 * 8] * 4]
    found, want = (scored(policy, params, x)[0] for x in (laid(rows, packing.only_part(layout)), rows))
    for a, b in zip(found, want, strict=True):
        close.assert_same_forward(a, b, temperature=0.7)


def test_rows_without_anything_in_common_are_packed():
    rng = np.random.default_rng(3)
    rows = rows_from([rng.integers(2, 20, n) for n in (5, 6, 7, 8, 9, 10, 11, 17)])
    assert planned(rows, small_trees).pages is None
    twice = branches()._replace(positions=jnp.zeros_like(branches().positions))
    assert planned(twice, small_trees).pages is None
