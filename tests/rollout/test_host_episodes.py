"""Episodes of Python worlds, against the compiled rollout of the same world, and with worlds that misbehave."""

import functools
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data import chat
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.rollout.host import env as base
from jaxrl_llm.rollout.host.driver import make_host_episodes
from jaxrl_llm.rollout.host.env import HostEnv, StepResult, TextEnv, TextStepResult
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from tests import close
from tests.models_for_tests import byte_tokenizer, small_config
from tests.traps import tables
from tests.waits import soon

PROMPTS = jnp.array([[0, 0, 4, 3], [3, 3, 1, 4], [0, 4, 4, 1]], jnp.int32)
VALID = PROMPTS > 0
IDS = jnp.array([2, 0, 4], jnp.int32)
TASKS = {"add": jnp.arange(5, dtype=jnp.int32)}
table_policy = functools.cache(tables.table_policy)  # one policy: its programs are shared
SIZES = {"group_size": 3, "max_turns": 5, "max_new_tokens": 22, "end_ids": (2, 5), "temperature": 1.3}


def _reset(key, task):
    return {"n": jnp.int32(0), "luck": jax.random.randint(key, (), 0, 7, jnp.int32) + task["add"]}


def _turn(state, action, count):
    here = jnp.arange(3, dtype=jnp.int32) < count
    total = jnp.sum(jnp.where(here, action, 0)) + state["luck"]
    shown = (jnp.arange(4, dtype=jnp.int32) + total) % 6
    after = state | {"n": state["n"] + 1}
    reward = 0.25 * total.astype(jnp.float32)
    return multi_turn.Answered(after, shown, total % 5, reward, total % 6 == 1, total % 13 != 7)


# Answers of 0 to 4 tokens to actions of 1 to 3, chance in the beginning, ends and failures.
WORLD = multi_turn.Env(_reset, _turn, lambda s: s["n"] * 100 + s["luck"], action_tokens=3, observation_tokens=4)


def _keys(step=0, group=3):
    return sample_keys(jax.random.key(5), step, IDS, group)


def _host(policy, env=None, tasks=None, **changes):
    env = base.on_host(WORLD) if env is None else env
    tasks = base.task_rows(TASKS) if tasks is None else tasks
    settings = SIZES | {"slots": 2, "decode_tokens": 2, "read_tokens": (1, 2), "rows_at_once": 2} | changes
    return make_host_episodes(policy, env, tasks, **settings)


def _equal(left, right, atol):
    left, right = (
        x._replace(extras={k: v for k, v in x.extras.items() if k != "turns/mark"}) for x in (left, right)
    )  # which only worlds in Python have
    assert left.extras.keys() == right.extras.keys()
    for name in left._fields:
        if name == "sampler_logp":
            np.testing.assert_allclose(left.sampler_logp, right.sampler_logp, atol=atol, rtol=0)
        else:
            jax.tree.map(np.testing.assert_array_equal, getattr(left, name), getattr(right, name))
            jax.tree.map(lambda a, b: _same_kind(a, b), getattr(left, name), getattr(right, name))


def _same_kind(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)


def _slowly(env):
    """Answers that come back in another order than they were asked for."""
    rng, lock = np.random.default_rng(0), threading.Lock()

    def step(state, ids):
        with lock:
            pause = 0.004 * rng.random()
        time.sleep(pause)
        return env.step(state, ids)

    return env._replace(step=step)


@pytest.fixture(scope="module")
def table():
    policy = table_policy()
    params = policy.init(jax.random.key(3))
    compiled = jax.jit(multi_turn.make_episodes(policy, WORLD, TASKS, **SIZES))
    return policy, params, compiled(params, PROMPTS, VALID, _keys(), IDS)


def test_the_episodes_are_those_of_the_compiled_rollout_bit_for_bit(table):
    """Two slots, whose worlds answer in another order every time."""
    policy, params, wanted = table
    played = _host(policy, _slowly(base.on_host(WORLD))).play(params, PROMPTS, VALID, _keys(), IDS)
    _equal(played.trajectories, wanted, 0.0)
    turns = multi_turn.turns_of(wanted)
    assert sorted(played.failures) == np.flatnonzero(~np.asarray(turns.valid)).tolist()
    assert set(played.failures.values()) == {"the world failed"}
    # there was something to get wrong: every kind of end, cut and empty observations
    assert bool(turns.done.any()) and not bool(turns.valid.all()) and bool(wanted.truncated.any())


