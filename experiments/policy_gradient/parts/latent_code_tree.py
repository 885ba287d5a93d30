"""Tree search over latent actions: which text is taken further, what its children are worth, which answer is given.

Nodes stand in the order in which they were made, the root first and a parent before its children. Everything a search
knows is a few arrays over nodes, and visits and values are functions of them; nothing is counted along the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

ROOT_PRIOR = 0.5  # nothing chose the prompt


class Tree(NamedTuple):
    """Nodes ``N`` of one search; in a batch every array has an axis before."""

    parent: Int[Array, "*B N"]  # of the root: 0
    prior: Float[Array, "*B N"]  # mean probability of the codes on the way from the parent
    reward: Float[Array, "*B N"]  # of the response that the policy completes from here; of the root: 0
    terminal: Bool[Array, "*B N"]  # the response ends here
    there: Bool[Array, "*B N"]  # what has been made so far
    text: PyTree  # what belongs to a node, leaves ``[*B, N, ...]``


class Children(NamedTuple):
    """``C`` nodes that were made from one, the same fields as in a ``Tree``."""

    prior: Float[Array, "*B C"]
    reward: Float[Array, "*B C"]
    terminal: Bool[Array, "*B C"]
    text: PyTree


class Backed(NamedTuple):
    """What the rewards say of every node."""

    visits: Float[Array, "*B N"]  # simulations from it and from what is below it
    value: Float[Array, "*B N"]
    q: Float[Array, "*B N"]  # of the edge to it


def backed_up(
    parent: Int[Array, " N"], reward: Float[Array, " N"], there: Bool[Array, " N"], *, gamma: float = 0.99
) -> Backed:
    """Visits and values from the rewards of simulations, from the last node to the first.

    A node is visited once for its own simulation, which the root has not, and once for each below it. The value of a
    leaf is its reward ``R``; of any other ``sum_c N_c q_c / sum_c N_c`` over its children, with
    ``q_c = R_c - R + gamma V_c``: what the step to the child gained, and what follows.

    From "Controlling Large Language Model with Latent Actions" (CoLA), arXiv:2503.21383, as in the released search.
    Differs in a node whose children's q are all 0: its value is 0, where the release leaves the one before.

    >>> parent, reward = jnp.array([0, 0, 0, 1]), jnp.array([0.0, 0.5, 0.0, 1.0])
    >>> backed = backed_up(parent, reward, jnp.ones(4, bool), gamma=1.0)
    >>> backed.visits.tolist(), backed.value.tolist(), backed.q.tolist()
    ([3.0, 2.0, 1.0, 1.0], [1.3333333730697632, 1.5, 0.0, 1.0], [0.0, 2.0, 0.0, 1.5])
    """
    count = parent.shape[0]
    own = there.at[0].set(False).astype(jnp.float32)
    zeros = jnp.zeros((count,), jnp.float32)

    def step(carry: tuple[Array, Array, Array], node: Array) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        visits, below, total = carry  # of every node; below and total: of its children alone
        value = jnp.where(below[node] > 0, total[node] / jnp.maximum(below[node], 1.0), reward[node])
        q = jnp.where(there[node] & (node > 0), reward[node] - reward[parent[node]] + gamma * value, 0.0)
        more = jnp.where(node > 0, visits[node], 0.0)
        up = parent[node]
        return (visits.at[up].add(more), below.at[up].add(more), total.at[up].add(more * q)), (value, q)

    order = jnp.arange(count, dtype=jnp.int32)
    (visits, *_), (value, q) = jax.lax.scan(step, (own, zeros, zeros), order, reverse=True)
    return Backed(visits, jnp.where(there, value, 0.0), q)


def puct(
    value: Float[Array, "..."],
    prior: Float[Array, "..."],
    visits: Float[Array, "..."],
    parent_visits: Float[Array, "..."],
    *,
    weight: float = 0.7,
) -> Float[Array, "..."]:
    """``V + weight * prior * sqrt(N_parent) / (N + 1)``: what is worth taking further, or was hardly tried.

    Args:
      weight: of what was hardly tried; 0: the best value alone.

    >>> float(puct(*map(jnp.float32, (0.5, 0.25, 1.0, 16.0)), weight=2.0))
    1.5
    """
    if weight < 0:
        raise ValueError(f"weight={weight} must not be negative")
    return value + weight * prior * jnp.sqrt(parent_visits) / (visits + 1.0)


def selected(tree: Tree, *, gamma: float = 0.99, weight: float = 0.7) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Of all nodes that may be taken further the one of largest ``puct``, and whether there is one.

    Those are texts that have not ended and have no children, wherever in the tree; of equals the first.
    """
    backed = backed_up(tree.parent, tree.reward, tree.there, gamma=gamma)
    made = tree.there.at[0].set(False).astype(jnp.int32)  # the root is nobody's child
    children = jnp.zeros(made.shape, jnp.int32).at[tree.parent].add(made)
    may = tree.there & ~tree.terminal & (children == 0)
    worth = puct(backed.value, tree.prior, backed.visits, backed.visits[tree.parent], weight=weight)
    return jnp.argmax(jnp.where(may, worth, -jnp.inf)).astype(jnp.int32), jnp.any(may)


