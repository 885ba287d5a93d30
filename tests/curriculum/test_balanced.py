"""Draws by success: frequencies, moving average, floor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.curriculum import balanced, epochs, pairs
from tests import close


def test_first_draws_follow_the_probabilities():
    sampler = balanced.make_balanced(weigh=balanced.failure, floor=1e-6)
    state = sampler.init(2)._replace(success=jnp.array([0.25, 0.75]))
    keys = jax.random.split(jax.random.key(0), 4000)
    ids = jax.vmap(lambda k: sampler.draw(state, k, 1)[0][0])(keys)
    close.assert_share(np.mean(np.asarray(ids) == 0), 0.75, 4000)


def test_a_draw_has_no_repeats_and_the_average_moves():
    sampler = balanced.make_balanced(rate=0.5, prior=0.5)
    ids, state = sampler.draw(sampler.init(6), jax.random.key(1), 6)
    assert sorted(ids.tolist()) == list(range(6))
    valid = jnp.array([True, True, False])
    state = sampler.update(state, jnp.array([2, 2, 3]), jnp.array([1.0, 0.5, 1.0]), valid)
    np.testing.assert_array_equal(state.success, [0.5, 0.5, 0.625, 0.5, 0.5, 0.5])
    assert state.visits.tolist() == [0, 0, 2, 0, 0, 0]
    with pytest.raises(ValueError, match="n=7"):
        sampler.draw(state, jax.random.key(1), 7)


def test_worked_weights():
    state = balanced.BalancedState(jnp.array([0.0, 0.5, 0.9]), jnp.zeros(3, jnp.int32))
    # p(1-p) + 0.05 = 0.05, 0.30, 0.14; 1-p + 0.05 = 1.05, 0.55, 0.15
    close.assert_relative(balanced.draw_probabilities(state), np.array([5, 30, 14]) / 49)
    chances = balanced.draw_probabilities(state, weigh=balanced.failure)
    close.assert_relative(chances, np.array([105, 55, 15]) / 175)


def test_what_can_be_learned():
    success = np.linspace(0.0, 1.0, 11)
    for beta in (0.01, 0.5, 1.0, 5.0):
        # KL(pi || pi*) of a coin from its definition, e^(1/beta) kept out of the logarithm
        with np.errstate(divide="ignore"):
            normaliser = np.logaddexp(np.log(success) + 1 / beta, np.log(1 - success))
        expected = np.where((success > 0) & (success < 1), normaliser - success / beta, 0.0)
        found = balanced.reward_kl(jnp.asarray(success, jnp.float32), beta=beta)
        close.assert_near(found, expected)
        assert float(jax.grad(lambda p, b=beta: balanced.reward_variance(p[None], beta=b)[0])(jnp.array(0.5))) == 0.0
    # the quadratic form is the limit of large beta, and no bound from below: at p = 0.9 it exceeds the exact value
    p = jnp.array([0.1, 0.5, 0.9])
    beta = 20.0  # the limit is reached to first order in 1 / beta
    ratio = balanced.reward_kl(p, beta=beta) / balanced.reward_variance(p, beta=beta)
    np.testing.assert_allclose(ratio, np.ones(3), rtol=0, atol=1 / beta)
    assert bool((balanced.reward_variance(p, beta=1.0) > balanced.reward_kl(p, beta=1.0))[2])
    with pytest.raises(ValueError, match="beta"):
        balanced.reward_kl(p, beta=0.0)


def _loop(success, visits, ids, scores, valid, rate):
    success, visits = success.astype(np.float64).copy(), visits.copy()
    for problem in set(ids):
        mine = [min(max(s, 0.0), 1.0) for i, s, v in zip(ids, scores, valid, strict=True) if i == problem and v]
        if mine:
            success[problem] = (1 - rate) * success[problem] + rate * sum(mine) / len(mine)
            visits[problem] += len(mine)
    return success, visits


def test_updates_agree_with_a_loop():
    rng = np.random.default_rng(0)
    sampler = balanced.make_balanced(rate=0.3, prior=0.5)
    state = sampler.init(7)
    success, visits = np.full(7, 0.5), np.zeros(7, int)
    for _ in range(5):
        ids, scores, valid = rng.integers(0, 7, 6), rng.uniform(-0.5, 1.5, 6), rng.random(6) < 0.7
        scores[~valid] = np.nan  # what an invalid score holds is nobody's business
        args = jnp.asarray(ids, jnp.int32), jnp.asarray(scores, jnp.float32), jnp.asarray(valid)
        state = sampler.update(state, *args)
        success, visits = _loop(success, visits, ids.tolist(), scores.tolist(), valid.tolist(), 0.3)
    close.assert_relative(state.success, success)
    assert state.visits.tolist() == visits.tolist()


def test_pairs_are_drawn_as_successive_draws_without_replacement():
    """Gumbel top-2: P(i then j) = w_i w_j / (1 - w_i), so P(2 is among the two) follows."""
    weights = np.array([0.5, 0.3, 0.2])
    sampler = balanced.make_balanced(weigh=lambda p: p, floor=1e-7)
    state = sampler.init(3)._replace(success=jnp.asarray(weights, jnp.float32))
    keys = jax.random.split(jax.random.key(3), 4000)
    ids = jax.vmap(lambda k: sampler.draw(state, k, 2)[0])(keys)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected = {(i, j): weights[i] * weights[j] / (1 - weights[i]) for i, j in pairs}
    for pair, chance in expected.items():
        found = np.mean(np.all(np.asarray(ids) == np.asarray(pair), axis=1))
        close.assert_share(found, chance, 4000)


def test_a_solved_prompt_is_still_drawn_at_the_floor():
    sampler = balanced.make_balanced(floor=0.05)
    state = sampler.init(2)._replace(success=jnp.array([1.0, 0.5]))
    keys = jax.random.split(jax.random.key(4), 4000)
    ids = jax.vmap(lambda k: sampler.draw(state, k, 1)[0][0])(keys)
    close.assert_share(np.mean(np.asarray(ids) == 0), 0.05 / 0.35, 4000)


def test_state_is_an_axis_of_vmap_under_jit():
    sampler = balanced.make_balanced()
    states = jax.vmap(lambda _: sampler.init(4))(jnp.arange(2))
    ids, _ = jax.jit(jax.vmap(lambda s, k: sampler.draw(s, k, 3)))(states, jax.random.split(jax.random.key(0), 2))
    assert ids.shape == (2, 3)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"prior": 2.0}, {"floor": 0.0}])
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        balanced.make_balanced(**wrong)


def test_epochs_are_orders_of_their_own_however_they_are_cut():
    """Draws of 7, which run over the ends of epochs of 12, say what draws of 12 and one of 48 say."""

    def drawn(size, seed=0):
        sampler = epochs.make_epochs(seed)
        state, found = sampler.init(12), []
        for step in range(48 // size):
            ids, state = sampler.draw(state, jax.random.key(step), size)
            found += ids.tolist()
        return found

    whole = drawn(12)
    orders = [tuple(whole[k : k + 12]) for k in range(0, 48, 12)]
    assert all(sorted(order) == list(range(12)) for order in orders) and len(set(orders)) == 4
    assert drawn(7) == whole[:42] and drawn(48) == whole
    assert drawn(12, seed=1) != whole


def test_epochs_without_a_seed_are_those_of_the_first_key():
    """What later draws get for a key changes nothing; runs beside each other have orders of their own."""
    sampler = epochs.make_epochs(None)

    def drawn(first, later, size):
        state, found = sampler.init(12), []
        for step in range(24 // size):
            ids, state = sampler.draw(state, jax.random.key(later + step if step else first), size)
            found += ids.tolist()
        return found

    whole = drawn(3, 100, 12)
    assert sorted(whole[:12]) == sorted(whole[12:]) == list(range(12)) and whole[:12] != whole[12:]
    assert drawn(3, 500, 12) == whole and drawn(3, 700, 8) == whole
    assert drawn(4, 100, 12) != whole
    states = jax.vmap(lambda _: sampler.init(12))(jnp.arange(2))
    ids, states = jax.vmap(lambda s, k: sampler.draw(s, k, 12))(states, jax.random.split(jax.random.key(0), 2))
    assert [sorted(row) for row in ids.tolist()] == [list(range(12))] * 2 and ids[0].tolist() != ids[1].tolist()


def test_of_two_best_responses_the_second_is_as_good_and_they_are_no_pair():
    found = pairs.best_and_second(jnp.array([[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]]))
    assert [x.tolist() for x in found] == [[0, 1], [1, 2], [False, True]]
