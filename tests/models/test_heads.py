import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import heads
from tests import close
from tests.models_for_tests import dense_rows, small_model

HEAD = {"weight": jnp.array([[1.0], [10.0]]), "bias": jnp.array([0.5])}
HIDDEN = jnp.array([[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [4.0, 1.0]]])  # with the bias: 1.5, 2.5, 30.5, 14.5


def test_values_by_hand():
    np.testing.assert_array_equal(heads.token_values(HEAD, HIDDEN), [[1.5, 2.5, 30.5, 14.5]])


def test_state_values_are_shifted_once():
    np.testing.assert_array_equal(heads.state_values(HEAD, HIDDEN), [[0.0, 1.5, 2.5, 30.5]])
    packed = jnp.array([[1, 1, 2, 2]])
    np.testing.assert_array_equal(heads.state_values(HEAD, HIDDEN, packed), [[0.0, 1.5, 0.0, 30.5]])
    left = jnp.array([[0, 1, 1, 1]])
    np.testing.assert_array_equal(heads.state_values(HEAD, HIDDEN, left), [[0.0, 0.0, 2.5, 30.5]])
    right = jnp.array([[1, 1, 1, 0]])
    np.testing.assert_array_equal(heads.state_values(HEAD, HIDDEN, right), [[0.0, 1.5, 2.5, 0.0]])


@pytest.mark.parametrize(
    ("segments", "want"), [([1, 1, 1, 1], 14.5), ([1, 1, 0, 0], 2.5), ([0, 0, 1, 1], 14.5), ([0, 1, 1, 0], 30.5)]
)
def test_reward_is_that_of_the_last_real_token(segments, want):
    assert float(heads.sequence_rewards(HEAD, HIDDEN, jnp.array([segments]))[0]) == want


def test_a_row_of_padding_is_zero_with_finite_gradient():
    segments = jnp.zeros((1, 4), jnp.int32)
    value, gradient = jax.value_and_grad(lambda h: heads.sequence_rewards(HEAD, h, segments).sum())(HIDDEN)
    assert float(value) == 0 and bool(jnp.all(gradient == 0))


def test_reward_does_not_depend_on_padding():
    policy, params, config = small_model()
    head = heads.init_head(config.hidden_size, jax.random.key(0), scale=1.0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 5)), jnp.int32)
    segments, positions = dense_rows(2, 5)

    def reward(left, right):
        pad = lambda x, fill: jnp.pad(x, ((0, 0), (left, right)), constant_values=fill)  # noqa: E731
        hidden = policy.hidden(params, pad(tokens, 9), pad(positions, 0), pad(segments, 0))
        return heads.sequence_rewards(head, hidden, pad(segments, 0))

    for left, right in ((2, 0), (0, 3), (1, 2)):
        close.assert_same_forward(reward(left, right), reward(0, 0), config, columns=5 + left + right)


def test_fresh_head_is_zero_and_learns():
    head = heads.init_head(2, jax.random.key(0))
    assert bool(jnp.all(heads.token_values(head, HIDDEN) == 0))
    gradient = jax.grad(lambda h: jnp.sum((heads.token_values(h, HIDDEN) - 1.0) ** 2))(head)
    assert all(bool(jnp.all(x != 0)) for x in jax.tree.leaves(gradient))


def test_several_outputs_and_bfloat16_hidden_states():
    head = heads.init_head(2, jax.random.key(0), outputs=5, scale=1.0)
    out = heads.apply_head(head, HIDDEN.astype(jnp.bfloat16))
    assert out.shape == (1, 4, 5) and out.dtype == jnp.float32


@pytest.mark.parametrize(("width", "outputs"), [(0, 1), (4, 0)])
def test_sizes_are_checked(width, outputs):
    with pytest.raises(ValueError, match=f"width={width} and outputs={outputs}"):
        heads.init_head(width, jax.random.key(0), outputs=outputs)
