"""REC, mirror descent and AGRO: worked numbers, float64 loops, equalities with other losses, optima."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import off_policy as advantages_of
from jaxrl_llm.losses import off_policy, policy, sequence
from tests import close
from tests.reference.losses import each

rng = np.random.default_rng(3)
OLD = -2 * rng.random((6, 5))
LOGP = OLD + 0.4 * rng.normal(size=(6, 5))
ADVANTAGES = np.repeat(rng.normal(size=(6, 1)), 5, axis=1)
MASK = rng.random((6, 5)) < 0.7
MASK[:, 1] = True
IDS = jnp.array([0, 0, 0, 1, 1, 1])
REWARDS = jnp.asarray(rng.normal(size=6), jnp.float32)


def _f32(*arrays):
    return [jnp.asarray(np.where(MASK, x, np.nan), jnp.float32) for x in arrays] + [jnp.asarray(MASK)]


def _gradient(loss, *arguments):
    return jax.grad(lambda x: jnp.sum(loss(x, *arguments[1:]).loss))(arguments[0])


KEEP = {
    "all": (off_policy.keep_all, lambda r, a: True),
    "one_side": (off_policy.keep_one_side, lambda r, a: (a >= 0 and r <= 1.2) or (a <= 0 and r >= 0.8)),
    "two_sides": (off_policy.keep_two_sides, lambda r, a: 0.8 <= r <= 1.2),
    "ring": (
        off_policy.keep_ring,
        lambda r, a: 0.8 <= r <= 1.2 or (a >= 0 and r <= 0.4) or (a <= 0 and r >= 3.0),
    ),
}
WEIGH = {
    "none": (off_policy.unweighted, lambda r, a: 1.0),
    "ratio": (off_policy.importance_weights, lambda r, a: r),
    "advantage": (partial(off_policy.advantage_weights, temperature=0.5), lambda r, a: np.exp(a / 0.5)),
}


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("weigh", WEIGH)
def test_rec_against_float64(keep, weigh):
    def term(b, t):
        r, a = np.exp(LOGP[b, t] - OLD[b, t]), ADVANTAGES[b, t]
        return -a * WEIGH[weigh][1](r, a) * LOGP[b, t] if KEEP[keep][1](r, a) else 0.0

    got = off_policy.rec_loss(*_f32(LOGP, OLD, ADVANTAGES), keep=KEEP[keep][0], weigh=WEIGH[weigh][0])
    close.assert_near(got.loss, each(MASK, term))
    kept = each(MASK, lambda b, t: not KEEP[keep][1](np.exp(LOGP[b, t] - OLD[b, t]), ADVANTAGES[b, t]))
    np.testing.assert_array_equal(got.aux["clipped"], kept)


def test_one_side_with_importance_weights_has_the_gradient_of_ppo():
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    rec = _gradient(partial(off_policy.rec_loss, weigh=off_policy.importance_weights), *arguments)
    close.assert_near(rec, _gradient(policy.clipped_policy_loss, *arguments))


def test_without_clipping_and_weights_it_is_reinforce():
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    got = off_policy.rec_loss(*arguments, keep=off_policy.keep_all)
    want = policy.reinforce_loss(arguments[0], arguments[2], arguments[3])
    np.testing.assert_array_equal(got.loss, want.loss)


def test_the_sequence_ratio_gives_the_gradient_of_gspo_token():
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    loss = partial(off_policy.rec_loss, weigh=off_policy.importance_weights, ratio_of=off_policy.mean_ratio)
    gspo = partial(sequence.gspo_token_loss, clip_low=0.2, clip_high=0.2)
    close.assert_near(_gradient(loss, *arguments), _gradient(gspo, *arguments))


def test_asymre_is_reinforce_with_imitation():
    """A uniform pull towards every sample, of weight ``-delta``."""
    plain = advantages_of.dr_grpo_advantages(REWARDS, IDS)
    shifted = advantages_of.asymre_advantages(REWARDS, IDS, delta=-0.25)
    close.assert_near(shifted, plain + 0.25)


def test_mirror_descent_against_float64_and_its_slope():
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    tau = 0.3
    gap = [ADVANTAGES[b, 0] - tau * sum((LOGP - OLD)[b, t] for t in range(5) if MASK[b, t]) for b in range(6)]
    got = off_policy.mirror_descent_loss(*arguments, tau=tau)
    close.assert_near(got.loss, each(MASK, lambda b, t: gap[b] ** 2))

    def value(x):
        terms = off_policy.mirror_descent_loss(x, *arguments[1:], tau=tau)
        return reduce.tokens(terms.loss, arguments[3], mode="seq_mean", total=1.0)

    want = each(MASK, lambda b, t: -2 * tau * gap[b])
    close.assert_near(jax.grad(value)(arguments[0]), want)


def test_mirror_descent_starts_as_reinforce():
    _, old, advantages, mask = _f32(LOGP, OLD, ADVANTAGES)

    def value(x):
        terms = off_policy.mirror_descent_loss(x, old, advantages, mask, tau=0.3)
        return reduce.tokens(terms.loss, mask, mode="seq_mean")

    def reinforce(x):
        return reduce.tokens(policy.reinforce_loss(x, advantages, mask).loss, mask, mode="seq_sum")

    close.assert_near(jax.grad(value)(old), 0.6 * jax.grad(reinforce)(old))


def _agro(x, ref, rewards, ids, mask, **keywords):
    terms = off_policy.agro_loss(x, ref, rewards, ids, mask, **keywords)
    return reduce.tokens(terms.loss, mask, mode="seq_mean", total=1.0)


@pytest.mark.parametrize("ddof, value, slope", [(0, 0.06125, 0.0875), (1, 0.1225, 0.175)])
def test_agro_worked_example(ddof, value, slope):
    """Two samples, reward 1 and 0, log-ratio 0.2 and -0.4, beta 0.5: R = [0.9, 0.2]."""
    logp, mask = jnp.array([[0.2], [-0.4]]), jnp.ones((2, 1), bool)
    arguments = (jnp.zeros((2, 1)), jnp.array([1.0, 0.0]), jnp.array([0, 0]), mask)
    values = off_policy.regularised_rewards(arguments[1], logp, arguments[0], mask, beta=0.5)
    close.assert_near(values, [0.9, 0.2])
    # the mean over the group's two sequences is half the variance, its gradient that of the sheet
    got, gradient = jax.value_and_grad(lambda x: _agro(x, *arguments, beta=0.5, ddof=ddof) / 2)(logp)
    close.assert_near(got, value)
    close.assert_near(gradient[:, 0], [-slope, slope])


def test_agro_against_float64_with_a_masked_member():
    logp, ref, _, mask = _f32(LOGP, OLD, ADVANTAGES)
    empty = mask.at[1].set(False)
    rewards = REWARDS.at[1].set(jnp.nan)
    got = off_policy.agro_loss(logp, ref, rewards, IDS, empty, beta=0.2)
    for members in ((0, 2), (3, 4, 5)):
        ratio = {i: sum((LOGP - OLD)[i, t] for t in range(5) if MASK[i, t]) for i in members}
        values = {i: float(REWARDS[i]) - 0.2 * ratio[i] for i in members}
        mean, n = sum(values.values()) / len(members), len(members)
        for i in members:
            want = 0.5 * n / (n - 1) * (values[i] - mean) ** 2
            close.assert_near(np.asarray(got.loss[i])[MASK[i]], want)
    assert not np.asarray(got.loss[1]).any()
    gradient = jax.grad(_agro)(logp, ref, rewards, IDS, empty, beta=0.2)
    assert np.isfinite(gradient).all() and not np.asarray(gradient[1]).any()


def test_agro_vanishes_at_its_optimum_for_any_samples():
    """pi proportional to ref exp(r / beta): loss and gradient are 0 whatever was sampled."""
    ref, rewards, beta = jax.nn.log_softmax(jnp.arange(5.0)), jnp.array([0.3, -1.0, 2.0, 0.0, 1.0]), 0.7
    best = jax.nn.log_softmax(ref + rewards / beta)
    picks = jnp.array([0, 0, 1, 4, 2, 3])
    mask = jnp.ones((6, 1), bool)
    arguments = (ref[picks][:, None], rewards[picks], jnp.array([0, 0, 0, 1, 1, 1]), mask)
    loss, gradient = jax.value_and_grad(lambda x: _agro(x[picks][:, None], *arguments, beta=beta))(best)
    close.assert_near(jnp.sqrt(loss), 0.0)  # the loss is a sum of squares
    close.assert_near(gradient, 0.0)


TOKENS = np.array(
    [[9, 9, 9, 9, 9], [7, 1, 2, 3, 4], [7, 1, 2, 5, 4], [7, 1, 6, 3, 4], [7, 2, 2, 3, 4], [7, 1, 2, 3, 4]]
)
GOES_ON = np.array([[0] * 5, [0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 1, 1, 1, 0]], bool)


def _at_prefixes(x, beta=0.3, ddof=1):
    """The mean over rows of the token form by a loop over members and depths, in float64."""
    rewards, total = np.asarray(REWARDS, np.float64), 0.0
    for group in ([0], [1, 2, 3, 4, 5]):
        rows, per_row, agreed = [i for i in group if GOES_ON[i].any()], {}, {}
        for i in rows:
            there = [t for t in range(5) if GOES_ON[i, t]]
            per_row[i], agreed[i] = 0.0, 0
            for t in there:

                def left(j, t=t):
                    return rewards[j] - beta * sum((x - OLD)[j, s] for s in range(t, 5) if GOES_ON[j, s])

                def way(j, t=t):
                    return [int(TOKENS[j, s]) for s in range(t) if GOES_ON[j, s]]

                like = [j for j in rows if GOES_ON[j, t] and way(j) == way(i)]
                if len(like) > 1:
                    agreed[i] += 1
                    mean = sum(map(left, like)) / len(like)
                    per_row[i] += 0.5 * len(like) / (len(like) - ddof) * (left(i) - mean) ** 2
        total += sum(per_row.values()) / max(max(agreed.values(), default=0), 1)
    return total


def test_agro_at_prefixes_against_a_loop_and_its_gradient():
    mask, ids = jnp.asarray(GOES_ON), jnp.array([0, 1, 1, 1, 1, 1])
    logp, ref = (jnp.asarray(np.where(GOES_ON, x, np.nan), jnp.float32) for x in (LOGP, OLD))

    def total(x):
        rewards = REWARDS.at[0].set(jnp.nan)
        terms = off_policy.agro_token_loss(x, ref, rewards, ids, jnp.asarray(TOKENS), mask, beta=0.3)
        return reduce.tokens(terms.loss, mask, mode="seq_mean", total=1.0)

    value, slope = jax.value_and_grad(total)(logp)
    close.assert_near(value, _at_prefixes(LOGP))
    # the loss is quadratic in each number, so that central differences have no error but rounding
    for i, t in np.ndindex(6, 5):
        ahead, behind = LOGP.copy(), LOGP.copy()
        ahead[i, t] += 0.5
        behind[i, t] -= 0.5
        close.assert_near(slope[i, t], _at_prefixes(ahead) - _at_prefixes(behind) if GOES_ON[i, t] else 0.0, terms=30)


def test_agro_at_prefixes_is_agro_where_all_part_at_once():
    logp, ref, _, mask = _f32(LOGP, OLD, ADVANTAGES)
    tokens = jnp.arange(30).reshape(6, 5)
    mask = jnp.ones_like(mask).at[2, 3:].set(False)
    logp, ref = jnp.asarray(LOGP, jnp.float32), jnp.asarray(OLD, jnp.float32)
    whole = off_policy.agro_loss(logp, ref, REWARDS, IDS, mask, beta=0.2)
    parts = off_policy.agro_token_loss(logp, ref, REWARDS, IDS, tokens, mask, beta=0.2)
    close.assert_near(parts.loss, whole.loss)
    np.testing.assert_array_equal(parts.aux["shared"], np.eye(5)[np.zeros(6, int)])


def test_agro_at_prefixes_vanishes_at_the_optimum_of_a_tree():
    """All nine strings of two tokens of three: pi = ref exp(r / beta) / Z, by its conditionals; any samples."""
    local, beta = np.random.default_rng(5), 0.7
    ref, rewards = np.log(local.dirichlet(np.ones(9))).reshape(3, 3), local.normal(size=(3, 3))
    joint = np.exp(ref + rewards / beta)
    joint /= joint.sum()

    def by_token(p):
        return np.stack([np.log(np.repeat(p.sum(1), 3)), np.log((p / p.sum(1, keepdims=True)).ravel())], axis=1)

    picks = np.array([0, 0, 1, 2, 4, 5, 8, 3])
    tokens = jnp.asarray(np.stack(np.divmod(np.arange(9), 3), axis=1)[picks])
    ids, mask = jnp.zeros(8, jnp.int32), jnp.ones((8, 2), bool)
    arguments = jnp.asarray(by_token(np.exp(ref))[picks], jnp.float32), jnp.asarray(rewards.ravel()[picks], jnp.float32)

    def loss(x):
        terms = off_policy.agro_token_loss(x, *arguments, ids, tokens, mask, beta=beta)
        return jnp.sum(terms.loss), terms.aux["shared"]

    best = jnp.asarray(by_token(joint)[picks], jnp.float32)
    (value, shared), slope = jax.value_and_grad(loss, has_aux=True)(best)
    size = float(np.abs(rewards).max()) + beta * float(np.abs(best).max())
    close.assert_near(jnp.sqrt(value), 0.0, terms=8, magnitude=size)
    close.assert_near(slope, 0.0, terms=8, magnitude=size)
    assert shared[:, 0].all() and shared[:, 1].sum() == 7 and float(loss(best + 0.1 * best)[0]) > 0.01


def test_kimi_and_agro_differ_by_the_centring_of_the_log_ratio():
    """Where the group's mean log-ratio is 0, mirror descent (tau = beta) is 2 AGRO (ddof 0), value and gradient."""
    logp, ref = jnp.array([[0.3], [-0.1], [-0.2]]), jnp.zeros((3, 1))
    rewards, ids, mask = jnp.array([1.0, 0.0, 0.5]), jnp.zeros(3, jnp.int32), jnp.ones((3, 1), bool)
    centred = (rewards - jnp.mean(rewards))[:, None]
    kimi = jax.value_and_grad(lambda x: jnp.sum(off_policy.mirror_descent_loss(x, ref, centred, mask, tau=0.2).loss))
    agro = jax.value_and_grad(lambda x: _agro(x, ref, rewards, ids, mask, beta=0.2, ddof=0))
    for left, right in zip(kimi(logp), agro(logp), strict=True):
        close.assert_near(left, 2 * right)


