"""Models behind an OpenAI-compatible address as simulated users, judges or teachers: cached, bounded, replayable.

A ``Chat`` is ``(messages, draw) -> text``, where another draw is another sample of the same question; what uses one
takes any such function, so that a scripted one stands in for a model in tests and small experiments. Every reply is
kept on disk: the same question is paid for once, and a recorded file replays a run without a network.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jaxrl_llm.errors import DataError, RunStopped, UserError, extra_module
from jaxrl_llm.sandbox.pool import encodable

Messages = Sequence[dict[str, str]]  # role and content, as chat templates take them
Chat = Callable[..., str]


class Written(NamedTuple):
    """How a model goes on behind a text, and whether it ended there or was cut at the most tokens."""

    text: str
    ended: bool


Completion = Callable[..., Written]  # (text or its token ids, draw) ->
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0  # between questions to a lost endpoint


class Unanswered(RuntimeError):
    """No reply to this question: the endpoint refuses it, or a replay lacks it."""


class Budget(NamedTuple):
    """What all questions together may cost, and how they are asked."""

    requests: int = 1_000_000  # answered ones; 0: any number
    tokens: int = 0  # prompts and replies, as the endpoint counts them; 0: any number
    timeout_s: float = 60.0  # of one try
    retries: int = 4  # by the client, after time-outs, lost connections, 429 and 5xx, with growing pauses
    concurrency: int = 16  # questions under way at once
    patience_s: float = 0.0  # how long a lost endpoint is waited for before the run stops; 0: for ever


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of a run that asks a model behind an address: how it samples, what it may cost, how long it is missed.

    Temperature 1 is what tau-bench's users have: its simulation names none, and an OpenAI-compatible server then takes
    1; every talk is a draw of its own. tau2-bench sets 0.
    """

    endpoint_temperature: float = 1.0
    endpoint_seed: int = 0  # other seeds, other replies
    endpoint_reply_tokens: int = 512  # of one reply, at most
    endpoint_requests: int = 1_000_000  # answered ones in a run, after which it stops; 0: any number
    endpoint_tokens: int = 0  # prompts and replies of a run, after which it stops; 0: any number
    endpoint_concurrency: int = 16  # questions under way at once
    endpoint_timeout_s: float = 60.0  # of one try
    endpoint_patience_s: float = 0.0  # how long a run waits for a lost endpoint before it stops; 0: for ever


def check(settings: Settings) -> None:
    """Raises UserError for a number out of range."""
    least = {"seed": 0, "reply_tokens": 1, "requests": 0, "tokens": 0, "concurrency": 1}
    for name, lowest in least.items():
        if (value := getattr(settings, f"endpoint_{name}")) < lowest:
            raise UserError(f"--endpoint-{name.replace('_', '-')} {value} must be at least {lowest}")
    for name in ("temperature", "timeout_s", "patience_s"):
        value = getattr(settings, f"endpoint_{name}")
        if not (0 <= value < math.inf) or (name == "timeout_s" and value == 0):
            least_of = "positive" if name == "timeout_s" else "at least 0"
            raise UserError(f"--endpoint-{name.replace('_', '-')} {value} must be {least_of} and finite")


def settings_of(settings: Any) -> Settings:
    """The flags of an endpoint among those of a run."""
    return Settings(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(Settings)})


def replies_of(role: str, address: str, model: str, folder: str = "runs") -> str:
    """The file of a run's replies of the model that plays ``role``: two servers of one name do not answer for another.

    >>> replies_of("judge", "http://here/v1", "org/m"), replies_of("judge", "http://there/v1", "org/m")
    ('runs/judges/org_m-33f2d5f4.jsonl', 'runs/judges/org_m-7325167a.jsonl')
    """
    where = hashlib.sha256(address.encode()).hexdigest()[:8]
    return f"{folder}/{role}s/{model.replace('/', '_')}-{where}.jsonl"


def from_settings(settings: Settings, address: str, model: str, *, cache: str | pathlib.Path) -> Chat:
    """``make_chat`` by the flags of a run.

    Raises:
      UserError: as ``check`` and ``make_chat``.
    """
    return make_chat(
        address, model, cache=cache, budget=budget_of(settings), temperature=settings.endpoint_temperature,
        max_tokens=settings.endpoint_reply_tokens, seed=settings.endpoint_seed,
    )  # fmt: skip


def check_one_process(flag: str) -> None:
    """Raises UserError where several processes run: each would ask in the middle of a step, and hear something else."""
    if jax.process_count() > 1:
        raise UserError(f"{flag} is asked in the middle of a step, by one process; run without --hosts")


def budget_of(settings: Settings) -> Budget:
    """What the flags of a run allow.

    Raises:
      UserError: as ``check``.
    """
    check(settings)
    return Budget(
        settings.endpoint_requests, settings.endpoint_tokens, settings.endpoint_timeout_s,
        concurrency=settings.endpoint_concurrency, patience_s=settings.endpoint_patience_s,
    )  # fmt: skip


