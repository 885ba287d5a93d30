"""``jaxrl serve``: a model behind an OpenAI-compatible address, for judges, simulated users and other programs.

Run: jaxrl serve --model DIR [--port 8000], then for example --large-judge http://localhost:8000/v1 of an experiment

``/v1/chat/completions`` (by the model's chat template), ``/v1/completions``, ``/v1/models``, ``/health``. Questions
that wait are decoded together, whatever their temperature, top-p, seed and number of replies (``n``). What it does not
do (streams, tools, log-probabilities, penalties) it refuses by name.
"""

import dataclasses
import http.server
import json
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data import sources
from jaxrl_llm.data.chat import encode_chat, encode_prompt
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import hub
from jaxrl_llm.run import compile_cache, flags, options, parts
from jaxrl_llm.run.commands.answering import Batcher, Question, Reply, make_decode

MOST_BYTES = 16 * 2**20  # of a request
MOST_CHOICES = 128
NEUTRAL = (None, False, 0, 0.0, [], {}, "")  # of a field that is not served: nothing is asked
SERVED = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "seed",
          "stop", "user", "chat_template_kwargs"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings(options.ModelSettings):
    """Which model is served, where, and how much at once."""

    max_new_tokens: int = 256  # of a reply, at most; the default where a request names no number
    batch: int = 16  # replies that are decoded at once
    wait_ms: float = 10.0  # that the first question of a batch waits for others
    rollout_cache: parts.CacheNumbers = ""  # keys and values in a byte, with a scale for every head
    host: str = "127.0.0.1"  # who may ask; 0.0.0.0: everybody who reaches this machine, without a password
    port: int = 8000  # 0: any that is free
    name: str = ""  # of the model for those who ask; empty: the last part of its folder
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start


class Refused(Exception):
    """A request that is not answered, and why."""


class Asked(NamedTuple):
    """A request: its questions, ``choices`` to a prompt, the texts that end a reply, and whether it is a talk."""

    questions: list[Question]
    choices: int
    stop: tuple[str, ...]
    chat: bool


def check(settings: Settings) -> None:
    """Raises UserError for a number out of range."""
    for name in ("max_new_tokens", "batch"):
        if getattr(settings, name) < 1:
            raise UserError(f"{flags.spell(name)} {getattr(settings, name)} must be at least 1")
    flags.check_amount("wait_ms", settings.wait_ms)
    if not 0 <= settings.port < 2**16:
        raise UserError(f"--port {settings.port} must lie in [0, 65535]")


def _number(
    body: dict[str, Any], name: str, default: float | int, low: float | int, high: float | int, kind: type = float
) -> Any:
    value = body.get(name)
    value = default if value is None else value
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low <= value <= high
        or kind(value) != value
    ):
        raise Refused(f"{name}={value!r:.80} is no {'whole ' * (kind is int)}number from {low} to {high}")
    return kind(value)


