import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.sequence import gspo_loss
from jaxrl_llm.train import packing
from jaxrl_llm.train.methods.builders import make_policy_loss, score_tokens, stored_anchor
from jaxrl_llm.train.methods.prefixes import prefix_trees
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import small_config, small_model

ROWS, GROUP, WIDTH, NEW = 16, 4, 6, 18
LAST = 7  # tokens of a response, at most, but for two long ones


@functools.cache
def batch() -> Batch:
    """Left-padded prompts, responses of ragged lengths, two groups that train nothing, one row of two segments."""
    columns = np.arange(WIDTH + NEW)
    rng = np.random.default_rng(0)
    begin = rng.integers(0, WIDTH - 1, (ROWS // GROUP, 1)).repeat(GROUP, axis=0)
    end = WIDTH + rng.integers(1, LAST, (ROWS, 1))
    end[0], end[9] = WIDTH + NEW, WIDTH + NEW - 3
    real = (columns >= begin) & (columns < end)
    segments = real.astype(np.int32)
    segments[9, WIDTH + 5 : WIDTH + NEW - 3] = 2
    positions = np.where(segments == 2, columns - WIDTH - 5, np.maximum(columns - begin, 0)).astype(np.int32)
    mask = real & (columns >= WIDTH)
    mask[4:8] = False  # a group without spread
    mask[9, WIDTH + 5 : WIDTH + 8] = False  # the second segment has a prompt of its own
    shape = mask.shape
    normal = [jnp.asarray(np.where(mask, 0.1 * rng.standard_normal(shape), 0.0), jnp.float32) for _ in range(4)]
    return Batch(
        tokens=jnp.asarray(rng.integers(2, 20, shape), jnp.int32), segment_ids=jnp.asarray(segments),
        positions=jnp.asarray(positions), mask=jnp.asarray(mask), advantages=10 * normal[0],
        old_logp=normal[1] - 3.0, sampler_logp=normal[2] - 3.0, ref_logp=normal[3] - 3.0,
        group_ids=jnp.asarray(np.arange(ROWS) // GROUP, jnp.int32), total=jnp.float32(mask.sum()),
        extras={},
    )  # fmt: skip


def planned(rows, planner=packing.packed_rows, **settings):
    return planner(packing.rows_of(jax.tree.map(np.asarray, rows)), **settings)


def laid(rows, layout):
    return rows._replace(extras=rows.extras | {packing.LAYOUT: jax.tree.map(jnp.asarray, layout)})


def scored(policy, params, rows):
    """Log-probabilities and entropies in the mask, and the gradient of a weighted sum of them."""
    weight = jnp.where(rows.mask, jax.random.normal(jax.random.key(5), rows.mask.shape), 0.0)

    def value(params):
        found = [jnp.where(rows.mask, x, 0.0) for x in score_tokens(policy, params, rows, temperature=0.7)]
        return jnp.sum(weight * (found[0] + 0.3 * found[1])), found

    (_, found), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
    return found, grads


def assert_same_scores(found, want, family, rows):
    for got, flat in zip(found[0], want[0], strict=True):
        close.assert_same_forward(got, flat, family, temperature=0.7)
    close.assert_same_sums(found[1], want[1], close.gradient_sums(small_config(family), *rows.mask.shape))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", pytest.param("qwen3_moe", marks=pytest.mark.slow),
                                    pytest.param("gpt2", marks=pytest.mark.slow)])  # fmt: skip
def test_packed_rows_score_as_padded_ones(family):
    policy, params, _ = small_model(family)
    rows = batch()
    layout = planned(rows)
    assert layout.source.shape == (1, 6, WIDTH + NEW)  # of 16 rows
    assert_same_scores(scored(policy, params, laid(rows, packing.only_part(layout))), scored(policy, params, rows),
                       family, rows)  # fmt: skip


def test_what_no_loss_asks_for_is_not_computed():
    """Padding, prompts alone and rows without a mask may hold anything: nothing of the result moves."""
    policy, params, _ = small_model()
    rows = batch()
    layout = packing.only_part(planned(rows))
    found, grads = scored(policy, params, laid(rows, layout))
    used = np.zeros(rows.mask.size, bool)
    used[layout.source[layout.source >= 0]] = True
    used = used.reshape(rows.mask.shape)
    assert not used[4:8].any() and used[rows.mask].all()
    other = jnp.where(used, rows.tokens, 7)
    again, same = scored(policy, params, laid(rows._replace(tokens=other), layout))
    jax.tree.map(np.testing.assert_array_equal, (found, grads), (again, same))


def test_the_order_of_rows_changes_only_the_layout():
    policy, params, _ = small_model()
    order = np.random.default_rng(1).permutation(ROWS)
    rows = batch()
    turned = jax.tree.map(lambda x: x[order] if x.ndim else x, rows)
    found = [scored(policy, params, laid(x, packing.only_part(planned(x))))[0] for x in (rows, turned)]
    for a, b in zip(*found, strict=True):
        close.assert_same_forward(b, a[order], temperature=0.7)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    ("loss", "reduction"),
    [(clipped_policy_loss, "token_mean"), (clipped_policy_loss, "constant"), (gspo_loss, "seq_mean")],
)
def test_an_update_in_layouts_is_the_update(loss, reduction, parts):
    policy, params, _ = small_model()
    rows = batch()._replace(total=reduce.denominator(batch().mask, mode=reduction))
    slot = make_policy_loss(policy, loss, reduction=reduction, length_tokens=NEW, anchor=stored_anchor)
    layout = planned(rows, parts=parts)
    assert len(layout.source) == (parts if parts > 1 else 1)
    run = jax.jit(lambda rows: accumulate(slot, params, rows, parts))
    (grads, value, metrics), (flat_grads, flat, flat_metrics) = run(laid(rows, layout)), run(rows)
    sums = close.gradient_sums(small_config(), *rows.mask.shape)
    close.assert_same_sums(grads, flat_grads, sums)
    close.assert_same_sums(value, flat, sums, magnitude=5.0)
    assert metrics.keys() == flat_metrics.keys()
    quantiles = {"kl/sampler_p50", "kl/sampler_p90", "kl/sampler_p99"}  # a step apart where a gap lies at an edge
    for name in metrics.keys() - quantiles:
        close.assert_same_sums(metrics[name], flat_metrics[name], sums, magnitude=10.0)
    nothing = rows._replace(mask=jnp.zeros(rows.mask.shape, bool))
    grads, value, _ = run(laid(nothing, layout))
    assert value == 0 and not any(np.asarray(x).any() for x in jax.tree.leaves(grads))
    assert (planned(nothing, parts=parts).place == -1).all()


