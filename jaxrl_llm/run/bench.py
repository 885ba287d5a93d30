"""A bench: a model, the problems it trains and is measured on, and how answers are judged, from settings."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain, countdown, programs
from jaxrl_llm.errors import UserError
from jaxrl_llm.run import options, parts
from jaxrl_llm.run.options import ModelSettings, SamplingSettings
from jaxrl_llm.types import Problems, Rewards, Trajectories
from jaxrl_llm.verifiers import answers as answer_verifiers
from jaxrl_llm.verifiers import code as code_verifier
from jaxrl_llm.verifiers import countdown as countdown_verifier
from jaxrl_llm.verifiers import tokens as token_verifiers
from jaxrl_llm.verifiers.pool import VerifierPool
from jaxrl_llm.verifiers.verdict import Verifier


@dataclasses.dataclass(frozen=True)
class Settings(ModelSettings):
    """What every experiment has."""

    steps: int = 100  # iterations of the last stage
    learning_rate: float = 1e-6
    eval_every: int = 25  # steps between measurements


@dataclasses.dataclass(frozen=True)
class OnlineSettings(SamplingSettings, Settings):
    """What every experiment with verifiable problems has."""

    # chain, countdown, programs, FILE.jsonl, FILE.json, FILE.csv, FILE.parquet, FOLDER[:SPLIT] saved by datasets,
    # tfds:NAME
    data: str = "chain"
    format: parts.Format = "plain"  # the columns of a file; see data.formats
    verifier: parts.VerifierName = ""  # how a file's answers are compared; empty: that of the format
    chat: bool = False  # prompts of a file become a user's message, by the model's chat template
    levels: tuple[int, ...] = ()  # difficulties of generated problems; none: all of the task
    prompts_per_step: int = 128
    group_size: int = 8  # responses to each prompt
    train_problems: int = 8192  # size of the generated training set
    eval_problems: int = 256  # held-out problems, never trained on
    eval_samples: int = 4


class Bench(NamedTuple):
    """A model, problems it trains and is measured on, and how answers are judged.

    ``score(answers, trajectories)`` runs on the device; where the task or the tokenizer has no such judge it is None
    and ``host_score`` and ``heldout_score`` judge the decoded text. ``callback`` is ``host_score`` in the place of
    ``score``, for methods that ask in the middle of a compiled program.
    """

    model: parts.Model
    train: Problems
    heldout: Problems
    score: Callable[[Any, Trajectories], Rewards] | None
    host_score: Callable[[Trajectories], Rewards]
    heldout_score: Callable[[Trajectories], Rewards]
    callback: Callable[[Any, Trajectories], Rewards]


_TASKS: dict[str, Any] = {  # module, judge on the host, answers as arrays, judge on the device
    "chain": (chain, answer_verifiers.verify_chain, tables.value_answers, token_verifiers.make_value_verifier),
    "countdown": (
        countdown,
        countdown_verifier.verify,
        tables.countdown_answers,
        token_verifiers.make_countdown_verifier,
    ),
    "programs": (programs, code_verifier.verify, tables.no_answers, None),  # they run in the sandbox alone
}


def is_generated(data: str) -> bool:
    """Whether ``data`` names problems that are drawn here, and no source of rows."""
    return data in _TASKS


def bench(settings: OnlineSettings) -> Bench:
    """Loads the model and the problems of the settings; equal settings share one bench.

    Raises:
      UserError: for a folder, file or level that does not serve, or prompts that exceed the context.
    """
    return _bench(bench_identity(settings), options.base_of(settings))


_OF_BENCH = (
    *options.OF_MODEL, *(name for name in options.OF_SAMPLING if name != "temperature"),
    "data", "format", "verifier", "chat", "levels", "train_problems",
    "eval_problems",
)  # fmt: skip


def bench_identity(settings: OnlineSettings) -> tuple[tuple[str, Any], ...]:
    """The settings that tell one bench from another."""
    return tuple((name, getattr(settings, name)) for name in _OF_BENCH)


class _OfTask(NamedTuple):
    identity: tuple[tuple[str, Any], ...]


def cached_by_task(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of settings that is computed once for all that share a bench, and at once while a program is traced.

    It is given what tells their bench from others and nothing else of them; its other arguments are hashable, and kept
    apart. The four results that were used last are kept.
    """

    @lru_cache(maxsize=4)
    def kept(*arguments, **named):
        return function(*(OnlineSettings(**dict(x.identity)) if isinstance(x, _OfTask) else x for x in arguments),
                        **named)  # fmt: skip

    @wraps(function)
    def at_once(*arguments, **named):
        with jax.core.eval_context():
            places = (_OfTask(bench_identity(x)) if isinstance(x, OnlineSettings) else x for x in arguments)
            return kept(*places, **named)

    return at_once


def problem_sets(settings: OnlineSettings) -> tuple:
    """Training and held-out problems, and how answers are judged on the host."""
    sizes = {"train": settings.train_problems, "heldout": settings.eval_problems, "seed": 0}
    if settings.data not in _TASKS:
        how = {"verifier": settings.verifier, "layout": settings.format, "chat": settings.chat}
        return parts.load_problems(settings.data, **sizes, **how)
    if settings.format != "plain" or settings.verifier or settings.chat:
        raise UserError(f"--format, --verifier and --chat belong to rows of your own, not to --data {settings.data}")
    task, verify, *_ = _TASKS[settings.data]
    make = partial(tables.make_split, task, levels=settings.levels or None)
    return *(make(split=split, n=sizes[split], seed=0) for split in ("train", "heldout")), verify


