"""An example of experts, tasks and a metric of one's own, in plain Python over short texts.

``--experts experiments.agents.parts.example_experts:experts`` names the table, ``--metrics`` of ``metrics`` its metric.
The tasks (``--data example``, or ``rows()`` written to a file) want German or misspelt reports translated, corrected,
cut down to their main sentence, told by topic, or counted: chains of one to three of the five experts.
"""

import re
from collections import Counter
from typing import Any

GERMAN = {
    "die": "the", "der": "the", "ein": "a", "und": "and", "in": "in", "ist": "is", "katze": "cat", "hund": "dog",
    "tier": "animal", "spieler": "player", "ball": "ball", "tor": "goal", "regen": "rain", "sonne": "sun",
    "wolke": "cloud", "schläft": "sleeps", "läuft": "runs", "trifft": "hits", "scheint": "shines", "fällt": "falls",
    "garten": "garden", "heute": "today", "warm": "warm", "klein": "small", "schnell": "quick",
}  # fmt: skip
MISSPELT = {"the": "teh", "cat": "cta", "dog": "dgo", "animal": "aminal", "player": "palyer", "ball": "blal",
            "goal": "gaol", "rain": "rian", "sun": "snu", "cloud": "colud", "garden": "gadren"}  # fmt: skip
TOPICS = {"animals": {"cat", "dog", "animal"}, "sport": {"player", "ball", "goal"}, "weather": {"rain", "sun", "cloud"}}
REPORTS = (  # in German, three sentences each
    "die katze schläft. der hund und die katze ist ein tier. der garten ist klein.",
    "der hund läuft in der garten. die katze schläft heute. ein tier ist klein und warm.",
    "der spieler trifft der ball. der ball trifft der tor und der spieler läuft. heute ist warm.",
    "ein spieler ist schnell. der spieler und ein ball ist in der tor. der ball fällt.",
    "der regen fällt heute. die wolke und der regen ist warm. die sonne scheint.",
    "die sonne scheint in der garten. die wolke ist klein. die sonne und ein wolke ist warm heute.",
)
WORDINGS = (
    "{}.", "Please {}.", "Could you {}?", "I need you to {}.", "Your task: {}.", "We want to {}.", "Help me to {}.",
    "It is time to {}.",
)  # fmt: skip
ASKED = (  # what is asked, the kind of the input and of the target, the metric, and the plan
    ("put the German report into English", "german", "english", "text", ("translate",)),
    ("say what the German report is about", "german", "topic", "class", ("translate", "classify")),
    ("give the main sentence of the German report in English", "german", "english", "text", ("translate", "summarise")),
    ("count the English words of the German report", "german", "number", "near", ("translate", "count")),
    ("count the English words of the German report's main sentence", "german", "number", "near",
     ("translate", "summarise", "count")),
    ("spell the draft right", "draft", "english", "text", ("correct",)),
    ("say what the draft is about", "draft", "topic", "class", ("correct", "classify")),
    ("give the main sentence of the draft, spelled right", "draft", "english", "text", ("correct", "summarise")),
    ("count the words of the draft", "draft", "number", "near", ("correct", "count")),
    ("count the words of the draft's main sentence", "draft", "number", "near", ("correct", "summarise", "count")),
)  # fmt: skip


def _replaced(text: str, table: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: table.get(word[0], word[0]), text)


def translate(text: str) -> str:
    """German into English, word by word.

    >>> translate("die katze schläft.")
    'the cat sleeps.'
    """
    return _replaced(text, GERMAN)


def correct(text: str) -> str:
    """Words spelled right.

    >>> correct("teh cta sleeps.")
    'the cat sleeps.'
    """
    return _replaced(text, {wrong: right for right, wrong in MISSPELT.items()})


def summarise(text: str) -> str:
    """The sentence whose words come most often in the whole text.

    >>> summarise("the sun shines. the sun and a cloud. it rains.")
    'the sun and a cloud.'
    """
    sentences = [part.strip() for part in text.split(".") if part.strip()]
    seen = Counter(text.replace(".", "").split())
    return max(sentences, key=lambda sentence: sum(seen[word] for word in sentence.split())) + "."


def classify(text: str) -> str:
    """The topic of most of its words.

    >>> classify("the cat and the dog in the rain.")
    'animals'
    """
    words = text.replace(".", "").split()
    return max(TOPICS, key=lambda topic: sum(word in TOPICS[topic] for word in words))


def count(text: str) -> int:
    """Words of a text.

    >>> count("the cat sleeps.")
    3
    """
    return len(text.split())


def near(given: Any, target: Any) -> float:
    """1 for the same number, less for one that is further away.

    >>> near(3, 3), near(4, 3)
    (1.0, 0.5)
    """
    return 1.0 / (1.0 + abs(float(given) - float(target)))


def experts() -> dict[str, tuple[str, str, Any]]:
    """Names, kinds and functions."""
    return {
        "translate": ("german", "english", translate),
        "correct": ("draft", "english", correct),
        "summarise": ("english", "english", summarise),
        "classify": ("english", "topic", classify),
        "count": ("english", "number", count),
    }


def metrics() -> dict[str, Any]:
    """Beside the words in common and the same class."""
    return {"near": near}


def rows() -> list[dict[str, Any]]:
    """Every wording of what is asked, on two reports each, with the plan and what it gives."""
    table, found = experts(), []
    for k, (asked, takes, gives, metric, plan) in enumerate(ASKED):
        for j, wording in enumerate(WORDINGS):
            for report in (REPORTS[(k + j) % len(REPORTS)], REPORTS[(k + j + 2) % len(REPORTS)]):
                value = first = report if takes == "german" else _replaced(translate(report), MISSPELT)
                for name in plan:
                    value = table[name][2](value)
                said = wording.format(asked)
                found.append({
                    "instruction": said[0].upper() + said[1:], "input": first, "target": value, "metric": metric,
                    "input_kind": takes, "target_kind": gives, "plan": list(plan),
                })  # fmt: skip
    return found
