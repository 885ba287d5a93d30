"""GiGPO: turns of a group in the same situation are groups of their own; the arena its experiment plays in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import keydoor_arena
from experiments.parts import strings
from jaxrl_llm.advantages import group, turns
from jaxrl_llm.rollout.turns import multi_turn
from tests import close

PAIR, ALL = jnp.zeros(2, jnp.int32), jnp.ones((2, 2), bool)
RETURNS, SEEN = jnp.array([[9.5, 10.0], [0.0, 0.0]]), jnp.array([[0, 1], [0, 2]], jnp.int32)


def test_worked_example():
    # rewards [0, 10] and [0, 0], gamma 0.95: returns 0.95 * 10 and 10; the deviation of (9.5, 0) is 9.5 / sqrt 2
    found = turns.gigpo_advantages(jnp.array([10.0, 0.0]), RETURNS, SEEN, PAIR, ALL)
    close.assert_printed(found, [[1.4142, 0.7071], [-1.4142, -0.7071]], 4)
    own = turns.anchor_advantages(RETURNS, SEEN, PAIR, ALL)
    close.assert_printed(own, [[0.7071, 0.0], [-0.7071, 0.0]], 4)
    plain = turns.anchor_advantages(RETURNS, SEEN, PAIR, ALL, normalise=group.dr_grpo_advantages)
    close.assert_near(plain, [[4.75, 0.0], [-4.75, 0.0]])
    assert turns.anchor_sizes(SEEN, PAIR, ALL).tolist() == [[2.0, 1.0], [2.0, 1.0]]


def _drawn(seed=0, rows=12, columns=6):
    rng = np.random.default_rng(seed)
    valid = np.arange(columns)[None, :] < rng.integers(1, columns + 1, (rows, 1))
    ids = np.asarray([0, 1, 2] * (rows // 3), np.int32)  # groups need not lie side by side
    return rng.normal(size=rows), rng.normal(size=(rows, columns)), rng.integers(-2, 3, (rows, columns)), ids, valid


def _given(rewards, returns, seen, ids, valid):
    floats = jnp.asarray(rewards, jnp.float32), jnp.asarray(returns, jnp.float32)
    return (*floats, jnp.asarray(seen, jnp.int32), jnp.asarray(ids, jnp.int32), jnp.asarray(valid))


def _loop(rewards, returns, seen, ids, valid, episode=1.0, step=1.0):
    out = np.zeros(returns.shape)
    for i, k in np.argwhere(valid):
        members = [j for j in range(len(ids)) if ids[j] == ids[i]]
        whole = np.asarray([rewards[j] for j in members])
        same = [
            returns[j, t] for j in members for t in range(returns.shape[1]) if valid[j, t] and seen[j, t] == seen[i, k]
        ]
        own = (returns[i, k] - np.mean(same)) / np.std(same, ddof=1) if len(same) > 1 else 0.0
        out[i, k] = episode * (rewards[i] - whole.mean()) / whole.std(ddof=1) + step * own
    return out


@pytest.mark.parametrize("weights", [{}, {"episode": 0.0}, {"step": 0.3}])
def test_agrees_with_a_loop(weights):
    drawn = _drawn()
    close.assert_near(turns.gigpo_advantages(*_given(*drawn), **weights), _loop(*drawn, **weights))


def test_limits():
    rewards, returns, seen, ids, valid = _given(*_drawn(1))
    whole = group.group_normalized_advantages(rewards, ids)
    expected = jnp.where(valid, whole[:, None], 0.0)
    # no weight on the turns, or no situation met twice: GRPO at every turn
    np.testing.assert_array_equal(turns.gigpo_advantages(rewards, returns, seen, ids, valid, step=0.0), expected)
    alone = jnp.arange(seen.size, dtype=jnp.int32).reshape(seen.shape)
    np.testing.assert_array_equal(turns.gigpo_advantages(rewards, returns, alone, ids, valid), expected)
    # one situation for everything: the turns of a group whitened together
    one = turns.anchor_advantages(returns, jnp.zeros_like(seen), ids, valid)
    kept = np.asarray(returns)[(np.asarray(ids) == 2)[:, None] & np.asarray(valid)]
    there = np.asarray(one)[(np.asarray(ids) == 2)[:, None] & np.asarray(valid)]
    close.assert_near(there, (kept - kept.mean()) / kept.std(ddof=1))
    # the order of episodes is nothing
    order = np.random.default_rng(2).permutation(len(ids))
    moved = turns.gigpo_advantages(*(x[order] for x in (rewards, returns, seen, ids, valid)))
    close.assert_near(moved, turns.gigpo_advantages(rewards, returns, seen, ids, valid)[order])
    # the same situation in another group is another situation
    apart = turns.anchor_advantages(RETURNS, SEEN, jnp.array([0, 1], jnp.int32), ALL)
    assert not np.asarray(apart).any()


# --- the arena


def test_the_behaviour_plays_what_the_world_answers():
    arena = keydoor_arena.make_keydoor(cells=5, turns=6, skill=1.0)
    rows = jax.jit(lambda key: arenas.play(arena, key, 8))(jax.random.key(0))
    prompt, step, letters = arena.train.tokens.shape[1], jax.jit(arena.env.step), keydoor_arena.ALPHABET
    opened = 0
    for b in range(8):
        task = {name: x[rows.problem_ids[b]] for name, x in arena.train.answers.items()}
        state, t, done = arena.env.reset(jax.random.key(0), task), prompt, False
        for _ in range(6):
            assert bool(rows.mask[b, t])
            answer = step(state, rows.tokens[b, t : t + 1], jnp.int32(1))
            state, done, t = answer.state, bool(answer.done), t + 1
            if done:
                opened += float(answer.reward) == 1.0
                break
            shown = np.asarray(answer.tokens)
            np.testing.assert_array_equal(rows.tokens[b, t : t + len(shown)], shown)
            assert not np.asarray(rows.mask[b, t : t + len(shown)]).any()
            t += len(shown)
        assert bool(rows.truncated[b]) == (not done)
        assert not np.asarray(rows.segment_ids[b, t:]).any() and not np.asarray(rows.mask[b, t:]).any()
        assert np.asarray(rows.positions[b, :t]).tolist() == list(range(t))
    assert opened > 2 and letters[0] == "_"


def test_no_corridor_is_trained_on_and_held_out():
    arena = keydoor_arena.make_keydoor()
    train, held = ({tuple(map(int, row)) for row in x.tokens} for x in (arena.train, arena.heldout))
    assert len(train) == 30 and len(held) == 10 and not train & held
    measure = jax.jit(strings.bound(arenas.measure, arena, samples=2))
    found = measure(arena.policy.init(jax.random.key(0)), jax.random.key(1))
    assert 0.0 <= float(found["eval/success"]) <= 1.0 and 0.0 <= float(found["eval/revisits"]) < 1.0


def test_returns_come_from_the_turns():
    found = multi_turn.Turns(
        turn=jnp.zeros((2, 1), jnp.int32), end=jnp.zeros((2, 2), jnp.int32), taken=ALL,
        reward=jnp.array([[0.0, 10.0], [0.0, 0.0]]), identity=SEEN, done=ALL[0], valid=ALL[0],
    )  # fmt: skip
    close.assert_near(multi_turn.returns_to_go(found, gamma=0.95), RETURNS)
