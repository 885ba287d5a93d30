"""Workflows as Python programs around a model that is asked: what a meta-agent of text writes, and what they score.

A workflow is ``workflow(ask, question) -> answer``. It runs in the sandbox, which reaches no network, so ``ask`` is
played back: the program runs until it asks something new and stops, the host asks the executor, and the program runs
again with all replies so far. A question asked twice gets two replies, the n-th of each run the same.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.advantages.turns import improvement_rewards
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.text import Given, given
from jaxrl_llm.envs.text_games import code_of
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns.multi_turn import marks_of, turns_of
from jaxrl_llm.run import catalog
from jaxrl_llm.sandbox.pool import Sandbox, encodable
from jaxrl_llm.sandbox.records import Ran
from jaxrl_llm.tools import endpoints
from jaxrl_llm.train.methods import builders, episode_methods
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params, Problems, Rewards, Trajectories
from jaxrl_llm.verifiers.verdict import Verifier

SEED = "def workflow(ask, question):\n    return ask(question)"
TASK = (
    "You improve a workflow: a Python function workflow(ask, question) that answers a question with the help of "
    "another model. ask(text) gives that model's reply; it remembers nothing between two calls, and asked the same "
    "again it may reply something else. At most {most} calls a question; Python's own library, no files, no network. "
    "Each turn, first analyse in a few sentences what was tried so far: what helped, which questions fail and why, and "
    "what you change therefore. Then write one whole program between ```python and ```; you are told how many of "
    "{count} questions it answers right, and shown some that it does not. The better it gets, the better. To begin "
    "with there is\n\n"
    "```python\n{seed}\n```\n\nQuestions look like this:\n\n{questions}"
)
BROKEN = (
    "The program fails on every question. Say what is wrong with it and write it again, as a whole, between ```python "
    "and ```: attempt {} of {} to repair it, which is no turn of its own.\n\n{}"
)
WHOLE = 1000  # a score of 1 in a mark
SHOWN = 2  # questions in the prompt, and wrong ones in what a program is told
MOST = 600  # characters of each
_START = """
def _began():
    import json, os, sys
    given, asked = json.loads(sys.stdin.read()), {}
    def say(what):
        sys.stdout.write("\\n" + given["mark"] + json.dumps(what) + "\\n")
        sys.stdout.flush()
        os._exit(0)
    def ask(text):
        text = str(text)
        asked[text] = asked.get(text, 0) + 1
        replies = given["replies"].get(text, [])
        if asked[text] > len(replies):
            say({"ask": text})
        return replies[asked[text] - 1]
    return ask, say, given["question"]
