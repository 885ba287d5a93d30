"""Prefix trees: a dictionary of prefixes in float64, telescoping, equality with GRPO, invalid members."""

import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient import tempo
from jaxrl_llm.advantages import group, prefix_tree
from tests import close

rng = np.random.default_rng(2)
IDS = np.repeat([0, 4, 8], 4)
LENGTHS = rng.integers(1, 5, 12)
TOKENS = rng.integers(1, 3, (12, 6))
MASK = (np.arange(6)[None] >= 1) & (np.arange(6)[None] < 1 + LENGTHS[:, None])
TOKENS[:, 0] = IDS  # the prompt
REWARDS = rng.normal(size=12)
VALID = np.ones(12, bool)
VALID[5] = False


def _arguments(rewards=REWARDS):
    poisoned = np.where(VALID, rewards, np.nan)
    arrays = TOKENS.astype(np.int32), MASK, poisoned.astype(np.float32), IDS.astype(np.int32)
    return [jnp.asarray(x) for x in arrays], {"valid": jnp.asarray(VALID)}


def _response(i, end):
    return tuple(TOKENS[i, t] for t in range(end + 1) if MASK[i, t])


def _value(i, end):
    """Mean reward of the members whose response, up to column ``end``, is that of ``i`` and as far along."""
    members = [j for j in range(12) if IDS[j] == IDS[i] and VALID[j] and _response(j, end) == _response(i, end)]
    return np.mean([REWARDS[j] for j in members]) if members else 0.0


def test_values_and_differences_against_a_loop():
    arguments, valid = _arguments()
    values, sharing = prefix_tree.prefix_values(*arguments, **valid)
    change = np.asarray(prefix_tree.branch_differences(*arguments, **valid))
    for i in range(12):
        for t in range(6):
            close.assert_near(values[i, t], _value(i, t))
            want = _value(i, t) - _value(i, t - 1) if MASK[i, t] else 0.0
            if VALID[i]:
                close.assert_near(change[i, t], want)
        # telescoping: value of the leaf minus the group's mean
        if VALID[i]:
            close.assert_near(change[i].sum(), _value(i, LENGTHS[i]) - _value(i, 0))
    assert float(sharing.max()) == 4 and float(sharing[4, 0]) == 3


def test_tempo_against_float64():
    arguments, valid = _arguments()
    got = np.asarray(prefix_tree.tempo_advantages(*arguments, **valid, branch=0.7))
    for i in range(12):
        members = [j for j in range(12) if IDS[j] == IDS[i] and VALID[j]]
        mean, std = np.mean(REWARDS[members]), np.std(REWARDS[members], ddof=1)
        for t in range(6):
            want = (REWARDS[i] - mean + 0.7 * (_value(i, t) - _value(i, t - 1))) / (std + 1e-6)
            close.assert_near(got[i, t], want if MASK[i, t] and VALID[i] else 0.0)


def test_without_branches_it_is_grpo():
    arguments, valid = _arguments()
    grpo = group.group_normalized_advantages(arguments[2], arguments[3], **valid)
    want = group.per_token(grpo, arguments[1])
    close.assert_near(prefix_tree.tempo_advantages(*arguments, **valid, branch=0.0), want)
    # all different from the first token on: only that token has a difference, and so GRPO's advantage twice
    apart = jnp.asarray(np.tile(np.arange(12)[:, None], (1, 6)), jnp.int32)
    got = prefix_tree.tempo_advantages(apart, *arguments[1:], **valid)
    close.assert_near(got[:, 2:], want[:, 2:])
    close.assert_near(got[:, 1], 2 * want[:, 1])
    # all the same: no differences (but members that end earlier part there)
    same, full = jnp.ones((12, 6), jnp.int32), jnp.ones((12, 6), bool)
    assert not np.asarray(prefix_tree.branch_differences(same, full, *arguments[2:], **valid)).any()


def test_equal_rewards_give_exactly_zero():
    arguments, _ = _arguments()
    for value in (0.1, 1 / 3, 1.0):
        rewards = jnp.full((12,), value)
        assert not np.asarray(prefix_tree.tempo_advantages(*arguments[:2], rewards, arguments[3])).any()


def test_the_differences_are_the_exact_advantages_of_an_enumerated_tree():
    """Every string of two bits once (a uniform policy): V(s') - V(s) = Q - V."""
    strings = jnp.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    rewards, ids = jnp.array([1.0, 0.0, 0.5, 0.5]), jnp.zeros(4, jnp.int32)
    change = prefix_tree.branch_differences(strings, jnp.ones((4, 2), bool), rewards, ids)
    close.assert_near(change, [[0.0, 0.5], [0.0, -0.5], [0.0, 0.0], [0.0, 0.0]])


def test_values_of_prefixes_in_the_place_of_outcomes():
    """[a b], [a c], [d e], [d f] with r = 1, 0, 0, 0: V(a) = 1/2, V(d) = 0, mean 1/4, std sqrt(3)/4; then a loop."""
    tokens, mask = jnp.array([[1, 2], [1, 3], [4, 5], [4, 6]]), jnp.ones((4, 2), bool)
    numbers = (tokens, mask, jnp.array([1.0, 0, 0, 0]), jnp.zeros(4, jnp.int32))
    found = tempo.of_prefix(prefix_tree.tempo_advantages(*numbers, outcome=0.0, ddof=0, eps=0.0), mask)
    third = 3**-0.5
    close.assert_near(found, [[third, 3 * third], [third, -third], [-third, -third], [-third, -third]])

    rng = np.random.default_rng(5)
    tokens, lengths = rng.integers(0, 2, (12, 5)), rng.integers(1, 6, 12)
    mask, rewards, ids = np.arange(5) < lengths[:, None], rng.random(12).astype(np.float32), np.repeat([0, 1], 6)
    numbers = (jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(rewards), jnp.asarray(ids, jnp.int32))
    found = tempo.of_prefix(prefix_tree.tempo_advantages(*numbers, outcome=0.0), jnp.asarray(mask))
    wanted = np.zeros((12, 5))
    for i in range(12):
        group = [j for j in range(12) if ids[j] == ids[i]]
        spread = rewards[group].std(ddof=1) + 1e-6
        for t in range(5):
            shared = [j for j in group if lengths[j] > t and (tokens[j, : t + 1] == tokens[i, : t + 1]).all()]
            value = rewards[shared].mean() - rewards[group].mean() if mask[i, t] else 0.0
            wanted[i, t] = value / spread
    close.assert_near(found, wanted)
