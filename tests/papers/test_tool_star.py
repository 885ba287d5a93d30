"""Tool-Star: the reward in steps, pairs of a policy's own episodes, and a world that needs two tools."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import tool_star
from experiments.agents.parts import arena, calculator, imitation, self_critic, two_tools
from jaxrl_llm.losses.preference import dpo_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Rewards
from tests import close

ARENA = two_tools.make_two_tools(diligence=1.0, slips=0.0, hurry=0.0)
LETTERS = two_tools.ALPHABET


def _text(tokens):
    return "".join(LETTERS[int(t)] for t in tokens)


def test_worked_rewards():
    accuracy = jnp.array([1.0, 0.0, 0.8, 0.8, 0.0, 1.0])
    fine = jnp.array([False, True, True, True, True, True])
    both = jnp.array([True, False, True, False, True, True])
    found = shaping.multi_tool_rewards(accuracy, fine, both)
    close.assert_near(found, [-1.0, 0.0, 0.9, 0.8, 0.0, 1.1])  # wrong with both tools stays 0
    with pytest.raises(ValueError, match="bonus=-1.0"):
        shaping.multi_tool_rewards(accuracy, fine, both, bonus=-1.0)
    expected = [
        (a + (0.3 if b and a > 0 else 0.0)) if f else -1.0 for a, f, b in zip(accuracy, fine, both, strict=True)
    ]
    close.assert_near(shaping.multi_tool_rewards(accuracy, fine, both, bonus=0.3), expected)


@lru_cache
def _rows():
    """Nine episodes played by the behaviour, which knows everything; with turns as a rollout has them."""
    rows = jax.jit(lambda key: arena.play(ARENA, key, 9))(jax.random.key(0))
    table = jnp.zeros((9, 4), jnp.int32)
    found = multi_turn.Turns(
        rows.positions, table, table == 0, table.astype(jnp.float32), table, ~rows.truncated, rows.truncated | True
    )
    return rows._replace(extras={f"turns/{name}": value for name, value in found._asdict().items()})


def test_without_a_calculator_every_expression_is_an_error():
    plain, single = two_tools.make_env(), two_tools.make_env(two_tools.no_calculator)
    task = jax.tree.map(lambda x: x[0], ARENA.train.answers)
    state = plain.reset(jax.random.key(0), task)
    written, count = jnp.asarray([LETTERS.index(c) for c in "3+4"], jnp.int32), jnp.int32(3)
    assert _text(plain.step(state, written, count).tokens) == "7="
    answer = single.step(state, written, count)
    assert _text(answer.tokens) == "!=" and int(answer.state.computed) == 10 and not bool(answer.done)
    # tables are looked up, and right answers paid, as before
    asked = int(task["asked"][0])
    looked, right = (
        two_tools.FIRST_NAME + asked,
        two_tools.FIRST_ANSWER + calculator.calculate(two_tools.needed(state))[0],
    )
    shown, last = (single.step(state, jnp.full((3,), int(x), jnp.int32), jnp.int32(1)) for x in (looked, right))
    assert _text(shown.tokens) == f"{int(task['table'][asked])}=" and float(last.reward) == 1.0 and bool(last.done)


def test_critics_take_turns_with_grpo_in_as_many_updates():
    settings = tool_star.Settings(**tool_star.EMBEDDED | {"steps": 32})
    half, made = Stage(None, settings.steps), []

    def between(own, arena, online, **played):
        assert online is half and played == {"rollout": "theirs"}
        made.append(own)
        return Stage("critic", own.critic_steps)

    settings = dataclasses.replace(settings, between=between)
    for critics, grpo, dpo in ((1, [32, 32], [16]), (2, [21, 21, 22], [8, 8]), (3, [16] * 4, [5, 5, 6])):
        found = tool_star.rounds(settings, ARENA, half, critics=critics, rollout="theirs")
        assert [x.steps for x in found[::2]] == grpo and [x.steps for x in found[1::2]] == dpo
        assert {x.method for x in found[1::2]} == {"critic"} and {x.method for x in found[::2]} == {None}
    assert found[::2] != tool_star.halves(settings, ARENA, half, rollout="theirs")[::2]
    assert {own.prompts_per_step for own in made} == {settings.prompts_per_step}


@pytest.mark.slow
def test_more_of_the_cold_start_imitates_the_behaviour():
    stage = imitation.behaviour_stage(ARENA, steps=2, learning_rate=1e-3, table=4, rows_per_step=3)
    params = ARENA.policy.init(jax.random.key(1))
    table = jax.jit(stage.extras)(params, jax.random.key(2))["rows"]
    assert table.rows.tokens.shape[0] == 4 and table.share.tolist() == [1.0] * 4
    played = jax.jit(lambda key: arena.play(ARENA, key, 4))(jax.random.key(2))
    np.testing.assert_array_equal(table.rows.tokens, played.tokens)
    np.testing.assert_array_equal(table.rows.mask, played.mask)


def test_extremes_are_best_and_worst_of_each_task():
    rows = _rows()
    value = jnp.array([0.0, 1.1, -1.0, 1.0, 1.0, 1.0, 5.0, 0.0, 1.0])
    valid = jnp.array([True] * 6 + [False, True, True])
    chosen, rejected, kept = self_critic.extremes(rows, Rewards(value, valid), group_size=3)
    assert kept.tolist() == [True, False, True]  # of equal rewards there is no pair, and what is invalid is in none
    for found, places in ((chosen, [1, 3, 8]), (rejected, [2, 3, 7])):
        np.testing.assert_array_equal(found.tokens, rows.tokens[jnp.array(places)])


def test_several_pairs_of_a_task_are_of_different_episodes():
    """Of 3, 1, 2, 0 the best and the worst, then 2 against 1; where only two are valid there is one pair."""
    rows = jax.tree.map(lambda x: x[:8], _rows())
    value = jnp.array([3.0, 1.0, 2.0, 0.0, 5.0, 9.0, 9.0, 4.0])
    valid = jnp.array([True] * 4 + [True, False, False, True])
    chosen, rejected, kept = self_critic.extremes(rows, Rewards(value, valid), group_size=4, pairs=2)
    assert kept.tolist() == [True, True, True, False]
    for found, places in ((chosen, [0, 2, 4]), (rejected, [3, 1, 7])):
        np.testing.assert_array_equal(found.tokens[:3], rows.tokens[jnp.array(places)])
    with pytest.raises(ValueError, match="pairs=3 must lie in 1 .. 2"):
        self_critic.extremes(rows, Rewards(value, valid), group_size=4, pairs=3)


def test_one_tool_is_often_enough():
    """Of a third the prompt asks for an entry and 0, of a third for numbers; who calls what is needed is right."""
    made = two_tools.make_two_tools(diligence=1.0, slips=0.0, hurry=0.0, alone=2 / 3)
    kinds = {"entry": 0, "numbers": 0, "both": 0}
    reset, step = made.env.reset, jax.jit(made.env.step)
    for k in range(64):
        task = jax.tree.map(lambda x, k=k: x[k], made.heldout.answers)
        said, state = _text(made.heldout.tokens[k]), reset(jax.random.key(0), task)
        table = [int(x) for x in task["table"]]
        entry = said[0].isalpha() and said[1:] == "+0="
        kind = "entry" if entry else "both" if said[0].isalpha() else "numbers"
        kinds[kind] += 1
        first, second = (table["abcdef".index(c)] if c.isalpha() else int(c) for c in (said[0], said[2]))
        value = {"+": first + second, "-": first - second, "*": first * second}[said[1]] % 10
        assert _text(two_tools.needed(state)) == f"{first}{said[1]}{second}"
        assert two_tools.missing(state).tolist() == [said[0].isalpha(), kind == "both"]
        answer = step(state, jnp.full((3,), LETTERS.index("ABCDEFGHIJ"[value]), jnp.int32), jnp.int32(1))
        assert float(answer.reward) == 1.0 and bool(answer.done)
        wrong = step(state, jnp.full((3,), LETTERS.index("ABCDEFGHIJ"[(value + 1) % 10]), jnp.int32), jnp.int32(1))
        assert float(wrong.reward) == 0.0
    assert min(kinds.values()) >= 12, kinds
    plain = np.concatenate([table.answers["asked"] for table in (ARENA.train, ARENA.heldout)])
    assert plain.shape == (576, 2) and (plain < two_tools.ENTITIES).all(), "without it all take both"
    rows = jax.jit(lambda key: arena.play(two_tools.make_two_tools(alone=2 / 3), key, 512))(jax.random.key(0))
    written = jnp.any(rows.mask & (rows.tokens >= two_tools.FIRST_NAME), axis=1)
    computed = jnp.any(
        rows.mask & (rows.tokens >= two_tools.FIRST_SIGN) & (rows.tokens < two_tools.FIRST_ANSWER), axis=1
    )
    assert float(jnp.mean((written & computed).astype(jnp.float32))) < 0.4, "the cold start has room for both"


@pytest.mark.slow
def test_the_critic_starts_at_ln_2_and_leaves_outputs_out():
    score = two_tools.score_by_conduct(bonus=0.1)
    sizes = {"prompts": 4, "group_size": 4, "steps": 2, "rows_per_step": 4, "learning_rate": 1e-3}
    stage = self_critic.make_stage(two_tools.make_two_tools(), score, **sizes)
    params = ARENA.policy.init(jax.random.key(1))
    table = jax.jit(stage.extras)(params, jax.random.key(2))["rows"]
    kept, loss = table.kept | True, jax.jit(jax.value_and_grad(lambda p, t: stage.method.loss(p, {}, t)[0]))
    value, gradient = loss(params, table._replace(kept=kept))
    close.assert_near(value, np.log(2.0))
    # as the pairs' own sums say, by an independent sum over what was written
    written = np.asarray(jnp.where(table.chosen.mask, table.chosen.sampler_logp, 0.0), np.float64).sum(1)
    close.assert_near(table.ref_chosen_logp, written)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(gradient))
    same = table._replace(rejected=table.chosen, ref_rejected_logp=table.ref_chosen_logp, kept=kept)
    value, gradient = loss(params, same)
    assert not any(np.abs(np.asarray(x)).max() > 1e-6 for x in jax.tree.leaves(gradient))
    close.assert_near(value, dpo_loss(*([jnp.zeros(1)] * 4)).loss[0])


def test_the_wise_player_calls_both_tools_and_is_right():
    rows = _rows()
    well_formed, both = two_tools.conduct(rows)
    assert bool(jnp.all(well_formed & both))
    step = jax.jit(ARENA.env.step)
    for b in range(9):
        task = jax.tree.map(lambda x, b=b: x[rows.problem_ids[b]], ARENA.train.answers)
        first, second = (int(task["table"][i]) for i in task["asked"])
        sign = LETTERS[int(task["sign"])]
        value = {"+": first + second, "-": first - second, "*": first * second}[sign] % 10
        asked = _text(rows.tokens[b, :4])
        answer = "ABCDEFGHIJ"[value]
        expected = f"{asked}{asked[0]}{first}={asked[2]}{second}={first}{sign}{second}{value}={answer}"
        assert _text(rows.tokens[b]).rstrip("_") == expected
        assert not bool(rows.truncated[b]) and int(rows.mask[b].sum()) == 6
        state = ARENA.env.reset(
            jax.random.key(0), jax.tree.map(lambda x, b=b: x[rows.problem_ids[b]], ARENA.train.answers)
        )

        def act(text, state=state):
            ids = [LETTERS.index(c) for c in text]
            return step(state, jnp.asarray(ids + [0] * (3 - len(ids)), jnp.int32), jnp.int32(len(ids)))

        assert float(act(answer).reward) == 1.0 and bool(act(answer).done)
        for malformed in (f"+{answer}", "3+a", "34+"):
            found = act(malformed)
            assert _text(found.tokens) == "!=" and not bool(found.done) and float(found.reward) == 0.0
    # an error anywhere, or no answer, is malformed
    broken = rows._replace(tokens=rows.tokens.at[0, 5].set(LETTERS.index("!")))
    assert two_tools.conduct(broken)[0].tolist() == [False] + [True] * 8
