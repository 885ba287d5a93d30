"""Trap 18, retokenisation: what is trained are the sampled ids, and a further turn appends to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data import chat
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train.methods.builders import make_estimate, score_tokens
from jaxrl_llm.types import Rewards
from tests import close
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


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def _characters(template):
    encode = lambda text: [ord(c) for c in text]  # noqa: E731
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
    return Tokenizer(encode, decode, 256, None, (ord("|"),), 0, (), template)


def test_a_further_turn_appends_and_never_encodes_history_again():
    before = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    new = [{"role": "user", "content": "sure?"}]
    tokenizer = _characters(TEMPLATE)
    assert tokenizer.decode(chat.encode_turns(tokenizer, before, new)) == "<u>sure?|<a>"
    rewriting = _characters("{{ messages | length }}" + TEMPLATE)
    with pytest.raises(UserError, match="rewrites earlier turns"):
        chat.encode_turns(rewriting, before, new)


def test_only_what_the_model_said_is_trained():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    ids, mask = chat.encode_dialogue(_characters(TEMPLATE), messages)
    assert "".join(chr(i) for i, kept in zip(ids, mask, strict=True) if kept) == "4|"


def test_in_episodes_what_the_world_says_is_read_and_never_trained():
    """A whole rollout of several turns: ids are only appended, observations stand outside the mask of the batch."""
    shown = jnp.asarray([5, 4], jnp.int32)  # what no decoding and encoding would give back

    def step(state, action, count):
        return multi_turn.Answered(state + 1, shown, jnp.int32(2), jnp.float32(1), state >= 2, state >= 0)

    env = multi_turn.Env(lambda key, task: task["start"], step, lambda state: state, 2, 2)
    table = problems()
    start = {"start": jnp.zeros((6,), jnp.int32)}
    play = multi_turn.make_episodes(
        table_policy(), env, start, group_size=4, max_turns=9, max_new_tokens=16, end_ids=(1, 2)
    )
    keys = jax.random.split(jax.random.key(0), 24)
    out = jax.jit(play)(params(), table.tokens, table.valid, keys, jnp.arange(6, dtype=jnp.int32))
    batch = make_estimate(table_policy(), advantages)(
        params(), {}, out, Rewards(jnp.ones((24,)), jnp.ones((24,), bool))
    )
    np.testing.assert_array_equal(batch.tokens, out.tokens)
    np.testing.assert_array_equal(batch.mask, out.mask)
    width = table.tokens.shape[1]
    for row, mask, real in zip(
        *(np.asarray(x)[:, width:] for x in (out.tokens, out.mask, out.segment_ids)), strict=True
    ):
        text = "".join("x" if m else str(t) for t, m, r in zip(row, mask, real, strict=True) if r)
        assert text.replace("xx", "x") == "x54x54x"  # three actions of one or two tokens, two observations between
    logp, _ = score_tokens(table_policy(), params(), out)
    keep = np.asarray(out.mask)
    close.assert_near(np.asarray(logp)[keep], np.asarray(out.sampler_logp)[keep])
