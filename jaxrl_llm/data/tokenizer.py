"""SentencePiece and Hugging Face tokenizers behind one small record of functions."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data import templates
from jaxrl_llm.errors import UserError, read_json_object

_ANSWER = "An answer."


class Tokenizer(NamedTuple):
    """Text to ids and back. ``encode`` adds no special token: sequences are built by ids, once.

    ``encode`` is of a text that stands behind another, ``opening`` of one that begins a sequence: in front of that the
    tokenizers of Llama 2, Mistral 7B and others put a blank. ``eos_ids`` holds every id that ends a response, first the
    one that is put behind a response that is given: where there are several and a chat template, the end of the
    assistant's turn. ``adds_bos``: whether a BOS goes in front of what has none written. ``files`` are copied beside
    saved weights.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    files: tuple[pathlib.Path, ...]
    chat_template: str | None = None
    bos_text: str = ""  # the texts that a chat template inserts
    eos_text: str = ""
    eos_text_id: int | None = None
    begins: Callable[[str], list[int]] | None = None  # where ``opening`` is another function than ``encode``
    adds_bos: bool = True

    def opening(self, text: str) -> list[int]:
        """Ids of a text that begins a sequence."""
        return (self.begins or self.encode)(text)


_ANCHORS = (":", "0", "\n", "a")  # no tokenizer joins all of them with what stands behind


def _encoders(
    encode: Callable[[str], list[int]], piece: Callable[[int], str]
) -> tuple[Callable[[str], list[int]], Callable[[str], list[int]] | None]:
    """``encode`` and ``begins`` of a tokenizer that has one function, which is of whole texts."""
    first = encode("a")
    if not first or not piece(first[0]).startswith(("\u2581", "\u0120")):
        return encode, None

    heads = [(anchor, head) for anchor in _ANCHORS if (head := encode(anchor))]

    def behind(text: str) -> list[int]:
        for anchor, head in heads:
            ids = encode(anchor + text)
            if ids[: len(head)] == head:
                return ids[len(head) :]
        return encode(text)

    return behind, encode


def _token_text(entry: Any, where: str) -> str:
    text = entry.get("content") if isinstance(entry, dict) else entry
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where} is {str(entry)[:80]}, which is no token")
    return text or ""


def _special_text(folder: pathlib.Path, name: str) -> str:
    """The text of ``bos_token`` and its like: of ``tokenizer_config.json``, else of ``special_tokens_map.json``."""
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        stored = _read_json(path)
        if name in stored:  # also null: there is none
            return _token_text(stored[name], f"{path}: {name}")
    return ""


def _turn_end_first(
    named: Sequence[tuple[int, str | None]], eos: tuple[int, ...], template: str | None, bos_text: str, eos_text: str
) -> tuple[int, ...]:
    """The end ids, first the one that the template puts behind an answer; as they are where it puts none of them.

    Of Llama 3 and Gemma the generation config names the end of a text first, which no turn of a conversation has.

    Args:
      named: the ids with their texts.
    """
    if template is None or len(eos) < 2:
        return eos
    asked = {"role": "user", "content": "?"}
    # another question behind it: GLM ends an answer with what opens the next turn
    messages = [asked, {"role": "assistant", "content": _ANSWER}, asked]
    given = {"messages": messages, "add_generation_prompt": False, "bos_token": bos_text, "eos_token": eos_text}
    try:
        behind = templates.render(template, given | {"tools": None}).rpartition(_ANSWER)[2]
    except ValueError:  # whoever uses the template is told
        return eos
    places = {i: behind.find(text) for i, text in named if text and text in behind}
    if not places:
        return eos
    first = min(places, key=lambda i: places[i])
    return (first, *(i for i in eos if i != first))


def _read_json(path: pathlib.Path) -> dict:
    if not path.is_file():
        return {}
    return read_json_object(path)


