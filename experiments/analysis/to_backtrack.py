"""Search in one long text against many short direct answers, at equal test compute, before and after RL.

Paper:     Qin et al., "To Backtrack or Not to Backtrack: When Sequential Search Limits Model Reasoning",
           arXiv:2504.07052.
Claim:     at equal compute, models that backtrack lose to best of n direct answers on Countdown and win on Sudoku; RL
           helps them much and direct ones little.
Equations: F(L) = 2 N L + 2 layers d L^2 operations for L tokens; budgets are 1, 4, 16 and 64 direct answers; samples
           are drawn one after another, and a puzzle is solved if one that is finished within the budget is right.
           backtrack: the trace of a depth-first search, a node, what lies below it, BACK where that failed; order: all
           puzzles are searched in one fixed order of the children; think_less: each failed subtree is left out with
           chance 1/2; direct: the path alone. GRPO after imitation, reward 1 for a solved puzzle.
Left out:  models of 10 to 40 million parameters; 9 x 9 grids. Countdown has two steps, where the paper has three.
Expect:    after imitation at budget 16: Countdown: direct > backtrack, Sudoku: the other way; gain by RL in
           eval/accuracy: larger for backtrack than for direct on Sudoku; pass@8 of direct falls by RL (shown).
Measure:   96 fresh puzzles; the curve's first steps are imitation. Equal puzzles, rollouts and updates. The bed is
           invalid unless the direct arms end imitation between 0.2 and 0.6.
Run:       python -m experiments.analysis.to_backtrack
"""

import dataclasses
from collections.abc import Callable

from experiments.analysis.parts import search_traces
from experiments.analysis.parts import search_traces_task as toy
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """Sizes for the small model."""

    steps: int = 50  # of GRPO
    eval_every: int = 50
    learning_rate: float = 1e-3
    prompts_per_step: int = 8
    group_size: int = 8
    base_steps: int = 400
    imitation_steps: int = 300
    train_problems: int = 3000
    task: int = toy.SUDOKU
    how: Callable = toy.by_search  # who writes the traces
    shown: float = 1.0
    samples: int = 16  # of each puzzle in the measurement


SMOKE = {
    "steps": 2, "eval_every": 2, "base_steps": 1, "imitation_steps": 2, "prompts_per_step": 2, "group_size": 2,
    "train_problems": 48, "samples": 2,
}  # fmt: skip
DIRECT = {"how": toy.by_number, "samples": 64}
ARMS = {
    "sudoku_direct": DIRECT,
    "sudoku_backtrack": {},
    "sudoku_order": {"how": toy.by_fixed_order},
    "sudoku_think_less": {"shown": 0.5},
    "countdown_direct": {"task": toy.COUNTDOWN} | DIRECT,
    "countdown_backtrack": {"task": toy.COUNTDOWN},
    "countdown_order": {"task": toy.COUNTDOWN, "how": toy.by_fixed_order},
    "countdown_think_less": {"task": toy.COUNTDOWN, "shown": 0.5},
}
BUDGETS = tuple(f"budget{b}/solved" for b in search_traces.BUDGETS)
METRICS = (*BUDGETS, "eval/accuracy", "eval/pass@8", "eval/backs", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "rows/kept")
BED = experiment.Bed(
    metric="eval/accuracy", baseline="sudoku_direct",
    judges=(("sudoku_direct", "eval/accuracy", 0.2), ("countdown_direct", "eval/accuracy", 0.2)),
)  # fmt: skip


def build(settings: Settings) -> experiment.Plan:
    """Imitation of traces, then GRPO."""
    rows, rate = settings.prompts_per_step * settings.group_size, settings.learning_rate
    made = search_traces.traces(
        settings.task, (0,), how=settings.how, shown=settings.shown, puzzles=settings.train_problems
    )
    stages = (
        search_traces.imitation_stage(made, steps=settings.imitation_steps, rows_per_step=rows, learning_rate=rate),
        search_traces.reward_stage(
            settings.task, steps=settings.steps, prompts_per_step=settings.prompts_per_step,
            group_size=settings.group_size, learning_rate=rate, puzzles=settings.train_problems,
        ),
    )  # fmt: skip
    base = strings.make_base(search_traces.WORLD, search_traces.draw_first, steps=settings.base_steps, table=3600)
    return experiment.Plan(base, stages, search_traces.make_measure(settings.task, samples=settings.samples))


def claim(results: experiment.Results) -> experiment.Claim:
    """Best of n direct answers wins on Countdown, backtracking on Sudoku, where RL also helps it more."""
    arms = ("countdown_direct", "countdown_backtrack", "sudoku_backtrack", "sudoku_direct")
    before = int(results.curve("sudoku_direct", "rows/kept")[0][-1])  # the last step of imitation
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "budget16/solved", arms[0], arms[1], step=before),
        experiment.greater(results, "budget16/solved", arms[2], arms[3], step=before),
        experiment.grows_more(results, "eval/accuracy", arms[2], arms[3], start=before),
        experiment.greater(results, "budget64/solved", arms[0], arms[1], step=before),
        experiment.greater(results, "budget64/solved", arms[2], arms[3], step=before),
    )


if __name__ == "__main__":
    experiment.main(__name__)
