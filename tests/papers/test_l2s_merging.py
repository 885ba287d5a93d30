"""Merging: each rule by its numbers, its special cases, and the whole on the small model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.efficiency import l2s_merging
from experiments.efficiency.parts import long_short
from jaxrl_llm.experiment import Results, curricula, recipes
from jaxrl_llm.experiment.evidence import beds
from jaxrl_llm.models import merging
from tests import close
from tests.experiment import made

RNG = np.random.default_rng(0)


def _tree(seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"embed": draw(5, 4), "norm": draw(4), "layers": {"q": draw(2, 4, 3), "scale": draw(2, 4)}}


def _close(left, right):
    jax.tree.map(close.assert_near, left, right)


BASE, ONE, TWO = _tree(0), _tree(1), _tree(2)


def test_worked_ties():
    found = merging.elected([jnp.array([1.0, -2.0, 0.1]), jnp.array([3.0, 1.0, -0.2])])
    close.assert_near(found, [2.0, -2.0, -0.2])
    close.assert_near(merging.elected([jnp.array([1.0]), jnp.array([-1.0])]), [1.0], magnitude=0)  # sum 0 counts as +
    values = jnp.array([0.1, -0.5, 0.3, 0.2, -0.4])
    close.assert_near(merging.trimmed(values, 0.8), [0, -0.5, 0, 0, -0.4])
    np.testing.assert_array_equal(merging.trimmed(values, 0.0), values)
    with pytest.raises(ValueError, match="share=2"):
        merging.trimmed(values, 2.0)


def test_ties_agrees_with_a_loop():
    changes = [RNG.normal(size=(3, 4)) for _ in range(3)]
    kept = []
    for change in changes:
        limit = np.sort(np.abs(change).ravel())[int(12 * 0.5) - 1]
        kept.append(np.where(np.abs(change) >= limit, change, 0.0))
    expected = np.zeros((3, 4))
    for i in range(3):
        for j in range(4):
            column = [k[i, j] for k in kept]
            sign = 1.0 if sum(column) >= 0 else -1.0
            agree = [x for x in column if x * sign > 0]
            expected[i, j] = np.mean(agree) if agree else 0.0
    found = merging.ties_delta([{"w": jnp.asarray(c, jnp.float32)} for c in changes], share=0.5)
    close.assert_near(found["w"], expected)


def test_special_cases_of_arithmetic():
    _close(merging.task_arithmetic(BASE, [ONE], scale=1.0), ONE)
    _close(merging.task_arithmetic(BASE, [ONE, TWO], scale=0.5), merging.average([ONE, TWO]))
    _close(merging.task_arithmetic(BASE, [ONE, TWO], scale=0.0), BASE)
    _close(merging.added(BASE, merging.ties_delta(merging.deltas(BASE, [ONE]), share=0.0)), ONE)


def test_task_arithmetic_goes_from_the_quick_model_towards_the_slow_one(small):
    """quick + alpha (slow - quick), whatever both have in common; alpha 0, 1/2 and 1 are quick, average and slow."""
    params, tables, key = {"quick": ONE, "slow": TWO}, small[1], jax.random.key(0)
    far = small[0].model  # the base itself is not looked at
    merge = long_short.make_task_arithmetic(0.7)
    _close(merge(far, params, tables, key), jax.tree.map(lambda q, s: 0.3 * q + 0.7 * s, ONE, TWO))
    _close(long_short.make_task_arithmetic(0.0)(far, params, tables, key), ONE)
    _close(long_short.make_task_arithmetic(0.5)(far, params, tables, key), merging.average([ONE, TWO]))
    _close(long_short.make_task_arithmetic(1.0)(far, params, tables, key), TWO)
    with pytest.raises(ValueError, match="alpha=1.4"):
        long_short.make_task_arithmetic(1.4)
    kept = jax.tree.map(lambda d: merging.trimmed(d, 0.8), jax.tree.map(jnp.subtract, TWO, ONE))
    _close(long_short.ties(far, params, tables, key), jax.tree.map(jnp.add, ONE, kept))


def test_every_alpha_has_its_arm(small):
    params, far = {"quick": ONE, "slow": TWO}, small[0].model
    for arm, alpha in (("ta_6", 0.6), ("ta", 0.7), ("ta_8", 0.8), ("ta_9", 0.9)):
        found = l2s_merging.ARMS[arm]["merge"](far, params, small[1], jax.random.key(0))
        _close(found, jax.tree.map(lambda q, s, a=alpha: (1 - a) * q + a * s, ONE, TWO))


def test_the_bed_asks_that_what_is_long_is_worth_its_length():
    """Of a quick model that is the better one nothing can be traded away."""
    for quick, slow in ((0.92, 0.90), (0.80, 0.84)):
        ends = {name: 0.8 for name in l2s_merging.ARMS} | {"quick": quick, "slow": slow}
        arms = {}
        for name, end in ends.items():
            values = [end, end + 0.001, end + 0.002]
            one = made.arm(values, curve={0: [0.5] * 3, 30: [0.7] * 3, 60: values})
            arms[name] = dataclasses.replace(one, metrics=one.metrics | {"eval/tokens": [20.0, 20.1, 20.2]})
        found = Results(arms)
        wrong = beds.problems(found, l2s_merging.claim(found), l2s_merging.BED)
        assert (wrong == []) == (slow > quick)
        if wrong:
            assert "positive control slow - quick: -0.02" in wrong[0] and len(wrong) == 1


def test_dare_keeps_the_mean():
    delta = {"w": jnp.ones((200, 50))}
    found = merging.dare(jax.random.key(0), delta, rate=0.3)["w"]
    close.assert_relative(np.unique(found), [0.0, 1 / 0.7])
    close.assert_share(0.7 * float(found.mean()), 0.7, found.size)  # each is kept with that chance
    _close(merging.dare(jax.random.key(0), delta, rate=0.0), delta)


def test_worked_singular_values():
    close.assert_near(merging.soft_threshold(jnp.diag(jnp.array([3.0, 1.0])), 2.0), np.diag([1.0, 0.0]))
    matrix = jnp.asarray(RNG.normal(size=(2, 5, 4)), jnp.float32)
    close.assert_near(merging.low_rank(matrix, 4), matrix)
    assert np.linalg.matrix_rank(np.asarray(merging.low_rank(matrix, 2)), tol=1e-4).tolist() == [2, 2]
    close.assert_near(merging.soft_threshold(matrix, 0.0), matrix)


def test_lore_and_twin():
    # without a penalty the rests hold everything that is not shared: the mean of the models
    free = merging.lore(BASE, [ONE, TWO], penalty=0.0, scale=0.5)
    _close({k: free["layers"][k] for k in ("q",)}, {"q": merging.average([ONE, TWO])["layers"]["q"]})
    # with a large one they are empty: again the mean; vectors go by task arithmetic
    stiff = merging.lore(BASE, [ONE, TWO], penalty=1e3)
    _close(stiff["embed"], merging.average([ONE, TWO])["embed"])
    _close(stiff["norm"], merging.task_arithmetic(BASE, [ONE, TWO], scale=0.7)["norm"])
    # descent: the objective falls from its first step
    whole = [np.asarray(t["embed"], np.float64) for t in (ONE, TWO)]

    def objective(steps):
        rests = [np.zeros_like(w) for w in whole]
        for _ in range(steps):
            shared = np.mean([w - d for w, d in zip(whole, rests, strict=True)], axis=0)
            rests = [np.asarray(merging.soft_threshold(jnp.asarray(w - shared, jnp.float32), 0.5)) for w in whole]
        shared = np.mean([w - d for w, d in zip(whole, rests, strict=True)], axis=0)
        fit = sum(((shared + d - w) ** 2).sum() for w, d in zip(whole, rests, strict=True))
        return fit + sum(np.linalg.norm(d, "nuc") for d in rests)

    assert objective(1) < objective(0) and objective(6) <= objective(1) + 1e-6
    # all of one model's own part brings the model back
    _close(merging.twin(BASE, [ONE, TWO], rank=9, weights=(1.0, 0.0))["layers"]["q"], ONE["layers"]["q"])
    with pytest.raises(ValueError, match="weights"):
        merging.twin(BASE, [ONE, TWO], rank=1, weights=(1.0,))


def test_activation_informed_merging():
    full = jax.tree.map(lambda x: jnp.ones((1,) * x.ndim), BASE)
    _close(merging.activation_informed(ONE, BASE, full, omega=1.0), ONE)
    _close(merging.activation_informed(ONE, BASE, full, omega=0.0), BASE)
    none = jax.tree.map(jnp.zeros_like, full)
    _close(merging.activation_informed(ONE, BASE, none, omega=0.0), ONE)


def test_sens_merging():
    alike = [jnp.full(2, 0.5)] * 2
    _close(
        merging.sens_merging(BASE, [ONE, TWO], alike, scale=0.7), merging.task_arithmetic(BASE, [ONE, TWO], scale=0.7)
    )
    found = merging.sens_merging(BASE, [ONE, TWO], [jnp.array([9e3, 0.0]), jnp.array([0.0, 9e3])], scale=0.5)
    _close(found["layers"]["q"][0], ONE["layers"]["q"][0])
    _close(found["layers"]["q"][1], TWO["layers"]["q"][1])
    felt = merging.sensitivity(ONE, jax.tree.map(lambda x: -2 * x, ONE))
    sums = np.stack([2 * np.square(np.asarray(v)).reshape(2, -1).sum(1) for v in ONE["layers"].values()]).sum(0)
    close.assert_near(felt, sums / np.linalg.norm(sums), magnitude=0)


@pytest.fixture(scope="module")
def small():
    settings = recipes.OnlineSettings(levels=(2,), train_problems=16, eval_problems=4, max_new_tokens=6)
    found = recipes.bench(settings)
    return found, long_short.make_tables(found, curricula.train_problems(settings))


def test_importance_is_that_of_the_inputs(small):
    found, tables = small
    model, rows = found.model, jax.tree.map(lambda x: x[:4], tables.slow)
    importance = merging.channel_importance(model.config, model.params, rows.tokens, rows.positions, rows.segment_ids)
    for name, leaf in importance["layers"].items():
        assert leaf.ndim == model.params["layers"][name].ndim
        assert float(leaf.min()) >= 0 and float(leaf.max()) <= 1
    for name in ("q", "o", "up", "down"):
        close.assert_near(importance["layers"][name].max(axis=(1, 2)), 1.0, magnitude=0)
    # a channel that is always silent in the input of the feed-forward part has no importance
    params = jax.tree.map(lambda x: x, model.params)
    params["layers"]["post_norm"] = params["layers"]["post_norm"].at[:, 3].set(0.0)
    silent = merging.channel_importance(model.config, params, rows.tokens, rows.positions, rows.segment_ids)
    assert not silent["layers"]["up"][:, 3].any() and silent["layers"]["q"][0, 3, 0] > 0


@pytest.mark.slow
def test_every_merge_of_two_equal_models_is_a_model(small):
    found, tables = small
    base = found.model.params
    shifted = jax.tree.map(lambda x: x + 0.01, base)
    params = {"quick": shifted, "slow": shifted}
    for merge in (long_short.average, long_short.quick, long_short.slow):
        _close(merge(found.model, params, tables, jax.random.key(0)), shifted)
    for merge in (long_short.ties, long_short.dare_ties, long_short.aim_ties, long_short.sens):
        merged = merge(found.model, params, tables, jax.random.key(0))
        assert jax.tree.structure(merged) == jax.tree.structure(base)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(merged))
    little = found.model._replace(params=BASE)
    for merge in (long_short.lore, long_short.twin, long_short.make_task_arithmetic(0.9)):
        merged = merge(little, {"quick": ONE, "slow": TWO}, tables, jax.random.key(0))
        assert jax.tree.structure(merged) == jax.tree.structure(BASE)


def test_both_models_learn_their_own_answers(small):
    found, tables = small
    assert tables.quick.mask.sum() < tables.slow.mask.sum()
    np.testing.assert_array_equal(tables.quick.tokens[:, :6], tables.slow.tokens[:, :6])  # the same prompts
