"""How many backtracks the traces of fine-tuning should hold before reinforcement learning.

Paper:     Cai et al., "How Much Backtracking is Enough? Exploring the Interplay of SFT and RL in Enhancing LLM
           Reasoning", arXiv:2505.24273.
Claim:     SFT on traces with synthetic backtracks makes RL better; the best number grows with the search space; whether
           the traces are right hardly matters.
Equations: trace(b) = the path to a solution with exactly b wrong nodes, each placed in some state of that path and
           taken off by BACK; SFT on the same puzzles for every b, then GRPO with reward 1 for a solved puzzle. wrong:
           the wrong nodes are those of another puzzle, in the same places, and the path stays, so that every trace
           solves its own; shuffled: every puzzle has the whole trace of another; cold: GRPO alone. distilled: the
           traces are right samples of a teacher, the same model after as much SFT on depth-first searches and twice the
           GRPO; distilled_wrong: its wrong ones; distilled_shuffled: right ones of another puzzle.
Left out:  a large reasoning model as teacher; the tasks are small forms of the paper's eight, those of the last five
           with one number of backtracks beside none.
Expect:    eval/accuracy at the end: sudoku_3 > sudoku_0; countdown_1 > countdown_0; line_0 > line_3 (a small space
           needs no backtracks); |sudoku_wrong - sudoku_3| < 0.05; sudoku_3 > sudoku_shuffled;
           |sudoku_distilled_wrong - sudoku_distilled| < 0.05. eval/room > 0.05 of the five tasks without backtracks:
           neither out of reach nor done, so that backtracks could show.
Measure:   96 puzzles (512 in a record; more than there are of a small task come more than once) x 8 samples, of a fifth
           of all that no training, of the base either, has in any order of their numbers, clues or statements:
           Countdown of three numbers up to 9, 4 x 4 Sudoku with eight blanks, lines under one of six rules; and
           polygons, turned cubes, functions of lists, three houses, statements about themselves, which the claim does
           not name. The base has read paths of its tasks (the first three, or the last five), half of them those of
           another puzzle. All have equal updates of GRPO, all but cold equal ones of SFT before. One response for all
           puzzles solves at most .005 of Countdown, .001 of Sudoku, .04 of lines; .09 of polygons, .003 of cubes, .10
           of lists, .04 of houses, .08 of statements; a solver's traces solve all. The bed is invalid unless sudoku_0
           and countdown_0 end above 0.2.
Run:       python -m experiments.analysis.how_much_backtracking
"""

import dataclasses
from collections.abc import Callable

from experiments.analysis.parts import search_puzzles, search_traces
from experiments.analysis.parts import search_traces_task as toy
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes

EMBEDDED_ONLY = "its traces are searches of eight generated tasks with a given share of backtracking"


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """Sizes for the small model."""

    steps: int = 40  # of GRPO
    eval_every: int = 50
    learning_rate: float = 1e-3
    prompts_per_step: int = 8
    group_size: int = 8
    base_steps: int = 400
    imitation_steps: int = 2000
    imitation_rate: float = 3e-3  # once measured alone: Countdown .25 after 1000 steps, Sudoku .14 after 1200
    train_problems: int = 6000
    task: int = toy.SUDOKU
    back: int = 3  # below 0: no imitation
    swapped: str = ""  # of search_traces_task.make_table
    read: Callable = search_traces.draw_first  # what the base has read
    eval_problems: int = 96  # puzzles that are measured, and more of them in a record
    eval_samples: int = 8  # of each of them
    teacher: search_traces.Kept | None = None  # which samples of a stronger run are imitated; None: written traces
    teacher_steps: int = 2000  # of its imitation of searches, as many as a learner's and at the same rate
    teacher_rewarded: int = 80  # of its GRPO
    distilled_puzzles: int = 1024
    distilled_samples: int = 4  # of each


