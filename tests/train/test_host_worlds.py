"""A method is trained on a world in Python by the host loop, in one thread and in three."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.advantages import group
from jaxrl_llm.asynchronous import threads
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.host import env
from jaxrl_llm.rollout.host.driver import make_host_episodes, only_on_host
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train import host
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss
from jaxrl_llm.train.online import Online, init_state
from jaxrl_llm.types import Problems
from tests import close
from tests.traps.tables import VOCAB, same, table_policy

LETTERS = "_.,abc"


def _bandit():
    """Two turns of one letter; each pays where it is ``a``; every eleventh state breaks."""

    def step(state, text):
        turn, luck = state
        if luck % 11 == 0:
            raise ConnectionError("the other side hung up")
        return TextStepResult((turn + 1, luck), "b", float(text == "a"), turn == 1)

    world = TextEnv(lambda seed, task: (0, int(seed[0])), step, lambda state: state[0])
    return env.spoken(
        world, lambda text: [LETTERS.index(c) for c in text], lambda ids: "".join(LETTERS[i] for i in ids),
        action_tokens=1, observation_tokens=1,
    )  # fmt: skip


def _advantages(trajectories, rewards):
    turns = multi_turn.turns_of(trajectories)
    values = multi_turn.returns_to_go(turns)
    centred = [
        group.dr_grpo_advantages(values[:, k], trajectories.group_ids, valid=rewards.valid)
        for k in range(values.shape[1])
    ]
    return multi_turn.over_turns(jnp.stack(centred, axis=1), turns, trajectories.mask)


@pytest.fixture(scope="module")
def method():
    policy = table_policy()
    tokens = jnp.full((8, 2), 4, jnp.int32)
    online = Online(
        policy=policy, problems=Problems(tokens, tokens > 0, {}, jnp.zeros((8,), jnp.int32)), sampler=make_epochs(),
        prompts_per_step=8, group_size=4, rollout=only_on_host, score=multi_turn.episode_rewards,
        estimate=make_estimate(policy, _advantages), loss=make_policy_loss(policy, clipped_policy_loss),
        tx=optax.adam(0.1),
    )  # fmt: skip
    world = make_host_episodes(
        policy, _bandit(), [None] * 8, group_size=4, max_turns=2, max_new_tokens=3, end_ids=(), slots=8
    )
    return online, host.make_host_loop(online, world=world)


def _start(online, seed=0):
    return init_state(online, online.policy.init(jax.random.key(seed)), jax.random.key(seed))


@pytest.mark.slow
def test_a_python_world_is_learned_in_the_host_loop(method):
    online, loop = method
    steps = list(host.iterations(loop, _start(online), 40))
    rewards = np.asarray([step.metrics["reward/mean"] for step in steps])
    assert rewards[:3].mean() < 1.0 and rewards[-3:].mean() > 1.8
    largest = max(float(jnp.abs(step.drawn.trajectories.sampler_logp).max()) for step in steps)
    # a product with a row of the table and its softmax
    assert max(step.metrics["kl/sampler_max"] for step in steps) < close.bound(2 * VOCAB, largest)
    assert len({step.compiled for step in steps}) == 1
    # what broke was left out: it moved neither the mean nor the run
    valid = np.asarray([step.metrics["reward/valid_fraction"] for step in steps])
    failed = np.asarray([step.metrics["world/failed_fraction"] for step in steps])
    close.assert_near(valid + failed, np.ones(len(steps)), terms=3)
    assert 0.0 < failed.mean() < 0.25 and all(0.0 < s.metrics["world/occupancy"] <= 1.0 for s in steps)


def test_three_threads_and_one_agree_without_staleness(method):
    online, loop = method
    one, _ = host.run(loop, _start(online), 3)
    three, history = threads.run(loop, _start(online), 3, staleness=0)
    same(one.params, three.params)
    assert all("world/occupancy" in row for row in history)


def test_without_a_world_the_method_says_what_is_missing(method):
    online, _ = method
    with pytest.raises(ValueError, match="make_host_loop\\(online, world="):
        host.make_host_loop(online).begin(_start(online))
