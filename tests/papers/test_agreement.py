"""Clusters, semantic entropy, EMPO and majority rewards against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient.parts import agreement
from jaxrl_llm.advantages.group import group_normalized_advantages
from tests import close

ONE = jnp.zeros(4, jnp.int32)


def _clusters(values, answered=None, ids=None):
    values = jnp.asarray(values, jnp.int32)
    told = jnp.ones(values.shape, bool) if answered is None else jnp.asarray(answered)
    ids = jnp.zeros(values.shape, jnp.int32) if ids is None else ids
    return agreement.greedy_clusters(agreement.same_values(values, told), ids), ids, told


def test_three_of_a_kind():
    rewards = agreement.empo_rewards(*_clusters([5, 5, 5, 2]))
    np.testing.assert_array_equal(rewards, [0.75, 0.75, 0.75, 0.25])
    for ddof, want in ((0, [0.5774, 0.5774, 0.5774, -1.7321]), (1, [0.5, 0.5, 0.5, -1.5])):
        close.assert_printed(group_normalized_advantages(rewards, ONE, ddof=ddof, eps=0.0), want, 4)


def test_all_different_and_no_answers_are_worth_nothing():
    clusters, ids, told = _clusters([1, 2, 3, 4])
    close.assert_near(agreement.semantic_entropy(clusters, ids), np.log(4))
    assert agreement.empo_rewards(clusters, ids, told).tolist() == [0.0] * 4
    clusters, ids, told = _clusters([0, 0], [False, False])
    assert clusters.tolist() == [0, 1]
    assert agreement.empo_rewards(clusters, ids, told).tolist() == [0.0, 0.0]
    assert agreement.majority_rewards(clusters, ids, told).tolist() == [0.0, 0.0]


def test_against_a_loop_with_an_equivalence_that_is_not_transitive():
    rng = np.random.default_rng(0)
    equivalent = rng.random((12, 12)) < 0.4
    equivalent |= equivalent.T
    ids = np.array([0] * 5 + [3] * 7)
    opener = np.full(12, -1)
    for i in range(12):
        if opener[i] == -1:
            opener[i] = i
            for j in range(i + 1, 12):
                if opener[j] == -1 and equivalent[i, j] and ids[i] == ids[j]:
                    opener[j] = i
    got = agreement.greedy_clusters(jnp.asarray(equivalent), jnp.asarray(ids))
    assert got.tolist() == opener.tolist()
    for g in (0, 3):
        where = ids == g
        p = np.array([(opener[where] == c).mean() for c in set(opener[where])])
        entropy = agreement.semantic_entropy(got, jnp.asarray(ids))[np.flatnonzero(where)[0]]
        close.assert_near(entropy, -(p * np.log(p)).sum())


def test_permuting_the_rollouts_permutes_the_rewards():
    values, order = np.array([3, 1, 3, 2, 1, 3]), np.array([4, 2, 0, 5, 3, 1])
    straight, mixed = (agreement.empo_rewards(*_clusters(v)) for v in (values, values[order]))
    np.testing.assert_array_equal(mixed, np.asarray(straight)[order])


def test_majority_and_its_tie():
    assert agreement.majority_rewards(*_clusters([2, 9, 9, 2])).tolist() == [1.0, 0.0, 0.0, 1.0]
    # a larger set of missing answers does not win
    assert agreement.majority_rewards(*_clusters([0, 0, 9, 0], [False, False, True, False])).tolist() == [0, 0, 1, 0]


def test_groups_do_not_mix_and_the_filter_is_strict():
    clusters, ids, told = _clusters([5, 5, 5, 5], ids=jnp.array([0, 0, 2, 2]))
    assert clusters.tolist() == [0, 0, 2, 2]
    np.testing.assert_array_equal(agreement.empo_rewards(clusters, ids, told), 1.0)
    assert not bool(jnp.any(agreement.entropy_within(clusters, ids, low=0.0, high=2.0)))
    with pytest.raises(ValueError, match="low=1.0"):
        agreement.entropy_within(clusters, ids, low=1.0, high=0.5)
    jax.jit(agreement.empo_rewards)(clusters, ids, told)
