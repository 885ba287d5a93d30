"""Trap 47: a metric read from an empty batch as zero. An entropy of nothing is not a policy without entropy."""

import jax.numpy as jnp

from jaxrl_llm.jobs import grpo
from jaxrl_llm.run.records import health, report
from jaxrl_llm.types import Rewards, Trajectories

STEP = {"policy/entropy": 0.0, "kl/sampler_mean": 0.0, "kl/sampler_max": 0.0, "length/right_tokens": 0.0,
        "length/wrong_tokens": 3.0, "reward/mean": 0.0, "grad/norm": 0.0, "group/degenerate_fraction": 1.0}  # fmt: skip


def test_no_update_no_value():
    grid, line = jnp.ones((4, 3), jnp.int32), jnp.zeros(4, jnp.int32)
    groups = jnp.array([0, 0, 1, 1], jnp.int32)
    rows = Trajectories(grid, grid, grid, grid > 0, jnp.zeros((4, 3)), line > 0, groups, line)
    figures = health.without_empty(STEP, rows, Rewards(jnp.zeros(4), jnp.ones(4, bool)), grpo.with_spread)
    assert figures.keys() == {"length/wrong_tokens", "reward/mean", "grad/norm", "group/degenerate_fraction"}
    one = health.without_empty(STEP, rows, Rewards(jnp.array([1.0, 0, 0, 0]), jnp.ones(4, bool)), grpo.with_spread)
    assert one == STEP  # one group trains: all of these are means of something
    lines = [{"step": k} | figures for k in (1, 2)]
    assert report.summary(max, report.column(lines, "kl/sampler_max")) is None
    assert report.shown(None, ".2g") == "none"
