"""Worlds of other packages: Gymnasium's interface, the package itself where it is there, and reasoning-gym."""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.envs import text as host_texts
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.driver import make_host_episodes
from jaxrl_llm.rollout.host.env import fitting, single_turn
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.verifiers import gym
from jaxrl_llm.verifiers.verdict import Verdict
from tests.models_for_tests import byte_model, small_config
from tests.traps.tables import table_policy
from tests.waits import soon

NO_SEED = np.zeros((2,), np.uint32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizers.load(byte_model(tmp_path_factory.mktemp("bytes")))


class Stairs:
    """Gymnasium's interface: climb from the seeded floor to the third in five moves."""

    closed = 0  # of all

    def reset(self, *, seed):
        self.floor, self.moves = int(np.random.default_rng(seed).integers(0, 2)), 0
        return self.floor, {"doors": self.floor + 1}

    def step(self, action):
        self.floor, self.moves = max(self.floor + (1 if action else -1), 0), self.moves + 1
        there = self.floor == 3
        return self.floor, float(there), there, self.moves >= 5, {"doors": self.floor + 1}

    def close(self):
        Stairs.closed += 1


def _stairs():
    return host_texts.gymnasium_env(
        Stairs, read=host_texts.named_actions(["down", "up"]), write=lambda o, info: f"floor {o}, {info['doors']} doors"
    )


def test_gymnasium_worlds_speak_text_and_take_anything():
    world = _stairs()
    place = world.reset(NO_SEED, 0)
    assert place.text == world.reset(NO_SEED, 0).text
    before = world.identity(place)
    said = world.step(place, "jump")
    assert said.text == f"That is no action. {place.text}" and (said.reward, said.done) == (0.0, False)
    assert world.identity(said.state) == before
    while not said.done:
        said = world.step(said.state, " UP ")
    assert said.text == "floor 3, 4 doors" and said.reward == 1.0 and not said.cut
    assert world.identity(said.state) != before
    said = world.step(world.reset(NO_SEED, 0), "down")
    for _ in range(4):
        said = world.step(said.state, "down")
    assert said.cut and not said.done  # out of time, which is no end


def test_episodes_of_a_gymnasium_world(tokenizer):
    """A policy that always says ``up``: byte tokens, an end token, everything outside the action forced."""
    given = host_texts.gymnasium_texts(
        _stairs(), range(4), tokenizer, action_tokens=4, observation_tokens=32, prompt=lambda text: f"{text}:",
        encode=lambda text: tokenizer.encode(f"<{text}>"),
    )  # fmt: skip
    assert given.tasks == [0, 1, 2, 3] and given.problems.tokens.shape[0] == 4
    size, (u, p), end = small_config(vocab_size=262).padded_vocab_size, tokenizer.encode("up"), tokenizer.eos_ids[0]
    table = np.full((size, size), -30.0, np.float32)
    table[:, u], table[u] = 30.0, -30.0
    table[u, p], table[p] = 30.0, -30.0
    table[p, end] = 30.0
    host = make_host_episodes(
        table_policy(size), given.env, given.tasks, group_size=1, max_turns=4, max_new_tokens=120,
        end_ids=tokenizer.eos_ids, slots=3,
    )  # fmt: skip
    assert Stairs.closed == 4  # those that showed the prompts
    ids = jnp.arange(4, dtype=jnp.int32)
    out = host.play(
        {"table": jnp.asarray(table)}, given.problems.tokens, given.problems.valid,
        sample_keys(jax.random.key(0), 0, ids, 1), ids,
    ).trajectories  # fmt: skip
    turns, rewards = multi_turn.turns_of(out), multi_turn.episode_rewards({}, out)
    assert rewards.value.tolist() == [1.0] * 4 and turns.done.all() and soon(lambda: Stairs.closed == 8)
    for row in range(4):
        shown = tokenizer.decode(np.asarray(out.tokens[row])[np.asarray(out.segment_ids[row]) > 0].tolist())
        first = int(shown.split("floor ")[1][0])
        floors = range(first + 1, 3)
        assert (
            shown
            == f"floor {first}, {first + 1} doors:" + "".join(f"up<floor {f}, {f + 1} doors>" for f in floors) + "up"
        )
        chosen = np.asarray(out.tokens[row])[np.asarray(out.mask[row])].tolist()
        assert chosen == [u, p, end] * (3 - first)


def test_the_package_itself():
    pytest.importorskip("gymnasium")
    world = host_texts.gymnasium_env(
        host_texts.gymnasium_maker("FrozenLake-v1", is_slippery=False),
        read=host_texts.named_actions(["left", "down", "right", "up"]), write=lambda o, _: f"cell {int(o)}",
    )  # fmt: skip
    said = world.step(world.reset(NO_SEED, 3), "Down")
    assert said.text == "cell 4" and not said.done
    for action in ("down", "right", "right", "down", "right"):
        said = world.step(said.state, action)
    assert said.done and said.reward == 1.0 and said.text == "cell 15"
    with pytest.raises(UserError, match="no Gymnasium environment 'Nowhere-v0'"):
        host_texts.gymnasium_maker("Nowhere-v0")


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[envs\]'"):
        host_texts.gymnasium_maker("FrozenLake-v1")


# --- one turn


class _Answer(NamedTuple):
    value: int


def test_a_text_of_megabytes_is_not_encoded_as_a_whole():
    seen = []

    def encode(text):
        seen.append(len(text))
        return [0, *[1] * (len(text) // 100), 2]

    assert fitting("x" * 5_000_000, encode, 6) == [0, 1, 1, 1, 1, 2] and max(seen) == 768
    assert fitting("x" * 500, encode, 600) == [0, 1, 1, 1, 1, 1, 2]


def test_verdicts_are_rewards_and_failures_of_the_judge_are_invalid():
    def verify(answer, text):
        return Verdict(float(text == "4"), text != "?", "judged")

    world = single_turn(verify)
    state = world.reset(NO_SEED, _Answer(4))
    for text, reward, valid in (("4", 1.0, True), ("5", 0.0, True), ("?", 0.0, False)):
        said = world.step(state, text)
        assert (said.reward, said.valid, said.done, said.reason) == (reward, valid, True, "judged")
    assert world.identity(state) == world.identity(_Answer(4)) != world.identity(_Answer(5))


def test_reasoning_gym_families_are_worlds_of_one_turn(tokenizer):
    given = host_texts.reasoning("chain_sum", 3, 0, tokenizer, action_tokens=24, min_terms=2, max_terms=2)
    assert given.problems.tokens.shape[0] == len(given.tasks) == 3
    shown = tokenizer.decode(np.asarray(given.problems.tokens[1])[np.asarray(given.problems.valid[1])].tolist())
    assert "+" in shown or "-" in shown
    right = gym.problems("chain_sum", 3, 0, min_terms=2, max_terms=2).solutions[1]
    for text, reward in ((f"<answer>{right}</answer>", 1.0), ("<answer>none</answer>", 0.0)):
        heard = given.env.step(given.env.reset(NO_SEED, given.tasks[1]), tokenizer.encode(text))
        assert (heard.reward >= 1.0) == (reward == 1.0) and heard.done and heard.valid
