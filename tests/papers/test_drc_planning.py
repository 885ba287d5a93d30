"""Planning in a memory: boards and their solutions, the network's ticks, labels, probes, and what is written."""

import collections
import dataclasses
import functools
import types

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


def _moved(walls, agent, box, action, others=()):
    """The rules on coordinates; other boxes stand where they are."""
    walls = np.asarray(walls).copy()
    walls[list(others)] = True
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
            got = step(jnp.asarray(walls), jnp.int32(agent), jnp.array([box], jnp.int32), jnp.int32(action))
            assert tuple(map(int, (got[0], got[1][0]))) == _moved(walls, agent, box, action)
        for _ in range(want or 0):
            action = int(best(found, jnp.asarray(walls), jnp.int32(agent), jnp.int32(box)))
            agent, box = _moved(walls, agent, box, action)
        solvable += want is not None
        assert want is None or box == goal
    assert solvable > 3


def test_levels_are_solvable_and_no_board_is_in_both():
    train, held = sokoban.levels(16, SIDE, shortest=3, longest=9)
    rows = [np.column_stack(part) for part in (train, held)]
    kept = [{tuple(row) for row in part.astype(int).tolist()} for part in rows]
    assert [len(part) for part in kept] == [16, 4] and not kept[0] & kept[1]
    for k in range(16):
        goal, agent, box = (int(np.ravel(x[k])[0]) for x in train[1:])
        assert 3 <= _steps(np.asarray(train.walls[k]), goal, agent, box) <= 9


@functools.cache
def _several(boxes=3):
    return sokoban.levels(12, 5, boxes, shortest=4, longest=30)


def test_any_box_is_pushed_and_none_into_another():
    """The rules with the other boxes as walls, and two beside each other."""
    rng, step = np.random.default_rng(1), jax.jit(lambda *given: sokoban.move(*given, side=SIDE))
    pushed = stopped = 0
    for _ in range(60):
        walls = rng.random(CELLS) < 0.1
        agent, *boxes = (int(c) for c in rng.permutation(CELLS)[:5])
        walls[[agent, *boxes]] = False
        for action in range(5):
            got = step(jnp.asarray(walls), jnp.int32(agent), jnp.array(boxes, jnp.int32), jnp.int32(action))
            there = _moved(walls, agent, CELLS, action)[0]
            near = boxes.index(there) if there in boxes else -1
            want = list(boxes)
            if near < 0:
                after = there
            else:
                others = [b for b in boxes if b != there]
                after, want[near] = _moved(walls, agent, there, action, others)
                pushed += after != agent
                stopped += after == agent
            assert (int(got[0]), got[1].tolist()) == (after, want)
    assert pushed > 20 and stopped > 20


def test_boards_of_several_boxes_are_solved_one_after_the_other():
    """The solver's own actions end on all goals, in as many steps as it says; boxes start off them and off walls."""
    train, held = _several()
    rows = [{tuple(row) for row in np.column_stack(part).astype(int).tolist()} for part in (train, held)]
    assert [len(part) for part in rows] == [12, 3] and not rows[0] & rows[1]

    @jax.jit
    def replayed(level):
        tables = sokoban.tables_of(level, side=5, most=40)

        def step(at, _):
            action = sokoban.expert_action(tables, level, *at, side=5)
            after = sokoban.move(level.walls, *at, action, side=5)
            return after, (action, sokoban.solved(level, after[1]), after[1])

        _, found = jax.lax.scan(step, (level.agent, level.boxes), None, 40)
        return *found, sokoban.in_turn(level, side=5, most=31)

    for k in range(12):
        level = jax.tree.map(lambda x, k=k: x[k], train)
        actions, ends, boxes, (same, length) = replayed(level)
        first = int(np.argmax(ends))
        assert ends[-1] and first + 1 == int(length) and 4 <= length <= 30
        assert (actions[: first + 1] > 0).all() and (actions[first + 1 :] == 0).all()
        jax.tree.map(np.testing.assert_array_equal, same, level)  # the order is already that of the solver
        assert not np.isin(level.boxes, level.goals).all() and not np.asarray(level.walls)[level.boxes].any()
        np.testing.assert_array_equal(boxes[-1], level.goals)
        # one box after the other: a box that follows is moved only when those before it are on their goals
        moved = np.asarray(boxes[1:] != boxes[:-1])
        for j in range(1, 3):
            assert (np.asarray(boxes[:-1])[moved[:, j]][:, :j] == np.asarray(level.goals)[:j]).all()


