"""Rows of the supervised commands: texts and preferences of a file, or generated ones, as token arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxrl_llm.data import chat, formats
from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.stream import make_stream
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.run import options, parts
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.offline import Offline

GENERATED = "chain"  # what a command trains on without a file
# formats whose answer is no response to the prompt: nothing, a target to reach, the name of a function
UNANSWERED = ("prompts", "countdown", "humaneval")
PairFormat = Literal["plain", "hh-rlhf", "ultrafeedback", "tldr", "scores", "unpaired"]


@dataclasses.dataclass(frozen=True)
class RowSettings(recipes.Settings):
    """What the supervised commands share."""

    # chain (generated), FILE.jsonl, FILE.json, FILE.csv, FILE.parquet, FOLDER[:SPLIT] saved by datasets, tfds:NAME;
    # several of them in shares: SOURCE@WEIGHT,SOURCE@WEIGHT
    data: str = GENERATED
    # host: minibatches are read step by step, by Grain, for tables larger than the device
    rows_in: Literal["device", "host"] = "device"
    chat: bool = False  # prompts become a user's message, by the model's chat template
    # QLoRA: with --lora the frozen matrices of the layers are kept in few bits, 64 inputs to a scale
    lora_base: options.BaseName = ""
    steps: int = 200
    epochs: float = 0.0  # passes over the rows, in the place of --steps; 0: --steps
    learning_rate: float = 1e-5
    rows_per_step: int = 32
    max_new_tokens: int = 512  # columns for a response, or for a whole conversation; longer ones are refused
    bad_rows: int = 0  # unreadable rows of a file that may be left out
    eval_rows: int = 512  # held out by a hash of the prompt, at most a tenth
    train_rows: int = 4096  # of generated rows
    eval_every: int = 50
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # of the whole step's gradient; 0: no bound
    warmup_steps: int = 10
    schedule: Literal["cosine", "linear", "constant"] = "cosine"


class Text(NamedTuple):
    """A response to a prompt."""

    prompt: str | list[dict[str, str]]
    response: str


class Dialogue(NamedTuple):
    """A conversation, all of whose answers are imitated."""

    messages: list[dict[str, str]]

    @property
    def prompt(self) -> str:
        """By which conversations are held out."""
        return str(self.messages)


class Judged(NamedTuple):
    """A response to a prompt, and whether it is desirable."""

    prompt: str | list[dict[str, str]]
    response: str
    desirable: bool


def held_out(rows: Sequence[Any], most: int, data: str) -> tuple[list[Any], list[Any]]:
    """Training rows and held-out ones: a tenth of the prompts by their hash, at most ``most``, each object once.

    Raises:
      UserError: where nothing is left of one of them.
    """
    kept, held = problem_tables.hash_split(list(rows), lambda row: str(row.prompt), data, give="distinct prompts")
    return kept, problem_tables.evenly(held, most)


def held_out_of_both(rows: Sequence[Judged], most: int, data: str) -> tuple[list[Judged], list[Judged]]:
    """As ``held_out``, with as many desirable responses held out as others, as far as there are both.

    A measurement compares the two kinds; where one of them is missing, that is said.

    Raises:
      UserError: as ``held_out``.
    """
    kept, held = held_out(rows, len(rows), data)
    kinds = [[row for row in held if row.desirable is kind] for kind in (True, False)]
    if not all(kinds):
        label = "true" if kinds[1] else "false"
        print(f"{data}: none of {len(held)} held-out responses has label {label}: eval/accuracy and eval/margin, which "
              "compare both kinds, are undefined", flush=True)  # fmt: skip
        return kept, problem_tables.evenly(held, most)
    each = max(1, min(most // 2, *map(len, kinds)))
    return kept, [row for kind in kinds for row in problem_tables.evenly(kind, each)]


@lru_cache(maxsize=2)
def generated(count: int) -> tuple[Problem, ...]:
    """Arithmetic chains with worked solutions."""
    held = max(8, count // 10)
    return tuple(
        problem
        for split, n in (("train", count - held), ("heldout", held))
        for problem in problem_tables.make_split(chain, split=split, n=n, seed=0)
    )


def of_margins(margins: np.ndarray) -> dict[str, float]:
    """The share of held-out pairs in the right order, ties half (before training all may be ties), and the mean margin.

    Both are NaN where there are no pairs.

    >>> {name: float(x) for name, x in of_margins(np.array([2.0, 0.0, -0.5])).items()}
    {'eval/accuracy': 0.5, 'eval/margin': 0.5}
    """
    if not margins.size:
        return {"eval/accuracy": math.nan, "eval/margin": math.nan}
    right = np.where(margins == 0, 0.5, margins > 0)
    return {"eval/accuracy": float(right.mean()), "eval/margin": float(margins.mean())}


def each_once(found: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
    """``make`` of every row: one that a mixture repeats for its share stays one object, by which it is held out once.

    >>> one, other = ["a"], ["a"]
    >>> made = each_once([one, one, other], tuple)
    >>> made[0] is made[1], made[0] is made[2]
    (True, False)
    """
    made = {key: make(row) for key, row in {id(row): row for row in found}.items()}
    return [made[id(row)] for row in found]


def texts(settings: Any, format_name: str) -> list[Text]:
    """Prompts with the response to imitate: a row's worked solution, or its answer where it has none.

    Of ``unpaired`` rows the responses that ``settings.keep`` names, of settings without it the right ones.

    Raises:
      UserError: for a source that cannot be read, without a response to keep, or rows without a response.
    """
    if format_name == "unpaired":
        found = judged(settings, format_name)
        every = getattr(settings, "keep", "right") == "all"  # read where all rows are right, too
        right = [row for row in found if every or row.desirable]
        kept = each_once(right, lambda row: Text(row.prompt, row.response))
        if not kept:
            raise UserError(f"--data {settings.data}: none of {len(found)} responses has label true; give others, or "
                            "--keep all")  # fmt: skip
        return kept
    if settings.data == GENERATED:
        parts.check_generated(GENERATED, layout=format_name, bad_rows=settings.bad_rows)
        return [Text(p.prompt, p.solution) for p in generated(settings.train_rows)]
    problems, bad = formats.read_problems(settings.data, layout=format_name, bad_rows=settings.bad_rows)
    _said(settings.data, bad)
    if without := [p for p in problems if not p.solution] if format_name in UNANSWERED else []:
        raise UserError(f"--data {settings.data}: {len(without)} of {len(problems)} rows of --format {format_name} "
                        "have no response to imitate; give rows with one, for example --format plain with a column "
                        "solution")  # fmt: skip
    return each_once(problems, lambda p: Text(p.prompt, p.solution or _one(p.answer["value"])))


def _one(value: Any) -> str:
    return str(value[0] if isinstance(value, list | tuple) and value else value)


def _said(data: str, bad: Sequence[Any]) -> None:
    for row in bad[:10]:
        print(f"{data}: left out {row.where}: {row.reason}", flush=True)


def pairs(settings: Any, format_name: str) -> list[formats.Pair]:
    """Preference pairs: of a file, or a right solution before the one of another problem.

    Raises:
      UserError: for a source that cannot be read.
    """
    if settings.data == GENERATED:
        parts.check_generated(GENERATED, layout=format_name, bad_rows=settings.bad_rows)
        problems = generated(settings.train_rows)
        others = [*problems[1:], problems[0]]
        return [
            formats.Pair(p.prompt, p.solution, q.solution, 0.0)
            for p, q in zip(problems, others, strict=True)
            if p.solution != q.solution
        ]
    found, bad = formats.read_pairs(settings.data, layout=format_name, bad_rows=settings.bad_rows)
    _said(settings.data, bad)
    if format_name == "unpaired":  # whose pairs are made of rows that a mixture repeats: equal ones are one
        one: dict[str, formats.Pair] = {}
        return [one.setdefault(repr(pair), pair) for pair in found]
    if format_name != "hh-rlhf" or not settings.chat:
        return found

    def in_turns(pair: formats.Pair) -> formats.Pair:
        said = formats.hh_messages(pair.prompt)
        return formats.Pair(said, pair.chosen.strip(), pair.rejected.strip(), pair.margin)

    return each_once(found, in_turns)


def judged(settings: Any, format_name: str) -> list[Judged]:
    """Single responses with a label: of a file, or both halves of ``pairs``.

    Raises:
      UserError: for a source that cannot be read.
    """
    if format_name != "unpaired" or settings.data == GENERATED:
        both = pairs(settings, format_name)
        halves = each_once(both, lambda p: (Judged(p.prompt, p.chosen, True), Judged(p.prompt, p.rejected, False)))
        return [half for each in halves for half in each]
    found, bad = formats.read_judged(settings.data, bad_rows=settings.bad_rows)
    _said(settings.data, bad)
    return each_once(found, lambda row: Judged(*row))


def encoded(model: parts.Model, rows: Sequence[Any], settings: Any, *fields: str) -> tuple[SupervisedRows, ...]:
    """For every field of the rows: prompts with that response, all of one width; NumPy's with ``--rows-in host``.

    Raises:
      UserError: for a response or a prompt that does not fit.
    """
    if settings.rows_in == "host":
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, _encoded(model, rows, settings, *fields))
    return _encoded(model, rows, settings, *fields)


def fed(method: Offline, table: Any, settings: Any) -> Offline:
    """A method of minibatches of ``table``: drawn on the device, or read on the host and placed step by step.

    Either way every seed has an order of its own.

    Args:
      table: a tree with the same number of rows everywhere, NumPy's where rows are on the host.
    """
    if settings.rows_in == "device":
        return method
    size, count = method.rows_per_step, len(jax.tree.leaves(table)[0])
    first = jax.tree.map(lambda x: jnp.asarray(x[:size]), table)

    def stream(seed: int) -> Any:
        return make_stream(
            range(count),
            lambda row: jax.tree.map(lambda x: x[row], table),
            batch=size,
            seed=seed,
            process=(jax.process_index(), jax.process_count()),
        )

    return method._replace(rows=lambda extras: first, stream=stream)


def _encoded(model: parts.Model, rows: Sequence[Any], settings: Any, *fields: str) -> tuple[SupervisedRows, ...]:
    asked = [Problem("rows", row.prompt, "", {}, 0, str(k)) for k, row in enumerate(rows)]
    table = problem_tables.encode_problems(
        model.tokenizer, asked, answers=problem_tables.no_answers, chat=settings.chat
    )
    made = []
    longest = 0
    for field in fields:
        responses = [getattr(row, field) for row in rows]
        # no response has more columns than the model: a larger limit reserves no memory
        width = min(settings.max_new_tokens, model.config.max_positions)
        prompts = [row.prompt for row in rows]
        tokens, valid = encode_responses(model.tokenizer, responses, width=width, prompts=prompts, chat=settings.chat)
        longest = max(longest, int(valid.sum(1).max()))
        made.append((tokens, valid))
    columns = table.tokens.shape[1] + longest
    if columns > model.config.max_positions:
        raise UserError(f"prompt and response of {columns} tokens exceed the model's context of "
                        f"{model.config.max_positions}; drop the longest rows")  # fmt: skip
    return tuple(
        supervised.joined(table.tokens, table.valid, jnp.asarray(t[:, :longest]), jnp.asarray(v[:, :longest]))
        for t, v in made
    )


def dialogues(settings: Any) -> list[Dialogue]:
    """The conversations of a file.

    Raises:
      UserError: for a source that cannot be read, or for none.
    """
    if settings.data == GENERATED:
        raise UserError(f"--format messages: --data {GENERATED} holds no conversations; give --data FILE")
    found, bad = formats.read_conversations(settings.data, bad_rows=settings.bad_rows)
    _said(settings.data, bad)
    return each_once(found, Dialogue)


def encoded_dialogues(
    model: parts.Model, kept: Sequence[Dialogue], held: Sequence[Dialogue], settings: Any
) -> tuple[SupervisedRows, SupervisedRows]:
    """Conversations as rows of one width, ``mask`` true on what the assistant said; see ``data.chat.imitated``.

    Raises:
      UserError: for a conversation that does not fit, or a model without a chat template.
    """
    tokenizer, limit = model.tokenizer, min(settings.max_new_tokens, model.config.max_positions)
    both = [[row for one in some for row in chat.imitated(tokenizer, one.messages)] for some in (kept, held)]
    width = max(len(ids) for some in both for ids, _ in some)
    if width > limit:
        raise UserError(f"a conversation has {width} tokens, the limit is {limit}; raise --max-new-tokens, up to the "
                        f"model's {model.config.max_positions}, or drop it")  # fmt: skip

    train, test = (supervised.filled_up(some, width=width, pad_id=tokenizer.pad_id) for some in both)
    return (train, test) if settings.rows_in == "host" else jax.tree.map(jnp.asarray, (train, test))


def labels(rows: Sequence[Judged]) -> Bool[Array, " N"]:
    """``desirable`` of every row."""
    return jnp.asarray(np.asarray([row.desirable for row in rows], bool))
