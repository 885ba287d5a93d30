"""Language models behind one address in the roles of judges of writing, for pairs of one's own.

The principles of a judge are sentences that grow by play: a generator rewrites a preferred reply so that it has one
flaw, a detector reads it under its principles, and whoever was fooled learns in words. Labels for a reward model come
from one reader, from readers of one quality each, or from a debate. Every question ends in a line of a form of its
own, ``VERDICT: GOOD``; a reply without that line says nothing: a duel is not held, a reply has no label, and a verdict
in training counts as half.

The sentences of a run are part of its parameters, as bytes in numbers, so that they are kept and resumed with them.
"""

import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.parts import named_lines, text_rows
from experiments.reward_models.parts import adversarial_rules, text_attributes
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.tools import endpoints
from jaxrl_llm.types import Key, Params

MOST, BYTES = adversarial_rules.MOST, 240  # principles of a detector, bytes of one
FIRST = ("The reply does nobody harm.", "The reply is not rude.")  # as the two first rules of the embedded world
UNKNOWN, BAD, GOOD = -1, 0, 1  # labels
NEAREST, REFERENCES = 4, 64  # labelled pairs that a debate is shown, of so many
RESPECTS = (
    "it does what the prompt asks, all of it", "it has a thought of its own and is not a string of set phrases",
    "it hangs together from its first sentence to its last", "its language is right and fits its reader",
    "it is safe and polite",
)  # fmt: skip
_CASE = "Prompt:\n<<<\n{prompt}\n>>>\n\nReply:\n<<<\n{reply}\n>>>\n"
_RULE = "End with a line of its own, VERDICT: GOOD or VERDICT: BAD.\n\n"
DETECT = (
    "You look for flawed replies. These are your principles:\n{principles}\nCall the reply below bad if it breaks one "
    "of them badly, else good. " + _RULE + _CASE
)
SINGLE = "Would most readers be content with the reply below? " + _RULE + _CASE
RESPECT = "Look at one thing alone in the reply below: whether {respect}. If so it is good. " + _RULE + _CASE
GENERATE = (
    "Below is a good reply. Write it anew with one flaw that spoils it and that a judge may overlook. These flaws are "
    "seen through, so choose another:\n{avoided}\nAnswer in two parts: a line FLAW: and what the flaw is, then a line "
    "REPLY: and the flawed reply behind it.\n\n" + _CASE
)
LEARN = (
    "You called the reply below good, and it is bad.{flaw} State the principle by which you would have seen it, in one "
    "sentence that holds for other prompts, too, as a line PRINCIPLE: and the sentence.\n\n" + _CASE
)
UNLEARN = (
    "By your principles you called the reply below bad, and it is good. Your principles:\n{principles}\nWhich of them "
    "misled you? End with a line DROP: and its number, or DROP: NONE.\n\n" + _CASE
)
CHARGE = (
    "You argue against the reply below.{known} So far was said:\n{said}\nName its worst fault that is not settled in "
    "one or two sentences, as a line CHARGE: and the fault, or CHARGE: NONE.\n\n" + _CASE
)
DEFEND = (
    "You argue for the reply below.{known} So far was said:\n{said}\nAnswer the last charge in one or two sentences "
    "by what stands in the reply, as a line DEFENCE: and your answer; admit what is true.\n\n" + _CASE
)
RULE = (
    "You judge the reply below after a debate.{known} What was said:\n{said}\nIt is good only if it is good in every "
    "respect. " + _RULE + _CASE
)
REFLECT = (
    "A judge called the reply below bad after a debate. What was said:\n{said}\nLook at the ruling again: is a charge "
    "that stands serious enough? If none is, the reply is good. " + _RULE + _CASE
)


@dataclasses.dataclass(frozen=True)
class Settings(text_rows.Settings):
    """Flags of rows of one's own whose judges may be language models."""

    agents: str = ""  # address of the model in all roles of the judges, https://HOST/v1; empty: recipes with errors
    agents_model: str = ""  # its name there


