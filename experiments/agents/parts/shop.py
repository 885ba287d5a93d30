"""A shop of pages in the manner of WebShop, as an arena: search, open a product, choose its colour, buy.

The prompt ``bxR2`` wants kind ``b``, trait ``x``, colour ``R`` and a price of at most 2. Every task has a catalogue of
its own with eight products. An action is three tokens: ``Sbx`` on the first page searches and is answered ``=`` and
the numbers of the three products that fit best; ``I5.`` opens one of them and shows kind, trait, price and two colours;
``OR.`` chooses a colour of it; ``B..`` goes back a page; ``Y..`` buys what is open and ends the episode. What cannot be
done is answered ``!``. Only buying pays, by WebShop's rule: nothing for another kind, else the share of trait, colour
and price that are right.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts.arena import Arena, skilled
from experiments.parts import strings
from jaxrl_llm.rollout.turns.multi_turn import Answered, Env
from jaxrl_llm.types import Key, Problems

PRODUCTS, VALUES, HITS, TURNS = 8, 4, 3, 8  # TURNS: a plan has 4, and 2 more for each of at most two look-alikes
ALPHABET = "_SIOBY.=!abcdwxyzRGVK01234567"  # the first is padding
_AT = {c: i for i, c in enumerate(ALPHABET)}
_KIND, _TRAIT, _COLOUR, _DIGIT = (_AT[c] for c in "awR0")


class Wanted(NamedTuple):
    """What the customer asks for."""

    kind: Int[Array, ""]
    trait: Int[Array, ""]
    colour: Int[Array, ""]
    limit: Int[Array, ""]  # of the price


class Visit(NamedTuple):
    """The catalogue, the customer's wish, the page; -1 is nothing."""

    kinds: Int[Array, " P"]
    traits: Int[Array, " P"]
    prices: Int[Array, " P"]
    colours: Int[Array, "P 2"]
    wanted: Wanted
    hits: Int[Array, " H"]
    item: Int[Array, ""]
    colour: Int[Array, ""]  # that was chosen
    opened: Bool[Array, " P"]


def encode(text: str) -> list[int]:
    """One token a character."""
    return [_AT[c] for c in text]


def _catalogue(rng: np.random.Generator, wanted: np.ndarray) -> np.ndarray:
    """``[P, 5]``: kind, trait, price and two colours of products: one is right, at most two look like it."""
    kind, trait, colour, limit = wanted.tolist()
    found = []
    for place in range(1 + int(rng.integers(0, HITS))):
        other = int((colour + 1 + rng.integers(0, VALUES - 1)) % VALUES)
        third = next(c for c in rng.permutation(VALUES).tolist() if c not in (colour, other))
        if place == 0:
            price, colours = int(rng.integers(0, limit + 1)), [colour, other]
        elif limit < VALUES - 1 and rng.random() < 0.5:
            price, colours = int(rng.integers(limit + 1, VALUES)), [colour, other]
        else:
            price, colours = int(rng.integers(0, VALUES)), [other, third]
        found.append([kind, trait, price, *rng.permutation(colours).tolist()])
    while len(found) < PRODUCTS:
        pair = rng.integers(0, VALUES, 2).tolist()
        if pair != [kind, trait]:
            found.append([*pair, int(rng.integers(0, VALUES)), *rng.permutation(VALUES)[:2].tolist()])
    return rng.permutation(np.asarray(found, np.int32))


def problems(count: int, seed: int) -> Problems:
    """Wishes with catalogues; ``level`` is the number of products that look right in a search."""
    rng = np.random.default_rng(seed)
    wanted = rng.integers(0, VALUES, (count, 4))
    shelves = np.stack([_catalogue(rng, row) for row in wanted])
    alike = ((shelves[:, :, :2] == wanted[:, None, :2]).all(axis=2)).sum(axis=1)
    tokens = jnp.asarray(wanted + np.asarray([_KIND, _TRAIT, _COLOUR, _DIGIT]), jnp.int32)
    answers = {"wanted": jnp.asarray(wanted, jnp.int32), "shelf": jnp.asarray(shelves, jnp.int32)}
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, jnp.asarray(alike, jnp.int32))


def _reset(key: Key, task: dict[str, Array]) -> Visit:
    shelf, none = task["shelf"], jnp.full((), -1, jnp.int32)
    return Visit(
        shelf[:, 0], shelf[:, 1], shelf[:, 2], shelf[:, 3:], Wanted(*task["wanted"]),
        jnp.full((HITS,), -1, jnp.int32), none, none, jnp.zeros((PRODUCTS,), bool),
    )  # fmt: skip


def purchase(state: Visit) -> Float[Array, ""]:
    """``[kind] ([trait] + [colour] + [price]) / 3`` of what is open.

    From "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents", arXiv:2207.01206, eq. 1,
    with one attribute and one option.
    """
    item, wanted = jnp.maximum(state.item, 0), state.wanted
    parts = (state.traits[item] == wanted.trait, state.colour == wanted.colour, state.prices[item] <= wanted.limit)
    share = sum(part.astype(jnp.float32) for part in parts) / 3.0
    return jnp.where((state.item >= 0) & (state.kinds[item] == wanted.kind), share, 0.0)


