"""The columns of the contract, over every public function of losses, advantages, shaping and reduce."""

import functools
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm import advantages, losses, reduce
from jaxrl_llm.rewards import shaping
from tests import close
from tests.contract import engine
from tests.contract.tables import EXEMPT, ROWS


@functools.cache
def _case(name):
    return engine.draw(name, ROWS[name])


@functools.cache
def _program(name):
    return engine.compiled(_case(name))


@functools.cache
def _clean(name):
    return _program(name)(_case(name).arrays)


def _named(column, applies):
    """The rows to which a column applies by their signature, less those that say why it does not."""
    return [n for n in ROWS if column not in ROWS[n].leaves_out and applies(_case(n))]


def _close(name, left, right):
    """The same sums in another order: each at most over all elements of the largest argument, of terms of all results.

    What a function takes the difference or the quotient of is of the size of its arguments, so those count, too.
    """
    arrays = [x for x in jax.tree.leaves(_case(name).arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
    terms = max((x.size for x in arrays), default=1)
    both = [np.asarray(x, np.float64) for x in jax.tree.leaves((arrays, right))]
    size = max((float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in both), default=1.0)
    jax.tree.map(lambda a, b: close.assert_near(a, b, terms=terms, magnitude=max(1.0, size)), left, right)


def _public():
    for package in (losses, advantages, shaping, reduce):
        modules = [package]
        if hasattr(package, "__path__"):
            modules = [
                __import__(f"{package.__name__}.{m.name}", fromlist=["x"])
                for m in pkgutil.iter_modules(package.__path__)
            ]
        for module in modules:
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if not name.startswith("_") and function.__module__ == module.__name__:
                    yield f"{module.__name__.removeprefix(jaxrl_llm.__name__ + '.')}.{name}"


def test_every_public_function_has_a_row_or_a_reason():
    public, listed = set(_public()), {name.partition(":")[0] for name in ROWS}
    assert sorted(public - listed - EXEMPT.keys()) == [], "add a line to tests/contract/tables.py"
    assert sorted((listed | EXEMPT.keys()) - public) == [], "these are gone"
    assert not listed & EXEMPT.keys()
    columns = {n.removeprefix("test_") for n in globals() if n.startswith("test_")}
    assert {c for row in ROWS.values() for c in row.leaves_out} <= columns


@pytest.mark.parametrize("name", _named("outside", lambda c: c.masks()))
def test_outside(name):
    """NaN, infinities and large numbers outside the mask change neither results nor gradients; both are 0 there."""
    case, (results, gradients) = _case(name), _clean(name)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))
    for value in (np.nan, np.inf, -np.inf, 1e30):
        dirty = _program(name)(engine.poisoned(case, value))
        jax.tree.map(np.testing.assert_array_equal, dirty, (results, gradients))
    for argument, gradient in gradients.items():
        if case.axes[argument]:
            outside = np.broadcast_to(~engine.counts(case, argument), gradient.shape)
            assert not np.asarray(gradient)[outside].any(), argument
    mask = case.masks().get("mask")
    if mask is not None and case.row.zero_outside:
        for x in jax.tree.leaves(results):
            assert x.shape[:2] != mask.shape or not np.asarray(x)[~np.asarray(mask)].any()


@pytest.mark.parametrize("name", _named("gradient", lambda c: c.row.gradient is not None))
def test_gradient(name):
    """Gradient flows to the arguments that the row names, and to no other."""
    gradients = _clean(name)[1]
    assert {k for k, g in gradients.items() if np.asarray(g).any()} == set(ROWS[name].gradient)


@pytest.mark.parametrize("name", _named("eager", lambda c: True))
def test_eager(name):
    """Without jit and from bfloat16 the results are, in float32, those of jit from the rounded values.

    A function lifts its arguments before any arithmetic, so rounding happens once.
    """
    case = _case(name)
    low = engine.cast(case.arrays, jnp.bfloat16)
    results, rounded = case.run(**low), _program(name)(engine.cast(low, jnp.float32))[0]
    assert all(x.dtype in (jnp.float32, jnp.int32, bool) for x in jax.tree.leaves(results))
    _close(name, results, rounded)


@functools.cache
def _together(module, column):
    """Results of a column for all rows of a module."""
    change, applies = COLUMNS[column]
    cases = {n: _case(n) for n in _named(column, applies) if n.startswith(module + ".")}
    return engine.together(cases, {n: change(c) for n, c in cases.items()})


def _column(name, column):
    return _together(name.partition(":")[0].rpartition(".")[0], column)[name]


def _half(case):
    return engine.along_rows(case, case.arrays, lambda x, axis: x[(slice(None),) * axis + (slice(4, 8),)])


def _joined(case):
    out = {k: v.reshape(4, 12, *v.shape[2:]) if case.axes[k] else v for k, v in case.arrays.items()}
    if "segment_ids" in out:
        out["segment_ids"] = jnp.asarray(np.tile(np.repeat([1, 2], 6), (4, 1)), jnp.int32)
    return out


def _spread(case):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))

    def place(x, *axes):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))

    rows = engine.along_rows(case, case.arrays, lambda x, axis: place(x, *(None,) * axis, "data"))
    return {k: v if v is not case.arrays[k] else place(v) for k, v in rows.items()}


COLUMNS = {
    "padded": (lambda case: engine.padded(case, np.nan), lambda case: bool(case.masks())),
    "sliced": (_half, lambda case: engine.has_rows(case) and engine.dependence(case) != "batch"),
    "packed": (_joined, lambda case: case.row.packed),
    "sharded": (_spread, engine.has_rows),
}


@pytest.mark.parametrize("name", _named("padded", COLUMNS["padded"][1]))
def test_padded(name):
    """Further rows and columns outside the mask, full of NaN, change nothing."""
    _close(name, engine.cropped(_column(name, "padded")), _clean(name)[0])


@pytest.mark.parametrize("name", _named("permuted", engine.has_rows))
def test_permuted(name):
    """Rows in another order, and groups of another name, give the same results in that order."""
    case, order = _case(name), np.random.default_rng(1).permutation(8)
    arrays = engine.along_rows(case, case.arrays, lambda x, axis: jnp.take(x, order, axis=axis))
    if "group_ids" in arrays:
        arrays["group_ids"] = 5 - 3 * arrays["group_ids"]
    moved = engine.result_rows(_clean(name)[0], lambda x, axis: np.take(x, order, axis=axis))
    _close(name, _program(name)(arrays)[0], moved)


@pytest.mark.parametrize("name", _named("sliced", COLUMNS["sliced"][1]))
def test_sliced(name):
    """Half of the rows, with their whole groups, give half of the results: micro-batches add up."""
    half = engine.result_rows(_clean(name)[0], lambda x, axis: x[(slice(None),) * axis + (slice(4, 8),)])
    _close(name, _column(name, "sliced"), half)


@pytest.mark.parametrize("name", _named("packed", COLUMNS["packed"][1]))
def test_packed(name):
    """Two rows joined to one, told apart by segment ids where it matters, give the same results."""
    apart = jax.tree.map(
        lambda x: np.asarray(x).reshape(8, 6, *x.shape[2:]) if x.shape[:2] == (4, 12) else x, _column(name, "packed")
    )
    _close(name, apart, _clean(name)[0])


@pytest.mark.parametrize("name", _named("sharded", COLUMNS["sharded"][1]))
def test_sharded(name):
    """Rows spread over two devices give the results of one."""
    _close(name, _column(name, "sharded"), _clean(name)[0])
