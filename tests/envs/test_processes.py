"""Envs in processes: the same episodes as in this one, deadlines, deaths, and what becomes of the others."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.envs.processes import EnvFailed, EpisodeLost, in_processes
from jaxrl_llm.errors import UserError
from tests.envs import processes_for_tests as games
from tests.waits import soon

SEED = np.asarray([1, 2], np.uint32)


@pytest.fixture(scope="module")
def world():
    return in_processes(games.make_counter, processes=2, call_s=1.0)


def played(world, start, texts):
    episode = world.reset(SEED, start)
    shown = [world.first(episode), world.identity(episode)]
    for text in texts:
        said = world.step(episode, text)
        shown += [said[1:], world.identity(said.state)]
    world.close(episode)
    return shown


def test_the_same_episodes_as_in_one_process_from_sixteen_threads(world):
    here, texts = games.make_counter(), ["a", "dice", "cut", "stop"]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda k: played(world, k, texts), range(64)))
    assert found == [played(here, k, texts) for k in range(64)]


def test_episodes_are_shared_out(world):
    episodes = [world.reset(SEED, 0) for _ in range(4)]
    at = [world.step(episode, "process").text for episode in episodes]
    assert len(set(at)) == 2 and at.count(at[0]) == 2 and str(os.getpid()) not in at
    for episode in episodes:
        world.close(episode)


@pytest.mark.parametrize(
    "text, message",
    [("hang", "no answer to step within call_s=1; its process was killed"), ("die", "ended with code -11 during step")],
)
def test_a_lost_process_loses_only_the_episode_at_fault(world, text, message):
    episodes = [world.reset(SEED, k) for k in range(6)]
    before = [world.step(episode, "dice").text for episode in episodes]
    with pytest.raises(EpisodeLost, match=message):
        world.step(episodes[0], text)
    world.close(episodes[0])  # has nothing to let go of
    here = games.make_counter()
    for k, episode in enumerate(episodes[1:], start=1):
        mine = here.reset(SEED, k)
        assert here.step(mine, "dice").text == before[k]
        said, expected = world.step(episode, "dice"), here.step(mine, "dice")
        assert said[1:] == expected[1:] and world.identity(episode) == here.identity(mine)
        world.close(episode)


def test_an_episode_that_does_not_repeat_itself_is_lost():
    world = in_processes(partial(games.make_counter, moody=True), processes=1, call_s=1.0)
    one, other, still = (world.reset(SEED, 0) for _ in range(3))
    world.step(one, "dice")
    with pytest.raises(EpisodeLost):
        world.step(other, "die")
    with pytest.raises(EpisodeLost, match="did not repeat itself"):
        world.step(one, "dice")
    assert world.step(still, "a").text == "at 1"  # had not drawn yet


def test_exceptions_of_the_env_are_those_of_the_episode(world):
    episode = world.reset(SEED, 1000)
    for text, message in (("fail", "KeyError: 'no such door'"), ("leave", "SystemExit: 3"), ("eat", "MemoryError")):
        with pytest.raises(EnvFailed, match=message):
            world.step(episode, text)
    assert world.step(episode, "a").text == "at 1001"
    with pytest.raises(UserError, match="no such task; give a number"):
        world.reset(SEED, "nowhere")
    for _ in range(12):
        world.step(episode, "a")
    with pytest.raises(EnvFailed, match="it is stuck"):
        world.close(episode)


def test_a_process_that_died_while_idle_is_replaced(world):
    episode = world.reset(SEED, 5)
    pid = int(world.step(episode, "process").text)
    os.kill(pid, 9)
    assert soon(lambda: not os.path.exists(f"/proc/{pid}") or "Z" in open(f"/proc/{pid}/stat").read().split(")")[1][:3])
    with pytest.raises(EpisodeLost, match="did not repeat itself|ended with code -9"):
        world.step(episode, "a")  # it had shown the number of its process
    fresh = world.reset(SEED, 5)
    assert world.step(fresh, "a").text == "at 6"


def test_what_cannot_be_made_is_said_at_once():
    with pytest.raises(UserError, match="^needs a package; pip install it$"):
        in_processes(games.make_nothing)
    with pytest.raises(UserError, match="an env cannot be made: ImportError: libgame.so"):
        in_processes(games.make_wrong)
    with pytest.raises(UserError, match="did not come up within start_s=0.5"):
        in_processes(games.make_late, start_s=0.5)
    with pytest.raises(ValueError, match="make=.* must be a module-level function"):
        in_processes(lambda: None)
    for wrong in ({"processes": 0}, {"call_s": 0.0}, {"start_s": -1.0}):
        with pytest.raises(ValueError, match="must be positive"):
            in_processes(games.make_counter, **wrong)


def test_processes_end_with_the_env():
    world = in_processes(games.make_counter, processes=1)
    pid = int(world.step(world.reset(SEED, 0), "process").text)
    assert os.path.exists(f"/proc/{pid}")
    del world
    gc.collect()
    started = time.monotonic()
    assert soon(lambda: not os.path.exists(f"/proc/{pid}")) and time.monotonic() - started < 30