def _step(state: Visit, action: Array, count: Array) -> Answered:
    verb, dot = action[0], _AT["."]
    kind, trait = action[1] - _KIND, action[2] - _TRAIT
    number, colour = action[1] - _DIGIT, action[1] - _COLOUR
    listed, open_ = state.hits[0] >= 0, state.item >= 0
    whole, plain = action[2] == dot, (action[1] == dot) & (action[2] == dot)
    searches = (verb == _AT["S"]) & ~listed & (kind >= 0) & (kind < VALUES) & (trait >= 0) & (trait < VALUES)
    opens = (verb == _AT["I"]) & listed & ~open_ & whole & jnp.any((state.hits == number) & (number >= 0))
    here = jnp.maximum(state.item, 0)
    chooses = (verb == _AT["O"]) & open_ & whole & jnp.any(state.colours[here] == colour)
    goes_back, buys = (verb == _AT["B"]) & listed & plain, (verb == _AT["Y"]) & open_ & plain
    fits = 2 * (state.kinds == kind).astype(jnp.int32) + (state.traits == trait).astype(jnp.int32)
    _, best = jax.lax.top_k(fits, HITS)
    item = jnp.where(opens, number, jnp.where(goes_back, -1, state.item)).astype(jnp.int32)
    after = state._replace(
        hits=jnp.where(searches, best, jnp.where(goes_back & ~open_, -1, state.hits)).astype(jnp.int32),
        item=item,
        colour=jnp.where(chooses, colour, jnp.where(opens | goes_back, -1, state.colour)).astype(jnp.int32),
        opened=state.opened | (opens & (jnp.arange(PRODUCTS, dtype=jnp.int32) == number)),
    )
    at = jnp.maximum(item, 0)
    done = searches | opens | chooses | goes_back
    answer = jnp.where(done, _AT["="], _AT["!"])
    nothing = jnp.zeros((), jnp.int32)
    page = jnp.stack(
        [_KIND + state.kinds[at], _TRAIT + state.traits[at], _DIGIT + state.prices[at], *(_COLOUR + state.colours[at])]
    )
    results = jnp.stack([answer, *(_DIGIT + best), nothing])
    return Answered(
        state=after,
        tokens=jnp.where(opens, page, results).astype(jnp.int32),
        count=jnp.where(opens, 5, jnp.where(searches, 1 + HITS, 1)).astype(jnp.int32),
        reward=jnp.where(buys, purchase(state), 0.0),
        done=buys,
        valid=jnp.ones((), bool),
    )


def _identity(state: Visit) -> Array:
    places = (PRODUCTS + 1) ** jnp.arange(HITS, dtype=jnp.int32)
    opened = jnp.sum(state.opened.astype(jnp.int32) * 2 ** jnp.arange(PRODUCTS, dtype=jnp.int32))
    page = jnp.sum((state.hits + 1) * places) * (PRODUCTS + 1) + state.item + 1
    return (page * (VALUES + 1) + state.colour + 1) * 2**PRODUCTS + opened


ENV = Env(_reset, _step, _identity, action_tokens=3, observation_tokens=5)


def expert(state: Visit) -> Int[Array, " 3"]:
    """The action of a customer who knows only the pages seen."""

    def act(first: str, second: Array | str, third: Array | str) -> Array:
        return jnp.stack([jnp.asarray(_AT[x] if isinstance(x, str) else x, jnp.int32) for x in (first, second, third)])

    wanted, here = state.wanted, jnp.maximum(state.item, 0)
    right = (state.kinds[here] == wanted.kind) & (state.traits[here] == wanted.trait)
    right &= (state.prices[here] <= wanted.limit) & jnp.any(state.colours[here] == wanted.colour)
    choose = jnp.where(state.colour == wanted.colour, act("Y", ".", "."), act("O", _COLOUR + wanted.colour, "."))
    on_page = jnp.where(right, choose, act("B", ".", "."))
    fresh = ~state.opened[jnp.maximum(state.hits, 0)]
    following = state.hits[jnp.argmax(fresh)]
    on_list = jnp.where(jnp.any(fresh), act("I", _DIGIT + following, "."), act("B", ".", "."))
    search = act("S", _KIND + wanted.kind, _TRAIT + wanted.trait)
    return jnp.where(state.item >= 0, on_page, jnp.where(state.hits[0] >= 0, on_list, search))


def anything(key: Key) -> Int[Array, " 3"]:
    """An action at random, written as it should be."""
    verb, kind, trait, number, colour = jax.random.randint(
        key, (5,), 0, jnp.asarray([5, VALUES, VALUES, PRODUCTS, VALUES], jnp.int32)
    )
    firsts, dot = jnp.asarray(encode("SIOBY"), jnp.int32), jnp.int32(_AT["."])
    seconds = jnp.stack([_KIND + kind, _DIGIT + number, _COLOUR + colour, dot, dot])
    return jnp.stack([firsts[verb], seconds[verb], jnp.where(verb == 0, _TRAIT + trait, dot)]).astype(jnp.int32)


@lru_cache(maxsize=4)
def make_arena(*, skill: float = 0.7) -> Arena:
    """A decoder of two layers and 512 wishes to train on.

    Args:
      skill: chance that the behaviour to imitate does the right thing; else it does anything.
    """
    world = strings.make_world(len(ALPHABET), 4, 8 * TURNS, layers=2)

    return Arena(world.policy, ENV, problems(512, 0), problems(64, 1), TURNS, skilled(expert, anything, skill))