_ask, _say, _question = _began()
"""
_END = "\n_say({'answer': str(workflow(_ask, _question))})\n"

Ask = Callable[[str, int], str]  # (text, how often it was asked before) -> reply
Run = Callable[..., Ran]  # (program, stdin=...)


class Answered(NamedTuple):
    """What a workflow answered, or why nothing."""

    text: str | None
    why: str = ""


def _said(stdout: str, mark: str) -> dict[str, Any]:
    lines = [line[len(mark) :] for line in stdout.splitlines() if line.startswith(mark)]
    try:
        said = json.loads(lines[-1]) if lines else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, dict) or not all(isinstance(text, str) for text in said.values()):
        return {}
    # half of a character, which a program may return, can be sent to nobody
    return {name: encodable(text) for name, text in said.items()}


def answer(program: str, question: str, ask: Ask, run: Run, *, most: int) -> Answered:
    """Runs a workflow on one question; asking more than ``most`` times it answers nothing.

    Raises:
      RuntimeError: where the sandbox fails; ``endpoints.Unanswered`` where the executor does.
    """
    replies: dict[str, list[str]] = {}
    for left in range(most, -1, -1):
        mark = secrets.token_hex(8)
        given = json.dumps({"mark": mark, "replies": replies, "question": question})
        ran = run(f"{_START}{program}{_END}", stdin=given)
        if ran.status == "broken":
            raise RuntimeError(f"the sandbox failed: {ran.stderr}")
        said = _said(ran.stdout, mark)
        if "answer" in said:
            return Answered(said["answer"])
        if "ask" not in said:
            return Answered(None, f"{ran.status}: {ran.stderr.strip()[-MOST:]}")
        if left:
            known = replies.setdefault(said["ask"], [])
            known.append(ask(said["ask"], len(known)))
    return Answered(None, f"it asks more than {most} times")


def executor(settings: Any, *, folder: str = "runs") -> Ask:
    """The model behind ``settings.executor`` as ``ask``; the same question asked again is another draw."""
    cache = endpoints.replies_of("executor", settings.executor, settings.executor_model, folder)
    chat = endpoints.from_settings(settings, settings.executor, settings.executor_model, cache=cache)

    def ask(text: str, again: int) -> str:
        return chat([{"role": "user", "content": text}], again)

    ask("Say yes.", 0)  # an address that does not answer is known before any work
    return ask


class Task(NamedTuple):
    """Questions that a search is told about, and others on which its best program is tested."""

    validation: tuple[Problem, ...]
    test: tuple[Problem, ...] = ()


class Search(NamedTuple):
    """Where a search stands; ``tested`` is that of the best program so far."""

    task: Task
    last: float
    best: float
    tested: float
    seed: float  # test score of what a search begins with
    told: str = ""
    taken: int = 0  # turns
    attempts: int = 0  # to repair the program of this turn


class Scored(NamedTuple):
    """Share of right answers, and what a program is told of the others."""

    share: float
    wrong: str
    runs: bool


def text_of(problem: Problem) -> str:
    """The question as text."""
    return problem.prompt if isinstance(problem.prompt, str) else str(problem.prompt[-1]["content"])


def score(program: str, problems: Sequence[Problem], verify: Verifier, ask: Ask, run: Run, *, most: int) -> Scored:
    """The mean verdict of a workflow's answers; no answer is 0.

    Raises:
      RuntimeError: where sandbox, executor or verifier fail: that says nothing about the program.
    """

    def one(problem: Problem) -> tuple[float, str, bool]:
        found = answer(program, text_of(problem), ask, run, most=most)
        if found.text is None:
            return 0.0, f"it fails: {found.why}", False
        verdict = verify(problem.answer, found.text)
        if not verdict.valid:
            raise RuntimeError(f"the verifier failed: {verdict.reason}")
        return min(max(float(verdict.value), 0.0), 1.0), f"it answers: {found.text[-MOST:]}", True

    with ThreadPoolExecutor(max(1, min(8, len(problems)))) as threads:
        found = list(threads.map(one, problems))
    missed = [(p, said) for p, (value, said, _) in zip(problems, found, strict=True) if value < 1.0]
    wrong = "\n\n".join(f"Question: {text_of(p)[:MOST]}\n{said}" for p, said in missed[:SHOWN])
    return Scored(float(np.mean([value for value, *_ in found])), wrong, any(fine for *_, fine in found))


def workflow_world(
    verify: Verifier, ask: Ask, run: Run, *, most: int, repairs: int = 0, turns: int | None = None
) -> TextEnv:
    """Programs are scored on the validation questions, and paid as ``advantages.turns.improvement_rewards`` says.

    A mark holds validation score, the test scores of the best program so far and of the seed, and whether the program
    ran: ``marked``.

    Args:
      repairs: how often a program that answers no question is shown with its error and written anew before it counts.
      turns: after which a search ends, repairs not counted; None: whoever plays decides.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3: a program
    that raises gets up to three turns of self-correction. Differs from the paper in that one fails where it does on
    every question of the validation.
    """
    measured = partial(score, verify=verify, ask=ask, run=run, most=most)

    def reset(seed: np.ndarray, task: Task) -> Search:
        start = measured(SEED, task.validation).share
        seed = measured(SEED, task.test).share if task.test else 0.0
        return Search(task, start, start, seed, seed)

    def step(at: Search, text: str) -> TextStepResult:
        found = measured(code_of(text), at.task.validation)
        if not found.runs and at.attempts < repairs:
            told = BROKEN.format(at.attempts + 1, repairs, found.wrong)
            after = at._replace(told=told, attempts=at.attempts + 1)
            return TextStepResult(after, told, 0.0, False, mark=marked(None, at.tested, at.seed, False))
        scores = (jnp.array([x], jnp.float32) for x in (found.share, at.last, at.best))
        paid = float(improvement_rewards(*scores)[0])
        better = found.share > at.best
        tested = measured(code_of(text), at.task.test).share if better and at.task.test else at.tested
        told = f"Right: {found.share:.3f}. Before: {at.last:.3f}, at best {at.best:.3f}.\n\n{found.wrong}"
        after = Search(at.task, found.share, max(at.best, found.share), tested, at.seed, told, at.taken + 1)
        over = turns is not None and after.taken >= turns
        return TextStepResult(after, told, paid, over, mark=marked(found.share, tested, at.seed, found.runs))

    return TextEnv(reset, step, lambda at: text_identity(at.told))


def marked(share: float | None, tested: float, seed: float, runs: bool) -> int:
    """The mark of a turn, below 2**31; ``scores_of`` and ``counted`` read it.

    Args:
      share: of right answers; None for a program that is to be repaired, which does not count.

    >>> marked(1.0, 1.0, 1.0, True) < 2**31, marked(None, 1.0, 1.0, True) < 2**31
    (True, True)
    """
    found = int(runs)
    for value in (seed, tested):
        found = (WHOLE + 2) * found + round(value * WHOLE)
    return (WHOLE + 2) * found + (WHOLE + 1 if share is None else round(share * WHOLE))


def counted(marks: Array) -> Array:
    """Whether programs count, and are not to be repaired.

    >>> counted(jnp.array([marked(None, 0.5, 0.1, False), marked(0.0, 0.5, 0.1, False)])).tolist()
    [False, True]
    """
    return marks % (WHOLE + 2) <= WHOLE


def scores_of(marks: Array) -> tuple[Array, Array, Array, Array]:
    """``(validation, test, test of the seed, runs)`` of marks; a program that does not count has a validation of 0.

    >>> [float(x) for x in scores_of(jnp.array(marked(0.25, 0.5, 0.125, True)))]
    [0.25, 0.5, 0.125, 1.0]
    """
    found = []
    for _ in range(3):
        marks, value = marks // (WHOLE + 2), marks % (WHOLE + 2)
        found.append(jnp.where(value <= WHOLE, value, 0) / WHOLE)
    return *found, marks.astype(jnp.float32)


def asked(task: Task, *, most: int) -> Problem:
    """The prompt of a search."""
    shown = "\n\n".join(text_of(problem)[:MOST] for problem in task.validation[:SHOWN])
    prompt = TASK.format(most=most, count=len(task.validation), seed=SEED, questions=shown)
    return Problem("workflows", prompt, SEED, {}, 0, prompt)


def training_tasks(problems: Sequence[Problem], searches: int, validation: int, seed: int = 0) -> list[Task]:
    """Searches on questions drawn without repetition each, by a fixed seed.

    Raises:
      UserError: for fewer questions than one search needs.
    """
    if len(problems) < validation:
        raise UserError(f"--validation-items {validation}: there are {len(problems)} questions to train on; lower it")
    rng = np.random.default_rng(seed)
    drawn = (rng.choice(len(problems), validation, replace=False) for _ in range(searches))
    return [Task(tuple(problems[i] for i in part)) for part in drawn]


def held_task(problems: Sequence[Problem], validation: int) -> Task:
    """All held-out questions: the first for validation, the others to test.

    Raises:
      UserError: where none is left to test.
    """
    if len(problems) <= validation:
        raise UserError(
            f"--validation-items {validation}: {len(problems)} questions are held out, so none is left to test; lower "
            "it, raise --eval-problems, or give more rows"
        )
    return Task(tuple(problems[:validation]), tuple(problems[validation:]))


def workflows(
    settings: Any, sizes: dict[str, Any], tokenizer: Tokenizer, *, turns: tuple[int, int] | None = None
) -> list[Given]:
    """``opened`` of ``multi_turn_plan.hosted``: rows of the main job as questions for the executor of the settings.

    Args:
      turns: of searches that train and of those that are measured, where ``settings.repairs`` do not count as turns.

    Raises:
      UserError: without an executor, where it does not answer, or where there are too few rows.
    """
    if not settings.executor or not settings.executor_model:
        raise UserError(
            "workflows need --executor ADDRESS and --executor-model NAME: the model that the programs may ask"
        )
    train, held, verify = catalog.rows_of(settings)
    tasks = training_tasks(train, settings.searches, settings.validation_items)
    tested = [held_task(held, settings.validation_items)]
    try:
        ask = executor(settings)
    except endpoints.Unanswered as error:
        raise UserError(f"--executor {settings.executor} does not answer: {error}") from error
    world = partial(
        workflow_world, verify, ask, Sandbox(workers=settings.sandboxes).run, most=settings.calls,
        repairs=settings.repairs,
    )  # fmt: skip

    def part(tasks: list[Task], most: int | None) -> Given:
        shown = [asked(task, most=settings.calls) for task in tasks]
        return given(world(turns=most), shown, tasks, tokenizer, **sizes)

    return [part(some, most) for some, most in zip((tasks, tested), turns or (None, None), strict=True)]


def regression(
    tasks: episode_methods.HostTasks, params: Params, rows: Trajectories, weigh: Callable[[Array], Array]
) -> Array:
    """``mean_n w(r_n) NLL_n`` over the turns of all searches, NLL the token mean of what was written in a turn.

    That is the analysis and the program. A program that was to be repaired is in the context of the one that counts,
    and does not train.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3, as
    ``meta_agent.regression``. Differs from the paper in what a turn has in its context: all turns before it.
    """
    turns, (logp, _) = turns_of(rows), builders.score_tokens(tasks.policy, params, rows)
    counts = turns.taken & turns.valid[:, None] & counted(marks_of(rows))
    number = jnp.arange(counts.shape[1], dtype=jnp.int32)[None, :, None]
    mine = (turns.turn[:, None, :] == number) & rows.mask[:, None, :]
    length = jnp.maximum(jnp.sum(mine.astype(jnp.float32), axis=2), 1.0)
    nll = -jnp.sum(jnp.where(mine, logp[:, None, :], 0.0), axis=2) / length
    weights = weigh(turns.reward.reshape(-1))
    return reduce.scalars(weights * nll.reshape(-1), counts.reshape(-1))


def regression_stage(
    tasks: episode_methods.HostTasks, weigh: Callable[[Array], Array], *, searches: int, candidates: int, steps: int,
    rows_per_step: int, learning_rate: float, rollout: Callable[..., Trajectories],
) -> Stage:  # fmt: skip
    """Searches of the policy as it is, ``candidates`` of each task, and regression on their turns.

    Args:
      weigh: rewards ``[N]`` to weights ``[N]``.
      rollout: of single episodes.
    """

    def collect(params: Params, key: Key) -> Trajectories:
        rows = jnp.arange(searches * candidates, dtype=jnp.int32)
        ids = rows // candidates % tasks.train.tokens.shape[0]
        keys = sample_keys(key, 0, rows, 1)  # each with a key of its own
        return rollout(params, tasks.train.tokens[ids], tasks.train.valid[ids], keys, ids)

    def loss(params: Params, extras: dict[str, Any], rows: Trajectories) -> tuple[Array, dict[str, Array]]:
        value = regression(tasks, params, rows, weigh)
        return value, {"tokens/trained": jnp.sum(rows.mask.astype(jnp.float32))}

    return strings.table_stage(collect, loss, steps=steps, rows_per_step=rows_per_step, learning_rate=learning_rate)


def figures(rows: Trajectories, rewards: Rewards, problems: Problems, *, turns: int | None = None) -> dict[str, Array]:
    """Of measured searches: test score of the best program after k turns, programs that run, turns that beat all.

    Names are those of ``meta_agent.measure``; the best program is that of the validation score. Programs that were to
    be repaired do not count.

    Args:
      turns: of a search, where its repairs are responses beside them; None: all responses are turns.
    """
    found, (_, tested, seed, runs) = turns_of(rows), scores_of(marks_of(rows))
    there = found.taken & found.valid[:, None]
    counts = there & counted(marks_of(rows))
    number, most = jnp.cumsum(counts.astype(jnp.int32), axis=1), turns or there.shape[1]
    place = jnp.arange(there.shape[1], dtype=jnp.int32)[None, :]

    def after(k: int) -> Array:
        """A search that ended early keeps its best program."""
        last = jnp.max(jnp.where(there & (number <= k), place, 0), axis=1)
        return jnp.take_along_axis(tested, last[:, None], axis=1)[:, 0]

    marks = sorted({1, min(2, most), min(5, most), most})
    shown = {f"eval/test@{k}": reduce.scalars(after(k), rewards.valid) for k in marks}
    flat = counts.reshape(-1)
    return shown | {
        "eval/seed": reduce.scalars(seed[:, 0], rewards.valid),
        "eval/runs": reduce.scalars(runs.reshape(-1), flat),
        "eval/better": reduce.scalars((found.reward == 1.0).astype(jnp.float32).reshape(-1), flat),
    }
