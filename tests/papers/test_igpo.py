"""IGPO: gains telescope, turns of a group are one pool, and the probability of the answer is the policy's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import igpo
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import lookup, multi_hop
from jaxrl_llm.advantages import turns
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods.builders import score_tokens
from tests import close

ALL = jnp.ones((1, 3), bool)


def test_worked_example():
    # a wrong episode whose second search raised the chance of the answer: 0.1, 0.1, 0.4
    found = turns.information_gain_rewards(jnp.array([[0.1, 0.1, 0.4]]), jnp.array([0.0]), ALL)
    close.assert_near(found, [[0.0, 0.3, 0.0]])
    # the pool (0, 0.3, 0) has mean 0.1 and sample deviation sqrt(0.03); what is to come is summed: 0, 1 / sqrt 3, ...
    own = turns.pooled_turn_advantages(found, jnp.array([0], jnp.int32), ALL, eps=0.0)
    close.assert_printed(own, [[0.0, 0.57735, -0.57735]], 5)


def test_a_turn_that_does_not_count_is_stepped_over():
    """The gain of the first turn is the chance before the third; the outcome is paid once."""
    chance, valid = jnp.array([[0.1, jnp.nan, 0.5]]), jnp.array([[True, False, True]])
    found = turns.information_gain_rewards(chance, jnp.array([1.0]), valid)
    close.assert_near(found, [[0.4, 0.0, 1.0]])
    logs = turns.log_information_gain_rewards(chance, jnp.array([1.0]), valid)
    close.assert_near(logs, [[np.log(5.0), 0.0, 1.0]])
    none = turns.information_gain_rewards(chance, jnp.array([1.0]), jnp.zeros((1, 3), bool))
    assert none.tolist() == [[0.0, 0.0, 0.0]]


def test_gains_of_logarithms():
    # 0.1 doubles twice: ln 2 each time, where the probabilities gain 0.1 and 0.2; then the outcome
    found = turns.log_information_gain_rewards(jnp.array([[0.1, 0.2, 0.4]]), jnp.array([2.0]), ALL)
    close.assert_printed(found, [[0.693147, 0.693147, 2.0]], 6)
    # a chance of 0 counts as the floor: ln(0.01 / 1e-6)
    found = turns.log_information_gain_rewards(jnp.array([[0.0, 0.01, 0.0]]), jnp.array([1.0]), ALL)
    close.assert_printed(found, [[9.21034, -9.21034, 1.0]], 5)
    rng = np.random.default_rng(1)
    chance, rewards, count = rng.random((9, 4)), rng.normal(size=9), rng.integers(1, 5, 9)
    expected = np.zeros((9, 4))
    for i in range(9):
        for k in range(count[i]):
            gain = np.log(max(chance[i, min(k + 1, 3)], 0.2)) - np.log(max(chance[i, k], 0.2))
            expected[i, k] = 0.5 * gain if k < count[i] - 1 else 3.0 * rewards[i]
    valid = np.arange(4)[None, :] < count[:, None]
    given = jnp.asarray(np.where(valid, chance, np.nan), jnp.float32), jnp.asarray(rewards, jnp.float32)
    weights = {"information": 0.5, "outcome": 3.0, "floor": 0.2}
    found = turns.log_information_gain_rewards(*given, jnp.asarray(valid), **weights)
    close.assert_near(found, expected)
    with pytest.raises(ValueError, match="floor=0.0 must lie in"):
        turns.log_information_gain_rewards(*given, jnp.asarray(valid), floor=0.0)


def test_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    chance, rewards, ids, count = rng.random((9, 4)), rng.normal(size=9), np.arange(9) % 3, rng.integers(1, 5, 9)
    paid, expected = np.zeros((9, 4)), np.zeros((9, 4))
    for i in range(9):
        for k in range(count[i]):
            paid[i, k] = 0.5 * (chance[i, k + 1] - chance[i, k]) if k < count[i] - 1 else 2.0 * rewards[i]
    for i in range(9):
        pool = np.concatenate([paid[j, : count[j]] for j in range(9) if ids[j] == ids[i]])
        for k in range(count[i]):
            expected[i, k] = sum(
                0.9 ** (j - k) * (paid[i, j] - pool.mean()) / pool.std(ddof=1) for j in range(k, count[i])
            )
    valid = jnp.asarray(np.arange(4)[None, :] < count[:, None])
    given = jnp.asarray(chance, jnp.float32), jnp.asarray(rewards, jnp.float32), valid
    found = turns.information_gain_rewards(*given, information=0.5, outcome=2.0)
    close.assert_near(found, paid)
    own = turns.pooled_turn_advantages(found, jnp.asarray(ids, jnp.int32), valid, gamma=0.9, eps=0.0)
    close.assert_near(own, expected)


def test_limits():
    rewards, ids = jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 1, 1], jnp.int32)
    one = jnp.ones((4, 1), bool)
    paid = turns.information_gain_rewards(jnp.full((4, 1), 0.3), rewards, one)
    # episodes of one turn: GRPO
    plain = group_normalized_advantages(rewards, ids)
    close.assert_near(turns.pooled_turn_advantages(paid, ids, one)[:, 0], plain)
    # equal rewards in the pool: nothing
    assert not np.asarray(turns.pooled_turn_advantages(jnp.full((4, 3), 0.1), ids, jnp.ones((4, 3), bool))).any()
    # gains telescope
    chance = jnp.array([[0.1, 0.7, 0.3, 0.9]])
    gained = turns.information_gain_rewards(chance, jnp.array([0.0]), jnp.ones((1, 4), bool))
    close.assert_near(jnp.sum(gained), 0.8)
    with pytest.raises(ValueError, match="gamma=2"):
        turns.pooled_turn_advantages(paid, ids, one, gamma=2.0)


@pytest.mark.slow
def test_chances_are_those_of_the_sampler():
    """Where the policy chose the right answer, its recorded log-probability is the chance's logarithm."""
    arena = lookup.make_lookup()
    params, ids = arena.policy.init(jax.random.key(0)), jnp.arange(16, dtype=jnp.int32)
    rollout = arenas.arena_episodes(arena, arena.train, group_size=4)
    rows = jax.jit(rollout)(
        params, arena.train.tokens[ids], arena.train.valid[ids], sample_keys(jax.random.key(1), 0, ids, 4), ids
    )
    tasks = jax.tree.map(lambda x: x[rows.problem_ids], arena.train.answers)
    gold = lookup.right_answers(tasks)
    chance, found = np.asarray(arenas.answer_chances(arena, params, rows, gold)), multi_turn.turns_of(rows)
    checked = 0
    for b, k in np.argwhere(np.asarray(found.taken)):
        t = int(found.end[b, k])
        hit = int(rows.tokens[b, t]) == int(gold[b])
        assert hit == (float(found.reward[b, k]) == 1.0)
        if hit:
            close.assert_near(np.log(chance[b, k]), rows.sampler_logp[b, t])
        checked += hit
    assert checked > 2 and not chance[~np.asarray(found.taken)].any()


