"""How far two results may lie apart that are the same sums in another order: derived, not tried.

A sum of ``n`` terms in any order differs from the exact one by at most ``(n - 1) u sum |x_i|``, ``u`` half a unit in
the last place (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2); two orders, so by at most
``(n - 1) eps sum |x_i|``. Sums one after another add their lengths to first order. Meshes, micro-batches, paddings,
packings and instruction sets change the order of sums, and nothing else. A processor that is not this one takes another
order, and stays within the same bound.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import ModelConfig
from tests.models_for_tests import small_config


def forward_sums(config: ModelConfig, columns: int) -> int:
    """The lengths of all sums, one after another, between a token and the log-probability of the next.

    In each layer: two means of squares, a product into the heads, the scores, their softmax, the mix of ``columns``
    values, a product out of the heads, and two products of the perceptron. After them a mean of squares, the product
    with the vocabulary and its softmax.
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    layer = 2 * width + width + config.head_dim + 2 * columns + heads + width + config.intermediate_size
    if config.experts:
        layer += width + config.experts.number + config.experts.per_token  # who is asked, and the mix of what they say
    return config.num_layers * layer + 2 * width + config.padded_vocab_size


def gradient_sums(config: ModelConfig, rows: int, columns: int) -> int:
    """As ``forward_sums``, back through all of them, and over all tokens of the batch."""
    return 2 * forward_sums(config, columns) + rows * columns


def attention_sums(rows: int, columns: int, head_dim: int, queries_per_key: int) -> int:
    """Forward and back through attention: scores, softmax and mix, and the queries that share a key."""
    return 2 * (head_dim + 2 * columns) + head_dim + rows * queries_per_key


def assert_same_forward(
    got, want, model: str | ModelConfig = "qwen3", *, temperature: float = 1.0, columns: int = 0
) -> None:
    """Logits or log-probabilities ``[rows, columns, ...]`` of a decoder.

    Args:
      model: its configuration, or the family of a ``models_for_tests.small_model``.
      temperature: that divided the logits, the lowest of several.
    """
    config = small_config(model) if isinstance(model, str) else model
    sums = forward_sums(config, columns or np.shape(want)[1])
    assert_same_sums(got, want, sums, magnitude=float(np.abs(np.asarray(want)).max()) / min(temperature, 1.0))


def bound(sums: int, magnitude: float, dtype=np.float32) -> float:
    """``eps * sums * magnitude``: units in the last place, times the length of the sum, times the size of its terms."""
    return float(np.finfo(dtype).eps) * sums * magnitude


def assert_same_sums(got, want, sums: int, *, magnitude: float | None = None) -> None:
    """Every leaf of two trees within ``bound``.

    Args:
      magnitude: of the terms of a sum; None: the largest number of the whole tree, for the terms of one leaf that
        cancel are as large as those of the others.
    """
    got, want = jax.tree.map(np.asarray, (got, want))
    if magnitude is None:
        magnitude = max((float(np.abs(x).max(initial=0)) for x in jax.tree.leaves(want)), default=0.0)
    atol = bound(sums, magnitude)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


def assert_same_figures(got, want, sums: int) -> None:
    """Metrics by name, each a sum of terms of its own size or of size 1, whichever is larger."""
    assert set(got) >= set(want)
    for name, value in want.items():
        value = np.asarray(value)
        atol = bound(sums, max(1.0, float(np.abs(value).max(initial=0.0))))
        np.testing.assert_allclose(np.asarray(got[name]), value, rtol=0, atol=atol, err_msg=name)


OPERATIONS = 16  # units in the last place of a formula: eight steps, and a transcendental function is off by up to two


def _eps(*trees) -> float:
    """A unit in the last place of the coarsest array; float32's where there is none, as Python's numbers are exact."""
    kinds = {np.asarray(x).dtype for x in jax.tree.leaves(trees) if hasattr(x, "dtype")}
    found = [float(jnp.finfo(kind).eps) for kind in kinds if jnp.issubdtype(kind, jnp.floating)]
    return max(found, default=float(np.finfo(np.float32).eps))