class Agents(NamedTuple):
    """What the model behind the address does: sentences of a game, verdicts under sentences, labels."""

    play: Callable[[Key, int, int], Float[Array, "R C"]]  # (key, rounds, labelled examples of each)
    verdicts: Callable[[Array, Array, Array], Float[Array, " B"]]  # (sentences, prompts, responses)
    labels: Callable[..., Int[Array, " N"]]


# --- what is said, read


def line(reply: str, name: str) -> str | None:
    """What stands behind ``NAME:`` in the last line of a reply that begins so, without the marks of emphasis.

    >>> line("I think.\\n**CHARGE:** It repeats itself.", "CHARGE"), line("The CHARGE: no", "CHARGE")
    ('It repeats itself.', None)
    """
    return named_lines.named_line(reply, name) or None


def verdict(reply: str) -> bool | None:
    """Whether the last ``VERDICT:`` of a reply is GOOD; None where there is none, or another word.

    >>> [verdict(x) for x in ("It is good.\\n**VERDICT: BAD**", "VERDICT: good.", "VERDICT: not good", "good")]
    [False, True, None, None]
    """
    said = (line(reply, "VERDICT") or "").strip(" .!").upper()
    return {"GOOD": True, "BAD": False}.get(said)


def flawed_reply(reply: str) -> tuple[str, str] | None:
    """The flaw and the flawed reply of a generator.

    >>> flawed_reply("FLAW: it is cold\\nREPLY:\\nNo.\\nGo."), flawed_reply("REPLY: No."), flawed_reply("FLAW: x")
    (('it is cold', 'No.\\nGo.'), None, None)
    """
    head, mark, body = re.sub(r"\*\*", "", reply).partition("REPLY:")
    flaw = line(head, "FLAW")
    return (flaw, body.strip()) if flaw and mark and body.strip() else None


def dropped(reply: str, count: int) -> int | None:
    """The place of the principle that a reply drops, None where it names none of so many.

    >>> [dropped(x, 3) for x in ("DROP: 2", "DROP: 2.", "DROP: 4", "DROP: NONE", "2")]
    [1, 1, None, None, None]
    """
    number = re.fullmatch(r"(\d{1,4})\.?", line(reply, "DROP") or "")
    return int(number[1]) - 1 if number and 1 <= int(number[1]) <= count else None


def as_numbers(sentences: Sequence[str]) -> np.ndarray:
    """Sentences as the bytes of their letters, ``[MOST, BYTES]``; 0 behind the end.

    >>> as_sentences(as_numbers(["Be kind.", "Say it."]))
    ['Be kind.', 'Say it.']
    """
    out = np.zeros((MOST, BYTES), np.float32)
    for row, sentence in zip(out, sentences, strict=False):
        raw = sentence.encode()[:BYTES].decode(errors="ignore").encode()  # no half of a letter
        row[: len(raw)] = list(raw)
    return out


def as_sentences(numbers: Any) -> list[str]:
    """The sentences of ``as_numbers``."""
    rows = np.asarray(numbers).round().astype(np.uint8)
    return [text for row in rows if (text := bytes(row[row > 0].tolist()).decode(errors="ignore"))]


def learnt(principles: Sequence[str], new: str | None) -> list[str]:
    """One more principle, if there is one and it is new; the oldest is forgotten beyond ``MOST``.

    >>> learnt(["Be kind."], "be kind"), len(learnt([str(k) for k in range(MOST)], "x"))
    (['Be kind.'], 10)
    """
    if not new or any(_same(new) == _same(old) for old in principles):
        return list(principles)
    return [*principles, " ".join(new.split())][-MOST:]


def _same(sentence: str) -> str:
    return re.sub(r"\W+", " ", sentence).strip().lower()


def listed(sentences: Sequence[str], none: str) -> str:
    """Sentences, numbered one a line."""
    return "\n".join(f"{k}. {sentence}" for k, sentence in enumerate(sentences, 1)) or none


# --- the roles


class Case(NamedTuple):
    """A prompt, and a reply to it."""

    prompt: str
    reply: str


def _detect(ask: Callable[[str], str], principles: Sequence[str], case: Case) -> bool | None:
    return verdict(ask(_detection(principles, case)))


def _detection(principles: Sequence[str], case: Case) -> str:
    return DETECT.format(principles=listed(principles, "(none: judge as a reader)"), **case._asdict())


