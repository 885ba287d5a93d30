"""Problems of one's own with worked solutions: what the worlds of problems are opened from.

A response is right where the verifier of the rows says so. Difficulty is the length of the solution; the spurious cue
that worlds of sums have is here the length of a prompt.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from experiments.parts import strings, text_rows
from jaxrl_llm.errors import UserError
from jaxrl_llm.run import parts
from jaxrl_llm.verifiers import answers
from jaxrl_llm.verifiers.verdict import Verifier

KINDS = 3  # of difficulty


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of rows of one's own: problems with answers and worked solutions."""

    data: str = ""  # FILE.jsonl, FILE.json, FILE.csv, FILE.parquet, FOLDER[:SPLIT], tfds:NAME; empty: embedded
    format: parts.Format = "plain"  # the columns of a file; see data.formats
    verifier: parts.VerifierName = ""  # how answers are compared; empty: that of the format
    chat: bool = False  # prompts become a user's message, by the model's chat template
    bad_rows: int = 0  # unreadable rows of a file that may be left out
    max_prompt_tokens: int = 512  # rows with a longer prompt are left out
    max_new_tokens: int = 256  # columns of a response; rows with a longer solution are left out


class Solved(NamedTuple):
    """A problem as ``text_rows`` wants it: the solution stands for both responses."""

    prompt: Any
    chosen: str
    rejected: str
    answer: Any
    level: int


def with_answer(solution: str, answer: Any) -> str:
    r"""A worked solution that says its answer at the end: formats keep work and answer apart.

    >>> with_answer("3+1=4", {"value": "4"}), with_answer(r"so \boxed{4}", {"value": "4"})
    ('3+1=4\n\\boxed{4}', 'so \\boxed{4}')
    """
    value = answer.get("value") if isinstance(answer, dict) else None
    marks = answers.final_part(solution) != solution.strip()
    return solution if marks or not isinstance(value, str) else f"{solution}\n\\boxed{{{value}}}"


def solved(settings: Any) -> list[Solved]:
    """The rows of ``--data``.

    Raises:
      UserError: for rows without a worked solution, or a source that cannot be read.
    """
    found = parts.read_rows(settings.data, layout=settings.format, bad_rows=settings.bad_rows)
    if without := sum(not row.solution for row in found):
        raise UserError(f"--data {settings.data}: {without} of {len(found)} rows have no worked solution, which this "
                        "experiment shows; give a column solution, or --format gsm8k or math")  # fmt: skip
    told = [with_answer(row.solution, row.answer) for row in found]
    return [Solved(row.prompt, text, text, row.answer, row.level) for row, text in zip(found, told, strict=True)]


def verifier_of(settings: Any) -> Verifier:
    """How answers are judged."""
    return parts.verifier_of(settings.format, settings.verifier)


@lru_cache(maxsize=2)
def _pool(verify: Verifier) -> Any:
    return parts.make_pool(verify)


def make_right(rows: text_rows.Rows, verify: Verifier) -> Callable[[Array, Array], Array]:
    """``right(prompts, responses) -> [N]`` by the verifier, also from inside a compiled program."""
    number_of, tokenizer = text_rows.numbers_of(rows), rows.model.tokenizer
    ends = np.asarray(tokenizer.eos_ids)

    def judged(numbers: Any, responses: Any) -> np.ndarray:
        texts = []
        for response in np.asarray(responses):
            stop = np.flatnonzero(np.isin(response, ends))
            texts.append(tokenizer.decode(response[: stop[0] if len(stop) else None].tolist()))
        known = [rows.sources[int(k)].answer for k in np.asarray(numbers)]
        pool = _pool(verify)
        if pool is None:
            verdicts = [verify(answer, text) for answer, text in zip(known, texts, strict=True)]
        else:
            verdicts = pool.judge(verify, known, texts).verdicts
        return np.asarray([v.valid and v.value > 0.5 for v in verdicts], bool)

    def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
        shape = jax.ShapeDtypeStruct((prompts.shape[0],), jnp.bool_)
        return jax.pure_callback(judged, shape, number_of(prompts), responses, vmap_method="sequential")

    return right


class Solutions(NamedTuple):
    """Problems of one's own with their worked solutions, and how they are drawn.

    ``draw(key, n) -> prompts``; ``of_kinds(key, n, kinds)`` draws by the length of the solution, 0 the longest third
    and 2 the shortest; ``cued(key, n, cue, pays)``: of a share ``cue`` those with a prompt not longer than the median
    in ``pays``, else the longer ones. ``kind(prompts) -> [N]``.
    """

    rows: text_rows.Rows
    world: strings.World
    right: Callable[[Array, Array], Array]
    solution: Callable[[Array], Array]
    draw: Callable[..., Array]
    of_kinds: Callable[..., Array]
    cued: Callable[..., Array]
    kind: Callable[[Array], Array]


def opened(settings: Any) -> Solutions:
    """The problems of the settings."""
    rows = text_rows.opened(settings, Settings, solved)
    end, number_of = rows.model.tokenizer.eos_ids[0], text_rows.numbers_of(rows)
    solutions = jnp.concatenate([rows.train.chosen, rows.heldout.chosen])
    lengths = jnp.sum((solutions != end).astype(jnp.int32), axis=1)
    # thirds of equal size, also where lengths are alike
    place = jnp.argsort(jnp.argsort(-lengths, stable=True))
    kinds = (place * KINDS // lengths.shape[0]).astype(jnp.int32)
    asked = (jnp.concatenate([rows.train.prompts, rows.heldout.prompts]) != strings.PAD).astype(jnp.int32)
    median = int(np.median(np.asarray(asked.sum(1))))

    def kind(prompts: Int[Array, "N P"]) -> Int[Array, " N"]:
        return kinds[number_of(prompts)]

    def draw(key: Array, n: int) -> Int[Array, "N P"]:
        table = rows.now().prompts
        return table[jax.random.randint(key, (n,), 0, table.shape[0], jnp.int32)]

    def weighed(key: Array, fits: Bool[Array, "N R"]) -> Int[Array, "N P"]:
        # where a table has none of a kind, any row will do
        return rows.now().prompts[jax.random.categorical(key, jnp.where(fits, 0.0, -1e9), axis=1)]

    def of_kinds(key: Array, n: int, wanted: tuple[int, ...]) -> Int[Array, "N P"]:
        chosen = jax.random.randint(jax.random.fold_in(key, 0), (n, 1), 0, len(wanted), jnp.int32)
        which = jnp.asarray(wanted, jnp.int32)[chosen]
        return weighed(jax.random.fold_in(key, 1), kind(rows.now().prompts)[None, :] == which)

    def cued(key: Array, n: int, *, cue: float, pays: float) -> Int[Array, "N P"]:
        keys = jax.random.split(key, 3)
        short = jnp.sum((rows.now().prompts != strings.PAD).astype(jnp.int32), axis=1) <= median
        any_row = ~jax.random.bernoulli(keys[0], cue, (n, 1))
        return weighed(keys[2], any_row | (short[None, :] == jax.random.bernoulli(keys[1], pays, (n, 1))))

    world = text_rows.world_maker(rows, settings)(0, rows.train.prompts.shape[1], rows.train.chosen.shape[1])
    return Solutions(
        rows, world, make_right(rows, verifier_of(settings)), lambda prompts: solutions[number_of(prompts)], draw,
        of_kinds, cued, kind,
    )  # fmt: skip
