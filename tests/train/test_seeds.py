import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.train import seed_axis


def collatz(start, scale):
    """Steps to 1, a loop as long as each seed needs, and a value that depends on all of the seed's own arguments."""
    steps, _ = jax.lax.while_loop(
        lambda c: c[1] != 1,
        lambda c: (c[0] + 1, jnp.where(c[1] % 2 == 0, c[1] // 2, 3 * c[1] + 1)),
        (jnp.int32(0), start),
    )
    return {"steps": steps, "value": scale["w"].sum() * steps.astype(jnp.float32)}


@pytest.mark.parametrize("number", [1, 3, 6, 8])
@pytest.mark.parametrize("turn", [True, False])
def test_every_seed_gets_its_own_result_in_order(monkeypatch, number, turn):
    monkeypatch.setattr(seed_axis, "in_turn", lambda: turn)
    start = jnp.arange(1, number + 1, dtype=jnp.int32)
    scale = {"w": jnp.arange(number * 2, dtype=jnp.float32).reshape(number, 2)}
    found = jax.jit(seed_axis.over_seeds(collatz))(start, scale)
    expected = [0, 1, 7, 2, 5, 8, 16, 3][:number]
    assert found["steps"].tolist() == expected
    sums = np.arange(number * 2, dtype=np.float32).reshape(number, 2).sum(1)
    np.testing.assert_array_equal(found["value"], sums * expected)
    assert len(found["steps"].sharding.device_set) == number  # of the eight devices of the tests


def test_seeds_that_do_not_divide_take_fewer_devices():
    found = jax.jit(seed_axis.over_seeds(lambda x: 2 * x))(jnp.arange(9.0))
    assert found.tolist() == [2.0 * x for x in range(9)]
    assert len(found.sharding.device_set) == 3


def test_keys_are_arguments_like_any_other():
    keys = jnp.stack([jax.random.key(s) for s in range(4)])
    found = jax.jit(seed_axis.over_seeds(lambda key: jax.random.uniform(key)))(keys)
    np.testing.assert_array_equal(found, [jax.random.uniform(k) for k in keys])


def test_all_cores_become_devices_unless_their_number_is_given(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    seed_axis.use_all_cores()
    assert os.environ["XLA_FLAGS"].startswith("--xla_other=1 --xla_force_host_platform_device_count=")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    seed_axis.use_all_cores()
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"
