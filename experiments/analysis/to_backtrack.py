"""Search in one long text against many short direct answers, at equal test compute, before and after RL.

Paper:     Qin et al., "To Backtrack or Not to Backtrack: When Sequential Search Limits Model Reasoning",
           arXiv:2504.07052.
Claim:     at equal compute, models that backtrack lose to best of n direct answers on Countdown and win on Sudoku; RL
           helps them much and direct ones little.
Equations: F(L) = 2 N L + 2 layers d L^2 operations for L tokens; n = F(whole length) / F(direct length) samples of the
           direct model, solved if any is. backtrack: traces with up to six wrong branches; order: always three;
           think_less: each wrong branch left out with chance 1/2. GRPO after imitation, reward 1 for a solved puzzle.
Left out:  curves over the budget; models of 10 to 40 million parameters.
Expect:    after imitation: Countdown: best_of_n of direct > accuracy of backtrack, Sudoku: the other way; gain by RL
           in eval/accuracy: larger for backtrack than for direct on Sudoku.
Measure:   128 fresh puzzles; step 150 is the end of imitation. 8 seeds, equal puzzles, rollouts and updates.
           compute/solved is accuracy for backtracking arms and best_of_n for direct ones.
Run:       python -m experiments.analysis.to_backtrack
"""

import dataclasses

from experiments.analysis.parts import search_traces
from experiments.analysis.parts import search_traces_task as toy
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes

ANY = (0, 1, 2, 3, 4, 5, 6)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """Sizes for the small model."""

    steps: int = 50  # of GRPO
    eval_every: int = 50
    learning_rate: float = 1e-3
    prompts_per_step: int = 8
    group_size: int = 8
    base_steps: int = 200
    imitation_steps: int = 150
    train_problems: int = 3000
    task: int = toy.SUDOKU
    back: tuple[int, ...] = ANY
    shown: float = 1.0


SMOKE = {
    "steps": 2, "eval_every": 2, "base_steps": 1, "imitation_steps": 2, "prompts_per_step": 2, "group_size": 2,
    "train_problems": 48,
}  # fmt: skip
ARMS = {
    "sudoku_direct": {"back": (0,)},
    "sudoku_backtrack": {},
    "sudoku_order": {"back": (3,)},
    "sudoku_think_less": {"shown": 0.5},
    "countdown_direct": {"task": toy.COUNTDOWN, "back": (0,)},
    "countdown_backtrack": {"task": toy.COUNTDOWN},
}
METRICS = ("compute/solved", "eval/accuracy", "eval/pass@8", "eval/backs", "eval/tokens")
CURVES = (*METRICS, "reward/mean")


def build(settings: Settings) -> experiment.Plan:
    """Imitation of traces, then GRPO."""
    rows, rate = settings.prompts_per_step * settings.group_size, settings.learning_rate
    made = search_traces.traces(settings.task, settings.back, False, settings.shown, settings.train_problems)
    stages = (
        search_traces.imitation_stage(made, steps=settings.imitation_steps, rows_per_step=rows, learning_rate=rate),
        search_traces.reward_stage(
            settings.task, steps=settings.steps, prompts_per_step=settings.prompts_per_step,
            group_size=settings.group_size, learning_rate=rate, puzzles=settings.train_problems,
        ),
    )  # fmt: skip
    base = strings.make_base(search_traces.WORLD, search_traces.draw_first, steps=settings.base_steps, table=2400)
    measure = search_traces.make_measure(settings.task, spent_on_one=settings.back != (0,))
    return experiment.Plan(base, stages, measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Best of n direct answers wins on Countdown, backtracking on Sudoku, where RL also helps it more."""
    arms = ("countdown_direct", "countdown_backtrack", "sudoku_backtrack", "sudoku_direct")
    before = int(results.curve("sudoku_direct", "rows/kept")[0][-1])  # the last step of imitation
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "compute/solved", arms[0], arms[1], step=before),
        experiment.greater(results, "compute/solved", arms[2], arms[3], step=before),
        experiment.grows_more(results, "eval/accuracy", arms[2], arms[3], start=before),
    )


if __name__ == "__main__":
    experiment.main(__name__)
