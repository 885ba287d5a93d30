"""AgentGym-RL: the horizon of a training step, and what it does to episodes and to what can be learned."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import keydoor_arena, turn_limits
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.types import TrainState
from tests import close

CELLS, TURNS = 4, 5


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
    arena = keydoor_arena.make_keydoor(cells=CELLS, turns=TURNS)
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


def test_a_plan_is_as_long_as_the_walker_needs(played):
    arena, _ = played
    tasks, step = arena.heldout.answers, jax.jit(arena.env.step)
    for row, length in enumerate(np.asarray(keydoor_arena.plan_length(tasks, CELLS))):
        place = arena.env.reset(jax.random.key(0), {name: x[row] for name, x in tasks.items()})
        rewards = []
        for _ in range(length):
            answer = step(place, keydoor_arena.walk(place, CELLS)[None], jnp.int32(1))
            place, rewards = answer.state, [*rewards, float(answer.reward)]
        assert rewards == [0.0] * (length - 1) + [1.0]


def test_a_horizon_shorter_than_the_plan_has_no_gradient():
    """The chance of success of a policy that ignores what it sees, by all sequences: ``DKA.`` needs l p o."""
    arena = keydoor_arena.make_keydoor(cells=CELLS, turns=TURNS)
    task = {"agent": jnp.int32(2), "key": jnp.int32(1), "door": jnp.int32(0)}
    letters = "lrpo"

    def reward(actions):
        place, total = arena.env.reset(jax.random.key(0), task), jnp.zeros((), jnp.float32)
        for action in actions:
            answer = arena.env.step(place, action[None], jnp.int32(1))
            place, total = answer.state, jnp.maximum(total, answer.reward)
        return total

    def slopes(turns):
        sequences = np.asarray(list(itertools.product(range(4), repeat=turns)))
        paid = jax.jit(jax.vmap(reward))(jnp.asarray(keydoor_arena.encode(letters), jnp.int32)[sequences])

        def success(logits):
            return jnp.sum(jnp.prod(jax.nn.softmax(logits)[sequences], axis=1) * paid)

        return np.asarray(jax.grad(success)(jnp.zeros(4, jnp.float32)))

    np.testing.assert_array_equal(slopes(2), np.zeros(4))
    # one sequence of 64: (1 - 3/4) / 64 for what it holds, -3/4 / 64 for what it does not
    close.assert_near(slopes(3) * 64, [0.25, -0.75, 0.25, 0.25])
