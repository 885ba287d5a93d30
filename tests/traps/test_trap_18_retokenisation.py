"""Trap 18, retokenisation: what is trained are the sampled ids, also where text would encode to others."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.train.estimates import make_estimate
from tests.models_for_tests import nano
from tests.traps.tables import advantages, params, problems, rollout, score, table_policy


def test_the_batch_holds_the_sampled_ids():
    table = problems()
    keys = jax.random.split(jax.random.key(0), 24)
    out = rollout(params(), table.tokens, table.valid, keys, jnp.arange(6, dtype=jnp.int32))
    answers = jax.tree.map(lambda x: x[out.problem_ids], table.answers)
    batch = make_estimate(table_policy(), advantages)(params(), {}, out, score(answers, out))
    np.testing.assert_array_equal(batch.tokens, out.tokens)
    np.testing.assert_array_equal(batch.mask, out.mask)
    assert not np.asarray(batch.mask)[:, : table.tokens.shape[1]].any()  # nothing that the model did not produce


def test_text_does_lose_ids_so_the_rule_matters():
    _, _, _, tokenizer = nano()
    ids = [*tokenizer.encode("12"), tokenizer.eos_ids[0], *tokenizer.encode("3")]
    assert tokenizer.encode(tokenizer.decode(ids)) != ids
