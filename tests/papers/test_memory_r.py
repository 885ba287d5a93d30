"""Memory-R+: intrinsic rewards by hand, in the order in which a step reads and writes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient import memory_r
from experiments.policy_gradient.parts import episodic_memory
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train import online
from jaxrl_llm.train import plan as plans
from tests import close

IDS = jnp.zeros(3, jnp.int32)
QUERY = jnp.tile(jnp.array([[1.0, 0.0, 0.0]]), (3, 1))
# cosines with the first axis 0.2, 0.5 and 0.8
RESPONSES = jnp.array([[c, (1 - c * c) ** 0.5, 0.0] for c in (0.2, 0.5, 0.8)])


def _holding(*responses):
    rows = jnp.array(responses)
    return episodic_memory.remembered(
        episodic_memory.empty_memory(4, 4, 3), QUERY[: len(rows)], rows, jnp.ones(len(rows), bool)
    )


def _rewards(successes, failures, *, resemble=0.5, avoid=0.5, **scaling):
    terms = episodic_memory.nearness(successes, failures, QUERY, RESPONSES)
    histories = episodic_memory.first_history(), episodic_memory.first_history()
    return episodic_memory.paid(terms, histories, IDS, resemble=resemble, avoid=avoid, **scaling)[0]


def test_worked_rewards():
    """0.2, 0.5, 0.8 scale to 0, 0.5, 1; the distance from a failure in the same place to 1, 0.5, 0."""
    empty, first = episodic_memory.empty_memory(4, 4, 3), _holding([1.0, 0.0, 0.0])

    def rewards(successes, failures, **weights):
        return _rewards(successes, failures, **weights)

    close.assert_near(rewards(first, empty), [0.0, 0.25, 0.5])
    close.assert_near(rewards(empty, first), [0.5, 0.25, 0.0])
    close.assert_near(rewards(first, first, resemble=1.0), [0.5, 0.75, 1.0])
    close.assert_near(rewards(first, first, avoid=0.0), [0.0, 0.25, 0.5])
    # the nearest of several remembered responses counts
    near, _ = episodic_memory.closeness(_holding([1.0, 0, 0], [0, 1.0, 0]), QUERY[:1], jnp.array([[0.6, 0.8, 0.0]]))
    close.assert_near(near[0], 0.8)


def test_empty_memories_leave_grpo_as_it_is():
    outcome = jnp.array([1.0, 0.0, 0.0])
    empty = episodic_memory.empty_memory(4, 4, 3)
    bonus = _rewards(empty, empty)
    want = group.group_normalized_advantages(outcome, IDS)
    np.testing.assert_array_equal(group.group_normalized_advantages(outcome + bonus, IDS), want)


def test_a_group_that_earned_nothing_gets_a_signal():
    bonus = _rewards(_holding([1.0, 0, 0]), episodic_memory.empty_memory(4, 4, 3))
    assert not np.asarray(group.group_normalized_advantages(jnp.zeros(3), IDS)).any()
    assert np.argsort(group.group_normalized_advantages(bonus, IDS)).tolist() == [0, 1, 2]


def test_a_rollout_does_not_see_itself():
    """Read before written: a second identical batch finds the first, not itself."""
    empty = episodic_memory.empty_memory(4, 4, 3)
    before, found = episodic_memory.closeness(empty, QUERY, RESPONSES)
    assert not np.asarray(found).any() and not np.asarray(before).any()
    after, found = episodic_memory.closeness(
        episodic_memory.remembered(empty, QUERY, RESPONSES, jnp.ones(3, bool)), QUERY, RESPONSES
    )
    assert found.all()
    close.assert_near(after, jnp.ones(3))


def test_scaling_by_the_last_values_as_in_the_public_code():
    """Window of three, 0.99 a response: 0.2 (alone: 0), 0.6 (largest: 1), 0.4 (half), 0.5 of 0.6, 0.4, 0.5: half."""
    values, there = jnp.array([0.2, 0.6, 9.0, 0.4, 0.5]), jnp.array([True, True, False, True, True])
    history = episodic_memory.first_history(3)
    scaled, after = episodic_memory.by_last_values(history, values, there, jnp.zeros(5, jnp.int32), fade=0.99)
    close.assert_near(scaled, [0.0, 0.99, 0.0, 0.99**2 * 0.5, 0.99**3 * 0.5])
    close.assert_near(after.factor, 0.99**4)
    close.assert_near(np.sort(np.asarray(after.values)), [0.4, 0.5, 0.6])
    # the next batch goes on from there, whatever its groups are
    one, none = jnp.array([0.45]), jnp.zeros(1, jnp.int32)
    close.assert_near(episodic_memory.by_last_values(after, one, one > 0, none)[0], [0.99**4 * 0.5])
    first = _holding([1.0, 0.0, 0.0])
    close.assert_near(_rewards(first, first, scaled=episodic_memory.by_last_values), [0.0, 0.5 * 1.0, 0.5 * 1.0])


def test_small_weights_are_the_rule_and_the_deviation_divides_them_out_where_nothing_was_earned():
    settings = dataclasses.replace(memory_r.Settings(), **memory_r.EMBEDDED)
    assert (settings.resemble, settings.avoid) == (0.03, 0.03)
    swept = [memory_r.ARMS[name]["resemble"] for name in ("w_01", "w_10", "w_50")]
    assert swept == [0.01, 0.1, 0.5]
    first = _holding([1.0, 0.0, 0.0])
    empty = episodic_memory.empty_memory(4, 4, 3)
    small, large = (_rewards(first, empty, resemble=w) for w in (0.03, 0.5))
    alike = [group.group_normalized_advantages(x, IDS) for x in (small, large)]
    # 1e-6 beside a deviation of 0.0122
    close.assert_printed(alike[0], alike[1], 3)
    close.assert_near(group.dr_grpo_advantages(small, IDS), [-0.015, 0.0, 0.015])


def test_histories_are_written_by_the_step_that_used_them():
    settings = dataclasses.replace(
        memory_r.Settings(), **memory_r.EMBEDDED | memory_r.SMOKE, scaled=episodic_memory.by_last_values
    )
    stage, params = memory_r.build(settings).stages[0], recipes.bench(settings).model.params
    state = plans.start(stage, params, jax.random.key(0))
    for _ in range(2):
        state, _ = jax.jit(partial(online.iterate, stage.method))(state)
    assert int(state.extras["histories"][1].written) == 4  # the second batch; the first found nothing remembered
