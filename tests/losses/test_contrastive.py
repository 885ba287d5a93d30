"""CARFT's contrastive loss: worked numbers, float64 loop, the cap, no correct sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import contrastive
from tests import close

rng = np.random.default_rng(12)
ANCHORS, SAMPLES = rng.normal(size=(2, 5, 3))
KEEP = np.array([True, False, True, True, False])


def test_against_float64():
    got = contrastive.capped_infonce_loss(*(jnp.asarray(x, jnp.float32) for x in (ANCHORS, SAMPLES)), jnp.asarray(KEEP))
    a, z = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (ANCHORS, SAMPLES))
    cosine = a @ z.T
    for i in range(5):
        want = -np.log(np.exp(min(cosine[i, i], 0.9) / 0.2) / np.exp(cosine[i] / 0.2).sum()) if KEEP[i] else 0.0
        close.assert_near(got.loss[i], want)
    close.assert_near(got.aux["cosine"], np.diag(cosine))


def test_worked_example_beyond_the_cap():
    """Own cosine 1, another 0.2, tau 0.2: 0.5182; the numerator has no gradient there."""
    anchors, samples = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0], [0.2, 0.9797959]])
    keep = jnp.array([True, False])
    loss = contrastive.capped_infonce_loss(anchors, samples, keep).loss
    close.assert_printed(loss[0], 0.5182, 4)

    def total(z, cap):
        return jnp.sum(contrastive.capped_infonce_loss(anchors, z, keep, cap=cap).loss)

    def denominator(z):
        return jax.nn.logsumexp(contrastive.cosines(anchors, z) / 0.2, axis=1)[0]

    close.assert_near(jax.grad(total)(samples, 0.9), jax.grad(denominator)(samples))
    of_anchors = jax.grad(lambda a: jnp.sum(contrastive.capped_infonce_loss(a, samples, keep).loss))(anchors)
    assert not np.asarray(of_anchors).any()


def test_samples_of_the_same_annotation_are_no_negatives_of_each_other():
    """Two of three samples have the anchor (1, 0), cosines .8 and .6; the third .2: ln(1 + e^-3), ln(1 + e^-2)."""
    anchors = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    samples = jnp.array([[0.8, 0.6], [0.6, 0.8], [0.2, 0.9797959]])
    keep, ids = jnp.array([True, True, False]), jnp.array([0, 0, 1], jnp.int32)

    def loss(z):
        return contrastive.capped_infonce_loss(anchors, z, keep, group_ids=ids).loss

    close.assert_printed(loss(samples), [0.0486, 0.1269, 0.0], 4)
    # the second sample has no part in the loss of the first
    assert not np.asarray(jax.grad(lambda z: loss(z)[0])(samples)[1]).any()


def test_no_kept_sample_is_zero_without_nan():
    none = jnp.zeros(5, bool)

    def value(z):
        terms = contrastive.capped_infonce_loss(jnp.zeros((5, 3)), z, none)
        return reduce.scalars(terms.loss, none)

    loss, gradient = jax.value_and_grad(value)(jnp.zeros((5, 3)))
    assert float(loss) == 0 and not np.asarray(gradient).any()


def test_pooling_against_float64_and_masks():
    weights, features = rng.normal(size=(3, 6)), rng.normal(size=(3, 6, 2))
    mask = np.arange(6)[None] < np.array([6, 2, 0])[:, None]
    poison = [np.where(m, x, np.nan) for x, m in ((weights, mask), (features, mask[:, :, None]))]
    got = contrastive.pooled(*(jnp.asarray(x, jnp.float32) for x in poison), jnp.asarray(mask))
    for b in range(3):
        e = np.exp(weights[b][mask[b]])
        want = (e[:, None] * features[b][mask[b]]).sum(0) / e.sum() if mask[b].any() else np.zeros(2)
        close.assert_near(got[b], want)
    with pytest.raises(ValueError, match="tau=0"):
        contrastive.capped_infonce_loss(jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.ones(1, bool), tau=0.0)
