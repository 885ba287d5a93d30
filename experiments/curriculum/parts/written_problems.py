"""New problems like rows of one's own, written, judged and solved by a model of language behind an address (SwS).

Each question ends in a line of its own form; a reply without it counts for nothing: no concepts, no problem, a bad
rating, no answer. Categories are the levels of the rows. What is asked is kept on disk, so that arms share it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.curriculum.parts import synthesis, weakness
from experiments.curriculum.parts.synthesis import Aim, Recipe
from experiments.parts import named_lines
from experiments.parts.messages import asked_text
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.run import bench as benches
from jaxrl_llm.run import parts as job
from jaxrl_llm.tools import endpoints
from jaxrl_llm.types import Params
from jaxrl_llm.verifiers.pool import VerifierPool
from jaxrl_llm.verifiers.verdict import Verifier

CONCEPTS = (
    "Which concepts does somebody need to know to solve this problem? Name two to six, each in a few words of a "
    "textbook, as a last line CONCEPTS: with semicolons between them.\n\nProblem:\n{problem}"
)
WRITE = (
    "Write a new problem whose solution needs these concepts together: {concepts}. It should be {difficulty} for those "
    "who are used to problems like the example, be whole in itself, and have one answer that can be checked. Do not "
    "solve it. Answer with a line PROBLEM: and the problem behind it.\n\nExample:\n{example}"
)
RATE = (
    "Is this problem well posed: clear, whole, without contradiction, with one answer? End with a line RATING: BAD, "
    "RATING: ACCEPTABLE or RATING: PERFECT.\n\nProblem:\n{problem}"
)
SOLVE = (
    "Solve this problem step by step. End with a line ANSWER: and the answer alone, in the form that the answer to the "
    "example has.\n\nExample:\n{example}\nANSWER: {answer}\n\nProblem:\n{problem}"
)
DIFFICULTIES = ("easy", "of middling difficulty", "hard")
RATINGS = {"BAD": weakness.BAD, "ACCEPTABLE": weakness.ACCEPTABLE, "PERFECT": weakness.PERFECT}
SET_SIZE, JUDGES = 5, 2  # concepts of a problem, votes on it
AskAll = Callable[[Sequence[str], int], list[str]]  # questions and draw -> replies, empty where there is none


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, recipes.OnlineSettings):
    """Flags of a model that writes problems like rows of one's own."""

    synthesiser: str = ""  # address of the model that writes, judges and solves new problems, https://HOST/v1
    synthesiser_model: str = ""  # its name there


def concepts_in(reply: str) -> tuple[str, ...]:
    """The concepts of a reply, each once and in small letters.

    >>> concepts_in("CONCEPTS: Ratios; percent of a whole; ratios.")
    ('ratios', 'percent of a whole')
    """
    listed = named_lines.named_line(reply, "CONCEPTS").split(";")
    names = (" ".join(part.split()).strip(" .").lower() for part in listed)
    return tuple(dict.fromkeys(name for name in names if name))[:6]


def problem_in(reply: str) -> str:
    """The new problem of a reply.

    >>> problem_in("Sure.\\n**PROBLEM:** Ann has 3.\\nHow many?"), problem_in("Ann has 3.")
    ('Ann has 3.\\nHow many?', '')
    """
    return named_lines.behind_name(reply, "PROBLEM")


def majority(replies: Sequence[str]) -> tuple[str, float]:
    """The most frequent answer (of equals the first) and its share of all replies, those without an answer among them.

    >>> majority(["ANSWER: 4", "ANSWER: 5.", "so 5\\nANSWER: 5", "I cannot."])
    ('5', 0.5)
    """
    said = [named_lines.named_line(reply, "ANSWER").strip().removesuffix(".").strip() for reply in replies]
    votes = Counter(answer for answer in said if answer)
    if not votes:
        return "", 0.0
    answer, count = votes.most_common(1)[0]
    return answer, count / len(replies)


