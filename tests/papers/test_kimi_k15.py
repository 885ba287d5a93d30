"""Kimi k1.5: mirror descent, length reward, prioritised draws and long2short, by their printed numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.parts import long_winded
from experiments.policy_gradient import kimi_k15
from experiments.policy_gradient.parts import long_to_short, partial_rollouts
from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum import balanced
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.off_policy import mirror_descent_loss
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.online import begin as begin_step
from jaxrl_llm.train.online import finish, init_state
from jaxrl_llm.types import Batch, Rewards, Trajectories
from tests import close


def test_length_reward_of_a_group():
    """Lengths 100, 200, 300: 0.5, 0, -0.5 for right answers, never above 0 for wrong ones; 0 where all are equal."""
    length, ids = jnp.array([100, 200, 300]), jnp.zeros(3, jnp.int32)
    extremes = shaping.group_extremes(length.astype(jnp.float32), ids)
    for right, want in ((True, [0.5, 0.0, -0.5]), (False, [0.0, 0.0, -0.5])):
        close.assert_near(shaping.length_reward(length, jnp.full(3, right), *extremes), want)
    equal = jnp.array([7, 7, 7])
    extremes = shaping.group_extremes(equal.astype(jnp.float32), ids)
    np.testing.assert_array_equal(shaping.length_reward(equal, jnp.array([True, False, True]), *extremes), jnp.zeros(3))


def test_gradient_of_a_group_is_equation_3():
    """``mean_j [(r_j - mean) grad logpi - tau/2 grad (log ratio)^2]`` times ``-2 tau``, for ratios away from 1."""
    tau, rewards = 0.1, jnp.array([1.0, 0.0, 0.0, 1.0])
    logp = jnp.array([[-1.0, -0.5], [-0.2, -0.9], [-2.0, -0.1], [-0.7, -0.3]])
    old = logp + jnp.array([[0.1, -0.2], [0.3, 0.0], [0.0, 0.1], [-0.4, 0.2]])
    mask, ids = jnp.ones((4, 2), bool), jnp.zeros(4, jnp.int32)
    advantages = group.per_token(group.dr_grpo_advantages(rewards, ids), mask)

    def surrogate(x):
        return reduce.tokens(mirror_descent_loss(x, old, advantages, mask, tau=tau).loss, mask, mode="seq_mean")

    def equation(x):
        ratio = jnp.sum(x - old, axis=1)
        return jnp.sum((rewards - 0.5) * jnp.sum(x, axis=1) - 0.5 * tau * ratio**2) / 4

    close.assert_near(jax.grad(surrogate)(logp), -2 * tau * jax.grad(equation)(logp))
    # at the old policy it is REINFORCE with the group's mean as baseline, times 2 tau
    plain = jax.grad(lambda x: jnp.sum(reinforce_loss(x, advantages, mask).loss) / 4)(old)
    close.assert_near(jax.grad(surrogate)(old), 2 * tau * plain)


def test_prompts_are_drawn_by_their_failures():
    state = balanced.BalancedState(jnp.array([0.25, 0.75]), jnp.zeros(2, jnp.int32))
    assert balanced.draw_probabilities(state, weigh=balanced.failure, floor=0.0).tolist() == [0.75, 0.25]
    sampler = kimi_k15.ARMS["prioritised"]["sampler"]()
    state = sampler.init(50)
    ids = jnp.arange(50, dtype=jnp.int32)
    for _ in range(20):  # the first ten always succeed
        state = sampler.update(state, ids, (ids < 10).astype(jnp.float32), jnp.ones(50, bool))
    drawn = jnp.concatenate([sampler.draw(state, jax.random.key(k), 5)[0] for k in range(40)])
    assert float((drawn < 10).mean()) < 0.05


def test_an_optimiser_that_begins_anew_with_every_rollout():
    """Updates 0, 2 and 4 are first updates, 1 and 3 second ones; Adam alone goes on from its moments."""
    params, grads = jnp.array([1.0, -2.0]), [jnp.array([0.3 * k + 0.1, -0.2]) for k in range(5)]
    tx, plain = kimi_k15.reset_every(optax.adam(0.1), 2), optax.adam(0.1)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes weak integers and floats
        state, found = tx.init(params), []
        for grad in grads:
            change, state = tx.update(grad, state, params)
            found.append(np.asarray(change))
        for k, grad in enumerate(grads):
            own = plain.init(params)
            if k % 2:
                _, own = plain.update(grads[k - 1], own, params)
            close.assert_near(found[k], plain.update(grad, own, params)[0], terms=8)
    assert np.abs(found[1] - found[3]).max() > 1e-3 and kimi_k15.kept(plain, 2) is plain


def test_the_easier_half_comes_first():
    settings = kimi_k15.Settings(
        levels=(1, 3), train_problems=24, eval_problems=4, max_new_tokens=26, steps=5, prompts_per_step=2, group_size=2
    )
    bench = recipes.bench(settings)
    rates = curricula.sample_pass_rates(bench, settings, np.arange(24), samples=kimi_k15.TRIES)
    first, then = kimi_k15.build(dataclasses.replace(settings, **kimi_k15.ARMS["curriculum"])).stages
    assert (first.steps, then.steps) == (2, 3)
    drawn = {int(k) for k in first.method.sampler.draw(first.method.sampler.init(24), jax.random.key(0), 400)[0]}
    rest = set(range(24)) - drawn
    assert len(drawn) == 12 and min(rates[sorted(drawn)]) >= max(rates[sorted(rest)]) and len(set(rates)) > 1
    sampler = then.method.sampler
    state = sampler.update(sampler.init(24), jnp.arange(24), jnp.asarray(rates, jnp.float32), jnp.ones(24, bool))
    keys = jax.random.split(jax.random.key(1), 400)
    often = jax.vmap(lambda key: sampler.draw(state, key, 6)[0])(keys)
    later = np.bincount(np.asarray(often).reshape(-1), minlength=24)
    assert later[sorted(rest)].sum() > later[sorted(drawn)].sum()


def test_problems_are_graded_by_the_model_that_has_become_long_winded(monkeypatch):
    """The base model answers in half of the tokens: what it solves is not what the arm begins with."""
    settings = kimi_k15.Settings(levels=(1,), train_problems=19, eval_problems=4, max_new_tokens=26, warm_steps=7)
    graded, own = [], recipes.bench(settings).model.params
    monkeypatch.setattr(long_winded, "warm_base", lambda found, problems, *, steps: lambda key: ("long", steps))
    monkeypatch.setattr(
        curricula, "pass_rates", lambda found, by, rows, **numbers: graded.append(by.params) or np.ones(len(rows))
    )
    kimi_k15.easy_first(settings, recipes.bench(settings))
    kimi_k15.easy_first(dataclasses.replace(settings, warm_steps=0), recipes.bench(settings))
    assert graded[0] == ("long", 7) and graded[1] is own and len(graded) == 2


def test_responses_that_repeat_themselves_against_a_loop():
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(0, 2, (200, 9)), rng.integers(0, 10, 200)
    valid = np.arange(9)[None] < length[:, None]
    for period, times in ((1, 3), (2, 2), (3, 3)):
        want = []
        for row, n in zip(tokens.tolist(), length, strict=True):
            said = row[:n]
            ends = [said[-b:] * times == said[-b * times :] for b in range(1, period + 1) if n >= b * times]
            want.append(any(ends))
        found = partial_rollouts.repeats(jnp.asarray(tokens), jnp.asarray(valid), period=period, times=times)
        assert found.tolist() == want and 0 < sum(want) < 200
    with pytest.raises(ValueError, match="times=1"):
        partial_rollouts.repeats(jnp.asarray(tokens), jnp.asarray(valid), period=2, times=1)


def _partial(**changes):
    settings = kimi_k15.Settings(
        levels=(1, 2), train_problems=16, eval_problems=4, max_new_tokens=12, prompts_per_step=3, group_size=2,
        budget=5, steps=4, learning_rate=0.0, updates_per_rollout=1,
    )  # fmt: skip
    return dataclasses.replace(settings, **kimi_k15.ARMS["partial"], **changes)


def test_the_budget_of_a_part_is_a_third_of_the_most_tokens_where_none_is_given(monkeypatch):
    given = []
    monkeypatch.setattr(
        partial_rollouts, "make_partial_rollout", lambda settings, bench, budget: given.append(budget) or ({}, None)
    )
    for changes in ({}, {"max_new_tokens": 8}, {"max_new_tokens": 2}, {"budget": 7}):
        kimi_k15.in_parts(dataclasses.replace(kimi_k15.Settings(max_new_tokens=3000), **changes), None)
    assert given == [1000, 2, 1, 7] and kimi_k15.EMBEDDED["budget"] == 24


def test_parts_of_a_rollout_wait_for_their_group_and_are_the_whole():
    """At a rate of 0 what trains in the end is, token for token, what one rollout draws from the same keys."""
    settings = _partial()
    bench = recipes.bench(settings)
    (stage,) = kimi_k15.build(settings).stages
    method, params = stage.method, jax.tree.map(jnp.copy, bench.model.params)
    state = init_state(method, params, jax.random.key(3), extras=stage.extras(params, jax.random.key(4)))
    begin = jax.jit(lambda s: begin_step(method, s))
    learn = jax.jit(lambda s, d, r: finish(method, s, d, r))
    whole, trained, waited = {}, 0, 0
    roll = jax.jit(recipes.rollout_of(settings, bench))
    held = np.zeros(3, bool)
    for step in range(5):
        drawn = begin(state)
        rows = drawn.trajectories
        answers = jax.tree.map(lambda x, at=rows.problem_ids: x[at], bench.train.answers)
        rewards = method.score(answers, rows)
        keys = sample_keys(state.key, state.step, drawn.ids, 2)
        at_once = roll(params, bench.train.tokens[drawn.ids], bench.train.valid[drawn.ids], keys, drawn.ids)
        for place in range(3):
            if not held[place]:
                whole[place] = jax.tree.map(lambda x, k=place: np.asarray(x)[2 * k : 2 * k + 2], at_once), step
            wanted, began = whole[place]
            mine = jax.tree.map(lambda x, k=place: np.asarray(x)[2 * k : 2 * k + 2], rows)
            budget = 5 * (step - began + 1)
            mask = wanted.mask & (np.cumsum(wanted.mask, axis=1) <= budget)
            np.testing.assert_array_equal(mine.mask, mask)
            np.testing.assert_array_equal(mine.tokens[mask], wanted.tokens[mask])
            close.assert_same_forward(
                np.where(mask, mine.sampler_logp, 0.0), np.where(mask, wanted.sampler_logp, 0.0), bench.model.config
            )
            assert (mine.problem_ids == wanted.problem_ids).all()
            fresh = mine.extras["fresh"]
            np.testing.assert_array_equal(fresh, mask & (np.cumsum(wanted.mask, axis=1) > budget - 5))
            complete = bool((mask == wanted.mask).all())
            assert np.asarray(rewards.valid)[2 * place : 2 * place + 2].tolist() == [complete] * 2
            held[place], trained, waited = not complete, trained + complete, waited + (not complete)
        state, metrics = learn(state, drawn, rewards)
        assert float(metrics["partial/waiting"]) == held.mean().astype(np.float32)
    assert trained > 2 and waited > 2


def test_only_the_newest_tokens_train_and_what_parts_cannot_do_is_said():
    def estimate(params, extras, rows, rewards):
        return Batch(*[rows.tokens] * 3, rows.mask, jnp.ones((2, 4)), *[jnp.zeros((2, 4))] * 3, jnp.arange(2),
                     jnp.float32(2), {})  # fmt: skip

    mask = jnp.array([[False, True, True, True], [False, True, True, False]])
    fresh = jnp.array([[False, False, False, True], [False, False, False, False]])
    rows = Trajectories(jnp.ones((2, 4), jnp.int32), *[jnp.ones((2, 4), jnp.int32)] * 2, mask, jnp.zeros((2, 4)),
                        *[jnp.zeros(2, jnp.int32)] * 3, {"key": jnp.zeros((2, 2)), "fresh": fresh})  # fmt: skip
    rewards = Rewards(jnp.ones(2), jnp.ones(2, bool))
    batch = partial_rollouts.only_fresh(estimate, reduction="seq_mean")({}, {}, rows, rewards)
    np.testing.assert_array_equal(batch.mask, fresh)
    assert float(batch.total) == 1.0 and float(batch.advantages.sum()) == 1.0
    learns = kimi_k15.ARMS["prioritised"], "drawn uniformly"
    later = {"order": kimi_k15.easy_first}, "drawn uniformly"
    for wrong, said in (({"budget": 13}, "--budget 13"), ({"slots": 2}, "no --stop"), learns, later):
        with pytest.raises(UserError, match=said):
            kimi_k15.build(_partial(**wrong))


def _short(**changes):
    settings = kimi_k15.Settings(
        levels=(1, 2), train_problems=16, eval_problems=4, max_new_tokens=14, prompts_per_step=2, group_size=4,
        steps=7, learning_rate=1e-3, updates_per_rollout=2, short_problems=6,
    )  # fmt: skip
    return dataclasses.replace(settings, **changes)


@pytest.fixture(scope="module")
def samples():
    """Eight samples of six prompts, their lengths and verdicts: what both stages begin from."""
    settings = _short()
    bench = recipes.bench(settings)
    found = long_to_short._samples(settings, bench)(bench.model.params, jax.random.key(5))
    return settings, bench, *(jax.tree.map(np.asarray, x) for x in found)


def _said(rows):
    return {(int(k), *t[m].tolist()) for k, t, m in zip(rows.problem_ids, rows.tokens, rows.mask, strict=True)}


def test_the_shortest_right_samples_are_imitated(samples):
    settings, bench, rows, lengths, right = samples
    wanted = set()
    for problem in range(6):
        members = [k for k in range(8 * problem, 8 * problem + 8) if right[k]]
        if members:
            best = min(members, key=lambda k: lengths[k])
            wanted |= _said(jax.tree.map(lambda x, k=best: x[k : k + 1], rows))
    stage = long_to_short.imitation_stage(settings, bench, steps=3)
    table = stage.extras(bench.model.params, jax.random.key(5))["rows"]
    assert _said(jax.tree.map(np.asarray, table.rows)) == wanted and 0 < len(wanted) and table.there.all()
    part = jax.tree.map(lambda x: x[:8], table)
    value, gradient = jax.value_and_grad(lambda p: stage.method.loss(p, {}, part)[0])(bench.model.params)
    down = jax.tree.map(lambda x, g: x - 0.01 * g, bench.model.params, gradient)
    assert float(stage.method.loss(down, {}, part)[0]) < float(value)
    nothing = part._replace(there=jnp.zeros(8, bool))
    assert float(stage.method.loss(bench.model.params, {}, nothing)[0]) == 0.0


def test_samples_are_drawn_and_scored_a_part_at_a_time(samples, monkeypatch):
    """Four prompts at once of six: the same responses, lengths, verdicts and groups as all of them at once."""
    settings, bench, rows, lengths, right = samples
    monkeypatch.setattr(long_to_short, "AT_ONCE", 4)
    asked, train_score = [], curricula.train_score

    def judged(found):
        judge = train_score(found)
        return lambda answers, rows: asked.append(rows.tokens.shape[0]) or judge(answers, rows)

    monkeypatch.setattr(curricula, "train_score", judged)
    parts = long_to_short._samples(settings, bench)(bench.model.params, jax.random.key(5))
    assert set(asked) == {32}
    for name in ("tokens", "mask", "problem_ids", "group_ids"):
        np.testing.assert_array_equal(getattr(parts[0], name), getattr(rows, name))
    assert rows.group_ids.tolist() == [k for k in range(6) for _ in range(8)]
    np.testing.assert_array_equal(parts[1], lengths)
    np.testing.assert_array_equal(parts[2], right)
    table = long_to_short.preference_stage(settings, bench, steps=3).extras(bench.model.params, jax.random.key(5))
    found = table["rows"].reference[0]
    want = jnp.sum(jnp.where(table["rows"].chosen.mask, table["rows"].chosen.sampler_logp, 0.0), axis=1)
    width = rows.tokens.shape[1]
    close.assert_same_sums(found, want, 14 * close.forward_sums(bench.model.config, width))


def test_the_length_reward_warms_up():
    settings = _short(steps=7)
    (stage, then) = kimi_k15.build(dataclasses.replace(settings, **kimi_k15.ARMS["length_warm"])).stages
    assert (stage.steps, then.steps) == (3, 4)
    mask = jnp.arange(6)[None] < jnp.array([2, 2, 4, 6])[:, None]
    grid, ids = jnp.ones((4, 6), jnp.int32), jnp.zeros(4, jnp.int32)
    rows = Trajectories(grid, grid, grid, mask, jnp.zeros((4, 6)), ids > 0, ids, ids)
    rewards, params = Rewards(jnp.ones(4), jnp.ones(4, bool)), recipes.bench(settings).model.params
    first, later = (s.method.estimate(params, {}, rows, rewards).advantages[:, 0] for s in (stage, then))
    np.testing.assert_array_equal(first, jnp.zeros(4))
    close.assert_near(later, 0.5 * np.array([0.375, 0.375, -0.125, -0.625]))  # 0.5, 0.5, 0, -0.5 less their mean


def test_longer_samples_are_rejected(samples):
    settings, bench, rows, lengths, right = samples
    wanted = set()
    for problem in range(6):
        members = range(8 * problem, 8 * problem + 8)
        if not any(right[k] for k in members):
            continue
        least = min(lengths[k] for k in members if right[k])
        worse = [k for k in members if lengths[k] > (1.5 * least if right[k] else least)]
        wanted |= _said(jax.tree.map(lambda x, at=np.asarray(worse, int): x[at], rows))
    stage = long_to_short.preference_stage(settings, bench, steps=3)
    table = stage.extras(bench.model.params, jax.random.key(5))["rows"]
    assert _said(jax.tree.map(np.asarray, table.rejected)) == wanted and wanted
    np.testing.assert_array_equal(table.chosen.problem_ids, table.rejected.problem_ids)
    longer = reduce.sequences(jnp.ones(table.chosen.mask.shape), table.rejected.mask)
    assert (reduce.sequences(jnp.ones(table.chosen.mask.shape), table.chosen.mask) < longer).all()
    part = jax.tree.map(lambda x: x[:8], table)
    value, gradient = jax.value_and_grad(lambda p: stage.method.loss(p, {}, part)[0])(bench.model.params)
    close.assert_near(value, np.float32(np.log(2)), terms=64)  # the policy is its own reference
    down = jax.tree.map(lambda x, g: x - 0.01 * g, bench.model.params, gradient)
    assert float(stage.method.loss(down, {}, part)[0]) < float(value)


def test_the_last_third_is_what_shortens():
    settings = _short(warm_steps=2)
    stages = {
        name: kimi_k15.build(dataclasses.replace(settings, **kimi_k15.ARMS[name])).stages
        for name in ("mirror", "short_rl", "short_sft", "short_dpo", "merged")
    }
    steps = {name: [stage.steps for stage in found] for name, found in stages.items()}
    assert steps == {
        "mirror": [2, 7], "short_rl": [2, 5, 2], "short_sft": [2, 5, 4], "short_dpo": [2, 5, 4], "merged": [2, 5],
    }  # fmt: skip
    bench = recipes.bench(settings)
    plan = kimi_k15.build(dataclasses.replace(settings, **kimi_k15.ARMS["merged"]))
    moved = jax.tree.map(lambda x: x + 1, bench.model.params)
    half = plan.finish(moved, jax.random.key(0))
    for found, first in zip(jax.tree.leaves(half), jax.tree.leaves(bench.model.params), strict=True):
        close.assert_near(found, np.asarray(first) + 0.5, terms=2)
