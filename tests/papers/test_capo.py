"""CAPO: votes of critics, token rewards in which the outcome dominates, normalisation over a group's tokens."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import strings
from experiments.reward_models.parts import step_labels
from jaxrl_llm.advantages import group, process
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout.keys import sample_keys
from tests import close

WRONG = jnp.array([[[True, False], [True, True], [False, False]]])
ALL = jnp.ones((1, 3), bool)


def test_worked_votes():
    assert process.majority(WRONG, ALL).tolist() == [[1.0, 0.0]]
    assert process.unanimous(WRONG, ALL).tolist() == [[0.0, 0.0]]
    close.assert_near(process.average(WRONG, ALL), [[2 / 3, 1 / 3]], magnitude=0)
    two = jnp.array([[True, True, False]])  # the third critic said nothing that could be read
    assert process.unanimous(WRONG, two).tolist() == [[1.0, 0.0]]
    assert process.majority(WRONG, two).tolist() == [[1.0, 0.0]]
    plain = inspect.unwrap(process.unanimous)  # a user's process checks no annotations: votes may be numbers
    assert plain(WRONG.astype(jnp.int32), jnp.ones((1, 3), jnp.int32)).tolist() == [[0.0, 0.0]]
    silent = jnp.zeros((1, 3), bool)
    for vote in (process.majority, process.unanimous, process.average):
        assert vote(WRONG, silent).tolist() == [[0.0, 0.0]]


def test_worked_token_rewards():
    flaws, mask = jnp.array([[0.0, 0.0, 1.0, 1.0, 0.0]]), jnp.array([[True] * 4 + [False]])
    paid = process.credited(jnp.array([True]), flaws, mask)
    assert paid.tolist() == [[2.0, 2.0, 1.0, 1.0, 0.0]]
    wrong = process.credited(jnp.array([False]), jnp.zeros((1, 5)), mask)
    assert float(paid[:, :4].min()) > float(wrong.max())  # a flawed step of a right answer beats a wrong answer


def test_without_flaws_it_is_group_normalisation():
    rewards, ids, mask = (
        jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
        jnp.array([0, 0, 0, 0, 1, 1]),
        jnp.ones((6, 3), bool),
    )
    paid = process.credited(rewards > 0, jnp.zeros((6, 3)), mask, penalty=0.0)
    found = process.group_token_normalized(paid, ids, mask, eps=0.0)
    expected = group.group_normalized_advantages(rewards, ids, ddof=0, eps=0.0)
    close.assert_near(found, np.repeat(np.asarray(expected)[:, None], 3, axis=1))


def test_normalisation_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    rewards, mask, ids = rng.normal(size=(9, 5)), rng.random((9, 5)) < 0.7, np.repeat(np.arange(3), 3)
    expected = np.zeros((9, 5))
    for g in range(3):
        own = mask & (ids == g)[:, None]
        expected[own] = (rewards[own] - rewards[own].mean()) / rewards[own].std()
    given = jnp.asarray(np.where(mask, rewards, np.nan), jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(mask)
    close.assert_near(process.group_token_normalized(*given, eps=0.0), expected)


# --- critics that write

CRITIC = step_labels.Critic(strings.make_world(5, 1, 4, end=3), right=0, wrong=1, cue=2)


def test_worked_critiques():
    said = jnp.array([[[0, 1, 3, 3], [1, 3, 3, 3], [0, 0, 1, 3], [2, 1, 3, 3]]])  # of two steps
    wrong, spoke = step_labels.read_critiques(CRITIC, said, jnp.array([[True, True, False]]))
    assert spoke.tolist() == [[True, False, False, False]]  # one word is too few, three too many, 2 is no verdict
    assert wrong[0].tolist() == [[False, True, False]] + [[False] * 3] * 3


def test_what_is_written_is_read_again():
    rng = np.random.default_rng(0)
    count = rng.integers(0, 4, 50)
    valid = np.arange(3)[None, :] < count[:, None]
    right = rng.integers(0, 2, (50, 3))
    said = step_labels.written_critique(CRITIC, jnp.asarray(right, jnp.float32), jnp.asarray(valid))
    for n in range(50):
        assert said[n].tolist() == [1 - int(x) for x in right[n, : count[n]]] + [3] * (4 - count[n])
    wrong, spoke = step_labels.read_critiques(CRITIC, said[:, None], jnp.asarray(valid))
    assert spoke.all() and (np.asarray(wrong[:, 0]) == ((right == 0) & valid)).all()


def test_a_critic_that_does_not_fit_is_refused():
    settings = recipes.OnlineSettings(levels=(1,), train_problems=6, eval_problems=4, max_new_tokens=14)
    found = recipes.bench(settings)
    with pytest.raises(UserError, match="lower --max-new-tokens"):
        step_labels.make_critic(settings, found, most=found.model.config.max_positions)


@pytest.mark.slow
def test_a_taught_critic_tells_wrong_steps_of_new_samples():
    settings = recipes.OnlineSettings(levels=(2,), train_problems=192, eval_problems=4, max_new_tokens=24)
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    critic = step_labels.make_critic(settings, found, most=4)
    fit = jax.jit(step_labels.make_critic_fit(settings, critic, prompts=128, steps=150, most=4))
    params = fit(jax.random.key(0))
    roll = recipes.rollout_of(settings, found, group_size=1)
    ids = jnp.arange(192, dtype=jnp.int32)
    rows = roll(
        found.model.params, found.train.tokens, found.train.valid, sample_keys(jax.random.key(7), 0, ids, 1), ids
    )
    _, right, valid = step_labels.step_scores(stepped, rows, most=4)
    wrong, spoke = step_labels.critiques(critic, params, rows, valid, jax.random.key(8), votes=4)
    assert float(spoke.mean()) > 0.8
    share, true = np.asarray(process.average(wrong, spoke))[valid], np.asarray(right)[valid] < 0.5
    pairs = (share[true][:, None] > share[~true][None]) + 0.5 * (share[true][:, None] == share[~true][None])
    assert true.any() and (~true).any() and pairs.mean() > 0.6  # the area under its curve; of chance 0.5
    # an untaught one writes no critique that can be read
    _, before = step_labels.critiques(critic, found.model.params, rows, valid, jax.random.key(8), votes=1)
    assert float(before.mean()) < 0.2
