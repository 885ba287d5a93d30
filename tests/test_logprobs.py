import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from tests import close


def _reference(logits, tokens, temperature):
    """Independent float64 loop: (logp, entropy)."""
    logits = np.asarray(logits, np.float64) / temperature
    logp, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for b in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            row = logits[b, t - 1]
            z = np.log(np.sum(np.exp(row - row.max()))) + row.max()
            logp[b, t] = row[tokens[b, t]] - z
            entropy[b, t] = -sum(np.exp(x - z) * (x - z) for x in row if np.isfinite(x))
    return logp, entropy


def _case(seed=0, shape=(3, 7, 11)):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32) * 3, rng.integers(0, shape[2], shape[:2]).astype(np.int32)


def test_by_hand():
    # p(token 1 | first) = 3/4, then p(token 0 | ...) = 1/2
    logits = jnp.log(jnp.array([[[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]]))
    out = logprobs.token_logprobs(logits, jnp.array([[0, 1, 0]]))
    close.assert_near(out, [[0.0, np.log(0.75), np.log(0.5)]])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_against_float64(temperature):
    logits, tokens = _case()
    logp, entropy = _reference(logits, tokens, temperature)
    got = logprobs.token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), temperature=temperature)
    close.assert_near(got, logp)
    got = logprobs.token_entropy(jnp.asarray(logits), temperature=temperature)
    close.assert_near(got, entropy)


@pytest.mark.parametrize("chunk", [1, 2, 4, 6, 100])
def test_chunked_equals_full_in_value_and_gradient(chunk):
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2, 7, 5)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(5, 11)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 11, (2, 7)), jnp.int32)

    def full(h, w):
        return logprobs.token_logprobs(h @ w, tokens), logprobs.token_entropy(h @ w)

    def parts(h, w):
        return logprobs.chunked(h, lambda x: x @ w, tokens, chunk=chunk)

    for a, b in zip(full(hidden, weight), parts(hidden, weight), strict=True):
        close.assert_near(a, b)
    grads = [
        jax.grad(lambda h, w, f=f: f(h, w)[0].sum() + f(h, w)[1].sum(), (0, 1))(hidden, weight) for f in (full, parts)
    ]
    for a, b in zip(*grads, strict=True):
        close.assert_near(a, b)


def test_chunked_never_forms_the_vocabulary_cube():
    hidden, tokens = jnp.zeros((2, 65, 4)), jnp.zeros((2, 65), jnp.int32)

    def loss(h):
        return logprobs.chunked(h, lambda x: x @ jnp.ones((4, 999)), tokens, chunk=8)[0].sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(hidden))
    assert "2,8,999" in text
    assert "64,999" not in text and "65,999" not in text


def test_first_token_of_each_segment_is_zero_and_packing_keeps_the_rest():
    logits, tokens = _case(shape=(1, 6, 4))
    segments = jnp.array([[1, 1, 1, 2, 2, 0]])
    out = logprobs.token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), segment_ids=segments)
    whole = logprobs.token_logprobs(jnp.asarray(logits), jnp.asarray(tokens))
    assert out[0, 0] == out[0, 3] == out[0, 5] == 0
    np.testing.assert_array_equal(out[0, jnp.array([1, 2, 4])], whole[0, jnp.array([1, 2, 4])])


def test_a_nan_after_the_last_token_has_no_gradient():
    logits, tokens = _case(shape=(1, 5, 4))
    segments = jnp.array([[1, 1, 1, 0, 0]])
    dirty = jnp.asarray(logits).at[0, 2:].set(jnp.nan)
    functions = (
        lambda x, **where: logprobs.token_logprobs(x, jnp.asarray(tokens), **where),
        logprobs.token_entropy, logprobs.token_collision, logprobs.mean_logprobs,
    )  # fmt: skip
    for function in functions:
        value, slope = jax.value_and_grad(lambda x, f=function: f(x, segment_ids=segments).sum())(dirty)
        want = jax.grad(lambda x, f=function: f(x)[:, :3].sum())(jnp.asarray(logits))
        assert np.isfinite(value) and not np.asarray(slope)[0, 2:].any()
        close.assert_near(slope, want)


def test_padded_vocabulary_changes_nothing():
    logits, tokens = _case()
    wide = np.pad(logits, ((0, 0), (0, 0), (0, 5)), constant_values=-np.inf)
    for function in (lambda x: logprobs.token_logprobs(x, jnp.asarray(tokens)), logprobs.token_entropy):
        close.assert_near(function(jnp.asarray(wide)), function(jnp.asarray(logits)))
        gradient = jax.grad(lambda x, f=function: f(x).sum())(jnp.asarray(wide))
        assert np.isfinite(gradient).all()


def test_bfloat16_logits_give_float32():
    logits, tokens = _case()
    assert logprobs.token_logprobs(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(tokens)).dtype == jnp.float32


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_bad_temperature_is_named(temperature):
    with pytest.raises(ValueError, match="temperature="):
        logprobs.token_entropy(jnp.zeros((1, 2, 3)), temperature=temperature)
