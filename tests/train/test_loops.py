"""The fused and the host loop are the same functions: same parameters, and both learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.train import fused, host
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss
from jaxrl_llm.train.online import Online, init_state
from jaxrl_llm.types import Rewards
from jaxrl_llm.verifiers.tokens import character_classes, make_value_verifier
from tests import close
from tests.models_for_tests import chain_table, nano

RATE = 0.1


@functools.cache
def online():
    policy, _, _, tokenizer = nano()
    classes = character_classes(tokenizer.encode, tokenizer.eos_ids, tokenizer.vocab_size)

    def rollout(params, tokens, valid, keys, ids):
        return generate(
            policy, params, tokens, valid, keys, group_size=4, max_new_tokens=16,
            eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id, problem_ids=ids, early_exit=False,
        )  # fmt: skip

    def advantages(trajectories, rewards):
        values = group.group_normalized_advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    return Online(
        policy=policy, problems=chain_table(), sampler=make_epochs(), prompts_per_step=8, group_size=4,
        rollout=rollout, score=make_value_verifier(*classes), estimate=make_estimate(policy, advantages),
        loss=make_policy_loss(policy, clipped_policy_loss), tx=optax.sgd(RATE),
    )  # fmt: skip


def start(seed=0):
    _, params, _, _ = nano()
    return init_state(online(), jax.tree.map(jnp.copy, params), jax.random.key(seed))


@functools.cache
def _fused():
    """Three steps in one program."""
    return fused.run(online(), start(), 3)


@functools.cache
def _loop():
    return host.make_host_loop(online())


@functools.cache
def _steps():
    """Three iterations of the host loop."""
    return list(host.iterations(_loop(), start(), 3))


def test_fused_host_and_vmapped_seeds_agree():
    one, metrics = _fused()
    two, history = _steps()[-1].state, [i.metrics for i in _steps()]
    sums = close.gradient_sums(nano()[2], 32, 32)
    size = float(metrics["grad/norm"].max())
    close.assert_same_descent(two.params, one.params, RATE, 3, sums, gradient=size)
    close.assert_same_sums([h["reward/mean"] for h in history], list(metrics["reward/mean"]), 32, magnitude=1.0)
    many, _ = fused.make_run(online(), 3, seeds=True)(fused.stack_states([start(), start(1)]))
    first = jax.tree.map(lambda x: x[0], many.params)
    close.assert_same_descent(first, one.params, RATE, 3, sums, gradient=size)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), one.params, start().params)
    assert max(jax.tree.leaves(moved)) > 10 * 3 * RATE * close.bound(sums, size), "it moved by more than it may differ"
    assert int(one.step) == int(two.step) == 3


def test_ratio_is_one_and_the_gap_is_tiny_on_the_first_update():
    """Trap 8."""
    _, metrics = _fused()
    np.testing.assert_array_equal(metrics["policy/ratio"], 1.0)
    largest = max(float(jnp.abs(i.drawn.trajectories.sampler_logp).max()) for i in _steps())
    assert float(metrics["kl/sampler_max"].max()) < close.bound(close.forward_sums(nano()[2], 32), largest) < 0.05
    assert float(metrics["policy/clipped"].max()) == 0.0


def test_later_steps_compile_nothing():
    """Trap 25."""
    assert [i.compiled for i in _steps()] == [2, 2, 2]


def test_invalid_rewards_train_nothing_and_do_not_move_the_baseline():
    """Trap 33: a failed verifier is not a zero."""

    def scored(fill):
        def score(trajectories):
            rewards = online().score(
                jax.tree.map(lambda x: x[trajectories.problem_ids], online().problems.answers), trajectories
            )
            valid = jnp.arange(32) % 4 != 1
            return Rewards(jnp.where(valid, rewards.value, fill), valid)

        return host.run(_loop()._replace(score=score), start(), 1)

    (low, low_history), (high, high_history) = scored(0.0), scored(77.0)
    jax.tree.map(np.testing.assert_array_equal, low.params, high.params)
    assert low_history == high_history


@pytest.mark.slow
def test_it_learns():
    """Training reward on short chains rises by at least 0.05 over 60 updates for a fixed seed."""
    method = online()._replace(tx=optax.adam(3e-4))
    state = init_state(method, jax.tree.map(jnp.copy, nano()[1]), jax.random.key(0))
    _, metrics = fused.run(method, state, 60)
    reward = np.asarray(metrics["reward/mean"])
    assert reward[-15:].mean() > reward[:15].mean() + 0.05


@pytest.mark.parametrize("name", ["reward/mean", "length/mean_tokens", "group/degenerate_fraction", "grad/norm"])
def test_metric_names(name):
    shapes = jax.eval_shape(lambda s: fused.scan_steps(online(), s, 1)[1], start())
    assert shapes[name].shape == (1,)


def test_rewards_of_another_shape_are_refused_by_name():
    """A column would broadcast against the rows: every advantage of a group would be added to every other one."""
    first = slice(None), slice(1)
    column = online()._replace(score=lambda answers, rows: Rewards(rows.sampler_logp[first], rows.mask[first]))
    with pytest.raises(AssertionError, match=r"has shape \(32, 1\) but expected \(32"):
        jax.eval_shape(lambda state: fused.run(column, state, 1), start())
