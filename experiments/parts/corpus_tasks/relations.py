"""Relational composition: ``rel a<b,c<a?b,c=>`` asks how b stands to c after chaining; answer ``#>`` or ``#<``."""

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (1, 2, 3, 4)  # links between the two items asked for
NAMES = "abcdefgh"


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a chain ``x0 < x1 < ... < x_level`` told in random order and direction; asks about its two ends."""
    if level not in LEVELS:
        raise ValueError(f"level={level} links is not one of {LEVELS}")
    items = [NAMES[i] for i in rng.permutation(len(NAMES))[: level + 1]]
    facts = []
    for low, high in zip(items, items[1:], strict=False):
        facts.append(f"{low}<{high}" if rng.random() < 0.5 else f"{high}>{low}")
    facts = [facts[i] for i in rng.permutation(len(facts))]
    ends, sign = ((items[0], items[-1]), "<") if rng.random() < 0.5 else ((items[-1], items[0]), ">")
    pad = "<".join(items)
    prompt = f"rel {','.join(facts)}?{ends[0]},{ends[1]}=>"
    return Problem("relations", prompt, f"{pad}#{sign}", {"value": sign}, level, prompt)
