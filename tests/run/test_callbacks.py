"""What a callback of a compiled program raises reaches the user as it was raised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import DataError, RunStopped, UserError, from_callbacks


def _program(error):
    def raising(x):
        raise error

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(raising, shape, x, vmap_method="sequential") + 1.0

    return jax.jit(step)


@pytest.mark.parametrize("kind", [UserError, DataError, RunStopped])
def test_a_mistake_comes_out_as_it_was_raised(kind):
    with pytest.raises(kind, match=r"^rows.jsonl: line 3: what\?$") as raised, from_callbacks():
        np.asarray(_program(kind("rows.jsonl: line 3: what?"))(jnp.ones(2)))
    assert type(raised.value) is kind and isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_what_is_no_mistake_of_the_user_stays_what_it_is():
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError"), from_callbacks():
        np.asarray(_program(ZeroDivisionError("jaxrl_llm.errors.UserError is only named here"))(jnp.ones(2)))
    with pytest.raises(UserError, match="^plain$"), from_callbacks():
        raise UserError("plain")
