"""Tasks and experts of one's own in the place of the pictures of ``expert_plans``, planned by a model of language.

The prompt is the instruction, the experts with their kinds, and the kinds of input and target; a plan is a name a line.
The grammar is made of the tokens of the names: decoding keeps to plans whose kinds chain, from an input kind of the
tasks. Without it a line is read as the nearest name. ``expert_tables`` runs a plan and scores what comes out.

The base is the model as it was loaded; worked plans are those of the rows (``plan``). Every candidate is carried out,
though one of a task trains; outputs are kept, so that each expert sees an input once. Of the held-out tasks at most
``HELD`` are measured.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.agents.parts import example_experts, expert_tables
from experiments.agents.parts.expert_plans import Tasks
from experiments.agents.parts.expert_tables import Expert, Task
from experiments.parts import text_rows
from jaxrl_llm.data import sources
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment.own_rows.tasks import Opened
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.run import parts
from jaxrl_llm.types import Rewards

EXAMPLE = "example"
HELD = 32
PROMPT = """{instruction}

Experts:
{experts}

The input is {takes}, wanted is {gives}. A plan is a list of experts, one a line; each takes what the one before gives.

Plan:
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of tasks and experts of one's own."""

    # FILE.jsonl, FILE.json, FILE.parquet, FOLDER[:SPLIT] of tasks; example: those of example_experts; empty: embedded
    data: str = ""
    experts: str = ""  # MODULE:FUNCTION that returns a table of experts, FILE.jsonl of their outputs, or several: A,B
    metrics: str = ""  # MODULE:FUNCTION that returns metrics beside text and class, for example of images
    chat: bool = False  # prompts become a user's message, by the model's chat template
    max_modules: int = 4  # experts of a plan; 10 in the paper
    max_prompt_tokens: int = 512  # tasks with a longer prompt are left out
    max_new_tokens: int = 64  # columns of a plan


class Given(NamedTuple):
    """Experts, metrics and tasks of some settings."""

    experts: dict[str, Expert]
    metrics: dict[str, expert_tables.Metric]
    tasks: list[Task]


class Asked(NamedTuple):
    """A task as ``text_rows`` wants it: the plan stands for both responses."""

    prompt: str
    chosen: str
    rejected: str
    task: Task


def asked(task: Task, experts: Mapping[str, Expert]) -> Asked:
    """The prompt of a task."""
    told = "\n".join(f"{name}: takes {expert.takes}, gives {expert.gives}" for name, expert in experts.items())
    said = PROMPT.format(instruction=task.instruction, experts=told, takes=task.takes, gives=task.gives)
    plan = "".join(f"{name}\n" for name in task.plan)
    return Asked(said, plan, plan, task)


def given(settings: Any) -> Given:
    """What the settings name.

    Raises:
      UserError: for a source, experts or metrics that do not serve.
    """
    return _given(settings.data, settings.experts, settings.metrics, settings.max_modules)


@lru_cache(maxsize=2)
def _given(data: str, experts: str, metrics: str, most: int) -> Given:
    if most < 1:
        raise UserError(f"--max-modules {most} must be at least 1")
    if data == EXAMPLE:
        here = example_experts.__name__
        experts, metrics = experts or f"{here}:experts", metrics or f"{here}:metrics"
        rows = [sources.Row(f"{data}: row {k}", columns) for k, columns in enumerate(example_experts.rows(), start=1)]
    elif not experts:
        raise UserError(f"--data {data} needs --experts MODULE:FUNCTION, or FILE.jsonl of their outputs")
    else:
        rows, _ = sources.read(data)
    table, judges = expert_tables.read_experts(experts), expert_tables.read_metrics(metrics)
    return Given(table, judges, expert_tables.read_tasks(rows, table, judges, most))


def read(settings: Any) -> list[Asked]:
    """The tasks as prompts."""
    found = given(settings)
    return [asked(task, found.experts) for task in found.tasks]