def open_synthesiser(settings: Any, problems: Sequence[Problem]) -> AskAll:
    """The model behind ``--synthesiser``, which has rated one problem.

    Raises:
      UserError: for generated problems, rows whose answers are no single value, no address or name, and where the model
        gives no rating; RunStopped: where nothing answers.
    """
    if not settings.synthesiser:
        raise UserError(
            f"--data {settings.data}: a model writes problems like rows of your own; give --synthesiser ADDRESS "
            "--synthesiser-model NAME, or choose --data chain"
        )
    if other := sorted({key for p in problems for key in p.answer} - {"value"}):
        raise UserError(f"--data {settings.data}: answers hold {', '.join(other)}, which a majority of solutions does "
                        "not give; choose rows with one answer each")  # fmt: skip
    chat = endpoints.open_judge(
        endpoints.settings_of(settings),
        "--synthesiser", settings.synthesiser, settings.synthesiser_model, read=_rated, wants="a line RATING:",
        question=RATE.format(problem="How much is 1 + 1?"),
    )  # fmt: skip

    def ask_all(questions: Sequence[str], draw: int = 0) -> list[str]:
        conversations = [[{"role": "user", "content": question}] for question in questions]
        replies = endpoints.ask_all(partial(chat, draw=draw), conversations, workers=settings.endpoint_concurrency)
        return [said or "" for said in replies]

    return ask_all


def _rated(reply: str) -> int | None:
    return RATINGS.get(named_lines.named_line(reply, "RATING").strip(" .!").upper())


def check_generated(settings: Any) -> None:
    """UserError for a synthesiser beside generated problems."""
    for name in ("synthesiser", "synthesiser_model"):
        if value := getattr(settings, name):
            raise UserError(f"--{name.replace('_', '-')} {value} writes problems like rows of your own, and --data "
                            f"{settings.data} is generated: drop it")  # fmt: skip


def concept_sets(
    rng: np.random.Generator, named: Sequence[tuple[str, ...]], count: int, found: Bench
) -> list[tuple[str, ...]]:
    """``count`` sets of concepts that occur together, as ``weakness.draw_concepts`` draws them."""
    concepts = sorted({name for names in named for name in names})
    has = np.asarray([[c in names for c in concepts] for names in named], np.float32)
    together = has.T @ has * (1 - np.eye(len(concepts), dtype=np.float32)) / max(len(named), 1)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), count)
    vectors = jnp.asarray(synthesis.concept_embeddings(found, concepts))
    bounds = {"size": min(SET_SIZE, len(concepts)), "temperature": Recipe().set_temperature}
    sets = np.asarray(synthesis.drawn_sets(keys, jnp.asarray(has.sum(0)), jnp.asarray(together), vectors, **bounds))
    return [tuple(c for c, there in zip(concepts, row, strict=True) if there) for row in sets]


