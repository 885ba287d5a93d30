"""Decompositions of stacks of matrices that do not hang on several CPU devices; elsewhere they are ``jax.numpy``'s.

On the CPU jaxlib divides a stack of matrices over the thread pool in which programs run, and waits in one of the
pool's own threads. Where several devices of one process do so at once (``--xla_force_host_platform_device_count``, or
independent calls in one program), all threads wait and none is left to work: the program never ends. One matrix at a
time needs no pool. So every function here maps over the leading axes on the CPU, under ``jax.vmap`` and in derivatives
too, and makes the one batched call of ``jax.numpy.linalg`` on other devices. ``docs/cpu-linalg.md`` tells more.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of matrices, mapped over their leading axes by a loop on the CPU and called with all elsewhere.

    Axes that ``jax.vmap`` adds are leading axes too. The result has no derivative of its own: give it one by
    ``jax.custom_jvp`` whose rule calls it on primal values only.

    Args:
      function: ``(matrix [..., N, M], ...) -> pytree`` with the same leading axes in all that it takes and gives, as
        those of ``jax.numpy.linalg``.
    """

    def mapped(*stacks: Array) -> Any:
        lead = stacks[0].shape[:-2]
        flat = tuple(x.reshape(math.prod(lead), *x.shape[-2:]) for x in stacks)
        out = lax.map(lambda matrices: function(*matrices), flat)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)

    @jax.custom_batching.custom_vmap
    def apply(*stacks: Array) -> Any:
        if not stacks[0].shape[:-2]:
            return function(*stacks)
        return lax.platform_dependent(*stacks, cpu=mapped, default=function)

    @apply.def_vmap
    def _(size: int, batched: list[bool], *stacks: Array) -> tuple[Any, Any]:
        wide = (
            x if has else jnp.broadcast_to(x[None], (size, *x.shape)) for x, has in zip(stacks, batched, strict=True)
        )
        out = apply(*wide)
        return out, jax.tree.map(lambda _: True, out)

    return apply


def _t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _symmetric(x: Array) -> Array:
    return (x + _t(x)) / 2


def _diagonal(x: Array) -> Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def _reciprocal(x: Array) -> Array:
    """``1 / x``, and 0 of 0."""
    return jnp.where(x == 0, 0.0, 1 / jnp.where(x == 0, 1.0, x)).astype(x.dtype)


_eigh_each = one_at_a_time(lambda x: tuple(jnp.linalg.eigh(x)))
_eigvalsh_each = one_at_a_time(jnp.linalg.eigvalsh)
_svd_each = one_at_a_time(lambda x: tuple(jnp.linalg.svd(x, full_matrices=False)))
_qr_each = one_at_a_time(lambda x: tuple(jnp.linalg.qr(x)))
_cholesky_each = one_at_a_time(jnp.linalg.cholesky)
_inverse_each = one_at_a_time(jnp.linalg.inv)
_solve_each = one_at_a_time(jnp.linalg.solve)


@jax.custom_jvp
def _eigh(x: Array) -> tuple[Array, Array]:
    return _eigh_each(x)


@_eigh.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    w, v = _eigh(x)
    inner = _t(v) @ dx @ v
    gaps = w[..., None, :] - w[..., :, None]
    return (w, v), (_diagonal(inner), v @ (_reciprocal(gaps) * inner))


def eigh(x: Float[Array, "*B N N"]) -> tuple[Float[Array, "*B N"], Float[Array, "*B N N"]]:
    """Eigenvalues in ascending order and eigenvectors (columns) of symmetric matrices, ``x = v diag(w) v^T``.

    ``x`` is made symmetric first. The derivative leaves out pairs of equal eigenvalues, whose vectors have none.
    """
    return _eigh(_symmetric(x))


@jax.custom_jvp
def _eigvalsh(x: Array) -> Array:
    return _eigvalsh_each(x)


@_eigvalsh.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    w, v = _eigh(x)
    return w, jnp.sum(v * (dx @ v), axis=-2)


def eigvalsh(x: Float[Array, "*B N N"]) -> Float[Array, "*B N"]:
    """Eigenvalues of symmetric matrices in ascending order, without their vectors unless a derivative is taken.

    >>> eigvalsh(jnp.array([[[2.0, 1.0], [1.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]]])).round(4).tolist()
    [[1.0, 3.0], [1.0, 3.0]]
    """
    return _eigvalsh(_symmetric(x))


@jax.custom_jvp
def svd(x: Float[Array, "*B N M"]) -> tuple[Float[Array, "*B N K"], Float[Array, "*B K"], Float[Array, "*B K M"]]:
    """``u, s, v^T`` with ``x = u diag(s) v^T`` and ``K = min(N, M)``, singular values in descending order.

    The derivative leaves out pairs of equal singular values, and what belongs to a singular value of 0.
    """
    return _svd_each(x)


@svd.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    u, s, vt = svd(x)
    v, row, column = _t(vt), s[..., None, :], s[..., :, None]
    inner = _t(u) @ dx @ v
    share = _reciprocal((row + column) * (row - column))
    du = u @ (share * (inner * row + column * _t(inner)))
    dv = v @ (share * (column * inner + _t(inner) * row))
    if x.shape[-2] > x.shape[-1]:  # what of the change lies outside the columns of u
        outside = dx @ v
        du = du + (outside - u @ (_t(u) @ outside)) * _reciprocal(row)
    if x.shape[-1] > x.shape[-2]:
        outside = _t(dx) @ u
        dv = dv + (outside - v @ (vt @ outside)) * _reciprocal(row)
    return (u, s, vt), (du, _diagonal(inner), _t(dv))


@jax.custom_jvp
def _inverse(x: Array) -> Array:
    return _inverse_each(x)


@_inverse.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    y = _inverse(x)
    return y, -(y @ dx @ y)


@jax.custom_jvp
def qr(x: Float[Array, "*B N M"]) -> tuple[Float[Array, "*B N K"], Float[Array, "*B K M"]]:
    """``q, r`` with ``x = q r``, orthonormal columns in ``q``, ``r`` upper triangular and ``K = min(N, M)``.

    Raises:
      ValueError: for a derivative of matrices with more columns than rows.
    """
    return _qr_each(x)


@qr.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    if x.shape[-2] < x.shape[-1]:
        raise ValueError(f"x of shape {x.shape} has more columns than rows: qr has no derivative there; transpose it")
    q, r = qr(x)
    change = dx @ _inverse(r)
    inner = _t(q) @ change
    lower = jnp.tril(inner, -1)
    turn = lower - _t(lower)
    return (q, r), (q @ (turn - inner) + change, (inner - turn) @ r)


@jax.custom_jvp
def _cholesky(x: Array) -> Array:
    return _cholesky_each(x)


@_cholesky.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    low = _cholesky(x)
    inverse = _inverse(low)
    inner = inverse @ dx @ _t(inverse)
    half = (jnp.tril(inner) + jnp.tril(inner, -1)) / 2
    return low, low @ half


def cholesky(x: Float[Array, "*B N N"]) -> Float[Array, "*B N N"]:
    """The lower triangular ``l`` with ``x = l l^T``; not a number where ``x``, made symmetric, is not positive."""
    return _cholesky(_symmetric(x))


def solve(a: Float[Array, "*B N N"], b: Float[Array, "*B N K"]) -> Float[Array, "*B N K"]:
    """``x`` with ``a x = b``; differentiable in both.

    >>> solve(jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.array([[2.0], [2.0]])).tolist()
    [[1.0], [0.5]]
    """
    return lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: _solve_each(a, b), lambda _, b: _solve_each(_t(a), b)
    )  # fmt: skip
