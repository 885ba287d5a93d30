"""What a policy thinks of an answer of several tokens before each turn: the same as scoring the short row by itself."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.train.methods import answer_probability
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Trajectories
from tests import close
from tests.models_for_tests import byte_tokenizer, small_config, small_model

PROMPT, FIRST, SEEN, SECOND = [5, 6], [7, 8, 2], [9, 10], [11, 2]  # of the second row, the first has a shorter prompt
GOLD = {"gold": jnp.asarray([[3, 12, 13], [3, 14, 0]]), "gold_kind": jnp.asarray([[1, 2, 2], [1, 2, 0]])}


def _rows():
    """Two episodes: one of two turns, and one that is over after the first."""
    new = FIRST + SEEN + SECOND
    tokens = np.asarray([[5, 6, *new], [0, 6, *FIRST, 0, 0, 0, 0]], np.int32)
    there = np.asarray([[1] * 9, [0] + [1] * 4 + [0] * 4], bool)
    acting = np.asarray([[0] * 2 + [1] * 3 + [0] * 2 + [1] * 2, [0] * 2 + [1] * 3 + [0] * 4], bool)
    turn = np.asarray([[0] * 5 + [1] * 4, [-1] + [0] * 4 + [-1] * 4], np.int32)
    taken = np.asarray([[True, True, False], [True, False, False]])
    zeros = np.zeros(taken.shape, np.int32)
    found = {"turn": turn, "end": zeros, "taken": taken, "reward": zeros.astype(np.float32), "identity": zeros,
             "done": np.ones(2, bool), "valid": np.ones(2, bool)}  # fmt: skip
    position = np.where(there, np.cumsum(there, axis=1) - 1, 0).astype(np.int32)
    line = jnp.zeros((2,), jnp.int32)
    return Trajectories(
        jnp.asarray(tokens), jnp.asarray(there, jnp.int32), jnp.asarray(position), jnp.asarray(acting),
        jnp.zeros(tokens.shape, jnp.float32), line > 0, line, line,
        extras={f"turns/{name}": jnp.asarray(x) for name, x in found.items()},
    )  # fmt: skip


WIDTH = 10  # of all short rows: one program scores them


def _alone(score, tokens, count):
    """The geometric mean of the last ``count`` tokens of one row."""
    many = len(tokens)
    segments = jnp.asarray([[1] * many + [0] * (WIDTH - many)], jnp.int32)
    positions = jnp.where(segments > 0, jnp.arange(WIDTH, dtype=jnp.int32)[None], 0)
    logp = score(jnp.asarray([tokens + [0] * (WIDTH - many)], jnp.int32), segments, positions)
    return float(np.exp(np.asarray(logp)[0, many - count : many].mean()))


def test_chances_are_those_of_the_answer_in_place_of_the_action():
    policy, params, _ = small_model()
    found = jax.jit(lambda rows: answer_probability.answer_chances(policy, params, rows, GOLD))(_rows())

    @jax.jit
    def score(tokens, segments, positions):
        row = _rows()._replace(tokens=tokens, segment_ids=segments, positions=positions)
        return score_tokens(policy, params, row)[0]

    want = [
        [_alone(score, [*PROMPT, 3, 12, 13], 2), _alone(score, [*PROMPT, *FIRST, *SEEN, 3, 12, 13], 2), 0.0],
        [_alone(score, [6, 3, 14], 1), 0.0, 0.0],
    ]
    close.assert_near(np.asarray(found), want, terms=close.forward_sums(small_config(), WIDTH))


def test_an_episode_is_read_once_whatever_the_turns_and_the_answers():
    """No pass over whole rows: the cache is filled once, and every answer is read on from it."""
    policy, params, _ = small_model()
    widths = []

    def extend(params, cache, tokens, *rest):
        widths.append(tokens.shape[1])
        return policy.extend(params, cache, tokens, *rest)

    def never(*given):
        raise AssertionError("a pass over whole rows")

    watched = policy._replace(hidden=never, extend=extend)
    both = {name: jnp.stack([x, x[::-1]], axis=1) for name, x in GOLD.items()}
    found = answer_probability.answer_chances(watched, params, _rows(), both)
    assert widths == [9, 3], "one row of 9 tokens and one answer of 3, within a loop"
    assert found.shape == (2, 3, 2)
    sums = close.forward_sums(small_config(), 12)
    close.assert_near(found[:, :, 0], answer_probability.answer_chances(policy, params, _rows(), GOLD), terms=sums)
    one_row = answer_probability.answer_chances(policy, params, _rows(), both, most_bytes=1)
    close.assert_near(one_row, found, terms=sums)


def test_golds_are_the_first_right_answer_behind_its_tag(tmp_path):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    rows = [Problem("own", "?", "", {"value": value}, 0, "?") for value in (["Rome", "Roma"], 7)]
    found = answer_probability.golds(tokenizer, rows)
    texts = [
        tokenizer.decode(row[kind > 0].tolist()) for row, kind in zip(found["gold"], found["gold_kind"], strict=True)
    ]
    assert texts == ["<answer>Rome", "<answer>7"]
    assert [(kind == 2).sum() for kind in found["gold_kind"]] == [4, 1]
