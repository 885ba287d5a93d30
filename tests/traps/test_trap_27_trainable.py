"""Trap 27, optimiser: float32 masters keep small updates, and every leaf moves in one step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.models import lora
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.train.methods.builders import make_policy_loss
from jaxrl_llm.train.step import make_update, trained_part
from jaxrl_llm.types import TrainState
from tests.models_for_tests import small_config
from tests.traps.tables import random_batch


def _steps(policy, tx, steps=1, trained=""):
    """The parameters before and after updates on one batch."""
    params = policy.init(jax.random.key(0))
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(params, tx.init(trained_part(params, trained)), zero, jax.random.key(0), zero, {})
    loss = make_policy_loss(policy, lambda logp, old, advantages, mask: reinforce_loss(logp, advantages, mask))
    batch = random_batch()
    batch = batch._replace(total=reduce.denominator(batch.mask, mode="token_mean"))
    update = jax.jit(make_update(loss, tx, max_grad_norm=None, trained=trained))
    for _ in range(steps):
        state, _ = update(state, batch)
    return params, state.params


def _step(family, tx):
    return _steps(make_policy(small_config(family), compute_dtype=jnp.bfloat16), tx)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_leaf_moves_by_an_update_that_bfloat16_would_lose(family):
    before, after = _step(family, optax.sgd(1e-4))
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        assert new.dtype == jnp.float32, path
        assert np.any(np.asarray(old != new)), path
    norm = before["final_norm"]  # ones: the next bfloat16 number is 0.8 % away
    moved = np.asarray(after["final_norm"] - norm)
    assert 0 < np.abs(moved).max() < float(jnp.finfo(jnp.bfloat16).eps) / 4  # half of the way to the number below
    assert not np.any(np.asarray(after["final_norm"].astype(jnp.bfloat16) != norm.astype(jnp.bfloat16)))


def test_a_frozen_leaf_is_not_decayed():
    tx = optax.multi_transform(
        {"train": optax.adamw(1e-3, weight_decay=0.5), "frozen": optax.set_to_zero()},
        lambda p: jax.tree.map(lambda _: "train", p) | {"embed": "frozen"},
    )
    before, after = _step("llama", tx)
    np.testing.assert_array_equal(before["embed"], after["embed"])
    assert np.any(np.asarray(before["head"] != after["head"]))


def test_an_adapter_trains_whole_and_its_base_not_at_all():
    """B begins at zero, so that A has no gradient in the first step; weight decay must not reach the base."""
    config = small_config("qwen3")
    policy = lora.make_policy(make_policy(config, compute_dtype=jnp.bfloat16), config, Lora(2))
    before, after = _steps(policy, optax.adamw(1e-4, weight_decay=0.5), steps=2, trained="lora")
    jax.tree.map(np.testing.assert_array_equal, before["base"], after["base"])
    for name, old in before["lora"].items():
        new = after["lora"][name]
        assert new.dtype == jnp.float32 and np.all(np.any(np.asarray(old != new), axis=(1, 2))), name  # in every layer
