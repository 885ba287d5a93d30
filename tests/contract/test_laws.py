"""Laws of each kind: baselines and their shifts, pairs and their swaps, divergences, values, reductions."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group, off_policy
from jaxrl_llm.losses import distill, kl, preference, reward, value
from tests import close

IDS = jnp.asarray([0, 0, 0, 0, 1, 1, 1, 2], jnp.int32)
REWARDS = jnp.asarray([1.0, 0.0, 0.5, 0.25, 2.0, -1.0, 0.0, 3.0], jnp.float32)
BINARY = jnp.asarray([1.0, 0, 0, 0, 1, 1, 0, 1], jnp.float32)
LENGTHS = jnp.asarray([3.0, 5, 2, 4, 1, 6, 2, 3], jnp.float32)


class Estimator(NamedTuple):
    """``shift``: what may be added to the rewards without a change; ``scale``: the power of a factor of all rewards."""

    function: object
    shift: str = "group"
    scale: int | None = 1
    rewards: object = REWARDS
    alone: bool = True  # a group of one gets 0
    centred: bool = False  # a group's advantages add up to 0


ESTIMATORS = {
    "grpo": Estimator(partial(group.group_normalized_advantages, eps=0.0), scale=0, centred=True),
    "dr_grpo": Estimator(group.dr_grpo_advantages, centred=True),
    "rloo": Estimator(group.rloo_advantages, centred=True),
    "gpg": Estimator(group.gpg_advantages, centred=True),
    "opo": Estimator(lambda r, ids: group.opo_advantages(r, ids, LENGTHS)),
    "reinforce_pp": Estimator(
        lambda r, ids: group.reinforce_pp_advantages(r, eps=0.0), shift="all", scale=0, alone=False
    ),
    "reinforce_pp_baseline": Estimator(partial(group.reinforce_pp_baseline_advantages, eps=0.0), scale=0),
    "lite_ppo": Estimator(partial(group.lite_ppo_advantages, eps=0.0), shift="all", scale=0),
    "pass_at_k": Estimator(partial(group.pass_at_k_advantages, k=2), shift="none", scale=None, rewards=BINARY),
    "hardness": Estimator(group.hardness_weighted_advantages, shift="none", scale=None, rewards=BINARY, centred=True),
    "opmd": Estimator(partial(off_policy.opmd_advantages, tau=0.5), scale=None),
    "red_drop": Estimator(off_policy.red_drop_advantages),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name):
    row = ESTIMATORS[name]
    plain = np.asarray(row.function(row.rewards, IDS))
    if row.shift != "none":
        shift = jnp.asarray([1.0, 1, 1, 1, -2, -2, -2, 5], jnp.float32) if row.shift == "group" else jnp.float32(3.0)
        # rewards of up to 8 are rounded, and divided by a deviation of a third or more
        close.assert_near(row.function(row.rewards + shift, IDS), plain, magnitude=3 * 8.0)
    if row.scale is not None:
        np.testing.assert_array_equal(row.function(4 * row.rewards, IDS), 4.0**row.scale * plain)  # powers of two
    if row.alone:
        assert plain[7] == 0
    if row.centred:
        close.assert_near(group.group_sum(jnp.asarray(plain), IDS), 0, magnitude=float(np.abs(plain).max()))
    equal = row.function(jnp.asarray([0.1] * 8, jnp.float32), IDS)
    assert not np.asarray(equal).any(), "equal rewards give exactly 0, whatever the rounding of their mean"
    assert plain[0] > plain[1], "the better response has the larger advantage"


PAIRS = {
    "dpo": (preference.dpo_loss, np.log(2)),
    "conservative": (partial(preference.dpo_loss, label_smoothing=0.1), np.log(2)),
    "robust": (preference.robust_dpo_loss, np.log(2)),
    "hinge": (preference.hinge_loss, 1.0),
    "ipo": (partial(preference.ipo_loss, tau=0.1), 25.0),
    "apo_zero": (preference.apo_zero_loss, 1.0),
    "apo_down": (preference.apo_down_loss, 1.0),
    "rpo": (partial(preference.rpo_loss, beta=0.1, eta=0.5), np.log(2) + 0.05),
    "orpo": (lambda w, r, *_: preference.orpo_loss(w, r, weight=0.1), 1 + 0.1 * np.log(2)),
    "simpo": (lambda w, r, *_: preference.simpo_loss(w, r, gamma=0.0), np.log(2)),
    "cpo": (lambda w, r, *_: preference.cpo_loss(w, r, likelihood_weight=1.0), np.log(2) + 1),
    "bradley_terry": (lambda w, r, *_: reward.bradley_terry_loss(w, r), np.log(2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    loss, at_zero = PAIRS[name]
    rng = np.random.default_rng(0)
    won, lost, ref_won, ref_lost = (jnp.asarray(-3 * rng.random(6) - 0.2, jnp.float32) for _ in range(4))
    there, back = loss(won, lost, ref_won, ref_lost), loss(lost, won, ref_lost, ref_won)
    close.assert_near(there.aux["margin"], -back.aux["margin"])
    np.testing.assert_array_equal(there.aux["accuracy"], there.aux["margin"] > 0)
    ones = -jnp.ones((1,), jnp.float32)
    close.assert_near(loss(ones, ones, ones, ones).loss, at_zero)
    # at a margin of zero the loss falls where the pair's margin grows
    slope = jax.grad(lambda w, r: loss(w, r, ones, ones).loss[0], (0, 1))(ones, ones)
    assert float(slope[0][0] - slope[1][0]) < 0


@pytest.mark.parametrize("function", [kl.k1, kl.k2, kl.k3, kl.absolute, kl.kl_gradient_terms, kl.k3_gradient_terms])
def test_divergences_from_samples(function):
    rng = np.random.default_rng(1)
    logp, mask = jnp.asarray(-rng.random((3, 4)), jnp.float32), jnp.ones((3, 4), bool)
    other = jnp.asarray(-rng.random((3, 4)), jnp.float32)
    assert not np.asarray(function(logp, logp, mask)).any()
    assert not np.asarray(jax.grad(lambda x: function(x, logp, mask).sum())(logp)).any()
    if function is not kl.k1:
        assert (np.asarray(function(logp, other, mask)) >= 0).all()
    # a token 50 nats away stays finite, in value and in gradient
    far = jax.value_and_grad(lambda x: function(x, logp - 50.0, mask).sum())(logp)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(far))


@pytest.mark.parametrize("function", [distill.forward_kl_loss, distill.reverse_kl_loss, distill.jsd_loss])
def test_divergences_of_distributions(function):
    rng = np.random.default_rng(2)
    student, teacher = (jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32) for _ in range(2))
    mask = jnp.ones((2, 3), bool)
    size = float(jnp.abs(student).max()) + 3.0
    close.assert_near(function(student, student + 3.0, mask).loss, 0, terms=5, magnitude=size)
    slope = jax.grad(lambda x: function(x, student, mask).loss.sum())(student)
    close.assert_near(slope, 0, terms=5, magnitude=size)
    assert (np.asarray(function(student, teacher, mask).loss) > 0).all()
    # a token that both rule out changes nothing
    out = jnp.full((2, 3, 1), -jnp.inf, jnp.float32)
    wider = function(*(jnp.concatenate([x, out], axis=-1) for x in (student, teacher)), mask)
    close.assert_near(wider.loss, function(student, teacher, mask).loss, terms=6, magnitude=size)


def test_values():
    rng = np.random.default_rng(3)
    returns, mask = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32), jnp.ones((2, 3), bool)
    for loss in (value.squared_value_loss, lambda v, r, m: value.clipped_value_loss(v, r, r, m)):
        assert not np.asarray(loss(returns, returns, mask).loss).any()
        assert (np.asarray(loss(returns + 1.0, returns, mask).loss) > 0).all()
    for targets in (value.two_hot, value.hl_gauss):
        spread = targets(returns, low=-8.0, high=8.0, bins=33)
        close.assert_near(spread.sum(-1), 1, terms=33)
        mean = value.expected_values(jnp.log(jnp.maximum(spread, 1e-30)), low=-8.0, high=8.0)
        close.assert_near(mean, returns, terms=33, magnitude=8.0)


@pytest.mark.parametrize("mode", reduce.MODES)
def test_reductions_add_up(mode):
    rng = np.random.default_rng(4)
    terms, mask = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32), jnp.asarray(rng.random((8, 5)) < 0.6)
    total = reduce.denominator(mask, mode=mode)
    whole = reduce.tokens(terms, mask, mode=mode, length_tokens=5)
    for size in (1, 2, 4):
        parts = [
            reduce.tokens(terms[i : i + size], mask[i : i + size], mode=mode, length_tokens=5, total=total)
            for i in range(0, 8, size)
        ]
        close.assert_near(sum(parts), whole, terms=40, magnitude=float(jnp.abs(terms).max()))
    empty = jnp.zeros((8, 5), bool)
    assert float(reduce.tokens(jnp.full((8, 5), jnp.nan), empty, mode=mode, length_tokens=5)) == 0.0
    if mode != "constant":
        ones = reduce.tokens(jnp.ones((8, 5)), mask, mode=mode)
        wanted = float(mask.sum() / (mask.any(1)).sum()) if mode == "seq_sum" else 1.0
        close.assert_near(ones, wanted, terms=40)