@pytest.mark.slow
def test_caches_of_slots_go_on_across_turns():
    """A decoder, observations read in pieces: tokens and log-probabilities of the compiled rollout."""
    config = small_config(num_layers=1)
    policy = make_policy(config)
    params = policy.init(jax.random.key(1))
    host = _host(policy, read_tokens=(2,))
    played = host.play(params, PROMPTS, VALID, _keys(), IDS).trajectories
    wanted = jax.jit(multi_turn.make_episodes(policy, WORLD, TASKS, **SIZES))(params, PROMPTS, VALID, _keys(), IDS)
    _equal(played, wanted, close.bound(close.forward_sums(config, wanted.tokens.shape[1]), np.log(config.vocab_size)))
    assert (np.asarray(multi_turn.turns_of(played).taken).sum(axis=1) > 1).any()
    # trap 25: whatever the lengths, later calls compile nothing
    compiled = host.compiled()
    host.play(params, PROMPTS, VALID, _keys(1), IDS)
    assert host.compiled() == compiled


def test_fewer_turns_from_call_to_call(table):
    policy, params, wanted = table
    short = _host(policy).play(params, PROMPTS, VALID, _keys(), IDS, jnp.int32(1))
    taken = np.asarray(multi_turn.turns_of(short.trajectories).taken)
    assert taken[:, 0].all() and not taken[:, 1:].any()
    np.testing.assert_array_equal(short.trajectories.tokens[:, :5], wanted.tokens[:, :5])


# --- worlds that misbehave


