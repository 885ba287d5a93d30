"""Slots on a mesh: every device has its own, and the samples are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.per_device import per_device
from jaxrl_llm.rollout.slots import generate_in_slots
from tests import close
from tests.models_for_tests import small_model

PROMPTS = jnp.array([[0, 0, 7, 8], [9, 3, 1, 6], [0, 4, 4, 1], [0, 0, 0, 3]] * 2, jnp.int32)
IDS = jnp.arange(10, 18, dtype=jnp.int32)
GIVEN = (PROMPTS, PROMPTS > 0, sample_keys(jax.random.key(0), 0, IDS, 2), IDS)
SETTINGS = {"group_size": 2, "max_new_tokens": 12, "eos_ids": (2, 5, 11)}


def _rollout(run, family, **options):
    policy = small_model(family)[0]

    def rollout(params, tokens, valid, keys, ids):
        return run(policy, params, tokens, valid, keys, problem_ids=ids, **SETTINGS, **options)

    return rollout


@pytest.mark.parametrize(
    "spec, family",
    [("data=2,fsdp=2", "qwen3")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("data=8", "gemma2"), ("fsdp=2,expert=2,tensor=2", "qwen3_moe"), ("data=2,context=2", "llama"))
    ],
)
def test_the_samples_are_those_of_one_device(spec, family):
    params, mesh = small_model(family)[1], meshes.parse_mesh(spec)
    wanted = jax.jit(_rollout(generate, family))(params, *GIVEN)
    lengths = np.asarray(wanted.mask.sum(axis=1))
    assert len(set(lengths.tolist())) > 3  # devices end at steps of their own
    run = jax.jit(per_device(_rollout(generate_in_slots, family, slots=3, halvings=1), mesh))
    found = run(rules.shard(params, mesh), *GIVEN)
    assert len(found.tokens.sharding.device_set) == mesh.size
    jax.tree.map(np.testing.assert_array_equal, found._replace(sampler_logp=0), wanted._replace(sampler_logp=0))
    close.assert_same_forward(found.sampler_logp, wanted.sampler_logp, family)


@pytest.mark.slow
def test_prompts_that_do_not_divide_are_run_by_every_device():
    params, mesh = small_model()[1], meshes.parse_mesh("data=8")
    given = (PROMPTS[:6], PROMPTS[:6] > 0, GIVEN[2][:12], IDS[:6])
    wanted = jax.jit(_rollout(generate, "qwen3"))(params, *given)
    found = jax.jit(per_device(_rollout(generate_in_slots, "qwen3", slots=3), mesh))(params, *given)
    jax.tree.map(np.testing.assert_array_equal, found._replace(sampler_logp=0), wanted._replace(sampler_logp=0))
