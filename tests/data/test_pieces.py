"""One text in two vocabularies: pieces with common ends, tokens of equal text, and what cannot be read again."""

import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tokenizers as hf

from jaxrl_llm.data import pieces
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.run import options
from tests.models_for_tests import byte_tokenizer


def merged_tokenizer(folder, merges=("12", "23", "ab", "12+", "é")):
    """``byte_tokenizer`` with some tokens of several bytes, of which no other tokenizer here has heard."""
    byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    stored, rules = json.loads(path.read_text()), []
    for word in merges:
        spelled = [piece for piece, _ in hf.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(word)]
        text = "".join(spelled)
        known = next(
            t for t in sorted(stored["model"]["vocab"], key=len, reverse=True) if text.startswith(t) and t != text
        )
        rules.append([known, text[len(known) :]])
        stored["model"]["vocab"][text] = len(stored["model"]["vocab"])
    stored["model"]["merges"] = rules
    stored["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(stored))
    return tokenizers.load(folder)


def _cuts(sizes):
    """Where a text may be cut between two tokens, by brute force."""
    return {0, *np.cumsum(sizes).tolist()}


@hypothesis.given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
@hypothesis.settings(deadline=None, max_examples=200)
def test_pieces_are_the_finest_common_cut(own, other):
    found = pieces.agreed_pieces(own, other)
    common = sorted((_cuts(own) & _cuts(other)) - {0})
    lengths = [(sum(own[a:b]), sum(other[c:d])) for a, b, c, d in found]
    assert all(x == y for x, y in lengths)
    assert np.cumsum([x for x, _ in lengths if x]).astype(int).tolist() == common
    if found:  # one behind another, none left out
        assert found[0][0] == found[0][2] == 0
        assert all(x[1] == y[0] and x[3] == y[2] for x, y in zip(found, found[1:], strict=False))


def test_tokens_of_equal_text_whatever_a_vocabulary_calls_them(tmp_path):
    """SentencePiece spells a blank another way than a byte-level vocabulary does; the bytes are the same."""
    nano = options.open_model(options.ModelSettings(model="nano")).tokenizer
    two = pieces.two_tokenizers(nano, tokenizers.load(byte_tokenizer(tmp_path)))
    own, other = pieces.equal_tokens(two.own_bytes, two.other_bytes)
    assert len(own) == len(other) > 10 and len(set(own)) == len(own) and len(set(other)) == len(other)
    assert [two.own_bytes[i] for i in own] == [two.other_bytes[j] for j in other]
    assert b" " in {two.own_bytes[i] for i in own}


def test_a_response_is_read_again_with_its_end(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    own, other = merged_tokenizer(first, ("12", "ab")), merged_tokenizer(second)
    two = pieces.two_tokenizers(own, other)
    assert not pieces.same_vocabulary(own, other) and pieces.same_vocabulary(own, own)
    ids = own.encode("0123abé")
    assert [two.own_bytes[i] for i in ids] == [b"0", b"12", b"3", b"ab", b"\xc3", b"\xa9"]
    again = pieces.reread(two, [*ids, own.eos_ids[1]], most=20)
    assert other.decode(again.tokens) == "0123abé" and again.tokens[-1] == other.eos_ids[0]
    assert [(b - a, d - c) for a, b, c, d in again.pieces] == [(1, 1), (1, 1), (1, 1), (1, 1), (2, 1), (1, 1)]
    assert pieces.reread(two, ids, most=20).pieces == again.pieces[:-1], "a response that was cut has no end"
    # the teacher has room for three tokens: the pieces behind them are none
    short = pieces.reread(two, [*ids, own.eos_ids[0]], most=3)
    assert len(short.tokens) == 3 and short.pieces == again.pieces[:3]


def test_half_a_character_is_no_text(tmp_path):
    own = tokenizers.load(byte_tokenizer(tmp_path))
    two = pieces.two_tokenizers(own, own)
    ids = own.encode("aé")
    cut = pieces.reread(two, [*ids[:-1], own.eos_ids[0]], most=20)
    assert own.decode(cut.tokens) == "a" and cut.pieces == [(0, 1, 0, 1)], "and behind it there is no end"
    assert pieces.reread(two, [], most=20) == pieces.Reread([], [])
    beyond = pieces.reread(two, [*own.encode("a"), own.vocab_size + 3, *own.encode("b")], most=20)
    assert own.decode(beyond.tokens) == "ab" and beyond.pieces == [(0, 1, 0, 1), (1, 3, 1, 2)], "a row that is no token"


def test_the_blank_that_sentencepiece_puts_first_is_no_text(tmp_path):
    nano = options.open_model(options.ModelSettings(model="nano")).tokenizer
    two = pieces.two_tokenizers(tokenizers.load(byte_tokenizer(tmp_path)), nano)
    again = pieces.reread(two, two.own.encode("12+3"), most=20)
    assert again.pieces and [b - a for a, b, *_ in again.pieces] == [1, 1, 1, 1]


def test_a_text_that_the_other_changes_has_no_pieces(tmp_path):
    own = tokenizers.load(byte_tokenizer(tmp_path))
    lower = own._replace(encode=lambda text: own.encode(text.lower()))
    two = pieces.two_tokenizers(own, lower)
    assert (
        pieces.reread(two, own.encode("ab"), most=9).pieces and not pieces.reread(two, own.encode("aB"), most=9).pieces
    )


def test_equal_sizes_are_not_equal_vocabularies(tmp_path):
    """Ids of another order would pull the student towards other tokens than the teacher means."""
    own = tokenizers.load(byte_tokenizer(tmp_path))
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    vocabulary = stored["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    other = tmp_path / "other"
    other.mkdir()
    for file in own.files:
        (other / file.name).write_text(json.dumps(stored) if file.name == path.name else file.read_text())
    swapped = tokenizers.load(other)
    assert swapped.vocab_size == own.vocab_size and not pieces.same_vocabulary(own, swapped)
