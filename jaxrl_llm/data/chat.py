"""Chat templates of Hugging Face models: messages to text to ids, BOS exactly once, history never encoded twice.

A message is ``{"role": "user", "content": "..."}``. Templates run in a sandbox, within bounds (``data.templates``). No
clock is given to them, so the same messages are the same tokens every day: a template with a date takes it as a
variable, or uses its own fallback.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.data import templates
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import UserError

Message = Mapping[str, Any]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> str:
    """Text of a conversation by a Hugging Face chat template.

    Args:
      add_generation_prompt: end with the opening of the assistant's turn.
      variables: whatever else the template reads (``enable_thinking``, ``date_string``, ...).

    Raises:
      UserError: for no messages, a message without role, a template that does not compile, does not end or makes too
        much, or what the template itself refuses (``raise_exception``: for example two user turns in a row).
    """
    if not messages:
        raise UserError("messages is empty; give at least one message")
    for k, message in enumerate(messages):
        if "role" not in message:
            raise UserError(f"message {k} has no role: {dict(message)!r}")
    given = {
        "messages": [dict(m) for m in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": list(tools) if tools else None,
    }
    try:
        return templates.render(template, given | variables)
    except ValueError as error:
        first = " ".join(
            f"{messages[0]['role']}: {messages[0].get('content')}".split()
        )  # of a file with thousands of them
        raise UserError(
            f"the chat template refuses the {len(messages)} messages: {error} (they begin with {first[:60]!r})"
        ) from error


def _render(tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> str:
    if tokenizer.chat_template is None:
        raise UserError("this tokenizer has no chat template; add chat_template.jinja to the model folder")
    texts = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text}
    return render(tokenizer.chat_template, messages, **texts, **variables)


def bos_marks_turns(tokenizer: Tokenizer) -> bool:
    """Whether the BOS of a model stands inside its conversations, too: it is also an end, or the template writes it.

    SmolLM2's is ``<|im_start|>``, which opens every turn; GPT-2's is its end of text.
    """
    written = bool(tokenizer.bos_text) and tokenizer.bos_text in (tokenizer.chat_template or "")
    return written or tokenizer.bos_id in tokenizer.eos_ids


def _encode(tokenizer: Tokenizer, text: str, before: str | None) -> list[int]:
    """Ids of rendered text without the BOS in front; special texts that ``opening`` would spell out are single ids.

    Args:
      before: what stands in front of it; None: the conversation begins here, and a BOS is the one in front of it.
    """
    bos, end, inside = tokenizer.bos_text, tokenizer.eos_text, bos_marks_turns(tokenizer)
    if before is None and bos and text.startswith(bos):
        before, text = bos, text.removeprefix(bos)
    text = text if inside or not bos else text.replace(bos, "")
    if not end or len(tokenizer.opening(end)) == 1:
        return [i for i in _behind(tokenizer, text, before or "") if inside or i != tokenizer.bos_id]
    ids: list[int] = []
    for k, part in enumerate(text.split(end)):
        ids += [tokenizer.eos_ids[0] if tokenizer.eos_text_id is None else tokenizer.eos_text_id] if k else []
        ids += (tokenizer.opening(part) if k else _behind(tokenizer, part, before or "")) if part else []
    return ids


def _behind(tokenizer: Tokenizer, text: str, before: str) -> list[int]:
    """Ids of a text as they stand in ``before + text``.

    A tokenizer may begin what stands behind a special token as it begins a text, and may swallow the blanks there
    (those of Phi 3): that shows where both texts are read at once. Where they are joined by a token of both, also by a
    run of unknown characters, the text is that of any other place.
    """
    for special in (tokenizer.bos_text, tokenizer.eos_text):
        if special and len(tokenizer.opening(special)) != 1:  # spelled out there, and a single id here
            before = before.rpartition(special)[2]
    known, ids, alone = tokenizer.opening(before), tokenizer.opening(before + text), tokenizer.encode(text)
    there = ids[len(known) :]
    joined = ids[: len(known)] != known or alone == [*known[-1:], *there]
    return alone if joined else there


def _front(tokenizer: Tokenizer, text: str) -> list[int]:
    """The BOS in front of a text: where the tokenizer adds one, or it is written there."""
    written = tokenizer.bos_text and text.startswith(tokenizer.bos_text)
    return [] if tokenizer.bos_id is None or not (tokenizer.adds_bos or written) else [tokenizer.bos_id]


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> list[int]:
    """Ids of a conversation with BOS exactly once, in front, where the tokenizer defines one.

    Whatever the template says about BOS (once, at every turn, never) does not matter, but where it marks turns
    (``bos_marks_turns``): there the others stay; and where the tokenizer says that it adds none (``add_bos_token``
    false), it is there if the template begins with it. ``variables`` as in ``render``.
    """
    text = _render(tokenizer, messages, **variables)
    return _front(tokenizer, text) + _encode(tokenizer, text, None)


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[Message], *, chat: bool = False) -> list[int]:
    """Ids of a prompt, BOS exactly once in front where the tokenizer has one that it adds.

    Messages go through the chat template and end with the opening of the assistant's turn; text is taken as it is, or
    with ``chat`` as the one message of a user.

    Raises:
      UserError: where a template is needed and the tokenizer has none.
    """
    if isinstance(prompt, str) and not chat:
        bos, ids = _front(tokenizer, prompt), tokenizer.opening(prompt)
        if bos_marks_turns(tokenizer):
            return bos + (ids[1:] if ids[:1] == bos else ids)
        return bos + [i for i in ids if i != tokenizer.bos_id]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return encode_chat(tokenizer, messages, add_generation_prompt=True)


def encode_answer(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], answer: str, *, chat: bool = False
) -> list[int]:
    """Ids of an answer, without an end, as they stand behind a prompt of ``encode_prompt``."""
    if isinstance(prompt, str) and not chat:
        return _behind(tokenizer, answer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return _behind(tokenizer, answer, _render(tokenizer, messages, add_generation_prompt=True))


def encode_turns(
    tokenizer: Tokenizer, before: Sequence[Message], new: Sequence[Message], **variables: Any
) -> list[int]:
    """Ids to append to a sequence that holds ``before``, so that it also holds ``new`` and opens the assistant's turn.

    History is never encoded again: what the policy sampled stays as it was sampled.

    Raises:
      UserError: when the template rewrites earlier turns as the conversation grows.
    """
    opened = _render(tokenizer, before, **variables)
    whole = _render(tokenizer, [*before, *new], add_generation_prompt=True, **variables)
    return _encode(tokenizer, _rest(opened, whole), opened)


def encode_dialogue(
    tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any
) -> tuple[list[int], list[bool]]:
    """Ids of a finished conversation, and the mask of the assistant's tokens (its end token inside, nothing after it).

    Raises:
      UserError: when the template rewrites earlier turns as the conversation grows.
    """
    return _appended(tokenizer, _answers(tokenizer, messages, **variables))


def _answers(tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> list[tuple[str, str]]:
    """Of every answer the text before it and the text with it, as the template shows them at that moment."""
    return [
        (_render(tokenizer, messages[:k], add_generation_prompt=True, **variables),
         _render(tokenizer, messages[: k + 1], **variables))
        for k, message in enumerate(messages)
        if message["role"] == "assistant"
    ]  # fmt: skip


def _appended(tokenizer: Tokenizer, answers: Sequence[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    parts, text = [], ""
    for opened, closed in answers:
        parts.append((_rest(text, opened), _rest(opened, closed)))
        text = closed
    return _joined(tokenizer, parts)


def _joined(tokenizer: Tokenizer, parts: Sequence[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Ids of texts and the answers to them, in turn, and the mask of the answers up to their end tokens."""
    ids = _front(tokenizer, parts[0][0] if parts else "")
    mask, behind = [False] * len(ids), None
    for before, said in parts:
        prompt, answer = _encode(tokenizer, before, behind), _encode(tokenizer, said, before)
        behind = said
        ends = [i for i, token in enumerate(answer) if token in tokenizer.eos_ids]
        chosen = ends[-1] + 1 if ends else len(answer)
        ids += prompt + answer
        mask += [False] * len(prompt) + [i < chosen for i in range(len(answer))]
    return ids, mask


