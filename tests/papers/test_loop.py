"""LOOP: its clip, its three spans of a ratio, the filter, and the database its experiment plays with."""

import dataclasses
import types
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import loop
from experiments.agents.parts import apis, imitation, ledger, lookup, retail, telecom, two_tools
from experiments.agents.parts import arena as arenas
from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import arms, recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.sequence import loop_loss
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards
from tests import close
from tests.close import singles

RNG = np.random.default_rng(0)
MASK = np.array([[0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 0, 1, 0, 0]], bool)
TURN = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 0, 0]], np.int32)
TOKEN = np.broadcast_to(np.arange(1, 8, dtype=np.int32)[None], MASK.shape)
OLD, LOGP = -RNG.random(MASK.shape), -RNG.random(MASK.shape)
ADVANTAGES = np.broadcast_to(np.array([[0.7], [-0.4]]), MASK.shape)


def _given(logp=LOGP):
    return (
        jnp.asarray(logp, jnp.float32),
        jnp.asarray(OLD, jnp.float32),
        jnp.asarray(ADVANTAGES, jnp.float32),
        jnp.asarray(MASK),
    )


def test_worked_examples():
    # ratios and advantages of single tokens; bounds are 1 / 1.1 and 1.1
    ratio, signal = jnp.array([[1.5, 0.5, 1.5, 0.5]]), jnp.array([[1.0, -1.0, -1.0, 1.0]])
    there = jnp.ones((1, 4), bool)
    each = jnp.arange(1, 5, dtype=jnp.int32)[None]
    terms = loop_loss(jnp.log(ratio), jnp.zeros((1, 4)), signal, there, eps=0.1, segment_ids=each)
    close.assert_near(-terms.loss, [[1.1, -1 / 1.1, -1.5, 0.5]])
    assert terms.aux["clipped"].tolist() == [[1.0, 1.0, 0.0, 0.0]]
    # one against two: K / (K - 1) (R - mean)
    ids = jnp.zeros((3,), jnp.int32)
    close.assert_near(group.rloo_advantages(jnp.array([1.0, 0, 0]), ids), [1.0, -0.5, -0.5])
    assert not np.asarray(group.rloo_advantages(jnp.full((3,), 0.6), ids)).any()
    with pytest.raises(ValueError, match="eps=-0.5"):
        loop_loss(ratio, ratio, signal, there, eps=-0.5)


@pytest.mark.parametrize("spans", [TOKEN, TURN, np.ones_like(TURN)], ids=["token", "turn", "trajectory"])
def test_agrees_with_a_loop(spans):
    expected, eps = np.zeros(MASK.shape), 0.2
    for b, t in np.argwhere(MASK):
        same = MASK[b] & (spans[b] == spans[b, t])
        w, a = np.exp(np.sum((LOGP - OLD)[b][same])), ADVANTAGES[b, t]
        expected[b, t] = -min(w * a, (1 + eps) * a if a >= 0 else a / (1 + eps))
    close.assert_near(loop_loss(*_given(), eps=eps, segment_ids=jnp.asarray(spans)).loss, expected)


def test_spans_at_their_ends():
    whole = loop_loss(*_given(), segment_ids=jnp.ones_like(TURN))
    np.testing.assert_array_equal(whole.loss, loop_loss(*_given()).loss)
    single = loop_loss(*_given(), eps=0.25, segment_ids=jnp.asarray(TOKEN))
    plain = clipped_policy_loss(*_given(), clip_low=0.2, clip_high=0.25)
    close.assert_near(single.loss, plain.loss)


def test_the_first_gradient_is_that_of_reinforce():
    """At the anchor a token's ratio gives ``-A / |y|`` per token, and that of a span of n tokens n times as much."""

    def slope(spans):
        def value(logp):
            terms = loop_loss(logp, *_given(OLD)[1:], segment_ids=jnp.asarray(spans))
            return reduce.tokens(terms.loss, jnp.asarray(MASK), mode="seq_mean")

        return np.asarray(jax.grad(value)(_given(OLD)[0]))

    length = MASK.sum(1, keepdims=True)
    reinforce = np.where(MASK, -ADVANTAGES / length / 2, 0.0)
    close.assert_near(slope(TOKEN), reinforce)
    close.assert_near(slope(np.ones_like(TURN)), reinforce * length)
    many = np.array([[(MASK[b] & (TURN[b] == TURN[b, t])).sum() for t in range(7)] for b in range(2)])
    close.assert_near(slope(TURN), reinforce * many)


# --- the database