def test_groups_stay_whole_and_empty_parts_cost_nothing():
    rows = batch()
    layout = planned(rows, parts=4)
    size = layout.target.shape[1] * layout.target.shape[2]
    at = np.where(np.asarray(rows.mask), layout.place // size, -1).max(axis=1)
    for group in range(ROWS // GROUP):
        assert len(set(at[np.asarray(rows.group_ids) == group])) == 1
    used = (layout.source >= 0).any(axis=(1, 2))
    assert used.sum() == 2 and packing.share(layout, rows.mask.size) == 0.5
    slot = make_policy_loss(small_model()[0], clipped_policy_loss, anchor=stored_anchor)
    params = small_model()[1]
    run = jax.jit(lambda rows: accumulate(slot, params, rows, 4)[1])
    # NaN in what an empty part would compute shows that it does not
    broken = rows._replace(old_logp=jnp.where(rows.mask, rows.old_logp, jnp.nan), ref_logp=rows.ref_logp * jnp.nan)
    np.testing.assert_array_equal(run(laid(broken, layout)), run(laid(rows, layout)))


def test_few_shapes_for_all_lengths():
    rng = np.random.default_rng(2)
    shapes = set()
    for _ in range(60):
        lengths = rng.integers(1, rng.integers(2, 65), 32)
        mask = np.arange(64)[None] < lengths[:, None]
        line = np.arange(64, dtype=np.int32)[None].repeat(32, axis=0)
        rows = packing.Rows(line, mask.astype(np.int32), line, mask, np.arange(32) // 4)
        layout = packing.packed_rows(rows)
        shapes.add((layout.source.shape, layout.target.shape))
        assert packing.packed_rows(rows, parts=4).source.shape == (4, 8, 64)
    assert 3 < len(shapes) <= 2 * len(packing.EIGHTHS)


@pytest.mark.parametrize("planner", [packing.packed_rows, prefix_trees])
def test_parts_that_cut_groups_hold_all_rows_whatever_their_lengths(planner):
    """Two rows a part, groups of four: rows go into parts one by one, as they do without a layout."""
    rows = batch()
    policy, params, _ = small_model()
    loss = make_policy_loss(policy, clipped_policy_loss, anchor=stored_anchor)
    layout = planned(rows, planner, parts=8)
    assert layout.source.shape[:2] == (8, 2)
    found = accumulate(loss, params, laid(rows, layout), 8)
    want = accumulate(loss, params, rows, 8)
    sums = close.gradient_sums(small_config(), *rows.mask.shape)
    close.assert_same_sums(found[0], want[0], sums)
    mask = np.ones((8, 4), bool)  # all as long as may be: nothing can be packed, and nothing is shared
    line, tokens = np.tile(np.arange(4), (8, 1)), np.arange(32).reshape(8, 4)
    layout = planner(packing.Rows(tokens, mask.astype(np.int32), line, mask, np.repeat([0, 1], 4)), parts=4)
    assert layout.source.shape == (4, 2, 4) and np.sort(layout.source.ravel()).tolist() == list(range(32))


def test_rows_of_segments_that_find_no_other_place_stay_in_theirs():
    """Longest first, 3 and 3 of both rows share one, and of the four twos one is left over: that ended a run."""
    segments = np.array([np.repeat([1, 2, 3], row) for row in [[3, 2, 2], [2, 3, 2]] * 2], np.int32)
    line = np.tile(np.arange(7), (4, 1))
    layout = packing.packed_rows(packing.Rows(line, segments, line, segments > 0, np.array([0, 0, 1, 1])), parts=2)
    assert layout.source.reshape(4, 7).tolist() == np.arange(28).reshape(4, 7).tolist()
    assert layout.segments.reshape(4, 7).tolist() == segments.tolist()
