"""Problems of one's own, with worked solutions, in the place of the running sums of ``running_sums_task``.

A response is right where the verifier of the rows says so. The spurious cue of the sums is here the length of a
prompt: cued problems are those with a prompt not longer than the median, broken ones the longer. Values of prefixes
are sampled at four places of a response, evenly spaced, and stand for the tokens up to the next.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings, text_rows
from jaxrl_llm.data import formats
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.own_rows.rebound import Own
from jaxrl_llm.run import parts
from jaxrl_llm.types import Key, Params
from jaxrl_llm.verifiers.verdict import Verifier

CUTS = 4  # places of a response at which values of prefixes are sampled


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


def solved(settings: Any) -> list[Solved]:
    """The rows of ``--data``.

    Raises:
      UserError: for rows without a worked solution, or a source that cannot be read.
    """
    found = parts.read_rows(settings.data, layout=settings.format, bad_rows=settings.bad_rows)
    if without := sum(not row.solution for row in found):
        raise UserError(f"--data {settings.data}: {without} of {len(found)} rows have no worked solution, which this "
                        "experiment shows; give a column solution, or --format gsm8k or math")  # fmt: skip
    return [Solved(row.prompt, row.solution, row.solution, row.answer) for row in found]


def verifier_of(settings: Any) -> Verifier:
    """How answers are judged."""
    return parts.VERIFIERS[settings.verifier or formats.FORMATS[settings.format].verifier]


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
        answers = [rows.sources[int(k)].answer for k in np.asarray(numbers)]
        pool = _pool(verify)
        if pool is None:
            verdicts = [verify(answer, text) for answer, text in zip(answers, texts, strict=True)]
        else:
            verdicts = pool.judge(verify, answers, texts).verdicts
        return np.asarray([v.valid and v.value > 0.5 for v in verdicts], bool)

    def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
        shape = jax.ShapeDtypeStruct((prompts.shape[0],), jnp.bool_)
        return jax.pure_callback(judged, shape, number_of(prompts), responses, vmap_method="sequential")

    return right


def make(settings: Any, smoke: bool) -> Own:
    """The names of ``running_sums_task``, and of what is built on it, over the rows of the settings."""
    rows = text_rows.opened(settings, Settings, solved)
    right, number_of = make_right(rows, verifier_of(settings)), text_rows.numbers_of(rows)
    solutions = jnp.concatenate([rows.train.chosen, rows.heldout.chosen])
    lengths = np.asarray((jnp.concatenate([rows.train.prompts, rows.heldout.prompts]) != strings.PAD).sum(1))
    median = int(np.median(lengths))

    def draw_prompts(key: Array, n: int) -> Int[Array, "N P"]:
        table = rows.now().prompts
        return table[jax.random.randint(key, (n,), 0, table.shape[0], jnp.int32)]

    def solution(prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
        return solutions[number_of(prompts)]

    def cued(key: Array, n: int, share: float) -> Int[Array, "N P"]:
        """Problems of which ``share`` have a prompt that is not longer than the median."""
        table = rows.now().prompts
        short = jnp.sum((table != strings.PAD).astype(jnp.int32), axis=1) <= median
        wanted = jax.random.bernoulli(jax.random.fold_in(key, 1), share, (n, 1))
        # where a table has none of a kind, any row will do
        weight = jnp.where(short[None, :] == wanted, 0.0, -1e9)
        return table[jax.random.categorical(jax.random.fold_in(key, 2), weight, axis=1)]

    def draw_attempts(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
        prompts = draw_prompts(key, n)
        return prompts, solution(prompts)

    width = rows.train.chosen.shape[1]
    task = {
        "MODULUS": 1, "PROMPT_TOKENS": rows.train.prompts.shape[1], "RESPONSE_TOKENS": width,
        "VOCABULARY": rows.model.config.padded_vocab_size, "draw_prompts": draw_prompts, "solution": solution,
        "right": right, "cued": cued, "draw_attempts": draw_attempts,
    }  # fmt: skip
    names = {
        "experiments.parts.running_sums_task": task,
        "experiments.parts.strings": {"make_world": text_rows.world_maker(rows, settings)},
        "experiments.parts.running_sums": {"prefix_values": _prefix_values(rows, settings, right)},
    }
    return Own(names, text_rows.finish(rows))


def _prefix_values(rows: text_rows.Rows, settings: Any, right: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    width, prompt = rows.train.chosen.shape[1], rows.train.prompts.shape[1]
    world = text_rows.world_maker(rows, settings)(0, prompt, width)
    places = sorted({width * k // CUTS for k in range(CUTS)})

    def prefix_values(
        params: Params, prompts: Array, responses: Array, key: Key, *, samples: int = 4
    ) -> tuple[Float[Array, "N S"], Array]:
        """``prefix_values`` of ``running_sums`` with rollouts from ``CUTS`` prefixes of a response."""
        values, drawn = [], []
        many = jnp.repeat(prompts, samples, axis=0)
        for k, (place, end) in enumerate(zip(places, [*places[1:], width], strict=True)):
            # a prefix that has ended goes on with end tokens, which count no more
            prefix = jnp.concatenate([prompts, responses[:, :place]], axis=1)
            rest = world._replace(prompt_tokens=prompt + place, response_tokens=width - place)
            found = strings.sample(rest, params, prefix, jax.random.fold_in(key, k), samples=samples)
            whole = jnp.concatenate([jnp.repeat(responses[:, :place], samples, axis=0), found], axis=1)
            hits = right(many, whole).reshape(-1, samples)
            values += [jnp.mean(hits.astype(jnp.float32), axis=1)] * (end - place)
            drawn += [whole.reshape(prompts.shape[0], samples, -1)] * (end - place)
        values.append(right(prompts, responses).astype(jnp.float32))
        return jnp.stack(values, axis=1), jnp.stack(drawn, axis=1)

    return prefix_values
