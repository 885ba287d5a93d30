"""What only policy losses must satisfy, one row a loss; what every function must satisfy is in ``test_contract``."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import entropy, mixed, off_policy, policy, sequence
from tests import close


def _reinforce(logp, old_logp, advantages, mask):
    return policy.reinforce_loss(logp, advantages, mask)


class Row(NamedTuple):
    loss: object
    per_sequence: bool = False  # the ratio belongs to the sequence: one advantage each, reduced by seq_mean


ROWS = {
    "reinforce": Row(_reinforce),
    "clipped": Row(policy.clipped_policy_loss),
    "clip_higher": Row(partial(policy.clipped_policy_loss, clip_high=0.28)),
    "dual_clip": Row(partial(policy.clipped_policy_loss, dual_clip=3.0)),
    "cispo": Row(policy.cispo_loss),
    "sapo": Row(policy.sapo_loss),
    "kl_cov": Row(partial(entropy.kl_cov_loss, fraction=0.2)),
    "rec_one_side": Row(off_policy.rec_loss),
    "rec_ring_is": Row(
        partial(off_policy.rec_loss, keep=off_policy.keep_ring, weigh=off_policy.importance_weights),
    ),
    "ratio": Row(mixed.ratio_loss),
    "gspo": Row(sequence.gspo_loss, per_sequence=True),
    "gspo_token": Row(sequence.gspo_token_loss, per_sequence=True),
    "gmpo": Row(sequence.gmpo_loss, per_sequence=True),
}
NAMES = list(ROWS)


def _case(seed=0, spread=0.3):
    rng = np.random.default_rng(seed)
    mask = rng.random((8, 5)) < 0.7
    mask[:, 0], mask[:, 1] = False, True
    old = -rng.random((8, 5)) * 2
    logp = old + spread * rng.normal(size=(8, 5))
    advantages = np.repeat(rng.normal(size=(8, 1)), 5, axis=1)
    return [jnp.asarray(x, jnp.float32) for x in (logp, old, advantages)] + [jnp.asarray(mask)]


def _value(name, logp, old, advantages, mask, total=None):
    mode = "seq_mean" if ROWS[name].per_sequence else "token_mean"
    return reduce.tokens(ROWS[name].loss(logp, old, advantages, mask).loss, mask, mode=mode, total=total)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_at_ratio_one_is_the_policy_gradient(name):
    _, old, advantages, mask = _case()
    total = reduce.denominator(mask, mode="token_mean")

    def value(logp):
        # sum over sequences of the per-sequence mean times length: the token sum, for both kinds of loss
        return jnp.sum(ROWS[name].loss(logp, old, advantages, mask).loss) / total

    gradient = jax.grad(value)(old)
    close.assert_near(gradient, jnp.where(mask, -advantages / total, 0.0), magnitude=float(jnp.abs(advantages).max()))


@pytest.mark.parametrize("name", NAMES)
def test_finite_for_any_ratio(name):
    _, old, advantages, mask = _case()
    program = jax.jit(jax.value_and_grad(lambda x: _value(name, x, old, advantages, mask)))
    for shift in (-50.0, 50.0):
        value, gradient = program(old + shift)
        assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "kl_cov"])  # its choice is made within the batch
def test_micro_batches_add_up(name):
    arrays = _case()
    mode = "seq_mean" if ROWS[name].per_sequence else "token_mean"
    total = reduce.denominator(arrays[3], mode=mode)
    part = jax.jit(partial(_value, name))
    parts = [part(*(x[i : i + 2] for x in arrays), total=total) for i in range(0, 8, 2)]
    largest = float(jnp.abs(arrays[2]).max())
    close.assert_near(sum(parts), _value(name, *arrays), terms=arrays[0].size, magnitude=largest)