@pytest.mark.slow
def test_chances_of_answers_of_two_tokens_are_geometric_means():
    """Where an episode said the right answer, the mean of the log-probabilities of its two words is the chance's."""
    arena, chances = igpo.domain_of(igpo.Settings(domain="multi_hop"))
    assert arena is multi_hop.make_multi_hop(hops=(2, 3)) and set(np.asarray(arena.train.level).tolist()) == {2, 3}
    assert igpo.domain_of(igpo.Settings()) == (lookup.make_lookup(), igpo.of_one_token)
    params = arena.policy.init(jax.random.key(0))

    @jax.jit
    def played(key):
        rows = arenas.play(arena, key, 16)
        tasks = jax.tree.map(lambda x: x[rows.problem_ids], arena.train.answers)
        rows, found = with_ends(rows)
        return rows, found, jax.vmap(multi_hop.gold)(tasks), chances(arena, params, rows, tasks)

    def with_ends(rows):
        """The turns of a behaviour's episodes, whose actions all have three tokens."""
        number = jnp.cumsum(rows.mask.astype(jnp.int32), axis=1) - 1
        turn = jnp.where(rows.mask, number // 3, -1)
        ends = rows.mask & (number % 3 == 2)
        slots = jnp.arange(arena.turns, dtype=jnp.int32)
        at = ends[:, None, :] & (turn[:, None, :] == slots[None, :, None])
        found = multi_turn.Turns(
            turn, jnp.argmax(at, axis=2).astype(jnp.int32), jnp.any(at, axis=2), jnp.zeros((16, arena.turns)),
            jnp.zeros((16, arena.turns), jnp.int32), ~rows.truncated, jnp.ones((16,), bool),
        )  # fmt: skip
        return rows._replace(extras={f"turns/{name}": value for name, value in found._asdict().items()}), found

    rows, found, gold, chance = played(jax.random.key(1))
    logp, checked = np.asarray(jax.jit(lambda rows: score_tokens(arena.policy, params, rows)[0])(rows)), 0
    for b, k in np.argwhere(np.asarray(found.taken)):
        t = int(found.end[b, k])
        if rows.tokens[b, t - 2 : t + 1].tolist() == [multi_hop.ANSWER, *gold[b].tolist()]:
            close.assert_near(np.log(chance[b, k]), (logp[b, t - 1] + logp[b, t]) / 2)
            checked += 1
    assert checked > 1 and not np.asarray(chance)[~np.asarray(found.taken)].any()
    assert (np.asarray(chance)[np.asarray(found.taken)] > 0).all()
