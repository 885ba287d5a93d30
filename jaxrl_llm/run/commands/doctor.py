"""``python -m jaxrl_llm doctor DIR``: looks a model folder over before a run, one line for each finding.

``ok``, ``note`` (works here, worth knowing) or ``FAIL``. The exit code is 0, 1 where something failed, or 2 for a wrong
command. ``--forward`` also loads the weights and reads a sentence with them.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxrl_llm import logprobs
from jaxrl_llm.data import chat
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import config as model_config
from jaxrl_llm.models import lora
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.io import hub, weights
from jaxrl_llm.run import flags

TEXTS = ("The quick brown fox jumps over the lazy dog.", "  a b\n\tc", "1+2=3; x^2 >= 0", "äöü 你好 🙂")
ANSWER = "forty-two"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checks of a Hugging Face model folder."""

    folder: Annotated[str, tyro.conf.Positional] = (
        "nano"  # with config.json, *.safetensors and a tokenizer, or tiny, nano
    )
    forward: bool = False  # load the weights and read a sentence


class Finding(NamedTuple):
    """One line: ``level`` is ok, note or FAIL, ``check`` what was looked at."""

    level: str
    check: str
    text: str


Findings = Iterator[Finding]


def check_adapter(folder: pathlib.Path, base: pathlib.Path, config: ModelConfig) -> Findings:
    """An adapter fits the model that it names; what follows is of that model."""
    spec, _ = lora.load(folder, config)
    yield Finding("ok", "adapter", f"rank {spec.rank} beside {', '.join(spec.targets)} of {base}")


def check_files(folder: pathlib.Path, config: ModelConfig) -> Findings:
    """Every tensor of the config is there in its shape, and no other one."""
    sizes = weights.check(folder, config)
    kinds = ", ".join(f"{count} in {kind}" for kind, count in sizes.kinds.items())
    yield Finding(
        "ok", "weights", f"{sizes.tensors} tensors ({kinds}), {sizes.bytes / 1e9:.3g} GB, {sizes.files} files"
    )


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> Findings:
    """The tokenizer's ids are rows of the model, but for added ones that nothing uses."""
    rows, tokens = config.padded_vocab_size, tokenizer.vocab_size
    if tokens > rows:
        tokenizers.fitted(tokenizer, rows)
        yield Finding(
            "note", "vocabulary", f"{tokens - rows} added tokens of {tokens} have no row: their texts are spelled out"
        )
    elif config.vocab_size > tokens:
        yield Finding(
            "note", "vocabulary",
            f"{config.vocab_size - tokens} of {rows} rows have no token: they can be sampled and decode to nothing; "
            f'"unpadded_vocab_size": {tokens} in config.json rules them out',
        )  # fmt: skip
    else:
        yield Finding("ok", "vocabulary", f"{tokens} tokens, {rows} rows, {rows - config.vocab_size} of them padding")


def _declared(folder: pathlib.Path) -> dict[str, list[int]]:
    """File -> the end ids that it names."""
    found = {}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            found[name] = sorted(ids) if isinstance(ids, list) else [ids]
    return found


def check_ends(folder: pathlib.Path, config: ModelConfig, tokenizer: Tokenizer) -> Findings:
    """End and pad ids exist, and the files agree on them."""
    ends = ", ".join(map(str, tokenizer.eos_ids))
    beyond = [i for i in (*tokenizer.eos_ids, tokenizer.pad_id) if not 0 <= i < config.padded_vocab_size]
    if beyond:
        yield Finding("FAIL", "end ids", f"{', '.join(map(str, beyond))} beyond the {config.padded_vocab_size} rows")
        return
    declared = _declared(folder)
    if len({tuple(ids) for ids in declared.values()}) > 1:
        differ = "; ".join(f"{name} {ids}" for name, ids in declared.items())
        yield Finding("note", "end ids", f"{ends} are used, but the files differ: {differ}")
    else:
        yield Finding("ok", "end ids", ends)
    if tokenizer.pad_id in tokenizer.eos_ids:
        text = f"{tokenizer.pad_id} is an end id too: harmless here (masks are the sampler's own record), not elsewhere"
        yield Finding("note", "pad id", text)
    else:
        yield Finding("ok", "pad id", str(tokenizer.pad_id))


def check_text(tokenizer: Tokenizer) -> Findings:
    """Texts survive encoding and decoding."""
    changed = [text for text in TEXTS if tokenizer.decode(tokenizer.encode(text)) != text]
    if changed:
        yield Finding("note", "round trip", f"the tokenizer changes {', '.join(map(repr, changed))}")
    else:
        yield Finding("ok", "round trip", f"{len(TEXTS)} texts come back as they were")


def check_bos(tokenizer: Tokenizer) -> Findings:
    """BOS in front of a prompt, where the tokenizer has one, and nowhere else but where it marks turns."""
    if tokenizer.bos_id is None:
        yield Finding("ok", "BOS", "none defined, none added")
        return
    if not tokenizer.adds_bos:
        yield Finding("ok", "BOS", "the tokenizer adds none: in front only where the chat template writes it")
        return
    prompts = {"text": TEXTS[0]} | ({} if tokenizer.chat_template is None else {"chat": _messages()[:1]})
    for kind, prompt in prompts.items():
        ids = chat.encode_prompt(tokenizer, prompt)
        if ids[0] != tokenizer.bos_id or (ids.count(tokenizer.bos_id) != 1 and not chat.bos_marks_turns(tokenizer)):
            yield Finding("FAIL", "BOS", f"{kind}: {ids.count(tokenizer.bos_id)} times in {ids[:8]}")
            return
    if chat.bos_marks_turns(tokenizer):
        yield Finding("ok", "BOS", f"{tokenizer.bos_id} in front; it marks turns or ends, too, and stays there")
        return
    written = tokenizer.bos_text and tokenizer.chat_template and tokenizer.bos_text in _rendered(tokenizer, 1)
    if written:
        yield Finding("note", "BOS", "once; the template writes it too: programs that add their own have it twice")
    else:
        yield Finding("ok", "BOS", f"{tokenizer.bos_id}, once")