def candidates(
    rng: np.random.Generator, examples: Sequence[Problem], count: int, found: Bench, recipe: Recipe, ask_all: AskAll, *,
    chat: bool,
) -> list[Problem]:  # fmt: skip
    """Up to ``count`` new problems with concepts that occur together in the examples, voted on and answered.

    From "SwS", arXiv:2506.08989, section 2. Differs from the paper in the words of all questions, in one model for all
    roles, and in that a set of concepts that was drawn twice is used again with another example or difficulty.
    """
    named = [
        concepts_in(said) for said in ask_all([CONCEPTS.format(problem=asked_text(p.prompt)) for p in examples], 0)
    ]
    known = [(p, names) for p, names in zip(examples, named, strict=True) if names]
    if not known:
        return []
    sets = concept_sets(rng, [names for _, names in known], count, found)
    like = [known[k][0] for k in rng.integers(0, len(known), len(sets))]
    wanted = [
        WRITE.format(concepts="; ".join(names), difficulty=DIFFICULTIES[k], example=asked_text(p.prompt))
        for names, k, p in zip(sets, rng.integers(0, len(DIFFICULTIES), len(sets)), like, strict=True)
    ]
    requests = dict(zip(wanted, like, strict=True))  # the same request is made once
    written = ask_all(list(requests), 0)
    width, seen = found.train.tokens.shape[1], {asked_text(p.prompt) for p in examples}
    made = []
    for text, example in zip(map(problem_in, written), requests.values(), strict=True):
        new = example._replace(prompt=_with_text(example.prompt, text), solution="", identity=text)
        fits = text and len(encode_prompt(found.model.tokenizer, new.prompt, chat=chat)) <= width
        if fits and text not in seen and not tables.is_heldout(text):
            seen.add(text)
            made.append((new, example))
    asked = [RATE.format(problem=new.identity) for new, _ in made]
    votes = [[weakness.BAD if (vote := _rated(said)) is None else vote for said in ask_all(asked, k)]
             for k in range(JUDGES)]  # fmt: skip
    good = np.asarray(weakness.passes_vote(jnp.asarray(votes, jnp.int32).reshape(JUDGES, -1).T)) if made else []
    made = [pair for pair, use in zip(made, good, strict=True) if use]
    tasks = [SOLVE.format(example=asked_text(p.prompt), answer=_value(p), problem=new.identity) for new, p in made]
    solved = list(zip(*(ask_all(tasks, k) for k in range(recipe.solver_samples)), strict=True))
    kept = []
    for (new, _), replies in zip(made, solved, strict=True):
        answer, share = majority(replies)
        if answer and share >= recipe.consistency:
            kept.append(new._replace(answer={"value": answer}))
    return kept


def _with_text(prompt: Any, text: str) -> Any:
    """The prompt that asks something else: the text, or the messages with it in the last one of a user."""
    if isinstance(prompt, str):
        return text
    said = [dict(message) for message in prompt]
    at = max(k for k, message in enumerate(said) if message["role"] == "user")
    said[at]["content"] = text
    return said


def _value(problem: Problem) -> Any:
    value = problem.answer.get("value", "")
    return value[0] if isinstance(value, list | tuple) and value else value


@lru_cache(maxsize=2)
def _pool(verify: Verifier) -> VerifierPool | None:
    """``parts.make_pool``, shared until this process ends."""
    return job.make_pool(verify)


def bench_of(settings: Any, found: Bench, problems: Sequence[Problem]) -> Bench:
    """The bench with other training problems, whose answers are judged on the host."""
    verify = benches.problem_sets(settings)[2]
    tokenizer = found.model.tokenizer
    table = tables.encode_problems(
        tokenizer, problems, answers=tables.no_answers, chat=settings.chat, prompt_tokens=found.train.tokens.shape[1]
    )
    pool = _pool(verify)
    return found._replace(
        train=table, host_score=job.make_scorer(tokenizer, problems, verify, pool),
        callback=job.make_callback(tokenizer, problems, verify, pool, mesh=found.model.mesh),
    )  # fmt: skip


def synthesise(settings: Any, aim: Aim, params: Params, recipe: Recipe, seed: int, ask_all: AskAll) -> list[Problem]:
    """``synthesis.synthesise`` of rows of one's own."""
    found, rng, out = recipes.bench(settings), np.random.default_rng([3, seed]), []
    for level, wanted in sorted(aim.budgets.items()):
        mine = [p for p in aim.examples if p.level == level]
        if not wanted or not mine:
            continue
        fresh = candidates(rng, mine, wanted * recipe.surplus, found, recipe, ask_all, chat=settings.chat)
        made = len(fresh)
        if fresh and (recipe.low > 0 or recipe.high < 1):
            share = synthesis.train_share(settings, bench_of(settings, found, fresh), params, 8, seed)
            fresh = [p for p, s in zip(fresh, share, strict=True) if recipe.low <= s <= recipe.high]
        print(f"level {level}: {made} new problems were written, found good and solved, {len(fresh)} of them are of "
              f"middling difficulty, {wanted} wanted", flush=True)  # fmt: skip
        out += fresh[:wanted]
    return out