def _play(step, rows=6, reset=lambda seed, task: task, close=None, **changes):
    """Tasks are the states: numbers of the rows."""
    policy, env = table_policy(), HostEnv(reset, step, lambda state: int(state), 1, 2, close)
    settings = {"group_size": 1, "max_turns": 3, "max_new_tokens": 9, "end_ids": (), "temperature": 1.0} | changes
    host = _host(policy, env, list(range(rows)), **settings)
    prompts, ids = jnp.full((rows, 2), 4, jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    return host.play(
        policy.init(jax.random.key(0)), prompts, prompts > 0, jax.random.split(jax.random.key(1), rows), ids
    )


def test_a_slow_world_stalls_nobody_and_free_slots_are_refilled():
    """Two slots: the first episode is answered when all others are over, which needs the other slot refilled."""
    others, over, lock = threading.Event(), set(), threading.Lock()

    def step(state, ids):
        if state == 0:
            assert others.wait(60), "the others wait for this one"
            return StepResult(state, (), 1.0, True)
        with lock:
            over.add(state)
            if len(over) == 5:
                others.set()
        return StepResult(state, (), 1.0, True)

    played = _play(step)
    rewards = multi_turn.episode_rewards({}, played.trajectories)
    assert rewards.value.tolist() == [1.0] * 6 and rewards.valid.all() and not played.failures
    assert 0.0 < played.figures["world/occupancy"] <= 1.0 and played.figures["world/failed_fraction"] == 0.0


def test_an_empty_slot_is_not_occupied():
    figures = _play(lambda state, ids: StepResult(state, (), 1.0, True), rows=1).figures
    assert figures["world/occupancy"] <= 1 / 2 and figures["world/decoding"] == 1 / 2


def _failing(state, ids):
    if state == 0:
        raise SystemExit(3)
    if state == 1:
        return StepResult(state, (), 5.0, True, valid=False, reason="the shop is closed")
    if state == 2:
        return StepResult(state, (), float("nan"), False)
    if state == 3:
        return StepResult(state, (4, 99), 0.0, False)
    return StepResult(state, (3, 3, 3), 0.5, False)


def test_failures_are_invalid_with_a_reason_and_the_others_go_on():
    def reset(seed, task):
        if task == 4:
            raise OSError("cannot begin")
        return task

    played = _play(_failing, reset=reset)
    rows, turns = played.trajectories, multi_turn.turns_of(played.trajectories)
    reasons = ["SystemExit: 3", "the shop is closed", "reward=nan", "vocabulary of 6", "OSError: cannot begin"]
    assert sorted(played.failures) == [0, 1, 2, 3, 4]
    assert all(reason in played.failures[row] for row, reason in enumerate(reasons))
    rewards = multi_turn.episode_rewards({}, rows)
    assert rewards.valid.tolist() == [False] * 5 + [True]
    assert rewards.value.tolist() == [0.0] * 5 + [1.5] and not turns.done.any()
    assert rows.truncated.tolist() == rewards.valid.tolist()  # a failed episode is not one that ran out of tokens
    assert turns.taken[:, 0].tolist() == [True] * 4 + [False, True]
    assert not rows.mask[4].any() and played.figures["world/failed_fraction"] == 5 / 6
    # observations are cut to what was announced and outside the mask
    assert rows.tokens[5, 3:5].tolist() == rows.tokens[5, 6:8].tolist() == [3, 3]
    assert rows.mask[5].tolist() == [False, False] + [True, False, False] * 2 + [True, False, False]
    assert rows.segment_ids[5].tolist() == [1] * 9 + [0, 0]


def test_a_rollout_without_any_valid_episode_says_so():
    def broken(state, ids):
        raise RuntimeError("down for maintenance")

    with pytest.warns(UserWarning, match="RuntimeError: down for maintenance"):
        played = _play(broken)
    assert len(played.failures) == 6


@pytest.mark.parametrize("limit", ["turn_s", "episode_s"])
def test_deadlines(limit):
    """Row 1 hangs; when all others are over, the clock leaps. Its slot went on, its late answer is not heard."""
    now, over, release, lock = [0.0], set(), threading.Event(), threading.Lock()

    def step(state, ids):
        if state == 1:
            release.wait(60)
            return StepResult(state, (), 7.0, True)
        with lock:
            over.add(state)
            if len(over) == 5:
                now[0] = 100.0
        return StepResult(state, (), 1.0, True)

    played = _play(step, clock=lambda: now[0], **{limit: 50.0})
    release.set()
    assert 1 in played.failures and f"{limit}=50" in played.failures[1]
    rewards = multi_turn.episode_rewards({}, played.trajectories)
    assert float(rewards.value[1]) == 0.0 and not bool(rewards.valid[1])
    assert rewards.valid.tolist().count(True) >= 4  # the last of the others may have been under way in the leap


def test_a_stuck_slot_takes_further_episodes():
    """One slot: what never answers is left to itself, and the next episode has the slot; all are closed in the end."""
    release, now, closed = threading.Event(), [0.0], []

    def step(state, ids):
        if state == 0:
            now[0] = 100.0
            release.wait(60)
        return StepResult(state, (), 1.0, True)

    def close(state):
        closed.append((state, threading.current_thread()))
        if state == 3:
            raise OSError("the door is stuck")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        played = _play(step, close=close, slots=1, turn_s=50.0, clock=lambda: now[0])
        release.set()
        assert soon(lambda: len(closed) == 6)
    assert [str(w.message) for w in told] == ["a world did not close: OSError: the door is stuck"]
    threads = dict(closed)
    assert sorted(threads) == [0, 1, 2, 3, 4, 5] and len({threads[row] for row in range(1, 6)}) == 1
    assert threads[0] != threads[1]
    assert list(played.failures) == [0]
    assert multi_turn.turns_of(played.trajectories).done.tolist() == [False] + [True] * 5


def test_a_world_that_begins_too_late_is_closed():
    """Its episode is over by then, and its slot has the next one."""
    release, now, closed = threading.Event(), [0.0], []

    def reset(seed, task):
        if task == 0:
            now[0] = 100.0
            release.wait(60)
        return task

    def step(state, ids):
        return StepResult(state, (), 1.0, True)

    played = _play(step, reset=reset, close=closed.append, slots=1, turn_s=50.0, clock=lambda: now[0])
    assert list(played.failures) == [0] and 0 not in closed
    release.set()
    assert soon(lambda: sorted(closed) == [0, 1, 2, 3, 4, 5])


def test_a_run_that_stops_closes_the_worlds_that_are_open():
    closed = []

    def step(state, ids):
        if state == 1:
            raise RunStopped("the budget is spent")
        return StepResult(state, (), 0.0, False)

    with pytest.raises(RunStopped, match="the budget is spent"):
        _play(step, close=closed.append, slots=6)
    assert soon(lambda: sorted(closed) == [0, 1, 2, 3, 4, 5])


def test_a_world_may_stop_without_an_end():
    played = _play(lambda state, ids: StepResult(state, (), 0.5, False, cut=True))
    assert played.trajectories.truncated.all() and not played.failures
    assert multi_turn.turns_of(played.trajectories).taken[:, 0].all()


def test_a_world_in_python_is_played_by_one_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="2 processes: .* run without --hosts"):
        _host(table_policy())


