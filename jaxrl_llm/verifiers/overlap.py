"""Answers of several words, judged by the words they share with the wanted one: F1 of text, and of token ids."""

import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.data.boxed import last_boxed
from jaxrl_llm.verifiers.answers import MAX_CHARACTERS, final_part
from jaxrl_llm.verifiers.countdown import tagged
from jaxrl_llm.verifiers.verdict import Verdict

_ARTICLES = ("a", "an", "the")
_CLOSED = ("yes", "no", "noanswer")  # one of these against anything else shares nothing
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str, *, articles: bool = True) -> list[str]:
    """Words in lower case, without punctuation.

    >>> words("The red, red cat.", articles=False)
    ['red', 'red', 'cat']
    """
    text = unicodedata.normalize("NFKC", text[-MAX_CHARACTERS:]).lower().translate(_NO_PUNCTUATION)
    return [w for w in text.split() if articles or w not in _ARTICLES]


def common_subsequence(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common subsequence of two texts, of their letters or their words.

    >>> common_subsequence("abcd", "bxd"), common_subsequence(["the", "red", "cat"], ["red", "the", "cat"])
    (2, 2)
    """
    row = [0] * (len(other) + 1)
    for item in one:
        before = 0
        for k, seen in enumerate(other, start=1):
            before, row[k] = row[k], before + 1 if item == seen else max(row[k], row[k - 1])
    return row[-1]


def _f1(common: int, given: int, wanted: int) -> float:
    return 2.0 * common / (given + wanted) if common else 0.0


def bag_f1(given: Sequence[Any], wanted: Sequence[Any]) -> float:
    """``2 |common| / (|given| + |wanted|)``, repeats counted: the harmonic mean of precision and recall.

    From "SQuAD: 100,000+ Questions for Machine Comprehension of Text", arXiv:1606.05250, section 6.1.

    >>> round(bag_f1(["barack", "obama"], ["obama"]), 4)
    0.6667
    """
    return _f1(sum((Counter(given) & Counter(wanted)).values()), len(given), len(wanted))


def set_f1(given: Sequence[Any], wanted: Sequence[Any]) -> float:
    """``bag_f1`` of the distinct words: saying one twice costs nothing.

    >>> set_f1(["the", "red", "cat"], ["red", "cat"])
    0.8
    """
    one, other = set(given), set(wanted)
    return _f1(len(one & other), len(one), len(other))


def aliases(answer: dict[str, Any]) -> list[str]:
    """The right answers as texts: those of a list, or the only one."""
    value = answer["value"]
    return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]


def answer_f1(given: str, wanted: str) -> float:
    """``bag_f1`` after SQuAD's normalisation: no articles; a mere "yes" or "no" matches only itself.

    An answer of which the normalisation leaves nothing ("A", "+") is compared as it stands.

    >>> answer_f1("yes indeed", "yes"), answer_f1("no", "yes"), answer_f1("The Cat!", "cat"), answer_f1("a", "A")
    (0.0, 0.0, 1.0, 1.0)
    """
    one, other = words(given, articles=False), words(wanted, articles=False)
    if not one and not other:
        one, other = (unicodedata.normalize("NFKC", text[-MAX_CHARACTERS:]).lower().split() for text in (given, wanted))
    closed = [" ".join(x) for x in (one, other) if " ".join(x) in _CLOSED]
    return 0.0 if closed and one != other else bag_f1(one, other)


def _judged(given: str, answer: dict[str, Any], measure: Callable[[str, str], float]) -> Verdict:
    """The best ``measure`` over the texts in ``answer["value"]``."""
    best = max((measure(given, alias) for alias in aliases(answer)), default=0.0)
    return Verdict(best, True, "shares words" if best else f"{given[:40]!r} shares no word with the answer")


def verify_f1(answer: dict[str, Any], response: str) -> Verdict:
    """``answer_f1`` of the final part, the best over the texts in ``answer["value"]``.

    >>> verify_f1({"value": ["obama", "barack hussein obama"]}, "<answer>Barack Obama</answer>").value
    0.8
    """
    return _judged(final_part(response, wanted=" ".join(aliases(answer))), answer, answer_f1)


def _answered(part: str) -> bool:
    """Whether what stands behind a ``<search>``, up to the next one, closes it and then holds a result."""
    ends = [part.find(tag) for tag in ("</search>", "<result>", "</result>")]
    return 0 <= ends[0] < ends[1] < ends[2]


def _template_error(response: str) -> str:
    """What a text of searches, results and one boxed answer lacks; empty where it lacks nothing."""
    for tag in ("think", "search", "result", "answer"):
        if response.count(f"<{tag}>") != response.count(f"</{tag}>"):
            return f"<{tag}> is not balanced"
    if response.count("<answer>") != 1 or response.count("<think>") < 1:
        return "not one <answer> after a <think>"
    searches = response.split("<search>")[1:]
    if len(searches) != response.count("<result>") or not all(map(_answered, searches)):
        return "a <search> without a <result>"
    if not response.rstrip().endswith("</answer>"):
        return "something behind </answer>"
    return "no \\boxed{} in the answer" if last_boxed(tagged(response) or "") is None else ""


def verify_research(answer: dict[str, Any], response: str) -> Verdict:
    """ReSearch's reward: 0 for a text that breaks the template, else ``verify_f1``, or 0.1 where that is 0.

    The template is ``<think>``, ``<search>`` answered by ``<result>``, any number of times, and one ``<answer>`` with a
    ``\\\\boxed{}`` at the end.

    From "ReSearch: Learning to Reason with Search for LLMs via Reinforcement Learning", arXiv:2503.19470, section 2.3.

    >>> verify_research({"value": "cat"}, "<think>hm</think><answer>\\\\boxed{dog}</answer>").value
    0.1
    >>> verify_research({"value": "cat"}, "cat").value
    0.0
    """
    error = _template_error(response)  # of all of it: where its beginning is cut off nothing is balanced
    if error:
        return Verdict(0.0, True, error)
    judged = _judged(last_boxed(tagged(response) or "") or "", answer, answer_f1)
    return judged if judged.value else Verdict(0.1, True, "only the form is right")


def verify_deep_research(answer: dict[str, Any], response: str) -> Verdict:
    """DeepResearcher's reward: -1 without one balanced ``<answer>``, else ``set_f1`` with articles, the best alias.

    From "DeepResearcher: Scaling Deep Research via Reinforcement Learning in Real-world Environments",
    arXiv:2504.03160.

    >>> verify_deep_research({"value": "red cat"}, "<answer>The red cat</answer>").value
    0.8
    >>> verify_deep_research({"value": "red cat"}, "<answer>red cat").value
    -1.0
    """
    part = tagged(response)
    if part is None or response.count("<answer>") != 1 or response.count("</answer>") != 1:
        return Verdict(-1.0, True, "not one balanced <answer>")
    return _judged(part, answer, lambda one, other: set_f1(words(one), words(other)))


def _present(ids: Array) -> Array:
    return (ids > 0).astype(jnp.float32)


def _ratio(common: Array, given: Array, wanted: Array) -> Array:
    return 2.0 * common / jnp.maximum(given + wanted, 1.0)


def token_bag_f1(given: Int[Array, " M"], wanted: Int[Array, " N"]) -> Float[Array, ""]:
    """``bag_f1`` of token ids, jittable; id 0 is padding.

    >>> import jax.numpy as jnp
    >>> round(float(token_bag_f1(jnp.array([7, 4]), jnp.array([4, 0]))), 4)
    0.6667
    """
    here = _present(given)
    same = (given[:, None] == given[None, :]).astype(jnp.float32)
    in_given = jnp.sum(same * here[None, :], axis=1)
    in_wanted = jnp.sum((given[:, None] == wanted[None, :]).astype(jnp.float32), axis=1)
    # a token that is given g times and wanted w times is shared min(g, w) times: that over g at each of its places
    common = jnp.sum(jnp.where(given > 0, jnp.minimum(in_given, in_wanted) / jnp.maximum(in_given, 1.0), 0.0))
    return _ratio(common, jnp.sum(here), jnp.sum(_present(wanted)))


def _distinct(ids: Array) -> Array:
    """Ids with 0 in place of every repeat."""
    earlier = jnp.tril(jnp.ones((ids.shape[0], ids.shape[0]), bool), -1)
    return jnp.where(jnp.any((ids[:, None] == ids[None, :]) & earlier, axis=1), 0, ids)


def token_set_f1(given: Int[Array, " M"], wanted: Int[Array, " N"]) -> Float[Array, ""]:
    """``set_f1`` of token ids, jittable; id 0 is padding.

    >>> import jax.numpy as jnp
    >>> round(float(token_set_f1(jnp.array([7, 4, 4]), jnp.array([4, 0]))), 4)
    0.6667
    """
    return token_bag_f1(_distinct(given), _distinct(wanted))
