"""Trap 1, padding side: pads on either side change no log-probability, whatever token fills them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import small_model
from tests.traps.tables import random_batch


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 3), (2, 1)])
def test_log_probs_do_not_see_the_pads(left, right):
    policy, params, _ = small_model()
    plain: Batch = random_batch(3, 6)

    def pad(x, fill):
        return jnp.pad(x, ((0, 0), (left, right)), constant_values=fill)

    padded = plain._replace(
        tokens=pad(plain.tokens, 5), segment_ids=pad(plain.segment_ids, 0), positions=pad(plain.positions, 0)
    )
    score = jax.jit(lambda batch: score_tokens(policy, params, batch)[0])
    want, got = score(plain), score(padded)
    close.assert_same_forward(got[:, left : left + 6], want, columns=got.shape[1])
    assert not np.any(got[:, :left]) and not np.any(got[:, left + 6 :])