def name_tokens(model: parts.Model, experts: Mapping[str, Expert], settings: Any) -> dict[str, tuple[int, ...]]:
    """The tokens of every name and the end of its line.

    Raises:
      UserError: for a name that the tokenizer does not give back, or plans that are longer than the columns.
    """
    found = {name: tuple(model.tokenizer.encode(f"{name}\n")) for name in experts}
    for name, tokens in found.items():
        if expert_tables.named(model.tokenizer.decode(tokens), experts) != (name,):
            raise UserError(f"--experts: the tokenizer of --model {settings.model} cannot write {name!r}; rename it")
    longest = 1 + sum(sorted(map(len, found.values()))[-settings.max_modules :])
    if longest > settings.max_new_tokens:
        raise UserError(f"a plan of --max-modules {settings.max_modules} may take {longest} tokens; raise "
                        f"--max-new-tokens {settings.max_new_tokens}, or lower --max-modules")  # fmt: skip
    return found


def plans_of(names: Mapping[str, Sequence[int]], experts: Mapping[str, Expert], kinds: Sequence[str], *, end: int,
             most: int) -> grammars.Grammar:  # fmt: skip
    """The grammar of plans in tokens.

    Raises:
      UserError: for names, or numbers of experts, of which it cannot be made.
    """
    modules = [grammars.Module(tuple(names[name]), one.takes, one.gives) for name, one in experts.items()]
    try:
        return grammars.plan_grammar(modules, start=kinds, end=end, most=most)
    except ValueError as error:
        raise UserError(f"--experts with --max-modules {most}: {error}") from error


def open_task(settings: Any) -> Opened:
    """The ``Tasks`` of the settings."""
    found = given(settings)
    experts, most = found.experts, settings.max_modules
    rows = text_rows.opened(settings, Settings, read)
    count, tokenizer, held = rows.train.prompts.shape[0], rows.model.tokenizer, rows.heldout.prompts[:HELD]
    end = tokenizer.eos_ids[0]
    train_tasks = [row.task for row in rows.sources[:count]]
    held_tasks = [row.task for row in rows.sources[count:]][:HELD]
    names = name_tokens(rows.model, experts, settings)
    kept = plans_of(names, experts, sorted({task.takes for task in found.tasks}), end=end, most=most)
    world = text_rows.world_maker(rows, settings)(0, rows.train.prompts.shape[1], settings.max_new_tokens)
    earned = expert_tables.make_earned(found.tasks, experts, found.metrics, most)
    verify = expert_tables.make_verify(experts, earned)

    def judge(tasks: Sequence[Task]) -> Any:
        problems = [Problem("experts", task.instruction, "", {"task": task}, 0, task.instruction) for task in tasks]
        judged = parts.make_scorer(tokenizer, problems, verify)

        def score(answers: Any, sampled: Any) -> Rewards:
            rewards = judged(sampled)
            there = jnp.any(sampled.mask, axis=1)  # beams may be more than there are plans
            return rewards._replace(valid=rewards.valid & there)

        return score

    def worked(shots: int) -> Any:
        known = [k for k, task in enumerate(train_tasks) if task.plan]
        if not known:
            raise UserError(f"--data {settings.data}: no task has a plan to imitate; give rows with a plan, or "
                            "--sft-steps 0 with arms that imitate none")  # fmt: skip
        chosen = np.random.default_rng(1).permutation(known)[:shots]
        plans = np.full((len(chosen), settings.max_new_tokens), end, np.int32)
        for row, k in zip(plans, chosen, strict=True):
            tokens = [token for name in train_tasks[k].plan for token in names[name]]
            row[: len(tokens)] = tokens
        return partial(_drawn, rows.train.prompts[chosen], jnp.asarray(plans))

    init, score = partial(text_rows.fresh, rows.model), judge(train_tasks)
    task = Tasks(
        world=world, prompts=lambda: (rows.train.prompts, held), kept=lambda: kept, loose=lambda: None, score=score,
        heldout_score=judge(held_tasks), base=lambda settings: init, worked=lru_cache(maxsize=4)(worked),
        blind=lru_cache(maxsize=1)(lambda: expert_tables.blind_plans(train_tasks, held_tasks, experts, earned, most)),
    )  # fmt: skip
    return Opened(task, lambda plan: plan._replace(on_host=True, host_score=partial(score, {})))


def _drawn(prompts: jax.Array, plans: jax.Array, key: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    ids = jax.random.randint(key, (n,), 0, prompts.shape[0], jnp.int32)
    return prompts[ids], plans[ids]
