"""GiGPO: turns of a group in the same situation are groups of their own; the arena its experiment plays in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import gigpo
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import keydoor_arena, similar_situations
from experiments.parts import strings
from jaxrl_llm.advantages import group, turns
from jaxrl_llm.errors import UserError
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


def test_random_sets_have_the_sizes_and_not_the_turns():
    _, _, seen, ids, valid = _given(*_drawn(3))
    dealt = similar_situations.shuffled(seen, ids, valid, jax.random.key(0))
    for one in range(3):
        mine = np.asarray(ids) == one
        there = np.asarray(valid)[mine]
        before, after = np.asarray(seen)[mine], np.asarray(dealt)[mine]
        assert sorted(before[there]) == sorted(after[there])
        assert (before[there] != after[there]).any()
        np.testing.assert_array_equal(before[~there], after[~there])
    again = similar_situations.shuffled(seen, ids, valid, jax.random.key(1))
    assert (np.asarray(again) != np.asarray(dealt)).any()


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


def test_the_grid_takes_the_place_of_the_corridor(monkeypatch):
    made = []
    monkeypatch.setattr(gigpo.errands, "make_errands", lambda **given: made.append(given))
    assert gigpo.world_of(gigpo.Settings()) is keydoor_arena.make_keydoor() and not made
    gigpo.world_of(gigpo.Settings(places=4))
    gigpo.world_of(gigpo.Settings(places=3, skies=8))
    gigpo.world_of(gigpo.Settings(places=4, skies=8, grid_turns=32))
    assert made == [
        {"places": 4, "skies": 1, "turns": 24},
        {"places": 3, "skies": 8, "turns": 24},
        {"places": 4, "skies": 8, "turns": 32},
    ]
    with pytest.raises(UserError, match="--skies 8: a corridor has none"):
        gigpo.world_of(gigpo.Settings(skies=8))
    with pytest.raises(UserError, match="--skies 0: a corridor has none"):
        gigpo.world_of(gigpo.Settings(skies=0))
    with pytest.raises(UserError, match="--grid-turns 32: a corridor has turns of its own"):
        gigpo.world_of(gigpo.Settings(grid_turns=32))
    with pytest.raises(UserError, match="--grid-turns 3: each of 4 places takes one"):
        gigpo.world_of(gigpo.Settings(places=4, grid_turns=3))


def test_returns_come_from_the_turns():
    found = multi_turn.Turns(
        turn=jnp.zeros((2, 1), jnp.int32), end=jnp.zeros((2, 2), jnp.int32), taken=ALL,
        reward=jnp.array([[0.0, 10.0], [0.0, 0.0]]), identity=SEEN, done=ALL[0], valid=ALL[0],
    )  # fmt: skip
    close.assert_near(multi_turn.returns_to_go(found, gamma=0.95), RETURNS)


# --- situations that look alike


def _common(first, second):
    """Longest common subsequence by the table of the textbook."""
    table = np.zeros((len(first) + 1, len(second) + 1), int)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
    return table[-1, -1]


def test_likeness_is_twice_the_longest_common_subsequence_over_both_lengths():
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second = (rng.integers(0, 4, rng.integers(0, 8)) for _ in range(2))
        padded = (jnp.asarray(np.pad(x, (8 - len(x), 0), constant_values=-1), jnp.int32) for x in (first, second))
        total = len(first) + len(second)
        expected = 2 * _common(first, second) / total if total else 1.0
        close.assert_near(similar_situations.likeness(*padded), np.float32(expected))


def test_clusters_join_the_first_leader_they_are_like():
    rng = np.random.default_rng(1)
    texts = rng.integers(0, 3, (6, 3, 5)).astype(np.int32)
    ids, valid = np.asarray([0, 1, 0, 1, 0, 1], np.int32), rng.random((6, 3)) < 0.8
    for least in (0.0, 0.6, 0.8, 1.0):
        leaders, expected = [], np.arange(18).reshape(6, 3)
        for b, k in np.ndindex(6, 3):
            like = [
                m for m in leaders
                if ids[m // 3] == ids[b] and 2 * _common(texts[b, k], texts[m // 3, m % 3]) / 10 >= least - 1e-6
            ]  # fmt: skip
            if like:
                expected[b, k] = like[0]
            elif valid[b, k]:
                leaders.append(3 * b + k)
        given = jnp.asarray(texts), jnp.asarray(ids), jnp.asarray(valid)
        found = np.asarray(similar_situations.clusters(*given, least=least))
        np.testing.assert_array_equal(found[valid], expected[valid])
    with pytest.raises(ValueError, match=r"least=1.5 must lie in \[0, 1\]"):
        similar_situations.clusters(*given, least=1.5)


def test_equal_and_similar_situations_of_the_corridor():
    """At 1 the clusters are the world's own situations; at 0.85 a cell more or less is the same."""
    arena = keydoor_arena.make_keydoor(cells=6, turns=6)
    params = arena.policy.init(jax.random.key(0))
    rollout = arenas.arena_episodes(arena, arena.train, group_size=4)
    ids = jnp.arange(2, dtype=jnp.int32)
    keys = jax.random.split(jax.random.key(1), 8)
    rows = jax.jit(rollout)(params, arena.train.tokens[:2], arena.train.valid[:2], keys, ids)
    found = multi_turn.turns_of(rows)
    texts = similar_situations.shown(rows, width=8)
    for b, k in np.argwhere(np.asarray(found.taken)):
        read = np.asarray(rows.tokens[b])[
            (np.asarray(found.turn[b]) == k) & ~np.asarray(rows.mask[b]) & (np.asarray(rows.segment_ids[b]) > 0)
        ]
        np.testing.assert_array_equal(texts[b, k], read[-8:])

    def sizes(identity):
        return np.asarray(turns.anchor_sizes(identity, rows.group_ids, found.taken))

    equal = similar_situations.clusters(texts, rows.group_ids, found.taken, least=1.0)
    np.testing.assert_array_equal(sizes(equal), sizes(found.identity))
    wider = sizes(similar_situations.clusters(texts, rows.group_ids, found.taken, least=0.85))
    assert wider.sum() > sizes(equal).sum()


def test_groups_that_lie_one_after_another_are_compared_by_themselves():
    """The same situations as where every turn is compared with all, to the number."""
    rng = np.random.default_rng(2)
    texts = jnp.asarray(rng.integers(0, 2, (6, 3, 5)), jnp.int32)
    given = texts, jnp.asarray([0, 0, 1, 1, 2, 2], jnp.int32), jnp.asarray(rng.random((6, 3)) < 0.8)
    for least in (0.0, 0.7, 1.0):
        found = similar_situations.clusters_in_groups(*given, least=least, size=2)
        np.testing.assert_array_equal(found, similar_situations.clusters(*given, least=least))
    with pytest.raises(ValueError, match="size=4 does not divide the 6 rows; give the rows of a group"):
        similar_situations.clusters_in_groups(*given, least=0.7, size=4)