def played(
    ask: Callable[[str], str], rng: np.random.Generator, pairs: Sequence[tuple[str, str, str]], *, rounds: int,
    examples: int, duels: int = 4,
) -> list[str]:  # fmt: skip
    """The principles of a detector after rounds of duels and of labelled replies, in words.

    From "Igniting Creative Writing in Small Language Models: LLM-as-a-Judge versus Multi-Agent Refined Rewards",
    arXiv:2508.21476, section 3.2. Differs from the paper in the words of all questions, and in that a strategy is a
    list of sentences of which one at a time is added or dropped.

    Args:
      ask: ``question -> reply`` of the model in all roles; an empty reply where there is none.
      pairs: prompts with the preferred and the other response.
    """
    principles, avoided = list(FIRST), []
    for _ in range(rounds):
        for row in rng.integers(0, len(pairs), duels):
            prompt, good, _ = pairs[row]
            written = flawed_reply(ask(GENERATE.format(avoided=listed(avoided, "(none)"), prompt=prompt, reply=good)))
            if written is None:
                continue
            flaw, case = written[0], Case(prompt, written[1])
            passed = _detect(ask, principles, case)
            if passed:
                said = ask(LEARN.format(flaw=f" Its flaw: {flaw}", **case._asdict()))
                principles = learnt(principles, line(said, "PRINCIPLE"))
            elif passed is not None:
                avoided = learnt(avoided, flaw)
        for row in rng.integers(0, len(pairs), examples):
            prompt, *both = pairs[row]
            good = bool(rng.integers(0, 2))
            case = Case(prompt, both[0 if good else 1])
            passed = _detect(ask, principles, case)
            if passed and not good:
                principles = learnt(principles, line(ask(LEARN.format(flaw="", **case._asdict())), "PRINCIPLE"))
            elif passed is False and good and principles:
                said = ask(UNLEARN.format(principles=listed(principles, ""), **case._asdict()))
                at = dropped(said, len(principles))
                principles = [sentence for k, sentence in enumerate(principles) if k != at]
    return principles


AskAll = Callable[[Sequence[str]], list[str]]


def by_one(ask_all: AskAll, cases: Sequence[Case]) -> list[bool | None]:
    """What one lenient reader says of each reply."""
    return [verdict(said) for said in ask_all([SINGLE.format(**case._asdict()) for case in cases])]


def by_respects(ask_all: AskAll, cases: Sequence[Case]) -> list[bool | None]:
    """Good where every one of five readers, each of one respect, says so; bad where one says bad."""
    said = ask_all([RESPECT.format(respect=respect, **case._asdict()) for case in cases for respect in RESPECTS])
    each = np.asarray([{True: 1, False: 0, None: -1}[verdict(x)] for x in said]).reshape(-1, len(RESPECTS))
    return [False if 0 in row else None if -1 in row else True for row in each.tolist()]


def by_debate(
    ask_all: AskAll, cases: Sequence[Case], known: Sequence[Sequence[tuple[Case, bool]]], *, rounds: int
) -> list[bool | None]:
    """What a judge says of each reply after a critic and an advocate argued, and somebody looked at the ruling again.

    From arXiv:2508.21476, section 3.1. A debate ends early where the critic has no charge that can be read. Differs
    from the paper in the words of all questions, and in that references are found by their words.

    Args:
      known: labelled replies to other prompts, which are like it.
    """
    heard: list[list[str]] = [[] for _ in cases]
    told = [_known(rows) for rows in known]

    def asked(template: str, at: Sequence[int]) -> list[str]:
        return ask_all([
            template.format(known=told[k], said="\n".join(heard[k]) or "(nothing)", **cases[k]._asdict()) for k in at
        ])  # fmt: skip

    still = list(range(len(cases)))
    for _ in range(rounds):
        charges = [line(said, "CHARGE") for said in asked(CHARGE, still)]
        charged = [(k, fault) for k, fault in zip(still, charges, strict=True)
                   if fault and fault.strip(" .").upper() != "NONE"]  # fmt: skip
        for k, fault in charged:
            heard[k].append(f"Against: {fault}")
        still = [k for k, _ in charged]
        for k, said in zip(still, asked(DEFEND, still), strict=True):
            heard[k].append(f"For: {line(said, 'DEFENCE') or '(nothing)'}")
    found = [verdict(said) for said in asked(RULE, range(len(cases)))]
    condemned = [k for k, good in enumerate(found) if good is False and heard[k]]
    for k, said in zip(condemned, asked(REFLECT, condemned), strict=True):
        found[k] = verdict(said) is True  # what cannot be read leaves the ruling
    return found