def near(got, want, *, terms: int = 0, magnitude: float = 1.0) -> float:
    """How far ``got`` may lie from a ``want`` that another program, or a hand, has computed from the same formula.

    ``eps (terms + OPERATIONS) max(magnitude, largest |want|)``.

    Args:
      terms: of the longest sum; 0: as many as the larger of the two has elements.
      magnitude: of the terms that are added and may cancel; rewards, chances and advantages are of size 1. 0: that of
        the result.
    """
    size = max(np.size(got), np.size(want))
    finite = np.nan_to_num(np.asarray(want, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    largest = float(np.abs(finite).max(initial=0.0))
    return _eps(got, want) * ((terms or size) + OPERATIONS) * max(magnitude, largest)


def assert_near(got, want, *, terms: int = 0, magnitude: float = 1.0, err_msg: str = "") -> None:
    """Within ``near``, element by element; NaN and infinities are the same."""
    atol = near(got, want, terms=terms, magnitude=magnitude)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=err_msg)


def doubles(want, *, terms: int = 0, magnitude: float = 1.0):
    """Equals all within ``near`` of a number, or of each of a tuple or a dictionary, that double precision has made."""
    return _around(want, np.float64, terms, magnitude)


def singles(want, *, terms: int = 0, magnitude: float = 1.0):
    """As ``doubles``, of single precision: what went through an array of float32."""
    return _around(want, np.float32, terms, magnitude)


def _around(want, precision, terms: int, magnitude: float):
    numbers = np.asarray(list(want.values()) if isinstance(want, dict) else want, precision)
    return pytest.approx(want, rel=0, abs=near(numbers, numbers, terms=terms, magnitude=magnitude), nan_ok=True)


def assert_relative(got, want, *, terms: int = 0, err_msg: str = "") -> None:
    """Each element within ``eps (terms + OPERATIONS)`` of its own size, where nothing cancels; zeros are zeros.

    Products, quotients, powers, and sums whose terms have one sign: their relative errors add, whatever their sizes.
    """
    size = max(np.size(got), np.size(want))
    rtol = _eps(got, want) * ((terms or size) + OPERATIONS)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=0, err_msg=err_msg)


def assert_printed(got, want, decimals: int, *, terms: int = 0, magnitude: float = 1.0) -> None:
    """As ``assert_near``, where ``want`` was written down with so many decimals: half a unit of the last is added."""
    atol = 0.5 * 10.0**-decimals + near(got, want, terms=terms, magnitude=magnitude)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def of_draws(chance, draws: int, *, comparisons: int = 1):
    """How far the share of ``draws`` with a chance may lie from it: once in a million runs, by Hoeffding's inequality.

    ``sqrt(log(2 comparisons 1e6) / (2 draws))``, and where the variance ``p (1 - p)`` is small, by Bernstein's.
    """
    log = np.log(2e6 * comparisons)
    variance = np.asarray(chance) * (1 - np.asarray(chance))
    bernstein = np.sqrt(2 * variance * log / draws) + 2 * log / (3 * draws)
    return np.minimum(np.sqrt(log / (2 * draws)), bernstein)


def of_mean(deviation, draws: int):
    """How far a mean of ``draws`` with a standard deviation may lie from its expectation: once in a million runs.

    ``sqrt(2 log(2e6) / draws) deviation``: 5.4 standard errors, the bound of a normal mean.
    """
    return np.sqrt(2 * np.log(2e6) / draws) * np.asarray(deviation)


def assert_mean(found, want, deviation, draws: int) -> None:
    """Means of ``draws`` within ``of_mean`` of their expectations."""
    apart, allowed = np.abs(np.asarray(found) - np.asarray(want)), of_mean(deviation, draws) + near(found, want)
    assert np.all(apart <= allowed), f"{found} of {draws} draws, where {want} is expected: {apart} beyond {allowed}"


def assert_share(found, chance, draws: int) -> None:
    """Shares of ``draws`` within ``of_draws`` of their chances."""
    comparisons = max(np.size(found), np.size(chance))
    allowed = of_draws(np.asarray(chance, np.float64), int(draws), comparisons=comparisons) + near(found, 1.0)
    apart = np.abs(np.asarray(found, np.float64) - np.asarray(chance, np.float64))
    assert np.all(apart <= allowed), f"{found} of {draws} draws, where {chance} was said: {apart} beyond {allowed}"


def adam_reach(rate: float, steps: int) -> float:
    """How far two runs of Adam may lie apart that agree on nothing but where they began.

    A step moves an element by at most ``rate (1 - b1) / sqrt(1 - b2)`` ("Adam", arXiv:1412.6980, section 2.1). What is
    below says that no weight ran away; that two runs compute the same is seen in the gradients that go into a step.
    """
    return 2 * steps * rate * (1 - 0.9) / float(np.sqrt(1 - 0.999))


def assert_same_descent(got, want, rate: float, steps: int, sums: int, *, gradient: float) -> None:
    """Parameters after ``steps`` of plain gradient descent, each within ``rate`` times the bound of its gradient.

    Plain, because Adam divides by the size of the gradient: an element whose gradient is rounding alone moves a whole
    step, and no tolerance below that step is derived.

    Args:
      gradient: at least the size of its largest element.
    """
    largest = max(float(np.abs(np.asarray(x)).max()) for x in jax.tree.leaves(want))
    atol = steps * (rate * bound(sums, gradient) + bound(1, largest))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)
