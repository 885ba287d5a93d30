"""Kimi k1.5: mirror descent, length reward, prioritised draws and long2short, by their printed numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.policy_gradient import kimi_k15
from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum import balanced
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.off_policy import mirror_descent_loss
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.rewards import shaping
from tests import close


def test_length_reward_of_a_group():
    """Lengths 100, 200, 300: 0.5, 0, -0.5 for right answers, never above 0 for wrong ones; 0 where all are equal."""
    length, ids = jnp.array([100, 200, 300]), jnp.zeros(3, jnp.int32)
    extremes = shaping.group_extremes(length.astype(jnp.float32), ids)
    for right, want in ((True, [0.5, 0.0, -0.5]), (False, [0.0, 0.0, -0.5])):
        close.assert_near(shaping.length_reward(length, jnp.full(3, right), *extremes), want)
    equal = jnp.array([7, 7, 7])
    extremes = shaping.group_extremes(equal.astype(jnp.float32), ids)
    np.testing.assert_array_equal(shaping.length_reward(equal, jnp.array([True, False, True]), *extremes), jnp.zeros(3))


def test_gradient_of_a_group_is_equation_3():
    """``mean_j [(r_j - mean) grad logpi - tau/2 grad (log ratio)^2]`` times ``-2 tau``, for ratios away from 1."""
    tau, rewards = 0.1, jnp.array([1.0, 0.0, 0.0, 1.0])
    logp = jnp.array([[-1.0, -0.5], [-0.2, -0.9], [-2.0, -0.1], [-0.7, -0.3]])
    old = logp + jnp.array([[0.1, -0.2], [0.3, 0.0], [0.0, 0.1], [-0.4, 0.2]])
    mask, ids = jnp.ones((4, 2), bool), jnp.zeros(4, jnp.int32)
    advantages = group.per_token(group.dr_grpo_advantages(rewards, ids), mask)

    def surrogate(x):
        return reduce.tokens(mirror_descent_loss(x, old, advantages, mask, tau=tau).loss, mask, mode="seq_mean")

    def equation(x):
        ratio = jnp.sum(x - old, axis=1)
        return jnp.sum((rewards - 0.5) * jnp.sum(x, axis=1) - 0.5 * tau * ratio**2) / 4

    close.assert_near(jax.grad(surrogate)(logp), -2 * tau * jax.grad(equation)(logp))
    # at the old policy it is REINFORCE with the group's mean as baseline, times 2 tau
    plain = jax.grad(lambda x: jnp.sum(reinforce_loss(x, advantages, mask).loss) / 4)(old)
    close.assert_near(jax.grad(surrogate)(old), 2 * tau * plain)


def test_prompts_are_drawn_by_their_failures():
    state = balanced.BalancedState(jnp.array([0.25, 0.75]), jnp.zeros(2, jnp.int32))
    assert balanced.draw_probabilities(state, weigh=balanced.failure, floor=0.0).tolist() == [0.75, 0.25]
    sampler = kimi_k15.ARMS["prioritised"]["sampler"]()
    state = sampler.init(50)
    ids = jnp.arange(50, dtype=jnp.int32)
    for _ in range(20):  # the first ten always succeed
        state = sampler.update(state, ids, (ids < 10).astype(jnp.float32), jnp.ones(50, bool))
    drawn = jnp.concatenate([sampler.draw(state, jax.random.key(k), 5)[0] for k in range(40)])
    assert float((drawn < 10).mean()) < 0.05


def test_an_optimiser_that_begins_anew_with_every_rollout():
    """Updates 0, 2 and 4 are first updates, 1 and 3 second ones; Adam alone goes on from its moments."""
    params, grads = jnp.array([1.0, -2.0]), [jnp.array([0.3 * k + 0.1, -0.2]) for k in range(5)]
    tx, plain = kimi_k15.reset_every(optax.adam(0.1), 2), optax.adam(0.1)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes weak integers and floats
        state, found = tx.init(params), []
        for grad in grads:
            change, state = tx.update(grad, state, params)
            found.append(np.asarray(change))
        for k, grad in enumerate(grads):
            own = plain.init(params)
            if k % 2:
                _, own = plain.update(grads[k - 1], own, params)
            close.assert_near(found[k], plain.update(grad, own, params)[0], terms=8)
    assert np.abs(found[1] - found[3]).max() > 1e-3 and kimi_k15.kept(plain, 2) is plain


def test_the_easier_half_comes_first():
    settings = kimi_k15.Settings(
        levels=(1, 3), train_problems=24, eval_problems=4, max_new_tokens=26, steps=5, prompts_per_step=2, group_size=2
    )
    bench = recipes.bench(settings)
    rates = curricula.sample_pass_rates(bench, settings, np.arange(24), samples=kimi_k15.TRIES)
    first, then = kimi_k15.build(dataclasses.replace(settings, **kimi_k15.ARMS["curriculum"])).stages
    assert (first.steps, then.steps) == (2, 3)
    drawn = {int(k) for k in first.method.sampler.draw(first.method.sampler.init(24), jax.random.key(0), 400)[0]}
    rest = set(range(24)) - drawn
    assert len(drawn) == 12 and min(rates[sorted(drawn)]) >= max(rates[sorted(rest)]) and len(set(rates)) > 1
    sampler = then.method.sampler
    state = sampler.update(sampler.init(24), jnp.arange(24), jnp.asarray(rates, jnp.float32), jnp.ones(24, bool))
    keys = jax.random.split(jax.random.key(1), 400)
    often = jax.vmap(lambda key: sampler.draw(state, key, 6)[0])(keys)
    later = np.bincount(np.asarray(often).reshape(-1), minlength=24)
    assert later[sorted(rest)].sum() > later[sorted(drawn)].sum()
