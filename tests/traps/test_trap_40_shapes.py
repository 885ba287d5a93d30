"""Trap 40, broadcasts: arrays of the wrong rank are refused, not stretched."""

import inspect
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from tests.traps.tables import policy_losses

SQUARE = jnp.zeros((4, 4), jnp.float32)
MASK = jnp.ones((4, 4), bool)
LOSSES = policy_losses()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrong", [jnp.zeros((4,)), jnp.zeros((4, 1)), jnp.zeros((1, 4)), jnp.zeros((4, 4, 1))])
@pytest.mark.parametrize("name", ["logp", "advantages"])
def test_losses_refuse_advantages_of_another_shape(loss, wrong, name):
    names = list(inspect.signature(loss).parameters)
    arrays = {k: SQUARE for k in ("logp", "old_logp", "advantages") if k in names} | {"mask": MASK}
    if name in arrays:
        loss(**arrays)
        with pytest.raises(Exception, match=r"shape|type|dim"):
            loss(**(arrays | {name: wrong}))


def test_reductions_and_advantages_refuse_them_too():
    with pytest.raises(Exception, match=r"shape|type|dim"):
        reduce.tokens(jnp.zeros((4,)), MASK)
    with pytest.raises(Exception, match=r"shape|type|dim"):
        group.dr_grpo_advantages(jnp.zeros((4, 1)), jnp.zeros((4,), jnp.int32))
    with pytest.raises(Exception, match=r"shape|type|dim"):
        group.group_normalized_advantages(jnp.zeros((4,)), jnp.zeros((3,), jnp.int32))


def test_per_token_spreads_a_sequence_over_its_row_also_in_a_square_batch():
    spread = group.per_token(jnp.array([1.0, 2.0, 3.0, 4.0]), MASK)
    assert spread[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0] and spread[0].tolist() == [1.0] * 4


PROGRAM = """
import jax.numpy as jnp
from jaxrl_llm.losses import policy, sequence
square, mask = jnp.zeros((4, 4)), jnp.ones((4, 4), bool)
for loss in (policy.clipped_policy_loss, policy.cispo_loss, sequence.gspo_loss, sequence.gmpo_loss):
    for wrong in (jnp.zeros((4,)), jnp.zeros((4, 1))):
        try:
            loss(square, square, wrong, mask)
        except ValueError as error:
            assert "shape (4" in str(error), error
        else:
            raise SystemExit(f"{loss.__name__} broadcast {wrong.shape}")

from jaxrl_llm import reduce
from jaxrl_llm.advantages import group, returns
from jaxrl_llm.losses import supervised
row, column = jnp.zeros((4,)), jnp.zeros((4, 1))
calls = [
    *(lambda x=x, mode=mode: reduce.tokens(x, mask, mode=mode, length_tokens=4) for x in (row, column)
      for mode in reduce.MODES),
    *(f for x in (row, column) for f in (
        lambda x=x: reduce.sequences(x, mask),
        lambda x=x: reduce.segments(x, mask, jnp.ones((4, 4), int)),
        lambda x=x: reduce.segments(square, mask, x.astype(int)),
        lambda x=x: reduce.metrics({"x": x}, mask, prefix="p"),
        lambda x=x: supervised.sft_loss(x, mask),
        lambda x=x: returns.gae_advantages(x, square, row, mask),
        lambda x=x: returns.gae_advantages(square, x, row, mask),
        lambda x=x: returns.length_adaptive_gae_advantages(square, x, row, mask),
        lambda x=x: returns.lambda_returns(x, square, row, mask),
        lambda x=x: returns.n_step_returns(square, x, row, mask, steps=2),
        lambda x=x: returns.discounted_returns(x, mask),
    )),
    *(f for x in (column, square, jnp.zeros((1,))) for f in (
        lambda x=x: supervised.weighted_sft_loss(square, x, mask),
        lambda x=x: returns.gae_advantages(square, square, x, mask),
        lambda x=x: returns.n_step_returns(square, square, x, mask, steps=2),
        lambda x=x: returns.at_last_token(x, mask),
        lambda x=x: returns.terminal_advantages(x, mask),
        lambda x=x: group.per_token(x, mask),
    )),
]
for number, call in enumerate(calls):
    try:
        call()
    except ValueError as error:
        assert "meets mask of shape (4, 4)" in str(error), error
    else:
        raise SystemExit(f"call {number} broadcast")
"""


def test_without_the_shape_checks_of_the_tests_too():
    """A user's process checks no annotations, and there a square batch would hide the mistake."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
