"""Toy translation between two synthetic languages: other words, adjective after the noun, verb at the end.

``tr the red cat sees a dog=>`` gives ``lo miu rav un kan dir``.
"""

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (1, 2, 3)  # adjectives: none, one, two
ARTICLES = {"the": "lo", "a": "un"}
NOUNS = {"cat": "miu", "dog": "kan", "bird": "pio", "man": "hom", "fish": "pes"}
ADJECTIVES = {"red": "rav", "big": "gro", "old": "vet", "sad": "tri"}
VERBS = {"sees": "dir", "eats": "mag", "likes": "ama", "finds": "tro"}


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a sentence with ``level - 1`` adjectives."""
    if level not in LEVELS:
        raise ValueError(f"level={level} is not one of {LEVELS}")

    def pick(words: dict[str, str]) -> str:
        return list(words)[rng.integers(len(words))]

    adjectives = [pick(ADJECTIVES) if level >= 2 else "", pick(ADJECTIVES) if level == 3 else ""]
    if level == 2 and rng.random() < 0.5:
        adjectives.reverse()
    source, target = [], []
    for k, adjective in enumerate(adjectives):
        article, noun = pick(ARTICLES), pick(NOUNS)
        source += [article, adjective, noun]
        target += [ARTICLES[article], NOUNS[noun], ADJECTIVES.get(adjective, "")]
        if k == 0:
            verb = pick(VERBS)
            source.append(verb)
    target.append(VERBS[verb])
    prompt = f"tr {' '.join(w for w in source if w)}=>"
    solution = " ".join(w for w in target if w)
    return Problem("translation", prompt, solution, {"value": solution}, level, prompt)
