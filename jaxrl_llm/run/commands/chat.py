"""``jaxrl chat``: talk to a model folder in the terminal, a line a message; an empty line or Ctrl-D ends the talk."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import hub
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import compile_cache, flags, options, parts
from jaxrl_llm.run.options import ModelSettings, SamplingSettings

STEP = 64  # columns of a prompt: so few programs are compiled, whatever is said


@dataclasses.dataclass(frozen=True)
class Settings(SamplingSettings, ModelSettings):
    """Which model, and how its answers are sampled."""

    max_new_tokens: int = 64  # of a bundled model; of a larger one of your own by its size, as in training
    seed: int = 0
    system: str = ""  # the system's message, where the model has a chat template
    compile_cache: bool = True  # keep compiled programs in the user's cache folder, for the next start


def make_answer(settings: Any, model: parts.Model | None = None) -> Callable[..., str]:
    """``answer(messages, draw=0) -> text``: messages by the model's chat template, or the last one's text without one.

    Args:
      settings: those of a model and of its sampling, and a ``seed``.
      model: that is open already; None: it is opened here.

    Raises:
      UserError: for a model that does not load; ``answer``, where the messages leave no room for a response.
    """
    sampling = options.sampling_of(settings)._asdict()
    model = options.open_model(settings, trains=False) if model is None else model
    rollout = jit_sampling(parts.make_rollout(model, group_size=1, **sampling))
    template = model.tokenizer.chat_template is not None
    if not template and (system := getattr(settings, "system", "")):
        raise UserError(f"--system {system!r} is a message for a chat template, and --model {settings.model} has none; "
                        "drop it")  # fmt: skip

    def answer(messages: list[dict[str, str]], draw: int = 0) -> str:
        prompt = messages if template else messages[-1]["content"]
        problem = Problem("rows", prompt, "", {}, 0, str(len(messages)))
        tokens = problem_tables.encode_problems(
            model.tokenizer, [problem], answers=problem_tables.no_answers, chat=template
        )
        length = tokens.tokens.shape[1]
        columns = min(-(-length // STEP) * STEP, model.config.max_positions - settings.max_new_tokens)
        if length > columns:
            raise UserError(f"the talk has {length} tokens and leaves no room for --max-new-tokens "
                            f"{settings.max_new_tokens}; begin again, or lower it")  # fmt: skip
        left = ((0, 0), (columns - length, 0))
        ids = jnp.zeros((1,), jnp.int32)
        keys = sample_keys(jax.random.key(settings.seed), len(messages), ids + draw, 1)
        rows = rollout(model.params, jnp.pad(tokens.tokens, left), jnp.pad(tokens.valid, left), keys, ids)
        return parts.responses(model.tokenizer, jax.tree.map(np.asarray, rows))[0]

    return answer


def read_lines(source: Iterable[str]) -> Iterator[str]:
    """The lines of a source of text.

    Raises:
      UserError: for bytes that are not UTF-8.
    """
    try:
        for line in source:
            line.encode()  # with the locale C, bytes that are none come as halves of characters
            yield line
    except UnicodeError as error:
        raise UserError(f"a message is not UTF-8 ({error}); convert the input") from error


def talk(answer: Callable[[list[dict[str, str]]], str], lines: Iterable[str], system: str) -> list[dict[str, str]]:
    """Answers every line until an empty one; the messages of the whole talk."""
    messages = [{"role": "system", "content": system}] if system else []
    for line in lines:
        if not line.strip():
            break
        messages.append({"role": "user", "content": line.rstrip("\n")})
        text = answer(messages)
        messages.append({"role": "assistant", "content": text})
        print(text, flush=True)
    return messages


def cli(arguments: list[str] | None = None) -> int:
    """Command line: one clear line and exit code 2 for a mistake."""
    try:
        words = hub.located(sys.argv[1:] if arguments is None else arguments)
        settings = flags.read(Settings, words, prog="jaxrl chat")
        flags.check_default(settings, options.OF_TRAINING, "is of training: give it to jaxrl train")
        flags.check_seed(settings.seed)
        compile_cache.enable(settings.compile_cache)
        settings, told = options.sized(settings, words, least=settings.max_new_tokens)
        if told:
            print(told, file=sys.stderr, flush=True)
        answer = make_answer(settings)
        if sys.stdin.isatty():
            print(f"{settings.model}: a line a message, an empty one ends", flush=True)
        talk(answer, read_lines(sys.stdin), settings.system)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
