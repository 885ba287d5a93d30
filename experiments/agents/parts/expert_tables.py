"""Experts and tasks of one's own: tables of named experts, instructions with inputs, and what a plan in words earns.

An expert takes one value of a kind and gives one of a kind; kinds are names that the user chooses. ``--experts`` is a
function that returns ``{name: (takes, gives, callable)}``, for example around local models, or a file of their outputs,
lines ``{"expert": NAME, "takes": KIND, "gives": KIND, "input": VALUE, "output": VALUE}``. An expert that raises
ValueError says that it cannot take this input, and so does a file that has no output for it; any other error of an
expert ends the run. An expert must give the same for the same input and leave the input as it is: outputs are kept.

A task is an instruction with one input or several, rows of equal instruction; its score is the mean over them. What a
model writes is compared with the names of the experts, and nothing else is done with it.
"""

import difflib
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jaxrl_llm.data import sources
from jaxrl_llm.data.agent_formats import field
from jaxrl_llm.data.own import own
from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.verifiers import overlap
from jaxrl_llm.verifiers.verdict import Verdict, Verifier

BLIND = 16  # training tasks on which plans that do not read are tried
NEAR = 0.6  # how alike a line and a name must be, of 1
MOST_READ = 2000  # characters of a plan in words
_MARK = re.compile(r"^[\s\d.):*-]+")  # numbers and bullets before a line
Metric = Callable[[Any, Any], float]


class Expert(NamedTuple):
    """What a plan may name."""

    takes: str
    gives: str
    run: Callable[[Any], Any]


class Task(NamedTuple):
    """An instruction and what it is carried out on."""

    number: int
    instruction: str
    takes: str  # kind of the inputs
    gives: str  # kind of the targets
    metric: str
    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    plan: tuple[str, ...] = ()  # a worked one, where there is one


# --- metrics


def shared_words(given: Any, target: Any) -> float:
    """F1 of the words of two texts, without regard to case and punctuation.

    >>> shared_words("The red cat.", "the cat")
    0.8
    """
    return overlap.bag_f1(overlap.words(str(given)), overlap.words(str(target)))


def same_class(given: Any, target: Any) -> float:
    """1 for the same class or number, without regard to case and blanks around it, else 0.

    >>> same_class(3, " 3"), same_class("cat", "dog")
    (1.0, 0.0)
    """
    one, other = (str(x).strip().casefold() for x in (given, target))
    return float(one == other)


METRICS: dict[str, Metric] = {"text": shared_words, "class": same_class}


