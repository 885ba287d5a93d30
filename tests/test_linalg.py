"""Decompositions of stacks against ``jax.numpy.linalg``: values, both kinds of derivatives, second ones, vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.metrics import linalg
from tests.close import assert_near, bound

RNG = np.random.default_rng(0)
TALL = jnp.asarray(RNG.normal(size=(3, 5, 4)), jnp.float32)
WIDE = jnp.swapaxes(TALL, 1, 2)
POSITIVE = jnp.swapaxes(TALL, 1, 2) @ TALL + jnp.diag(jnp.arange(4.0, dtype=jnp.float32))[None]
SQUARE = jnp.asarray(RNG.normal(size=(3, 4, 4)), jnp.float32)


def thin_svd(x):
    return tuple(jnp.linalg.svd(x, full_matrices=False))


CASES = {
    "eigh": (linalg.eigh, lambda x: tuple(jnp.linalg.eigh(x)), POSITIVE),
    "eigh of what is not symmetric": (linalg.eigh, lambda x: tuple(jnp.linalg.eigh(x)), SQUARE),
    "eigvalsh": (linalg.eigvalsh, jnp.linalg.eigvalsh, POSITIVE),
    "svd tall": (linalg.svd, thin_svd, TALL),
    "svd wide": (linalg.svd, thin_svd, WIDE),
    "qr": (linalg.qr, lambda x: tuple(jnp.linalg.qr(x)), TALL),
    "cholesky": (linalg.cholesky, jnp.linalg.cholesky, POSITIVE),
    "solve left": (lambda a: linalg.solve(a, TALL[:, :4]), lambda a: jnp.linalg.solve(a, TALL[:, :4]), POSITIVE),
    "solve right": (lambda b: linalg.solve(POSITIVE, b), lambda b: jnp.linalg.solve(POSITIVE, b), WIDE),
}


def score(tree):
    """A number that every entry of the results moves, unevenly."""
    leaves = jax.tree.leaves(tree)
    return sum(jnp.sum(jnp.sin(x * x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) / 10)) for x in leaves)


def amplified():
    """By how much a derivative grows an error: the largest value over the smallest gap, by which it divides."""
    singular, values = np.linalg.svd(TALL, compute_uv=False), np.linalg.eigvalsh(POSITIVE)
    return max(float((np.abs(v).max(1) / np.abs(np.diff(v)).min(1)).max()) for v in (singular, values))


def close(mine, theirs, derivatives=0):
    """The same steps for one matrix at a time: sums as long as a column, grown by each derivative."""
    sums = TALL.shape[1] * amplified() ** derivatives
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=bound(sums, float(jnp.max(jnp.abs(b)))))


@pytest.mark.parametrize("mine, theirs, x", CASES.values(), ids=CASES)
def test_values_and_derivatives(mine, theirs, x):
    def slope(function):
        return jax.grad(lambda y: score(function(y)))

    close(mine(x), theirs(x))
    close(jax.jit(mine)(x), theirs(x))
    close(slope(mine)(x), slope(theirs)(x), derivatives=1)
    move = jnp.cos(x)
    close(jax.jvp(mine, (x,), (move,))[1], jax.jvp(theirs, (x,), (move,))[1], derivatives=1)
    close(jax.jvp(slope(mine), (x,), (move,))[1], jax.jvp(slope(theirs), (x,), (move,))[1], derivatives=2)


@pytest.mark.parametrize("mine, theirs, x", [v for k, v in CASES.items() if "solve" not in k])
def test_below_vmap(mine, theirs, x):
    close(jax.vmap(mine)(x), theirs(x))
    close(jax.vmap(jax.vmap(mine, 1))(x[:, :, None].repeat(2, 2)), jax.tree.map(
        lambda y: jnp.stack([y, y], axis=1), theirs(x)))  # fmt: skip
    close(
        jax.vmap(jax.grad(lambda y: score(mine(y))))(x),
        jax.vmap(jax.grad(lambda y: score(theirs(y))))(x),
        derivatives=1,
    )


def test_solve_below_vmap_over_one_side():
    b = SQUARE[:, :, :2]
    close(jax.vmap(linalg.solve, (None, 0))(POSITIVE[0], b), jnp.linalg.solve(POSITIVE[:1].repeat(3, 0), b))
    close(jax.vmap(linalg.solve, (0, None))(POSITIVE, b[0]), jnp.linalg.solve(POSITIVE, b[:1].repeat(3, 0)))


def test_equal_values_have_finite_derivatives():
    """``jax.numpy`` gives none: an identity has no eigenvectors to differentiate, but its eigenvalues' sum moves."""
    eye = jnp.eye(3, dtype=jnp.float32)
    assert_near(jax.grad(lambda x: jnp.sum(linalg.eigh(x)[0]))(eye), eye)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(linalg.eigh(x)[1]))(eye)).all()
    assert np.isfinite(jax.grad(lambda x: score(linalg.svd(x)))(eye)).all()
    assert np.isfinite(jax.grad(lambda x: score(linalg.svd(x)))(jnp.zeros((4, 3), jnp.float32))).all()


def test_wide_qr_has_no_derivative():
    assert linalg.qr(WIDE)[1].shape == (3, 4, 5)
    with pytest.raises(ValueError, match=r"\(3, 4, 5\) has more columns than rows.*transpose it"):
        jax.grad(lambda x: jnp.sum(linalg.qr(x)[1]))(WIDE)


def test_elsewhere_it_is_one_call():
    """The program for an accelerator has no loop, the one for the CPU has one."""
    for platform, loops in (("cpu", 1), ("cuda", 0)):
        text = jax.jit(linalg.cholesky).trace(POSITIVE).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.while") == loops, platform
