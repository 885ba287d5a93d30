"""AgentGym-RL: the horizon of a training step, and what it does to episodes and to what can be learned."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import agentgym_rl
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import errands, turn_limits
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.types import Rewards, TrainState
from tests import close

TURNS = 5


def _turns(step, **stages):
    return int(turn_limits.staged_turns(jnp.int32(step), **stages))


def test_worked_example():
    stages = {"turns": (6, 13, 20), "period": 100}
    assert [_turns(n, **stages) for n in (0, 99, 100, 199, 200, 250, 10**6)] == [6, 6, 13, 13, 20, 20, 20]


def test_agrees_with_a_loop():
    for turns, period in (((4, 8, 16), 3), ((5,), 7), ((16, 8, 4, 2), 1)):
        left, expected = list(turns), []
        for n in range(14):
            if n and n % period == 0 and len(left) > 1:
                left.pop(0)
            expected.append(left[0])
        found = jax.vmap(lambda n, t=turns, p=period: turn_limits.staged_turns(n, turns=t, period=p))(jnp.arange(14))
        assert found.tolist() == expected


def test_limits():
    # one stage is a fixed horizon
    assert {_turns(n, turns=(7,), period=5) for n in (0, 4, 5, 1000)} == {7}
    with pytest.raises(ValueError, match=r"turns=\(4, 0\)"):
        _turns(0, turns=(4, 0), period=5)
    with pytest.raises(ValueError, match=r"turns=\(\)"):
        _turns(0, turns=(), period=5)
    with pytest.raises(ValueError, match="period=0"):
        _turns(0, turns=(4,), period=0)


# --- episodes


@pytest.fixture(scope="module")
def played():
    """The same episodes, cut after 2 turns, 4 turns and all of them; keys and parameters are equal."""
    arena = errands.make_errands(side=4, places=2, turns=TURNS)
    slots = turn_limits.scheduled(
        arenas.arena_episodes(arena, arena.train, group_size=2),
        lambda step: turn_limits.staged_turns(step, turns=(2, 4, 99), period=10),
    )
    ids = jnp.arange(6, dtype=jnp.int32)
    keys = sample_keys(jax.random.key(1), 0, ids, 2)
    params, rollout = arena.policy.init(jax.random.key(0)), jax.jit(slots["rollout"])
    found = {}
    for step in (0, 10, 25):
        state = TrainState(params, {}, jnp.int32(step), jax.random.key(0), {}, {})
        acting = slots["actor"](state)
        found[int(acting["turns"])] = rollout(acting, arena.train.tokens[ids], arena.train.valid[ids], keys, ids)
    return arena, found


def test_a_horizon_cuts_episodes_and_changes_nothing_before(played):
    arena, found = played
    full, turns = found[99], multi_turn.turns_of(found[99])
    each = np.asarray(turns.taken).sum(axis=1)
    assert (each == TURNS).any() and each.max() == TURNS  # a longer horizon than the world's is the world's
    for limit in (2, 4):
        rows, cut = found[limit], multi_turn.turns_of(found[limit])
        np.testing.assert_array_equal(np.asarray(cut.taken).sum(axis=1), np.minimum(each, limit))
        for b in range(rows.tokens.shape[0]):
            last = int(cut.end[b, min(each[b], limit) - 1])
            np.testing.assert_array_equal(rows.tokens[b, : last + 1], full.tokens[b, : last + 1])
            np.testing.assert_array_equal(rows.mask[b, : last + 1], full.mask[b, : last + 1])
            # no token beyond the last turn, so nothing of it is trained on
            assert not np.asarray(rows.mask[b, last + 1 :]).any()
            assert not np.asarray(rows.segment_ids[b, last + 1 :]).any()
        np.testing.assert_array_equal(rows.truncated, ~np.asarray(cut.done))
        rewards = np.asarray(multi_turn.episode_rewards({}, rows).value)
        assert not rewards[np.asarray(rows.truncated)].any()


def test_near_and_far_tasks_are_told_apart_by_their_plans(played):
    """What is solved is over and was rewarded; shares of each kind are over what is valid."""
    arena, found = played
    level = np.asarray(arena.heldout.level)
    near, far = np.flatnonzero(level <= 6)[:4], np.flatnonzero(level > 6)[:4]
    ids = np.concatenate([near, far])
    rows = jax.tree.map(lambda x: x[:8], found[99])._replace(problem_ids=jnp.asarray(ids))
    ended = jnp.asarray([1, 1, 0, 1, 1, 0, 0, 0], bool)
    rows = rows._replace(extras=rows.extras | {"turns/done": ended})
    value, valid = jnp.asarray([1, 0, 1, 1, 1, 1, 0, 0], jnp.float32), jnp.arange(8) != 2
    found = errands.by_length(arena, most=6)(rows, Rewards(value, valid))
    close.assert_near(found["eval/success_near"], 2 / 3)  # the second was over without a reward
    close.assert_near(found["eval/success_far"], 1 / 4)


def test_arms_are_the_same_stages_in_another_order():
    stages = (4, 8, 12)
    orders = agentgym_rl.shortest, agentgym_rl.longest, agentgym_rl.growing, agentgym_rl.falling
    assert [order(stages) for order in orders] == [(4,), (12,), (4, 8, 12), (12, 8, 4)]


def test_a_horizon_shorter_than_the_plan_has_no_gradient():
    """The chance of success of a policy that ignores what it sees, by all sequences: from 2 to 0 needs l l t."""
    env = errands.make_env(side=3, places=1)
    task = {"agent": jnp.int32(2), "places": jnp.asarray([0], jnp.int32)}
    letters = len(errands.ACTIONS)

    def reward(actions):
        state, total = env.reset(jax.random.key(0), task), jnp.zeros((), jnp.float32)
        for action in actions:
            answer = env.step(state, action[None], jnp.int32(1))
            state, total = answer.state, jnp.maximum(total, answer.reward)
        return total

    def slopes(turns):
        sequences = np.asarray(list(itertools.product(range(letters), repeat=turns)))
        paid = jax.jit(jax.vmap(reward))(jnp.asarray(errands.LEFT + sequences, jnp.int32))

        def success(logits):
            return jnp.sum(jnp.prod(jax.nn.softmax(logits)[sequences], axis=1) * paid)

        return np.asarray(jax.grad(success)(jnp.zeros(letters, jnp.float32)))

    np.testing.assert_array_equal(slopes(2), np.zeros(letters))
    # one sequence of 125: (2 - 3/5) / 125 for l, which it holds twice, (1 - 3/5) / 125 for t, -3/5 / 125 for others
    close.assert_near(slopes(3) * 125, [1.4, -0.6, -0.6, -0.6, 0.4])
