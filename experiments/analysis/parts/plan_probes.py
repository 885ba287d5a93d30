"""Games of a thinking network, what linear probes read of its plan, and plans written into its memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.analysis.parts import sokoban, thinking_network
from jaxrl_llm.types import Key, Params

CLASSES = sokoban.ACTIONS  # never, and the four directions


class Game(NamedTuple):
    """``T`` steps on one board; ``cells`` are those of every tick."""

    agents: Int[Array, " T1"]
    boxes: Int[Array, "T1 K"]
    actions: Int[Array, " T"]
    used: Bool[Array, " T"]  # not every box was on a goal yet
    solved: Bool[Array, ""]
    logits: Float[Array, "T A"]
    values: Float[Array, " T"]
    planes: Float[Array, "T N P"]
    cells: Float[Array, "T K D S S C"]


class Steering(NamedTuple):
    """What is added to the new cells at every tick, before the agent has stepped on ``square`` and afterwards."""

    before: Float[Array, "D S S C"]
    after: Float[Array, "D S S C"]
    square: Int[Array, ""]


def greedy(logits: Array, key: Key, agent: Array, boxes: Array) -> Array:
    return jnp.argmax(logits)


def sampled(logits: Array, key: Key, agent: Array, boxes: Array) -> Array:
    return jax.random.categorical(key, logits)


def play(
    params: Params, level: sokoban.Level, key: Key, choose: Any, *, side: int, steps: int, ticks: int, carry: float,
    still: int = 0, steering: Steering | None = None,
) -> Game:  # fmt: skip
    """A game of ``steps`` steps; gradients reach logits and values, as actions have none.

    Args:
      choose: ``(logits, key, agent, boxes) -> action``.
      carry: what is left of the memory from step to step; 0 makes it a network without one.
      still: first steps in which the agent stays where it is, and thinks.
    """
    memory = thinking_network.fresh(params, side)

    def step(state: Any, t: Array) -> Any:
        memory, agent, boxes, done, reached = state
        push = None if steering is None else jnp.where(reached, steering.after, steering.before)
        memory = jax.tree.map(lambda x: carry * x, memory)
        planes = sokoban.seen(level, agent, boxes)
        logits, value, memory, cells = thinking_network.think(params, planes, memory, ticks=ticks, push=push)
        action = choose(logits, jax.random.fold_in(key, t), agent, boxes).astype(jnp.int32)
        action = jnp.where((t < still) | done, 0, action)
        then_agent, then_boxes = sokoban.move(level.walls, agent, boxes, action, side=side)
        reached = reached if steering is None else reached | (then_agent == steering.square)
        over = done | sokoban.solved(level, then_boxes)
        made = (then_agent, then_boxes, action, ~done, logits, value, planes, cells)
        return (memory, then_agent, then_boxes, over, reached), made

    start = (memory, level.agent, level.boxes, sokoban.solved(level, level.boxes), jnp.zeros((), bool))
    end, made = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))
    agents, boxes = (jnp.concatenate([a[None], b]) for a, b in ((level.agent, made[0]), (level.boxes, made[1])))
    return Game(agents, boxes, made[2], made[3], end[3], *made[4:])


def cut(games: Game, steps: int) -> Game:
    """The first ``steps`` steps of some longer games, leaves ``[B, ...]``."""
    used = games.used[:, :steps]
    first = jax.tree.map(lambda x: x[:, :steps], games._replace(solved=used))
    agents, boxes = (x[:, : steps + 1] for x in (games.agents, games.boxes))
    return first._replace(agents=agents, boxes=boxes, solved=~games.used[:, steps])


def labels(game: Game) -> tuple[Int[Array, "T N"], Int[Array, "T N"]]:
    """``C_A`` and ``C_B`` of every step, from the rest of the game itself."""
    cells, all_ = game.planes.shape[1], jnp.ones(game.used.shape, bool)
    return (
        sokoban.entered(game.agents, game.actions, all_, cells), sokoban.pushed(game.boxes, game.actions, all_, cells),
    )  # fmt: skip


def macro_f1(found: Int[Array, " M"], wanted: Int[Array, " M"], valid: Bool[Array, " M"]) -> Float[Array, ""]:
    """The mean over the classes that occur of ``2 tp / (2 tp + fp + fn)``.

    >>> import jax.numpy as jnp
    >>> round(float(macro_f1(jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 1, 4]), jnp.arange(4) < 3)), 4)
    0.6667
    """
    each = jnp.arange(CLASSES, dtype=jnp.int32)[:, None]
    says, is_so = (found[None, :] == each) & valid[None, :], (wanted[None, :] == each) & valid[None, :]
    hits, said, there = (jnp.sum(x.astype(jnp.float32), axis=1) for x in (says & is_so, says, is_so))
    score = 2.0 * hits / jnp.maximum(said + there, 1.0)
    occurs = (there > 0).astype(jnp.float32)
    return jnp.sum(score * occurs) / jnp.maximum(jnp.sum(occurs), 1.0)


def probe(
    features: Float[Array, "M C"], wanted: Int[Array, " M"], valid: Bool[Array, " M"], *, steps: int, rate: float = 0.03
) -> Float[Array, "C 5"]:  # fmt: skip
    """A 1 x 1 convolution without bias from a square's features to its class, by AdamW on the cross entropy.

    From "Interpreting Emergent Planning in Model-Free Reinforcement Learning", arXiv:2504.01871, section 3. Differs in
    steps on all squares at once, and at a greater rate.
    """
    weight = valid.astype(jnp.float32) / jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)
    tx = optax.adamw(rate, weight_decay=1e-3)

    def loss(weights: Array) -> Array:
        logp = jax.nn.log_softmax(features @ weights, axis=1)
        return -jnp.sum(weight * jnp.take_along_axis(logp, wanted[:, None], axis=1)[:, 0])

    def step(state: Any, _: None) -> Any:
        weights, moments = state
        with jax.numpy_dtype_promotion("standard"):  # optax mixes weak integers and floats
            updates, moments = tx.update(jax.grad(loss)(weights), moments, weights)
            weights = optax.apply_updates(weights, updates)
        return (weights, moments), None

    first = jnp.zeros((features.shape[1], CLASSES), jnp.float32)
    return jax.lax.scan(step, (first, tx.init(first)), None, steps)[0][0]


def read(features: Float[Array, "M C"], weights: Float[Array, "C 5"]) -> Int[Array, " M"]:
    """The class of each square."""
    return jnp.argmax(features @ weights, axis=1).astype(jnp.int32)


def view(planes: Float[Array, "*B N P"], side: int) -> Float[Array, "*B N F"]:
    """The board as a probe of it may see it: the planes of the 3 x 3 squares around each, and which of them there are.

    The plane of the square itself that says it is there is 1 everywhere: a probe without a bias has one so. Without it
    an empty square is the zero vector, of which nothing can be read.

    >>> view(jnp.zeros((4, 1)), 2).shape, view(jnp.zeros((4, 1)), 2)[0].reshape(9, 2)[:, 1].tolist()
    ((4, 18), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    """
    there = jnp.ones((*planes.shape[:-1], 1), planes.dtype)
    board = jnp.concatenate([planes, there], axis=-1).reshape(*planes.shape[:-2], side, side, -1)
    edges = [(0, 0)] * (board.ndim - 3) + [(1, 1), (1, 1), (0, 0)]
    wide = jnp.pad(board, edges)
    views = [wide[..., down : down + side, right : right + side, :] for down in range(3) for right in range(3)]
    return jnp.concatenate(views, axis=-1).reshape(*planes.shape[:-1], -1)


def steering(
    weights: Float[Array, "C 5"], action: Array, write: Array, erase: Array, *, layer: int, depth: int, side: int,
    alpha: float,
) -> Steering:  # fmt: skip
    """``route_steering`` of a route of one square."""
    return route_steering(weights, action[None], write[None], erase, layer=layer, depth=depth, side=side, alpha=alpha)


def route_steering(
    weights: Float[Array, "C 5"], actions: Int[Array, " L"], route: Int[Array, " L"], erase: Array, *, layer: int,
    depth: int, side: int, alpha: float,
) -> Steering:  # fmt: skip
    """``alpha w_action`` on the squares of a route, ``alpha w_never`` on the one to stay away from, in one layer.

    A square that the route enters twice has the action of the first time. When the agent has stepped on the last square
    only ``w_never`` stays. The route of a box is the squares it is pushed off. From arXiv:2504.01871, section 5.
    """
    place = jnp.arange(side * side, dtype=jnp.int32)[:, None]
    here = place == route[None, :]
    first = here & (jnp.cumsum(here.astype(jnp.int32), axis=1) == 1)
    towards = jnp.sum(jnp.where(first[:, :, None], weights[:, actions].T[None], 0.0), axis=1)
    away = jnp.where(place == erase, weights[:, 0][None, :], 0.0)

    def in_layer(added: Array) -> Array:
        board = alpha * added.reshape(side, side, -1)
        return jnp.zeros((depth, *board.shape), jnp.float32).at[layer].set(board)

    return Steering(in_layer(towards + away), in_layer(away), route[-1])
