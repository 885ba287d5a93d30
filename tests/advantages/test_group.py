import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import group, off_policy, pools, process, whiten
from tests import close

REWARDS = jnp.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 3.0, 2.0])
IDS = jnp.array([0, 0, 0, 0, 1, 1, 2, 3])
ESTIMATORS = {
    "grpo": group.group_normalized_advantages,
    "dr_grpo": group.dr_grpo_advantages,
    "rloo": group.rloo_advantages,
    "gpg": group.gpg_advantages,
    "opo": lambda r, g, valid=None: group.opo_advantages(r, g, jnp.arange(1.0, r.shape[0] + 1), valid=valid),
    "pass_at_k": lambda r, g, valid=None: group.pass_at_k_advantages(r, g, k=2, valid=valid),
    "lite_ppo": group.lite_ppo_advantages,
    "pp_baseline": group.reinforce_pp_baseline_advantages,
}


def _loop(rewards, ids, one_group):
    out = np.zeros(len(rewards))
    for g in set(ids.tolist()):
        where = np.flatnonzero(ids == g)
        out[where] = one_group(rewards[where].astype(np.float64))
    return out


def _random():
    rng = np.random.default_rng(0)
    return rng.normal(size=24), rng.integers(0, 6, 24)


@pytest.mark.parametrize("ddof", [0, 1])
def test_grpo_against_float64(ddof):
    rewards, ids = _random()
    want = _loop(rewards, ids, lambda r: (r - r.mean()) / (r.std(ddof=ddof) + 1e-6) if len(r) > 1 else 0 * r)
    got = group.group_normalized_advantages(jnp.asarray(rewards, jnp.float32), jnp.asarray(ids), ddof=ddof)
    close.assert_near(got, want)


def test_rloo_opo_dr_against_float64():
    rewards, ids = _random()
    args = (jnp.asarray(rewards, jnp.float32), jnp.asarray(ids))
    dr = _loop(rewards, ids, lambda r: r - r.mean())
    close.assert_near(group.dr_grpo_advantages(*args), dr)
    rloo = _loop(rewards, ids, lambda r: (r - (r.sum() - r) / (len(r) - 1)) if len(r) > 1 else 0 * r)
    close.assert_near(group.rloo_advantages(*args), rloo)
    lengths = np.arange(1.0, 25)
    baseline = {g: (lengths * rewards)[ids == g].sum() / lengths[ids == g].sum() for g in set(ids.tolist())}
    opo = np.array([0 if (ids == g).sum() == 1 else r - baseline[g] for r, g in zip(rewards, ids, strict=True)])
    close.assert_near(group.opo_advantages(*args, jnp.asarray(lengths, jnp.float32)), opo)