def test_the_nearest_box_comes_first():
    """A row of nine: agent at 3, boxes at 2 and 4, goals at 0 and 5: one push to the right, or two to the left."""
    walls = np.ones(81, bool)
    walls[:9] = False
    level = sokoban.Level(
        jnp.asarray(walls), jnp.array([0, 5], jnp.int32), jnp.int32(3), jnp.array([2, 4], jnp.int32)
    )  # fmt: skip
    found, length = jax.jit(lambda one: sokoban.in_turn(one, side=9, most=30))(level)
    assert found.boxes.tolist() == [4, 2] and found.goals.tolist() == [5, 0]
    assert int(length) == 1 + 1 + 2  # a push, back to 3, two pushes
    stuck = level._replace(boxes=jnp.array([2, 3], jnp.int32), agent=jnp.int32(1))
    assert int(jax.jit(lambda one: sokoban.in_turn(one, side=9, most=30))(stuck)[1]) >= sokoban.FAR


def test_each_box_has_its_own_labels_and_interventions():
    """A box is pushed the written way where writing is what moves the agent: no vector, no other push."""
    train, _ = _several(2)
    settings = dataclasses.replace(
        drc_planning.Settings(), side=5, boxes=2, moves=24, channels=3, alpha=0.0, route=2
    )  # fmt: skip
    net = NET | {"side": 5}
    params = thinking_network.make(jax.random.key(0), **net)

    @jax.jit
    def of(level):
        tables = sokoban.tables_of(level, side=5, most=40)
        expert = lambda logits, key, agent, boxes: sokoban.expert_action(tables, level, agent, boxes, side=5)  # noqa: E731
        own = plan_probes.play(params, level, jax.random.key(1), expert, side=5, steps=24, ticks=2, carry=1.0)
        weights = jnp.ones((3, 5), jnp.float32)
        found = [
            drc_planning.each_box(how)(settings, params, level, own, weights, jax.random.key(1))
            for how in (drc_planning.box_steered, drc_planning.box_routed)
        ]
        ways = [sokoban.around(level, jnp.int32(12), jnp.int32(k), side=5, most=40) for k in range(2)]
        return own, plan_probes.labels(own)[1], found, ways

    there = 0
    for k in range(12):
        level = jax.tree.map(lambda x, k=k: x[k], train)
        own, pushed, found, ways = of(level)
        boxes, actions = np.asarray(own.boxes), np.asarray(own.actions)
        for t, cell in np.ndindex(24, 25):
            coming = [
                actions[u] for u in range(t, 24) for j in range(2)
                if boxes[u + 1, j] != boxes[u, j] and boxes[u, j] == cell
            ]  # fmt: skip
            assert pushed[t, cell] == (coming or [0])[0]
        for done, able in found:
            assert done.shape == able.shape == (2,)
            there += int(able.sum())
        for j, way in enumerate(ways):
            if not bool(way.there):
                continue
            other = [int(level.boxes[1 - j])]
            agent, box = int(level.agent), int(level.boxes[j])
            walls = np.asarray(level.walls).copy()
            walls[12] = True
            for t in range(40):
                agent, box = _moved5(walls, agent, box, int(way.actions[t]), other)
                assert (agent, box) == (int(way.agents[t]), int(way.boxes[t + 1])) and 12 not in (agent, box)
            assert box == int(level.goals[j])
    assert there > 10