def test_the_sampling_terms_give_the_full_on_policy_gradient():
    """By enumeration: grad of 1/2 Var_{y ~ pi}[R(y)] through the probabilities and through R."""
    logits, ref = jnp.array([0.2, -0.4, 1.0]), jnp.array([[0.0], [-1.0], [-0.5]])
    rewards = jnp.array([1.0, 0.0, 0.3])

    def exact(x):
        p = jax.nn.softmax(x)
        values = rewards - 0.4 * (jnp.log(p) - ref[:, 0])
        return 0.5 * jnp.sum(p * (values - jnp.sum(p * values)) ** 2)

    p = jax.nn.softmax(logits)
    counts = jnp.round(p / p.min())  # a group whose composition is the distribution, up to rounding
    weights = counts / counts.sum()
    logits = jnp.log(weights)
    picks = jnp.repeat(jnp.arange(3), counts.astype(jnp.int32), total_repeat_length=int(counts.sum()))

    def sampled(x):
        rows = jax.nn.log_softmax(x)[picks][:, None]
        arguments = (ref[picks], rewards[picks], jnp.zeros(picks.shape, jnp.int32), jnp.ones((len(picks), 1), bool))
        loss = off_policy.agro_loss(rows, *arguments, beta=0.4, ddof=0).loss
        return jnp.mean(loss + off_policy.agro_sampling_terms(rows, *arguments, beta=0.4))

    close.assert_near(jax.grad(sampled)(logits), jax.grad(exact)(logits))


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_weights_that_make_no_sense_are_refused(bad):
    arguments = _f32(LOGP, OLD, ADVANTAGES)
    with pytest.raises(ValueError, match="tau="):
        off_policy.mirror_descent_loss(*arguments, tau=bad)
    with pytest.raises(ValueError, match="beta="):
        off_policy.agro_loss(arguments[0], arguments[1], REWARDS, IDS, arguments[3], beta=bad)
    with pytest.raises(ValueError, match="beta="):
        off_policy.agro_token_loss(*arguments[:2], REWARDS, IDS, jnp.asarray(TOKENS), arguments[3], beta=bad)
    with pytest.raises(ValueError, match="tau="):
        advantages_of.log_mean_exp_baseline(REWARDS, IDS, tau=bad)
