"""A model of language behind an address that rates responses to prompts of one's own from 1 to 10."""

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.tools import endpoints

LEAST, MOST = 1.0, 10.0
ASK = (
    "How good is the response to the prompt below? Judge whether it does what is asked, is right, safe and well "
    "written. Think in a few sentences if you have to, and end with one number from 1 (poor) to 10 (excellent).\n\n"
    "Prompt:\n{}\n\nResponse:\n{}"
)
_NUMBER = re.compile(r"(?<![\d.])(10|[1-9])(?:\.0+)?(?:\s*/\s*10)?(?![\d/]|\.\d)")


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings):
    """Flags of a judge behind an address."""

    rater: str = ""  # address of the model that rates responses, https://HOST/v1
    rater_model: str = ""  # its name there
    endpoint_temperature: float = 0.0  # of its ratings


def rating(reply: str) -> float | None:
    """The last whole number from 1 to 10 of a reply, with or without ``/10`` behind it.

    >>> [rating(text) for text in ("Polite, 2 faults: 7/10.", "**8**", "in 2024 or 11 it was 9.5", "none")]
    [7.0, 8.0, None, None]
    """
    found = _NUMBER.findall(reply)
    return float(found[-1]) if found else None


def make(settings: Any) -> Callable[[Sequence[tuple[str, str]]], list[float]]:
    """``ratings([(prompt, response), ...])`` of the model behind ``settings.rater``, which has rated one response.

    Equal questions are asked once. A response about which nothing is said that can be read gets the middle, 5.5; that
    is told once.

    Raises:
      UserError: without a name, and where the model rates nothing; RunStopped: where nothing answers.
    """
    chat = endpoints.open_judge(
        endpoints.settings_of(settings),
        "--rater", settings.rater, settings.rater_model, question=ASK.format("Say hello.", "Hello!"),
        read=rating, wants="a number from 1 to 10",
    )  # fmt: skip
    told: list[str] = []

    def ratings(cases: Sequence[tuple[str, str]]) -> list[float]:
        different = sorted(set(cases))
        questions = [[{"role": "user", "content": ASK.format(*case)}] for case in different]
        replies = endpoints.ask_all(chat, questions, workers=settings.endpoint_concurrency)
        found = {case: rating(said or "") for case, said in zip(different, replies, strict=True)}
        unread = [said for case, said in zip(different, replies, strict=True) if found[case] is None]
        if unread and not told:
            told.append(settings.rater)
            text = f"note: --rater {settings.rater} said {(unread[0] or 'nothing')[:80]!r}"
            print(f"{text}, which is no rating and counts as 5.5", file=sys.stderr, flush=True)
        return [(LEAST + MOST) / 2 if found[case] is None else found[case] for case in cases]

    return ratings
