"""UFO: early and new answers pay; the world that asks again, and what its rewards push a policy to."""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from experiments.agents import ufo
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import asked_again
from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.types import Rewards, Trajectories
from tests import close


class Rows(NamedTuple):
    mask: Array
    group_ids: Array


def _total(answers, valid, right_at, decay=0.5, weight=0.5):
    rewards, turns = jnp.asarray(right_at > 0, jnp.float32), jnp.asarray(np.maximum(right_at, 1), jnp.int32)
    penalty = shaping.repetition_penalty(jnp.asarray(answers, jnp.int32), jnp.asarray(valid), weight=weight)
    return shaping.early_rewards(rewards, turns, decay=decay) + penalty


def test_worked_examples():
    # answers 3, 3, 5, right at the third; right at the first; five equal wrong ones
    answers = np.asarray([[3, 3, 5, 0, 0], [7, 0, 0, 0, 0], [2, 2, 2, 2, 2]])
    valid = np.arange(5)[None, :] < np.asarray([[3], [1], [5]])
    found = _total(answers, valid, np.asarray([3, 1, 0]))
    close.assert_near(found, [0.25 - 0.5 / 3, 1.0, -0.4])
    # without any valid answer nothing was repeated
    assert float(_total(answers[:1], valid[:1] & False, np.asarray([0]))[0]) == 0.0
    with pytest.raises(ValueError, match=r"decay=1\.5"):
        _total(answers, valid, np.asarray([3, 1, 0]), decay=1.5)


def test_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    answers, valid, right_at = rng.integers(0, 4, (32, 5)), rng.random((32, 5)) < 0.7, rng.integers(0, 6, 32)
    expected = np.zeros(32)
    for i in range(32):
        given = [int(a) for a, v in zip(answers[i], valid[i], strict=True) if v]
        share = len(set(given)) / len(given) if given else 1.0
        expected[i] = (0.7 ** (right_at[i] - 1) if right_at[i] else 0.0) - 0.3 * (1 - share)
    close.assert_near(_total(answers, valid, right_at, decay=0.7, weight=0.3), expected)


def test_limits():
    answers, valid = np.asarray([[4], [5]]), np.ones((2, 1), bool)
    # one turn: the reward of single answers, whatever the two numbers
    np.testing.assert_array_equal(_total(answers, valid, np.asarray([1, 0]), decay=0.1, weight=0.9), [1.0, 0.0])
    # neither price: success within the turns
    many = _total(np.full((3, 5), 2), np.ones((3, 5), bool), np.asarray([2, 5, 0]), decay=1.0, weight=0.0)
    np.testing.assert_array_equal(many, [1.0, 1.0, 0.0])


def test_groups_whose_rewards_deviate_most_train():
    """Two of four: the mask of the others is empty, and all of it stands where every group trains."""
    rewards = Rewards(jnp.asarray([0.0, 1.0, 0.5, 0.5, 0.1, 0.7, 0.2, 0.3]), jnp.ones(8, bool))
    rows = Rows(jnp.ones((8, 3), bool), jnp.repeat(jnp.arange(4, dtype=jnp.int32), 2))
    kept = ufo.widest(lambda params, extras, rows, rewards: rows.mask, 0.5)({}, {}, rows, rewards)
    assert kept.all(axis=1).tolist() == [True, True, False, False, True, True, False, False] and kept.sum() == 12
    whole = ufo.widest(len, 1.0)
    assert whole is len
    with pytest.raises(UserError, match="--keep-share 0"):
        ufo.build(ufo.Settings(keep_share=0.0))


def _expected(chance, odds, turns):
    """The mean reward of a policy that says the first of two letters with ``chance``, whatever was said before."""
    said = np.asarray(list(itertools.product((0, 1), repeat=turns)))
    mean = jnp.zeros((), jnp.float32)
    for right, share in ((0, odds), (1, 1 - odds)):
        hits = said == right
        used = np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, turns)
        total = _total(said, np.arange(turns)[None, :] < used[:, None], np.where(hits.any(axis=1), used, 0))
        # sequences that agree up to the end of the episode share its chance; what follows sums to 1
        mean = mean + share * jnp.sum(jnp.prod(jnp.where(said == 0, chance, 1 - chance), axis=1) * total)
    return mean