def test_wrong_settings_are_named():
    for name in ("slots", "decode_tokens", "rows_at_once", "max_turns", "group_size", "max_new_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            _host(table_policy(), **{name: 0})
    with pytest.raises(ValueError, match="turn_s=0"):
        _host(table_policy(), turn_s=0.0)
    with pytest.raises(ValueError, match="read_tokens=0"):
        _host(table_policy(), read_tokens=())
    with pytest.raises(ValueError, match="one key per sequence"):
        _host(table_policy()).play({}, PROMPTS, VALID, _keys(group=2), IDS)


# --- text


def test_a_long_observation_is_cut_inside_its_turn(tmp_path):
    """The end of the user's turn and the beginning of the next answer are there, however much the world says."""
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    reply = chat.make_reply_encoder(tokenizer)
    assert len(reply("abcd")) == 7 and len(reply("")) == 3
    said = {"text": "abcdefghijklmnopqrstuvwxyz"}
    world = TextEnv(lambda seed, task: 0, lambda state, text: TextStepResult(0, said["text"], 0.0, False), lambda s: s)
    env = base.spoken(world, reply, tokenizer.decode, action_tokens=3, observation_tokens=7)
    assert env.step(0, tokenizer.encode("x")).tokens == reply("abcd")
    said["text"] = "abc"
    assert env.step(0, tokenizer.encode("x")).tokens == reply("abc")
    tight = base.spoken(world, reply, tokenizer.decode, action_tokens=3, observation_tokens=2)
    with pytest.raises(ValueError, match="observation_tokens=2 are less than the 3 that the format puts around one"):
        tight.step(0, tokenizer.encode("x"))


def test_the_ids_that_were_chosen_stay_whatever_their_text():
    """Trap 18: "ab" has an id of its own, but the policy said "a" and "b"."""
    texts, heard = ["", "", ".", "a", "b", "ab"], []

    def step(state, text):
        heard.append(text)
        return TextStepResult(state, "ab", 0.0, len(heard) == 3)

    world = TextEnv(lambda seed, task: int(seed[0]), step, lambda state: state)
    env = base.spoken(
        world, lambda text: [5], lambda ids: "".join(texts[i] for i in ids), action_tokens=3, observation_tokens=2
    )
    policy = table_policy()
    table = np.full((6, 6), -30.0, np.float32)
    table[[5, 3, 4, 0, 1, 2], [3, 4, 2, 3, 3, 3]] = 30.0  # "a", "b", "."
    host = _host(policy, env, [None], group_size=1, max_turns=4, max_new_tokens=20, end_ids=(2,))
    ids, prompt = jnp.zeros((1,), jnp.int32), jnp.full((1, 1), 5, jnp.int32)
    out = host.play({"table": jnp.asarray(table)}, prompt, prompt > 0, jax.random.split(jax.random.key(0), 1), ids)
    assert heard == ["ab."] * 3 and out.trajectories.tokens[0, :12].tolist() == [5, 3, 4, 2] * 3
    assert out.trajectories.mask[0, :12].tolist() == [False, True, True, True] * 3
    assert len(set(multi_turn.turns_of(out.trajectories).identity[0, :3].tolist())) == 1
