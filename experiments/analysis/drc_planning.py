"""Plans that a model-free agent makes in its memory: read by probes, formed over ticks, written by hand (DRC, Sokoban).

Paper:     Bush et al., "Interpreting Emergent Planning in Model-Free Reinforcement Learning", arXiv:2504.01871.
Claim:     a recurrent agent trained without a model holds a plan in its memory: linear probes read from it which way
           each square will be entered and the box pushed off it, better than from what is seen; the plan forms while
           it thinks; what is written there with a probe's own vectors is what the agent does.
Equations: cells c' = f c + i g + alpha w, h' = o tanh(c') of D layers, K ticks a step; C_A, C_B: by which action the
           agent next steps on, the box is next pushed off a square, or never; probes: softmax(c_yx W), no bias; those
           of the board see the planes of 3 x 3 squares, and have a bias (45 numbers a square, the memory has 16);
           written: alpha w_action on another square beside the agent, alpha w_never on the one it would go to; or on
           the first three squares of a shortest solution around that one (route). The same for every box with the
           vectors of C_B: another direction than it would be pushed in, and a way of the box around the square that it
           would come to.
           feedforward: nothing stays from step to step; one_tick: K = 1; untrained: fresh weights; two_boxes: boards
           with two boxes (--boxes N for more), which any goal takes.
Left out:  the million boards of Boxoban (a file of them may be given, trimmed to squares; two_boxes then has longer
           games alone), DRC(3, 3), 3 x 3 probes of the memory, alpha of 0.25 to 2 (4, its largest, alone; --alpha),
           V-trace over a quarter of a billion frames: here a solver is imitated first, which pushes one box after
           another, the nearest first.
Expect:    probe/agent_gain and probe/box_gain (macro F1 of memory less that of the board) above 0; plan/rise (F1 after
           ticks without a move less that of the first) above 0; steer/gain (first steps on the square that was written
           less those with random vectors of equal length) above 0; probe/agent drc > feedforward; probe/agent_gain and
           plan/rise drc > untrained; as a secondary figure steer/route_gain, the same of whole routes, walked in order,
           without the erased square and to a solution; steer/box, steer/box_route and their gains are means over all
           boxes of a board; of two_boxes probe/box_gain above 0.
Measure:   fresh boards of 6 x 6 with one box, whose shortest solutions have 4 to 16 steps (two boxes: 4 to 24): 256 of
           them, a greedy game each; an F1 is of 36 squares at each of its steps. think/gain: share solved after five
           steps of standing still less that without.
Run:       python -m experiments.analysis.drc_planning; on boards of one's own --data FILE
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.analysis.parts import plan_probes, sokoban, thinking_network
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages.returns import gae_advantages
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.types import Key, Params, declared

OWN_ROWS = None  # build reads --data itself
STILL = 5  # steps without a move, in which the agent thinks


class Begun(NamedTuple):
    """Extras of a state: the key that games are numbered from."""

    key: Key


def trained(settings) -> tuple[experiment.Stage, ...]:
    """The solver imitated, then the rewards of its own games."""
    return stage(settings, imitation, settings.base_steps), stage(settings, actor_critic, settings.steps)


def untrained(settings) -> tuple[experiment.Stage, ...]:
    return ()


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes for minutes on a processor."""

    data: str = ""  # a file of boards as text; empty: boards made here
    steps: int = 150
    base_steps: int = 400  # of imitation
    eval_every: int = 150
    learning_rate: float = 1e-3
    games_per_step: int = 32
    side: int = 6
    boxes: int = 1
    levels: int = 1024
    moves: int = 20  # of a game
    depth: int = 2
    ticks: int = 2
    channels: int = 16
    carry: float = 1.0  # of the memory, from step to step
    discount: float = 0.97
    entropy: float = 0.01
    probed: int = 128  # boards that probes are fitted on
    probe_steps: int = 200
    alpha: float = 4.0
    route: int = 3  # squares of a written route
    learn: Callable[..., tuple[experiment.Stage, ...]] = trained


