"""To backtrack or not: what its arms read, what they may spend, and that the file says so."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.analysis import to_backtrack
from experiments.analysis.parts import search_traces
from experiments.analysis.parts import search_traces_task as toy
from jaxrl_llm.experiment import arms
from tests import close


def _settings(arm):
    base = arms.preset(to_backtrack, smoke=False, model=to_backtrack.Settings().model)
    return arms.override(base, to_backtrack.ARMS[arm], arm)


def _read(arm, count=150):
    """What an arm imitates, of the same puzzles for all."""
    own = _settings(arm)
    rows = search_traces.traces(own.task, (0,), how=own.how, shown=own.shown, puzzles=count, world=to_backtrack.LONG)
    return jax.tree.map(np.asarray, rows({}, jax.random.key(0)))


@pytest.mark.parametrize(
    ("game", "often"), [("countdown", "ten times"), pytest.param("sudoku", "3.5 times", marks=pytest.mark.slow)]
)
def test_what_the_arms_of_a_game_imitate(game, often):
    """The same puzzles, all solved; a path alone, a whole search, one of fixed order, one of half its subtrees."""
    read = {kind: _read(f"{game}_{kind}") for kind in ("direct", "backtrack", "order", "think_less")}
    for prompts, responses, kept in read.values():
        np.testing.assert_array_equal(prompts, read["direct"][0])
        assert np.asarray(toy.right(jnp.asarray(prompts), jnp.asarray(responses))).all() and kept.all()
    backs = {kind: float((rows[1] == toy.BACK).sum(1).mean()) for kind, rows in read.items()}
    assert backs["direct"] == 0.0
    # half of the failed subtrees are there, and of those within them half again
    assert 0.0 < backs["think_less"] < backs["backtrack"] * 3 / 4
    each = (read["backtrack"][1] == toy.BACK).sum(1)
    stated = {"ten times": 10.0, "3.5 times": 3.5}[often]
    assert often in to_backtrack.__doc__
    close.assert_mean(backs["backtrack"], stated, float(each.std()), len(each))


def test_searches_of_fixed_order_owe_nothing_to_chance():
    own = _settings("countdown_order")
    puzzle = toy.make_countdown(np.random.default_rng(0))
    said = [own.how(np.random.default_rng(seed), puzzle, (0,), own.shown) for seed in range(4)]
    assert all(text == said[0] for text in said)
    free = [toy.by_search(np.random.default_rng(seed), puzzle, (0,), 1.0) for seed in range(4)]
    assert any(text != free[0] for text in free)


@pytest.mark.slow
def test_every_arm_may_write_the_longest_search_and_spend_the_largest_budget():
    longest = max(
        int((_read(f"{game}_{kind}", 3000)[1] != toy.END).sum(1).max())
        for game in ("countdown", "sudoku") for kind in ("backtrack", "order")
    )  # fmt: skip
    assert int(re.search(r"the longest search has (\d+)", to_backtrack.__doc__)[1]) == longest < toy.SEARCH_TOKENS
    largest = max(search_traces.BUDGETS)
    for arm in to_backtrack.ARMS:
        own = _settings(arm)
        assert own.samples == largest, "no text is cheaper than a direct answer, so that many spend every budget"
        tokens = (_read(arm)[1] != toy.END).sum(1) + 1.0
        cost = np.asarray(search_traces.trace_flops(jnp.asarray(tokens))) / search_traces.direct_flops(own.task)
        close.assert_near(cost.min(), 1.0)
        assert own.samples * cost.mean() >= largest


def test_searches_of_sudoku_are_deep():
    """Every board has nodes off its way, in a tree of eight levels, and no search is longer than any answer may be."""
    rng = np.random.default_rng(3)
    off = []
    for _ in range(40):
        puzzle = toy.make_sudoku(rng)

        def nodes(state, puzzle=puzzle):
            return sum(1 + nodes((*state, child)) for child in puzzle.children(state))

        assert puzzle.depth == 8 and puzzle.prompt[1:].count(0) == 8
        off.append(nodes(()) - puzzle.depth)
    assert min(off) >= toy.DEAD[0] == 6 and max(off) <= toy.DEAD[1]
    # all of them are placed and taken off before the way is found, and then the end is said
    assert puzzle.depth + 2 * toy.DEAD[1] < toy.RESPONSE_TOKENS and puzzle.depth < toy.STACK


def test_arms_train_equally_long_and_no_arm_moves_the_numbers_of_another():
    kept = ("steps", "learning_rate", "prompts_per_step", "group_size", "base_steps", "imitation_steps",
            "train_problems")  # fmt: skip
    found = {arm: tuple(getattr(_settings(arm), name) for name in kept) for arm in to_backtrack.ARMS}
    assert len(set(found.values())) == 1
    changed = {name for changes in to_backtrack.ARMS.values() for name in changes}
    assert changed == {"task", "how", "shown"}
    assert {f.name for f in dataclasses.fields(to_backtrack.Settings)} >= changed