def _play(task, actions):
    state, told = apis.ENV.reset(jax.random.key(0), task), []
    for text in actions:
        answer = STEP(state, jnp.asarray(apis.encode(text), jnp.int32), jnp.int32(3))
        state = answer.state
        told.append((apis.ALPHABET[int(answer.tokens[0])], round(float(answer.reward), 4), bool(answer.done)))
    return state, told


STEP = jax.jit(apis.ENV.step)
SWAP = {"records": jnp.array([3, 1, 2], jnp.int32), "gold": jnp.array([2, 1, 3], jnp.int32),
        "needed": jnp.array([True, False, True])}  # fmt: skip


def test_calls_change_the_database_and_tests_judge_what_is_left():
    right = ["l..", "sa.", "sc.", "wa2", "wc3", "f.."]
    _, told = _play(SWAP, right)
    assert told[:5] == [(c, 0.0, False) for c in "=32=="] and told[5][1:] == (1.0, True)
    # not logged in; a call not written as it should be; no call at all; of three tests one passes untouched
    _, told = _play(SWAP, ["sa.", "l.a", "a..", "f.."])
    assert told == [("!", -0.1, False), ("!", -0.1, False), ("!", -0.2, False), ("=", 0.3333, True)]
    # what nobody asked for fails a test, and so does not saying that it is done; the last turn ends it
    state, told = _play(SWAP, ["l..", "xb.", "wa2", "wa2", "wa2", "wa2", "wc3"])
    assert state.records.tolist() == [2, 0, 3] and told[-1] == ("=", 0.6667, True)
    before, after = _play(SWAP, ["l.."])[0], _play(SWAP, ["l..", "wa0", "wa3"])[0]
    assert int(apis.ENV.identity(before)) == int(apis.ENV.identity(after))


@lru_cache(maxsize=1)
def _played():
    arena = apis.make_apis(skill=1.0)  # made outside: arenas are kept, and tracers are not to be
    return jax.jit(lambda key: arenas.play(arena, key, 64))(jax.random.key(0))


def test_the_expert_completes_and_only_calls_are_trained_on():
    arena = apis.make_apis(skill=1.0)
    rows = _played()
    # every task has something to do, and the plan ends before the last turn
    assert not np.asarray(rows.truncated).any()
    tasks = {name: np.asarray(x) for name, x in arena.train.answers.items()}
    assert (tasks["records"] != tasks["gold"]).any(1).all()
    one = jax.jit(lambda task: _scripted(task))
    for i in range(8):
        assert float(one({name: jnp.asarray(x[i]) for name, x in tasks.items()})) == 1.0
    shown = np.asarray(rows.segment_ids)[:, 3:].reshape(64, -1, 4) > 0
    acting = np.asarray(rows.mask)[:, 3:].reshape(64, -1, 4)
    assert acting[..., :3][shown[..., :3]].all() and not acting[..., 3].any()


def _scripted(task):
    def turn(carry, _):
        state, alive = carry
        answer = apis.ENV.step(state, apis.expert(state), jnp.int32(3))
        return (answer.state, alive & ~answer.done), jnp.where(alive, answer.reward, 0.0)

    start = apis.ENV.reset(jax.random.key(0), task), jnp.ones((), bool)
    return jnp.sum(jax.lax.scan(turn, start, None, apis.TURNS)[1])


def test_rejection_keeps_what_passed_in_turn():
    rows = jax.tree.map(lambda x: x[:6], _played())
    passed = jnp.array([False, True, False, False, True, False])
    shown = imitation.passing(rows, passed)
    np.testing.assert_array_equal(shown.rows.tokens, rows.tokens[jnp.array([1, 4, 1, 4, 1, 4])])
    close.assert_near(shown.share, [1 / 3] * 6)
    arena = apis.make_apis(skill=1.0)
    params, loss = arena.policy.init(jax.random.key(0)), jax.jit(imitation.make_loss(arena.policy))
    value, metrics = loss(params, {}, shown)
    # by a loop over the tokens that were chosen, from the whole distribution
    kept = shown.rows
    hidden = jax.jit(arena.policy.hidden)(params, kept.tokens, kept.positions, kept.segment_ids)
    logits, terms = np.asarray(arena.policy.unembed(params, hidden), np.float64), []
    for b, t in np.argwhere(np.asarray(kept.mask)):
        row = logits[b, t - 1]
        terms.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[int(kept.tokens[b, t])])
    close.assert_near(value, np.mean(terms))
    assert float(metrics["tokens/trained"]) == len(terms) and float(metrics["rows/passed"]) == singles(1 / 3)
    # where none passed there is nothing to imitate
    none = imitation.passing(rows, jnp.zeros((6,), bool))
    assert float(loss(params, {}, none)[0]) == 0.0
    with pytest.raises(ValueError, match="updates=0 must be at least 1"):
        imitation.rejection_stage(arena, None, apis.completed, updates=0)


