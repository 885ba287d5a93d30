"""Trap 50, libraries that bear one thread: the real TextWorld and TextArena, played by sixteen slots at once."""

import pathlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textworld

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.envs import text_games
from jaxrl_llm.envs.processes import in_processes
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.rollout.host.driver import make_host_episodes
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.run import catalog
from tests.models_for_tests import byte_model, small_config
from tests.traps.tables import table_policy

SEED = np.zeros((2,), np.uint32)


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    maker = textworld.GameMaker()
    kitchen = maker.new_room("kitchen")
    maker.set_player(kitchen)
    box, coin = maker.new(type="c", name="box"), maker.new(type="o", name="coin")
    maker.add_fact("closed", box)
    kitchen.add(box)
    box.add(coin)
    maker.quests = [maker.new_quest_using_commands(["open box", "take coin from box"])]
    options = textworld.GameOptions()
    options.path = str(tmp_path_factory.mktemp("games") / "coin.z8")
    return textworld.generator.compile_game(maker.build(), options)


@pytest.fixture(scope="module")
def textworlds():
    make = partial(text_games.textworld_env, write=text_games.with_commands)
    return in_processes(make, processes=2)


def test_forty_episodes_of_textworld_in_sixteen_threads(textworlds, game):
    def play(_):
        state = textworlds.reset(SEED, game)
        said = [textworlds.step(state, text) for text in ("look", "open box", "take coin from box")]
        textworlds.close(state)
        return [(x.text, x.reward, x.done, x.valid) for x in said]

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(play, range(40)))
    assert all(x == found[0] for x in found)
    assert found[0][-1][1:] == (1.0, True, True) and "You can: " in found[0][0][0]


def _episodes(given, tokenizer, say):
    """Sixteen slots, and a policy that always says the same."""
    size, ids, end = small_config(vocab_size=262).padded_vocab_size, tokenizer.encode(say), tokenizer.eos_ids[0]
    assert len(set(ids)) == len(ids)
    table = np.full((size, size), -30.0, np.float32)
    table[:, ids[0]] = 30.0
    for here, there in zip(ids, [*ids[1:], end], strict=True):
        table[here] = -30.0
        table[here, there] = 30.0
    host = make_host_episodes(
        table_policy(size), given.env, given.tasks, group_size=16, max_turns=2, max_new_tokens=400,
        end_ids=tokenizer.eos_ids, slots=16,
    )  # fmt: skip
    rows = jnp.arange(2, dtype=jnp.int32)
    keys = sample_keys(jax.random.key(0), 0, rows, 16)
    return host.play({"table": jnp.asarray(table)}, given.problems.tokens, given.problems.valid, keys, rows)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizers.load(byte_model(tmp_path_factory.mktemp("bytes")))


def test_slots_play_textworld(textworlds, game, tokenizer):
    sizes = {"action_tokens": 16, "observation_tokens": 150}
    given = text_games.game_texts(textworlds, [game, str(pathlib.Path(game))], tokenizer, **sizes)
    played = _episodes(given, tokenizer, "open bx")
    assert not played.failures
    rewards = multi_turn.episode_rewards({}, played.trajectories)
    assert rewards.valid.all() and set(np.asarray(multi_turn.turns_of(played.trajectories).taken.sum(1)).tolist()) == {
        2
    }


def test_a_game_is_data_of_an_experiment(tokenizer, monkeypatch):
    monkeypatch.setattr(catalog, "SEEDS", 8)
    settings = multi_turn_plan.Settings(data="textarena:GuessTheNumber-v0", eval_problems=3, env_processes=1)
    train, held = multi_turn_plan.open_place(settings, tokenizer)
    assert (len(train.tasks), held.tasks) == (8, [8, 9, 10])
    with pytest.raises(UserError, match="no TextArena game 'Nothing-v0'"):
        multi_turn_plan.open_place(multi_turn_plan.Settings(data="textarena:Nothing-v0"), tokenizer)


def test_slots_play_textarena(tokenizer):
    world = in_processes(partial(text_games.textarena_env, "GuessTheNumber-v0"), processes=2)
    sizes = {"action_tokens": 16, "observation_tokens": 150}
    played = _episodes(text_games.textarena_texts(world, [3, 4], tokenizer, **sizes), tokenizer, "[14]")
    assert not played.failures
    tokens, mask = np.asarray(played.trajectories.tokens), np.asarray(played.trajectories.segment_ids) > 0
    shown = [tokenizer.decode(line[seen].tolist()) for line, seen in zip(tokens, mask, strict=True)]
    for task in (shown[:16], shown[16:]):  # the same moves of the same seed are the same game, whoever plays beside it
        assert len(set(task)) == 1 and "[14]" in task[0]