def _chat_template(folder: pathlib.Path) -> str | None:
    """``chat_template.jinja``, else the entry of ``tokenizer_config.json`` (of several, the one named default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    path = folder / "tokenizer_config.json"
    template = _read_json(path).get("chat_template")
    if isinstance(template, list):
        named = {
            e.get("name"): e.get("template") for e in template if isinstance(e, dict) and isinstance(e.get("name"), str)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UserError(f"{path}: chat_template is a {type(template).__name__}; give a text, or a list of named ones")
    return template


def _adds_bos(folder: pathlib.Path, otherwise: bool = True) -> bool:
    """What ``add_bos_token`` says, or ``otherwise`` where it says nothing."""
    said = _read_json(folder / "tokenizer_config.json").get("add_bos_token")
    return said if isinstance(said, bool) else otherwise


def _added(folder: pathlib.Path) -> dict[int, str]:
    """Tokens that were added to a SentencePiece model: those of ``added_tokens.json`` and ``added_tokens_decoder``."""
    beside = _read_json(folder / "added_tokens.json")
    found = {i: text for text, i in beside.items() if type(i) is int}
    listed = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for i, entry in listed.items() if isinstance(listed, dict) else ():
        if i.isdecimal():
            found[int(i)] = _token_text(entry, f"{folder / 'tokenizer_config.json'}: added_tokens_decoder")
    return found


def _check_pieces(folder: pathlib.Path, size: int, eos: Sequence[int], template: str | None) -> None:
    """Raises UserError where an end token, or a text of the chat template, is none of the SentencePiece model's."""
    added = {i: text for i, text in _added(folder).items() if i >= size}
    used = [f"{i} ({added.get(i, 'of no name')})" for i in eos if i >= size]
    used += [f"{i} ({text})" for i, text in added.items() if text and text in (template or "") and i not in eos]
    if used:
        raise UserError(
            f"{folder / 'tokenizer.model'} has {size} pieces, and tokens beyond them are used: {', '.join(used)}; make "
            "a tokenizer.json (transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )


def _sentencepiece(folder: pathlib.Path, base: pathlib.Path) -> Tokenizer:
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    except (RuntimeError, OSError) as error:
        raise UserError(f"{folder / 'tokenizer.model'} is not a SentencePiece model: {error}") from error
    eos = _ends(folder, base, model.eos_id() if model.eos_id() >= 0 else None)
    special = {model.pad_id(), model.bos_id(), model.eos_id()} | set(eos)
    size, template = model.vocab_size(), _chat_template(folder)
    _check_pieces(folder, size, eos, template)
    texts = [model.id_to_piece(i) if i >= 0 else "" for i in (model.bos_id(), eos[0] if eos else -1)]
    encode, begins = _encoders(model.encode, model.id_to_piece)

    def decode(ids: Sequence[int]) -> str:
        # rows of a model beyond the vocabulary can be sampled, and are no pieces
        return model.decode([i for i in map(int, ids) if i not in special and i < size])

    return Tokenizer(
        encode=encode,
        decode=decode,
        vocab_size=size,
        bos_id=model.bos_id() if model.bos_id() >= 0 else None,
        eos_ids=_turn_end_first([(i, model.id_to_piece(i)) for i in eos], eos, template, *texts),
        pad_id=model.pad_id() if model.pad_id() >= 0 else (eos[0] if eos else 0),
        files=_files(folder, base),
        chat_template=template,
        bos_text=texts[0],
        eos_text=texts[1],
        eos_text_id=eos[0] if eos else None,
        begins=begins,
        adds_bos=_adds_bos(folder),
    )


def _huggingface(folder: pathlib.Path, base: pathlib.Path) -> Tokenizer:
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the package raises the bare class
        raise UserError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    model.no_truncation()  # both are of the calls that a file was saved after, and are none of the vocabulary's
    model.no_padding()
    encode, begins, decode = _functions(model)
    texts = {name: _special_text(folder, f"{name}_token") for name in ("bos", "eos", "pad")}
    ids = {name: model.token_to_id(text) for name, text in texts.items()}
    eos, template = _ends(folder, base, ids["eos"]), _chat_template(folder)
    named = [(i, model.id_to_token(i)) for i in eos]
    return Tokenizer(
        encode=encode,
        decode=decode,
        # the count of tokens is less where ids are left out
        vocab_size=1 + max(model.get_vocab(with_added_tokens=True).values(), default=-1),
        bos_id=ids["bos"],
        eos_ids=_turn_end_first(named, eos, template, texts["bos"], texts["eos"]),
        pad_id=ids["pad"] if ids["pad"] is not None else (eos[0] if eos else 0),
        files=_files(folder, base),
        chat_template=template,
        bos_text=texts["bos"],
        eos_text=texts["eos"],
        eos_text_id=ids["eos"],
        begins=begins,
        # a file names a BOS also where its tokenizer puts none in front: those of GPT-2 and SmolLM2
        adds_bos=_adds_bos(folder, model.encode("a", add_special_tokens=True).ids[:1] == [ids["bos"]]),
    )


def _functions(model: Any) -> tuple[Callable[[str], list[int]], Callable[[str], list[int]] | None, Callable]:
    """``encode``, ``begins`` and ``decode``."""
    encode, begins = _encoders(lambda text: model.encode(text, add_special_tokens=False).ids, model.id_to_token)
    return encode, begins, lambda ids: model.decode([int(i) for i in ids], skip_special_tokens=True)


def fitted(tokenizer: Tokenizer, rows: int) -> Tokenizer:
    """The tokenizer of a model of so many rows, without added tokens that have none: their texts are spelled out.

    Gemma 3 of text alone has the token of an image, and no row for it; Code Llama tokens that fill in.

    Raises:
      UserError: where one of them is used (it ends, fills up or stands in the chat template), or is no added one.
    """
    if tokenizer.vocab_size <= rows:
        return tokenizer
    size = f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {rows} rows"
    remedy = "put the tokenizer of this model into its folder"
    path = next((path for path in tokenizer.files if path.name == "tokenizer.json"), None)
    stored = {} if path is None else read_json_object(path)
    beyond = {entry["id"]: entry["content"] for entry in stored.get("added_tokens", ()) if entry["id"] >= rows}
    ids = {tokenizer.bos_id, tokenizer.eos_text_id, tokenizer.pad_id, *tokenizer.eos_ids}
    used = sorted(i for i, text in beyond.items() if i in ids or text in (tokenizer.chat_template or ""))
    if used:
        raise UserError(f"{size}, and uses {', '.join(f'{i} ({beyond[i]})' for i in used)} beyond them; {remedy}")
    stored["added_tokens"] = [entry for entry in stored.get("added_tokens", ()) if entry["id"] < rows]
    model = _without(stored, rows) if beyond else None
    if model is None:
        raise UserError(f"{size}; {remedy}")
    encode, begins, decode = _functions(model)
    return tokenizer._replace(encode=encode, begins=begins, decode=decode, vocab_size=rows)


def _without(stored: dict[str, Any], rows: int) -> Any:
    """The tokenizer of a file's content, if that has no token beyond ``rows``."""
    import tokenizers

    model = tokenizers.Tokenizer.from_str(json.dumps(stored))
    model.no_truncation()
    model.no_padding()
    return model if max(model.get_vocab(with_added_tokens=True).values(), default=-1) < rows else None


def _eos_ids(folder: pathlib.Path) -> tuple[int, ...]:
    """End ids of ``generation_config.json`` (several for chat models), else of ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if any(type(i) is not int or i < 0 for i in ids):
            raise UserError(f"{folder / name}: eos_token_id={str(eos)[:80]} is no token id, nor a list of them")
        return tuple(ids)
    return ()


def _ends(folder: pathlib.Path, base: pathlib.Path, own: int | None) -> tuple[int, ...]:
    """The end ids of a folder, or the end token of its tokenizer; of an adapter that token, then all of its base."""
    mine = () if own is None else (own,)
    return _eos_ids(folder) or (mine if base == folder else tuple(dict.fromkeys((*mine, *_eos_ids(base)))))


def _files(folder: pathlib.Path, base: pathlib.Path) -> tuple[pathlib.Path, ...]:
    names = (
        "tokenizer.model",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
    )
    found = [folder / n for n in names if (folder / n).is_file()]
    ends = base / "generation_config.json"
    return (*found, *([ends] if ends.is_file() and ends.name not in {path.name for path in found} else ()))


def load(folder: str | pathlib.Path, *, base: str | pathlib.Path | None = None) -> Tokenizer:
    """Loads the tokenizer of a model folder: ``tokenizer.json`` first, else a SentencePiece ``tokenizer.model``.

    Args:
      base: of the folder of an adapter. What was trained with it lies beside it (a chat template, tokens for turns) and
        counts; the tokenizer of the base is taken where there is none.

    Raises:
      UserError: when the folder holds neither, or no end token is defined.
    """
    folder = pathlib.Path(folder)
    base = folder if base is None else pathlib.Path(base)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        folder = base
    if (folder / "tokenizer.json").is_file():
        tokenizer = _huggingface(folder, base)
    elif (folder / "tokenizer.model").is_file():
        tokenizer = _sentencepiece(folder, base)
    else:
        raise UserError(f"{folder} holds neither tokenizer.json nor tokenizer.model; add one to the model folder")
    if not tokenizer.eos_ids:
        raise UserError(f"{folder} defines no end token; set eos_token_id in generation_config.json")
    return tokenizer
