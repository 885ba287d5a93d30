"""Search traces: exactly so many wrong branches, paths that solve, judges against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.analysis.parts import search_traces_task as toy


@pytest.mark.parametrize("task", [toy.COUNTDOWN, toy.SUDOKU])
@pytest.mark.parametrize("back", [0, 1, 6])
def test_traces(task, back):
    prompts, responses = toy.make_table(task, (back,), 24, 3)
    assert (responses == toy.BACK).sum(1).tolist() == [back] * 24
    assert (responses[:, -1] == toy.END).all(), "every trace fits"
    assert toy.backs(jnp.asarray(responses)).tolist() == [back] * 24
    assert np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(responses))).all()
    if back == 0:  # the shortest text: the path alone
        length = (responses != toy.END).sum(1)
        assert set(length.tolist()) == {8 if task == toy.COUNTDOWN else toy.BLANKS}


@pytest.mark.parametrize("task", [toy.COUNTDOWN, toy.SUDOKU])
def test_the_last_path_alone_counts(task):
    prompts, responses = (jnp.asarray(x) for x in toy.make_table(task, (2,), 24, 4))
    path, _ = toy.last_path(responses)
    first = jnp.pad(path, ((0, 0), (0, toy.RESPONSE_TOKENS - 9)), constant_values=toy.END)
    assert np.asarray(toy.right(prompts, first)).all()
    spoilt = first.at[:, 1].set(jnp.where(first[:, 1] == toy.PLUS, toy.TIMES, toy.PLUS))
    if task == toy.SUDOKU:
        spoilt = first.at[:, 0].set(first[:, 0] % 4 + 1)
    assert not np.asarray(toy.right(prompts, spoilt)).any()
    assert not np.asarray(toy.right(prompts, responses.at[:, :].set(toy.BACK))).any(), "no end, no answer"
    _, swapped = toy.make_table(task, (2,), 24, 4, swapped=True)
    assert np.asarray(toy.right(prompts, jnp.asarray(swapped))).mean() < 0.2
    assert sorted(map(tuple, swapped)) == sorted(map(tuple, np.asarray(responses)))


def test_wrong_branches_lead_nowhere():
    rng = np.random.default_rng(0)
    puzzle = toy.make_countdown(rng)
    numbers, target = puzzle.prompt[1:4], puzzle.prompt[4]
    for _ in range(10):
        a, operator, b, c = puzzle.wrong(rng)
        assert toy.OPERATORS[operator](a, b) == c and {a, b} <= set(numbers)
        rest = list(numbers)
        rest.remove(a)
        rest.remove(b)
        assert all(f(*pair) != target for f in toy.OPERATORS.values() for pair in ((c, rest[0]), (rest[0], c)))
    puzzle = toy.make_sudoku(rng)
    assert all(puzzle.wrong(rng)[0] != puzzle.path[0] for _ in range(10))
    with pytest.raises(ValueError, match="back=7"):
        toy.write(rng, puzzle, 7)


def test_all_grids():
    assert len(toy.sudoku_grids()) == 288