@pytest.mark.slow
def test_rejection_plays_what_the_online_stage_would():
    """Episodes of the policy itself, more than there are tasks; with a test that all pass they are all there."""
    arena = apis.make_apis(skill=1.0)
    few = dataclasses.replace(arena, train=jax.tree.map(lambda x: x[:3], arena.train))
    settings = recipes.Settings(steps=2, learning_rate=1e-3)
    settings = types.SimpleNamespace(**vars(settings), prompts_per_step=2, group_size=3)
    stage = imitation.rejection_stage(few, settings, lambda turns: turns.valid, updates=4)
    assert stage.steps == 8 and stage.method.rows_per_step == 6
    params = arena.policy.init(jax.random.key(0))
    shown = jax.jit(stage.extras)(params, jax.random.key(1))["rows"]
    ids = np.asarray(shown.rows.problem_ids).reshape(4, 3)
    assert (ids == ids[:, :1]).all() and sorted(ids[:3, 0]) == [0, 1, 2] and ids[3, 0] == ids[0, 0]
    assert shown.share.tolist() == [1.0] * 12
    # a task that came again was played anew
    again = np.asarray(shown.rows.tokens).reshape(4, 3, -1)
    assert (again[0] != again[3]).any()


def test_episodes_of_equal_return_are_dropped():
    arena = apis.make_apis(skill=1.0)
    rows = jax.tree.map(lambda x: x[:4], _played())
    rows = rows._replace(group_ids=jnp.array([0, 0, 1, 1], jnp.int32))
    params, rewards = arena.policy.init(jax.random.key(0)), Rewards(jnp.array([0.5, 0.5, 1, 0]), jnp.ones((4,), bool))

    def values(rows, rewards):
        return group.rloo_advantages(rewards.value, rows.group_ids, valid=rewards.valid)

    estimate = builders.make_estimate(
        arena.policy, lambda rows, rewards: group.per_token(values(rows, rewards), rows.mask), reduction="seq_mean",
        keep=lambda rows, rewards: jnp.abs(values(rows, rewards)) >= 0.01,
    )  # fmt: skip
    batch = estimate(params, {}, rows, rewards)
    assert not np.asarray(batch.mask[:2]).any() and np.asarray(batch.mask[2:]).any() and float(batch.total) == 2.0
    # returns are not below 0, whatever failed
    none = jnp.zeros((4, 2), jnp.int32)
    paid = jnp.array([[-0.2, 0.1], [0.0, 1.0], [-0.1, 0.6], [-0.1, -0.1]])
    turns = multi_turn.Turns(none, none, none == 0, paid, none, none[:, 0] == 0, none[:, 0] == 0)
    assert apis.completed(turns).tolist() == [False, True, False, False]
    rows = rows._replace(extras={f"turns/{name}": value for name, value in turns._asdict().items()})
    close.assert_near(apis.returns({}, rows).value, [0.0, 1.0, 0.5, 0.0])


def test_rloo_update_by_update_spends_the_episodes_of_loop_on_as_many_updates():
    base = arms.preset(loop, smoke=False, model=loop.Settings().model)
    given = arms.resolve(loop, base, ("loop", "rloo_often"))
    spent = {name: s.spend(s) for name, s in given.items()}
    figures = {
        name: (s.steps * s.prompts_per_step, s.steps * s.updates_per_rollout * s.minibatches, s.prompts_per_step)
        for name, s in spent.items()
    }
    assert figures == {"loop": (480, 240, 8), "rloo_often": (480, 240, 2)}
    few = loop.update_by_update(dataclasses.replace(given["loop"], prompts_per_step=3, steps=10))
    assert (few.prompts_per_step, few.steps) == (1, 30)


def _met(train, held, of):
    """How many tasks that are measured are among those that train, by what ``of(tokens, answers)`` says of one."""
    tables = [jax.tree.map(np.asarray, (table.tokens, table.answers)) for table in (train, held)]
    said = [
        [of(tokens[k].tolist(), {n: x[k].tolist() for n, x in answers.items()}) for k in range(len(tokens))]
        for tokens, answers in tables
    ]
    return sum(one in said[0] for one in said[1])


def _of_apis(tokens, task):
    text = "".join(apis.ALPHABET[x] for x in tokens)
    return text, [task["records"]["abc".index(c)] for c in text[1:] if c != "."]


def _of_shop(tokens, task):
    at = task["order"]
    return (at, "price", task["prices"][at]) if task["cancel"] else (at, "size", task["final"])


def _first_of_shop(tokens, task):
    return (task["order"], "size", -1 if task["cancel"] else task["size"])