class Cache:
    """Replies by question in a file of JSON lines; a line cut by a crash is dropped, and the next one begins anew."""

    def __init__(self, path: str | pathlib.Path):
        self.path, self.lock = pathlib.Path(path), threading.Lock()
        self.replies: dict[str, str] = {}
        self.asking: dict[str, threading.Lock] = {}  # of questions under way
        try:
            lines = self.path.read_text().split("\n") if self.path.exists() else [""]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if lines[-1]:  # what is whole is never written again, so that no crash can lose it
                os.truncate(self.path, self.path.stat().st_size - len(lines[-1].encode()))
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

    def reply(self, request: dict[str, Any], ask: Callable[[], str]) -> str:
        """What is kept for a question, else what ``ask`` says, which is kept; who asks the same meanwhile waits."""
        key = key_of(request)
        if key not in self.replies:
            with self.lock:
                mine = self.asking.setdefault(key, threading.Lock())
            with mine:
                if key not in self.replies:
                    self.keep(key, request, ask())
            self.asking.pop(key, None)
        return self.replies[key]


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


class _Line:
    """The connection of one ``Chat``: what it has cost, and whether it is lost. Used by many threads."""

    def __init__(self, client: Any, name: str, budget: Budget, tell: Callable[[str], None]):
        self.client, self.name, self.budget, self.tell = client, name, budget, tell
        self.lock, self.gate = threading.Lock(), threading.Semaphore(budget.concurrency)
        self.requests = self.tokens = 0
        self.reached, self.lost_at = False, None
        self.answers = 0  # a request begun before the latest of them tells nothing about the endpoint after it

    def reserve(self) -> None:
        """Raises RunStopped where the budget is spent."""
        with self.lock:
            for kind, spent, most in (("requests", self.requests, self.budget.requests),
                                      ("tokens", self.tokens, self.budget.tokens)):  # fmt: skip
                if most and spent >= most:
                    raise RunStopped(
                        f"the budget of {self.name} is spent: {self.requests} requests, {self.tokens} tokens; raise "
                        f"--endpoint-{kind} {most} and run again: replies that were paid for are kept"
                    )
            self.requests += 1

    def refund(self) -> None:
        with self.lock:
            self.requests -= 1

    def back(self, tokens: int) -> None:
        """A reply came."""
        with self.lock:
            self.tokens, self.reached, lost_at, self.lost_at = self.tokens + tokens, True, self.lost_at, None
            self.answers += 1
            if lost_at is not None:
                self.tell(f"{self.name} answers again after {time.monotonic() - lost_at:.0f} s; the run goes on")

    def lost(self, error: Exception, answers: int) -> None:
        """No reply came, and another try may help; says so once.

        Args:
          error: what came instead.
          answers: ``self.answers`` when the question was sent: where others were answered since, the endpoint is not
            lost, however late this failure is read.

        Raises:
          RunStopped: where there never was one, or the patience is at its end.
        """
        with self.lock:
            if not self.reached:
                raise RunStopped(
                    f"{self.name} does not answer ({_said(error)}); start it, or correct the address"
                ) from error
            if self.answers > answers:
                return
            if self.lost_at is None:
                self.lost_at = time.monotonic()
                self.tell(f"{self.name} is lost ({_said(error)}); the run waits and asks again")
            waited, most = time.monotonic() - self.lost_at, self.budget.patience_s
            if most and waited > most:
                raise RunStopped(
                    f"{self.name} was lost for more than --endpoint-patience-s {most:g} ({_said(error)}); run again "
                    "when it is back: replies that were paid for are kept"
                ) from error

    def ask(self, request: dict[str, Any], *, create: Callable[..., Any], read: Callable[[Any], Any]) -> Any:
        """The reply, however long it takes.

        Args:
          create: the client's function for this kind of question.
          read: what is wanted of the first choice of a reply; None where it lacks it.

        Raises:
          Unanswered: where the endpoint refuses the question; RunStopped as ``reserve`` and ``lost``, and where it
            refuses us.
        """
        import openai

        pause = FIRST_PAUSE_S
        while True:
            self.reserve()
            try:
                with self.gate:
                    answers = self.answers
                    reply = create(**request)
                if not isinstance(getattr(reply, "choices", None), list):
                    raise ValueError("what came is no reply of a model, as a proxy's page is none")
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                self.refund()
                raise Unanswered(f"{self.name}: {_said(error)}") from error
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                self.refund()
                raise RunStopped(f"{self.name}: {_said(error)}; check the address, the model's name and the key"
                                 ) from error  # fmt: skip
            except (openai.OpenAIError, ValueError) as error:  # ValueError: no JSON, or other JSON
                self.refund()
                self.lost(error, answers)
                time.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE_S)
                continue
            self.back(reply.usage.total_tokens if reply.usage else request["max_tokens"])
            found = read(reply.choices[0]) if reply.choices else None
            if found is None:
                raise Unanswered(f"{self.name}: a reply without text")
            return found


