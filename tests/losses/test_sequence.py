"""Sequence-level losses: worked examples, whose gradient goes where, packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import sequence
from tests import close

# one sequence of two tokens: ratios 2 and 1/2.. geometric mean 1; another: 1.2 and 1.25, mean sqrt(1.5)
OLD = jnp.log(jnp.array([[0.2, 0.4], [0.5, 0.4]]))
LOGP = jnp.log(jnp.array([[0.4, 0.2], [0.6, 0.5]]))
ADVANTAGES = jnp.array([[1.0, 1.0], [2.0, 2.0]])
MASK = jnp.ones((2, 2), bool)
WIDE = {"clip_low": 0.5, "clip_high": 0.5}
ROOT = 1.5**0.5  # 1.2247449


def test_gspo_by_hand():
    terms = sequence.gspo_loss(LOGP, OLD, ADVANTAGES, MASK, **WIDE)
    close.assert_near(terms.loss, [[-1.0, -1.0], [-2 * ROOT, -2 * ROOT]])
    cut = sequence.gspo_loss(LOGP, OLD, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.2)
    close.assert_near(cut.loss, [[-1.0, -1.0], [-2.4, -2.4]])
    assert cut.aux["clipped"].tolist() == [[0, 0], [1, 1]]
    # reduced by sequences: one surrogate each
    close.assert_near(reduce.tokens(terms.loss, MASK, mode="seq_mean"), -(1 + 2 * ROOT) / 2)


def test_gspo_shares_the_gradient_evenly_and_gspo_token_by_its_own_advantage():
    """d/dlogp_t of s_i A_i is s_i A_i / |y_i| (eq. 10); the token form keeps A_t apart (eq. 17)."""

    def gradient(loss, advantages):
        return jax.grad(
            lambda x: reduce.tokens(loss(x, OLD, advantages, MASK, **WIDE).loss, MASK, mode="seq_mean", total=1.0)
        )(LOGP)

    same = jnp.array([[-0.5, -0.5], [-ROOT, -ROOT]])
    close.assert_near(gradient(sequence.gspo_loss, ADVANTAGES), same)
    close.assert_near(gradient(sequence.gspo_token_loss, ADVANTAGES), same)
    apart = jnp.array([[1.0, 3.0], [0.0, 2.0]])
    got = gradient(sequence.gspo_token_loss, apart)
    close.assert_near(got, [[-0.5, -1.5], [0.0, -ROOT]])


def test_gspo_token_ratio_is_exact_for_small_log_probabilities():
    """The window of GSPO is 3e-4 wide: adding and subtracting a log-probability of -15 must not move the ratio."""
    logp = jnp.array([[-15.123456, -0.01, -11.7]])
    terms = sequence.gspo_token_loss(logp, logp, jnp.ones((1, 3)), jnp.ones((1, 3), bool))
    np.testing.assert_array_equal(terms.aux["ratio"], 1.0)


def test_gmpo_by_hand():
    """Log ratios log 2 and -log 2 with A > 0: the first is cut at 0.4, the mean is (0.4 - 0.6931) / 2 = -0.1466."""
    terms = sequence.gmpo_loss(LOGP, OLD, ADVANTAGES, MASK)
    close.assert_printed(terms.loss[0], -0.8636622, 7)
    assert terms.aux["clipped"].tolist() == [[1, 0], [0, 0]]
    gradient = jax.grad(lambda x: sequence.gmpo_loss(x, OLD, ADVANTAGES, MASK).loss[0].sum())(LOGP)
    close.assert_printed(gradient[0], [0.0, -0.8636622], 7)
    # A < 0: the harmful side is the other one
    terms = sequence.gmpo_loss(LOGP, OLD, -ADVANTAGES, MASK)
    close.assert_near(terms.loss[0], np.exp((np.log(2) - 0.4) / 2))
    assert terms.aux["clipped"].tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("loss", [sequence.gspo_loss, sequence.gspo_token_loss, sequence.gmpo_loss])
def test_packed_gradients_equal_unpacked_ones(loss):
    rng = np.random.default_rng(2)
    logp, old = (jnp.asarray(-rng.random((4, 3)), jnp.float32) for _ in range(2))
    advantages = jnp.asarray(rng.normal(size=(4, 1)), jnp.float32) * jnp.ones((4, 3))
    mask = jnp.asarray(rng.random((4, 3)) < 0.7).at[:, 0].set(True)
    segments = jnp.tile(jnp.repeat(jnp.array([1, 2]), 3)[None, :], (2, 1))

    def packed(x):
        x, o, a, m = (y.reshape(2, 6) for y in (x, old, advantages, mask))
        return reduce.tokens(loss(x, o, a, m, segment_ids=segments).loss, m, mode="seq_mean", segment_ids=segments)

    def rows(x):
        return reduce.tokens(loss(x, old, advantages, mask).loss, mask, mode="seq_mean")

    for a, b in zip(jax.value_and_grad(packed)(logp), jax.value_and_grad(rows)(logp), strict=True):
        close.assert_near(a, b)


def test_sequence_log_ratio_has_no_gradient_into_the_anchor():
    for mode in ("sum", "mean"):
        gradients = jax.grad(lambda a, b, m=mode: sequence.sequence_log_ratio(a, b, MASK, mode=m)[:, 0].sum(), (0, 1))(
            LOGP, OLD
        )
        np.testing.assert_array_equal(gradients[0], 1.0 if mode == "sum" else 0.5)
        assert not np.asarray(gradients[1]).any()


@pytest.mark.parametrize("loss", [sequence.gspo_loss, sequence.gspo_token_loss])
@pytest.mark.parametrize("options", [{"clip_low": 1.0}, {"clip_low": -0.1}, {"clip_high": -0.1}])
def test_mistakes_are_named(loss, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        loss(LOGP, OLD, ADVANTAGES, MASK, **options)


FAR = jnp.array([[-30.0, 0.0, 0.0, 0.0]])  # one token is e^-30 times as likely as before, its mean log ratio -7.5


@pytest.mark.parametrize("loss", [sequence.gspo_loss, sequence.gspo_token_loss, sequence.gmpo_loss])
def test_the_mean_is_held_and_not_its_tokens(loss):
    """Paper, TRL, verl and OpenRLHF: exp(-7.5). A clamp of each token to 20 would say exp(-5), twelve times as much."""
    bounds = {} if loss is sequence.gmpo_loss else {"clip_low": 0.9999, "clip_high": 9.0}
    one, mask = jnp.ones((1, 4)), jnp.ones((1, 4), bool)
    close.assert_relative(loss(FAR, 0 * FAR, one, mask, **bounds).aux["ratio"], np.exp(-7.5))
    # far beyond e^20 the mean itself is held, and the loss stays finite
    beyond = loss(4 * FAR, 0 * FAR, one, mask, **bounds)
    close.assert_relative(beyond.aux["ratio"], np.exp(-20.0))


def test_gmpo_with_unequal_bounds():
    """A > 0 is cut above at clip_high, A < 0 below at clip_low: log ratios log 2 and -log 2."""
    bounds = {"clip_low": 0.1, "clip_high": 0.5}
    up = sequence.gmpo_loss(LOGP, OLD, ADVANTAGES, MASK, **bounds)
    close.assert_near(up.loss[0], -np.exp((0.5 - np.log(2)) / 2))
    down = sequence.gmpo_loss(LOGP, OLD, -ADVANTAGES, MASK, **bounds)
    close.assert_near(down.loss[0], np.exp((np.log(2) - 0.1) / 2))
    with pytest.raises(ValueError, match="clip_high=0"):
        sequence.gmpo_loss(LOGP, OLD, ADVANTAGES, MASK, clip_high=0.0)
