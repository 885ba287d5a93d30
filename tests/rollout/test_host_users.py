"""Talks with users of files: what ends them and what they pay, and what is believed of a type from what was said."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import user_simulator
from experiments.agents.parts.user_simulator import User
from jaxrl_llm.advantages import beliefs
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.tools import endpoints
from jaxrl_llm.train.methods import answer_probability
from jaxrl_llm.types import Problems, Rewards
from tests import close
from tests.models_for_tests import byte_tokenizer, small_config, small_model
from tests.rollout.test_answer_chances import _rows

TYPES = ("Boxing", "Yoga")
CALM = User("likes it calm", "Yoga", "Hi!")


@pytest.mark.parametrize("text", ["\n" * 100_000, "Recommend: a" + " " * 100_000 + "b", "Recommend:" + "\n" * 100_000])
def test_long_texts_are_read_once(text):
    start = time.process_time()
    assert user_simulator.recommended(text, TYPES) in (None, "")
    assert time.process_time() - start < 5.0


def test_what_is_recommended_may_stand_on_the_next_line():
    assert user_simulator.recommended(" Recommend:\n\n  yoga \t\nso", TYPES) == "Yoga"
    assert user_simulator.recommended("I Recommend: yoga", TYPES) is None
    assert user_simulator.recommended("Recommend:", TYPES) is None


def test_a_talk_goes_on_until_something_is_recommended():
    heard = []

    def user(messages, draw):
        heard.append(messages)
        return "I like it calm."

    world = user_simulator.user_world(TYPES, user)
    at = world.reset(np.zeros(2, np.uint32), CALM)
    said = world.step(at, "What do you like?")
    assert (said.text, said.reward, said.done) == ("I like it calm.", 0.0, False)
    assert [m["role"] for m in heard[0]] == ["system", "user", "assistant", "user"]
    assert heard[0][0]["content"].endswith("Profile: likes it calm") and "Yoga" not in str(heard)
    assert world.identity(said.state) != world.identity(at)
    for text, paid in (("Recommend: Yoga", 1.0), ("So.\nrecommend: *yoga*.", 1.0), ("Recommend: Boxing", 0.0),
                       ("Recommend: sleep", 0.0), ("Recommend: Yoga\nRecommend: Boxing", 0.0)):  # fmt: skip
        ended = world.step(said.state, text)
        assert (ended.reward, ended.done, ended.text) == (paid, True, ""), text
    assert len(heard) == 1


def test_a_user_who_does_not_reply_makes_the_talk_invalid():
    def silent(messages, draw):
        raise endpoints.Unanswered("away")

    world = user_simulator.user_world(TYPES, silent)
    said = world.step(world.reset(np.zeros(2, np.uint32), CALM), "Hm?")
    assert not said.valid and said.reason == "the user: away"


def test_users_of_a_file(tmp_path):
    path = tmp_path / "users.jsonl"
    rows = [{"profile": "a", "type": " Yoga "}, {"profile": "b", "type": "Boxing", "opening": "Hey"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    users, types = user_simulator.read(str(path))
    assert users == [User("a", "Yoga"), User("b", "Boxing", "Hey")] and types == TYPES
    assert "one of: Boxing, Yoga" in user_simulator.asked(users[1], types).prompt
    assert user_simulator.asked(users[1], types).prompt.endswith("\n\nHey")
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(UserError, match="users have 1 types; give 2 to 64"):
        user_simulator.read(str(path))
    path.write_text(json.dumps({"profile": "a", "type": 3}))
    with pytest.raises(DataError, match="users.jsonl:1: type: 3 is not"):
        user_simulator.read(str(path))


def test_beliefs_are_the_chances_of_the_types_made_to_sum_to_one():
    policy, params, _ = small_model()
    named = {"gold": jnp.asarray([[3, 12, 13], [3, 14, 0], [3, 9, 0]]),
             "gold_kind": jnp.asarray([[1, 2, 2], [1, 2, 0], [1, 2, 0]])}  # fmt: skip
    rows = _rows()
    answers = {name: jnp.broadcast_to(x[None], (2, *x.shape)) for name, x in named.items()}
    before, after = jax.jit(lambda rows: user_simulator.user_beliefs(policy, params, rows, answers))(rows)
    chances = []
    for v in range(3):
        mine = {name: jnp.broadcast_to(x[v][None], (2, 3)) for name, x in named.items()}
        chances.append(np.asarray(answer_probability.answer_chances(policy, params, rows, mine), np.float64))
    wanted = np.stack(chances, axis=2)
    taken = np.asarray(turns_of(rows).taken)
    wanted = wanted / np.maximum(wanted.sum(2, keepdims=True), 1e-30)
    close.assert_near(np.asarray(before)[taken], wanted[taken], terms=2 * close.forward_sums(small_config(), 12))
    close.assert_relative(before.sum(2), 1.0)
    # a reply moves the belief; behind the last turn nothing is said
    np.testing.assert_array_equal(after[0, 0], before[0, 1])
    np.testing.assert_array_equal(after[0, 1], before[0, 1])
    np.testing.assert_array_equal(after[1, 0], before[1, 0])
    assert float(jnp.max(jnp.abs(after[0, 0] - before[0, 0]))) > 1e-4
    gained = beliefs.shaped_rewards(before, after, jnp.array([1, 0]), turns_of(rows).taken)
    assert gained[0, 1] == 0.0 and gained[1, 0] == 0.0 and gained[0, 0] != 0.0


def test_types_as_tokens_begin_with_what_is_believed(tmp_path):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    named = user_simulator.type_tokens(tokenizer, TYPES)
    for v, name in enumerate(TYPES):
        kind, tokens = np.asarray(named["gold_kind"][v]), np.asarray(named["gold"][v])
        assert tokenizer.decode(tokens[kind == 1].tolist()) == user_simulator.BELIEVED
        assert tokenizer.decode(tokens[kind == 2].tolist()) == name


def test_figures_count_questions():
    rows = _rows()
    valid = Rewards(jnp.zeros(2), jnp.ones(2, bool))
    problems = Problems(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), {}, jnp.zeros(1, jnp.int32))
    found = user_simulator.figures(rows, valid, problems)
    assert {k: float(x) for k, x in found.items()} == {"eval/asked": 0.5, "eval/recommended": 1.0}
