"""Two runs around Tool-Star that train nothing: ``rows`` makes data with tools, ``solve`` answers questions with aids.

Both ask a writer, a model behind an address or one that is loaded here, and judge by the verifier of the rows.
"""

import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from experiments.agents.parts import tool_chains, tool_data
from experiments.agents.parts.tool_chains import Write
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.envs import tool_question
from jaxrl_llm.errors import DataError, RunStopped, UserError
from jaxrl_llm.run import catalog, compile_cache, flags, options, parts
from jaxrl_llm.run.commands import chat
from jaxrl_llm.run.options import ModelSettings, SamplingSettings
from jaxrl_llm.tools import boxes, endpoints
from jaxrl_llm.tools.calls import Toolbox
from jaxrl_llm.verifiers.verdict import Verifier

Found = TypeVar("Found")
PROG = "python -m experiments.agents.tool_star"


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, SamplingSettings, ModelSettings):
    """Which questions, which tools, and who writes: the model behind an address, or the loaded ``model``."""

    data: str = ""  # a source of rows
    format: parts.Format = "hotpotqa"
    verifier: parts.VerifierName = "f1"
    tools: str = ""  # python, calculator, search=CORPUS.jsonl, ... with commas between them
    writer: str = ""  # address of the model that answers, https://HOST/v1; empty: --model
    writer_model: str = ""  # its name there
    problems: int = 256  # at most
    right: float = 0.999  # the least verdict of a right answer
    calls: int = 6  # responses with calls in a chain, at most
    seed: int = 0
    out: str = ""
    max_new_tokens: int = 1024  # of a response of --model
    endpoint_reply_tokens: int = 1024


@dataclasses.dataclass(frozen=True)
class RowSettings(Settings):
    """Data with tools of the training questions: ``sft.jsonl`` to imitate, ``rl.jsonl`` to reinforce, in a folder."""

    direct: int = 1  # answers without tools to a question
    prompted: int = 1  # chains with tools, from the prompt
    hints: int = 1  # chains that a hint begins, each in one of the answers without tools
    most_calls: int = 5  # of a chain that is kept
    out: str = "runs/tool_rows"  # a folder


@dataclasses.dataclass(frozen=True)
class SolveSettings(Settings):
    """Held-out questions with and without aids; ``out`` is a file with a line a question, or empty."""

    debugger: str = ""  # address of the model that writes failed programs anew; empty: none does
    debugger_model: str = ""
    debugs: int = 1  # of a chain
    backs: int = 1  # responses with a failed call that are dropped and written anew
    refiner: str = ""  # address of the model that makes long chains shorter; empty: none does
    refiner_model: str = ""
    longest: int = 24_000  # characters of a chain, above which it is refined


def _check(settings: Settings, least: dict[str, int]) -> None:
    for name, lowest in {"problems": 1, "calls": 1, **least}.items():
        if (value := getattr(settings, name)) < lowest:
            raise UserError(f"{flags.spell(name)} {value} must be at least {lowest}")
    if not settings.data:
        raise UserError("--data names no questions; give FILE.jsonl, or another source of rows, and its --format")
    if not settings.tools:
        raise UserError("--tools names none; give any of python, calculator, search=CORPUS.jsonl, with commas between")


def _named(settings: Any, role: str) -> Write | None:
    """The model behind ``--ROLE``; None where there is no such flag."""
    address, name = getattr(settings, role), getattr(settings, f"{role}_model")
    if bool(address) != bool(name):
        raise UserError(f"--{role} ADDRESS and --{role}-model NAME belong together: give both, or none")
    if not address:
        return None
    return endpoints.from_settings(settings, address, name, cache=endpoints.replies_of(role, address, name))


def open_writer(settings: Settings) -> tuple[Write, int]:
    """Who answers, and how many questions it takes at once.

    Raises:
      UserError: for an address without a name, or a model without a chat template.
    """
    write = _named(settings, "writer")
    if write is not None:
        return write, settings.endpoint_concurrency
    model = options.open_model(settings)
    if model.tokenizer.chat_template is None:
        raise UserError(
            f"--model {settings.model} has no chat template, and a chain is a conversation; give a model with one, or "
            "--writer ADDRESS and --writer-model NAME"
        )
    answer = chat.make_answer(settings, model)

    def local(messages: Sequence[dict[str, Any]], draw: int = 0) -> str:
        try:
            return answer(list(messages), draw)
        except UserError as error:  # a chain that outgrew the model
            raise endpoints.Unanswered(str(error)) from error

    return local, 1


def _each(one: Callable[[int], Found], count: int, workers: int) -> list[Found | None]:
    """What comes of every question; None where a model refused it or a tool could not be asked, which is told."""

    def tried(k: int) -> Found | None:
        try:
            return one(k)
        except RuntimeError as error:  # endpoints.Unanswered is one; RunStopped is none
            print(f"question {k} left out: {error}", file=sys.stderr, flush=True)
            return None

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(tried, range(count)))


def _judge(settings: Settings, verify: Verifier, problem: Problem) -> Callable[[str], bool]:
    def right(text: str) -> bool:
        found = verify(problem.answer, text)
        if not found.valid:
            raise RuntimeError(f"the verifier failed: {found.reason}")
        return found.value >= settings.right

    return right


