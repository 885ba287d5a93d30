"""Reinforce-Ada: rounds until enough is known, balanced groups, statistics of the whole pool."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import reinforce_ada
from jaxrl_llm.advantages import group, pools
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from tests import close
from tests.close import doubles


def _pool(positive, negative):
    return jnp.array([[True] * positive + [False] * negative])


def _trained(right, drawn, keep):
    positive, negative = ((x & drawn).sum(1).astype(jnp.int32) for x in (right, ~right))
    return pools.earliest(right, drawn, *pools.balanced_counts(positive, negative, keep))


def test_worked_pools():
    for (positive, negative), kept, values in (
        ((1, 15), (1, 3), (0.9375, -0.0625)), ((3, 1), (3, 1), (0.25, -0.75)), ((0, 16), (0, 4), (0.0, 0.0)),
    ):  # fmt: skip
        right = _pool(positive, negative)
        drawn = jnp.ones(right.shape, bool)
        members = _trained(right, drawn, 4)
        assert (int((members & right).sum()), int((members & ~right).sum())) == kept
        advantages = pools.pool_advantages(right.astype(jnp.float32), drawn)
        if positive:
            assert advantages[0, 0] == doubles(values[0])
        assert advantages[0, -1] == doubles(values[1])


def test_rounds_stop_at_the_exit_condition():
    right = jnp.array([[0, 0, 1, 0, 0, 0, 1, 1]], bool)
    assert pools.rounds_drawn(right, per_round=2).sum() == 4  # the first right one is in round 2
    assert pools.rounds_drawn(right, per_round=2, done=pools.make_balanced_exit(4)).sum() == 8
    one, seven = jnp.array([[1]]), jnp.array([[7]])
    assert not pools.make_balanced_exit(4)(one, seven)  # one right and seven wrong are not balanced
    assert pools.rounds_drawn(right, per_round=2, done=pools.never_exit).all()
    with pytest.raises(ValueError, match="per_round=3"):
        pools.rounds_drawn(right, per_round=3)


def _loop(right, per_round, keep, exits):
    """The algorithm as text: rounds, exit, take the earliest, fill from the other class."""
    pool = []
    for k in range(0, len(right), per_round):
        pool += list(right[k : k + per_round])
        if exits(sum(pool), len(pool) - sum(pool)):
            break
    positive, negative = sum(pool), len(pool) - sum(pool)
    tp = min(keep // 2, positive)
    tn = min(keep - tp, negative)
    tp += min(keep - tp - tn, positive - tp)
    taken, counts = [], [0, 0]
    for k, good in enumerate(pool):
        if counts[good] < (tn, tp)[good]:
            taken.append(k)
            counts[good] += 1
    mean = positive / len(pool)
    return len(pool), taken, [float(good) - mean for good in pool]


@pytest.mark.parametrize("keep", [4, 5])
def test_agrees_with_a_loop(keep):
    rng = np.random.default_rng(keep)
    for chance in (0.05, 0.5, 0.95):
        right = rng.random((6, 16)) < chance
        done = pools.make_balanced_exit(keep)
        drawn = pools.rounds_drawn(jnp.asarray(right), per_round=4, done=done)
        members = _trained(jnp.asarray(right), drawn, keep)
        advantages = pools.pool_advantages(jnp.asarray(right, jnp.float32), drawn)
        for p in range(6):
            size, taken, values = _loop(
                right[p].astype(int), 4, keep, lambda pos, neg: pos >= keep // 2 and neg >= keep - keep // 2
            )
            assert int(drawn[p].sum()) == size
            assert np.flatnonzero(members[p]).tolist() == taken
            close.assert_near(advantages[p, :size], values)


def test_one_round_of_the_group_size_is_a_plain_group():
    right = jnp.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]], bool)
    drawn = pools.rounds_drawn(right, per_round=4, done=pools.make_balanced_exit(4))
    members = _trained(right, drawn, 4)
    assert members.all()
    rewards = right.astype(jnp.float32)
    ids = jnp.repeat(jnp.arange(3), 4)
    plain = group.dr_grpo_advantages(rewards.reshape(-1), ids)
    close.assert_near(pools.pool_advantages(rewards, members).reshape(-1), plain)
    scaled = group.group_normalized_advantages(rewards.reshape(-1), ids, eps=0.0)
    close.assert_near(pools.pool_advantages(rewards, members, std=True).reshape(-1), scaled)


def test_balanced_groups_rarely_lack_a_gradient():
    """At a pass rate of 1/8, four rounds of eight leave far fewer groups without a gradient than groups of four."""
    right = jax.random.uniform(jax.random.key(0), (2000, 32)) < 0.125
    drawn = pools.rounds_drawn(right, per_round=8)
    members = _trained(right, drawn, 4)
    mixed = (members & right).any(1) & (members & ~right).any(1)
    assert float(mixed.mean()) > 1 - 2 * 0.875**32 - 0.01
    plain = right[:, :4].any(1) & ~right[:, :4].all(1)
    close.assert_share(plain.mean(), 1 - 0.875**4 - 0.125**4, 2000)


def test_invalid_numbers():
    with pytest.raises(ValueError, match="keep=1"):
        pools.make_balanced_exit(1)
    assert pools.pool_advantages(jnp.array([[jnp.nan, 1.0]]), jnp.array([[False, True]]))[0, 1] == 0.0


def test_advantages_over_the_deviation_of_a_pool():
    rng = np.random.default_rng(2)
    values, base = rng.random((4, 8)), rng.random((4, 8)) < 0.7
    expected = np.stack([(v - v[b].mean()) / (v[b].std(ddof=1) + 1e-4) for v, b in zip(values, base, strict=True)])
    found = reinforce_ada.over_deviation(jnp.asarray(values, jnp.float32), jnp.asarray(base))
    close.assert_near(np.where(base, found, 0), np.where(base, expected, 0))


def test_plain_groups_train_on_all_that_they_draw_with_any_model():
    """With the paper's settings, those of a model of one's own, groups of 16 drew 32 and trained on 16 of them."""
    base = reinforce_ada.Settings()
    sizes = {}
    for name, settings in arms.resolve(reinforce_ada, base, ()).items():
        if settings.done is pools.never_exit:
            sizes[name] = settings.group_size, settings.keep
    assert sizes == {"grpo_4": (4, 4), "grpo_8": (8, 8), "grpo_16": (16, 16), "grpo_32": (32, 32), "dapo": (16, 16)}


def test_a_balanced_pool_waits_for_as_many_as_train():
    base = reinforce_ada.Settings(done=reinforce_ada.BALANCED)
    two, four = jnp.array([[2]]), jnp.array([[4]])
    done = [
        reinforce_ada.exit_of(dataclasses.replace(base, keep=keep))(*counts).tolist()
        for keep in (4, 8)
        for counts in ((two, two), (four, four))
    ]
    assert done == [[[True]], [[True]], [[False]], [[True]]]
    assert reinforce_ada.exit_of(reinforce_ada.Settings()) is pools.positive_exit
    with pytest.raises(UserError, match="--keep 1: a balanced pool trains on a right and a wrong response"):
        reinforce_ada.exit_of(dataclasses.replace(base, keep=1))
