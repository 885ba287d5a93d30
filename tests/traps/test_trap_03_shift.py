"""Trap 3, off-by-one shift: a model of three tokens, enumerated by hand."""

import itertools

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import logprobs
from tests import close
from tests.traps.tables import table_policy

TABLE = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.25, 0.5, 0.25]]))


def test_every_sequence_of_three_tokens():
    policy, params = table_policy(3), {"table": jnp.asarray(TABLE, jnp.float32)}
    rows = np.array([(0, *tail) for tail in itertools.product(range(3), repeat=2)], np.int32)
    hidden = policy.hidden(params, jnp.asarray(rows), None, None)
    logp = np.asarray(logprobs.token_logprobs(policy.unembed(params, hidden), jnp.asarray(rows)))
    entropy = np.asarray(logprobs.token_entropy(policy.unembed(params, hidden)))
    for row, got, spread in zip(rows, logp, entropy, strict=True):
        assert got[0] == 0.0 and spread[0] == 0.0
        for t in (1, 2):
            close.assert_near(got[t], TABLE[row[t - 1], row[t]])
            p = np.exp(TABLE[row[t - 1]])
            close.assert_near(spread[t], -(p * np.log(p)).sum())
    close.assert_near(np.exp(logp.sum(1)).sum(), 1.0, terms=9)
