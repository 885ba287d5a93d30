"""PF-PPO: weights of each filter, the reliability that ranks them, and the average over resampled buffers."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import selection, whiten
from tests import close

rng = np.random.default_rng(6)
IDS = jnp.zeros(5, jnp.int32)
SCORES = jnp.array([0.1, 0.9, 0.3, 0.2, 0.0])


def test_weights_of_the_filters():
    """BR of five: .5 for the best, .125 for the others; BW: two of a prompt; BoN: one; |R|^2 of .9, -.3, .1."""
    shares = {f: f(SCORES, IDS) / f(SCORES, IDS).sum() for f in (
        selection.best_random_weights, selection.best_worst_weights, selection.best_weights)}  # fmt: skip
    wanted = [0.125, 0.5, 0.125, 0.125, 0.125], [0, 0.5, 0, 0, 0.5], [0, 1, 0, 0, 0]
    for got, want in zip(shares.values(), wanted, strict=True):
        close.assert_near(got, want)
    power = selection.power_weights(jnp.array([0.9, -0.3, 0.1]), jnp.zeros(3, jnp.int32))
    close.assert_printed(power / power.sum(), [0.8901, 0.0989, 0.0110], 4)
    # two prompts are filtered apart, whatever their level
    two = selection.best_worst_weights(jnp.array([1.0, 2.0, 3.0, 11.0, 12.0, 13.0]), jnp.array([0, 0, 0, 1, 1, 1]))
    assert two.tolist() == [1, 0, 1, 1, 0, 1]


def test_reliability_prefers_the_ends():
    """A score that is noise in the middle: R^2 of best and worst exceeds that of all."""
    score, truth = jnp.array([0.1, 0.4, 0.8]), jnp.array([0.0, 0.0, 1.0])
    close.assert_printed(selection.reliability(score, truth, jnp.ones(3)), 0.8176, 4)
    scores = jnp.asarray(rng.normal(size=400), jnp.float32)
    right = jnp.where(jnp.abs(scores) < 1, jnp.asarray(rng.random(400) < 0.5), scores > 0).astype(jnp.float32)
    ids = jnp.arange(400, dtype=jnp.int32) // 5
    every, ends = selection.equal_weights(scores, ids), selection.best_worst_weights(scores, ids)
    assert selection.reliability(scores, right, ends) > selection.reliability(scores, right, every) + 0.1


def test_whitening_of_what_is_kept():
    """Integer weights are copies: the same as whitening the buffer with its rows written out."""
    values, mask = rng.normal(size=(4, 3)), rng.random((4, 3)) < 0.8
    weights = np.array([2, 0, 1, 3])
    got = whiten.reweighted_tokens(
        jnp.asarray(np.where(mask, values, np.nan), jnp.float32), jnp.asarray(weights, jnp.float32), jnp.asarray(mask)
    )
    copies = np.repeat(values, weights, axis=0)[np.repeat(mask, weights, axis=0)]
    want = np.where(mask, (values - copies.mean()) / copies.std(), 0.0)
    close.assert_near(got, want)
    plain = whiten.whitened_tokens(jnp.asarray(values, jnp.float32), jnp.asarray(mask))
    same = whiten.reweighted_tokens(jnp.asarray(values, jnp.float32), jnp.full(4, 0.3), jnp.asarray(mask))
    close.assert_near(same, plain)
    nothing = whiten.reweighted_tokens(jnp.asarray(values, jnp.float32), jnp.zeros(4), jnp.asarray(mask))
    np.testing.assert_array_equal(nothing, jnp.zeros((4, 3)))


def test_expected_counts_are_the_mean_of_resampled_buffers():
    weights = selection.best_random_weights(SCORES, IDS)
    uniforms = jax.random.uniform(jax.random.key(0), (4000, 5))
    rows = jax.vmap(lambda u: selection.resampled(weights, u))(uniforms)
    counts = jnp.sum(jax.nn.one_hot(rows, 5), axis=(0, 1)) / 4000
    close.assert_share(counts / 5, selection.expected_counts(weights) / 5, 5 * 4000)
