"""A loss over devices: value, metrics and gradient of one device, and the gradient added up once."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods.builders import make_policy_loss, score_tokens
from jaxrl_llm.train.methods.shared_prompt import share_prompts
from jaxrl_llm.train.per_device import per_device_loss
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import small_config, small_model

ROWS, GROUP, WIDTH, NEW = 8, 2, 3, 4


def batch(rows: int = ROWS) -> Batch:
    """Groups of two with a shared prompt, responses of one to four tokens, a row without any."""
    key, columns = jax.random.key(0), WIDTH + NEW
    prompts = jnp.repeat(jax.random.randint(key, (rows // GROUP, WIDTH), 2, 20), GROUP, axis=0)
    tokens = jnp.concatenate([prompts, jax.random.randint(jax.random.key(1), (rows, NEW), 2, 20)], axis=1)
    lengths = jnp.array([4, 1, 3, 2, 0, 4, 1, 2], jnp.int32)[:rows]
    place = jnp.arange(columns, dtype=jnp.int32)[None, :]
    real = place < WIDTH + lengths[:, None]
    mask = real & (place >= WIDTH)
    normal = jax.random.normal(jax.random.key(2), mask.shape)
    return Batch(
        tokens=tokens, segment_ids=real.astype(jnp.int32), positions=jnp.where(real, place, 0), mask=mask,
        advantages=jnp.where(mask, normal, 0.0), old_logp=jnp.where(mask, -3.0, 0.0),
        sampler_logp=jnp.where(mask, -3.1, 0.0), ref_logp=jnp.zeros(mask.shape),
        group_ids=jnp.arange(rows, dtype=jnp.int32) // GROUP, total=jnp.sum(mask.astype(jnp.float32)), extras={},
    )  # fmt: skip


def compiled(loss, params, rows):
    return jax.jit(lambda params, rows: accumulate(loss, params, rows, 1)).lower(params, rows).compile()


@pytest.mark.parametrize("spec", ["data=2,fsdp=2", pytest.param("data=2,tensor=4", marks=pytest.mark.slow)])
def test_gradient_value_and_metrics_are_those_of_one_device(spec):
    policy, params, _ = small_model()
    loss = make_policy_loss(policy, clipped_policy_loss, score=share_prompts(GROUP, NEW))
    rows = batch()
    wanted = compiled(loss, params, rows)(params, rows)
    program = compiled(per_device_loss(loss, meshes.parse_mesh(spec)), params, rows)
    found = program(params, rows)
    assert wanted[2].keys() == found[2].keys() and any(name.endswith("_max") for name in wanted[2])
    assert float(wanted[1]) != 0 and max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted[0])) > 1e-3
    back = close.gradient_sums(small_config(), *rows.tokens.shape)
    close.assert_same_sums(found[0], wanted[0], back)
    close.assert_same_sums(found[1:], wanted[1:], back)


def test_the_gradient_is_one_sum():
    policy, params, _ = small_model()
    loss = make_policy_loss(policy, clipped_policy_loss)
    program = compiled(per_device_loss(loss, meshes.parse_mesh("data=2")), params, batch())
    sums = re.findall(r"= (.*?) all-reduce(?:-start)?\(", program.as_text())
    size = sum(x.size for x in jax.tree.leaves(params))
    assert sum(f"f32[{size}]" in shapes for shapes in sums) == 1
    assert not any(len(re.findall(r"f32\[\d+,\d+", shapes)) for shapes in sums)  # no matrix by itself


def test_groups_are_numbered_below_the_rows_of_a_device():
    policy, params, _ = small_model()

    def loss(params, rows):
        logp, _ = score_tokens(policy, params, rows)
        alone = jnp.sum(jnp.where(rows.mask, logp * rows.advantages, 0.0), axis=1)
        groups = jax.ops.segment_sum(alone, rows.group_ids, num_segments=rows.tokens.shape[0])  # beyond: dropped
        return jnp.sum(groups**2) / rows.total, {}

    rows = batch()
    wanted = compiled(loss, params, rows)(params, rows)
    found = compiled(per_device_loss(loss, meshes.parse_mesh("data=4")), params, rows)(params, rows)
    assert float(wanted[1]) > 0.1
    close.assert_same_sums(found, wanted, 2 * close.gradient_sums(small_config(), *rows.tokens.shape))  # of squares


def test_rows_must_divide():
    policy, params, _ = small_model()
    loss = per_device_loss(make_policy_loss(policy, clipped_policy_loss), meshes.parse_mesh("data=8"))
    with pytest.raises(ValueError, match="a batch of 6 sequences does not divide over the 8 devices"):
        loss(params, batch(6))
