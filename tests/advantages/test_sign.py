"""PSR, NSR and W-REINFORCE: worked numbers, denominators, what the gradient does to the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group, sign
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss, reinforce_loss
from jaxrl_llm.metrics.intervals import pass_at_k
from jaxrl_llm.types import Problems, Rewards, Trajectories
from tests import close

REWARDS = jnp.array([1.0, 0.0, 0.0, 0.5, 1.0, 0.0])
VALID = jnp.array([True, True, True, True, False, False])
MASK = jnp.asarray(np.tri(6, 4, 0, dtype=bool))
rng = np.random.default_rng(0)
LOGP = jnp.asarray(-rng.random((6, 4)), jnp.float32)


def test_against_a_loop():
    got = sign.signed_advantages(REWARDS, right_weight=0.3, wrong_weight=2.0, valid=VALID)
    close.assert_near(got, [0.3, -2.0, -2.0, 0.0, 0.0, 0.0])
    assert sign.right_samples(REWARDS).tolist() == [True, False, False, False, True, False]
    assert sign.wrong_samples(REWARDS, valid=VALID).tolist() == [False, True, True, False, False, False]
    poisoned = jnp.where(VALID, REWARDS, jnp.nan)
    np.testing.assert_array_equal(sign.signed_advantages(poisoned, valid=VALID)[4:], [0.0, 0.0])


def _loss(logp, advantages, keep=None):
    mask = MASK if keep is None else MASK & keep[:, None]
    return reduce.tokens(clipped_policy_loss(logp, LOGP, group.per_token(advantages, mask), mask).loss, mask)


def _gradient(advantages, keep=None):
    return jax.grad(_loss)(LOGP, advantages, keep)


def test_reinforce_is_psr_and_nsr_with_one_denominator():
    both = _gradient(sign.signed_advantages(REWARDS))
    right = _gradient(sign.signed_advantages(REWARDS, wrong_weight=0.0))
    wrong = _gradient(sign.signed_advantages(REWARDS, right_weight=0.0))
    close.assert_near(both, right + wrong)
    plain = jax.grad(
        lambda x: reduce.tokens(reinforce_loss(x, group.per_token(2 * REWARDS - 1, MASK), MASK).loss, MASK)
    )(LOGP)
    close.assert_near(both, plain)  # reward 1/2 is 0 in both


def test_the_subset_has_its_own_denominator():
    advantages = sign.signed_advantages(REWARDS, right_weight=0.0)
    whole, subset = _gradient(advantages), _gradient(advantages, sign.wrong_samples(REWARDS))
    share = float(MASK[sign.wrong_samples(REWARDS)].sum() / MASK.sum())
    close.assert_near(whole, share * subset)
    assert float(_loss(LOGP, advantages, jnp.zeros(6, bool))) == 0  # nothing wrong: no update, no NaN
    assert not np.asarray(_gradient(advantages, jnp.zeros(6, bool))).any()


@pytest.mark.parametrize(("reward", "want"), [(1.0, [0.5, -0.3, -0.2]), (0.0, [-0.5, 0.3, 0.2])])
def test_logit_direction(reward, want):
    """What is pushed down is shared out in proportion to what the model believed."""
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    advantages = sign.signed_advantages(jnp.array([reward]))

    def loss(x):
        logp = jax.nn.log_softmax(x)[None, :1]
        return reinforce_loss(logp, advantages[:, None], jnp.array([[True]])).loss[0, 0]

    close.assert_near(-jax.grad(loss)(logits), want)
    # the objective, pi(y) itself, has every entry times pi_0
    objective = jax.grad(lambda x: advantages[0] * jax.nn.softmax(x)[0])(logits)
    close.assert_near(objective, 0.5 * np.asarray(want))


def test_held_out_pass_at_k():
    close.assert_printed(pass_at_k([3], 10, 5)[0], 0.9167, 4)
    value = np.zeros((3, 8))
    value[0, :3], value[2, :] = 1, 1
    rewards = Rewards(jnp.asarray(value.reshape(-1), jnp.float32), jnp.ones(24, bool))
    found = recipes.summary(jnp.ones((24, 2), bool), rewards, 8)
    assert set(found) >= {"eval/pass@2", "eval/pass@4", "eval/pass@8"} and "eval/pass@1" not in found
    for k in (2, 4, 8):
        close.assert_near(found[f"eval/pass@{k}"], pass_at_k([3, 0, 8], 8, k).mean())


def test_held_out_problems_that_nobody_judged_whole_have_no_pass_at_k():
    """Of one problem two of four samples are right and two are judged by nobody; of the next all are wrong."""
    value = jnp.asarray([1.0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0])
    valid = jnp.asarray([True, True, False, False] + [True] * 8)

    def found(*rows):
        at = jnp.asarray([4 * row + k for row in rows for k in range(4)])
        rewards = Rewards(value[at], valid[at])
        given = recipes.summary(jnp.ones((len(at), 3), bool), rewards, 4, judged=False)
        return {name: float(x) for name, x in given.items() if x.ndim == 0}

    assert found(0)["eval/accuracy"] == 1.0 and np.isnan([found(0)[f"eval/pass@{k}"] for k in (2, 4)]).all()
    assert found(0, 1)["eval/pass@2"] == found(0, 1)["eval/pass@4"] == 0.0
    assert found(0, 1, 2)["eval/pass@4"] == 0.5
    close.assert_near(found(0, 1, 2)["eval/pass@2"], (0 + 5 / 6) / 2)
    none = Rewards(jnp.zeros(4), jnp.zeros(4, bool))
    empty = recipes.summary(jnp.ones((4, 3), bool), none, 4, judged=False)
    assert all(np.isnan(empty[name]) for name in ("eval/accuracy", "eval/pass@2", "eval/pass@4"))


def test_a_measurement_on_the_host_leaves_out_what_nobody_judged():
    line = jnp.zeros((2, 3), jnp.int32)
    problems = Problems(line, line > -1, None, line[:, 0])

    def rollout(params, tokens, valid, keys, problem_ids):
        ids = jnp.repeat(problem_ids, 2)
        grid = jnp.zeros((len(ids), 3), jnp.int32)
        return Trajectories(grid, grid, grid, grid > -1, grid.astype(jnp.float32), ids < 0, ids, ids, {})

    def score(rows):
        return Rewards(jnp.asarray([1.0, 0.0, 0.0, 0.0]), jnp.asarray([True, True, True, False]))

    found = recipes.measure_on_host(rollout, problems, score, 2, {}, jax.random.key(0))
    assert float(found["eval/pass@2"]) == 1.0  # of the first problem alone
    close.assert_near(found["eval/accuracy"], 1 / 3)