def answer(tree: Tree, *, gamma: float = 0.99) -> Int[Array, ""]:
    """The node whose completed response is given: an end of larger ``q`` than any reward, else the largest reward.

    Of equals the first; the root where nothing was made.
    """
    backed = backed_up(tree.parent, tree.reward, tree.there, gamma=gamma)
    made = tree.there.at[0].set(False)
    rewards = jnp.where(made, tree.reward, -jnp.inf)
    ends = jnp.where(made & tree.terminal, backed.q, -jnp.inf)
    better = jnp.max(ends) > jnp.max(rewards)
    return jnp.where(better, jnp.argmax(ends), jnp.argmax(rewards)).astype(jnp.int32)


def rooted(text: PyTree, nodes: int) -> Tree:
    """A tree that is its root, with room for so many nodes.

    Args:
      text: of the root, leaves ``[B, ...]``.
    """
    batch = jax.tree.leaves(text)[0].shape[0]
    first = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32)[None, :] == 0, (batch, nodes))
    zeros = jnp.zeros((batch, nodes), jnp.float32)

    def roomy(x: Array) -> Array:
        return jnp.zeros((batch, nodes, *x.shape[1:]), x.dtype).at[:, 0].set(x)

    return Tree(
        parent=jnp.zeros((batch, nodes), jnp.int32),
        prior=jnp.where(first, ROOT_PRIOR, 0.0),
        reward=zeros,
        terminal=jnp.zeros((batch, nodes), bool),
        there=first,
        text=jax.tree.map(roomy, text),
    )


def with_children(
    tree: Tree, start: Array | int, node: Int[Array, " B"], grows: Bool[Array, " B"], new: Children
) -> Tree:
    """The tree with children of one node each, at the nodes from ``start`` on; of trees that do not grow none."""
    count = new.prior.shape[1]

    def put(x: Array, value: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, value.astype(x.dtype), start, axis=1)

    return Tree(
        parent=put(tree.parent, jnp.broadcast_to(node[:, None], (node.shape[0], count))),
        prior=put(tree.prior, new.prior),
        reward=put(tree.reward, new.reward),
        terminal=put(tree.terminal, new.terminal),
        there=put(tree.there, jnp.broadcast_to(grows[:, None], (node.shape[0], count))),
        text=jax.tree.map(put, tree.text, new.text),
    )


def nodes_of(rounds: int, first: int, then: int) -> int:
    """How many nodes a search makes at most: the root, its children, and those of one node in every further round.

    >>> nodes_of(32, 5, 4)
    130
    """
    if min(rounds, first, then) < 1:
        raise ValueError(f"rounds={rounds}, first={first} and then={then} must be at least 1")
    return 1 + first + (rounds - 1) * then


def search(
    expand: Callable[[PyTree, int], Children],
    text: PyTree,
    *,
    rounds: int = 32,
    first: int = 5,
    then: int = 4,
    gamma: float = 0.99,
    weight: float = 0.7,
    loop: Callable[..., Any] = jax.lax.fori_loop,
) -> Tree:
    """The trees after so many rounds; in each, one node gets all the children that it may have.

    From "Controlling Large Language Model with Latent Actions" (CoLA), arXiv:2503.21383 (MCTS-Q), as in the released
    search, which also stops where the last child that was made has ended; here all rounds are run.

    Args:
      expand: ``(texts of nodes [B, ...], children) -> Children``.
      text: of the roots, leaves ``[B, ...]``.
      first, then: children of the root, and of any other node.
      loop: ``(from, to, body, tree) -> tree``; in Python where ``expand`` asks Python.
    """
    tree = rooted(text, nodes_of(rounds, first, then))
    batch = tree.parent.shape[0]
    root = jnp.zeros((batch,), jnp.int32)
    tree = with_children(tree, 1, root, jnp.ones((batch,), bool), expand(text, first))

    def body(turn: Array | int, tree: Tree) -> Tree:
        node, grows = jax.vmap(lambda one: selected(one, gamma=gamma, weight=weight))(tree)
        rows = jnp.arange(batch, dtype=jnp.int32)
        new = expand(jax.tree.map(lambda x: x[rows, node], tree.text), then)
        return with_children(tree, 1 + first + (turn - 1) * then, node, grows, new)

    return loop(1, rounds, body, tree)