def _texts(value: Any) -> str:
    """The content of a message: text, or parts that are text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in value):
        return "".join(x["text"] for x in value)
    raise Refused("the content of a message is text; images and sounds are not read")


def _talk(body: dict[str, Any], model: parts.Model) -> list[int]:
    messages, variables = body.get("messages"), body.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused("messages must be a list of objects with role and content")
    if not isinstance(variables, dict):
        raise Refused("chat_template_kwargs must be an object")
    said = [m | {"content": _texts(m.get("content"))} for m in messages]
    try:
        return encode_chat(model.tokenizer, said, **variables | {"add_generation_prompt": True})
    except (UserError, TypeError) as error:
        raise Refused(str(error)) from error


def _prompts(body: dict[str, Any], model: parts.Model) -> list[list[int]]:
    given = body.get("prompt")
    ids = isinstance(given, list) and bool(given) and all(type(x) is int for x in given)
    several = given if isinstance(given, list) and not ids else [given]
    found = []
    for one in several:
        if isinstance(one, str):
            found.append(encode_prompt(model.tokenizer, one))
        elif isinstance(one, list) and all(type(x) is int and 0 <= x < model.tokenizer.vocab_size for x in one):
            found.append(one)
        else:
            raise Refused("prompt must be text, ids of the vocabulary, or a list of either")
    if not found or not all(found):
        raise Refused("prompt is empty")
    return found


def read(body: Any, path: str, model: parts.Model, settings: Settings) -> Asked:
    """A request's questions.

    Raises:
      Refused: naming the field.
    """
    if not isinstance(body, dict):
        raise Refused("the request must be a JSON object")
    if torn := sources.half(body):
        raise Refused(f"{torn} is half of a character, which no tokenizer reads; send the whole one")
    for name, value in body.items():
        if name not in SERVED and not any(type(value) is type(x) and value == x for x in NEUTRAL):
            raise Refused(f"{name}={value!r:.80} is not served; leave it out")
    chat = path.endswith("/chat/completions")
    most = _number(
        body, "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens",
        settings.max_new_tokens, 1, settings.max_new_tokens, int,
    )  # fmt: skip
    temperature, top_p = _number(body, "temperature", 1.0, 0.0, 100.0), _number(body, "top_p", 1.0, 1e-6, 1.0)
    choices = _number(body, "n", 1, 1, MOST_CHOICES, int)
    seed = _number(body, "seed", int.from_bytes(os.urandom(4), "little"), 0, 2**32 - 1, int)
    given = body.get("stop")
    stop = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stop, list) or not all(isinstance(x, str) and x for x in stop):
        raise Refused("stop must be a text or a list of texts")
    prompts, limit = [_talk(body, model)] if chat else _prompts(body, model), model.config.max_positions
    for ids in prompts:
        if len(ids) + most > limit:
            raise Refused(f"a prompt of {len(ids)} tokens and max_tokens={most} exceed the context of {limit}")
    drawn = [ids for ids in prompts for _ in range(choices)]  # each a draw of its own, of equal prompts too
    questions = [Question(ids, most, temperature, top_p, seed, k) for k, ids in enumerate(drawn)]
    return Asked(questions, choices, tuple(stop), chat)


def reply_of(asked: Asked, replies: Sequence[Reply], model: parts.Model, name: str) -> dict[str, Any]:
    """The answer to a request, as OpenAI's clients read it; a reply ends before the first stop text."""
    choices = []
    for k, reply in enumerate(replies):
        text, ended = model.tokenizer.decode(reply.ids), reply.ended
        ends = [at for at in (text.find(x) for x in asked.stop) if at >= 0]
        if ends:
            text, ended = text[: min(ends)], True
        part = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
        choices.append({"index": k, **part, "finish_reason": "stop" if ended else "length", "logprobs": None})
    prompt = sum(len(q.ids) for q in asked.questions[:: asked.choices])
    written = sum(len(reply.ids) + reply.ended for reply in replies)
    return {
        "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if asked.chat else "text_completion",
        "created": int(time.time()), "model": name, "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }  # fmt: skip


def make_handler(answer: Callable[[Any, str], dict[str, Any]], name: str) -> type[http.server.BaseHTTPRequestHandler]:
    """The class of an HTTP server: ``answer(body, path)`` replies to what is posted.

    It raises Refused for a request that is not answered.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open
        timeout = 3600

        def do_GET(self) -> None:
            known = {"id": name, "object": "model", "created": 0, "owned_by": "jaxrl"}
            found = {"/v1/models": {"object": "list", "data": [known]}, f"/v1/models/{name}": known, "/health": {}}
            if self.path in found:
                self.send(200, found[self.path])
            else:
                self.refuse(f"no {self.path} here", 404)

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MOST_BYTES:
                self.close_connection = True  # what follows is not read
                self.refuse(f"a request names its length, at most {MOST_BYTES} bytes", 413)
                return
            raw = self.rfile.read(int(length))
            if self.path not in ("/v1/chat/completions", "/v1/completions"):
                self.refuse(f"no {self.path} here", 404)
                return
            try:
                body = json.loads(raw)
            except (ValueError, RecursionError) as error:
                self.refuse(f"the request is no JSON: {str(error)[:200]}", 400)
                return
            try:
                self.send(200, answer(body, self.path))
            except Refused as error:
                self.refuse(str(error), 400)
            except Exception as error:  # the server stays, whoever asked is told
                print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                self.refuse(f"{type(error).__name__}: {str(error)[:500]}", 500)

        def refuse(self, said: str, status: int) -> None:
            kind = "invalid_request_error" if status < 500 else "server_error"
            self.send(status, {"error": {"message": said, "type": kind, "param": None, "code": None}})

        def send(self, status: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            """Nothing: what is asked is nobody else's."""

    return Handler


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # questions of a whole step come at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: who asked has left."""


def begin(settings: Settings) -> tuple[http.server.ThreadingHTTPServer, Batcher, str]:
    """The server, bound to its port; what decodes for it; the name of the model.

    Raises:
      UserError: for a model that does not load, or a port that is taken.
    """
    check(settings)
    model = options.open_model(settings, trains=False)
    if settings.max_new_tokens >= model.config.max_positions:
        raise UserError(f"--max-new-tokens {settings.max_new_tokens} leaves no room for a prompt in the context of "
                        f"{model.config.max_positions}; lower it")  # fmt: skip
    name = settings.name or pathlib.Path(settings.model).resolve().name
    batcher = Batcher(
        make_decode(model, most=settings.max_new_tokens), rows=settings.batch, wait_s=settings.wait_ms / 1000
    )

    def answer(body: Any, path: str) -> dict[str, Any]:
        asked = read(body, path, model, settings)
        return reply_of(asked, [x.result() for x in [batcher.ask(q) for q in asked.questions]], model, name)

    try:
        server = _Server((settings.host, settings.port), make_handler(answer, name))
    except OSError as error:
        batcher.close()
        raise UserError(f"--host {settings.host} --port {settings.port}: {error.strerror}; choose another") from error
    return server, batcher, name


def cli(arguments: list[str] | None = None) -> int:
    """Command line: one clear line and exit code 2 for a mistake."""
    try:
        words = hub.located(sys.argv[1:] if arguments is None else arguments)
        settings = flags.read(Settings, words, prog="jaxrl serve")
        flags.check_default(settings, options.OF_TRAINING, "is of training: give it to jaxrl train")
        compile_cache.enable(settings.compile_cache)
        server, batcher, name = begin(settings)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    host, port = server.server_address[:2]
    print(f"{name} at http://{host}:{port}/v1 (Ctrl-C ends)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 130
    finally:
        server.server_close()
        batcher.close()
    return 0
