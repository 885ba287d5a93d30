"""The bed of episodes with sub-goals: its world, what is paid for and to whom; measurements know of none of it."""

import dataclasses
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import errands, retail
from experiments.beds import sub_goals
from experiments.beds.parts import goal_worlds
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from jaxrl_llm.experiment.evidence import controls, fingerprints
from jaxrl_llm.rollout.turns import multi_turn
from tests import close

SIDE, PLACES, TURNS = 5, 4, 24
TOKEN = {name: errands.LEFT + i for i, name in enumerate(errands.ACTIONS)}


def _settings(arm="grpo", **changes):
    base = arms.preset(sub_goals, smoke=True, model=sub_goals.Settings().model)
    return dataclasses.replace(arms.resolve(sub_goals, base, (arm,))[arm], **changes)


@pytest.fixture(scope="module")
def grid():
    return goal_worlds.grid(SIDE, PLACES, TURNS, 1)


def _errand(agent, *places):
    return {"agent": jnp.int32(agent), "places": jnp.asarray(places, jnp.int32)}


def _walk(actions, task, *, skies=1, side=3):
    """What the world answers to each action."""
    env = errands.make_env(side=side, places=task["places"].shape[0], skies=skies)
    state, found = env.reset(jax.random.key(0), task), []
    for action in actions:
        answer = env.step(state, jnp.asarray([TOKEN.get(action, 0)], jnp.int32), jnp.int32(1))
        state = answer.state
        found.append(answer)
    return env, found


def _text(tokens):
    return "".join(errands.ALPHABET[int(x)] for x in tokens)


def _played(world, dense, act, *, row=0, turns=TURNS):
    """The rewards of one training episode of ``act(state, turn)``, and whether it ended."""
    env = goal_worlds.paid_env(world)
    task = {name: x[row] for name, x in world.arena.train.answers.items()} | {goal_worlds.DENSE: jnp.asarray(dense)}
    step, state, paid = jax.jit(env.step), env.reset(jax.random.key(row), task), []
    for turn in range(turns):
        action = jnp.asarray(act(state.inner, turn), jnp.int32)
        answer = step(state, action, jnp.int32(action.shape[0]))
        state = answer.state
        paid.append(float(answer.reward))
        if answer.done:
            return paid, True
    return paid, False


def test_what_a_walker_sees_and_does_by_hand():
    """Three by three cells: from the middle up to the corner 0, then down to 6 below it."""
    env, found = _walk("ultdldtx", _errand(4, 0, 6))
    assert _text(errands.problems(1, 0, side=3, places=2).tokens[0])[0] == "="
    assert [_text(x.tokens) for x in found] == ["=gF", "=gG", "=iG", "=hG", "=hG", "=gG", "=gG", "=gG"]
    assert [int(x.state.agent) for x in found[:6]] == [1, 0, 0, 3, 3, 6]
    assert [int(x.state.taken) for x in found] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [float(x.reward) for x in found[:7]] == [0, 0, 0, 0, 0, 0, 1] and bool(found[6].done)
    assert [int(env.identity(x.state)) for x in found[:3]] == [3, 0, 1]


def test_a_sub_goal_counts_once_and_is_not_lost():
    _, found = _walk("ultttrlt", _errand(4, 0, 6))
    assert [int(x.state.taken) for x in found] == [0, 0, 1, 1, 1, 1, 1, 1]
    _, found = _walk("t", _errand(4, 0, 6))
    assert int(found[0].state.taken) == 0, "nothing to take here"


def test_a_shortest_plan_is_as_long_as_said_and_wins(grid):
    held = grid.arena.heldout
    first = dict(agent=held.answers["agent"][:4], places=held.answers["places"][:4])
    act = jax.jit(partial(errands.expert, side=SIDE))
    for row in range(4):
        world = dataclasses.replace(grid, arena=dataclasses.replace(grid.arena, train=held))
        paid, over = _played(world, False, lambda state, turn: act(state), row=row, turns=40)
        assert over and len(paid) == int(errands.plan_length(first, SIDE)[row]) == int(held.level[row])
    close.assert_printed(np.mean(np.asarray(held.level) <= TURNS), sub_goals.BED.ceiling, 3)


def _chance(task, turns):
    """The exact chance of a walker at random, by the distribution over cells and what was taken."""
    places = [int(x) for x in task["places"]]
    now = {(int(task["agent"]), 0): Fraction(1)}
    for _ in range(turns):
        later = {}
        for (cell, taken), share in now.items():
            if taken == len(places):
                later[cell, taken] = later.get((cell, taken), 0) + share
                continue
            row, column = divmod(cell, 3)
            for down, right in ((0, -1), (0, 1), (-1, 0), (1, 0)):
                r, c = row + down, column + right
                there = (3 * r + c, taken) if 0 <= r < 3 and 0 <= c < 3 else (cell, taken)
                later[there] = later.get(there, 0) + share / 5
            stays = (cell, taken + (cell == places[taken]))
            later[stays] = later.get(stays, 0) + share / 5
        now = later
    return float(sum(share for (_, taken), share in now.items() if taken == len(places)))