SMOKE = {
    "steps": 2, "base_steps": 2, "eval_every": 2, "games_per_step": 4, "levels": 16, "probed": 8, "probe_steps": 5,
    "channels": 4, "moves": 8,
}  # fmt: skip
ARMS = {
    "drc": {},
    "feedforward": {"carry": 0.0},
    "one_tick": {"ticks": 1},
    "untrained": {"learn": untrained},
    "two_boxes": {"boxes": 2, "moves": 32},
}
METRICS = (
    "eval/solved", "think/gain", "probe/agent", "probe/agent_gain", "probe/box", "probe/box_gain", "plan/rise",
    "steer/written", "steer/gain", "steer/route", "steer/route_gain", "steer/box", "steer/box_gain", "steer/box_route",
    "steer/box_route_gain",
)  # fmt: skip
CURVES = ("eval/solved", "probe/agent", "probe/box", "think/gain")
D_STAR = {
    "probe/agent_gain": 0.02, "probe/box_gain": 0.02, "plan/rise": 0.02, "steer/gain": 0.05, "probe/agent": 0.02,
    "steer/box_gain": 0.05,
}  # fmt: skip


def playing(settings) -> Callable[..., plan_probes.Game]:
    """``plan_probes.play`` with the sizes of the settings."""
    sizes = {"side": settings.side, "steps": settings.moves, "ticks": settings.ticks, "carry": settings.carry}
    return partial(plan_probes.play, **sizes)


def stage(settings, loss: Callable[..., Any], steps: int) -> experiment.Stage:
    """Games on training boards, drawn anew for every update."""
    _, boards, _ = boards_of(settings)
    rows = 16 * settings.levels

    def table(extras):
        return {"game": jnp.arange(rows, dtype=jnp.int32)}

    def of_games(params: Params, extras: dict[str, Any], batch: dict[str, Array]):
        level = jax.tree.map(lambda x: x[batch["game"] % settings.levels], boards)
        first = declared(Begun, extras).key
        keys = jax.vmap(lambda k: jax.random.fold_in(first, k))(batch["game"])
        return loss(settings, params, level, keys)

    size, tx = settings.games_per_step, optax.adam(settings.learning_rate)
    method = Offline(table, make_uniform(), size, of_games, tx)
    return experiment.Stage(method, steps, lambda params, key: Begun(jax.random.fold_in(key, 1))._asdict())


def imitation(settings, params: Params, level: sokoban.Level, keys: Key) -> tuple[Array, dict[str, Array]]:
    """``-log pi`` of the solver's action wherever its follower comes, who takes one step in four by chance.

    By chance no box is pushed but the one whose turn it is: the solver's plan stays one.
    """
    side = settings.side
    far = jax.vmap(lambda one: sokoban.tables_of(one, side=side, most=3 * settings.moves))(level)

    def one(level, far, key):
        def clumsy(logits, key, agent, boxes):
            coin, draw = jax.random.split(key)
            best = sokoban.expert_action(far, level, agent, boxes, side=side)
            anything = jax.random.randint(draw, (), 0, sokoban.ACTIONS, jnp.int32)
            moved = sokoban.move(level.walls, agent, boxes, anything, side=side)[1] != boxes
            other = jnp.any(moved & (jnp.arange(boxes.shape[0]) != sokoban.turn_of(level, boxes)))
            return jnp.where((jax.random.uniform(coin) < 0.75) | other, best, anything)

        game = playing(settings)(params, level, key, clumsy)
        best = jax.vmap(lambda a, b: sokoban.expert_action(far, level, a, b, side=side))
        return game, best(game.agents[:-1], game.boxes[:-1])

    games, wanted = jax.vmap(one)(level, far, keys)
    logp = jnp.take_along_axis(jax.nn.log_softmax(games.logits, axis=2), wanted[:, :, None], axis=2)[:, :, 0]
    value = -reduce.tokens(logp, games.used)
    return value, {"imitation/loss": value, "tokens/trained": jnp.sum(games.used.astype(jnp.float32))}


