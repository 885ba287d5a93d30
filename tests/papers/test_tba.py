"""TBA: trajectory balance by hand, its gradient, its optimum and AGRO; the ring of stored groups and its draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.systems.parts import replay
from jaxrl_llm import reduce
from jaxrl_llm.losses.off_policy import agro_loss, trajectory_balance_loss
from jaxrl_llm.types import Rewards, Trajectories

ONE = jnp.zeros((2,), jnp.int32)
PAIR = {"logp": jnp.array([[-2.0], [-3.0]]), "ref_logp": jnp.array([[-2.0], [-2.0]]), "rewards": jnp.array([1.0, 0.0])}
MASK = jnp.ones((2, 1), bool)


def _loss(logp, ref_logp, rewards, beta=0.5):
    terms = trajectory_balance_loss(logp, ref_logp, rewards, ONE, MASK, beta=beta)
    return reduce.tokens(terms.loss, MASK, mode="seq_mean")


def test_by_hand():
    terms = trajectory_balance_loss(*PAIR.values(), ONE, MASK, beta=0.5)
    # log ref - log pi + r / beta = 2 and 1, log Z = 1.5, brackets -0.5 and 0.5
    np.testing.assert_allclose(terms.aux["balance_gap"][:, 0], [0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(_loss(**PAIR), 0.25, rtol=1e-6)


def test_against_a_loop_in_float64():
    rng = np.random.default_rng(0)
    logp, ref = rng.normal(size=(2, 6, 4))
    rewards, mask, ids = rng.random(6), rng.random((6, 4)) < 0.8, np.array([0, 0, 0, 1, 1, 1])
    mask[:, 0], beta = True, 0.3
    own = np.array([sum(logp[b][mask[b]]) - sum(ref[b][mask[b]]) for b in range(6)])
    want = np.zeros(6)
    for g in (0, 1):
        members = np.flatnonzero(ids == g)
        log_z = np.mean([rewards[b] / beta - own[b] for b in members])
        for b in members:
            want[b] = (log_z + own[b] - rewards[b] / beta) ** 2
    arrays = (jnp.asarray(x, jnp.float32) for x in (logp, ref, rewards))
    found = trajectory_balance_loss(*arrays, jnp.asarray(ids, jnp.int32), jnp.asarray(mask), beta=beta)
    np.testing.assert_allclose(found.loss, want[:, None] * mask, rtol=2e-5, atol=1e-5)


def test_gradient_is_the_deviation_of_the_regularised_reward():
    beta = 0.5
    gradient = jax.grad(lambda x: _loss(x, PAIR["ref_logp"], PAIR["rewards"], beta))(PAIR["logp"])
    value = np.asarray(PAIR["rewards"]) - beta * np.asarray(PAIR["logp"] - PAIR["ref_logp"])[:, 0]
    np.testing.assert_allclose(gradient[:, 0], -(2 / beta) * (value - value.mean()) / 2, rtol=1e-6)


def test_a_constant_reward_changes_nothing_and_the_target_is_a_fixed_point():
    moved = _loss(PAIR["logp"], PAIR["ref_logp"], PAIR["rewards"] + 7.0)
    np.testing.assert_allclose(moved, _loss(**PAIR), rtol=1e-5)
    target = PAIR["ref_logp"] + PAIR["rewards"][:, None] / 0.5 - 3.0  # any normalisation
    assert float(_loss(target, PAIR["ref_logp"], PAIR["rewards"])) < 1e-10


def test_it_is_agro_up_to_its_scale():
    scaled = agro_loss(*PAIR.values(), ONE, MASK, beta=0.5, ddof=0).loss * 2 / 0.5**2
    np.testing.assert_allclose(trajectory_balance_loss(*PAIR.values(), ONE, MASK, beta=0.5).loss, scaled, rtol=1e-6)


SIZE, WIDTH = 2, 3


def _rollout(*marks):
    """A group of two rows for every mark, which its tokens, rewards and problem carry."""
    values = jnp.repeat(jnp.asarray(marks, jnp.int32), SIZE)
    grid = jnp.broadcast_to(values[:, None], (values.size, WIDTH))
    ids = jnp.repeat(jnp.arange(len(marks), dtype=jnp.int32), SIZE)
    rows = Trajectories(
        grid, jnp.ones_like(grid), jnp.zeros_like(grid), grid > 0, grid.astype(jnp.float32), values < 0, ids, values
    )
    return rows, Rewards(values.astype(jnp.float32), values > 0)


def _marks(pool):
    return pool.trajectories.problem_ids[::SIZE].tolist()


def test_the_ring_keeps_the_newest_groups():
    ring = replay.empty_replay(3, SIZE, WIDTH, jax.random.key(0))
    ring = replay.stored(ring, *_rollout(1, 2), SIZE)
    assert _marks(ring.pool) == [1, 2, 0] and ring.pool.kept.tolist() == [True] * 4 + [False] * 2
    ring = replay.stored(ring, *_rollout(3, 4), SIZE)
    assert _marks(ring.pool) == [4, 2, 3] and int(ring.cursor) == 1 and bool(ring.pool.kept.all())
    rows = ring.pool
    np.testing.assert_array_equal(rows.rewards.value, [4, 4, 2, 2, 3, 3])
    np.testing.assert_array_equal(rows.trajectories.tokens[:, 0], rows.trajectories.problem_ids)


def _drawn(ring, on_policy, fresh=(7, 8, 9, 7), **more):
    return replay.mixed(ring, *_rollout(*fresh), SIZE, on_policy=on_policy, **more)


def test_an_empty_ring_and_a_share_of_one_leave_fresh_groups():
    empty = replay.empty_replay(3, SIZE, WIDTH, jax.random.key(0))
    full = replay.stored(empty, *_rollout(1, 2, 3), SIZE)
    for ring, share in ((empty, 0.0), (full, 1.0)):
        rows, rewards, old = _drawn(ring, share)
        assert rows.problem_ids[::SIZE].tolist() == [7, 8, 9, 7] and not old.any()
        np.testing.assert_array_equal(rewards.value, rows.problem_ids)


def test_a_share_of_nothing_takes_whole_stored_groups_with_their_rewards():
    ring = replay.stored(replay.empty_replay(4, SIZE, WIDTH, jax.random.key(0)), *_rollout(1, 2, 3), SIZE)
    rows, rewards, old = _drawn(ring, 0.0)
    assert old.all() and set(rows.problem_ids.tolist()) <= {1, 2, 3}  # never the empty place
    np.testing.assert_array_equal(rewards.value, rows.problem_ids)
    np.testing.assert_array_equal(rows.group_ids, jnp.repeat(jnp.arange(4), SIZE))


def test_shares_and_preference_in_the_long_run():
    ring = replay.stored(replay.empty_replay(2, SIZE, WIDTH, jax.random.key(0)), *_rollout(1, 2), SIZE)

    def one(key, inverse_temperature):
        rows, _, old = _drawn(ring._replace(key=key), 0.25, inverse_temperature=inverse_temperature)
        return jnp.mean(old.astype(jnp.float32)), jnp.sum(rows.problem_ids == 2), jnp.sum(rows.problem_ids <= 2)

    keys = jax.random.split(jax.random.key(1), 500)
    for inverse_temperature, share in ((0.0, 0.5), (2.0, np.exp(2) / (1 + np.exp(2)))):
        old, second, both = jax.vmap(one, (0, None))(keys, inverse_temperature)
        assert float(old.mean()) == pytest.approx(0.75, abs=0.04)
        assert float(second.sum() / both.sum()) == pytest.approx(share, abs=0.04)


def test_draws_differ_from_step_to_step():
    ring = replay.empty_replay(2, SIZE, WIDTH, jax.random.key(0))
    after = replay.stored(ring, *_rollout(1), SIZE)
    assert (jax.random.key_data(after.key) != jax.random.key_data(ring.key)).any()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: replay.empty_replay(0, 2, 3, jax.random.key(0)), "groups=0 must be at least 1"),
        (lambda: replay.make_replay(print, 2, on_policy=1.5), r"on_policy=1.5 must lie in \[0, 1\]"),
        (
            lambda: replay.stored(replay.empty_replay(1, SIZE, WIDTH, jax.random.key(0)), *_rollout(1, 2), SIZE),
            "a rollout has 2 groups and the replay holds 1; make it larger",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
