"""A plan carried out: where the calls are changes nothing of what is computed, and the clock hears every call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.systems.parts import measured_plan, ppo_calls
from jaxrl_llm.planning.parallel_layout import Sizes
from jaxrl_llm.planning.reshard_cost import Place
from jaxrl_llm.planning.work import Work
from tests.models_for_tests import small_config

CONFIG, WORK = small_config(num_kv_heads=4), Work(4, 4, 8, 8, group=2, compute_dtype=jnp.float32, remat=False)
ONE = Place(0, Sizes())
SPREAD = (
    Place(0, Sizes(data=2)), Place(4, Sizes(data=2)), Place(6, Sizes(fsdp=2)), Place(2, Sizes(data=2)),
    Place(0, Sizes(fsdp=2, tensor=2)), Place(4, Sizes(data=2, tensor=2)),
)  # fmt: skip


@pytest.mark.slow
def test_a_plan_with_moves_computes_what_one_device_computes():
    start, found = measured_plan.given(CONFIG, WORK, jax.random.key(0)), {}
    for name, plan in (("one", (ONE,) * 6), ("spread", SPREAD)):
        job, clock = measured_plan.Job(CONFIG, WORK, plan), {}
        models = measured_plan.iterate(job, start, measured_plan.begin(job, start))
        models = measured_plan.iterate(job, start, models, clock)
        assert set(clock) == {*ppo_calls.CALLS, *(measured_plan.MOVES if name == "spread" else ())}
        assert all(seconds > 0 for seconds in clock.values())
        found[name] = jax.device_get((models.actor.params, models.critic.params))
        held = models.actor.params["layers"]["up"].sharding.device_set
        assert {d.id for d in held} == set(plan[ppo_calls.TRAIN_ACTOR].devices)
    # Two steps of AdamW of 1e-6 each: an element whose gradient is rounding alone may take one of them the other way;
    # runs that go opposite ways are four apart.
    apart = 3 * 1e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=apart), found["one"], found["spread"])
    assert np.abs(found["one"][0]["layers"]["up"] - start.params["layers"]["up"]).max() > 1e-7


def test_moves_and_parts():
    assert measured_plan.moved(SPREAD) == [(SPREAD[4], SPREAD[0]), (SPREAD[5], SPREAD[3])]
    with pytest.raises(ValueError, match="microbatches=2, rollout_rows=8: a plan is carried out in one part"):
        measured_plan.given(CONFIG, Work(4, 4, 8, 8, microbatches=2), jax.random.key(0))
