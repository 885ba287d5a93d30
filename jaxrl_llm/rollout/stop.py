"""Stop strings found inside the compiled decode loop."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


class StopStrings(NamedTuple):
    """An automaton that reads tokens: in state ``s`` token ``v`` leads to ``following[s, kinds[v]]``.

    State 0 has read nothing; the last state has read a stop string and is never left. A row of a batch carries one
    whole number, so a stop string may begin and end anywhere inside tokens.
    """

    following: Int[Array, "S K"]
    kinds: Int[Array, " V"]  # tokens that act alike on every state are of one kind


def _byte_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Aho-Corasick over bytes ``[S, 256]``; every state that has read a string is the last one."""
    prefixes = sorted({s[:n] for s in strings for n in range(len(s) + 1)}, key=lambda p: (len(p), p))
    # a prefix that holds a whole stop string is never reached: its automaton has stopped before
    prefixes = [p for p in prefixes if not any(s in p for s in strings)]
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    stopped = len(prefixes)
    table = np.full((stopped + 1, 256), stopped, np.int32)
    for prefix, state in number.items():
        for byte in range(256):
            read = prefix + bytes([byte])
            if any(read.endswith(s) for s in strings):
                continue
            while read not in number:
                read = read[1:]
            table[state, byte] = number[read]
    return table


def make_stop_strings(strings: Sequence[str], token_bytes: Sequence[bytes], *, vocab_size: int) -> StopStrings:
    """Builds the automaton of several stop strings over a vocabulary, on the host and once.

    Args:
      token_bytes: what every token id adds to the text, see ``data.token_bytes``.
      vocab_size: of the model, padding included; ids without a text add nothing.

    Raises:
      ValueError: for no string, an empty one, or a vocabulary smaller than the tokenizer's.

    >>> found = make_stop_strings(["ab"], [b"a", b"b", b"cab", b""], vocab_size=4)
    >>> [int(found.following[0, k]) for k in found.kinds]
    [1, 0, 2, 0]
    """
    if isinstance(strings, str) or not strings or not all(strings):
        raise ValueError(f"stop={strings!r} must be a list of at least one text, none of them empty")
    if vocab_size < len(token_bytes):
        raise ValueError(f"vocab_size={vocab_size} is below the {len(token_bytes)} tokens of the tokenizer")
    table = _byte_automaton([s.encode() for s in strings])
    lengths = np.zeros(vocab_size, np.int32)
    lengths[: len(token_bytes)] = [len(text) for text in token_bytes]
    padded = np.zeros((vocab_size, int(lengths.max())), np.uint8)
    for token, text in enumerate(token_bytes):
        padded[token, : len(text)] = np.frombuffer(text, np.uint8)
    state = np.repeat(np.arange(len(table), dtype=np.int32)[:, None], vocab_size, axis=1)
    for column in range(padded.shape[1]):
        longer = lengths > column
        state[:, longer] = table[state[:, longer], padded[None, longer, column]]
    following, kinds = np.unique(state, axis=1, return_inverse=True)
    return StopStrings(jnp.asarray(following), jnp.asarray(kinds.reshape(-1), jnp.int32))


def start(rows: int) -> Int[Array, " B"]:
    """The state of rows that have read nothing."""
    return jnp.zeros((rows,), jnp.int32)


def advance(
    stop: StopStrings, state: Int[Array, " B"], tokens: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Reads one token a row: the next state, and whether a stop string has been read by now."""
    state = stop.following[state, stop.kinds[tokens]]
    return state, state == stop.following.shape[0] - 1