class _Rows(NamedTuple):
    """What ``catalog.rows_of`` reads."""

    data: str
    format: str
    verifier: str
    eval_problems: int


def _opened(settings: Settings, held_out: int) -> tuple[list[Problem], list[Problem], Verifier, Toolbox]:
    rows = catalog.rows_of(_Rows(settings.data, settings.format, settings.verifier, held_out))
    return *rows, boxes.opened(settings.tools)


def make_rows(settings: RowSettings) -> dict[str, Any]:
    """Writes both files of rows and ``report.json``, which it returns.

    Raises:
      UserError: for a source, a tool or a writer that does not serve.
    """
    _check(settings, {"direct": 0, "prompted": 0, "hints": 0, "most_calls": 1})
    if settings.prompted + settings.hints * min(settings.direct, 1) < 1:
        raise UserError("--prompted 0 needs --hints and --direct above 0: hints break into answers without tools")
    train, _, verify, box = _opened(settings, 1)
    problems = train[: settings.problems]
    tool_data.reinforced_rows(tool_data.Sampled(problems[0], (), ()))  # a format that cannot be written is known now
    folder = pathlib.Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    write, workers = open_writer(settings)
    sizes = tool_data.Sizes(settings.direct, settings.prompted, settings.hints, settings.calls, settings.most_calls)

    def one(k: int) -> tool_data.Sampled:
        rng = np.random.default_rng([settings.seed, k])
        return tool_data.sample(write, box, problems[k], _judge(settings, verify, problems[k]), rng, sizes)

    found = [x for x in _each(one, len(problems), workers) if x is not None]
    imitated = [row for x in found for row in tool_data.imitated_rows(x, box)]
    reinforced = [row for x in found for row in tool_data.reinforced_rows(x)]
    report = {
        "questions": len(found), "left_out": len(problems) - len(found),
        "kinds": dict(collections.Counter(x.kind for x in found)),
        "faults": dict(collections.Counter(why for x in found for why in x.faults)),
        "sft": len(imitated), "rl": len(reinforced),
    }  # fmt: skip
    for name, rows in (("sft.jsonl", imitated), ("rl.jsonl", reinforced)):
        _write(folder / name, rows)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _write(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def solve(settings: SolveSettings) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures of the held-out questions without aids and with them, and a line a question.

    Raises:
      UserError: for a source, a tool or a writer that does not serve.
    """
    _check(settings, {"debugs": 0, "backs": 0, "longest": 1})
    _, held, verify, box = _opened(settings, settings.problems)
    problems = held[: settings.problems]
    debugger, refiner = (_named(settings, role) for role in ("debugger", "refiner"))
    aids = tool_chains.Aids(
        None if debugger is None else tool_chains.make_debugger(debugger),
        None if refiner is None else tool_chains.make_refiner(refiner),
        debugs=settings.debugs, backs=settings.backs, longest=settings.longest,
    )  # fmt: skip
    write, workers = open_writer(settings)

    def one(k: int) -> dict[str, Any]:
        prompt = tool_chains.opened(tool_question.asked(problems[k], box))
        line: dict[str, Any] = {"prompt": problems[k].prompt}
        for name, help_ in (("plain", tool_chains.NO_AIDS), ("aided", aids)):
            chain = tool_chains.solve(write, box, prompt, calls=settings.calls, aids=help_)
            right = _judge(settings, verify, problems[k])(chain.answer)
            line[name] = {
                "right": right, "calls": len(chain.calls), "failed": chain.failed, "debugged": chain.debugged,
                "back": chain.back, "refined": chain.refined, "answer": chain.answer,
            }  # fmt: skip
        return line

    lines = [x for x in _each(one, len(problems), workers) if x is not None]
    if not lines:
        raise UserError("no question was answered; the lines above say why")
    figures = {
        f"{way}/{name}": float(np.mean([line[way][name] for line in lines]))
        for way in ("plain", "aided")
        for name in ("right", "calls", "failed", "debugged", "back", "refined")
    }
    return figures, lines


def cli(arguments: Sequence[str]) -> int:
    """Command line of ``rows`` and ``solve``: one clear line and exit code 2 for a mistake."""
    command, *words = arguments
    try:
        if command == "rows":
            settings = flags.read(RowSettings, words, prog=f"{PROG} rows")
            compile_cache.enable(True)
            report = make_rows(settings)
            print("\n".join(f"  {name}: {value}" for name, value in report.items()))
            print(f"  written: {settings.out}")
            return 0
        settings = flags.read(SolveSettings, words, prog=f"{PROG} solve")
        compile_cache.enable(True)
        figures, lines = solve(settings)
        print(f"{settings.data}: {len(lines)} held-out questions, means")
        print("\n".join(f"  {name:14s} {value:.4g}" for name, value in figures.items()))
        if settings.out:
            _write(pathlib.Path(settings.out), lines)
            print(f"  written: {settings.out}")
    except (UserError, DataError, RunStopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {error.filename}: {error.strerror}; choose another --out", file=sys.stderr)
        return 2
    return 0