def most_heldout(settings: OnlineSettings, *, step: int = 32) -> int:
    """The largest number of held-out problems, at most ``eval_problems``, that a generated task has, in steps.

    ``eval_problems`` itself for rows of one's own, which are counted elsewhere.
    """
    if settings.data not in _TASKS:
        return settings.eval_problems
    count = _heldout_made(settings.data, settings.levels, settings.eval_problems)
    if count == settings.eval_problems:
        return count
    # a smaller number gives up after fewer draws: the last problems, which were hard to come by, are left out
    most = max(1, (count - 1) // step) * step
    while most > step and _heldout_made(settings.data, settings.levels, most) < most:
        most -= step
    return most


@lru_cache(maxsize=16)
def _heldout_made(data: str, levels: tuple[int, ...], wanted: int) -> int:
    """How many of so many held-out problems there are: every arm asks, and giving up takes seconds."""
    return len(tables.draw_split(_TASKS[data][0], levels=levels or None, split="heldout", seed=0, n=wanted))


def open_model(settings: Settings) -> parts.Model:
    """``options.open_model``; benches of the same model share its weights."""
    return _opened(settings, options.base_of(settings))


def _opened(settings: Settings, base: str) -> parts.Model:
    names = (name for name in options.OF_MODEL if hasattr(settings, name))
    return _model((*((name, getattr(settings, name)) for name in names), ("lora_base", base)))


@lru_cache(maxsize=1)
def _model(identity: tuple[tuple[str, Any], ...]) -> parts.Model:
    return options.open_model(SimpleNamespace(**dict(identity)))


@lru_cache(maxsize=8)
def _bench(identity: tuple[tuple[str, Any], ...], base: str) -> Bench:
    """``base``: what the weights beside an adapter are kept in, of the commands that have a flag for it."""
    settings = OnlineSettings(**dict(identity))
    model, on_device = _opened(settings, base), None
    *sets, verify = problem_sets(settings)
    *_, answers, make_verifier = _TASKS.get(settings.data, (tables.no_answers, None))
    if make_verifier is not None:
        try:
            eos, size = model.tokenizer.eos_ids, model.config.padded_vocab_size
            on_device = make_verifier(*token_verifiers.character_classes(model.tokenizer.encode, eos, size))
        except ValueError as error:
            print(f"{settings.data} answers are judged on the host: {error}")
    both = tables.encode_problems(model.tokenizer, [*sets[0], *sets[1]], answers=answers, chat=settings.chat)
    if both.tokens.shape[1] + settings.max_new_tokens > model.config.max_positions:
        raise UserError(
            f"prompts of {both.tokens.shape[1]} tokens and --max-new-tokens {settings.max_new_tokens} exceed the "
            f"model's context of {model.config.max_positions}; lower --max-new-tokens"
        )
    split, judged = len(sets[0]), {"verifier": verify, "pool": _pool(verify)}
    return Bench(
        model=model,
        train=jax.tree.map(lambda x: x[:split], both),
        heldout=jax.tree.map(lambda x: x[split:], both),
        score=on_device,
        host_score=parts.make_scorer(model.tokenizer, sets[0], **judged),
        heldout_score=parts.make_scorer(model.tokenizer, sets[1], **judged),
        callback=parts.make_callback(model.tokenizer, sets[0], **judged, mesh=model.mesh),
    )


@lru_cache(maxsize=2)
def _pool(verify: Verifier) -> VerifierPool | None:
    """``parts.make_pool``, shared by all benches until this process ends."""
    return parts.make_pool(verify)


def solved_problems(settings: OnlineSettings, *, heldout: bool = False) -> list[Problem]:
    """The problems behind ``bench(settings).train`` as text, in the same order, with their worked solutions.

    Args:
      heldout: those that are measured instead.

    Raises:
      UserError: for rows without one.
    """
    problems = problem_sets(settings)[int(heldout)]
    if without := sum(not p.solution for p in problems):
        which = "held-out" if heldout else "training"
        raise UserError(
            f"--data {settings.data}: {without} of {len(problems)} {which} rows have no worked solution, which this "
            "method shows; give a column solution, or --format gsm8k or math"
        )
    return problems


def heldout_problems(settings: OnlineSettings) -> list[Problem]:
    """The problems behind ``bench(settings).heldout`` as text, in the same order."""
    return list(problem_sets(settings)[1])


def demonstrations(settings: OnlineSettings) -> tuple[Array, Array]:
    """The solution of every training problem of ``bench(settings)`` as a response: ``(tokens, valid)``, both [N, new].

    Raises:
      UserError: for rows without a solution, or one longer than ``max_new_tokens``.
    """
    return _demonstrations(bench_identity(settings))


@lru_cache(maxsize=8)
def _demonstrations(identity: tuple[tuple[str, Any], ...]):
    settings = OnlineSettings(**dict(identity))
    problems, width = solved_problems(settings), settings.max_new_tokens
    prompts, solutions = [p.prompt for p in problems], [p.solution for p in problems]
    tokenizer = _bench(identity, "").model.tokenizer
    rows = encode_responses(tokenizer, solutions, width=width, prompts=prompts, chat=settings.chat)
    return tuple(jnp.asarray(x) for x in rows)
