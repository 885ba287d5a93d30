"""Episodes in the compiled loop, against a plain Python world that is told what the policy did."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.agents.parts import keydoor, keydoor_grid
from jaxrl_llm.advantages import group
from jaxrl_llm.advantages.returns import gae_advantages
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.data.problems import encode_problems, make_split
from jaxrl_llm.data.tasks import keydoor as corridor
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train import fused
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss, score_tokens
from jaxrl_llm.train.online import Online, init_state
from jaxrl_llm.types import Problems
from tests import close
from tests.models_for_tests import nano
from tests.traps.tables import VOCAB, table_policy

NEW = 60


class Plain:
    """The key-door world as one would write it in Python."""

    def __init__(self, world):
        self.height, self.width, at = keydoor_grid.parse(world)
        self.agent, self.key, self.door = (divmod(at[c], self.width) for c in "AKD")
        self.held = False

    def act(self, text):
        row, column = self.agent
        if text in keydoor_grid.MOVES:
            down, right = keydoor_grid.MOVES[text]
            target = (row + down, column + right)
            if 0 <= target[0] < self.height and 0 <= target[1] < self.width and target != self.door:
                self.agent = target
        elif text == "p" and self.agent == self.key:
            self.held = True
        elif text == "o" and self.held and abs(row - self.door[0]) + abs(column - self.door[1]) == 1:
            return 1.0, True
        return 0.0, False

    def look(self):
        cells = [["."] * self.width for _ in range(self.height)]
        for place, name in (
            (self.door, "D"),
            (None if self.held else self.key, "K"),
            (self.agent, "H" if self.held else "A"),
        ):
            if place is not None:
                cells[place[0]][place[1]] = name
        return ";" + "/".join("".join(row) for row in cells) + "=>"


def _table(task, level, n=6):
    _, _, _, tokenizer = nano()
    problems = make_split(task, split="train", n=n, seed=0, levels=[level])
    return problems, encode_problems(tokenizer, problems, answers=keydoor.tasks)


def _rollout(task, level, height, width, seed=0, **settings):
    policy, params, _, tokenizer = nano()
    problems, table = _table(task, level)
    env = keydoor.make_env(tokenizer.encode, tokenizer.eos_ids, height=height, width=width)
    settings = {"group_size": 2, "max_turns": 5, "max_new_tokens": NEW, "end_ids": (), "temperature": 1.5} | settings
    rollout = multi_turn.make_episodes(policy, env, table.answers, **settings)
    ids = jnp.asarray([3, 0, 5], jnp.int32)
    keys = sample_keys(jax.random.key(seed), 0, ids, settings["group_size"])
    return problems, table, rollout, (params, table.tokens[ids], table.valid[ids], keys, ids)


@pytest.fixture(scope="module", params=[(corridor, 6, 1, 6), (keydoor_grid, 3, 3, 3)], ids=["corridor", "grid"])
def played(request):
    problems, table, rollout, arguments = _rollout(*request.param)
    return problems, table, rollout, arguments, jax.jit(rollout)(*arguments)


def test_the_sequence_is_what_a_plawith_task_says_to_the_same_actions(played):
    """Trap 18: ids are appended, never encoded again; observations are outside the mask."""
    problems, table, _, _, out = played
    _, _, _, tokenizer = nano()
    turns, width = multi_turn.turns_of(out), table.tokens.shape[1]
    taken_rows = 0
    for b in range(out.tokens.shape[0]):
        world = Plain(problems[int(out.problem_ids[b])].answer["world"])
        t, k, said, done = width, 0, [], False
        while t < width + NEW and not done and k < 5:
            token = int(out.tokens[b, t])
            assert bool(out.mask[b, t]) and int(turns.turn[b, t]) == k and bool(out.segment_ids[b, t])
            assert bool(turns.taken[b, k]) and int(turns.end[b, k]) == t
            reward, done = world.act(tokenizer.decode([token]))
            done = done or token in tokenizer.eos_ids
            assert float(turns.reward[b, k]) == reward
            t, k = t + 1, k + 1
            if done or k == 5:
                break
            shown = tokenizer.encode(world.look())[: width + NEW - t]
            assert np.asarray(out.tokens[b, t : t + len(shown)]).tolist() == shown
            assert not np.asarray(out.mask[b, t : t + len(shown)]).any()
            assert (np.asarray(turns.turn[b, t : t + len(shown)]) == k).all()
            t += len(shown)
            said.append(shown)
        assert not np.asarray(turns.taken[b, k:]).any() and not np.asarray(turns.reward[b, k:]).any()
        assert not np.asarray(out.segment_ids[b, t:]).any() and not np.asarray(out.mask[b, t:]).any()
        assert (np.asarray(turns.turn[b, t:]) == -1).all()
        assert bool(turns.done[b]) == done and bool(out.truncated[b]) == (not done)
        assert np.asarray(out.positions[b])[np.asarray(out.segment_ids[b]) > 0].tolist() == list(
            range(int((out.segment_ids[b] > 0).sum()))
        )
        taken_rows += k > 1
    assert taken_rows > 2  # there were several turns to check


def test_what_was_recorded_is_what_the_trainer_scores(played):
    """The cache goes on across turns: chosen tokens have the log-probability of one pass over the whole sequence."""
    _, _, _, arguments, out = played
    policy, params, config, _ = nano()
    logp, _ = jax.jit(partial(score_tokens, policy, temperature=1.5))(params, out)
    keep = np.asarray(out.mask)
    close.assert_same_forward(np.asarray(logp)[keep], np.asarray(out.sampler_logp)[keep], config, columns=keep.shape[1])
    assert not np.asarray(out.sampler_logp)[~keep].any()


def test_neither_the_batch_nor_the_kind_of_loop_matters(played):
    _, _, rollout, arguments, out = played
    params, tokens, valid, keys, ids = arguments
    one = jax.jit(rollout)(params, tokens[1:2], valid[1:2], keys[2:4], ids[1:2])
    for name in ("tokens", "mask", "turns"):
        left = {k: v for k, v in one.extras.items()} if name == "turns" else getattr(one, name)
        right = {k: v[2:4] for k, v in out.extras.items()} if name == "turns" else getattr(out, name)[2:4]
        jax.tree.map(np.testing.assert_array_equal, left, right)


# --- the world


@pytest.mark.parametrize(("task", "level", "height"), [(corridor, 7, 1), (keydoor_grid, 4, 4)])
def test_a_shortest_plan_opens_every_door_and_is_shown_as_it_goes(task, level, height):
    _, _, _, tokenizer = nano()
    env = keydoor.make_env(tokenizer.encode, tokenizer.eos_ids, height=height, width=level, step_cost=0.125)
    step, key = jax.jit(env.step), jax.random.key(0)
    problems, table = _table(task, level)
    for k, problem in enumerate(problems):
        world = Plain(problem.answer["world"])
        state = env.reset(key, {name: rows[k] for name, rows in table.answers.items()})
        seen = set()
        for j, action in enumerate(problem.solution):
            seen.add(int(env.identity(state)))
            ids = jnp.asarray(tokenizer.encode(action), jnp.int32)
            answer = step(state, ids, jnp.int32(1))
            reward, done = world.act(action)
            assert (float(answer.reward), bool(answer.done)) == (reward - 0.125, done)
            assert np.asarray(answer.tokens).tolist() == tokenizer.encode(world.look()) and int(answer.count) == len(
                tokenizer.encode(world.look())
            )
            assert bool(answer.valid) and done == (j == len(problem.solution) - 1)
            state = answer.state
        assert len(seen) == len(problem.solution)  # a shortest plan never comes back to a situation


def test_useless_actions_change_nothing_and_an_end_token_gives_up():
    _, _, _, tokenizer = nano()
    env = keydoor.make_env(tokenizer.encode, tokenizer.eos_ids, height=1, width=5)
    state = keydoor.Place(*(jnp.int32(x) for x in (0, 2, 4)), jnp.zeros((), bool))
    for action in ("l", "u", "d", "p", "o", "7"):
        answer = env.step(state, jnp.asarray(tokenizer.encode(action), jnp.int32), jnp.int32(1))
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), answer.state, state)) and not bool(answer.done)
    answer = env.step(state, jnp.asarray(tokenizer.eos_ids[:1], jnp.int32), jnp.int32(1))
    assert bool(answer.done) and float(answer.reward) == 0.0
    with pytest.raises(ValueError, match="one token a character"):
        keydoor.make_env(lambda text: [1, 2], (2,), height=1, width=5)
    with pytest.raises(ValueError, match="4 cells at least"):
        keydoor.make_env(tokenizer.encode, (2,), height=1, width=3)


def test_grids_are_parsed_planned_and_split():
    assert keydoor_grid.plan("A.K/..D/...") == "rrpo" and keydoor_grid.plan("K.A/D../...") == "llpo"
    train = make_split(keydoor_grid, split="train", n=50, seed=0)
    held = make_split(keydoor_grid, split="heldout", n=20, seed=0)
    assert not {p.identity for p in train} & {p.identity for p in held}
    for problem in train[:20]:
        world = Plain(problem.answer["world"])
        results = [world.act(a) for a in problem.solution]
        assert results[-1] == (1.0, True) and not any(done for _, done in results[:-1])


# --- the loop, over small made worlds


def _counting(action_tokens=3, observation_tokens=4, fails_at=None, done_at=99):
    """State: the number of the turn. Shows as many tokens (of id 5) as there were tokens in the action."""

    def step(state, action, count):
        shown = jnp.where(jnp.arange(observation_tokens) < count, 5, 0).astype(jnp.int32)
        fails = jnp.zeros((), bool) if fails_at is None else state == fails_at
        return multi_turn.Answered(state + 1, shown, count, count.astype(jnp.float32), state + 1 >= done_at, ~fails)

    return multi_turn.Env(
        lambda key, task: task["start"], step, lambda state: state * 10, action_tokens, observation_tokens
    )


def _always(*pattern):
    """A policy that chooses ``pattern[t]`` after token ``pattern[t - 1]``, and the first after anything else."""
    policy = table_policy()
    table = np.full((6, 6), -30.0, np.float32)
    table[:, pattern[0]] = 30.0
    for before, after in zip(pattern, pattern[1:], strict=False):
        table[before] = -30.0
        table[before, after] = 30.0
    return policy, {"table": jnp.asarray(table)}


def _play(env, pattern, new=12, max_turns=9, end_ids=(1,), rows=1, **settings):
    policy, params = _always(*pattern)
    start = {"start": jnp.zeros((rows,), jnp.int32)}
    rollout = multi_turn.make_episodes(
        policy, env, start, group_size=1, max_turns=max_turns, max_new_tokens=new, end_ids=end_ids, **settings
    )
    tokens = jnp.full((rows, 2), 4, jnp.int32)
    ids = jnp.arange(rows, dtype=jnp.int32)
    return jax.jit(rollout)(params, tokens, tokens > 0, jax.random.split(jax.random.key(0), rows), ids)


def _text(row):
    return "".join(str(int(x)) for x in row)


def test_actions_end_by_their_end_token_or_their_length():
    out = _play(_counting(), (3, 1))  # "3 1" of two tokens, answered by "5 5"
    turns = multi_turn.turns_of(out)
    assert _text(out.tokens[0]) == "44" + "3155" * 3
    assert _text(out.mask[0]) == "00" + "1100" * 3
    assert np.asarray(turns.turn[0]).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert np.asarray(turns.end[0])[:4].tolist() == [3, 7, 11, 0]
    assert np.asarray(turns.reward[0])[:4].tolist() == [2.0, 2.0, 2.0, 0.0]
    assert np.asarray(turns.identity[0])[:3].tolist() == [0, 10, 20]
    assert bool(out.truncated[0]) and not bool(turns.done[0])
    out = _play(_counting(), (3, 2, 4, 3))  # no end token: three tokens are an action
    assert _text(out.tokens[0]) == "44" + "324555" * 2


def test_episodes_end_by_the_world_by_turns_or_by_tokens():
    out = _play(_counting(done_at=2), (3, 1))
    assert _text(out.tokens[0]) == "44" + "315531" + "0" * 6 and not bool(out.truncated[0])
    assert bool(multi_turn.turns_of(out).done[0])
    out = _play(_counting(), (3, 1), max_turns=2)
    assert _text(out.tokens[0]) == "44" + "315531" + "0" * 6 and bool(out.truncated[0])
    out = _play(_counting(), (3, 1), new=9)  # cut inside an action: trained, not answered
    turns = multi_turn.turns_of(out)
    assert _text(out.tokens[0]) == "44" + "315531553" and _text(out.mask[0]) == "00" + "110011001"
    assert np.asarray(turns.taken[0])[:3].tolist() == [True, True, False] and bool(out.truncated[0])


def test_a_loop_of_fixed_length_gives_the_same():
    early, fixed = (_play(_counting(done_at=2), (3, 1), rows=3, early_exit=e, temperature=9.0) for e in (True, False))
    jax.tree.map(np.testing.assert_array_equal, early, fixed)


def test_a_world_that_fails_makes_the_episode_invalid_not_zero():
    out = _play(_counting(fails_at=1), (3, 1))
    turns, rewards = multi_turn.turns_of(out), multi_turn.episode_rewards({}, out)
    assert _text(out.tokens[0]) == "44" + "315531" + "0" * 6
    assert not bool(rewards.valid[0]) and not bool(turns.done[0]) and not bool(out.truncated[0])
    assert float(turns.reward[0, 1]) == 0.0


def test_observations_may_be_empty_or_longer_than_announced():
    silent = _counting()._replace(
        step=lambda s, a, n: multi_turn.Answered(
            s + 1, jnp.zeros((4,), jnp.int32), jnp.int32(0), jnp.float32(0), s < 0, s >= 0
        )
    )
    assert _text(_play(silent, (3, 1)).tokens[0]) == "44" + "31" * 6
    shouting = silent._replace(
        step=lambda s, a, n: multi_turn.Answered(
            s + 1, jnp.full((4,), 5, jnp.int32), jnp.int32(99), jnp.float32(0), s < 0, s >= 0
        )
    )
    assert _text(_play(shouting, (3, 1)).tokens[0]) == "44" + "315555" * 2


def test_wrong_settings_are_named():
    policy, _ = _always(3)
    settings = {"group_size": 1, "max_turns": 1, "max_new_tokens": 1, "end_ids": ()}
    for name in ("group_size", "max_turns", "max_new_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            multi_turn.make_episodes(policy, _counting(), {}, **settings | {name: 0})
    with pytest.raises(ValueError, match="action_tokens=0"):
        multi_turn.make_episodes(policy, _counting(action_tokens=0), {}, **settings)


# --- values of turns


def _turns():
    return multi_turn.Turns(
        turn=jnp.asarray([[-1, 0, 0, 0, 1, 1, 1, 2]], jnp.int32),
        end=jnp.asarray([[3, 6, 0]], jnp.int32),
        taken=jnp.asarray([[True, True, False]]),
        reward=jnp.asarray([[1.0, 4.0, 0.0]]),
        identity=jnp.zeros((1, 3), jnp.int32),
        done=jnp.asarray([False]),
        valid=jnp.asarray([True]),
    )


def test_values_of_turns_at_tokens():
    turns, mask = _turns(), jnp.asarray([[False, False, True, True, False, True, True, True]])
    assert multi_turn.returns_to_go(turns, gamma=0.5).tolist() == [[3.0, 4.0, 0.0]]
    assert multi_turn.at_ends(turns.reward, turns).tolist() == [[0, 0, 0, 1.0, 0, 0, 4.0, 0]]
    values = jnp.asarray([[7.0, 8.0, 9.0]])
    assert multi_turn.over_turns(values, turns, mask).tolist() == [[0, 0, 7.0, 7.0, 0, 8.0, 8.0, 0]]
    with pytest.raises(ValueError, match="gamma=2"):
        multi_turn.returns_to_go(turns, gamma=2.0)
    # rewards at the ends of actions and GAE over chosen tokens: by hand, gamma 1 and lambda 1 sum what is to come
    advantages, _ = gae_advantages(
        multi_turn.at_ends(turns.reward, turns), jnp.zeros((1, 8)), jnp.zeros((1,)), mask, lam=1.0
    )
    assert advantages.tolist() == [[0, 0, 5.0, 5.0, 0, 4.0, 4.0, 0]]


# --- in the fused loop


def _bandit():
    """Two turns; each pays where the action is token 3; shows one token."""

    def step(state, action, count):
        hit = (action[0] == 3).astype(jnp.float32)
        shown = jnp.full((1,), 4, jnp.int32)
        return multi_turn.Answered(state + 1, shown, jnp.int32(1), hit, state >= 1, state >= 0)

    return multi_turn.Env(lambda key, task: task["start"], step, lambda state: state, 1, 1)


def test_a_world_is_learned_in_the_fused_loop():
    policy, env = table_policy(), _bandit()
    tokens = jnp.full((8, 2), 4, jnp.int32)
    answers = {"start": jnp.zeros((8,), jnp.int32)}
    problems = Problems(tokens, tokens > 0, answers, jnp.zeros((8,), jnp.int32))

    def advantages(trajectories, rewards):
        turns = multi_turn.turns_of(trajectories)
        values = multi_turn.returns_to_go(turns)
        centred = jnp.stack(
            [group.dr_grpo_advantages(values[:, k], trajectories.group_ids) for k in range(values.shape[1])], axis=1
        )
        return multi_turn.over_turns(centred, turns, trajectories.mask)

    method = Online(
        policy=policy, problems=problems, sampler=make_epochs(), prompts_per_step=8, group_size=4,
        rollout=multi_turn.make_episodes(
            policy, env, answers, group_size=4, max_turns=2, max_new_tokens=3, end_ids=(), early_exit=False
        ),
        score=multi_turn.episode_rewards, estimate=make_estimate(policy, advantages),
        loss=make_policy_loss(policy, clipped_policy_loss), tx=optax.adam(0.1),
    )  # fmt: skip
    states = [init_state(method, policy.init(jax.random.key(s)), jax.random.key(s)) for s in range(2)]
    _, metrics = fused.make_run(method, 40, seeds=True)(fused.stack_states(states))
    rewards = np.asarray(metrics["reward/mean"])
    assert rewards.shape == (2, 40)
    assert (rewards[:, :3].mean(1) < 1.0).all() and (rewards[:, -3:].mean(1) > 1.8).all()
    gaps = np.asarray(metrics["kl/sampler_max"])  # of a softmax over logits that have gone this far at most
    assert gaps.max() <= close.near(0.0, 0.0, terms=VOCAB, magnitude=close.adam_reach(0.1, 40))
