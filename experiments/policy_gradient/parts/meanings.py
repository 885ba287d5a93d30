"""Whether two answers mean the same, asked of a language model; rewards of free text; a start that agrees on errors."""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.policy_gradient.parts import agreement
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.run.parts import Model
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.types import Params
from jaxrl_llm.verifiers.overlap import common_subsequence, words

QUESTION = (
    "Question: {question}\nAnswer 1: {one}\nAnswer 2: {other}\nDo both answers mean the same? Say Yes or No.\nAnswer:"
)
Pair = tuple[str, str, str]  # question, answer, other answer
SaysSame = Callable[[Sequence[Pair]], np.ndarray]


def in_words(pair: Pair) -> str:
    """What a model is asked about two answers in words."""
    return QUESTION.format(question=pair[0], one=pair[1], other=pair[2])


def in_numbers(pair: Pair) -> str:
    """The same of whole numbers, for the embedded comparer: ``8=8?``.

    >>> in_numbers(("m7 1+1=>", "2", "3"))
    '2=3?'
    """
    return f"{pair[1]}={pair[2]}?"


def make_says_same(
    model: Model, params: Params, text_of: Callable[[Pair], str], *, yes: str, no: str, at_once: int = 64,
    chat: bool = False,
) -> SaysSame:  # fmt: skip
    """``pairs -> bool [N]``: where the model finds ``yes`` likelier than ``no`` as the next token.

    Args:
      at_once: pairs in a batch; its width grows in steps, so that few programs are compiled.
      chat: the question is the message of a user.

    Raises:
      UserError: for texts beyond the model's positions, and with ``chat`` for a tokenizer without a template.
    """
    first, second = (model.tokenizer.encode(text)[0] for text in (yes, no))

    @jax.jit
    def surer(params: Params, tokens: Array, valid: Array) -> Array:
        positions = jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)
        hidden = model.policy.hidden(params, tokens, positions, valid.astype(jnp.int32))[:, -1]
        logits = model.policy.unembed(params, hidden)
        return logits[:, first] > logits[:, second]

    def says_same(pairs: Sequence[Pair]) -> np.ndarray:
        found = []
        for begin in range(0, len(pairs), at_once):
            some = list(pairs[begin : begin + at_once])
            filled = some + some[:1] * (at_once - len(some))
            asked = [Problem("pair", text_of(pair), "", {}, 1, "") for pair in filled]
            encoded = {"answers": tables.no_answers, "chat": chat}
            wide = tables.encode_problems(model.tokenizer, asked, **encoded).tokens.shape[1]
            wide = -(-wide // 32) * 32
            if wide > model.config.max_positions:
                raise UserError(
                    f"two answers and their question take {wide} of the comparing model's "
                    f"{model.config.max_positions} positions; shorten the answers or give another --comparer"
                )
            table = tables.encode_problems(model.tokenizer, asked, prompt_tokens=wide, **encoded)
            found.append(np.asarray(surer(params, table.tokens, table.valid))[: len(some)])
        return np.concatenate(found) if found else np.zeros(0, bool)

    return says_same


def make_asked_in_words(model: Model, params: Params, *, chat: bool) -> SaysSame:
    """``make_says_same`` of answers in words.

    A text goes on with a space before the word, the turn of an assistant begins with the word itself.
    """
    yes, no = ("Yes", "No") if chat else (" Yes", " No")
    return make_says_same(model, params, in_words, yes=yes, no=no, chat=chat)


def equivalence(
    questions: Sequence[str], answers: Sequence[str], group_ids: Sequence[int], says_same: SaysSame
) -> Bool[Array, "B B"]:
    """Which answers of a group mean the same: equal texts do, of others the model is asked, each pair once.

    An empty answer means the same as none. From "Right Question is Already Half the Answer", arXiv:2504.05812, section
    3 (free text).

    >>> alike = lambda pairs: np.asarray([{a, b} == {"2", "two"} for _, a, b in pairs])
    >>> equivalence(["q"] * 4, ["2", "two", "3", ""], [0] * 4, alike)[0].tolist()
    [True, True, False, False]
    """
    count, wanted = len(answers), {}
    for i in range(count):
        for j in range(i + 1, count):
            if group_ids[i] == group_ids[j] and answers[i] and answers[j] and answers[i] != answers[j]:
                wanted.setdefault((questions[i], answers[i], answers[j]), []).append((i, j))
    same = np.asarray([[a == b and bool(a) for b in answers] for a in answers], bool).reshape(count, count)
    same &= np.equal.outer(np.asarray(group_ids), np.asarray(group_ids))
    for said, places in zip(says_same(list(wanted)), wanted.values(), strict=True):
        for i, j in places:
            same[i, j] = same[j, i] = said
    return jnp.asarray(same)


def repeats_question(question: str, answer: str, *, share: float = 0.8) -> bool:
    """Whether an answer only says the question again: a part of it, or more than ``share`` of its words in their order.

    The share is the precision of Rouge-L. From the code of EMPO for free text.

    >>> repeats_question("What is the red bird?", "the red bird"), repeats_question("What is it?", "A red bird")
    (True, False)
    """
    asked, said = words(question), words(answer)
    if not said:
        return False
    if " ".join(said) in " ".join(asked):
        return True
    return common_subsequence(said, asked) / len(said) > share


def free_text_rewards(
    clusters: Int[Array, " B"], group_ids: Int[Array, " B"], answered: Bool[Array, " B"], repeats: Bool[Array, " B"],
    *, least: float = 0.2, unanswered: float = -0.5,
) -> Float[Array, " B"]:  # fmt: skip
    """EMPO's rewards of free text: the share of the cluster, 0 for the question said again, -0.5 without an answer.

    0 for a whole group of several clusters none of which holds ``least`` of it. From the code of EMPO for free text.

    >>> clusters, ids = jnp.array([0, 0, 2, 3]), jnp.zeros(4, jnp.int32)
    >>> told, again = jnp.array([True, True, True, False]), jnp.array([False, False, True, False])
    >>> free_text_rewards(clusters, ids, told, again).tolist()
    [0.5, 0.5, 0.0, -0.5]
    """
    shares = agreement.cluster_shares(clusters, group_ids)
    size = shares.shape[0]
    largest = jax.ops.segment_max(shares, group_ids, num_segments=size)[group_ids]
    opener = jax.ops.segment_min(clusters, group_ids, num_segments=size)[group_ids]
    several = jax.ops.segment_max((clusters != opener).astype(jnp.int32), group_ids, num_segments=size)[group_ids] > 0
    value = jnp.where(repeats | (several & (largest < least)), 0.0, shares)
    return jnp.where(answered, value, unanswered)


@recipes.cached_by_task
def trained_comparer(settings: OnlineSettings, *, steps: int) -> Params:
    """The bundled model of ``bench(settings)`` after fine-tuning on ``in_numbers`` of drawn numbers."""
    model, rng, pairs = recipes.bench(settings).model, np.random.default_rng(17), []
    for k in range(4096):
        one = int(rng.integers(100)) if rng.random() < 0.3 else int(rng.integers(12))
        other = one if k % 2 else int(rng.integers(12))
        pairs.append((in_numbers(("", str(one), str(other))), "T" if one == other else "F"))
    return supervised.imitated_pairs(model, pairs, width=12, steps=steps, rows_per_step=128)


# ------------------------------------------------------------------ a start whose majority is wrong


def misleading(solution: str) -> str:
    """The solution with its last whole number one higher: an error that all who make it agree on.

    >>> misleading("3+5=8,8*4=10#10"), misleading("So it is 9.")
    ('3+5=8,8*4=10#11', 'So it is 10.')

    Raises:
      UserError: for a solution without a whole number.
    """
    found = list(re.finditer(r"\d+", solution))
    if not found:
        raise UserError(f"a solution without a number cannot be made to mislead: {solution[:80]!r}; drop this arm")
    at = found[-1]
    return f"{solution[: at.start()]}{int(at.group()) + 1}{solution[at.end() :]}"


@recipes.cached_by_task
def misled(settings: OnlineSettings, *, wrong: float, steps: int) -> Params:
    """The model of ``bench(settings)`` after fine-tuning on solutions of which ``wrong`` mislead."""
    found, rng = recipes.bench(settings), np.random.default_rng(19)
    problems = recipes.solved_problems(settings)
    shown = [misleading(p.solution) if rng.random() < wrong else p.solution for p in problems]
    rows = recipes.with_texts(settings, found, problems, shown)
    model = found.model
    return supervised.imitated(model.policy, model.params, rows, steps=steps, rows_per_step=32, learning_rate=1e-3)