def actor_critic(settings, params: Params, level: sokoban.Level, keys: Key) -> tuple[Array, dict[str, Array]]:
    """``-A log pi + (V - target)^2 / 2 - entropy`` of its own games.

    1 for a solution, 0.1 for a box that comes onto a goal, -0.1 for one that leaves it, -0.01 a step. What a game that
    is cut off would still earn is the value of the board behind its last move.
    """
    play = playing(dataclasses.replace(settings, moves=settings.moves + 1))
    longer = jax.vmap(lambda one, key: play(params, one, key, plan_probes.sampled))(level, keys)
    games = plan_probes.cut(longer, settings.moves)
    ends = games.used & ~jnp.concatenate([games.used[:, 1:], ~games.solved[:, None]], axis=1)
    on = jnp.sum(jnp.any(games.boxes[..., None] == level.goals[:, None, None, :], axis=3).astype(jnp.float32), axis=2)
    rewards = jnp.where(games.used, ends.astype(jnp.float32) + 0.1 * (on[:, 1:] - on[:, :-1]) - 0.01, 0.0)
    stop = jax.lax.stop_gradient
    last = jnp.where(games.solved, 0.0, stop(longer.values[:, -1]))
    advantages, targets = gae_advantages(
        rewards, stop(games.values), last, games.used, gamma=settings.discount, lam=settings.discount
    )
    each = jax.nn.log_softmax(games.logits, axis=2)
    logp = jnp.take_along_axis(each, games.actions[:, :, None], axis=2)[:, :, 0]
    spread = -jnp.sum(jnp.exp(each) * each, axis=2)
    terms = -stop(advantages) * logp + 0.5 * (games.values - stop(targets)) ** 2 - settings.entropy * spread
    value = reduce.tokens(terms, games.used)
    solved = reduce.scalars(games.solved.astype(jnp.float32))
    return value, {"reward/mean": solved, "tokens/trained": jnp.sum(games.used.astype(jnp.float32))}


def squares(values: Array) -> Array:
    """``[B, T, ..., F]`` as rows of squares ``[B T N, F]``."""
    return values.reshape(-1, values.shape[-1])


def readings(settings, fitted: plan_probes.Game, tested: plan_probes.Game) -> tuple[dict[str, Array], list[Array]]:
    """How well probes on the last layer and on the board read both concepts; and the weights of those on the layer."""
    cells = settings.side**2

    def rows(games):
        wanted = [x.reshape(-1) for x in jax.vmap(plan_probes.labels)(games)]
        return (
            squares(games.cells[:, :, -1, -1]),
            squares(plan_probes.view(games.planes, settings.side)),
            wanted,
            jnp.repeat(games.used.reshape(-1), cells),
        )

    memory, board, wanted, valid = rows(fitted)
    memory_, board_, wanted_, valid_ = rows(tested)
    found, weights = {}, []
    for name, label, label_ in zip(("agent", "box"), wanted, wanted_, strict=True):
        scores = []
        for known, fresh in ((memory, memory_), (board, board_)):
            fit = plan_probes.probe(known, label, valid, steps=settings.probe_steps)
            scores.append(plan_probes.macro_f1(plan_probes.read(fresh, fit), label_, valid_))
            weights.append(fit)
        found |= {f"probe/{name}": scores[0], f"probe/{name}_gain": scores[0] - scores[1]}
    return found, weights[::2]


def formation(settings, weights: Array, thought: plan_probes.Game) -> Array:
    """Macro F1 of the probe at every tick of the steps without a move, of the plan that is then carried out."""
    wanted = jax.vmap(plan_probes.labels)(thought)[0][:, STILL].reshape(-1)
    ticks = thought.cells[:, :STILL, :, -1].reshape(
        thought.cells.shape[0], STILL * settings.ticks, -1, settings.channels
    )
    valid = jnp.ones(wanted.shape, bool)
    each = jnp.moveaxis(ticks, 1, 0)
    return jax.lax.map(lambda tick: plan_probes.macro_f1(plan_probes.read(squares(tick), weights), wanted, valid), each)


