"""Search traces: exactly so many dead ends, depth-first searches that replay, judges against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.analysis.parts import search_traces
from experiments.analysis.parts import search_traces_task as toy
from tests import close

TASKS = list(toy.MAKERS)


def _replayed(tokens, size):
    """Plain Python: nodes on a stack, ``BACK`` takes one off."""
    stack = []
    for token in tokens:
        if token == toy.END:
            return stack
        if token == toy.BACK:
            cut = (len(stack) - 1) // size * size
            stack = stack[:cut]
        else:
            stack.append(int(token))
    return None


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("back", [0, 1, 6])
def test_exactly_so_many_dead_ends(task, back):
    prompts, responses = toy.make_table(task, (back,), 12, 3)
    assert (responses == toy.BACK).sum(1).tolist() == [back] * 12
    assert (responses[:, -1] == toy.END).all(), "every trace fits"
    assert toy.backs(jnp.asarray(responses)).tolist() == [back] * 12
    assert np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(responses))).all()
    if back == 0:  # the shortest text: the path alone
        assert set((responses != toy.END).sum(1).tolist()) == {toy.DIRECT_TOKENS[task]}


@pytest.mark.parametrize("how", [toy.by_search, toy.by_fixed_order])
@pytest.mark.parametrize("task", TASKS)
def test_a_depth_first_search_replays_to_its_solution(task, how):
    prompts, responses = toy.make_table(task, (0,), 12, 5, how=how)
    stack, depth, ended = toy.replay(jnp.asarray(prompts), jnp.asarray(responses))
    assert np.asarray(ended).all() and np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(responses))).all()
    for row, own, size in zip(responses.tolist(), np.asarray(stack).tolist(), np.asarray(depth).tolist(), strict=True):
        assert _replayed(row, toy.UNITS[task]) == own[:size]
    assert (responses == toy.BACK).sum() > 0, "a search goes wrong now and then"


def test_branches_open_in_any_state_and_are_left_one_node_at_a_time():
    rng = np.random.default_rng(0)
    puzzle = toy.make_sudoku(rng)
    tokens = [toy.with_backs(rng, toy.make_sudoku(rng), 3) for _ in range(12)]
    before = {text[: text.index(toy.BACK)].__len__() for text in tokens}
    assert max(before) > 1, "not all branches are opened at the start"
    deep = [toy.depth_first(rng, toy.make_sudoku(rng)) for _ in range(20)]
    runs = [any(a == b == toy.BACK for a, b in zip(text, text[1:], strict=False)) for text in deep]
    assert any(runs), "a failed subtree is left node by node"
    short = [toy.depth_first(np.random.default_rng(k), puzzle, shown=0.0) for k in range(5)]
    assert all(text == [x for node in toy.solution(rng, puzzle) for x in node] for text in short)
    with pytest.raises(ValueError, match="back=7"):
        toy.with_backs(rng, puzzle, 7)


def test_dead_ends_lead_nowhere():
    rng = np.random.default_rng(0)
    for make in toy.MAKERS.values():
        puzzle = make(rng)
        path = toy.solution(rng, puzzle)
        said = toy.with_backs(rng, puzzle, 4)
        size = len(path[0])
        stack = []
        for k, token in enumerate(said):
            if token == toy.BACK:
                state = tuple(tuple(stack[i : i + size]) for i in range(0, len(stack), size))
                assert toy.solution(rng, puzzle, state) is None, k
                stack = stack[: (len(stack) - 1) // size * size]
            else:
                stack.append(token)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_left_alone_counts(task):
    prompts, responses = (jnp.asarray(x) for x in toy.make_table(task, (2,), 12, 4))
    spoilt = jnp.where(jnp.cumsum(responses == toy.END, axis=1) == 1, toy.BACK, responses)
    assert not np.asarray(toy.right(prompts, spoilt)).any(), "the last node is taken off"
    assert not np.asarray(toy.right(prompts, responses.at[:, :].set(toy.BACK))).any(), "no end, no answer"
    nothing = jnp.concatenate([jnp.full((12, 1), toy.BACK, jnp.int32), responses[:, :-1]], axis=1)
    assert not np.asarray(toy.right(prompts, nothing)).any(), "nothing was there to be taken off"
    _, swapped = toy.make_table(task, (2,), 12, 4, swapped="traces")
    assert np.asarray(toy.right(prompts, jnp.asarray(swapped))).mean() < 0.4
    assert sorted(map(tuple, swapped)) == sorted(map(tuple, np.asarray(responses)))
    _, work = toy.make_table(task, (2,), 12, 4, swapped="nodes")
    last = [max(np.flatnonzero(row == toy.BACK)) for row in work]
    ends = [row[k + 1 :][row[k + 1 :] != toy.END].tolist() for row, k in zip(work, last, strict=True)]
    own = np.asarray(responses)
    first = [max(np.flatnonzero(row == toy.BACK)) for row in own]
    assert ends == [row[k + 1 :][row[k + 1 :] != toy.END].tolist() for row, k in zip(own, first, strict=True)]


def test_all_grids():
    assert len(toy.sudoku_grids()) == 288


def test_budgets():
    right = jnp.array([[False, True], [True, False]])
    spent = jnp.array([[2.0, 3.0], [9.0, 1.0]])
    assert [float(search_traces.solved_within(right, spent, b)) for b in (1.0, 4.0, 5.0, 9.0)] == [0.0, 0.0, 0.5, 1.0]
    for task in TASKS:
        whole = float(search_traces.trace_flops(jnp.asarray(float(toy.RESPONSE_TOKENS))))
        own = search_traces.trace_flops(jnp.asarray(toy.DIRECT_TOKENS[task] + 1.0))
        close.assert_relative(search_traces.direct_flops(task), own)
        assert 4 < whole / search_traces.direct_flops(task) < 64, "a budget of 64 pays for a long search"