def _table(name: str, flag: str) -> dict[str, Any]:
    """What a function of the user's returns.

    Raises:
      UserError: for one that fails, or returns no table of names.
    """
    make = own(name, flag)
    try:
        found = make()
    except Exception as error:  # code of the user's
        raise UserError(f"{flag} {name}: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or not found or not all(isinstance(key, str) for key in found):
        raise UserError(f"{flag} {name} returns no table of names; give a function that returns a dict")
    return found


def read_metrics(name: str) -> dict[str, Metric]:
    """``METRICS`` and those that a function of the user's returns: ``{name: (given, target) -> [0, 1]}``.

    Raises:
      UserError: for what is no such function.
    """
    found = _table(name, "--metrics") if name else {}
    if wrong := next((key for key, metric in found.items() if not callable(metric)), ""):
        raise UserError(f"--metrics {name}: {wrong} is no function of (given, target)")
    return METRICS | found


# --- experts


def _of_function(name: str) -> dict[str, Expert]:
    found = {}
    for key, entry in _table(name, "--experts").items():
        if not isinstance(entry, tuple | list) or len(entry) != 3 or not callable(entry[2]):
            raise UserError(f"--experts {name}: {key} is no (takes, gives, function)")
        if not all(isinstance(kind, str) and kind for kind in entry[:2]):
            raise UserError(f"--experts {name}: {key}: the kinds that it takes and gives must be texts")
        found[key] = Expert(*entry)
    return found


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _of_file(path: str) -> dict[str, Expert]:
    kinds: dict[str, tuple[str, str]] = {}
    outputs: dict[str, dict[str, Any]] = {}
    for where, row in sources.read(path)[0]:
        name, *pair = (field(row, part, str, where) for part in ("expert", "takes", "gives"))
        if missing := [part for part in ("input", "output") if part not in row]:
            raise DataError(f"{where}: lacks {missing[0]}")
        if kinds.setdefault(name, tuple(pair)) != tuple(pair):
            raise DataError(f"{where}: {name} takes {kinds[name][0]} and gives {kinds[name][1]} in a line before")
        outputs.setdefault(name, {})[_key(row["input"])] = row["output"]
    told: set[str] = set()

    def looked_up(name: str) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            if _key(value) not in outputs[name]:
                if name not in told:
                    print(
                        f"{path} lacks an output of {name}, for {_key(value)[:80]}: such plans cannot be run",
                        flush=True,
                    )
                    told.add(name)
                raise ValueError(f"{path} has no output of {name} for it")
            return outputs[name][_key(value)]

        return run

    return {name: Expert(*pair, looked_up(name)) for name, pair in kinds.items()}


def read_experts(spec: str) -> dict[str, Expert]:
    """The experts of ``MODULE:FUNCTION`` or ``FILE.jsonl``, or of several of them with commas between.

    Raises:
      UserError: for what is neither, a malformed table or file, or a name that is there twice.
    """
    found: dict[str, Expert] = {}
    for word in spec.split(","):
        if not pathlib.Path(word).is_file() and ":" not in word:
            raise UserError(f"--experts {word}: no such file; give FILE.jsonl of outputs, or MODULE:FUNCTION")
        more = _of_file(word) if pathlib.Path(word).is_file() else _of_function(word)
        if twice := found.keys() & more.keys():
            raise UserError(f"--experts {spec}: {min(twice)} is there twice; give each expert once")
        found |= more
    if wrong := next((name for name in found if name != " ".join(name.split()) or not name), None):
        raise UserError(f"--experts {spec}: {wrong!r} is no name; a name is words on one line, with one blank between")
    return found


# --- plans


def fault(task: Task, chain: Sequence[str], experts: Mapping[str, Expert], most: int) -> str:
    """Why a plan cannot be run, or gives the wrong kind; empty where nothing is wrong."""
    if not 1 <= len(chain) <= most:
        return f"{len(chain)} experts, where 1 to {most} may run"
    kind = task.takes
    for name in chain:
        if experts[name].takes != kind:
            return f"{name} takes {experts[name].takes}, not {kind}"
        kind = experts[name].gives
    return "" if kind == task.gives else f"it gives {kind}, wanted is {task.gives}"


def named(text: str, names: Iterable[str]) -> tuple[str, ...] | None:
    """The plan that a text says, an expert a line: each the one of that name, or of the most similar name.

    None for a line that is like no name. As the paper reads plans in words, by the nearest names.

    Differs from the paper in taking letters for the likeness of names (``difflib``) and no model of sentences.

    >>> named("1. Translat\\n2. count\\n", ["translate", "count words", "count"])
    ('translate', 'count')
    >>> named("I cannot help with that.", ["translate"]) is None
    True
    """
    folded = {name.casefold(): name for name in names}
    found = []
    for line in text[:MOST_READ].splitlines():
        said = line.strip().casefold()
        if said not in folded:
            said = _MARK.sub("", said)
        if not said:
            continue
        near = [said] if said in folded else difflib.get_close_matches(said, folded, 1, NEAR)
        if not near:
            return None
        found.append(folded[near[0]])
    return tuple(found)


def make_earned(
    tasks: Sequence[Task], experts: Mapping[str, Expert], metrics: Mapping[str, Metric], most: int
) -> Callable[[Task, tuple[str, ...]], Verdict]:
    """``(task, plan) -> verdict``: the mean of the task's metric over its inputs; -1 for a plan that cannot be run.

    Args:
      tasks: all that will be asked for, by their numbers.
    """

    @lru_cache(maxsize=4096)  # plans share their beginnings
    def output(number: int, place: int, chain: tuple[str, ...]) -> Any:
        if not chain:
            return tasks[number].inputs[place]
        value = output(number, place, chain[:-1])
        try:
            return experts[chain[-1]].run(value)
        except ValueError:
            raise
        except Exception as error:  # code of the user's
            raise UserError(
                f"--experts: {chain[-1]} fails on {value!r:.80}: {type(error).__name__}: {error}"
            ) from error

    def judged(task: Task, place: int, value: Any) -> float:
        target = task.targets[place]
        try:
            found = float(metrics[task.metric](value, target))
        except Exception as error:  # code of the user's
            raise UserError(f"metric {task.metric} fails on {value!r:.80} and {target!r:.80}: {error}") from error
        if not (math.isfinite(found) and 0 <= found <= 1):
            raise UserError(f"metric {task.metric} gave {found} for {value!r:.80}; it must lie in [0, 1]")
        return found

    @lru_cache(maxsize=100_000)
    def earned_by(number: int, chain: tuple[str, ...]) -> Verdict:
        task = tasks[number]
        if wrong := fault(task, chain, experts, most):
            return Verdict(-1.0, True, wrong)
        values = []
        for place in range(len(task.inputs)):
            try:
                values.append(output(number, place, chain))
            except UserError:
                raise
            except ValueError as error:
                return Verdict(-1.0, True, f"it cannot be run: {error}")
        return Verdict(sum(judged(task, k, value) for k, value in enumerate(values)) / len(values))

    return lambda task, chain: earned_by(task.number, chain)


def make_verify(experts: Mapping[str, Expert], earned: Callable[[Task, tuple[str, ...]], Verdict]) -> Verifier:
    """The verifier of plans in words; an answer is ``{"task": Task}``."""

    def verify(answer: dict[str, Any], response: str) -> Verdict:
        chain = named(response, experts)
        return Verdict(-1.0, True, "a line that is no expert") if chain is None else earned(answer["task"], chain)

    return verify


def blind_plans(
    train: Sequence[Task], held: Sequence[Task], experts: Mapping[str, Expert],
    earned: Callable[[Task, tuple[str, ...]], Verdict], most: int,
) -> float:  # fmt: skip
    """What the best plans score on held-out tasks that know the kinds alone, of those tried on training tasks.

    Tried are the worked plans and every single expert, for each pair of kinds on at most ``BLIND`` training tasks.
    """
    tried = sorted({task.plan for task in train if task.plan} | {(name,) for name in experts})
    best: dict[tuple[str, str], tuple[str, ...]] = {}
    total = 0.0
    for task in held:
        kinds = task.takes, task.gives
        if kinds not in best:
            alike = [other for other in train if (other.takes, other.gives) == kinds][:BLIND]
            fits = [chain for chain in tried if not fault(task, chain, experts, most)] or tried[:1]
            best[kinds] = max(fits, key=lambda chain, some=alike: sum(earned(x, chain).value for x in some))
        total += earned(task, best[kinds]).value
    return total / len(held)


# --- tasks


def _task(row: sources.Row, experts: Mapping[str, Expert], metrics: Mapping[str, Metric], most: int) -> Task:
    where, columns = row
    missing = next((name for name in ("input", "target") if name not in columns), "")
    if missing:
        raise DataError(f"{where}: lacks {missing}; it has {', '.join(columns)[:200]}")
    kinds = [field(columns, name, str, where) if name in columns else "text" for name in ("input_kind", "target_kind")]
    metric = field(columns, "metric", str, where) if "metric" in columns else "text"
    if metric not in metrics:
        raise DataError(
            f"{where}: metric {metric!r} is none of {', '.join(metrics)}; --metrics MODULE:FUNCTION adds more"
        )
    if not any(expert.takes == kinds[0] for expert in experts.values()):
        raise DataError(f"{where}: no expert takes input_kind {kinds[0]!r}; they take "
                        f"{', '.join(sorted({expert.takes for expert in experts.values()}))}")  # fmt: skip
    plan = tuple(field(columns, "plan", list, where)) if columns.get("plan") else ()
    if unknown := next((name for name in plan if name not in experts), None):
        raise DataError(f"{where}: plan: {unknown!r} is no expert; they are {', '.join(experts)[:200]}")
    told = field(columns, "instruction", str, where).strip()
    task = Task(-1, told, *kinds, metric, (columns["input"],), (columns["target"],), plan)
    wrong = "an expert comes twice" if len(set(plan)) < len(plan) else fault(task, plan, experts, most)
    if plan and wrong:
        raise DataError(f"{where}: plan: {wrong}")
    return task


def read_tasks(
    rows: Iterable[sources.Row], experts: Mapping[str, Expert], metrics: Mapping[str, Metric], most: int
) -> list[Task]:
    """The tasks of rows ``instruction, input, target`` and, where they are other than text, ``metric``, ``input_kind``
    and ``target_kind``; ``plan``, a list of names, is a worked one. Rows of one instruction are one task.

    Raises:
      DataError: for a malformed row.
    """
    found: dict[str, Task] = {}
    for row in rows:
        task = _task(row, experts, metrics, most)
        before = found.get(task.instruction)
        if before is None:
            found[task.instruction] = task._replace(number=len(found))
            continue
        if before[2:5] != task[2:5]:
            raise DataError(f"{row.where}: the same instruction has other kinds or another metric in a row before")
        found[task.instruction] = before._replace(
            inputs=before.inputs + task.inputs, targets=before.targets + task.targets, plan=before.plan or task.plan
        )
    return list(found.values())
