"""Decoding that cannot leave a grammar: an automaton over token ids, for the sampler and for the trainer alike.

State 0 is the start. A token that is not allowed has probability 0, and the others share what is left: that is the
policy which samples and which trains. A state keeps a list of its tokens and no row of the vocabulary, so that
thousands of states serve a real tokenizer.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import logprobs
from jaxrl_llm.types import Params, Policy

MOST_STATES = 100_000  # of the plans of modules


class Grammar(NamedTuple):
    """Which tokens may come in a state, and the state after each of them; NumPy, so that it can be made anywhere."""

    tokens: Int[np.ndarray, "S C"]  # -1 where a state has fewer
    following: Int[np.ndarray, "S C"]


class Module(NamedTuple):
    """An expert that a plan may name: the tokens of its name, the kind it takes and the kind it gives."""

    name: tuple[int, ...]
    takes: str
    gives: str


def _names_apart(modules: Sequence[Module]) -> None:
    for i, one in enumerate(modules):
        for other in modules[i + 1 :]:
            short = min(len(one.name), len(other.name))
            if not short or one.name[:short] == other.name[:short]:
                raise ValueError(f"the names {one.name} and {other.name}: none may be empty or begin another")


def plan_grammar(modules: Sequence[Module], *, start: str | Sequence[str], end: int, most: int) -> Grammar:
    """Plans of modules that chain: names from their trie, each takes what the one before gives, none comes twice.

    After at least one module a plan may end; after ``most``, or where no module fits, it must.

    Args:
      start: the kind that the first module takes, or several, of which it takes one.
      end: id of the token that ends a plan; it then repeats.

    Raises:
      ValueError: for modules that make no plan, or more than ``MOST_STATES`` states.

    From "OpenAGI: When LLM Meets Domain Experts", arXiv:2304.04370, section 4, with its code.
    """
    _names_apart(modules)
    starts = (start,) if isinstance(start, str) else tuple(start)
    if most < 1 or not any(m.takes in starts for m in modules):
        raise ValueError(f"most={most}, start={start!r}: a plan needs room for a module that takes its start")
    first = (frozenset(), starts, ())
    numbers, waiting, rows = {first: 0, "ended": 1}, [first], {1: {end: 1}}
    while waiting:
        used, kinds, prefix = here = waiting.pop()
        if len(numbers) > MOST_STATES:
            raise ValueError(f"most={most} of {len(modules)} modules make more than {MOST_STATES:,} states; lower it")
        row = rows.setdefault(numbers[here], {})
        for i, module in enumerate(modules):
            n = len(prefix)
            if i in used or module.takes not in kinds or len(used) >= most or module.name[:n] != prefix:
                continue
            whole = n + 1 == len(module.name)
            then = (used | {i}, (module.gives,), ()) if whole else (used, kinds, module.name[: n + 1])
            if then not in numbers:
                numbers[then] = len(numbers)
                waiting.append(then)
            row[module.name[n]] = numbers[then]
        if used and not prefix:
            row[end] = numbers["ended"]
    return listed(rows)


def listed(rows: dict[int, dict[int, int]]) -> Grammar:
    """The grammar of ``state -> {token: state after it}``; states are 0 to the number of them.

    Raises:
      ValueError: for a state without a token, or one that is named and not there.
    """
    width = max(map(len, rows.values()), default=0)
    tokens, following = np.full((len(rows), width), -1, np.int32), np.zeros((len(rows), width), np.int32)
    for state, row in rows.items():
        if not row or not {state, *row.values()} <= set(range(len(rows))):
            raise ValueError(f"state {state}: {row} must hold a token, and states from 0 to {len(rows) - 1}")
        tokens[state, : len(row)], following[state, : len(row)] = list(row), list(row.values())
    return Grammar(tokens, following)


def choices(texts: Sequence[Sequence[int]], *, end: int) -> Grammar:
    """One of some texts, as token ids, then ``end``, which repeats: labels, options of a question, names.

    Raises:
      ValueError: where there is none, or one is empty.

    >>> found = choices([(5, 6), (5, 7), (5,)], end=1)
    >>> [sorted(t for t in row.tolist() if t >= 0) for row in found.tokens[:3]]
    [[5], [1], [1, 6, 7]]
    """
    if not texts or not all(len(text) for text in texts):
        raise ValueError(f"choices of {list(texts)!r}: give texts of at least one token")
    numbers, rows = {(): 0}, {0: {}, 1: {end: 1}}
    for text in map(tuple, texts):
        for k, token in enumerate(text):
            then = numbers.setdefault(text[: k + 1], len(numbers) + 1)  # 1 is the end
            rows.setdefault(then, {})
            rows[numbers[text[:k]]][token] = then
        rows[numbers[text]][end] = 1
    return listed(rows)


def free(vocabulary: int) -> Grammar:
    """The grammar of all strings."""
    return Grammar(np.arange(vocabulary, dtype=np.int32)[None], np.zeros((1, vocabulary), np.int32))


def legal(grammar: Grammar, state: Int[Array, "*B"], vocabulary: int) -> Bool[Array, "*B V"]:
    """Which tokens may come."""
    ids = jnp.asarray(grammar.tokens)[state].reshape(-1, grammar.tokens.shape[1])
    ids = jnp.where(ids < 0, vocabulary, ids)
    found = jax.vmap(lambda mine: jnp.zeros((vocabulary,), bool).at[mine].set(True, mode="drop"))(ids)
    return found.reshape(*state.shape, vocabulary)


def restricted(grammar: Grammar, state: Int[Array, " B"], logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Logits with ``-inf`` for what may not come."""
    return jnp.where(legal(grammar, state, logits.shape[1]), logits, -jnp.inf)


def advanced(grammar: Grammar, state: Int[Array, " B"], token: Int[Array, " B"]) -> Int[Array, " B"]:
    """The state after one more token; after one that may not come, the start."""
    here = jnp.asarray(grammar.tokens)[state] == token[:, None]
    return jnp.max(jnp.where(here, jnp.asarray(grammar.following)[state], 0), axis=1)


def states(grammar: Grammar, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """The state after the token at each index; tokens outside the mask are not read."""

    def step(state, column):
        token, read = column
        state = jnp.where(read, advanced(grammar, state, token), state)
        return state, state

    start = jnp.zeros((tokens.shape[0],), jnp.int32)
    return jnp.moveaxis(jax.lax.scan(step, start, (tokens.T, mask.T))[1], 0, 1)


def score_legal(grammar: Grammar, *, chunk: int = 128) -> Callable[..., tuple[Array, Array]]:
    """The ``score`` of ``train.methods.builders`` builders under a grammar: ``(logp, entropy)`` over what is allowed.

    Args:
      chunk: time steps whose logits exist at once, as of ``logprobs.chunked``.
    """

    def score(policy: Policy, params: Params, rows, *, temperature: float = 1.0) -> tuple[Array, Array]:
        hidden = policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
        # prompts need not be plans: only what produces a sampled token is restricted
        produces = jnp.pad(rows.mask[:, 1:], ((0, 0), (0, 1)))
        state = jnp.where(produces, states(grammar, rows.tokens, rows.mask), -1)

        def unembed(hidden: Array, state: Array) -> Array:
            logits = policy.unembed(params, hidden)
            may = legal(grammar, jnp.maximum(state, 0), logits.shape[-1]) | (state < 0)[..., None]
            return jnp.where(may, logits, -jnp.inf)

        return logprobs.chunked(
            hidden, unembed, rows.tokens, temperature=temperature, chunk=chunk, segment_ids=rows.segment_ids,
            beside=state,
        )  # fmt: skip

    return score
