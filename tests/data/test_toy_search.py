"""Search traces: exactly so many dead ends, depth-first searches that replay, judges against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.analysis.parts import search_puzzles, search_traces
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
    if back == 0:  # the shortest text: the path alone, which is longer the more sides a polygon has
        found = set((responses != toy.END).sum(1).tolist())
        assert max(found) == toy.DIRECT_TOKENS[task] and (len(found) == 1) == (task != search_puzzles.GEOMETRY)


@pytest.mark.parametrize("how", [toy.by_search, toy.by_fixed_order])
@pytest.mark.parametrize("task", TASKS)
def test_a_depth_first_search_replays_to_its_solution(task, how):
    prompts, responses = toy.make_table(task, (0,), 12, 5, how=how, width=400)  # the longest search of a polygon: 368
    stack, depth, ended = toy.replay(jnp.asarray(prompts), jnp.asarray(responses))
    assert np.asarray(ended).all() and np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(responses))).all()
    for row, own, size in zip(responses.tolist(), np.asarray(stack).tolist(), np.asarray(depth).tolist(), strict=True):
        assert _replayed(row, toy.UNITS[task]) == own[:size]
    assert (responses == toy.BACK).sum() > 0, "a search goes wrong now and then"


@pytest.mark.parametrize("task", TASKS)
def test_what_is_measured_is_in_no_table_of_training(task):
    """Neither as it is written nor in another order of its numbers, clues or statements."""
    held = toy.make_table(task, (0,), 96, 77, measured=True)[0]
    read = [toy.make_table(task, (0,), 500, seed)[0] for seed in (0, 9, 77)]

    def known(rows):
        return {(row[0], *sorted(row[1:4]), row[4]) if task == toy.COUNTDOWN else tuple(row) for row in rows.tolist()}

    assert not known(held) & known(np.concatenate(read))
    assert len(known(held)) > 24, "they are not few puzzles many times"
    with_more, searched = (
        toy.make_table(task, (3,), 40, 0),
        toy.make_table(task, (0,), 40, 0, how=toy.by_search, width=400),
    )
    for prompts, _ in (with_more, searched):
        np.testing.assert_array_equal(prompts, read[0][:40], err_msg="a seed draws the same puzzles for all traces")


def test_puzzles_in_another_order_are_the_same():
    p = search_puzzles
    for said, other, alike in (
        ([toy.COUNTDOWN, 3, 1, 2, 7], [toy.COUNTDOWN, 2, 3, 1, 7], (1, 4, 1)),
        ([p.GEOMETRY, 4, 5, 2, 3], [p.GEOMETRY, 4, 3, 5, 2], (2, 5, 1)),
        ([p.ZEBRA, p.IN, 1, 2, p.LEFT, 1, 3], [p.ZEBRA, p.LEFT, 1, 3, p.IN, 1, 2], (1, 7, 3)),
    ):
        one, two = (p.Puzzle(prompt, None, None, 2, alike=alike) for prompt in (said, other))
        assert one.identity() == two.identity() and toy.held_out(one) == toy.held_out(two)
    moved = p.Puzzle([toy.COUNTDOWN, 3, 1, 7, 2], None, None, 2, alike=(1, 4, 1))
    assert moved.identity() == bytes([toy.COUNTDOWN, 1, 3, 7, 2]), "the target keeps its place"
    rng = np.random.default_rng(0)
    for task, sorted_part in ((toy.COUNTDOWN, slice(1, 4)), (p.GEOMETRY, None), (p.ZEBRA, None), (p.SELF, None)):
        puzzle = toy.MAKERS[task](rng)
        assert puzzle.alike[1] > puzzle.alike[0] and puzzle.alike[1] <= toy.PROMPT_TOKENS
        if sorted_part:
            assert list(puzzle.identity()[sorted_part]) == sorted(puzzle.prompt[sorted_part])


@pytest.mark.parametrize("task", TASKS)
def test_the_work_of_another_puzzle_keeps_the_answer(task):
    own = toy.make_table(task, (3,), 60, 4)[1]
    prompts, work = toy.make_table(task, (3,), 60, 4, swapped="nodes")
    assert np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(work))).all()
    np.testing.assert_array_equal(work == toy.BACK, own == toy.BACK)
    assert (work != own).any(axis=1).mean() > 0.5, "most have the dead ends of another one"


def test_only_dead_nodes_are_those_of_another():
    """Steps of four tokens, one dead below a dead one: 1 2 in the own trace, 5 6 7 in the other, and by turns."""
    B = toy.BACK
    own = [1, 1, 1, 1, 2, 2, 2, 2, B, B, 3, 3, 3, 3, 4, 4, 4, 4, 9]
    other = [5, 5, 5, 5, B, 6, 6, 6, 6, 7, 7, 7, 7, B, B, 8, 8, 8, 8]
    assert toy.with_work_of(own, other, 4) == [5, 5, 5, 5, 6, 6, 6, 6, B, B, *own[10:]]
    assert toy.with_work_of(other, own, 4) == [1, 1, 1, 1, B, 2, 2, 2, 2, 1, 1, 1, 1, B, B, 8, 8, 8, 8]
    assert toy.with_work_of(own, [8, 8, 8, 8], 4) == own, "no work, nothing to take over"


@pytest.mark.parametrize("how", [toy.by_search, toy.by_fixed_order])
def test_searches_are_never_drawn_again(how):
    """Every trace of Countdown is the search of its puzzle, the first that is drawn, however long."""
    prompts, responses = toy.make_table(toy.COUNTDOWN, (0,), 60, 6, how=how, width=toy.SEARCH_TOKENS)
    asked, written = np.random.default_rng([6, toy.COUNTDOWN]), np.random.default_rng([6, toy.COUNTDOWN, 1])
    for prompt, said in zip(prompts.tolist(), responses.tolist(), strict=True):
        puzzle = toy.make_countdown(asked)
        while toy.held_out(puzzle):
            puzzle = toy.make_countdown(asked)
        search = toy.depth_first(written, puzzle, ordered=how is toy.by_fixed_order)
        assert prompt == puzzle.prompt and said == search + [toy.END] * (toy.SEARCH_TOKENS - len(search))
    assert (responses != toy.END).sum(1).max() > 60
    with pytest.raises(ValueError, match="width=60 is too short for a trace of 1"):
        toy.make_table(toy.COUNTDOWN, (0,), 60, 6, how=how)


def test_the_longest_search_of_countdown_fits():
    """All dead ends of a first step come before the one that leads on: every order of the tree is shorter."""

    def longest(puzzle, state=()):
        if puzzle.solved(state):
            return 0, True
        dead, ways = 0, []
        for node in puzzle.children(state):
            below, found = longest(puzzle, (*state, node))
            ways += [below + 4] if found else []
            dead += 0 if found else below + 5
        return dead + max(ways, default=0), bool(ways)

    rng = np.random.default_rng(0)
    found = [longest(toy.make_countdown(rng))[0] for _ in range(60)]
    assert 120 < max(found) <= 178 < toy.SEARCH_TOKENS


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


def test_turned_cubes():
    """By hand, of (top, right, front, left, back, bottom); a turn back, four turns and two opposite ones are none."""
    cube = (1, 2, 3, 4, 5, 6)
    assert search_puzzles.turned(cube, 1) == (2, 6, 3, 1, 5, 4)  # the right side: what was above is on the left
    assert search_puzzles.turned(cube, 4) == (5, 2, 1, 4, 6, 3)  # the back: what was above is in front
    for sides in ((1, 3), (2, 4), (5, 5), (1, 1, 1, 1), (2, 2, 2, 2)):
        found = cube
        for side in sides:
            assert search_puzzles.turned(found, side)[0] == found[side]
            found = search_puzzles.turned(found, side)
        assert found == cube


def test_worked_puzzles_of_the_other_families():
    """Right answers and wrong ones, by hand."""
    p = search_puzzles
    cases = [
        # a triangle of 40 and 60 degrees: 180, 140, 80; of the wrong sum; of an angle that was added
        ([p.GEOMETRY, 3, 2, 3], [9, 7, 4], True), ([p.GEOMETRY, 3, 2, 3], [18, 16, 13], False),
        ([p.GEOMETRY, 3, 2, 3], [9, 11, 8], False), ([p.GEOMETRY, 3, 2, 3], [9, 7], False),
        # the right side to the top, then the front
        ([p.CUBE, 1, 2, 3, 4, 5, 6, 1, 2, 0], [2, 6, 3, 1, 5, 4, 3, 6, 4, 1, 2, 5, 3], True),
        ([p.CUBE, 1, 2, 3, 4, 5, 6, 1, 2, 4], [2, 6, 3, 1, 5, 4, 3, 6, 4, 1, 2, 5, 3], False),
        # the sum, not the largest
        ([p.LIST, 1, 2, 0, 3, 4, 0, 1, 5, 7, 7, 7], [p.FUNCTION + 4, 3, 5, 21], True),
        ([p.LIST, 1, 2, 0, 3, 4, 0, 1, 5, 7, 7, 7], [p.FUNCTION + 2, 3, 5, 7], False),
        ([p.ZEBRA, p.IN, 1, 2, p.LEFT, 1, 3, p.SAME, 3, 4, p.LEFT, 6, 5], [2, 1, 3, 6, 5, 4], True),
        ([p.ZEBRA, p.IN, 1, 2, p.LEFT, 1, 3, p.SAME, 3, 4, p.LEFT, 6, 5], [2, 1, 3, 5, 6, 4], False),
        ([p.ZEBRA, p.IN, 1, 2], [2, 1, 1, 6, 5, 4], False), ([p.ZEBRA, p.IN, 1, 2], [6, 1, 5, 3, 2, 4], False),
        # one is true, at least three are, at most one is, none is
        ([p.SELF, p.EXACTLY, 1, p.LEAST, 3, p.MOST, 1, p.EXACTLY, 0], [1, 0, 1, 0], False),
        ([p.SELF, p.EXACTLY, 2, p.LEAST, 3, p.MOST, 2, p.EXACTLY, 0], [1, 0, 1, 0], True),
    ]  # fmt: skip
    prompts = np.full((len(cases), toy.PROMPT_TOKENS), toy.PAD, np.int32)
    said = np.full((len(cases), toy.RESPONSE_TOKENS), toy.END, np.int32)
    for k, (prompt, answer, _) in enumerate(cases):
        prompts[k, : len(prompt)], said[k, : len(answer)] = prompt, answer
    assert np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(said))).tolist() == [fine for *_, fine in cases]


@pytest.mark.parametrize("task", list(search_puzzles.MAKERS))
def test_one_solution_alone(task):
    """Every other path of a puzzle is wrong; the judge and the puzzle agree on all of them."""

    def paths(puzzle, state=()):
        below = puzzle.children(state)
        return [state] if not below else [p for node in below for p in paths(puzzle, (*state, node))]

    rng = np.random.default_rng(1)
    for _ in range(3):
        puzzle = search_puzzles.MAKERS[task](rng)
        every = [p for p in paths(puzzle) if len(p) == puzzle.depth]
        said = np.full((len(every), toy.RESPONSE_TOKENS), toy.END, np.int32)
        for k, path in enumerate(every):
            tokens = [x for node in path for x in node] + list(puzzle.answer(path))
            said[k, : len(tokens)] = tokens
        prompts = jnp.broadcast_to(jnp.asarray(puzzle.prompt, jnp.int32), (len(every), toy.PROMPT_TOKENS))
        found = np.asarray(toy.right(prompts, jnp.asarray(said)))
        solved = np.array([puzzle.solved(path) for path in every])
        assert solved.sum() == 1 and found[solved].all()
        by_luck = found & ~solved  # another way to the same end: an answer is judged, not its way
        assert not by_luck.any() or task in (search_puzzles.GEOMETRY, search_puzzles.CUBE, search_puzzles.LIST)


@pytest.mark.parametrize(
    "task", [*search_puzzles.MAKERS, *(pytest.param(task, marks=pytest.mark.slow) for task in toy.FIRST)]
)
def test_floor_and_ceiling(task):
    """The best of the most frequent solutions, for all puzzles alike, and the solver's traces, with dead ends or none.

    What is found is the best of some on the same puzzles: a little too good by chance, never by much.
    """
    count = 400
    prompts, direct = toy.make_table(task, (0,), count, 21)
    judge = jax.jit(toy.right)
    for asked, said in ((prompts, direct), toy.make_table(task, (3,), count, 21)):
        assert np.asarray(judge(jnp.asarray(asked), jnp.asarray(said))).all()
    every, often = np.unique(direct, axis=0, return_counts=True)
    one = [np.broadcast_to(x, direct.shape) for x in every[np.argsort(-often)][:24]]
    best = max(float(np.asarray(judge(jnp.asarray(prompts), jnp.asarray(x))).mean()) for x in one)
    if best > 0:
        close.assert_share(best, toy.FLOORS[task], count)
    assert toy.FLOORS[task] < 0.2


def test_a_learner_reads_the_teachers_fitting_samples_alone():
    """Of two puzzles: one solved in its second sample, one never and once without an end."""
    prompts, right = toy.make_table(search_puzzles.LIST, (0,), 2, 4)
    wrong = np.roll(right, 1, axis=0)
    endless = np.full_like(right, toy.BACK)
    drawn = np.stack([np.stack([wrong[0], right[0]]), np.stack([endless[1], wrong[1]])])
    flat = jnp.asarray(drawn.reshape(4, -1))
    solved = toy.right(jnp.repeat(jnp.asarray(prompts), 2, axis=0), flat).reshape(2, 2)
    ended = jnp.any(flat == toy.END, axis=1).reshape(2, 2)
    assert solved.tolist() == [[False, True], [False, False]] and ended.tolist() == [[True, True], [False, True]]
    for keep, puzzles, said, share in (
        (search_traces.right_ones, [0, 0], [right[0], right[0]], 0.5),
        (search_traces.wrong_ones, [0, 1], [wrong[0], wrong[1]], 1.0),
    ):
        rows = search_traces.chosen_samples(jnp.asarray(prompts), jnp.asarray(drawn), keep(solved, ended))
        np.testing.assert_array_equal(rows[0], prompts[puzzles])
        np.testing.assert_array_equal(rows[1], said)
        assert rows[2].tolist() == [True, True] and rows[3].tolist() == [share, share]
    none = search_traces.chosen_samples(jnp.asarray(prompts), jnp.asarray(drawn), jnp.zeros((2, 2), bool))
    assert none[2].tolist() == [False, False] and none[3].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_a_teacher_is_trained_and_its_samples_become_a_table():
    numbers = {"puzzles": 8, "samples": 2, "taught": 12, "rows_per_step": 4, "prompts_per_step": 2}
    numbers |= {"imitation_rate": 1e-3, "learning_rate": 1e-3}
    params = search_traces.WORLD.policy.init(jax.random.key(0))

    def table(keep, swapped="", steps=(1, 1)):
        make = search_traces.distilled(search_puzzles.LIST, keep, swapped, teacher=steps, **numbers)
        return jax.jit(make)(params, jax.random.key(1))

    every = lambda right, ended: jnp.ones(right.shape, bool)  # noqa: E731
    plain, moved, longer = table(every), table(every, "traces"), table(every, steps=(3, 1))
    np.testing.assert_array_equal(moved[1], np.roll(plain[1], 1, axis=0))
    np.testing.assert_array_equal(moved[0], plain[0])
    assert (plain[0] == longer[0]).all() and (plain[1] != longer[1]).any(), "the teacher learns"
    loss = search_traces._imitate_distilled()
    assert float(loss(params, {}, plain)[1]["teacher/kept"]) == 1.0


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
