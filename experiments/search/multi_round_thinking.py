"""Asking the same model again with its last answer in the prompt (Think Twice).

Paper:     Tian et al., "Think Twice: Enhancing LLM Reasoning by Scaling Multi-round Test-time Thinking",
           arXiv:2503.19855.
Claim:     without any training a second round, which sees the first one's final answer and not its reasoning, raises
           accuracy (AIME 2024: 80.3 to 82.1 for QwQ-32B); more rounds raise it further.
Equations: P_1 = P, P_n = P and the final answer A_{n-1} in fixed words, a fresh context each; accuracy of A_N. once,
           twice, four: N; again: P_n = P; anothers: A_{n-1} of another problem; keep: an oracle stops at the first
           right answer; vote: the most frequent answer of four independent ones; forward_once, forward_twice: on chains
           that only work itself can check; forward_whole: the whole response in the place of the answer; tuned: twice,
           after fine-tuning on second rounds alone, own first answers and right responses to them. acc_2 = acc_1 +
           P(wrong to right) - P(right to wrong), second/fixed and second/spoilt.
Left out:  a stronger model's responses for tuned, which the paper found of no use. The embedded model samples with
           temperature 0.8: at the paper's 0.6 nothing can be gained (an oracle 0.04), at 1 it does not repeat what it
           knows to be right.
Expect:    eval/accuracy: twice > once, four > twice, twice > again, twice > anothers; |forward_twice - forward_once| <
           0.02: a gain needs a check that is cheaper than a solution.
Measure:   held-out Countdown with three numbers, where an answer is checked by its last number. Bundled models have
           never read a second round: each seed fine-tunes one on plain problems, on problems with the worked solution
           as previous answer, which it repeats, and on problems with an answer of the base's own, which it repeats
           where it is right and replaces where it is wrong. No learning rate belongs to the method, so that none is
           tuned; tokens of all rounds in the table. The bed is invalid unless keep gains 0.05, once solves 0.15, and
           twice is right behind 0.8 of the right answers that it is shown (second/kept).
Run:       python -m experiments.search.multi_round_thinking; on your own with --model DIR --data FILE --chat --arm once
           twice four again anothers keep vote tuned, for the arms on chains are of the bundled models
"""

import dataclasses
from collections.abc import Callable

from experiments.search.parts import rounds
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, recipes
from jaxrl_llm.run import bench


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    max_new_tokens: int = 16384
    temperature: float = 0.6
    shown: Callable = rounds.final_answer
    ask: Callable[[str, str], str] = rounds.as_published
    counted: Callable = rounds.last_round
    rounds: int = 2  # below what is taken from the module of this name
    taught_steps: int = 0  # supervised steps on second rounds, for a model that has never read one
    tuned_steps: int = 0  # and on second rounds alone


EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 2048, "eval_problems": 192, "max_new_tokens": 18,
    "ask": rounds.in_signs, "taught_steps": 2400, "learning_rate": 1e-3,
    "temperature": 0.8,
}  # fmt: skip
SMOKE = {
    "max_new_tokens": 8, "train_problems": 16, "eval_problems": 8, "eval_samples": 2, "taught_steps": 2,
    "prompts_per_step": 2, "group_size": 2,
}  # fmt: skip
FORWARD = {"data": "chain", "levels": (4, 5), "max_new_tokens": 40}
ARMS = {
    "once": {"rounds": 1},
    "twice": {},
    "four": {"rounds": 4},
    "again": {"shown": rounds.nothing},
    "anothers": {"shown": rounds.anothers},
    "keep": {"counted": rounds.first_right},
    "vote": {"rounds": 4, "shown": rounds.nothing, "counted": rounds.majority},
    "tuned": {"tuned_steps": 300},
    "forward_once": FORWARD | {"rounds": 1},
    "forward_twice": FORWARD,
    "forward_whole": FORWARD | {"shown": rounds.whole_response},
}
METHOD = "twice"
METRICS = ("eval/accuracy", "eval/gain", "eval/tokens")
CURVES = (*METRICS, "second/kept", "second/fixed", "second/spoilt", "second/same")
D_STAR = {"eval/accuracy": 0.02}
BED = experiment.Bed(
    judges=(("keep", "eval/gain", 0.05), ("once", "eval/accuracy", 0.15), ("twice", "second/kept", 0.8))
)


def check_chains(settings: Settings) -> None:
    """Refuses chains where a model or rows of one's own are asked for: an arm on chains never reads the rows.

    Raises:
      UserError: naming the arms that do.
    """
    own = settings.format != Settings.format or settings.verifier or settings.chat
    if arms.bundled(settings.model) and not own:
        return
    if all(getattr(settings, name) == value for name, value in FORWARD.items()):
        named = [name for name, changes in ARMS.items() if changes.items() >= FORWARD.items()]
        rest = " ".join(name for name in ARMS if name not in named)
        raise UserError(f"arms {', '.join(named)} are on the chains of the bundled models and read no rows of your "
                        f"own; give --arm {rest}")  # fmt: skip


def build(settings: Settings) -> experiment.Plan:
    """No training: rounds over the held-out problems, judged in Python."""
    check_chains(settings)
    found, samples = recipes.bench(settings), settings.eval_samples
    play = rounds.make_rounds(
        settings, bench.heldout_problems(settings), found.heldout_score, number=settings.rounds, samples=samples,
        shown=settings.shown, ask=settings.ask,
    )  # fmt: skip

    def measure(params, key):
        played = play(params, key)
        return rounds.figures(played, settings.counted(played, samples), samples)

    return experiment.Plan(rounds.make_tuned(settings), (), measure, on_host=True, model=found.model)


def claim(results: experiment.Results) -> experiment.Claim:
    """A second round that sees the first one's answer is right more often than the first, and more rounds more so."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "twice", "once"),
        experiment.greater(results, "eval/accuracy", "four", "twice"),
        experiment.greater(results, "eval/accuracy", "twice", "again"),
        experiment.greater(results, "eval/accuracy", "twice", "anothers"),
        experiment.close(results, "eval/accuracy", "forward_twice", "forward_once", within=0.02),
    )


if __name__ == "__main__":
    experiment.main(__name__)