def test_one_turn_pushes_to_one_answer_and_two_turns_away():
    certain, odds = jnp.ones((), jnp.float32), 0.6
    alone = jax.grad(lambda c: _expected(c, odds, 1))(certain)
    again = jax.grad(lambda c: _expected(c, odds, 2))(certain)
    # 2 odds - 1, and odds / 2 - 2 (1 - odds)
    close.assert_near(alone, 0.2)
    close.assert_near(again, -0.5)


# --- the world


def _in_order(state, key):
    """The letters shown, from left to right."""
    left = ~state.said[state.shown]
    return (asked_again.FIRST + state.shown[jnp.argmax(left)])[None]


def test_letters_in_order_are_always_right_and_feedback_is_not_trained_on():
    arena = dataclasses.replace(asked_again.make_asked_again(), behave=_in_order)
    rows = jax.jit(lambda key: arenas.play(arena, key, 24))(jax.random.key(0))
    tokens, used, mask = (np.asarray(x) for x in (rows.tokens, rows.segment_ids, rows.mask))
    right = np.asarray(arena.train.answers["right"])[np.asarray(rows.problem_ids)]
    assert not np.asarray(rows.truncated).any() and len(set(mask.sum(axis=1))) > 2
    for b in range(24):
        text = "".join(asked_again.ALPHABET[t] for t in tokens[b, used[b] > 0])
        shown, answer = text[:5], asked_again.ALPHABET[asked_again.FIRST + right[b]]
        before = shown[: shown.index(answer)]
        assert text == shown + "=" + "".join(f"{c}x=" for c in before) + answer
        assert "".join(asked_again.ALPHABET[t] for t in tokens[b, mask[b]]) == before + answer


def test_tasks():
    arena = asked_again.make_asked_again()
    train, held = ({tuple(map(int, row)) for row in x.tokens} for x in (arena.train, arena.heldout))
    assert len(train) == 1000 and len(held) == 60 and not train & held
    for table in (arena.train, arena.heldout):
        shown, right = np.asarray(table.answers["shown"]), np.asarray(table.answers["right"])
        share = (shown == right[:, None]).mean(axis=0)
        close.assert_near(share, [0.4, 0.3, 0.15, 0.1, 0.05])


def test_figures_count_turns_and_answers():
    # right at the second turn; never, with one letter said twice and a token that is no answer
    first, other = asked_again.FIRST, asked_again.ASK
    taken = np.asarray([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
    found = multi_turn.Turns(
        turn=jnp.zeros((2, 5), jnp.int32), end=jnp.asarray([[0, 1, 0, 0, 0], [0, 1, 2, 3, 4]], jnp.int32),
        taken=jnp.asarray(taken), reward=jnp.asarray([[0.0, 1, 0, 0, 0], [0] * 5]),
        identity=jnp.zeros((2, 5), jnp.int32), done=jnp.asarray([True, False]), valid=jnp.ones(2, bool),
    )  # fmt: skip
    tokens = jnp.asarray([[first, first + 1, 0, 0, 0], [first, first, other, first + 2, first + 3]], jnp.int32)
    grid, line = jnp.zeros((2, 5), jnp.int32), jnp.zeros(2, jnp.int32)
    extras = {f"turns/{name}": value for name, value in found._asdict().items()}
    rows = Trajectories(tokens, grid, grid, found.taken, grid.astype(jnp.float32), ~found.done, line, line, extras)
    figures = asked_again.figures(rows, multi_turn.episode_rewards({}, rows))
    assert [float(figures[f"eval/success@{k}"]) for k in range(1, 6)] == [0.0, 0.5, 0.5, 0.5, 0.5]
    assert float(figures["eval/answers"]) == 3.5 and float(figures["eval/distinct"]) == (1.0 + 3 / 4) / 2
