"""Plans in parts: what divides, what does not, and that the parts of a supervised minibatch add up."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.errors import UserError
from jaxrl_llm.train import offline
from jaxrl_llm.train import plan as plans
from jaxrl_llm.train.offline import Offline
from tests import close
from tests.traps import tables

ROWS = {"x": jnp.arange(1.0, 9.0), "mask": jnp.arange(8) % 3 > 0}


def _loss(params, extras, part, total=None):
    error = (params["w"] * part["x"] - 1.0) ** 2
    value = reduce.tokens(error[:, None], part["mask"][:, None], total=total)
    return value, {"sft/loss": value}


def _supervised(**slots):
    return Offline(lambda extras: ROWS, make_uniform(), 8, _loss, optax.sgd(0.01), max_grad_norm=None, **slots)


def _count(part):
    return reduce.denominator(part["mask"][:, None], mode="token_mean")


def _plan(*methods):
    return plans.Plan(lambda key: {}, tuple(plans.Stage(m, 1) for m in methods), lambda params, key: {})


def test_parts_of_a_minibatch_add_up():
    found = []
    for method in (_supervised(), _supervised(whole=_count), _supervised(whole=_count, microbatches=4)):
        state = offline.init_state(method, {"w": jnp.float32(0.5)}, jax.random.key(0))
        found.append(offline.iterate(method, state))
    for state, metrics in found[1:]:
        size = float(found[0][1]["grad/norm"])
        close.assert_same_descent(state.params, found[0][0].params, 0.01, 1, 2 * 8, gradient=size)
        close.assert_same_figures(metrics, found[0][1], 2 * 8)
    with pytest.raises(ValueError, match="microbatches=2 needs whole="):
        method = _supervised(microbatches=2)
        offline.iterate(method, offline.init_state(method, {"w": jnp.float32(0.5)}, jax.random.key(0)))


def test_every_stage_is_divided():
    online = tables.online(group_size=4)  # four prompts a step
    warm = _supervised(whole=_count)

    def parts(number, *methods, devices=1):
        plan = plans.in_parts(_plan(*methods), number, devices=devices)
        return [stage.method.microbatches for stage in plan.stages]

    assert parts(2, warm, online) == [2, 2] and parts(1, _supervised(), online) == [1, 1]
    assert parts(4, warm._replace(rows_per_step=2), online) == [2, 4], "a part is a row at least"
    assert parts(0, _supervised(), online) == [1, 4] and parts(0, online, devices=8) == [2]
    assert parts(0, online._replace(whole_batch="it ranks")) == [1]


@pytest.mark.parametrize(
    ("number", "method", "said"),
    [
        (3, tables.online(), "--microbatches 3 does not divide the 4 prompts of a step; choose a divisor"),
        (3, _supervised(whole=_count), "--microbatches 3 does not divide the 8 supervised rows of a step"),
        (2, _supervised(), "its supervised loss is a mean over a minibatch"),
        (2, tables.online(whole_batch="it ranks"), r"--microbatches 2: this method takes its batch whole \(it ranks\)"),
    ],
)
def test_what_does_not_divide_is_refused(number, method, said):
    with pytest.raises(UserError, match=said):
        plans.in_parts(_plan(method), number)
