"""Models behind an OpenAI-compatible address as simulated users, judges or teachers: cached, bounded, replayable.

A ``Chat`` is ``messages -> text``; what uses one takes any such function, so that a scripted one stands in for a model
in tests and small experiments. Every reply is kept on disk: the same question is paid for once, and a recorded file
replays a run without a network.
"""

import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxrl_llm.errors import DataError, UserError, extra_module
from jaxrl_llm.verifiers.verdict import Verdict, Verifier

Messages = Sequence[dict[str, str]]  # role and content, as chat templates take them
Chat = Callable[[Messages], str]


class Unanswered(RuntimeError):
    """No reply: the endpoint failed after all retries, the budget is spent, or a replay lacks the question."""


class Budget(NamedTuple):
    """What all questions together may cost, and how long one may take."""

    requests: int = 10_000
    tokens: int = 10_000_000  # prompts and replies, as the endpoint counts them
    timeout_s: float = 60.0  # of one try
    retries: int = 4  # after time-outs, lost connections, 429 and 5xx, with growing pauses


class Cache:
    """Replies by question in a file of JSON lines; a line cut by a crash is dropped, and the next one begins anew."""

    def __init__(self, path: str | pathlib.Path):
        self.path, self.lock = pathlib.Path(path), threading.Lock()
        self.replies: dict[str, str] = {}
        try:
            lines = self.path.read_text().split("\n") if self.path.exists() else [""]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if lines[-1]:
                self.path.write_text("".join(f"{line}\n" for line in lines[:-1]))
        except OSError as error:
            raise UserError(f"cache {path} cannot be used ({error.strerror}); choose another file") from error
        for number, line in enumerate(lines[:-1], start=1):
            try:
                row = json.loads(line)
                self.replies[row["key"]] = row["text"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise DataError(f"{path}:{number}: not a kept reply; delete the line") from error

    def keep(self, key: str, request: dict[str, Any], text: str) -> None:
        """Adds a reply and brings it to the disk."""
        with self.lock:
            self.replies[key] = text
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "request": request, "text": text}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def key_of(request: dict[str, Any]) -> str:
    """The name of a question: equal for equal model, messages and settings."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:32]


def _client(address: str, budget: Budget, key_variable: str):
    openai = extra_module("openai", "models behind an address need", "endpoints")
    secret = os.environ.get(key_variable, "")
    if not secret and "//localhost" not in address and "//127." not in address:
        raise UserError(f"{address} wants a key; put it into the environment variable {key_variable}")
    return openai.OpenAI(
        base_url=address, api_key=secret or "none", timeout=budget.timeout_s, max_retries=budget.retries
    )


def make_chat(
    address: str,
    model: str,
    *,
    cache: str | pathlib.Path,
    budget: Budget = Budget(),
    temperature: float = 0.0,
    max_tokens: int = 512,
    seed: int = 0,
    key_variable: str = "OPENAI_API_KEY",
    replay: bool = False,
) -> Chat:
    """A model behind ``address`` (``https://HOST/v1``) as ``messages -> text``; may be called from several threads.

    Args:
      cache: file of replies, read first and added to.
      seed: part of the question, so that other seeds get other replies from a model that samples.
      key_variable: environment variable that holds the key; it is written nowhere.
      replay: answer from the file alone.

    Raises:
      UserError: for a missing package or key, or a cache that cannot be used; ``chat`` raises ``Unanswered``.
    """
    kept, lock = Cache(cache), threading.Lock()
    spent = {"requests": 0, "tokens": 0}
    client = None if replay else _client(address, budget, key_variable)

    def ask(request: dict[str, Any]) -> str:
        import openai

        with lock:
            if spent["requests"] >= budget.requests or spent["tokens"] >= budget.tokens:
                raise Unanswered(f"the budget is spent: {spent['requests']} requests, {spent['tokens']} tokens")
            spent["requests"] += 1
        try:
            reply = client.chat.completions.create(**request)
        except openai.OpenAIError as error:
            raise Unanswered(f"{model} at {address}: {type(error).__name__}: {error}") from error
        with lock:
            spent["tokens"] += reply.usage.total_tokens if reply.usage else max_tokens
        text = reply.choices[0].message.content if reply.choices else None
        if text is None:
            raise Unanswered(f"{model} at {address}: a reply without text")
        return text

    def chat(messages: Messages) -> str:
        request = {"model": model, "messages": [dict(m) for m in messages], "temperature": temperature,
                   "max_tokens": max_tokens, "seed": seed}  # fmt: skip
        key = key_of(request)
        if key in kept.replies:
            return kept.replies[key]
        if replay:
            raise Unanswered(f"{cache} holds no reply to {json.dumps(request['messages'][-1:])[:200]}; drop replay")
        text = ask(request)
        kept.keep(key, request, text)
        return text

    return chat


def ask_all(chat: Chat, conversations: Sequence[Messages], *, workers: int = 8) -> list[str | None]:
    """The replies in order, several at a time; None where there was no reply."""

    def one(messages: Messages) -> str | None:
        try:
            return chat(messages)
        except Unanswered:
            return None

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, conversations))


def make_verifier(
    chat: Chat, ask: Callable[[dict[str, Any], str], Messages], read: Callable[[str], float | None]
) -> Verifier:
    """A judge as a verifier: invalid, not wrong, where there is no reply or ``read`` finds no verdict in it.

    Args:
      ask: the question to the judge about ``(answer, response)``.
      read: the reward in its reply, or None.
    """

    def verify(answer: dict[str, Any], response: str) -> Verdict:
        try:
            reply = chat(ask(answer, response))
        except Unanswered as error:
            return Verdict(0.0, False, str(error))
        value = read(reply)
        return Verdict(0.0, False, f"no verdict in {reply[:200]!r}") if value is None else Verdict(value, True, "")

    return verify