def _heard(desk, made, table):
    """What the expert says and hears in each task of a table; users hold back."""
    count = len(np.asarray(table.tokens))
    task = table.answers | {"open": jnp.zeros(count, bool)}
    state, alive = jax.vmap(made.env.reset, (None, 0))(jax.random.key(0), task), np.ones(count, bool)
    act, step = jax.jit(jax.vmap(desk.expert)), jax.jit(jax.vmap(made.env.step, (0, 0, None)))
    kind = next((name for name in ("cancel", "issue") if name in task), "")
    said = np.asarray(task[kind][:, None] if kind else table.tokens).tolist()
    for _ in range(desk.TURNS):
        action = act(state)
        answer = step(state, action, jnp.int32(3))
        both = np.concatenate([action, answer.tokens], axis=1).tolist()
        for k in np.flatnonzero(alive):
            said[k] += both[k]
        state, alive = answer.state, alive & ~np.asarray(answer.done)
    assert not alive.any()
    return {tuple(one) for one in said}


def _of_table(tokens, task):
    once = task["table"][task["start"]]
    return (task["hops"], task["start"], once, task["table"][once] if task["hops"] == 2 else None)


def test_tasks_that_are_measured_are_met_in_training_never():
    tools = two_tools.make_two_tools(alone=2 / 3)
    shop, company = retail.make_retail(), telecom.make_telecom()
    told = {
        "loop": (apis.make_apis(), _of_apis),
        "supo": (ledger.make_ledger(), lambda tokens, task: task["amounts"][: task["pages"]]),
        "tool_star": (tools, lambda tokens, task: (tokens, [task["table"][x] for x in task["asked"] if x < 6])),
        "mua_rl": (shop, _of_shop),
        "igpo, whole": (lookup.make_lookup(), lambda tokens, task: (tokens, task)),
        "igpo": (lookup.make_lookup(), _of_table),
    }
    assert {name: _met(arena.train, arena.heldout, of) for name, (arena, of) in told.items()} == dict.fromkeys(told, 0)
    for desk, made in ((retail, shop), (telecom, company), (apis, told["loop"][0])):
        assert not _heard(desk, made, made.train) & _heard(desk, made, made.heldout)
    # the table that a base imitates has both kinds of users; what those want first is not measured either
    for desk, make in ((shop, retail.to_train), (company, telecom.to_train)):
        parts = [make(desk, users).train for users in (retail.holding_back, retail.outspoken)]
        both = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        np.testing.assert_array_equal(desk.train.tokens, both.tokens)
    firsts = [_first_of_shop(None, {n: x[k] for n, x in shop.train.answers.items()}) for k in range(512)]
    firsts = {tuple(int(x) if k != 1 else x for k, x in enumerate(one)) for one in firsts}
    ends = [_of_shop(None, {n: np.asarray(x[k]) for n, x in shop.heldout.answers.items()}) for k in range(48)]
    assert not firsts & {(int(at), kind, int(value)) for at, kind, value in ends if kind == "size"}


def test_what_is_measured_has_every_instruction():
    train, held = apis.make_apis().train, apis.make_apis().heldout
    text = [{"".join(apis.ALPHABET[x] for x in row) for row in np.asarray(table.tokens)} for table in (train, held)]
    # to clear a record asks nothing of it that another value would change: it is trained alone
    assert text[0] == text[1] | {"Da.", "Db.", "Dc."} and len(text[0]) == 18 and len(text[1]) == 15
    assert len(_heard(apis, apis.make_apis(), held)) == 32
    # a scenario has one instruction, and something to do in each of its databases
    assert (np.asarray(held.tokens).reshape(64, 3, 3) == np.asarray(held.tokens)[::3][:, None]).all()
    assert (np.asarray(held.answers["records"]) != np.asarray(held.answers["gold"])).any(axis=1).all()
    assert [apis.held_back("S", 0, 2, np.array(x)) for x in ([0, 1, 3], [0, 1, 2])] == [True, False]
    assert [apis.held_back("I", 1, 0, np.array(x)) for x in ([2, 1, 3], [1, 2, 3])] == [False, True]
    assert [apis.held_back("C", 2, 1, np.array(x)) for x in ([2, 1, 3], [1, 2, 3], [3, 2, 1])] == [True, True, False]
    assert not any(apis.held_back("D", x, 0, np.array([1, 2, 3])) for x in range(3))
    shop = retail.make_retail().heldout
    assert np.bincount(np.asarray(shop.level)).min() >= 3 and len(set(np.asarray(shop.answers["order"]).tolist())) == 3
    assert np.bincount(np.asarray(telecom.make_telecom().heldout.level)).min() >= 8