def _moved5(walls, agent, box, action, others):
    """``_moved`` on five by five."""
    down, right = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))[action]

    def free(cell):
        row, column = cell
        return 0 <= row < 5 and 0 <= column < 5 and not walls[row * 5 + column] and row * 5 + column not in others

    there = agent // 5 + down, agent % 5 + right
    behind = there[0] + down, there[1] + right
    if not action or not free(there):
        return agent, box
    if there != (box // 5, box % 5):
        return there[0] * 5 + there[1], box
    return (there[0] * 5 + there[1], behind[0] * 5 + behind[1]) if free(behind) else (agent, box)


@pytest.mark.slow
def test_boards_of_a_file(tmp_path):
    boards = ["@$. \n    \n # #\n####", "; a second one\n  @ \n $  \n .  \n    "] * 4
    path = tmp_path / "boards.txt"
    path.write_text("\n\n".join(boards))
    side, train, held = sokoban.read(str(path))
    assert side == 4 and train.goals.shape == (7, 1) and held.goals.shape == (1, 1)
    assert [int(np.ravel(x[0])[0]) for x in train[1:]] == [2, 0, 1]
    assert np.flatnonzero(train.walls[0]).tolist() == [9, 11, 12, 13, 14, 15]
    assert [int(np.ravel(x[1])[0]) for x in train[1:]] == [9, 2, 5] and not np.asarray(train.walls[1]).any()
    two = ["@$. \n $. \n    \n    ", "$@$.\n    \n   .\n    "] * 4  # a box in a corner is not pushed out
    path.with_name("two.txt").write_text("\n\n".join(two))
    _, several, kept = sokoban.read(str(path.with_name("two.txt")))
    assert several.boxes.shape == (3, 2) and kept.boxes.shape == (1, 2)
    for text, line in (
        ("@$. \n" * 4, "board 1 needs one agent and as many boxes as goals"),
        (two[0] + "\n\n" + boards[0], "board 2 needs one agent and as many boxes as goals, 2 as the first board has"),
        ("\n\n".join([two[1]] * 8), "no board is solved by pushing one box after the other"),
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
    agents, boxes, actions = (np.asarray(x) for x in (game.agents, game.boxes[:, 0], game.actions))
    enters, pushes = (np.asarray(x) for x in plan_probes.labels(game))
    for t, cell in np.ndindex(12, CELLS):
        coming = [actions[u] for u in range(t, 12) if agents[u + 1] != agents[u] and agents[u + 1] == cell]
        leaving = [actions[u] for u in range(t, 12) if boxes[u + 1] != boxes[u] and boxes[u] == cell]
        assert (enters[t, cell], pushes[t, cell]) == ((coming or [0])[0], (leaving or [0])[0])
    assert (enters > 0).any()


def test_thinking_without_a_move_changes_the_memory_alone():
    game = _game(still=6)
    assert (np.asarray(game.agents) == game.agents[0]).all() and (
        np.asarray(game.boxes) == np.asarray(game.boxes[0])
    ).all()
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
        walls, agent, box, goal = np.asarray(level.walls).copy(), int(level.agent), int(level.boxes[0]), level.goals[0]
        own = jax.jit(lambda one: sokoban.detour(one, jnp.int32(CELLS - 1), side=SIDE, most=40, length=1))
        shut = next(c for c in range(CELLS) if c not in (agent, box, int(goal)) and not walls[c])
        squares, actions, there = jax.jit(
            lambda one, c: sokoban.detour(one, c, side=SIDE, most=40, length=4)
        )(level, jnp.int32(shut))  # fmt: skip
        walls[shut] = True
        want = _steps(walls, int(goal), agent, box)
        assert bool(there) == (want is not None)
        if want is None:
            continue
        found += 1
        for step in range(4):
            agent, box = _moved(walls, agent, box, int(actions[step]))
            assert agent == int(squares[step]) != shut
            left = _steps(walls, int(goal), agent, box)
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


def test_the_product_is_the_convolution():
    x, kernel = (jax.random.normal(jax.random.key(k), shape) for k, shape in ((0, (5, 5, 3)), (1, (3, 3, 3, 4))))
    whole = jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]
    close.assert_same_sums(thinking_network._convolved(x, kernel), whole, 27)
    one = sum(float(x[2 + a, 2 + b] @ kernel[1 + a, 1 + b, :, 1]) for a in (-1, 0, 1) for b in (-1, 0, 1))
    close.assert_same_sums(thinking_network._convolved(x, kernel)[2, 2, 1], np.float32(one), 27, magnitude=4.0)


def test_a_game_that_is_cut_off_is_worth_what_the_board_behind_its_last_move_is(monkeypatch):
    """It was the value of the board before that move, which is paid for already."""
    settings = dataclasses.replace(drc_planning.Settings(), **drc_planning.SMOKE)
    _, train, _ = drc_planning.boards_of(settings)
    level, keys = jax.tree.map(lambda x: x[:6], train), jax.random.split(jax.random.key(3), 6)
    sizes = {"planes": sokoban.PLANES, "side": settings.side, "channels": settings.channels, "depth": settings.depth}
    params = thinking_network.make(jax.random.key(0), **sizes, actions=sokoban.ACTIONS)

    def games(steps, level, keys):
        play = drc_planning.playing(dataclasses.replace(settings, moves=steps))
        return jax.vmap(lambda one, key: play(params, one, key, plan_probes.sampled))(level, keys)

    over = jnp.arange(6)[:, None] == 0  # the first board is solved as it is
    level = level._replace(goals=jnp.where(over, level.boxes, level.goals))
    some, longer = (games(steps, level, keys) for steps in (8, 9))
    assert some.solved[0] and not some.solved.all()
    for one, other in zip(some, plan_probes.cut(longer, 8), strict=True):
        np.testing.assert_array_equal(one, other)
    given, gae = [], drc_planning.gae_advantages
    monkeypatch.setattr(drc_planning, "gae_advantages", lambda *rows, **n: given.append(rows) or gae(*rows, **n))
    drc_planning.actor_critic(settings, params, level, keys)
    ((rewards, values, last, used),) = given
    assert rewards.shape == values.shape == used.shape == (6, 8)
    np.testing.assert_array_equal(last, jnp.where(some.solved, 0.0, longer.values[:, 8]))
    np.testing.assert_array_equal(values, longer.values[:, :8])


def test_games_are_numbered_from_a_key_of_their_own():
    """Both keys of a state are given away by a step of the host loop: they cannot be one array."""
    plan = drc_planning.build(dataclasses.replace(drc_planning.Settings(), **drc_planning.SMOKE))
    state = plans.start(plan.stages[0], {}, jax.random.key(1), extras=None)
    assert not jnp.array_equal(jax.random.key_data(state.extras["key"]), jax.random.key_data(state.key))


def test_an_empty_square_of_the_board_can_be_read():
    """Where the box will be pushed shows on the board alone to who looks around a square, and to no other."""
    rng = np.random.default_rng(0)
    boxes, agents = rng.integers(0, CELLS, (2, 300))
    planes = np.zeros((300, CELLS, sokoban.PLANES), np.float32)
    planes[np.arange(300), agents, 2] = planes[np.arange(300), boxes, 3] = 1.0
    wanted = np.full((300, CELLS), 4)  # an empty square whose left neighbour holds no box
    inner = np.arange(CELLS) % SIDE > 0
    wanted[:, inner] = np.where(planes[:, np.flatnonzero(inner) - 1, 3] > 0, 1, 4)
    wide = plan_probes.view(jnp.asarray(planes), SIDE)
    assert wide.shape == (300, CELLS, 9 * 5)
    np.testing.assert_array_equal(wide[..., 4 * 5 : 5 * 5 - 1], planes)
    assert (np.asarray(wide)[..., 4 * 5 + 4] == 1.0).all(), "a bias"
    shown = np.asarray(wide)[..., 4::5].reshape(300, SIDE, SIDE, 3, 3)
    assert shown[0, 0, 0].tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 1]] and shown[0, 1, 1].all()
    answers, there = jnp.asarray(wanted.reshape(-1), jnp.int32), jnp.ones((300 * CELLS,), bool)
    scores = [
        float(
            plan_probes.macro_f1(plan_probes.read(x, plan_probes.probe(x, answers, there, steps=200)), answers, there)
        )
        for x in (jnp.asarray(planes).reshape(-1, sokoban.PLANES), wide.reshape(-1, 45))
    ]
    assert scores[0] < 0.6 and scores[1] == 1.0