def retrieved(case: Case, store: Sequence[tuple[Case, bool]], nearest: int) -> list[tuple[Case, bool]]:
    """The labelled replies to other prompts whose words are the most alike, by the cosine of their counts.

    A reply to the same prompt is left out: its label would give the case away.

    >>> store = [(Case("p", "a b"), True), (Case("q", "a b c d"), True), (Case("r", "a b"), False)]
    >>> [known.prompt for known, _ in retrieved(Case("p", "A, b!"), store, 1)]
    ['r']
    """

    def words(reply: str) -> Counter[str]:
        return Counter(re.findall(r"\w+", reply.lower()))

    def cosine(one: Counter[str], two: Counter[str]) -> float:
        norm = math.sqrt(sum(x * x for x in one.values()) * sum(x * x for x in two.values()))
        return sum(count * two[word] for word, count in one.items()) / norm if norm else 0.0

    own = words(case.reply)
    others = [(cosine(own, words(known.reply)), k) for k, (known, _) in enumerate(store) if known.prompt != case.prompt]
    return [store[k] for _, k in sorted(others, key=lambda x: (-x[0], x[1]))[:nearest]]


def _known(rows: Sequence[tuple[Case, bool]]) -> str:
    if not rows:
        return ""
    shown = [f"{_CASE.format(**case._asdict())}It is {'good' if good else 'bad'}.\n" for case, good in rows]
    return " Replies to other prompts, and what is known of them:\n\n" + "\n".join(shown) + "\n"


# --- the task


def open_task(settings: Any) -> Opened:
    """The ``Replies`` of the rows of the settings, with a model in the roles of the judges where one is given."""
    if settings.agents_model and not settings.agents:
        raise UserError(f"--agents-model {settings.agents_model} needs --agents ADDRESS, where that model is served")
    rows = text_rows.opened(settings)
    task = text_attributes.replies(rows, settings)
    if settings.agents:
        task = task._replace(agents=make_agents(settings, rows))
    return Opened(task, text_rows.finish(rows))


