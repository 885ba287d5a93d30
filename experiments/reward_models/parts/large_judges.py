"""A large judge behind an address: a model of language that says whether an answer is the reference, asked in words.

Its verdicts are those of ``large_judge`` and the log that small judges are distilled from; the truth of measurements
stays the verifier of the rows. An answer about which it says nothing that can be read does not pass.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from experiments.reward_models.parts import answer_judges
from experiments.reward_models.parts.free_answers import FreeBench
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.tools import endpoints

ASK = (
    "A problem, its reference answer and the final answer of a student stand below. Does the student's answer mean the "
    "same as the reference? Other forms of the same value, name or statement are the same. Do not solve the problem. "
    "Think in a few sentences if you have to, and end with one word: YES or NO.\n\n"
    "Problem:\n{}\n\nReference answer: {}\nStudent's answer: {}"
)
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, recipes.OnlineSettings):
    """Flags of experiments whose judges may be a model of language."""

    large_judge: str = ""  # address of the model that compares answers, https://HOST/v1; empty: the rows' verifier
    large_judge_model: str = ""  # its name there
    endpoint_temperature: float = 0.0  # of its verdicts


def verdict(reply: str) -> bool | None:
    """The last yes or no of a reply.

    >>> [verdict(text) for text in ("No units, but the same. **YES**", "no", "It differs.")]
    [True, False, None]
    """
    found = _WORD.findall(reply)
    return found[-1].lower() == "yes" if found else None


def open_judge(settings: Settings, free: FreeBench) -> endpoints.Chat | None:
    """The model behind ``--large-judge``, which has answered once; None where there is no such flag.

    Raises:
      UserError: without a name, for generated tasks, whose answers are no text, and where the model says neither yes
        nor no; RunStopped: where nothing answers.
    """
    if not settings.large_judge:
        return None
    if settings.large_judge_model and free.words is None:
        asked = f"--large-judge {settings.large_judge} compares texts"
        raise UserError(f"{asked}, and --data {settings.data} is generated; give rows of your own")
    return endpoints.open_judge(
        settings, "--large-judge", settings.large_judge, settings.large_judge_model,
        question=ASK.format("How much is 1 + 1?", "2", "two"), read=verdict, wants="YES or NO",
    )  # fmt: skip


def by_words(free: FreeBench, settings: Settings) -> FreeBench:
    """The bench whose large judge is the model behind ``--large-judge``; without the flag the bench as it is."""
    chat = open_judge(settings, free)
    if chat is None:
        return free

    def judged(value: Any, numbers: Any, answered: Any) -> np.ndarray:
        cases = free.words(np.asarray(value), np.asarray(numbers))
        asked = sorted({case for case, yes in zip(cases, np.asarray(answered), strict=True) if yes})
        questions = [[{"role": "user", "content": ASK.format(*case)}] for case in asked]
        replies = endpoints.ask_all(chat, questions, workers=settings.endpoint_concurrency)
        passed = {case for case, said in zip(asked, replies, strict=True) if verdict(said or "")}
        return np.asarray([yes and case in passed for case, yes in zip(cases, np.asarray(answered), strict=True)], bool)

    def judge(value: Array, answered: Bool[Array, " B"], answers: dict[str, Array]) -> Bool[Array, " B"]:
        shape = jax.ShapeDtypeStruct((value.shape[0],), jnp.bool_)
        right = jax.pure_callback(judged, shape, value, answers["row"], answered, vmap_method="sequential")
        return answered & right

    log = free.logged(judge)
    return free._replace(
        log=log._replace(draw=lambda key, n, *, error_rate: log.draw(key, n, error_rate=0.0)), large=judge
    )


def large(settings: Settings, free: FreeBench, *, error_rate: float) -> answer_judges.Verifier:
    """The large judge itself: the model behind an address, else the truth but for a share of answers."""

    def asked(value: Array, answered: Bool[Array, " B"], answers: dict[str, Array]) -> Float[Array, " B"]:
        return free.large(value, answered, answers).astype(jnp.float32)

    truth = answer_judges.large_judge(error_rate, equivalent=free.equivalent, marked=free.marked)
    return answer_judges.without_fitting(truth if free.large is None else asked)
