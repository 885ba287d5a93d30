"""Trap 7, truncated sampling support: off by default; where on, the recorded log-prob is the trainer's."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.sample import draw, support
from jaxrl_llm.train.methods.builders import score_tokens
from tests import close
from tests.traps.tables import params, problems, table_policy


def test_the_default_is_the_whole_distribution():
    defaults = {k: p.default for k, p in inspect.signature(generate).parameters.items()}
    assert (defaults["top_k"], defaults["top_p"], defaults["min_p"], defaults["temperature"]) == (None, None, None, 1.0)
    n = 4000
    logits = jnp.log(jnp.array([[0.97, 0.02, 0.01]]))
    tokens, _ = draw(jnp.tile(logits, (n, 1)), jax.random.split(jax.random.key(0), n))
    assert set(np.asarray(tokens).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_truncated_draw_records_what_the_trainer_scores(options):
    policy, table = table_policy(), problems()
    keys = jax.random.split(jax.random.key(0), 24)
    out = generate(
        policy, params(), table.tokens, table.valid, keys, group_size=4, max_new_tokens=5, eos_ids=(1,), **options
    )
    logp, _ = score_tokens(policy, params(), out)
    keep = np.asarray(out.mask)
    close.assert_near(np.asarray(logp)[keep], np.asarray(out.sampler_logp)[keep])
    before = np.asarray(out.tokens)[:, :-1][keep[:, 1:]]
    allowed = np.asarray(support(params()["table"], **options))
    assert allowed[before, np.asarray(out.tokens)[:, 1:][keep[:, 1:]]].all()
    assert not allowed.all()