def test_the_chance_of_a_walker_at_random_is_that_of_the_chain():
    tasks = errands.problems(1, 3, side=3, places=2)
    arena = arenas.make_arena(
        errands.make_env(side=3, places=2), tasks, tasks, lambda state, key: errands.anything(key),
        words=len(errands.ALPHABET), turns=40,
    )  # fmt: skip
    rows = jax.jit(lambda key: arenas.play(arena, key, 4096))(jax.random.key(0))
    expected = _chance({name: x[0] for name, x in tasks.answers.items()}, 40)
    assert 0.02 < expected < 0.5
    close.assert_share(1 - float(jnp.mean(rows.truncated)), expected, 4096)


def test_skies_leave_the_world_as_it_is_and_let_fewer_situations_seem_shared():
    actions = "ultdldt"
    _, plain = _walk(actions, _errand(4, 0, 6))
    env, many = _walk(actions, _errand(4, 0, 6), skies=8)
    for one, other in zip(plain, many, strict=True):
        assert _text(one.tokens)[1:] == _text(other.tokens)[1:] and float(one.reward) == float(other.reward)
        assert int(env.identity(other.state)) // 8 == int(one.state.agent) * 3 + int(one.state.taken)
    assert len({_text(x.tokens)[0] for x in many}) > 2 and {_text(x.tokens)[0] for x in plain} == {"="}
    back_and_forth = [
        {int(env.identity(x.state)) for x in found}
        for env, found in (_walk("lr" * 12, _errand(4, 0, 6), skies=skies) for skies in (1, 8))
    ]
    assert len(back_and_forth[0]) == 2 and 8 <= len(back_and_forth[1]) <= 16


@pytest.fixture(scope="module")
def small():
    """A world of one sky and the same of eight, and a walker of the first who knows a little."""
    worlds = [goal_worlds.grid(4, 2, 12, skies) for skies in (1, 8)]
    return worlds, jax.jit(arenas.make_base(worlds[0].arena, steps=40))(jax.random.key(0))


def test_under_many_skies_fewer_turns_share_a_situation(small):
    worlds, params = small
    key = jax.random.key(1)
    shared = [
        float(arenas.measure(x.arena, params, key, samples=8, figures=goal_worlds.figures)["eval/shared"])
        for x in worlds
    ]
    assert shared[0] > 0.8 and shared[1] < shared[0] - 0.2