def imitated(tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> list[tuple[list[int], list[bool]]]:
    """Rows that train all answers of a conversation: ids, and the mask of what the assistant says.

    One row, where the template only appends. Where it shows an answer in another way once the conversation goes on
    (Qwen 3 leaves out what was thought in earlier turns), one row for every answer, as the model meets them.

    Raises:
      UserError: where the tokenizer has no template, or it rewrites what stands before an answer even there.
    """
    answers = _answers(tokenizer, messages, **variables)
    try:
        return [_appended(tokenizer, answers)]
    except Rewrites:
        return [_joined(tokenizer, [(opened, _rest(opened, closed))]) for opened, closed in answers]


def make_reply_encoder(tokenizer: Tokenizer, **variables: Any) -> Callable[[str], list[int]]:
    """``text -> ids`` to append behind an answer that has its end token: what a world or a user replies to it.

    The rest of the assistant's turn, ``text`` as the user's message, and the opening of the next answer. A template may
    show the last answer of a conversation in another way than earlier ones (Qwen 3 opens and closes a thought there and
    leaves out those before, Phi 3 ends the text), or open an answer with a thought that it leaves out later (DeepSeek
    R1, Qwen 3 with ``enable_thinking=False``): what was opened and sampled stays as it was.

    Raises:
      UserError: where a template is needed and the tokenizer has none, or it rewrites what stands before an answer.
    """
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    opened = _render(tokenizer, before[:1], add_generation_prompt=True, **variables)

    def behind(text: str) -> list[int]:
        talk = [*before, {"role": "user", "content": text}]
        head, said, rest = _render(tokenizer, talk, add_generation_prompt=True, **variables).partition(_SAID)
        if not said or not opened.startswith(head.rstrip()):  # some begin an answer with a blank
            raise Rewrites(_APPENDS)
        return _encode(tokenizer, rest, _SAID)

    end = next((k for k, token in enumerate(behind("?")) if token in tokenizer.eos_ids), -1)
    return lambda text: behind(text)[end + 1 :]


_SAID = "what the assistant said"  # no template trims or splits it
_APPENDS = "the chat template rewrites earlier turns as the conversation grows; give it a template that only appends"


class Rewrites(UserError):
    """A template shows earlier turns in another way as a conversation grows."""


def _rest(start: str, whole: str) -> str:
    if not whole.startswith(start):
        raise Rewrites(_APPENDS)
    return whole[len(start) :]


def template_hash(template: str) -> str:
    """SHA-256 of a template: kept in the record of a run, so that drift shows."""
    return hashlib.sha256(template.encode()).hexdigest()