def test_a_written_route_counts_where_it_ends_in_a_solution(monkeypatch):
    """A box at 12 of 5 x 5 has to come to 14; the agent, at 0, would go to 1 and is sent around it: five steps."""
    level = sokoban.Level(jnp.zeros((25,), bool), jnp.array([14]), jnp.int32(0), jnp.array([12]))
    settings = dataclasses.replace(drc_planning.Settings(), side=5, moves=8, route=3)
    way = sokoban.around(level, jnp.int32(1), jnp.int32(0), side=5, most=8)
    assert way.agents[:5].tolist()[2:] == [11, 12, 13] and bool(way.there)
    own = types.SimpleNamespace(agents=jnp.array([0, 1]), actions=jnp.array([4]))
    for solved in (True, False):
        game = types.SimpleNamespace(agents=jnp.append(jnp.int32(0), way.agents), solved=jnp.asarray(solved))
        monkeypatch.setattr(drc_planning, "playing", lambda settings, game=game: lambda *rest, **more: game)
        given = (settings, {}, level, own, jnp.ones((16, 5)), jax.random.key(0))
        assert [bool(x) for x in drc_planning.routed(*given)] == [solved, True]
    short = dataclasses.replace(settings, moves=4)
    assert not bool(drc_planning.routed(short, *given[1:])[1]), "no game is long enough"