SMOKE = {
    "steps": 1, "eval_every": 2, "base_steps": 1, "imitation_steps": 1, "prompts_per_step": 2, "group_size": 2,
    "train_problems": 48, "eval_problems": 16, "eval_samples": 2, "teacher_steps": 1, "teacher_rewarded": 1,
    "distilled_puzzles": 16, "distilled_samples": 2,
}  # fmt: skip
OTHERS = {"read": search_traces.draw_others}
ARMS = {
    "sudoku_0": {"back": 0},
    "sudoku_1": {"back": 1},
    "sudoku_3": {},
    "sudoku_6": {"back": 6},
    "sudoku_wrong": {"swapped": "nodes"},
    "sudoku_shuffled": {"swapped": "traces"},
    "sudoku_cold": {"back": -1},
    "sudoku_distilled": {"teacher": search_traces.right_ones},
    "sudoku_distilled_wrong": {"teacher": search_traces.wrong_ones},
    "sudoku_distilled_shuffled": {"teacher": search_traces.right_ones, "swapped": "traces"},
    "countdown_0": {"task": toy.COUNTDOWN, "back": 0},
    "countdown_1": {"task": toy.COUNTDOWN, "back": 1},
    "countdown_3": {"task": toy.COUNTDOWN},
    "line_0": {"task": toy.LINE, "back": 0},
    "line_1": {"task": toy.LINE, "back": 1},
    "line_3": {"task": toy.LINE},
    "geometry_0": OTHERS | {"task": search_puzzles.GEOMETRY, "back": 0},
    "geometry_3": OTHERS | {"task": search_puzzles.GEOMETRY},
    "cube_0": OTHERS | {"task": search_puzzles.CUBE, "back": 0},
    "cube_3": OTHERS | {"task": search_puzzles.CUBE},
    "list_0": OTHERS | {"task": search_puzzles.LIST, "back": 0},
    "list_3": OTHERS | {"task": search_puzzles.LIST},
    "zebra_0": OTHERS | {"task": search_puzzles.ZEBRA, "back": 0},
    "zebra_3": OTHERS | {"task": search_puzzles.ZEBRA},
    "self_0": OTHERS | {"task": search_puzzles.SELF, "back": 0},
    "self_3": OTHERS | {"task": search_puzzles.SELF},
}
BED = experiment.Bed(
    metric="eval/accuracy", baseline="sudoku_0",
    judges=(("sudoku_0", "eval/accuracy", 0.2), ("countdown_0", "eval/accuracy", 0.2)),
)  # fmt: skip
NEWER = ("geometry_0", "cube_0", "list_0", "zebra_0", "self_0")
METRICS = ("eval/accuracy", "eval/pass@8", "eval/backs", "eval/tokens", "eval/room")
CURVES = (*METRICS, "reward/mean", "policy/entropy", "teacher/kept")


def build(settings: Settings) -> experiment.Plan:
    """Imitation of traces with so many backtracks, then GRPO."""
    rows, rate = settings.prompts_per_step * settings.group_size, settings.learning_rate
    online = search_traces.reward_stage(
        settings.task, steps=settings.steps, prompts_per_step=settings.prompts_per_step,
        group_size=settings.group_size, learning_rate=rate, puzzles=settings.train_problems,
    )  # fmt: skip
    stages = (online,)
    if settings.teacher is not None:
        made = search_traces.distilled(
            settings.task, settings.teacher, settings.swapped, learning_rate=rate, rows_per_step=rows,
            teacher=(settings.teacher_steps, settings.teacher_rewarded), taught=settings.train_problems,
            imitation_rate=settings.imitation_rate, puzzles=settings.distilled_puzzles,
            samples=settings.distilled_samples, prompts_per_step=settings.prompts_per_step,
        )  # fmt: skip
        imitation = search_traces.distilled_stage(
            made, steps=settings.imitation_steps, rows_per_step=rows, learning_rate=settings.imitation_rate
        )
        stages = (imitation, online)
    elif settings.back >= 0:
        made = search_traces.traces(settings.task, (settings.back,), settings.swapped, puzzles=settings.train_problems)
        imitation = search_traces.imitation_stage(
            made, steps=settings.imitation_steps, rows_per_step=rows, learning_rate=settings.imitation_rate
        )
        stages = (imitation, online)
    base = strings.make_base(search_traces.WORLD, settings.read, steps=settings.base_steps, table=3600)
    sizes = {"problems": settings.eval_problems, "samples": settings.eval_samples}
    return experiment.Plan(base, stages, strings.bound(search_traces.measure, settings.task, **sizes))


def claim(results: experiment.Results) -> experiment.Claim:
    """Three backtracks help Sudoku, one Countdown, none a small space; wrong work of equal structure ends alike."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "sudoku_3", "sudoku_0"),
        experiment.greater(results, "eval/accuracy", "countdown_1", "countdown_0"),
        experiment.greater(results, "eval/accuracy", "line_0", "line_3"),
        experiment.close(results, "eval/accuracy", "sudoku_wrong", "sudoku_3", within=0.05),
        experiment.greater(results, "eval/accuracy", "sudoku_3", "sudoku_shuffled"),
        experiment.close(results, "eval/accuracy", "sudoku_distilled_wrong", "sudoku_distilled", within=0.05),
        *(experiment.above(results, "eval/room", arm, 0.05) for arm in NEWER),
    )


if __name__ == "__main__":
    experiment.main(__name__)
