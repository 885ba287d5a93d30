"""A small shop with a user who holds back what the agent needs, as an arena of three parties: agent, tools, user.

Three orders ``a b c`` have a size, ``0..3``, and a price, ``0..3``. The user writes ``C..`` (cancel an order, and tell
me what I get back) or ``X..`` (exchange it for another size) and keeps which one, and which size, until asked; an open
user writes ``Xa2`` at once and answers nothing afterwards. An action is three tokens, a message to the user: ``mo.``
(which order?), ``ms.`` (which size?), ``m3.`` (you get 3), ``me.`` (good-bye), or a call of a tool: ``La.`` looks an
order's price up, ``Ca.`` cancels it, ``Xa2`` changes its size. The answer is one token: what was asked for, ``k`` by a
user who has nothing to say, ``=`` by a tool that did it, ``!`` by one that could not. Some users want another size as
soon as they hear from the agent again, be it good-bye. Else good-bye ends the episode: it pays 1 where the database is
what it should be and the user was told the price of a cancelled order.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.agents.parts import arena as arenas
from jaxrl_llm import reduce
from jaxrl_llm.metrics import intervals
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.types import Key, Problems, Trajectories

ORDERS, SIZES, TURNS = 3, 4, 7  # TURNS: a shortest plan has 2 to 6
ALPHABET = "_CXLmosekabc0123=!."  # the first is padding
Draw = Callable[..., Problems]  # (count, seed, openly=, measured=)
Users = Callable[[Draw], Problems]
_AT = {c: i for i, c in enumerate(ALPHABET)}
CANCELLED = -1  # the size of an order that is no more


class Shop(NamedTuple):
    """The database, what the user wants and has said, what the agent has done."""

    sizes: Int[Array, " E"]
    prices: Int[Array, " E"]
    cancel: Bool[Array, ""]
    order: Int[Array, ""]
    size: Int[Array, ""]  # that the user wants now
    final: Int[Array, ""]  # and in the end
    gold: Int[Array, " E"]  # sizes after the right actions
    open: Bool[Array, ""]  # the user said everything at once
    told_order: Bool[Array, ""]
    told_size: Bool[Array, ""]
    looked: Bool[Array, ""]  # the agent saw the price of the order
    named: Bool[Array, ""]  # and told it


def encode(text: str) -> list[int]:
    """One token a character."""
    return [_AT[c] for c in text]


def problems(count: int, seed: int, *, openly: bool, fickle: float = 0.2) -> Problems:
    """Requests; ``level`` is 0 to cancel, 1 to exchange, 2 where the user changes the mind.

    Args:
      openly: the prompt says everything, and nobody changes the mind.
      fickle: share of the exchanges in which a user who holds back does.
    """
    rng = np.random.default_rng(seed)
    rows = np.arange(count)
    cancel, order = rng.random(count) < 0.5, rng.integers(0, ORDERS, count)
    sizes, prices = (rng.integers(0, SIZES, (count, ORDERS)) for _ in range(2))
    # three different sizes: what it has, what the user wants first, and what in the end
    steps = rng.permuted(np.tile([1, 2, 3], (count, 1)), axis=1)
    size, other = ((sizes[rows, order] + steps[:, i]) % SIZES for i in (0, 1))
    turns = ~cancel & (rng.random(count) < fickle) & (not openly)
    final, gold = np.where(turns, other, size), sizes.copy()
    gold[rows, order] = np.where(cancel, CANCELLED, final)
    first = np.where(cancel, _AT["C"], _AT["X"])
    second = np.where(openly, _AT["a"] + order, _AT["."])
    third = np.where(openly & ~cancel, _AT["0"] + size, _AT["."])
    found = {"sizes": sizes, "prices": prices, "order": order, "size": size, "final": final, "gold": gold}
    answers = {name: jnp.asarray(x, jnp.int32) for name, x in found.items()}
    answers |= {"cancel": jnp.asarray(cancel), "open": jnp.full((count,), openly)}
    tokens = jnp.asarray(np.stack([first, second, third], axis=1), jnp.int32)
    level = jnp.asarray(np.where(cancel, 0, 1 + turns), jnp.int32)
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, level)


def requests(count: int, seed: int, *, openly: bool, measured: bool = False) -> Problems:
    """``problems`` for training, or such as ask what none of these does, whoever asks them, and how.

    Measured are those of one price of four for each order that is to be cancelled, and of one size of four for each
    that is to be exchanged in the end. Nobody in training asks for that size first, either.
    """
    with jax.ensure_compile_time_eval():  # also where what uses the table is traced
        drawn = problems(16 * count, seed, openly=openly)
        task = {name: np.asarray(x) for name, x in drawn.answers.items()}
        order, cancel = task["order"], task["cancel"]
        ends, begins = (np.where(cancel, False, task[name] == order + 1) for name in ("final", "size"))
        held = ends | (cancel & (task["prices"][np.arange(len(order)), order] == order))
        return arenas.first_of(drawn, held if measured else ~held & ~begins, count)


class _Said(NamedTuple):
    """What an action is; exactly one is true, or none."""

    asks_order: Array
    asks_size: Array
    names: Array
    leaves: Array
    looks: Array
    cancels: Array
    exchanges: Array


def _read(action: Array) -> _Said:
    second, third = action[1], action[2]
    talks, dot = action[0] == _AT["m"], third == _AT["."]
    order = (second >= _AT["a"]) & (second < _AT["a"] + ORDERS)
    digit = (second >= _AT["0"]) & (second < _AT["0"] + SIZES)
    size = (third >= _AT["0"]) & (third < _AT["0"] + SIZES)
    return _Said(
        *(talks & dot & (second == _AT[c]) for c in "os"), talks & dot & digit, talks & dot & (second == _AT["e"]),
        *((action[0] == _AT[c]) & order & dot for c in "LC"), (action[0] == _AT["X"]) & order & size,
    )  # fmt: skip


def _step(state: Shop, action: Array, count: Array, *, bonus: float = 0.0) -> Answered:
    said = _read(action)
    at = jnp.clip(action[1] - _AT["a"], 0, ORDERS - 1)
    there = state.sizes[at] != CANCELLED
    writes = there & (said.cancels | said.exchanges)
    new = jnp.where(said.cancels, CANCELLED, action[2] - _AT["0"])
    here = jnp.arange(ORDERS, dtype=jnp.int32) == at
    talks = said.asks_order | said.asks_size | said.names | said.leaves
    # who has said one size and wants another says so at the next word, whatever it is
    turns = talks & state.told_size & (state.size != state.final)
    holds_back = ~state.open & ~turns
    tells_order, tells_size = said.asks_order & holds_back, said.asks_size & holds_back & ~state.cancel
    price = state.prices[state.order]
    after = state._replace(
        sizes=jnp.where(here & writes, new, state.sizes).astype(jnp.int32),
        size=jnp.where(turns, state.final, state.size).astype(jnp.int32),
        told_order=state.told_order | tells_order,
        told_size=state.told_size | tells_size,
        looked=state.looked | (said.looks & (at == state.order)),
        named=state.named | (said.names & (action[1] - _AT["0"] == price)),
    )
    user = jnp.where(tells_size | turns, _AT["0"] + after.size, _AT["k"])
    user = jnp.where(tells_order, _AT["a"] + state.order, user)
    tool = jnp.where(said.looks, _AT["0"] + state.prices[at], jnp.where(writes, _AT["="], _AT["!"]))
    over = said.leaves & ~turns
    right = jnp.all(after.sizes == state.gold) & (after.named | ~state.cancel)
    return Answered(
        state=after,
        tokens=jnp.where(talks, user, tool).astype(jnp.int32)[None],
        count=jnp.int32(1),
        reward=(over & right).astype(jnp.float32) + bonus * (writes | said.looks).astype(jnp.float32),
        done=over,
        valid=jnp.ones((), bool),
    )


def _reset(key: Key, task: dict[str, Array]) -> Shop:
    no = jnp.zeros((), bool)
    return Shop(**task, told_order=task["open"], told_size=task["open"], looked=no, named=no)


def _identity(state: Shop) -> Array:
    places = (SIZES + 1) ** jnp.arange(ORDERS, dtype=jnp.int32)
    return jnp.sum((state.sizes + 1) * places) * 2 + state.named.astype(jnp.int32)


@lru_cache(maxsize=4)
def make_env(*, bonus: float = 0.0) -> Env:
    """The shop; ``bonus`` is paid for every call that a tool could answer."""
    return Env(_reset, lambda *given: _step(*given, bonus=bonus), _identity, action_tokens=3, observation_tokens=1)


def expert(state: Shop) -> Int[Array, " 3"]:
    """The action of a shortest plan of somebody who knows only what was said."""

    def act(first: str, second: Array | str, third: Array | str = ".") -> Array:
        return jnp.stack([jnp.asarray(_AT[x] if isinstance(x, str) else x, jnp.int32) for x in (first, second, third)])

    order, size, price = _AT["a"] + state.order, _AT["0"] + state.size, _AT["0"] + state.prices[state.order]
    mine = state.sizes[state.order]
    after = jnp.where(state.named, act("m", "e"), act("m", price))
    cancel = jnp.where(mine == CANCELLED, after, act("C", order))
    cancel = jnp.where(state.looked, cancel, act("L", order))
    exchange = jnp.where(
        state.told_size, jnp.where(mine == state.size, act("m", "e"), act("X", order, size)), act("m", "s")
    )
    return jnp.where(state.told_order, jnp.where(state.cancel, cancel, exchange), act("m", "o"))


def anything(key: Key) -> Int[Array, " 3"]:
    """An action at random, written as it should be."""
    kind, order, size = jax.random.randint(key, (3,), 0, jnp.asarray([7, ORDERS, SIZES], jnp.int32))
    firsts = jnp.asarray(encode("mmmmLCX"), jnp.int32)
    seconds = jnp.concatenate(
        [jnp.asarray(encode("ose"), jnp.int32), (_AT["0"] + size)[None], jnp.repeat(_AT["a"] + order, 3)]
    )
    return jnp.stack([firsts[kind], seconds[kind], jnp.where(kind == 6, _AT["0"] + size, _AT["."])]).astype(jnp.int32)


def holding_back(draw: Draw = requests) -> Problems:
    """Users who say what they are asked, and may change their mind."""
    return draw(256, 0, openly=False)


def outspoken(draw: Draw = requests) -> Problems:
    """Users who say everything in the first message."""
    return draw(256, 1, openly=True)


def desk_arena(env: Env, draw: Draw, behave: Callable[[Any, Key], Array], *, words: int, turns: int) -> arenas.Arena:
    """A decoder of two layers; the table to imitate has both kinds of users, that to measure those who hold back.

    What is measured asks nothing that the others ask, see ``requests``.
    """
    both = jax.tree.map(lambda *x: jnp.concatenate(x), holding_back(draw), outspoken(draw))
    return arenas.make_arena(env, both, draw(48, 2, openly=False, measured=True), behave, words=words, turns=turns)


@lru_cache(maxsize=4)
def make_retail(*, skill: float = 0.8) -> arenas.Arena:
    """``desk_arena`` of the shop.

    Args:
      skill: chance that the behaviour to imitate does the right thing; else it does anything.
    """
    behave = arenas.skilled(expert, anything, skill)
    return desk_arena(make_env(), requests, behave, words=len(ALPHABET), turns=TURNS)


@lru_cache(maxsize=8)
def to_train(
    arena: arenas.Arena, users: Users = holding_back, *, bonus: float = 0.0, draw: Draw = requests,
    make: Callable[..., Env] = make_env,
) -> arenas.Arena:  # fmt: skip
    """The arena with one kind of users to train on, and a ``bonus`` while training.

    Args:
      draw, make: requests and env of another desk.
    """
    return dataclasses.replace(arena, env=make(bonus=bonus), train=users(draw))


def figures(held: Problems, rows: Trajectories) -> dict[str, Array]:
    """Trials of every request: pass^1, pass^4, how often who changed the mind is served, turns."""
    turns, samples = multi_turn.turns_of(rows), rows.tokens.shape[0] // held.tokens.shape[0]
    success = (multi_turn.episode_rewards({}, rows).value > 0.5).reshape(-1, samples)
    right = jnp.sum(success.astype(jnp.float32), axis=1)
    return {
        "eval/pass1": reduce.scalars(intervals.pass_hat_k(right, samples, 1)),
        "eval/pass4": reduce.scalars(intervals.pass_hat_k(right, samples, 4)),
        "eval/fickle": reduce.scalars(right / samples, held.level == 2),
        "eval/turns": reduce.scalars(jnp.sum(turns.taken.astype(jnp.float32), axis=1)),
    }
