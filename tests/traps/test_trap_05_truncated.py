"""Trap 5, truncated responses: three independent switches say whether a cut answer counts.

* Loss and its denominator: ``keep`` of ``make_estimate``.
* Baseline: ``valid`` of the advantage function.
* Metrics: ``valid`` of the rewards; a cut answer counts there unless the scorer itself failed on it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.train.methods.builders import make_estimate
from jaxrl_llm.train.online import rollout_metrics
from jaxrl_llm.types import Rewards
from tests import close
from tests.traps.tables import params, problems, rollout, table_policy


def _case():
    table = problems()
    keys = jax.random.split(jax.random.key(5), 24)
    out = rollout(params(), table.tokens, table.valid, keys, jnp.arange(6, dtype=jnp.int32))
    assert 0 < int(out.truncated.sum()) < 24
    value = jnp.asarray(np.random.default_rng(0).random(24), jnp.float32)
    return out, Rewards(value, jnp.ones((24,), bool))


def _whole(out, rewards):
    return group.per_token(group.dr_grpo_advantages(rewards.value, out.group_ids, valid=rewards.valid), out.mask)


def _without(out, rewards):
    used = rewards.valid & ~out.truncated
    return group.per_token(group.dr_grpo_advantages(rewards.value, out.group_ids, valid=used), out.mask)


def _estimate(out, rewards, advantages=_whole, keep=None, reduction="token_mean"):
    return make_estimate(table_policy(), advantages, keep=keep, reduction=reduction)(params(), {}, out, rewards)


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean", "seq_sum"])
def test_leaving_the_loss_leaves_the_denominator_too(reduction):
    out, rewards = _case()
    counted = _estimate(out, rewards, reduction=reduction)
    left = _estimate(out, rewards, keep=lambda o, r: ~o.truncated, reduction=reduction)
    cut = np.asarray(out.truncated)
    assert not np.asarray(left.mask)[cut].any()
    np.testing.assert_array_equal(np.asarray(left.mask)[~cut], np.asarray(counted.mask)[~cut])
    assert float(left.total) == float(reduce.denominator(out.mask & ~out.truncated[:, None], mode=reduction))
    assert float(left.total) < float(counted.total)


def test_leaving_the_loss_does_not_move_the_baseline():
    out, rewards = _case()
    counted, left = _estimate(out, rewards), _estimate(out, rewards, keep=lambda o, r: ~o.truncated)
    kept = np.asarray(left.mask)
    np.testing.assert_array_equal(np.asarray(left.advantages)[kept], np.asarray(counted.advantages)[kept])


def test_leaving_the_baseline_is_a_switch_of_its_own():
    out, rewards = _case()
    counted, left = _estimate(out, rewards), _estimate(out, rewards, advantages=_without)
    assert float(left.total) == float(counted.total)
    np.testing.assert_array_equal(left.mask, counted.mask)
    assert not np.asarray(left.advantages)[np.asarray(out.truncated)].any()
    assert np.abs(np.asarray(left.advantages - counted.advantages))[~np.asarray(out.truncated)].max() > 0


def test_the_metrics_count_cut_answers_and_name_their_share():
    out, rewards = _case()
    metrics = rollout_metrics(out, rewards)
    close.assert_relative(metrics["reward/mean"], np.mean(rewards.value))
    close.assert_relative(metrics["length/truncated_fraction"], np.mean(out.truncated))