def test_pass_at_k_against_every_subset():
    """n = 5 with 2 right, k = 3: advantages averaged over all 10 subsets that hold the member."""
    import itertools

    right = np.array([1, 1, 0, 0, 0])
    scores = {s: right[list(s)].max() for s in itertools.combinations(range(5), 3)}
    values = np.array(list(scores.values()), float)
    mean, spread = values.mean(), values.std()
    want = [np.mean([(v - mean) / spread for s, v in scores.items() if i in s]) for i in range(5)]
    got = group.pass_at_k_advantages(jnp.asarray(right, jnp.float32), jnp.zeros(5, jnp.int32), k=3, eps=0.0)
    close.assert_near(got, want)
    # k = 1 is GRPO with the population standard deviation
    one = group.pass_at_k_advantages(jnp.asarray(right, jnp.float32), jnp.zeros(5, jnp.int32), k=1, eps=0.0)
    grpo = group.group_normalized_advantages(jnp.asarray(right, jnp.float32), jnp.zeros(5, jnp.int32), ddof=0, eps=0.0)
    close.assert_near(one, grpo)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(name):
    """Trap 12: also when the mean of equal rewards rounds."""
    rewards = jnp.full((7,), 0.1)
    got = ESTIMATORS[name](rewards, jnp.array([0, 0, 0, 0, 0, 1, 1]))
    assert not np.asarray(got).any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_singleton_groups_give_zero(name):
    assert not np.asarray(ESTIMATORS[name](jnp.array([1.0, 0.0, 1.0]), jnp.array([0, 1, 2]))).any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_invalid_members_have_no_influence(name):
    rewards = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0])
    ids = jnp.array([0, 0, 0, 1, 1])
    with_bad = jnp.array([1.0, 0.0, 0.0, 1.0, 0.0, jnp.nan, 50.0])
    valid = jnp.array([True] * 5 + [False] * 2)
    got = ESTIMATORS[name](with_bad, jnp.array([0, 0, 0, 1, 1, 0, 1]), valid=valid)
    close.assert_near(got[:5], ESTIMATORS[name](rewards, ids))
    assert got[5:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_permuting_sequences_permutes_advantages(name):
    if name == "opo":
        pytest.skip("its lengths would have to be permuted too")
    order = np.random.default_rng(0).permutation(8)
    got = ESTIMATORS[name](REWARDS[order], IDS[order])
    close.assert_near(got, ESTIMATORS[name](REWARDS, IDS)[order])


def test_laws():
    shift = group.group_normalized_advantages(REWARDS + 5, IDS)
    close.assert_near(shift, group.group_normalized_advantages(REWARDS, IDS))
    close.assert_near(group.dr_grpo_advantages(3 * REWARDS, IDS), 3 * group.dr_grpo_advantages(REWARDS, IDS))
    # G / (G - 1) relates RLOO to Dr.GRPO
    close.assert_near(group.rloo_advantages(REWARDS, IDS)[:4], 4 / 3 * group.dr_grpo_advantages(REWARDS, IDS)[:4])


def test_filters_by_the_sheet():
    rewards = jnp.array([1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0], jnp.float32)
    ids = jnp.repeat(jnp.arange(4), 4)
    keep = group.mean_within(rewards, ids, low=0.25, high=0.75).reshape(4, 4)
    assert keep.all(axis=1).tolist() == [True, False, True, False]
    assert group.mean_within(rewards, ids, low=0.0, high=1.0).all()
    informative = group.informative_groups(rewards, ids, low=0.0, high=1.0).reshape(4, 4)
    assert informative.all(axis=1).tolist() == [True, False, True, False]
    # a mean at a bound is within: a half and a quarter
    for low, high in ((0.25, 0.5), (0.0, 0.25), (0.5, 1.0)):
        within = group.informative_groups(rewards, ids, low=low, high=high)[::4].tolist()
        assert within == [high >= 0.5, False, low <= 0.25, False]


def test_the_widest_groups_against_a_loop():
    """By deviations in float64, over groups of unequal size of which some members have no reward."""
    rng = np.random.default_rng(3)
    for share, ids in ((0.25, np.repeat(np.arange(8), 3)), (0.6, rng.integers(0, 9, 24)), (1.0, np.repeat([4, 2], 12))):
        rewards, valid = rng.normal(size=24).astype(np.float32), rng.random(24) < 0.8
        there = np.unique(ids[valid])
        wide = {g: rewards[(ids == g) & valid].astype(np.float64).std() for g in there}
        best = sorted(there, key=lambda g: (-wide[g], g))[: max(1, int(share * len(there) + 1e-4))]
        given = jnp.asarray(rewards), jnp.asarray(ids, jnp.int32)
        assert (
            group.widest_groups(*given, share=share, valid=jnp.asarray(valid)).tolist() == np.isin(ids, best).tolist()
        )
    equal = jnp.ones(6), jnp.repeat(jnp.arange(3), 2)
    assert group.widest_groups(*equal, share=0.1).tolist() == [True, True, False, False, False, False]
    # 0.53 of 100 in float32 is a little less than 53
    many = jnp.arange(1.0, 101.0)[:, None] * jnp.array([[0.0, 1.0]]), jnp.repeat(jnp.arange(100), 2)
    assert int(group.widest_groups(many[0].reshape(-1), many[1], share=0.53).sum()) == 2 * 53
    with pytest.raises(ValueError, match="share=0"):
        group.widest_groups(*equal, share=0.0)


def test_batch_whitening():
    got = group.batch_whitened(jnp.array([1.0, 3.0, 99.0]), valid=jnp.array([True, True, False]), eps=0.0)
    assert got.tolist() == [-1.0, 1.0, 0.0]


def test_lite_ppo_against_float64_and_the_other_deviation():
    rewards, ids = _random()
    args = (jnp.asarray(rewards, jnp.float32), jnp.asarray(ids))
    want = _loop(rewards, ids, lambda r: r - r.mean()) / (rewards.std() + 1e-6)
    close.assert_near(group.lite_ppo_advantages(*args), want)
    pair, groups = jnp.array([1.0, 0, 1, 1]), jnp.array([0, 0, 1, 1])
    centred = group.reinforce_pp_baseline_advantages(pair, groups, eps=0.0)
    close.assert_printed(centred, [1.4142, -1.4142, 0.0, 0.0], 4)


def test_what_the_deviation_of_the_group_does():
    """Seven right of eight: the wrong one weighs 2.6 times its own deviation; twice the reward changes nothing."""
    rewards, ids = jnp.array([1.0] * 7 + [0.0]), jnp.zeros(8, jnp.int32)
    normalised = group.group_normalized_advantages(rewards, ids, ddof=0, eps=0.0)
    close.assert_printed(normalised[7], -2.6458, 4)
    close.assert_near(group.group_normalized_advantages(2 * rewards, ids, ddof=0, eps=0.0), normalised)


FAR = jnp.array([10000.0, 10001.0, 10003.0, 10000.0, 10002.0, 10007.0, 10001.0])  # exact in float32; their sum is not
FAR_IDS = jnp.array([0, 0, 0, 1, 1, 1, 1])
SHIFTED = {name: f for name, f in ESTIMATORS.items() if name != "pass_at_k"}


@pytest.mark.parametrize("name", SHIFTED)
def test_rewards_far_from_zero_lose_nothing(name):
    """Near 1e4 a float32 sum is off by 1e-3; advantages are those of the same rewards near 0, to rounding."""
    near, far = SHIFTED[name](FAR - 10000.0, FAR_IDS), SHIFTED[name](FAR, FAR_IDS)
    close.assert_near(far, near)
    equal = SHIFTED[name](jnp.full((7,), 10000.1), FAR_IDS)
    assert not np.asarray(equal).any()


def test_whitened_tokens_and_pools_far_from_zero():
    values, mask = FAR.reshape(1, 7), jnp.ones((1, 7), bool).at[0, 6].set(False)
    near = whiten.whitened_tokens(values - 10000.0, mask)
    close.assert_near(whiten.whitened_tokens(values, mask), near)
    weights = jnp.ones(1)
    far = whiten.reweighted_tokens(values, weights, mask)
    close.assert_near(far, whiten.reweighted_tokens(values - 10000.0, weights, mask))
    for std in (False, True):
        found = [pools.pool_advantages(x, mask, std=std) for x in (values, values - 10000.0)]
        close.assert_near(*found)
    found = [process.group_token_normalized(x, jnp.zeros(1, jnp.int32), mask) for x in (values, values - 10000.0)]
    close.assert_near(*found)
    found = [off_policy.opmd_advantages(x, FAR_IDS, tau=0.5) for x in (FAR, FAR - 10000.0)]
    close.assert_near(*found)
