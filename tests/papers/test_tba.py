"""TBA: trajectory balance by hand, its gradient, its optimum and AGRO; the ring of stored groups and its draws."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.systems import tba
from experiments.systems.parts import replay
from jaxrl_llm import reduce
from jaxrl_llm.losses.off_policy import agro_loss, trajectory_balance_loss
from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.types import Rewards, Trajectories
from tests import close

ONE = jnp.zeros((2,), jnp.int32)
PAIR = {"logp": jnp.array([[-2.0], [-3.0]]), "ref_logp": jnp.array([[-2.0], [-2.0]]), "rewards": jnp.array([1.0, 0.0])}
MASK = jnp.ones((2, 1), bool)


def _loss(logp, ref_logp, rewards, beta=0.5):
    terms = trajectory_balance_loss(logp, ref_logp, rewards, ONE, MASK, beta=beta)
    return reduce.tokens(terms.loss, MASK, mode="seq_mean")


def test_by_hand():
    terms = trajectory_balance_loss(*PAIR.values(), ONE, MASK, beta=0.5)
    # log ref - log pi + r / beta = 2 and 1, log Z = 1.5, brackets -0.5 and 0.5
    close.assert_near(terms.aux["balance_gap"][:, 0], [0.5, 0.5], magnitude=0)
    close.assert_near(_loss(**PAIR), 0.25, magnitude=0)


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
    close.assert_near(found.loss, want[:, None] * mask)


def test_gradient_is_the_deviation_of_the_regularised_reward():
    beta = 0.5
    gradient = jax.grad(lambda x: _loss(x, PAIR["ref_logp"], PAIR["rewards"], beta))(PAIR["logp"])
    value = np.asarray(PAIR["rewards"]) - beta * np.asarray(PAIR["logp"] - PAIR["ref_logp"])[:, 0]
    close.assert_near(gradient[:, 0], -(2 / beta) * (value - value.mean()) / 2, magnitude=0)


def test_a_constant_reward_changes_nothing_and_the_target_is_a_fixed_point():
    moved = _loss(PAIR["logp"], PAIR["ref_logp"], PAIR["rewards"] + 7.0)
    close.assert_near(moved, _loss(**PAIR), magnitude=0)
    target = PAIR["ref_logp"] + PAIR["rewards"][:, None] / 0.5 - 3.0  # any normalisation
    assert float(_loss(target, PAIR["ref_logp"], PAIR["rewards"])) <= close.near(target, target, terms=2) ** 2


def test_it_is_agro_up_to_its_scale():
    scaled = agro_loss(*PAIR.values(), ONE, MASK, beta=0.5, ddof=0).loss * 2 / 0.5**2
    close.assert_near(trajectory_balance_loss(*PAIR.values(), ONE, MASK, beta=0.5).loss, scaled, magnitude=0)


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


def test_a_constant_beta_does_not_fall_with_a_model_of_ones_own_either():
    for base in (tba.Settings(), dataclasses.replace(tba.Settings(), **tba.EMBEDDED)):
        given = dataclasses.replace(base, **tba.ARMS["constant"])
        found = [float(tba.beta_at(given, jnp.int32(k))) for k in (0, base.steps // 2, base.steps)]
        assert found == [float(np.float32(0.02))] * 3


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
    np.testing.assert_array_equal(rows.group_ids, jnp.repeat(jnp.arange(4), SIZE))
    # both responses of a stored group are the same text here: the copy is left out, and counts in no group
    assert rewards.valid.tolist() == [True, False] * 4
    np.testing.assert_array_equal(rewards.value[::SIZE], rows.problem_ids[::SIZE])
    assert rows.mask.any(1).tolist() == [True, False] * 4


def test_a_mixture_routes_stored_rows_by_itself():
    """The ring keeps no record of experts; fresh rows keep theirs, and an iteration goes on as without a mixture."""
    rows, rewards = _rollout(7, 8)
    experts = jnp.ones((*rows.tokens.shape, 2), jnp.int8)
    rows = rows._replace(extras={EXPERTS: experts})
    ring = replay.stored(replay.empty_replay(2, SIZE, WIDTH, jax.random.key(0)), rows, rewards, SIZE)
    assert ring.pool.trajectories.extras == {} and ring.pool.kept.all()
    for share, kept in ((1.0, 1), (0.0, -1)):
        found, _, old = replay.mixed(ring, rows, rewards, SIZE, on_policy=share)
        assert old.tolist() == [kept < 0] * (2 * SIZE)
        assert found.extras[EXPERTS].dtype == jnp.int8 and jnp.unique(found.extras[EXPERTS]).tolist() == [kept]


def _of_one_prompt(*texts):
    """Groups of two different responses to problem 1; the rewards are the first tokens."""
    rows, rewards = _rollout(*[1] * (len(texts) // SIZE))
    grid = jnp.asarray([[text] * WIDTH for text in texts], jnp.int32)
    return rows._replace(tokens=grid), Rewards(grid[:, 0].astype(jnp.float32), rewards.valid)


def test_a_prompt_is_drawn_with_the_responses_of_all_its_rollouts_each_once():
    ring = replay.empty_replay(4, SIZE, WIDTH, jax.random.key(0))
    ring = replay.stored(ring, *_of_one_prompt(4, 5, 6, 5), SIZE)  # 5 was said twice
    ring = replay.stored(ring, *_rollout(2), SIZE)
    assert replay.first_of_equals(ring.pool).tolist() == [True, True, True, False, True, False, False, False]

    def draw(key, heat=0.0):
        rows, there = replay.of_prompts(ring.pool, jnp.asarray([1, 2], jnp.int32), SIZE, key, heat)
        return ring.pool.trajectories.tokens[rows, 0], there

    tokens, there = jax.vmap(draw)(jax.random.split(jax.random.key(1), 2400))
    assert there[:, 0].all() and there[:, 1].tolist() == [[True, False]] * 2400
    first, second = np.asarray(tokens[:, 0, 0]), np.asarray(tokens[:, 0, 1])
    assert (first != second).all() and set(first.tolist()) == {4, 5, 6}, "without replacement, from both rollouts"
    close.assert_share([(first == t).mean() for t in (4, 5, 6)], 1 / 3, 2400)
    hot, _ = jax.vmap(lambda key: draw(key, 1.0))(jax.random.split(jax.random.key(2), 2400))
    chances = np.exp([4.0, 5.0, 6.0]) / np.exp([4.0, 5.0, 6.0]).sum()
    close.assert_share([(np.asarray(hot[:, 0, 0]) == t).mean() for t in (4, 5, 6)], chances, 2400)


def test_signatures_tell_order_and_ignore_what_is_no_response():
    rows, _ = _rollout(1, 1)
    tokens = jnp.asarray([[1, 2, 3], [2, 1, 3], [9, 2, 3], [8, 2, 3]], jnp.int32)
    mask = jnp.asarray([[True] * 3, [True] * 3, [False, True, True], [False, True, True]])
    marks = replay.signatures(rows._replace(tokens=tokens, mask=mask)).tolist()
    assert marks[0] != marks[1] and marks[2] == marks[3] and marks[0] != marks[2]


def test_beta_falls_and_reaches_the_loss():
    settings = dataclasses.replace(
        tba.Settings(), **tba.EMBEDDED | tba.SMOKE | {"steps": 4, "beta": 0.4, "beta_end": 0.2}
    )
    assert [round(float(tba.beta_at(settings, jnp.asarray(k))), 3) for k in (0, 2, 4, 9)] == [0.4, 0.3, 0.2, 0.2]
    for loss in (tba.balance, tba.rloo):
        batch = types.SimpleNamespace(
            extras={"rewards": PAIR["rewards"], "beta": jnp.full((2,), 0.5)}, group_ids=ONE, mask=MASK,
            ref_logp=PAIR["ref_logp"], sampler_logp=PAIR["logp"], advantages=jnp.zeros((2, 1)),
        )  # fmt: skip
        half = loss(PAIR["logp"], batch).loss
        batch.extras["beta"] = jnp.full((2,), 0.25)
        assert float(jnp.abs(half - loss(PAIR["logp"], batch).loss).max()) > 1e-3
    batch.extras["beta"] = jnp.full((2,), 0.5)
    close.assert_near(tba.balance(PAIR["logp"], batch).loss[:, 0], 0.5 * 0.25, magnitude=0)  # beta (1/2)^2


def test_shares_and_preference_in_the_long_run():
    ring = replay.stored(replay.empty_replay(2, SIZE, WIDTH, jax.random.key(0)), *_rollout(1, 2), SIZE)

    def one(key, inverse_temperature):
        rows, _, old = _drawn(ring._replace(key=key), 0.25, inverse_temperature=inverse_temperature)
        return jnp.mean(old.astype(jnp.float32)), jnp.sum(rows.problem_ids == 2), jnp.sum(rows.problem_ids <= 2)

    keys = jax.random.split(jax.random.key(1), 2000)
    for inverse_temperature, share in ((0.0, 0.5), (2.0, np.exp(2) / (1 + np.exp(2)))):
        old, second, both = jax.vmap(one, (0, None))(keys, inverse_temperature)
        close.assert_share(old.mean(), 0.75, 2000)
        close.assert_share(second.sum() / both.sum(), share, 2000)


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
