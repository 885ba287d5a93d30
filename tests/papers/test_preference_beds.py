"""Beds of the preference family: puzzles with one solution, a ranker that learns from good examples, prompts by gap."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.analysis.parts import input_shift
from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.preference import mpo, pairwise_rl, rlhf_workflow, robust_rlhf, rpo, safe_constraints, salsa, trpa, u2a
from experiments.preference.parts import (
    constraints,
    knights,
    noisy_ranker,
    pair_judges,
    pair_sources,
    varied_lengths,
    zones,
)
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from jaxrl_llm.experiment.results import ArmResult, Results
from jaxrl_llm.losses import preference
from jaxrl_llm.train import online
from jaxrl_llm.train.plan import keep_reference
from jaxrl_llm.types import Rewards
from tests import close
from tests.close import singles

RNG = np.random.default_rng(2)


# --- knights and knaves


@pytest.mark.parametrize("people", [2, 3, 4])
def test_every_puzzle_has_one_solution_and_no_other_response_is_right(people):
    prompts, roles = (x[:6] for x in knights.make_pool(people, False))
    for prompt, wanted in zip(prompts, roles, strict=True):
        found = []
        for guess in itertools.product((knights.KNIGHT, knights.KNAVE), repeat=people):
            true = []
            for k in range(people):
                kind, a, b = prompt[1 + 3 * k : 4 + 3 * k] - [0, knights.PERSON, knights.PERSON]
                same = guess[a] == guess[b]
                said = {knights.IS_KNIGHT: guess[a] == 0, knights.IS_KNAVE: guess[a] == 1, knights.SAME: same}
                true.append(said.get(int(kind), not same))
            if all(t == (g == knights.KNIGHT) for t, g in zip(true, guess, strict=True)):
                found.append(guess)
        assert found == [tuple(wanted[:people].tolist())]
    guesses = jnp.asarray([[*g, *[0] * (4 - people)] for g in itertools.product((0, 1), repeat=people)], jnp.int32)
    asked = jnp.tile(jnp.asarray(prompts[:1]), (guesses.shape[0], 1))
    levels = knights.rule_levels(asked, knights.write(asked, guesses))
    assert levels.tolist() == [1 if g == roles[0].tolist() else 2 for g in guesses.tolist()]


def test_held_out_puzzles_are_no_training_puzzles():
    for people in (2, 3, 4):
        both = [
            {tuple(knights.canonical(x)) for x in knights.make_pool(people, side)[0].tolist()} for side in (False, True)
        ]
        assert both[0] and both[1] and not both[0] & both[1]
    prompts, _ = knights.draw_puzzles(jax.random.key(0), 200, people=(2, 3))
    share = (np.asarray(prompts)[:, 0] == knights.COUNT + 2).mean()
    assert 0.35 < share < 0.65 and not (np.asarray(prompts)[:, 0] == knights.COUNT + 4).any()


def test_levels_of_broken_responses():
    asked = jnp.asarray([knights.encode([(knights.IS_KNAVE, 1, 1), (knights.SAME, 0, 1)])] * 4)
    m, b, e = knights.MARK, knights.BLANK, knights.END
    said = jnp.asarray([[m, 0, 1, e, e, e], [m, 1, 0, e, e, e], [m, b, 1, e, e, e], [b, 0, 1, e, e, e]])
    assert knights.rule_levels(asked, said).tolist() == [1, 2, 3, 4]
    assert knights.rule_levels(asked[:1], jnp.asarray([[m, 0, 1, 0, e, e]])).tolist() == [3]  # a role too many


def test_what_is_claimed_of_puzzles_is_claimed_of_new_ones():
    """The first metric, the bed and the primary part are of puzzles that no text and no training has."""
    new = {f"{name}/accuracy" for name, _, heldout in trpa.MEASURED if heldout}
    assert new == {"kk_new/accuracy", "kk4/accuracy"}
    assert trpa.METRICS[0] == trpa.BED.metric == "kk_new/accuracy" and set(trpa.D_STAR) <= new
    values = {metric: [0.1, 0.2] for metric in trpa.METRICS}
    claim = trpa.claim(Results({name: ArmResult({}, [0, 1], values, {}, 1, 1, 1, 1.0) for name in trpa.ARMS}))
    assert claim.primary.metric == "kk_new/accuracy"
    assert [part.metric for part in claim.secondary if part.metric not in new] == ["kk/accuracy"]


@pytest.mark.slow
def test_the_region_acts_from_the_second_update_on():
    """At the sampler its gradient is 0; where the policy has moved it pulls; two updates differ with and without it."""
    small = {"base_steps": 1, "prompts_per_step": 2, "group_size": 4}

    def after(region, updates):
        plan = trpa.build(trpa.Settings(**small, region=region, updates=updates))
        params = plan.init(jax.random.key(0))
        method = plan.stages[0].method
        state = online.init_state(method, params, jax.random.key(1), extras=keep_reference(params, jax.random.key(2)))
        return jax.jit(lambda s: online.iterate(method, s))(state)[0].params

    def apart(a, b):
        return max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    # a step of Adam is as long for any gradient, so that what is 0 but for rounding is compared by a large weight
    small_part = trpa.Settings(**small).learning_rate / 30
    assert apart(after(0.0, 1), after(1e-3, 1)) < small_part < apart(after(0.0, 3), after(10.0, 3))


@pytest.mark.slow
def test_the_ratio_of_the_baseline_is_to_the_policy_that_drew_the_rollout():
    """Of three updates on the same rows the later ones are away from it; by themselves they would all be at 1."""
    plan = trpa.build(
        trpa.Settings(
            base_steps=1, prompts_per_step=2, group_size=4, updates=3, learning_rate=0.03, **trpa.ARMS["grpo"]
        )
    )
    params = plan.init(jax.random.key(0))
    method = plan.stages[0].method
    state = online.init_state(method, params, jax.random.key(1), extras=keep_reference(params, jax.random.key(2)))
    ratios = [float(jax.jit(lambda s: online.iterate(method, s))(state)[1]["policy/ratio"])]
    alone = trpa.build(trpa.Settings(base_steps=1, prompts_per_step=2, group_size=4, updates=1, **trpa.ARMS["grpo"]))
    method = alone.stages[0].method
    state = online.init_state(method, params, jax.random.key(1), extras=keep_reference(params, jax.random.key(2)))
    ratios += [float(jax.jit(lambda s: online.iterate(method, s))(state)[1]["policy/ratio"])]
    assert abs(ratios[1] - 1) < abs(ratios[0] - 1) / 100


# --- constraints


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_fixed_penalty_weighs_cost_and_reward_on_one_scale(scale):
    """It is CAPO with a multiplier that stays: what scale the reward has changes nothing."""
    paid, spent = jnp.asarray([1.0, 0.0, 0.0, 0.0]), jnp.asarray([0.0, 0.5, 0.5, 0.0])
    assert safe_constraints.ARMS["penalty"] == {"multiplier": 1.0, "rate": 0.0}
    assert safe_constraints.Settings().multiplier == 0.0 and safe_constraints.Settings().rate == 0.1
    params = {"policy": constraints.WORLD.policy.init(jax.random.key(0)), "goal": jnp.ones(5)}

    def begun(**numbers):
        stage = constraints.online_stage(
            lambda params, prompts, walks: spent, reward=lambda params, prompts, walks, given: scale * paid,
            shifted=True, steps=1, prompts_per_step=1, group_size=4, learning_rate=1e-3, **numbers,
        )  # fmt: skip
        extras = stage.extras(params, jax.random.key(1))
        state = online.init_state(stage.method, params, jax.random.key(2), extras=extras)
        rows = online.begin(stage.method, state).trajectories
        rewards = Rewards(jnp.zeros(4), jnp.ones(4, bool))
        batch = stage.method.estimate(params, extras, rows, rewards)
        found = np.asarray(batch.advantages)[np.arange(4), np.asarray(batch.mask).argmax(axis=1)]
        return found, stage.method.remember(state, batch, rows, rewards)["multiplier"]

    rewards, costs = np.array([1.5, -0.5, -0.5, -0.5]), np.array([-1, 1, 1, -1]) * np.sqrt(3) / 2
    fixed, multiplier = begun(multiplier=1.0, rate=0.0)
    close.assert_near(fixed, (rewards - costs) / 2, terms=64)
    assert float(multiplier) == 1.0
    adaptive, multiplier = begun(multiplier=0.0, rate=0.1)
    close.assert_near(adaptive, rewards, terms=64)
    assert float(multiplier) == singles(0.025)


def test_every_seed_walks_with_tasks_of_its_own():
    params = {"policy": constraints.WORLD.policy.init(jax.random.key(0)), "goal": jnp.ones(5)}
    stage = constraints.online_stage(
        constraints.no_cost, shifted=True, multiplier=0.0, rate=0.1, steps=1, prompts_per_step=2, group_size=2,
        learning_rate=1e-3,
    )  # fmt: skip
    asked = []
    for seed in (1, 2):
        extras = stage.extras(params, jax.random.key(seed))
        state = online.init_state(stage.method, params, jax.random.key(3), extras=extras)
        rows = online.begin(stage.method, state).trajectories
        found = np.asarray(strings.responses_of(constraints.WORLD, rows)[0])
        assert (found == np.asarray(extras["worlds"])[np.asarray(rows.problem_ids)]).all()
        asked.append(found)
    assert (asked[0] != asked[1]).any(axis=1).all()


def test_the_constraint_is_judged_against_the_one_that_lists_dangers():
    values = {metric: [0.1, 0.2] for metric in safe_constraints.METRICS}
    made = {name: ArmResult({}, [0, 1], values, {}, 1, 1, 1, 1.0) for name in safe_constraints.ARMS}
    primary = safe_constraints.claim(Results(made)).primary
    assert (primary.arm, primary.than, primary.metric) == ("capo", "listed", "shifted/violations")
    assert safe_constraints.BED.judges == (("capo", "constraint/apart", 0.75),)


def test_rates_are_chosen_by_safe_arrivals_in_known_worlds(monkeypatch):
    """By arrival alone an arm that learns nothing of danger would have the best rate."""
    seen = []

    def sample(world, params, prompts, key):
        seen.append(np.asarray(prompts))
        return zones.draw_walks(jax.random.key(5), prompts.shape[0])[1]

    monkeypatch.setattr(constraints.strings, "sample", sample)
    found = constraints.validate({"policy": {}}, jax.random.key(0))
    (prompts,) = seen
    walks = zones.draw_walks(jax.random.key(5), prompts.shape[0])[1]
    there, bad = (np.asarray(f(jnp.asarray(prompts), walks)) for f in (zones.arrived, zones.violates))
    assert prompts[:, : zones.CELLS].max() < zones.NEW, "what is dangerous there the demonstrations say"
    assert found.keys() == {"reward/mean"} and float(found["reward/mean"]) == singles((there & ~bad).mean())
    assert safe_constraints.build(safe_constraints.Settings()).validate is constraints.validate


# --- CycleAlign


def test_only_good_examples_help_the_ranker():
    gold = jnp.asarray(RNG.normal(size=4), jnp.float32)
    every = jnp.ones(4, bool)
    found = [float(noisy_ranker.quality(gold[jnp.asarray(o)], every)) for o in itertools.permutations(range(4))]
    close.assert_near(sum(found), 0.0, terms=len(found))
    assert max(found) == 1.0 and min(found) == -1.0
    assert float(noisy_ranker.quality(gold, ~every)) == 0.0
    fixed = np.concatenate([np.asarray(noisy_ranker.fixed_examples(toy.STRINGS, jax.random.key(k))) for k in range(20)])
    assert 0.2 < fixed.mean() < 0.9, "people rank better than chance and not perfectly"
    spread = [float(noisy_ranker.deviation(jnp.asarray(x))) for x in ([0.0] * 3, [-1.0] * 3, [0.5] * 3, [1.0] * 3)]
    assert spread[0] == spread[1] > spread[2] > spread[3] > 0


@pytest.mark.parametrize("size", [1.0, 8.0])
def test_errors_over_own_rows_are_of_the_size_of_what_the_judge_says(size):
    """A judge of another scale ranks alike; one that errs by itself gets no error, and any examples are right."""
    gold = lambda prompts, responses: size * toy.gold_reward(prompts, responses)  # noqa: E731
    task = toy.STRINGS._replace(gold_reward=gold, spread=jnp.std)
    one = toy.STRINGS._replace(spread=jnp.std)
    for key in map(jax.random.key, range(4)):
        wanted = noisy_ranker.fixed_examples(one, key)
        np.testing.assert_array_equal(noisy_ranker.fixed_examples(task, key), wanted)
        sure = noisy_ranker.fixed_examples(task._replace(spread=lambda gold: jnp.zeros(())), key)
        assert bool((sure >= wanted).all()) and bool((sure > 0.4).all())
    assert any((noisy_ranker.fixed_examples(one, jax.random.key(k)) < 0.9).any() for k in range(4))


# --- MPO


def test_prompts_of_hard_pairs_are_drawn_again_and_again():
    prompts = jnp.arange(5, dtype=jnp.int32)[:, None]
    which = jnp.asarray([False, True, False, True, False])
    assert mpo.first_of(which, prompts, 5)[:, 0].tolist() == [1, 3, 1, 3, 1]
    assert mpo.first_of(which & ~which, prompts, 6)[:, 0].tolist() == [0, 1, 2, 3, 4, 0]
    assert mpo.make_prompts(toy.STRINGS, "any") is None


def test_few_updates_come_before_the_last_stage():
    steps = {}
    for name in ("mpo", "dpo", "ppo", "reversed"):
        plan = mpo.build(dataclasses.replace(mpo.Settings(), **mpo.ARMS[name]))
        steps[name] = [stage.steps for stage in plan.stages]
    assert steps == {"mpo": [30, 20, 150], "dpo": [30, 300], "ppo": [20, 15, 150], "reversed": [30, 20, 150]}
    assert mpo.BED.stages == (("mpo", "first_steps"),)


@pytest.mark.slow
def test_ppo_draws_the_prompts_of_its_stage():
    params = preference_strings.make_start(toy.STRINGS, reference_steps=1, reward_steps=1)(jax.random.key(0))
    wanted = jnp.asarray([[2, 1, 1, 1]], jnp.int32)
    warm, stage = preference_strings.ppo_stages(
        toy.STRINGS, partial(preference_strings.proxy, toy.STRINGS), steps=1, beta=0.1,
        learning_rate=1e-3, rollouts_per_step=8,
        prompts=lambda params, key: jnp.tile(wanted, (1024, 1)),
    )  # fmt: skip
    extras = stage.extras(params, jax.random.key(1))
    state = online.init_state(warm.method, params, jax.random.key(2), extras=extras)
    for _ in range(2):
        state, _ = online.iterate(warm.method, state)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), state.params, params)
    assert min(jax.tree.leaves(moved.pop("value"))) > 0 and max(jax.tree.leaves(moved)) == 0, "the critic alone"
    state = online.init_state(stage.method, params, jax.random.key(2), extras=extras)
    drawn = online.begin(stage.method, state)
    assert (drawn.trajectories.tokens[:, :4] == wanted).all()
    rewards = stage.method.score(None, drawn.trajectories)
    batch = stage.method.estimate(params, extras, drawn.trajectories, rewards)
    # critic and log ratio begin at 0: the first return is the opinion on the last token, discounted by lambda
    paid = preference_strings.proxy(toy.STRINGS, params, *strings.responses_of(toy.STRINGS.world, drawn.trajectories))
    first = np.asarray(batch.mask).argmax(1)
    totals = np.asarray(batch.extras["returns"])[np.arange(8), first]
    close.assert_near(totals, 0.95 ** (np.asarray(batch.mask).sum(1) - 1) * np.asarray(paid), terms=12)
    after, _ = online.finish(stage.method, state, drawn, rewards)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), after.params, params)
    assert max(jax.tree.leaves(moved["policy"])) > 0 and max(jax.tree.leaves(moved["value"])) > 0
    assert max(jax.tree.leaves([moved["reference"], moved["reward"]])) == 0


@pytest.mark.slow
def test_the_reward_model_learns():
    params = preference_strings.make_start(toy.STRINGS, reference_steps=200, reward_steps=600)(jax.random.key(0))
    found = preference_strings.reward_quality(toy.STRINGS, params, jax.random.key(1))
    assert float(found["rm/accuracy"]) > 0.8 and float(found["rm/correlation"]) > 0.4


# --- pairwise judges


def test_judges_start_from_one_model_and_offsets_cancel_against_an_anchor():
    task = pair_judges.STRINGS
    pairs, model = pair_judges.labelled(task, jax.random.key(0), 8), pair_judges.WORLD.policy.init(jax.random.key(1))
    for score, terms, consistency in pair_judges.KINDS.values():
        judge = pair_judges.fit(
            task, score, terms, model, pairs, jax.random.key(2), steps=0, consistency=consistency, rows_per_step=4
        )
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), judge["model"], model))
    rows = pairs.prompts, pairs.chosen, pairs.rejected
    offsets = pair_judges.offset(pairs.prompts)
    assert float(jnp.std(offsets)) > 0.5
    first, second = (pair_judges.scalar(task, judge, rows[0], x) + offsets for x in rows[1:])
    close.assert_near(first - second, pair_judges.bradley_terry(task, judge, *rows))
    assert pairwise_rl.ARMS["bt"]["worth"] is None and "worth" not in pairwise_rl.ARMS["bt_anchored"]


# --- VRPO, more is less, diversity


def test_gradients_of_texts_are_measured_in_parts(monkeypatch):
    """As with all at once: of ``mean (x . p - y)^2`` at a point, over eight tables of four rows and eight true rows."""
    at, keys = {"p": jnp.asarray([0.5, -1.0])}, jax.random.split(jax.random.fold_in(jax.random.key(3), 30), 8)

    def table(params, key):
        return jax.random.normal(key, (4, 2)), jax.random.normal(jax.random.fold_in(key, 1), (4,))

    def losses(p, rows):
        assert rows[0].shape[0] <= 2
        return (rows[0] @ p["p"] - rows[1]) ** 2

    monkeypatch.setattr(robust_rlhf, "PAIRS_AT_ONCE", 2)
    monkeypatch.setattr(robust_rlhf, "make_rows", lambda *_: table)
    population = jax.random.normal(jax.random.key(4), (8, 2)), jnp.zeros((8,))
    task = toy.STRINGS._replace(draw_pairs=lambda key, n: population)
    said = robust_rlhf.table_figures_of_texts(
        task, robust_rlhf.Settings(), {}, jax.random.key(3), at,
        lambda task, settings, p, rows: preference.PairTerms(losses(p, rows), {}),
        lambda task, settings, p, params, rows: losses(p, rows),
    )  # fmt: skip
    slope = jax.grad(lambda p, rows: jnp.mean((rows[0] @ p["p"] - rows[1]) ** 2))
    found = [slope(at, table({}, key)) for key in keys]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *found)
    wanted = robust_rlhf.gradient_figures(stacked, slope(at, population))
    for name in ("table/mse", "table/variance"):
        close.assert_near(said[name], wanted[name], terms=64, magnitude=float(wanted["table/mse"]))


def test_texts_are_read_some_at_a_time(monkeypatch):
    """Strings of an embedded world in one piece, as their programs are."""
    monkeypatch.setattr(strings, "AT_ONCE", 2)
    seen = []

    def read(prompts, responses):
        seen.append(prompts.shape[0])
        return prompts[:, 0] + responses[:, 0]

    world = toy.STRINGS.world
    rows = jnp.arange(10, dtype=jnp.int32).reshape(5, 2), jnp.ones((5, 3), jnp.int32)
    for there in (world, world._replace(start=dict)):
        assert strings.in_pieces(there, read, *rows).tolist() == [1, 3, 5, 7, 9]
    assert seen == [5, 2, 2, 1]
    asked, said = toy.draw_behaviour(jax.random.key(0), 5)
    params = {"model": world.policy.init(jax.random.key(1)), "head": {"weight": jnp.ones((32, 1)), "bias": jnp.ones(1)}}
    task = toy.STRINGS._replace(world=world._replace(start=dict))
    sizes = []
    hidden = world.policy.hidden
    policy = world.policy._replace(hidden=lambda params, tokens, *rest: sizes.append(len(tokens)) or hidden(
        params, tokens, *rest))  # fmt: skip
    task = task._replace(world=task.world._replace(policy=policy))
    parts = preference_strings.reward_of(task, params, asked, said)
    close.assert_near(parts, preference_strings.reward_of(toy.STRINGS, params, asked, said), terms=128)
    assert sizes == [2, 2, 1]


def test_an_unrelated_start_of_own_rows_is_none_of_the_loaded_weights():
    loaded = toy.STRINGS.world.policy.init(jax.random.key(0))
    policy = toy.STRINGS.world.policy._replace(init=lambda key: loaded)
    world = toy.STRINGS.world._replace(policy=policy, start=lambda: loaded)
    found = salsa.unrelated(toy.STRINGS._replace(world=world), jax.random.key(1))
    for mixed, own in zip(jax.tree.leaves(found), jax.tree.leaves(loaded), strict=True):
        assert mixed.shape == own.shape
        np.testing.assert_array_equal(jnp.sort(mixed.reshape(-1)), jnp.sort(own.reshape(-1)))
    assert (found["embed"] != loaded["embed"]).mean() > 0.9
    fresh = salsa.unrelated(toy.STRINGS, jax.random.key(1))  # strings have fresh weights for it
    np.testing.assert_array_equal(fresh["embed"], toy.STRINGS.world.policy.init(jax.random.key(1))["embed"])


@pytest.mark.parametrize("module", [mpo, rpo, u2a])
def test_files_without_a_record_measure_as_the_standard_has_it(module):
    task = toy.STRINGS
    assert module.build(module.Settings()).measure.keywords == {"evaluated": 512}
    assert preference_strings.evaluated(task._replace(world=task.world._replace(start=dict))) == 64


def test_rounds_that_do_not_divide_the_budget_are_refused():
    smoke = arms.preset(rlhf_workflow, smoke=True, model="nano")
    for rounds in (0, 2, 4):
        with pytest.raises(UserError, match=f"^--rounds {rounds}: .*; give 1 or 3$"):
            rlhf_workflow.build(dataclasses.replace(smoke, rounds=rounds))
    for rounds, steps in ((1, [3]), (3, [1, 1, 1])):
        plan = rlhf_workflow.build(dataclasses.replace(smoke, rounds=rounds))
        assert [stage.steps for stage in plan.stages] == steps


def test_all_prompts_at_once_begin_with_those_of_the_first_round(monkeypatch):
    """offline has the pairs of the first round of the others, so that they differ in the later ones alone."""
    task, asked = varied_lengths.STRINGS, []

    def explored(task, params, prompts, key, samples):
        return jax.random.randint(key, (prompts.shape[0], samples, 12), 4, 30, jnp.int32)

    def judged(task, judge, prompts, drawn):
        return jnp.sum(drawn, axis=2).astype(jnp.float32)

    monkeypatch.setitem(rlhf_workflow.SCORES, "bt", judged)
    monkeypatch.setattr(
        rlhf_workflow.strings, "sum_logp", lambda world, params, prompts, y: y[:, 0].astype(jnp.float32)
    )
    smoke = dataclasses.replace(arms.preset(rlhf_workflow, smoke=True, model="nano"), explore=explored)
    params = {"reference": {}, "policy": {}, "judge": {}}
    for rounds in (1, 3):
        asked.append(rlhf_workflow.make_pairs(task, smoke, rounds)(params, jax.random.key(7)))
    for one, all_ in zip(*asked, strict=True):
        assert one.shape[0] == smoke.prompts_per_round and all_.shape[0] == 3 * smoke.prompts_per_round
        np.testing.assert_array_equal(all_[: one.shape[0]], one)
    prompts, chosen, rejected, *_ = asked[1]
    assert len({tuple(x) for x in np.asarray(chosen).tolist()}) == 12, "later rounds are draws of their own"
    assert (np.asarray(chosen).sum(1) > np.asarray(rejected).sum(1)).all() and prompts.shape == (12, 4)
    assert rlhf_workflow.ARMS["offline"] == {"rounds": 1} and rlhf_workflow.ROUNDS == 3


def test_a_token_of_own_rows_costs_nothing():
    assert arms.preset(rlhf_workflow, smoke=False, model="nano").penalty == varied_lengths.LIKING == 0.5
    assert arms.preset(rlhf_workflow, smoke=False, model="/a/model").penalty == 0.0


def test_error_and_variance_of_gradients():
    found, true = RNG.normal(size=(5, 3)), RNG.normal(size=3)
    said = robust_rlhf.gradient_figures({"a": jnp.asarray(found, jnp.float32)}, {"a": jnp.asarray(true, jnp.float32)})
    size = (true**2).sum()
    close.assert_near(said["table/mse"], ((found - true) ** 2).sum(1).mean() / size, magnitude=0)
    close.assert_near(said["table/variance"], found.var(0, ddof=1).sum() / size, magnitude=0)


def test_a_reward_model_by_the_loss_with_a_judge_and_ppo_against_it():
    """Fresh pairs that are the labelled ones give the plain loss; only the fitted model trains, and it pays PPO."""
    task, settings = toy.STRINGS, robust_rlhf.Settings(**robust_rlhf.SMOKE | robust_rlhf.ARMS["rm_vrpo"])
    reference = task.world.policy.init(jax.random.key(0))
    fitted = robust_rlhf.first_reward(task, reference)
    pairs = task.draw_pairs(jax.random.key(1), 6)
    four = jnp.stack([pairs.chosen, pairs.rejected] * 2, axis=1)
    judged = jnp.repeat(jnp.asarray(RNG.random((6, 1)), jnp.float32), 2, axis=1)
    batch = pairs.prompts, four, jnp.zeros((6, 4)), judged
    plain = dataclasses.replace(settings, **robust_rlhf.ARMS["rm"])
    found, want = (robust_rlhf.reward_terms(task, one, fitted, batch).loss for one in (settings, plain))
    close.assert_near(found, want, terms=8)
    params = {name: reference for name in ("policy", "reference")} | {"fitted": fitted}
    better = [preference_strings.reward_of(task, fitted, pairs.prompts, x) for x in (pairs.chosen, pairs.rejected)]
    close.assert_near(want, np.log1p(np.exp(-np.asarray(better[0] - better[1], np.float64))), terms=8)
    first, warm_up, second = robust_rlhf.build(settings).stages
    grads = jax.grad(lambda p: first.method.loss(p, {}, batch)[0])(params)
    moved = {name: bool(jnp.any(optax.global_norm(tree) > 0)) for name, tree in grads.items()}
    assert moved == {"policy": False, "reference": False, "fitted": True}
    paid = robust_rlhf.fitted_reward(task, params, pairs.prompts, pairs.chosen)
    np.testing.assert_array_equal(paid, better[0])
    assert second.method.updates_per_rollout == 2 and robust_rlhf.build(plain).stages[2].steps == second.steps


def test_a_probe_on_bags_sees_habits_and_no_order():
    plain = jnp.asarray(RNG.integers(4, 24, (60, toy.RESPONSE_TOKENS)), jnp.int32)
    prompts = jnp.zeros((60, 4), jnp.int32)
    habit = plain.at[:, 3].set(25)
    assert float(pair_sources.bag_separability(toy.STRINGS, toy.Pairs(prompts, habit, plain))) == 1.0
    shuffled = toy.Pairs(prompts, plain[:, ::-1], plain)
    blind = 3 * np.sqrt(0.25 / 60)  # standard errors of a coin thrown for every pair
    assert abs(float(pair_sources.bag_separability(toy.STRINGS, shuffled)) - 0.5) < blind


def test_responses_that_say_the_same():
    prompts = jnp.zeros((3, 4), jnp.int32)
    said = jnp.asarray([[4, 5, 6, 31], [8, 9, 10, 7], [4, 8, 6, 7]], jnp.int32)  # good bad -, good bad -, good good -
    assert toy.meanings(prompts, said).tolist() == [[1, 1], [1, 1], [2, 0]]
    assert float(input_shift.apart(toy.meanings(prompts, said))) == singles(2 / 3)
    with pytest.raises(ValueError, match="no pairs"):
        input_shift.apart(jnp.zeros((1, 2), jnp.int32))
