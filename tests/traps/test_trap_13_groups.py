"""Trap 13, groups split across devices or batches: membership is data, so row order and device do not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import group
from jaxrl_llm.distributed import mesh as meshes
from tests import close

REWARDS = jnp.asarray(np.random.default_rng(0).random(16), jnp.float32)
IDS = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 4)
FUNCTIONS = [group.group_normalized_advantages, group.dr_grpo_advantages, group.rloo_advantages]


@pytest.mark.parametrize("advantages", FUNCTIONS)
def test_row_order_does_not_matter(advantages):
    order = np.random.default_rng(1).permutation(16)
    want = advantages(REWARDS, IDS)
    close.assert_near(advantages(REWARDS[order], IDS[order]), want[order])


@pytest.mark.parametrize("advantages", FUNCTIONS)
def test_groups_may_span_devices(advantages):
    order = np.random.default_rng(2).permutation(16)  # every device of 2 rows holds parts of two groups
    rows = meshes.batch_sharding(meshes.parse_mesh("data=8"))
    rewards, ids = jax.device_put((REWARDS[order], IDS[order]), rows)
    close.assert_near(jax.jit(advantages)(rewards, ids), advantages(REWARDS, IDS)[order])
