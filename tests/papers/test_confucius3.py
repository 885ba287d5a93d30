"""Confucius3-Math: weights of hard groups, entropy held at a target, surplus groups carried over."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import confucius3
from experiments.parts import repeats
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import arms, loop, recipes
from jaxrl_llm.experiment.results import ArmResult, Results
from jaxrl_llm.losses import entropy as entropies
from jaxrl_llm.train import refill
from jaxrl_llm.types import Batch, Rewards, TrainState
from tests import close
from tests.close import singles

EIGHT = jnp.zeros(8, jnp.int32)


@pytest.mark.parametrize(
    ("right", "up", "down"), [(1, 2.534, -0.362), (4, 1.256, -1.256), (7, 0.266, -1.862), (0, 0.0, 0.0), (8, 0.0, 0.0)]
)
def test_worked_weights(right, up, down):
    rewards = jnp.array([1.0] * right + [0.0] * (8 - right))
    found = group.hardness_weighted_advantages(rewards, EIGHT)
    close.assert_near(found, [up] * right + [down] * (8 - right))
    close.assert_near(jnp.sum(found), 0.0)


def test_weights_agree_with_a_loop_and_with_centred_advantages():
    rng = np.random.default_rng(0)
    rewards, ids, valid = (rng.random(24) < 0.4).astype(np.float64), rng.integers(0, 4, 24), rng.random(24) < 0.8
    expected = np.zeros(24)
    for g in range(4):
        own = np.flatnonzero((ids == g) & valid)
        signed = 2 * rewards[own] - 1
        expected[own] = (signed - signed.mean()) * (1.256 - 0.256 * signed.mean())
    given = jnp.asarray(np.where(valid, rewards, np.nan), jnp.float32), jnp.asarray(ids, jnp.int32)
    found = group.hardness_weighted_advantages(*given, valid=jnp.asarray(valid))
    close.assert_near(found, expected)
    flat = group.hardness_weighted_advantages(*given, valid=jnp.asarray(valid), slope=0.0, constant=0.5)
    close.assert_near(flat, group.dr_grpo_advantages(*given, valid=jnp.asarray(valid)))


def test_the_term_is_the_distance_to_the_target():
    entropy = jnp.array([[0.5, 1.0], [jnp.nan, 7.0]])
    mask = jnp.array([[True, True], [False, False]])

    def value(entropy, target):
        terms = entropies.targeted_entropy_terms(entropy, mask, target=target)
        return jnp.sum(terms) / 2

    assert 0.001 * float(value(entropy, 0.55)) == singles(0.0002, magnitude=0)
    assert float(value(entropy, 0.95)) == singles(0.2)
    # it pulls down above the target, up below it, and rests on it
    for target, slope in ((0.55, 0.5), (0.95, -0.5), (0.75, 0.0)):
        close.assert_near(jax.grad(value)(entropy, target), [[slope, slope], [0.0, 0.0]])
    with pytest.raises(ValueError, match="target=-1"):
        entropies.targeted_entropy_terms(entropy, mask, target=-1.0)


def _updates(overflow, draws):
    """How many groups wait after each draw of four groups, and in which draws a batch of four was full."""
    rows = 8  # four groups of two
    pool = refill.empty_pool(rows, 1)
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 2)
    grid = jnp.zeros((rows, 1), jnp.float32)

    def estimate(params, extras, trajectories, rewards):
        t, total = trajectories, jnp.sum(rewards.valid.astype(jnp.float32))
        return Batch(t.tokens, t.segment_ids, t.positions, t.mask, grid, grid, grid, grid, t.group_ids, total, {})

    slots = refill.make_refill(estimate, lambda trajectories, rewards: rewards.value > 0, 2, overflow=overflow)
    extras, waiting, full = {refill.POOL: pool}, [], []
    for k, kept in enumerate(draws):
        trajectories = pool.trajectories._replace(group_ids=ids, tokens=jnp.full((rows, 1), k, jnp.int32))
        rewards = Rewards(jnp.asarray(np.repeat(kept, 2), jnp.float32), jnp.ones(rows, bool))
        batch = slots["estimate"](None, extras, trajectories, rewards)
        full.append(float(batch.total) > 0)
        extras = slots["remember"](TrainState(None, None, None, None, None, extras), batch, trajectories, rewards)
        waiting.append(int(extras[refill.POOL].kept.sum()) // 2)
    return waiting, full, extras[refill.POOL]


def test_worked_recovery_saves_a_draw():
    three = [1, 1, 1, 0]
    waiting, full, pool = _updates(refill.recovered, [three, three, three])
    assert (waiting, full) == ([3, 2, 1], [False, True, True])
    assert pool.trajectories.tokens[:2, 0].tolist() == [2, 2]  # what waits now is of the newest draw
    waiting, full, _ = _updates(refill.dropped, [three] * 4)
    assert (waiting, full) == ([3, 0, 3, 0], [False, True, False, True])


def test_recovered_groups_come_first_and_once():
    _, _, pool = _updates(refill.recovered, [[1, 1, 1, 0], [1, 1, 1, 0]])
    assert pool.kept.tolist() == [True] * 4 + [False] * 4
    assert pool.trajectories.tokens[:4, 0].tolist() == [1] * 4  # the surplus of the second draw
    assert pool.trajectories.group_ids.tolist() == np.repeat(np.arange(4), 2).tolist()


def test_an_iteration_without_an_update_has_no_entropy():
    """The mean over no token is undefined, and means over a stretch leave it out; it was read as 0."""
    settings = dataclasses.replace(confucius3.Settings(), **confucius3.EMBEDDED | confucius3.SMOKE | {"target": 0.5})
    figures = confucius3.build(settings).stages[0].method.figures
    line = jnp.zeros((4,), jnp.float32)
    for total, wanted in ((0.0, np.nan), (12.0, 0.2)):
        batch = types.SimpleNamespace(total=jnp.asarray(total), extras={"kept": line})
        found = figures(batch, {"policy/entropy": jnp.asarray(0.3 if total else 0.0)})
        close.assert_near(found["entropy/gap"], wanted)
        assert np.isnan(found["policy/entropy"]) == (total == 0)
    curves = loop._Curves()
    curves.train(4, {"policy/entropy": np.array([[np.nan, 0.4, np.nan, 0.2], [np.nan] * 4])})
    close.assert_near(curves.points["policy/entropy"][4], [0.3, np.nan], magnitude=0)


def test_repeated_runs_against_a_loop_and_who_is_well_formed():
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 3, (6, 30)), np.arange(30)[None, :] < np.array([30, 20, 5, 30, 12, 0])[:, None]
    tokens[3, 3:27] = np.tile(np.arange(8), 3)
    want = []
    for row, real in zip(tokens, mask, strict=True):
        seen, again, count = set(), 0, 0
        for k in range(30 - 4 + 1):
            if real[k : k + 4].all():
                run = tuple(row[k : k + 4])
                again, count = again + (run in seen), count + 1
                seen.add(run)
        want.append(again / max(count, 1))
    found = repeats.repeated_share(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask), n=4)
    close.assert_near(found, want)
    assert 0 < want[0] < 1 and want[3] > 0.4
    assert not repeats.repeated_share(
        jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 5), bool), n=confucius3.RUN
    ).any()  # shorter than a run
    tokens = np.stack([np.arange(30), np.arange(30), np.tile(np.arange(3), 10)])
    rows = types.SimpleNamespace(
        tokens=jnp.asarray(tokens, jnp.int32), mask=jnp.ones((3, 30), bool), truncated=jnp.array([False, True, False])
    )
    rewards = Rewards(jnp.ones(3), jnp.ones(3, bool))
    assert confucius3.well_formed(rewards, rows).value.tolist() == [1, 0, 0]
    assert confucius3.as_verified(rewards, rows) is rewards


def test_lengths_grow_and_the_first_stage_has_the_target_alone():
    settings = confucius3.Settings(
        **confucius3.EMBEDDED | confucius3.SMOKE | {"steps": 7, "max_new_tokens": 8, "lengths": (0.25, 0.5, 1.0)}
    )
    stages = confucius3.build(settings).stages
    assert [stage.steps for stage in stages] == [2, 2, 3]
    keys = jax.random.split(jax.random.key(0), 4)
    bench = recipes.bench(settings)
    ids = jnp.arange(2, dtype=jnp.int32)
    prompts, valid = bench.train.tokens[:2], bench.train.valid[:2]
    shapes = [
        jax.eval_shape(stage.method.rollout, bench.model.params, prompts, valid, keys, ids).tokens.shape[1]
        for stage in stages
    ]
    assert [width - prompts.shape[1] for width in shapes] == [2, 4, 8]
    pools = [stage.extras(None, keys[0]) for stage in stages]
    assert not pools[0] and [p[refill.POOL].kept.shape for p in pools[1:]] == [(4,), (4,)]
    assert [p[refill.POOL].trajectories.tokens.shape[1] for p in pools[1:]] == shapes[1:]
    assert len(confucius3.build(dataclasses.replace(settings, lengths=(1.0,))).stages) == 1


def test_all_arms_have_the_advantages_of_plus_and_minus_one():
    """Arms without the weight had half of these, and so twice the coefficient of the entropy beside them."""
    rewards = jnp.array([1.0] * 2 + [0.0] * 6)
    close.assert_near(confucius3.signed_advantages(rewards, EIGHT), [1.5] * 2 + [-0.5] * 6)
    base = dataclasses.replace(confucius3.Settings(), **confucius3.EMBEDDED)
    used = {name: settings.advantages for name, settings in arms.resolve(confucius3, base, ()).items()}
    weighted = [name for name, one in used.items() if one is group.hardness_weighted_advantages]
    assert weighted == ["dapo_pshw", "all", "judged", "lengths"]
    assert all(used[name] is confucius3.signed_advantages for name in used.keys() - set(weighted))
    small = dataclasses.replace(base, **confucius3.SMOKE, lengths=(0.6, 1.0))
    first = confucius3.build(small).stages[0].method.estimate
    assert "signed_advantages" in str(first.__closure__ and [c.cell_contents for c in _cells(first)])


def _cells(function):
    """What a function and the functions that it holds close over."""
    found, todo = [], [function]
    while todo:
        for cell in getattr(todo.pop(), "__closure__", None) or ():
            found.append(cell)
            if callable(cell.cell_contents):
                todo.append(cell.cell_contents)
    return found


def test_every_length_has_room_for_solutions():
    """A quarter of 28 tokens was 7, and no solution of 3 or 4 numbers is shorter than 11 characters and an end."""
    base = dataclasses.replace(confucius3.Settings(), **confucius3.EMBEDDED)
    settings = arms.resolve(confucius3, base, ("lengths",))["lengths"]
    lengths = [round(part * settings.max_new_tokens) for part in settings.lengths]
    assert lengths == [17, 22, 28]
    needed = np.array([len(p.solution) + 1 for p in recipes.solved_problems(settings, heldout=True)])
    fits = [float((needed <= length).mean()) for length in lengths]
    assert needed.min() == 12 and fits[0] > 0.5 and fits[2] == 1.0, fits


def test_no_coefficient_is_picked_by_the_seeds_that_are_judged():
    """Whichever does best there, the same arms are compared: the term and the bonus at equal coefficients."""

    def arm(accuracy, gap):
        metrics = {"eval/accuracy": [accuracy, accuracy + 0.02], "entropy/gap": [gap, gap + 0.01],
                   "eval/accuracy_4": [0.1, 0.2], "filter/updated": [0.5, 0.6]}  # fmt: skip
        return ArmResult({}, [0, 1], metrics, {}, rollouts=0, tokens=0, updates=120, seconds=0.0)

    plain = {name: arm(0.2, 0.3) for name in confucius3.ARMS}
    other = plain | {"ter_002": arm(0.25, 0.1), "ter_010": arm(0.15, 0.4), "bonus_005": arm(0.24, 0.9)}
    for found in (plain, other):
        parts = confucius3.claim(Results(found)).parts
        assert [(part.metric, part.arm, part.than) for part in parts[1:4]] == [
            ("entropy/gap", "ter_010", "grpo"),
            ("eval/accuracy", "ter_002", "bonus_002"),
            ("eval/accuracy", "ter_010", "bonus_010"),
        ]
        # rollouts that are saved at the price of accuracy are not saved
        assert "eval/accuracy, dapo_rsr - dapo > -0.02" in [part.text for part in parts]
    settings = [arms.resolve(confucius3, confucius3.Settings(), (name,))[name] for name in ("ter_002", "bonus_002")]
    assert settings[0].hold == settings[1].bonus == 0.002 and settings[0].bonus == settings[1].hold == 0.0
