"""The bytes that each token id adds to a text, read from the tokenizer's own files."""

import json
import pathlib
import re

from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """The bytes of every token id below ``vocab_size`` inside a text; nothing for ids that ``decode`` leaves out.

    Joined over a sequence they are its text in UTF-8. Only a decoder that strips a blank at the start of a text
    differs: a response stands behind its prompt, so its first blank is kept here.

    Raises:
      UserError: when the tokenizer comes from no file, or from one whose decoder is neither byte-level nor that of
        SentencePiece.
    """
    files = {path.name: path for path in tokenizer.files}
    if "tokenizer.json" in files:
        # a model may have no rows for the last ones: ``tokenizer.fitted``
        return _huggingface(files["tokenizer.json"])[: tokenizer.vocab_size]
    if "tokenizer.model" in files:
        return _sentencepiece(files["tokenizer.model"], {tokenizer.bos_id, tokenizer.pad_id, *tokenizer.eos_ids})
    raise UserError("stop strings need the texts of the tokens: tokenizer.json or tokenizer.model in the model folder")


def _piece(text: str) -> bytes:
    """A SentencePiece piece: its blank is a lower block, a byte that is no character stands as ``<0xE2>``."""
    found = _BYTE_PIECE.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else text.replace("\u2581", " ").encode()


def _sentencepiece(path: pathlib.Path, silent: set[int | None]) -> tuple[bytes, ...]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def one(token: int) -> bytes:
        if token in silent or model.is_control(token):
            return b""
        return model.decode([token]).encode() if model.is_unknown(token) else _piece(model.id_to_piece(token))

    return tuple(one(token) for token in range(model.vocab_size()))


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of the 256 bytes in byte-level vocabularies (those of GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + k): b for k, b in enumerate(rest)}


def _huggingface(path: pathlib.Path) -> tuple[bytes, ...]:
    import tokenizers

    model, stored = tokenizers.Tokenizer.from_file(str(path)), json.loads(path.read_text())
    decoder = stored.get("decoder") or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def read(text: str) -> bytes:
            return bytes(alphabet[c] for c in text)
    elif kinds & {"Metaspace", "ByteFallback"}:
        read = _piece
    else:
        named = sorted(kind for kind in kinds if kind)
        raise UserError(f"{path}: no stop strings with the decoder {named}; only ByteLevel, Metaspace and ByteFallback")
    plain = _piece if read is _piece else str.encode  # the decoder of bytes leaves an added text as it is
    added = {entry["id"]: b"" if entry["special"] else plain(entry["content"]) for entry in stored["added_tokens"]}
    vocabulary = model.get_vocab(with_added_tokens=True)
    found = [b""] * (1 + max(vocabulary.values()))  # ids may be left out
    for text, token in vocabulary.items():
        found[token] = added[token] if token in added else read(text)
    return tuple(found)
