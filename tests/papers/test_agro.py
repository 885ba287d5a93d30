"""Off-policy on a bandit of 64 strings: AGRO reaches the optimum exactly, the naive gradient does not."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient import agro
from jaxrl_llm import reduce
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.off_policy import agro_loss
from jaxrl_llm.losses.policy import reinforce_loss
from tests import close

ROWS, BETA = 64, 0.5
REACHED = 1e-3  # nats of 0.1 and more at the start, after 4000 steps of descent
rng = np.random.default_rng(0)
REWARDS = jnp.asarray(rng.random(ROWS) < 0.2, jnp.float32)
REFERENCE = jax.nn.log_softmax(jnp.asarray(rng.normal(size=ROWS), jnp.float32))
OPTIMUM = jax.nn.log_softmax(REFERENCE + REWARDS / BETA)
# every string once: the sampling distribution is uniform, and neither the policy nor the reference
MASK, IDS = jnp.ones((ROWS, 1), bool), jnp.zeros(ROWS, jnp.int32)


def _agro(logits):
    logp = jax.nn.log_softmax(logits)[:, None]
    terms = agro_loss(logp, REFERENCE[:, None], REWARDS, IDS, MASK, beta=BETA, ddof=0)
    return reduce.tokens(terms.loss, MASK, mode="seq_mean")


def _naive(logits):
    logp = jax.nn.log_softmax(logits)[:, None]
    advantages = (REWARDS - jnp.mean(REWARDS))[:, None]
    sampled = jnp.full((ROWS, 1), -jnp.log(ROWS))
    pull = kl.weighted_kl_gradient_terms(logp, sampled, REFERENCE[:, None], MASK)
    return reduce.tokens(reinforce_loss(logp, advantages, MASK).loss + BETA * pull, MASK, mode="seq_mean")


def _distance(loss, steps=4000):
    """KL(pi || optimum) after gradient descent from the reference."""
    step = jax.value_and_grad(loss)

    @jax.jit
    def run(logits):
        return jax.lax.fori_loop(0, steps, lambda _, x: x - 8.0 * step(x)[1], logits)

    logp = jax.nn.log_softmax(run(REFERENCE))
    return float(jnp.sum(jnp.exp(logp) * (logp - OPTIMUM)))


def test_agro_finds_the_optimum_from_foreign_samples_and_the_naive_gradient_does_not():
    start = float(jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - OPTIMUM)))
    assert start > 0.1
    assert _distance(_agro) < REACHED
    assert _distance(_naive) > 20 * REACHED


def test_the_optimum_is_a_fixed_point():
    loss, gradient = jax.value_and_grad(_agro)(OPTIMUM)
    rounding = BETA * close.near(OPTIMUM, OPTIMUM, terms=1, magnitude=0.0)  # of a regularised reward
    assert float(loss) <= rounding**2 and float(jnp.abs(gradient).max()) <= BETA * rounding / ROWS


def test_pairs_of_a_group_against_a_loop():
    local = np.random.default_rng(1)
    logp, ref = local.normal(size=(6, 3)), local.normal(size=(6, 3))
    mask, rewards = local.random((6, 3)) < 0.7, np.array([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    ids = np.array([0] * 4 + [1] * 2)
    share, expected = ((logp - ref) * mask).sum(1), np.zeros(6)
    for i in range(6):
        lost = [j for j in range(6) if ids[i] == ids[j] and rewards[i] > rewards[j]]
        expected[i] = np.mean([np.log1p(np.exp(-0.3 * (share[i] - share[j]))) for j in lost]) if lost else 0.0
    fields = {"ref_logp": ref, "mask": mask, "group_ids": ids, "rewards": rewards}
    given = {k: jnp.asarray(x, bool if k == "mask" else jnp.int32 if k == "group_ids" else jnp.float32)
             for k, x in fields.items()}  # fmt: skip
    batch = types.SimpleNamespace(**given, extras={"rewards": given["rewards"]})
    value = lambda x: agro.pairs(x, batch, 0.3).loss  # noqa: E731
    found = value(jnp.asarray(logp, jnp.float32))
    close.assert_near(found, np.where(mask, expected[:, None], 0.0))
    slope = np.asarray(jax.grad(lambda x: jnp.sum(value(x)))(jnp.asarray(logp, jnp.float32)))
    assert (slope[[0, 2]] <= 0).all() and (slope[[1, 3]] >= 0).all() and not slope[4:].any()  # equal rewards: nothing


def test_what_nobody_could_judge_neither_wins_nor_loses():
    """A verifier that failed leaves a reward of 0 and an empty mask: a right answer does not beat that."""
    logp, ref = jnp.asarray([[-1.0], [-2.0], [-3.0]]), jnp.full((3, 1), -2.0)
    mask, rewards = jnp.asarray([[True], [False], [True]]), jnp.asarray([1.0, 0.0, 0.0])
    batch = types.SimpleNamespace(
        ref_logp=ref, mask=mask, group_ids=jnp.zeros(3, jnp.int32), extras={"rewards": rewards}
    )
    found = np.asarray(agro.pairs(logp, batch, 0.5).loss)
    close.assert_near(found[:, 0], [np.log1p(np.exp(-0.5 * (1.0 - -1.0))), 0.0, 0.0])
