"""Memory-R+: intrinsic rewards by hand, in the order in which a step reads and writes."""

import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient.parts import episodic_memory
from jaxrl_llm.advantages import group
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


def test_worked_rewards():
    """0.2, 0.5, 0.8 scale to 0, 0.5, 1; the distance from a failure in the same place to 1, 0.5, 0."""
    empty, first = episodic_memory.empty_memory(4, 4, 3), _holding([1.0, 0.0, 0.0])

    def rewards(successes, failures, **weights):
        return episodic_memory.memory_rewards(successes, failures, QUERY, RESPONSES, IDS, **weights)

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
    bonus = episodic_memory.memory_rewards(empty, empty, QUERY, RESPONSES, IDS)
    want = group.group_normalized_advantages(outcome, IDS)
    np.testing.assert_array_equal(group.group_normalized_advantages(outcome + bonus, IDS), want)


def test_a_group_that_earned_nothing_gets_a_signal():
    bonus = episodic_memory.memory_rewards(
        _holding([1.0, 0, 0]), episodic_memory.empty_memory(4, 4, 3), QUERY, RESPONSES, IDS
    )
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