def steered(settings, params: Params, level: sokoban.Level, own: plan_probes.Game, weights: Array, key: Key):
    """``(first step on the written square, there is one)``: another square beside the agent than it would go to."""
    side, each = settings.side, jnp.arange(sokoban.ACTIONS, dtype=jnp.int32)
    after, boxes = jax.vmap(lambda k: sokoban.move(level.walls, level.agent, level.boxes, k, side=side))(each)
    first = own.actions[0]
    free = (after != level.agent) & jnp.all(boxes == level.boxes[None], axis=1) & (each != first)
    action = jnp.argmax(free)
    towards = plan_probes.steering(
        weights, action, after[action], after[first], layer=settings.depth - 1, depth=settings.depth, side=side,
        alpha=settings.alpha,
    )  # fmt: skip
    game = playing(settings)(params, level, key, plan_probes.greedy, steering=towards)
    return game.agents[1] == after[action], jnp.any(free) & (first > 0)


def routed(settings, params: Params, level: sokoban.Level, own: plan_probes.Game, weights: Array, key: Key):
    """``(the written route was walked to a solution, there is one)``: its first squares, around where it would go.

    A route is there only where its solution fits into the game.
    """
    side, length = settings.side, settings.route
    erase = own.agents[1]
    route, actions, there = sokoban.detour(level, erase, side=side, most=settings.moves, length=length)
    towards = plan_probes.route_steering(
        weights, actions, route, erase, layer=settings.depth - 1, depth=settings.depth, side=side, alpha=settings.alpha
    )
    game = playing(settings)(params, level, key, plan_probes.greedy, steering=towards)
    walked = jnp.all(game.agents[1 : length + 1] == route) & ~jnp.any(game.agents == erase)
    return walked & game.solved, there & (own.actions[0] > 0)