def test_progress_of_turns_is_what_a_dense_task_pays(small):
    (world, _), params = small
    arena = goal_worlds.to_train(world, 0.0)
    ids = jnp.arange(64, dtype=jnp.int32)
    roll = jax.jit(arenas.arena_episodes(arena, arena.train, group_size=1))
    rows = roll(params, arena.train.tokens[:64], arena.train.valid[:64], jax.random.split(jax.random.key(2), 64), ids)
    found = multi_turn.turns_of(rows)
    assert 0 < int(jnp.sum(found.done)) < 64
    # in the world itself only the last turn of a task that is done pays
    last = jnp.cumsum(found.taken[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1] == 1
    paid = (found.done[:, None] & last).astype(jnp.float32)
    told = np.asarray(errands.progress(found._replace(reward=paid), found.taken, places=2))
    unseen = np.asarray(last & ~found.done[:, None])  # nothing is seen behind the last action
    np.testing.assert_array_equal(told, np.where(unseen, 0.0, found.reward))
    assert set(np.unique(told)) == {0.0, 0.5} and (told.sum(1) == 1.0).sum() == int(jnp.sum(found.done))


def test_a_success_is_worth_the_same_whether_its_sub_goals_are_paid_or_not(grid):
    act = jax.jit(partial(errands.expert, side=SIDE))
    for row in range(3):
        dense, over = _played(grid, True, lambda state, turn: act(state), row=row, turns=40)
        sparse, also = _played(grid, False, lambda state, turn: act(state), row=row, turns=40)
        assert over and also and sum(dense) == 1.0 == sum(sparse)
        assert sorted(dense)[-4:] == [0.25] * 4 and dense[-1] == 0.25
        assert sparse == [0.0] * (len(sparse) - 1) + [1.0], "only the end is paid"


def test_advantages_are_what_comes_from_a_turn_on_beside_the_turns_of_that_number():
    """Two episodes of two turns: the first takes at once and then nothing, the second the other way round."""
    reward = jnp.asarray([[0.5, 0.0], [0.0, 0.5]])
    found = multi_turn.Turns(
        turn=jnp.asarray([[0, 1], [0, 1]]), end=jnp.asarray([[0, 1], [0, 1]]), taken=jnp.ones((2, 2), bool),
        reward=reward, identity=jnp.zeros((2, 2), jnp.int32), done=jnp.zeros(2, bool), valid=jnp.ones(2, bool),
    )  # fmt: skip
    rows = arenas.Trajectories(
        tokens=jnp.ones((2, 2), jnp.int32), segment_ids=jnp.ones((2, 2), jnp.int32),
        positions=jnp.asarray([[0, 1], [0, 1]]), mask=jnp.ones((2, 2), bool), sampler_logp=jnp.zeros((2, 2)),
        truncated=jnp.ones(2, bool), group_ids=jnp.zeros(2, jnp.int32), problem_ids=jnp.zeros(2, jnp.int32),
        extras={f"turns/{name}": x for name, x in found._asdict().items()},
    )  # fmt: skip
    got = goal_worlds.from_here_on(rows, multi_turn.episode_rewards({}, rows))
    close.assert_printed(got, [[0.0, -0.7071], [0.0, 0.7071]], 4)
    # paid for another's episode: what it is said to earn, less what its own turns were paid
    other = multi_turn.Rewards(jnp.asarray([1.0, 0.0]), jnp.ones(2, bool))
    close.assert_printed(goal_worlds.from_here_on(rows, other), [[0.7071, 0.7071], [-0.7071, -0.7071]], 4)


def test_the_share_of_tasks_is_the_dose_and_a_larger_one_takes_more_from_the_same(grid):
    tasks = grid.arena.train
    flags = {s: np.asarray(goal_worlds.paid_tasks(tasks, s).answers[goal_worlds.DENSE]) for s in (0.0, 0.3, 0.7, 1.0)}
    assert flags[0.0].all() and not flags[1.0].any()
    for s in (0.3, 0.7):
        close.assert_share(1 - flags[s].mean(), s, flags[s].size)
    assert not (flags[0.7] & ~flags[0.3]).any()


def test_the_shop_pays_for_what_its_user_needs():
    world, act = goal_worlds.shop(SIDE, PLACES, TURNS, 1), jax.jit(retail.expert)
    assert world.arena.turns == retail.TURNS
    for row in range(4):
        paid, over = _played(world, True, lambda state, turn: act(state), row=row, turns=retail.TURNS)
        assert over and sum(paid) == 1.0 and paid[0] == 0.25, "asking which order it is comes first"
        paid, over = _played(world, False, lambda state, turn: act(state), row=row, turns=retail.TURNS)
        assert over and paid == [0.0] * (len(paid) - 1) + [1.0]


def test_the_base_knows_a_part_of_the_task():
    """Up, down and take are right; left and right are told apart in six of ten cases."""
    zero = jnp.int32(0)
    state = errands.Errand(jnp.int32(1), jnp.asarray([3], jnp.int32), zero, zero, jnp.zeros(2, jnp.uint32))
    act = partial(errands.half_blind, side=5, sideways=0.6)
    acts = jax.vmap(lambda key: act(state, key))(jax.random.split(jax.random.key(0), 4096))
    close.assert_share(float(jnp.mean(acts == TOKEN["r"])), 0.6, 4096)
    assert set(np.unique(acts)) == {TOKEN["l"], TOKEN["r"]}
    below = state._replace(agent=jnp.int32(13))
    assert int(act(below, jax.random.key(1))[0]) == TOKEN["u"]


def test_scrambled_rewards_reach_the_advantages():
    """Every row is paid for another group's, or the control of the certificate would be the arm again."""
    plan = sub_goals.build(_settings("dense"))
    scrambled = controls.scrambled(plan)
    assert scrambled is not None and not fingerprints.same_updates({"as it is": plan, "scrambled": scrambled})


def test_doses_differ_and_measurements_know_of_none():
    built = {x: sub_goals.build(_settings(x)) for x in ("grpo", "dense", "sparsity_50", "skies_8")}
    assert not fingerprints.same_updates(built)
    doses = [built[x] for x in ("grpo", "dense", "sparsity_50")]
    assert len({plan.measure for plan in doses}) == len({plan.init for plan in doses}) == 1
    assert goal_worlds.DENSE not in goal_worlds.grid(SIDE, PLACES, TURNS, 1).arena.heldout.answers
    assert _settings("dense").sparsity == 0.0 < _settings("sparsity_50").sparsity < _settings().sparsity == 1.0


def test_a_share_beyond_one_and_a_grid_without_room_are_refused():
    with pytest.raises(UserError, match="--sparsity 1.5 is a share"):
        sub_goals.build(_settings(sparsity=1.5))
    for wrong in ({"side": 8}, {"side": 3, "places": 2}):
        with pytest.raises(UserError, match="a grid has 2 to 7 rows"):
            sub_goals.build(_settings(**wrong))