def _messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "And now?"}]  # fmt: skip


def _rendered(tokenizer: Tokenizer, count: int, **variables) -> str:
    texts = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text}
    return chat.render(tokenizer.chat_template or "", _messages()[:count], **texts, **variables)


def check_template(tokenizer: Tokenizer) -> Findings:
    """The template opens the assistant's turn, only appends, and ends a turn with an end id."""
    if tokenizer.chat_template is None:
        yield Finding("note", "template", "none: prompts are plain text, --chat is not possible")
        return
    yield Finding("ok", "template", f"sha256 {chat.template_hash(tokenizer.chat_template)[:16]}")
    if _rendered(tokenizer, 1) == _rendered(tokenizer, 1, add_generation_prompt=True):
        yield Finding("note", "template", "add_generation_prompt changes nothing: the model has to open its own turn")
    try:
        chat.make_reply_encoder(tokenizer)
        yield Finding("ok", "template", "a conversation grows by appending")
    except UserError as error:
        yield Finding("note", "template", f"several turns are not possible: {error}")
    try:
        ids, mask = chat.encode_dialogue(tokenizer, _messages()[:2])
    except UserError as error:
        yield Finding("note", "template", f"given answers cannot be imitated (jaxrl sft): {error}")
        return
    answer = [i for i, mine in zip(ids, mask, strict=True) if mine]
    if answer and answer[-1] in tokenizer.eos_ids:
        yield Finding("ok", "template", f"an answer ends with {answer[-1]}, an end id")
        return
    tail = tokenizer.decode(answer[-4:])
    yield Finding(
        "FAIL", "template",
        f"an answer ends with {answer[-4:]} ({tail!r}), no end id ({', '.join(map(str, tokenizer.eos_ids))}): "
        "responses would never end; name it in eos_token_id of generation_config.json",
    )  # fmt: skip


def check_forward(folder: pathlib.Path, tokenizer: Tokenizer) -> Findings:
    """Finite logits, and a sentence that is likelier than by a uniform guess."""
    policy, params, config = weights.pretrained(folder)
    ids = chat.encode_prompt(tokenizer, TEXTS[0])[: config.max_positions]
    tokens = jnp.asarray([ids], jnp.int32)
    positions, segments = jnp.arange(len(ids), dtype=jnp.int32)[None], jnp.ones_like(tokens)

    @jax.jit
    def read(params):
        hidden = policy.hidden(params, tokens, positions, segments)
        return logprobs.chunked(hidden, lambda h: policy.unembed(params, h), tokens)[0]

    logp = np.asarray(read(params))[0, 1:]
    if not np.isfinite(logp).all():
        yield Finding("FAIL", "forward", "log-probabilities are not finite")
        return
    uniform, mean = -math.log(config.vocab_size), float(logp.mean())
    level = "ok" if mean > uniform else "note"
    hint = "" if mean > uniform else ": no better than a guess; is the tokenizer of this model?"
    yield Finding(level, "forward", f"{mean:.2f} nats a token of {TEXTS[0]!r}, a guess has {uniform:.2f}{hint}")


def examine(folder: pathlib.Path, *, forward: bool = False) -> Findings:
    """All findings, in the order in which a run would trip over them."""

    def guarded(check: str, run: Callable[[], Findings]) -> Findings:
        try:
            yield from run()
        except (ValueError, OSError, KeyError, TypeError) as error:
            yield Finding("FAIL", check, str(error))

    try:
        given, folder = folder, lora.base_of(folder)
        config = model_config.read_config(folder)
    except (ValueError, KeyError, TypeError) as error:
        yield Finding("FAIL", "config", str(error))
        return
    if folder != given:
        yield from guarded("adapter", lambda: check_adapter(given, folder, config))
    size = f"{config.num_parameters:,} parameters, {config.num_layers} layers, {config.max_positions} positions"
    yield Finding("ok", "config", f"{config.family}: {size}")
    yield from guarded("weights", lambda: check_files(folder, config))
    try:
        tokenizer = tokenizers.load(given, base=folder)
    except (ValueError, OSError) as error:
        yield Finding("FAIL", "tokenizer", str(error))
        return
    yield Finding("ok", "tokenizer", ", ".join(path.name for path in tokenizer.files))
    found = list(guarded("vocabulary", lambda: check_vocabulary(config, tokenizer)))
    yield from found
    if not any(finding.level == "FAIL" for finding in found):
        tokenizer = tokenizers.fitted(tokenizer, config.padded_vocab_size)
    yield from guarded("end ids", lambda: check_ends(folder, config, tokenizer))
    yield from guarded("round trip", lambda: check_text(tokenizer))
    yield from guarded("BOS", lambda: check_bos(tokenizer))
    yield from guarded("template", lambda: check_template(tokenizer))
    if forward:
        yield from guarded("forward", lambda: check_forward(folder, tokenizer))


def cli(arguments: list[str] | None = None) -> int:
    """Prints the findings; the exit code."""
    try:
        words = hub.located(sys.argv[1:] if arguments is None else arguments)
        settings = flags.read(Settings, words, prog="python -m jaxrl_llm doctor")
        folder = pathlib.Path(settings.folder)
        folder = folder if folder.is_dir() else weights.bundled(settings.folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = 0
    for level, check, text in examine(folder, forward=settings.forward):
        print(f"{level:<4}  {check:<10}  {text}")
        failed += level == "FAIL"
    return 1 if failed else 0