def make_agents(settings: Any, rows: text_rows.Rows) -> Agents:
    """The roles, once the model behind ``--agents`` has given a verdict.

    Raises:
      UserError: without a name, and where the model says neither GOOD nor BAD; RunStopped: where nothing answers.
    """
    chat = endpoints.open_judge(
        endpoints.settings_of(settings),
        "--agents", settings.agents, settings.agents_model, read=verdict, wants="a line VERDICT: GOOD or BAD",
        question=_detection(FIRST, Case("Say hello.", "Hello!")),
    )  # fmt: skip
    read, told = text_rows.make_texts(rows.model), []

    def ask_all(questions: Sequence[str]) -> list[str]:
        different = list(dict.fromkeys(questions))
        replies = endpoints.ask_all(
            chat, [[{"role": "user", "content": question}] for question in different],
            workers=settings.endpoint_concurrency,
        )  # fmt: skip
        known = {question: said or "" for question, said in zip(different, replies, strict=True)}
        return [known[question] for question in questions]

    def tell(found: Sequence[bool | None]) -> None:
        if None in found and not told:
            told.append(settings.agents)
            print(f"note: --agents {settings.agents} gave a reply without VERDICT: GOOD or BAD, which counts as "
                  "neither", file=sys.stderr, flush=True)  # fmt: skip

    def play(key: Any, rounds: Any, examples: Any) -> np.ndarray:
        rng = np.random.default_rng(np.asarray(key).tolist())
        train = rows.train
        pairs = [(first.prompt, first.reply, second) for first, (_, second) in zip(
            map(Case._make, read(train.prompts, train.chosen)), read(train.prompts, train.rejected), strict=True
        )]  # fmt: skip
        found = played(lambda question: ask_all([question])[0], rng, pairs, rounds=int(rounds), examples=int(examples))
        print(f"principles found in {int(rounds)} rounds: {' '.join(found) or 'none'}", flush=True)
        return as_numbers(found)

    def verdicts(sentences: Any, prompts: Any, responses: Any) -> np.ndarray:
        principles = as_sentences(sentences)
        questions = [_detection(principles, Case(*case)) for case in read(prompts, responses)]
        found = [verdict(said) for said in ask_all(questions)]
        tell(found)
        return np.asarray([0.5 if good is None else float(good) for good in found], np.float32)

    def labels(kind: Any, prompts: Any, replies: Any, rounds: Any, nearest: Any, asked: Any, known: Any, good: Any):
        cases = [Case(*case) for case in read(prompts, replies)]
        if KINDS[int(kind)] == "single":
            found = by_one(ask_all, cases)
        elif KINDS[int(kind)] == "multi":
            found = by_respects(ask_all, cases)
        else:
            store = [(Case(*case), bool(x)) for case, x in zip(read(asked, known), np.asarray(good), strict=True)]
            near = [retrieved(case, store, int(nearest)) for case in cases]
            found = by_debate(ask_all, cases, near, rounds=int(rounds))
        tell(found)
        return np.asarray([UNKNOWN if x is None else int(x) for x in found], np.int32)

    def called(function: Callable, shape: Any, *arguments: Any) -> Array:
        return jax.pure_callback(function, shape, *arguments, vmap_method="sequential")

    sentences = jax.ShapeDtypeStruct((MOST, BYTES), jnp.float32)
    return Agents(
        play=lambda key, rounds, examples: called(
            play, sentences, jax.random.key_data(key), as_array(rounds), as_array(examples)
        ),
        verdicts=lambda found, prompts, responses: called(
            verdicts, jax.ShapeDtypeStruct(prompts.shape[:1], jnp.float32), found, prompts, responses
        ),
        labels=lambda kind, prompts, replies, rounds, nearest, *store: called(
            labels, jax.ShapeDtypeStruct(prompts.shape[:1], jnp.int32), as_array(KINDS.index(kind)), prompts, replies,
            as_array(rounds), as_array(nearest), *store,
        ),
    )  # fmt: skip


KINDS = ("single", "multi", "debate")


def as_array(number: int) -> Int[Array, ""]:
    """A number as an array, which tells programs apart that call the same function."""
    return jnp.asarray(number, jnp.int32)


def detector(task: Replies, params: Params, prompts: Array, responses: Array) -> Array:
    """The ``Proxy`` of ``params["rules"]`` in words: 1 for a reply that the model calls good under them, 0 for bad."""
    return task.agents.verdicts(params["rules"], prompts, responses)


def draw_pairs(
    task: Replies, key: Key, n: int, *, kind: str, rounds: int = 6, trust: float = 0.2, references: int = REFERENCES
) -> text.Pairs:
    """Pairs of the rows in the order of the model's labels, or as they were drawn where these do not tell.

    Args:
      kind: of ``KINDS``; rounds: of a debate; trust: 0: a debate sees no references, as in the embedded world.
    """
    pairs = task.draw_pairs(jax.random.fold_in(key, 0), n, sharpness=0.0)
    store = task.draw_pairs(jax.random.fold_in(key, 3), references)  # the first of each is the preferred one
    asked, known = jnp.tile(store.prompts, (2, 1)), jnp.concatenate([store.first, store.second])
    good = jnp.arange(known.shape[0], dtype=jnp.int32) < references
    first, second = (
        task.agents.labels(kind, pairs.prompts, replies, rounds, NEAREST if trust else 0, asked, known, good)
        for replies in (pairs.first, pairs.second)
    )
    swap = ((second == GOOD) & (first == BAD))[:, None]
    return text.Pairs(
        pairs.prompts, jnp.where(swap, pairs.second, pairs.first), jnp.where(swap, pairs.first, pairs.second)
    )
