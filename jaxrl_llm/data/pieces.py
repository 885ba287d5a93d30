"""One text in two vocabularies: the pieces at whose ends both tokenizations agree, and tokens of equal text."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.token_bytes import token_bytes
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError


def agreed_pieces(own: Sequence[int], other: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The shortest pieces of a text that both tokenizations have: ``(begin, end)`` in tokens of one, then of the other.

    A token without bytes belongs to the piece behind it. What lies behind the last common end is in no piece.

    Args:
      own, other: bytes of each token.

    From TRL's GOLDTrainer (``_align_by_byte_offsets``).

    >>> agreed_pieces([1, 2, 1], [2, 1, 1])  # a|bc|d and ab|c|d
    [(0, 2, 0, 2), (2, 3, 2, 3)]
    """
    ends, others = np.cumsum(own), np.cumsum(other)
    found, begin, start, i, j = [], 0, 0, 0, 0
    while i < len(ends) and j < len(others):
        if ends[i] < others[j]:
            i += 1
        elif ends[i] > others[j]:
            j += 1
        else:
            i, j = i + 1, j + 1
            found.append((begin, i, start, j))
            begin, start = i, j
    return found


def equal_tokens(own: Sequence[bytes], other: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Ids of the tokens of equal bytes in both vocabularies, each text once; tokens without bytes are in none.

    Differs from TRL's GOLDTrainer, which compares what the vocabularies call a token: a blank is spelled differently in
    byte-level and in SentencePiece ones.

    >>> equal_tokens([b"", b"a", b" b", b"a"], [b" b", b"", b"c", b"a"])
    ([1, 2], [3, 0])
    """
    places = {text: i for i, text in reversed(list(enumerate(other))) if text}
    pairs: dict[bytes, tuple[int, int]] = {}
    for i, text in enumerate(own):
        if text in places and text not in pairs:
            pairs[text] = i, places[text]
    return [i for i, _ in pairs.values()], [j for _, j in pairs.values()]


def same_vocabulary(own: Tokenizer, other: Tokenizer) -> bool:
    """Whether every id stands for the same bytes; where these cannot be read, whether there are as many ids."""
    if own.vocab_size != other.vocab_size:
        return False
    try:
        return token_bytes(own) == token_bytes(other)
    except UserError:  # no files, or a decoder of another kind: equal sizes are all there is to go by
        return True


class TwoTokenizers(NamedTuple):
    """What it takes to read the tokens of one in those of the other."""

    own: Tokenizer
    other: Tokenizer
    own_bytes: tuple[bytes, ...]
    other_bytes: tuple[bytes, ...]


def two_tokenizers(own: Tokenizer, other: Tokenizer) -> TwoTokenizers:
    """The record of two tokenizers.

    Raises:
      UserError: where the bytes of the tokens of one of them cannot be read.
    """
    return TwoTokenizers(own, other, token_bytes(own), token_bytes(other))


class Reread(NamedTuple):
    """A response in the tokens of another vocabulary, and the pieces that both have, as in ``agreed_pieces``."""

    tokens: list[int]
    pieces: list[tuple[int, int, int, int]]


def reread(two: TwoTokenizers, tokens: Sequence[int], *, most: int) -> Reread:
    """The text of ``tokens`` in the other vocabulary, at most so many of its tokens, with an end where they have one.

    Bytes that are no UTF-8 end the text: half a character is none. The blank that SentencePiece puts before a text is
    no part of it. A text that the other tokenizer changes (by a normal form, say) has no pieces.
    """
    ended = len(tokens) > 0 and tokens[-1] in two.own.eos_ids
    words = list(tokens[:-1] if ended else tokens)
    # a row of the model beyond its vocabulary is no text
    texts = [two.own_bytes[i] if i < len(two.own_bytes) else b"" for i in words]
    sizes, data = [len(text) for text in texts], b"".join(texts)
    whole = _text(data)
    ids = list(two.other.encode(whole.decode()))
    said = b"".join(two.other_bytes[i] for i in ids)
    others = [len(two.other_bytes[i]) for i in ids]
    if said == b" " + whole:
        others[next(k for k, size in enumerate(others) if size)] -= 1
    elif said != whole:
        return Reread(ids[:most], [])
    pieces = agreed_pieces(sizes, others)
    if ended and whole == data:
        pieces.append((len(words), len(words) + 1, len(ids), len(ids) + 1))
        ids.append(two.other.eos_ids[0])
    return Reread(ids[:most], [piece for piece in pieces if piece[3] <= most])


def _text(data: bytes) -> bytes:
    """The longest beginning that is UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data
