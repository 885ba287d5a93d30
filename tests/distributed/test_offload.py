"""What waits in host memory is what it was, and a step with it is the step without."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.offload import fetched, parked, parked_state
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import checkpoint
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss
from jaxrl_llm.train.step import make_update
from jaxrl_llm.types import Rewards, TrainState, Trajectories
from tests.models_for_tests import small_model
from tests.traps.tables import random_batch


def _kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def test_there_and_back_on_a_mesh():
    mesh = meshes.parse_mesh("fsdp=2,tensor=2")
    tree = rules.shard(small_model()[1] | {"count": jnp.zeros((), jnp.int32)}, mesh)
    away = parked(tree)
    assert _kinds(away) == {"pinned_host"} and _kinds(tree) == {"device"} == _kinds(fetched(away))
    back = jax.jit(lambda t: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), fetched(t)))(away)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1), back, jax.tree.map(np.asarray, tree))
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding.with_memory_kind("device"), a.ndim),
                        tree, fetched(away))  # fmt: skip
    assert all(jax.tree.leaves(same)) and parked({"key": jax.random.key(0)})["key"].shape == ()


def test_an_optimiser_that_waits_on_the_host():
    policy, params, _ = small_model()
    found = {}
    for name, tx in (("here", optax.adamw(1e-2)), ("there", parked_state(optax.adamw(1e-2)))):
        update = jax.jit(make_update(make_policy_loss(policy, clipped_policy_loss), tx))
        state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})
        for _ in range(2):
            state, _ = update(state, random_batch())
        found[name] = state
    assert _kinds(found["there"].opt_state) == {"pinned_host"} and _kinds(found["here"].opt_state) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, found["there"].params, found["here"].params)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


@pytest.mark.parametrize("wrapped", [False, True])
def test_nothing_is_computed_where_the_state_waits(wrapped):
    """Whether an update is finite is looked at on the devices; the host would read both states to choose one."""
    policy, params, _ = small_model()
    tx = parked_state(optax.adamw(1e-2))
    tx = optax.chain(tx) if wrapped else tx
    state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})
    assert _kinds(state.opt_state) == {"pinned_host"}
    update = make_update(make_policy_loss(policy, clipped_policy_loss), tx)
    made = list(_equations(jax.make_jaxpr(update)(state, random_batch()).jaxpr))
    host = jax.memory.Space.Host
    there = [e.primitive.name for e in made for x in e.outvars if getattr(x.aval, "memory_space", None) == host]
    assert set(there) == {"device_put"}
    if not wrapped:  # every moment travels once in either direction
        moments = 2 * len(jax.tree.leaves(params))
        assert there.count("device_put") == moments
        assert sum(e.primitive.name == "device_put" for e in made) == 2 * moments


def test_it_waits_there_on_a_mesh_and_in_a_checkpoint(tmp_path):
    mesh, tx = meshes.parse_mesh("data=2,fsdp=2"), parked_state(optax.adamw(1e-2))
    params = small_model()[1]
    state = TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {})
    state = rules.shard(state, mesh)
    assert _kinds(state.opt_state) == {"pinned_host"} and _kinds(state.params) == {"device"}
    kept = jax.jit(lambda s: rules.constrain(s, mesh))(state)
    assert _kinds(kept.opt_state) == {"pinned_host"} and _kinds(kept.params) == {"device"}
    checkpoint.save(tmp_path, kept)
    back = checkpoint.restore(checkpoint.latest(tmp_path), kept)
    assert _kinds(back.opt_state) == {"pinned_host"} and _kinds(back.params) == {"device"}
    assert [x.sharding for x in jax.tree.leaves(back.opt_state)] == [
        x.sharding for x in jax.tree.leaves(kept.opt_state)
    ]


def test_a_reference_that_waits_on_the_host():
    policy, params, _ = small_model()
    batch = random_batch()
    rows = Trajectories(*(getattr(batch, f) for f in ("tokens", "segment_ids", "positions", "mask", "sampler_logp")),
                        truncated=batch.mask[:, 0], group_ids=batch.group_ids, problem_ids=batch.group_ids)  # fmt: skip
    size = batch.tokens.shape[0]
    rewards = Rewards(jnp.ones(size), jnp.ones(size, bool))

    def reference(pick, extras):
        estimate = make_estimate(policy, lambda rows, _: rows.sampler_logp, reference=pick)
        return jax.jit(lambda e: estimate(params, e, rows, rewards).ref_logp)(extras)

    away = {"ref": parked(params)}
    want = reference(lambda e: e["ref"], {"ref": params})
    np.testing.assert_array_equal(reference(lambda e: fetched(e["ref"]), away), want)
