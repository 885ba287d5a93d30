"""Planning in a memory: boards and their solutions, the network's ticks, labels, probes, and what is written."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.analysis import drc_planning
from experiments.analysis.parts import plan_probes, sokoban, thinking_network
from jaxrl_llm.errors import DataError
from jaxrl_llm.experiment import cli
from jaxrl_llm.train import plan as plans
from tests import close

SIDE, CELLS = 4, 16
NET = {"planes": sokoban.PLANES, "side": SIDE, "channels": 3, "depth": 2, "actions": sokoban.ACTIONS}
PLAY = {"side": SIDE, "steps": 6, "ticks": 2, "carry": 1.0}


def _moved(walls, agent, box, action):
    """The rules on coordinates."""
    down, right = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))[action]

    def beside(cell):
        row, column = cell // SIDE + down, cell % SIDE + right
        return row * SIDE + column if 0 <= row < SIDE and 0 <= column < SIDE else None

    there = beside(agent)
    if not action or there is None or walls[there]:
        return agent, box
    if there != box:
        return there, box
    behind = beside(there)
    return (agent, box) if behind is None or walls[behind] else (there, behind)


def _steps(walls, goal, agent, box):
    """Breadth first."""
    queue, known = collections.deque([(agent, box, 0)]), {(agent, box)}
    while queue:
        a, b, steps = queue.popleft()
        if b == goal:
            return steps
        for action in range(1, 5):
            after = _moved(walls, a, b, action)
            if after not in known:
                known.add(after)
                queue.append((*after, steps + 1))
    return None


def test_boards_are_solved_as_by_a_search():
    rng = np.random.default_rng(0)
    solve = jax.jit(lambda walls, goal: sokoban.distances(walls, goal, side=SIDE, most=40))
    step = jax.jit(lambda *given: sokoban.move(*given, side=SIDE))
    best = jax.jit(lambda *given: sokoban.best_action(*given, side=SIDE))
    solvable = 0
    for _ in range(12):
        walls = rng.random(CELLS) < 0.2
        goal, agent, box = (int(c) for c in rng.permutation(CELLS)[:3])
        walls[[goal, agent, box]] = False
        found, want = solve(jnp.asarray(walls), jnp.int32(goal)), _steps(walls, goal, agent, box)
        assert int(found[agent, box]) == (sokoban.FAR if want is None else want)
        for action in range(5):
            got = step(jnp.asarray(walls), jnp.int32(agent), jnp.int32(box), jnp.int32(action))
            assert tuple(map(int, got)) == _moved(walls, agent, box, action)
        for _ in range(want or 0):
            action = int(best(found, jnp.asarray(walls), jnp.int32(agent), jnp.int32(box)))
            agent, box = _moved(walls, agent, box, action)
        solvable += want is not None
        assert want is None or box == goal
    assert solvable > 3


def test_levels_are_solvable_and_no_board_is_in_both():
    train, held = sokoban.levels(16, SIDE, shortest=3, longest=9)
    rows = [np.column_stack([part.walls, part.goal, part.agent, part.box]) for part in (train, held)]
    kept = [{tuple(row) for row in part.astype(int).tolist()} for part in rows]
    assert [len(part) for part in kept] == [16, 4] and not kept[0] & kept[1]
    for k in range(16):
        board = (np.asarray(train.walls[k]), *(int(x[k]) for x in train[1:]))
        assert 3 <= _steps(*board) <= 9


@pytest.mark.slow
def test_boards_of_a_file(tmp_path):
    boards = ["@$. \n    \n # #\n####", "; a second one\n  @ \n $  \n .  \n    "] * 4
    path = tmp_path / "boards.txt"
    path.write_text("\n\n".join(boards))
    side, train, held = sokoban.read(str(path))
    assert side == 4 and train.goal.shape == (7,) and held.goal.shape == (1,)
    assert [int(x[0]) for x in train[1:]] == [2, 0, 1] and np.flatnonzero(train.walls[0]).tolist() == [
        9,
        11,
        12,
        13,
        14,
        15,
    ]
    assert [int(x[1]) for x in train[1:]] == [9, 2, 5] and not np.asarray(train.walls[1]).any()
    for text, line in (
        ("@$. \n" * 4, "board 1 needs one goal, one agent and one box"),
        ("@$.x\n" * 4, "is no square of 4"),
    ):
        path.with_name("bad.txt").write_text(text)
        with pytest.raises(DataError, match=line):
            sokoban.read(str(path.with_name("bad.txt")))
    chosen = ["--smoke", "--seeds", "1", "--arm", "drc", "untrained", "--data", str(path), "--moves", "4"]
    found = cli.run(drc_planning, [*chosen, "--out", str(tmp_path / "out")])
    for arm in found.arms.values():
        assert np.isfinite([arm.metrics[name] for name in drc_planning.METRICS]).all()


def _game(seed=0, **changes):
    train, _ = sokoban.levels(16, SIDE, shortest=3, longest=9)
    params = thinking_network.make(jax.random.key(seed), **NET)
    level = jax.tree.map(lambda x: x[0], train)
    more = PLAY | changes
    return jax.jit(lambda p, key: plan_probes.play(p, level, key, plan_probes.sampled, **more))(
        params, jax.random.key(1)
    )


def test_labels_are_the_next_time_something_happens():
    game = _game(steps=12)
    agents, boxes, actions = (np.asarray(x) for x in (game.agents, game.boxes, game.actions))
    enters, pushes = (np.asarray(x) for x in plan_probes.labels(game))
    for t, cell in np.ndindex(12, CELLS):
        coming = [actions[u] for u in range(t, 12) if agents[u + 1] != agents[u] and agents[u + 1] == cell]
        leaving = [actions[u] for u in range(t, 12) if boxes[u + 1] != boxes[u] and boxes[u] == cell]
        assert (enters[t, cell], pushes[t, cell]) == ((coming or [0])[0], (leaving or [0])[0])
    assert (enters > 0).any()


def test_thinking_without_a_move_changes_the_memory_alone():
    game = _game(still=6)
    assert (np.asarray(game.agents) == game.agents[0]).all() and (np.asarray(game.boxes) == game.boxes[0]).all()
    np.testing.assert_array_equal(game.planes[0], game.planes[5])
    cells = np.asarray(game.cells).reshape(12, -1)
    assert (np.abs(np.diff(cells, axis=0)).max(1) > 1e-6).all()
    alone = _game(still=6, carry=0.0)  # without a memory every step thinks the same
    close.assert_near(alone.cells[5], alone.cells[0])


def test_what_is_added_is_added_to_the_cells_and_nothing_added_is_nothing():
    params = thinking_network.make(jax.random.key(0), **NET)
    x = jax.random.normal(jax.random.key(1), (SIDE, SIDE, 3))
    memory = thinking_network.Memory(*(jax.random.normal(jax.random.key(k), (2, SIDE, SIDE, 3)) for k in (2, 3)))
    push = jnp.zeros((2, SIDE, SIDE, 3)).at[1, 2, 1].set(jnp.array([0.5, -1.0, 2.0]))
    plain, pushed = (jax.jit(thinking_network.tick)(params, x, memory, p) for p in (0.0 * push, push))
    close.assert_near(pushed.cell, plain.cell + push, terms=4, magnitude=4.0)
    leave = plain.out / jnp.tanh(plain.cell)
    close.assert_near(pushed.out, leave * jnp.tanh(plain.cell + push), terms=64, magnitude=4.0)
    nothing = plan_probes.Steering(jnp.zeros_like(push), jnp.zeros_like(push), jnp.int32(0))
    game, same = _game(), _game(steering=nothing)
    jax.tree.map(np.testing.assert_array_equal, game, same)


def test_vectors_of_the_probe_stand_on_their_squares_until_the_first_is_reached():
    weights = jnp.arange(15.0, dtype=jnp.float32).reshape(3, 5)
    found = plan_probes.steering(
        weights, jnp.int32(3), jnp.int32(6), jnp.int32(9), layer=1, depth=2, side=SIDE, alpha=2.0
    )
    want = np.zeros((2, CELLS, 3), np.float32)
    want[1, 9] = 2 * np.asarray(weights[:, 0])
    np.testing.assert_array_equal(np.asarray(found.after).reshape(2, CELLS, 3), want)
    want[1, 6] = 2 * np.asarray(weights[:, 3])
    np.testing.assert_array_equal(np.asarray(found.before).reshape(2, CELLS, 3), want)


def test_a_detour_is_a_shortest_solution_without_its_square():
    train, _ = sokoban.levels(16, SIDE, shortest=3, longest=9)
    found = 0
    for k in range(16):
        level = jax.tree.map(lambda x, k=k: x[k], train)
        walls, agent, box = np.asarray(level.walls).copy(), int(level.agent), int(level.box)
        own = jax.jit(lambda one: sokoban.detour(one, jnp.int32(CELLS - 1), side=SIDE, most=40, length=1))
        shut = next(c for c in range(CELLS) if c not in (agent, box, int(level.goal)) and not walls[c])
        squares, actions, there = jax.jit(
            lambda one, c: sokoban.detour(one, c, side=SIDE, most=40, length=4)
        )(level, jnp.int32(shut))  # fmt: skip
        walls[shut] = True
        want = _steps(walls, int(level.goal), agent, box)
        assert bool(there) == (want is not None)
        if want is None:
            continue
        found += 1
        for step in range(4):
            agent, box = _moved(walls, agent, box, int(actions[step]))
            assert agent == int(squares[step]) != shut
            left = _steps(walls, int(level.goal), agent, box)
            assert left == max(want - step - 1, 0)
        assert bool(own(level._replace(agent=jnp.int32(CELLS - 1)))[2]) is False  # it stands there itself
    assert found > 4


def test_a_route_is_written_square_by_square():
    weights = jnp.arange(15.0, dtype=jnp.float32).reshape(3, 5)
    route, actions = jnp.array([6, 7, 6]), jnp.array([3, 4, 1])  # the first is entered twice
    found = plan_probes.route_steering(
        weights, actions, route, jnp.int32(9), layer=0, depth=2, side=SIDE, alpha=0.5
    )  # fmt: skip
    want = np.zeros((2, CELLS, 3), np.float32)
    want[0, 9] = 0.5 * np.asarray(weights[:, 0])
    np.testing.assert_array_equal(np.asarray(found.after).reshape(2, CELLS, 3), want)
    want[0, 6], want[0, 7] = 0.5 * np.asarray(weights[:, 3]), 0.5 * np.asarray(weights[:, 4])
    np.testing.assert_array_equal(np.asarray(found.before).reshape(2, CELLS, 3), want)
    assert int(found.square) == 6


def test_probes_read_what_is_there():
    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 5, 400)
    features = np.eye(5)[wanted][:, [2, 0, 1, 4, 3]] + 0.1 * rng.normal(size=(400, 5))
    valid = jnp.arange(400) < 300
    given = jnp.asarray(features, jnp.float32), jnp.asarray(wanted, jnp.int32)
    fit = jax.jit(lambda *x: plan_probes.probe(*x, steps=100))(*given, valid)
    assert fit.shape == (5, 5)
    found = plan_probes.read(given[0], fit)
    assert float(plan_probes.macro_f1(found, given[1], ~valid)) == 1.0
    guess, scores = rng.integers(0, 5, 400), []
    for k in range(5):
        tp = ((guess == k) & (wanted == k))[:300].sum()
        scores.append(2 * tp / ((guess == k)[:300].sum() + (wanted == k)[:300].sum()))
    close.assert_near(plan_probes.macro_f1(jnp.asarray(guess, jnp.int32), given[1], valid), np.float32(np.mean(scores)))


def test_games_are_numbered_from_a_key_of_their_own():
    """Both keys of a state are given away by a step of the host loop: they cannot be one array."""
    plan = drc_planning.build(dataclasses.replace(drc_planning.Settings(), **drc_planning.SMOKE))
    state = plans.start(plan.stages[0], {}, jax.random.key(1), extras=None)
    assert not jnp.array_equal(jax.random.key_data(state.extras["key"]), jax.random.key_data(state.key))
