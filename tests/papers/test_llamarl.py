"""LlamaRL: capped weights against numbers by hand, their gradient, and the law of lockstep and overlap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.systems.parts.overlap_law import best_split, lockstep_seconds, makespan
from jaxrl_llm.losses.off_policy import aipo_loss
from jaxrl_llm.losses.policy import cispo_loss, reinforce_loss
from tests import close
from tests.close import doubles

MASK = jnp.ones((1, 4), bool)
MU = jnp.full((1, 4), -1.0)
LOGP = MU + jnp.log(jnp.array([[0.5, 1.0, 3.0, 20.0]]))  # ratios
ADVANTAGES = jnp.array([[1.0, -1.0, 1.0, -1.0]])


@pytest.mark.parametrize("cap, weights", [(4.0, [0.5, 1.0, 3.0, 4.0]), (2.0, [0.5, 1.0, 2.0, 2.0])])
def test_weights_are_capped_above_only_and_have_no_gradient(cap, weights):
    loss, gradient = jax.value_and_grad(lambda x: jnp.sum(aipo_loss(x, MU, ADVANTAGES, MASK, cap=cap).loss))(LOGP)
    weights = np.array(weights)
    close.assert_near(gradient[0], -weights * np.asarray(ADVANTAGES[0]), magnitude=0)
    close.assert_near(loss, -np.sum(weights * np.asarray(ADVANTAGES * LOGP)[0]), magnitude=0)


def test_against_a_loop_in_float64():
    rng = np.random.default_rng(0)
    logp, mu, advantages = rng.normal(size=(3, 3, 5))
    mask = rng.random((3, 5)) < 0.7
    want = np.zeros((3, 5))
    for b in range(3):
        for t in range(5):
            if mask[b, t]:
                want[b, t] = -min(np.exp(logp[b, t] - mu[b, t]), 1.5) * advantages[b, t] * logp[b, t]
    found = aipo_loss(*(jnp.asarray(x, jnp.float32) for x in (logp, mu, advantages)), jnp.asarray(mask), cap=1.5)
    close.assert_near(found.loss, want)


def test_on_policy_it_is_reinforce_and_with_an_open_side_cispo():
    def gradient(loss):
        return jax.grad(lambda x: jnp.sum(loss(x)))(LOGP)

    close.assert_near(
        gradient(lambda x: aipo_loss(x, LOGP, ADVANTAGES, MASK).loss),
        gradient(lambda x: reinforce_loss(x, ADVANTAGES, MASK).loss),
        magnitude=0,
    )
    same = cispo_loss(LOGP, MU, ADVANTAGES, MASK, clip_low=1.0, clip_high=9.0).loss
    np.testing.assert_array_equal(aipo_loss(LOGP, MU, ADVANTAGES, MASK, cap=10.0).loss, same)
    open_side = jax.grad(lambda x: jnp.sum(aipo_loss(x, MU, ADVANTAGES, MASK, cap=float("inf")).loss))(LOGP)
    close.assert_near(open_side[0], [-0.5, 1.0, -3.0, 20.0], magnitude=0)


def test_a_cap_below_one_is_refused():
    with pytest.raises(ValueError, match="cap=0.5 must be at least 1"):
        aipo_loss(LOGP, MU, ADVANTAGES, MASK, cap=0.5)


def test_makespan_against_events_by_hand():
    # batches end at 3, 6, 9; updates at 5, 8, 11
    assert makespan([3, 3, 3], [2, 2, 2], staleness=1) == 11.0
    assert makespan([3, 3, 3], [2, 2, 2], staleness=0) == 15.0
    # a trainer that is slower bounds it: 2, then 5, 10, 15; with staleness 1 the third batch waits for the first update
    assert makespan([2, 2, 2], [5, 5, 5], staleness=1) == 17.0
    # one slow batch is hidden where others are ahead
    assert makespan([1, 1, 9, 1], [4, 4, 4, 4], staleness=3) == 1 + 4 + 4 + 2 + 4 + 4
    assert makespan([], [], staleness=2) == 0.0


def test_more_staleness_never_takes_longer():
    rng = np.random.default_rng(1)
    generate, train = rng.exponential(3, 40).tolist(), rng.exponential(2, 40).tolist()
    times = [makespan(generate, train, staleness=k) for k in range(6)]
    assert times == sorted(times, reverse=True) and times[0] == doubles(sum(generate) + sum(train))
    assert times[-1] >= max(sum(generate), sum(train))


def test_apart_is_faster_only_where_freed_memory_helps():
    def shared(work):
        return lambda n: work / n

    def alone(work):
        return lambda n: work / n / 1.25  # a role without the other's memory runs larger batches

    assert best_split(shared(30), shared(20), 10)[1] == doubles(lockstep_seconds(shared(30), shared(20), 10))
    assert best_split(alone(30), alone(20), 10)[1] < lockstep_seconds(shared(30), shared(20), 10)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: makespan([1], [1, 2], staleness=0), "generate_s has 1 batches, train_s 2 updates"),
        (lambda: makespan([1], [1], staleness=-1), "staleness=-1 must not be negative"),
        (lambda: best_split(lambda n: 1.0, lambda n: 1.0, 1), "devices=1 must be at least 2"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