def _whole(text: str | None) -> str | None:
    """A reply in which half of a character, where it was cut, is a question mark: it is asked again as a message."""
    return None if text is None else encodable(text)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _tell(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


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
    tell: Callable[[str], None] = _tell,
) -> Chat:
    """A model behind ``address`` (``https://HOST/v1``) as ``(messages, draw=0) -> text``, for any number of threads.

    An endpoint that has answered and then does not is waited for, with growing pauses; that is told once, and once
    more when it is back.

    Args:
      cache: file of replies, read first and added to.
      temperature: above 0, other draws of the same question are other samples.
      seed: part of the question, so that other seeds get other replies from a model that samples.
      key_variable: environment variable that holds the key; it is written nowhere.
      replay: answer from the file alone.
      tell: what happens to the endpoint, in a line.

    Raises:
      UserError: for a missing package or key, or a cache that cannot be used; ``chat`` raises ``Unanswered``, and
        ``RunStopped`` where the budget is spent, the patience at its end, or nothing ever answered at the address.
    """
    kept = Cache(cache)
    line = None if replay else _Line(_client(address, budget, key_variable), f"{model} at {address}", budget, tell)

    def chat(messages: Messages, draw: int = 0) -> str:
        request = {"model": model, "messages": [dict(m) for m in messages], "temperature": temperature,
                   "max_tokens": max_tokens, "seed": (seed + draw if temperature > 0 else seed) % 2**31}  # fmt: skip

        def ask() -> str:
            if line is None:
                raise Unanswered(f"{cache} holds no reply to {json.dumps(request['messages'][-1:])[:200]}; drop replay")
            create = line.client.chat.completions.create
            return line.ask(request, create=create, read=lambda choice: _whole(choice.message.content))

        return kept.reply(request, ask)

    return chat


def make_completion(
    address: str,
    model: str,
    *,
    cache: str | pathlib.Path,
    budget: Budget = Budget(),
    temperature: float = 1.0,
    max_tokens: int = 512,
    seed: int = 0,
    key_variable: str = "OPENAI_API_KEY",
    tell: Callable[[str], None] = _tell,
) -> Completion:
    """A model behind ``address`` that goes on: ``(prompt, draw=0) -> Written``, for any number of threads.

    It is asked at ``/completions``, which takes a prompt as it stands, without a chat template: a text, or the ids of
    its tokens, which are those of the policy where the two share a vocabulary.

    Args:
      cache, budget, temperature, seed, key_variable, tell: as ``make_chat`` takes them.
      max_tokens: of a continuation.

    Raises:
      UserError, Unanswered, RunStopped: as ``make_chat`` and its ``chat``.
    """
    kept = Cache(cache)
    line = _Line(_client(address, budget, key_variable), f"{model} at {address}", budget, tell)

    def read(choice: Any) -> str | None:
        done = choice.finish_reason == "stop"
        return None if choice.text is None else json.dumps({"text": _whole(choice.text), "ended": done})

    def complete(prompt: str | Sequence[int], draw: int = 0) -> Written:
        given = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
        request = {"model": model, "prompt": given, "temperature": temperature, "max_tokens": max_tokens,
                   "seed": (seed + draw if temperature > 0 else seed) % 2**31}  # fmt: skip
        create = line.client.completions.create
        return Written(**json.loads(kept.reply(request, lambda: line.ask(request, create=create, read=read))))

    return complete


def draw_of(seed: Any) -> int:
    """The draw of an episode with this seed (two 32-bit numbers), below 2**31."""
    first, second = (int(x) for x in seed[:2])
    return (first ^ second * 0x9E3779B1) % 2**31


def ask_all(chat: Chat, conversations: Sequence[Messages], *, workers: int = 8) -> list[str | None]:
    """The replies in order, several at a time; None where there was no reply. Equal conversations are asked once."""

    def one(messages: Messages) -> str | None:
        try:
            return chat(messages)
        except Unanswered:
            return None

    with ThreadPoolExecutor(workers) as pool:
        keys = [json.dumps(messages, sort_keys=True) for messages in conversations]
        asked = dict(zip(keys, conversations, strict=True))
        replies = dict(zip(asked, pool.map(one, asked.values()), strict=True))
    return [replies[key] for key in keys]


def open_judge(
    settings: Settings, flag: str, address: str, model: str, *, question: str, read: Callable[[str], Any], wants: str
) -> Chat:
    """The model behind ``address`` for verdicts in the middle of a step, once it has answered a question as wanted.

    Args:
      flag: that gives the address; ``{flag}-model`` gives the name.
      read: what is made of a reply, None where it says nothing of the kind that is wanted.
      wants: that kind, in words.

    Raises:
      UserError: without a name, with several processes, and where the model does not answer so; RunStopped: where
        nothing answers.
    """
    where = f"{flag} {address}"
    if not model:
        raise UserError(f"{where} needs {flag}-model NAME, by which the server knows its model")
    check_one_process(where)
    chat = from_settings(settings, address, model, cache=replies_of("judge", address, model))
    try:
        said = chat([{"role": "user", "content": question}])
    except Unanswered as error:
        raise UserError(f"{where}: {error}") from error
    if read(said) is None:
        raise UserError(f"{where}: asked for {wants} it says {said[:80]!r}; raise --endpoint-reply-tokens, or take "
                        "another model")  # fmt: skip
    return chat