def each_box(how: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """``how`` for every box of a board in turn."""

    def of_board(settings, params: Params, level: sokoban.Level, own: plan_probes.Game, weights: Array, key: Key):
        every = jnp.arange(level.boxes.shape[0], dtype=jnp.int32)
        return jax.lax.map(lambda box: how(settings, params, level, own, weights, key, box), every)

    return of_board


def box_steered(settings, params: Params, level: sokoban.Level, own: plan_probes.Game, weights: Array, key: Key, box):
    """``(first pushed in the written direction, there is one)``: another than it would be pushed in."""
    side, each, square = settings.side, jnp.arange(sokoban.ACTIONS, dtype=jnp.int32), level.boxes[box]
    first = plan_probes.labels(own)[1][0, square]
    beside = jnp.pad(jnp.asarray(sokoban.neighbours(side)), ((0, 0), (0, 1)), constant_values=side**2)[:, square]
    closed = jnp.append(sokoban.closed_by(level.walls, level.boxes, box), True)
    onto = closed[beside]
    free = ~onto & ~onto[sokoban.OPPOSITE] & (each > 0) & (each != first)
    action = jnp.argmax(free)
    towards = plan_probes.steering(
        weights, action, square, beside[first], layer=settings.depth - 1, depth=settings.depth, side=side,
        alpha=settings.alpha,
    )  # fmt: skip
    game = playing(settings)(params, level, key, plan_probes.greedy, steering=towards)
    return plan_probes.labels(game)[1][0, square] == action, jnp.any(free) & (first > 0)


def box_routed(settings, params: Params, level: sokoban.Level, own: plan_probes.Game, weights: Array, key: Key, box):
    """``(the box went the written way to a solution, there is one)``: its first pushes, around where it would come to.

    A way is there only where it fits into the game.
    """
    side, square = settings.side, level.boxes[box]
    first = plan_probes.labels(own)[1][0, square]
    erase = jnp.asarray(sokoban.neighbours(side))[first, square]
    way = sokoban.around(level, erase, box, side=side, most=settings.moves)
    route, actions, ends, there = sokoban.pushes(way.boxes, way.actions, settings.route)
    towards = plan_probes.route_steering(
        weights, actions, route, erase, layer=settings.depth - 1, depth=settings.depth, side=side, alpha=settings.alpha
    )
    game = playing(settings)(params, level, key, plan_probes.greedy, steering=towards)
    _, _, went, pushed = sokoban.pushes(game.boxes[:, box], game.actions, settings.route)
    as_written = jnp.all(jnp.where(there, pushed & (went == ends), True))
    as_written &= game.solved & ~jnp.any(game.boxes[:, box] == erase)
    return as_written, way.there & there[0] & (first > 0)


@lru_cache(maxsize=8)
def make_study(settings) -> Callable[[Params, Key], dict[str, Array]]:
    """Everything that is asked of an agent, on boards that it has not trained on."""
    _, train, held = boards_of(settings)
    fitted_on = jax.tree.map(lambda x: x[: settings.probed], train)
    play, longer = playing(settings), playing(dataclasses.replace(settings, moves=settings.moves + STILL))

    def measure(params: Params, key: Key) -> dict[str, Array]:
        def games(level, how, **more):
            return jax.vmap(lambda one: how(params, one, key, plan_probes.greedy, **more))(level)

        fitted, tested, thought = games(fitted_on, play), games(held, play), games(held, longer, still=STILL)
        found, (of_agent, of_box) = readings(settings, fitted, tested)
        by_tick = formation(settings, of_agent, thought)
        random = jax.random.normal(key, of_agent.shape, jnp.float32)
        rates = {}
        for name, how, weights in (
            ("written", steered, of_agent), ("route", routed, of_agent),
            ("box", each_box(box_steered), of_box), ("box_route", each_box(box_routed), of_box),
        ):  # fmt: skip
            size = jnp.sqrt(jnp.sum(weights**2, axis=0) / jnp.sum(random**2, axis=0))
            for kind, vectors in (("", weights), ("_random", random * size[None, :])):
                done, there = jax.vmap(lambda one, own, v=vectors, how=how: how(settings, params, one, own, v, key))(
                    held, tested
                )
                rates[name + kind] = reduce.scalars(done.reshape(-1).astype(jnp.float32), there.reshape(-1))
        gains = {"gain" if name == "written" else f"{name}_gain": rates[name] - rates[f"{name}_random"]
                 for name in ("written", "route", "box", "box_route")}  # fmt: skip
        solved, later = (reduce.scalars(x.solved.astype(jnp.float32)) for x in (tested, thought))
        return found | {
            "eval/solved": solved, "think/gain": later - solved, "plan/rise": by_tick[-1] - by_tick[0],
            **{f"steer/{name}": rates[name] for name in ("written", "route", "box", "box_route")},
            **{f"steer/{name}": value for name, value in gains.items()},
        }  # fmt: skip

    return measure


def boards_of(settings) -> tuple[int, sokoban.Level, sokoban.Level]:
    """The side of the boards, what is trained on, and what is not."""
    if settings.data:
        return sokoban.read(settings.data)
    if not 1 <= settings.boxes <= 4:
        raise UserError(f"--boxes {settings.boxes} must be from 1 to 4")
    return settings.side, *sokoban.levels(settings.levels, settings.side, settings.boxes)


def build(settings: Settings) -> experiment.Plan:
    """An agent that plays, and the study of it."""
    side, train, _ = boards_of(settings)
    count, boxes = train.goals.shape
    settings = dataclasses.replace(settings, side=side, levels=count, boxes=boxes)
    sizes = {"planes": sokoban.PLANES, "side": settings.side, "channels": settings.channels, "depth": settings.depth}
    init = partial(thinking_network.make, **sizes, actions=sokoban.ACTIONS)
    return experiment.Plan(init, settings.learn(settings), make_study(settings))


def claim(results: experiment.Results) -> experiment.Claim:
    """Its memory tells more of its plan than the board does, more the longer it thinks, and what is written is done."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.above(results, "probe/agent_gain", "drc", 0.0),
        experiment.above(results, "probe/box_gain", "drc", 0.0),
        experiment.above(results, "plan/rise", "drc", 0.0),
        experiment.above(results, "steer/gain", "drc", 0.0),
        experiment.greater(results, "probe/agent", "drc", "feedforward"),
        experiment.above(results, "steer/box_gain", "drc", 0.0),
        experiment.above(results, "probe/box_gain", "two_boxes", 0.0),
        experiment.greater(results, "probe/agent_gain", "drc", "untrained"),
        experiment.greater(results, "plan/rise", "drc", "untrained"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
