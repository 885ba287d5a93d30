"""The cells of the factorial: what each advantage sees of the scale of rewards, and the soft penalty of length."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient import tricks_or_traps as tricks
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import refill
from jaxrl_llm.types import Rewards, TrainState, Trajectories
from tests import close

RNG = np.random.default_rng(0)
RIGHT = (RNG.random(24) < 0.4).astype(np.float64)
IDS = np.repeat(np.arange(4), 6)
GIVEN = jnp.asarray(RIGHT, jnp.float32), jnp.asarray(IDS, jnp.int32)
VALID = {"valid": jnp.ones((24,), bool)}


def test_advantages_of_the_whole_batch_against_a_loop():
    found = tricks.batch_mean_advantages(*GIVEN, **VALID)
    close.assert_near(found, (RIGHT - RIGHT.mean()) / RIGHT.std())


def test_only_advantages_without_a_deviation_see_the_scale_of_rewards():
    doubled = tricks.signed(GIVEN[0], None, limit_tokens=0)
    np.testing.assert_array_equal(doubled, np.where(RIGHT > 0, 1.0, -1.0))
    for estimate, factor in (
        (group.group_normalized_advantages, 1.0), (group.lite_ppo_advantages, 1.0), (tricks.batch_mean_advantages, 1.0),
        (group.dr_grpo_advantages, 2.0),
    ):  # fmt: skip
        once, twice = (np.asarray(estimate(x, GIVEN[1], **VALID)) for x in (GIVEN[0], doubled))
        close.assert_near(twice, factor * once)
        assert np.abs(once).max() > 0.1


def test_the_soft_penalty_begins_at_three_quarters():
    lengths = np.array([1, 15, 16, 18, 20])
    rows = types.SimpleNamespace(mask=jnp.asarray(np.arange(30)[None, :] < lengths[:, None]), truncated=lengths == 20)
    found = tricks.punished(jnp.ones((5,)), rows, limit_tokens=20)
    close.assert_near(found, 1.0 + np.minimum(0.0, (15 - lengths) / 5))
    rewards = types.SimpleNamespace(valid=jnp.asarray([True, False, True, True, True]))
    assert tricks.keep_ended(types.SimpleNamespace(truncated=jnp.asarray(lengths == 20)), rewards).tolist() == [
        True, False, True, True, False,
    ]  # fmt: skip


def test_a_refilled_batch_waits_until_all_its_groups_differ():
    settings = tricks.Settings(**tricks.EMBEDDED | tricks.SMOKE | tricks.ARMS["refilled"] | {"prompts_per_step": 2})
    (stage,) = tricks.build(settings).stages
    width = stage.extras(None, None)[refill.POOL].trajectories.tokens.shape[1]
    mask = jnp.ones((4, width), bool)
    rows = Trajectories(
        jnp.ones((4, width), jnp.int32), jnp.ones((4, width), jnp.int32), jnp.zeros((4, width), jnp.int32), mask,
        jnp.zeros((4, width)), jnp.zeros(4, bool), jnp.array([0, 0, 1, 1]), jnp.array([0, 0, 1, 1]),
    )  # fmt: skip
    valid, params, trained = jnp.ones(4, bool), recipes.bench(settings).model.params, []
    extras = stage.extras(None, None)
    for value in ([1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]):
        rewards = Rewards(jnp.asarray(value, jnp.float32), valid)
        batch = stage.method.estimate(params, extras, rows, rewards)
        trained.append(float(batch.total))
        extras = stage.method.remember(TrainState(None, None, None, None, None, extras), batch, rows, rewards)
    assert trained[:2] == [0, 0] and trained[2] == 4 * width


def test_dapo_whole_refills_and_punishes_length():
    """Of two groups with one right answer each that of the second is 6 of 6 tokens long, which costs all it earns.

    Both groups fill the batch, for what is refilled by are the rewards of the verifier.
    """
    mask = np.zeros((4, 6), bool)
    for row, length in enumerate((3, 2, 6, 2)):
        mask[row, :length] = True
    found = {}
    for name in ("refilled", "dapo_whole"):
        settings = tricks.Settings(**tricks.EMBEDDED | tricks.SMOKE | tricks.ARMS[name] | {"prompts_per_step": 2})
        (stage,) = tricks.build(settings).stages
        extras = stage.extras(None, None)
        prompt = extras[refill.POOL].trajectories.tokens.shape[1] - 6
        grid = jnp.ones((4, prompt + 6), jnp.int32)
        written = jnp.asarray(np.concatenate([np.zeros((4, prompt), bool), mask], axis=1))
        ids = jnp.array([0, 0, 1, 1])
        rows = Trajectories(grid, grid, 0 * grid, written, jnp.zeros(grid.shape), jnp.zeros(4, bool), ids, ids)
        rewards = Rewards(jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool))
        batch = stage.method.estimate(recipes.bench(settings).model.params, extras, rows, rewards)
        assert float(batch.total) == 13.0
        found[name] = np.sign(np.asarray(batch.advantages)[:, prompt]).tolist()
    assert found == {"refilled": [1.0, -1.0, 1.0, -1.0], "dapo_whole": [1.0, -1.0, 0.0, 0.0]}


def test_a_tight_room_is_that_of_training_alone():
    """15 of 18 tokens are written, 18 are measured, and what is cut trains in one of the two arms alone."""
    small = {"train_problems": 16, "eval_problems": 8, "prompts_per_step": 2, "group_size": 2}
    built = {}
    for name in ("grpo", "tight", "tight_overlong"):
        settings = tricks.Settings(**tricks.EMBEDDED | small | tricks.ARMS[name])
        bench, plan = recipes.bench(settings), tricks.build(settings)
        (stage,) = plan.stages
        ids = jnp.arange(2, dtype=jnp.int32)
        asked = bench.train.tokens[ids], bench.train.valid[ids]
        rows = jax.eval_shape(
            stage.method.rollout, bench.model.params, *asked, sample_keys(jax.random.key(0), 0, ids, 2), ids
        )
        built[name] = rows.tokens.shape[1] - bench.train.tokens.shape[1], plan.measure, settings.keep
    assert [width for width, _, _ in built.values()] == [18, 15, 15]
    assert built["tight"][1] is built["tight_overlong"][1] is built["grpo"][1]
    rows = types.SimpleNamespace(truncated=jnp.asarray([True, False]))
    rewards = types.SimpleNamespace(valid=jnp.asarray([True, True]))
    assert [built[name][2](rows, rewards).tolist() for name in ("tight", "tight_overlong")] == [
        [True, True], [False, True],
    ]  # fmt: skip
