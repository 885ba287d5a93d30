"""Prefixes of the reference solution for prompts that are too hard now (GHPO).

Paper:     Liu et al., "GHPO: Adaptive Guidance for Stable and Efficient LLM Reinforcement Learning", arXiv:2507.10628.
Claim:     giving longer and longer prefixes of the reference solution, only to prompts whose whole group fails, turns
           groups without a gradient into imitation near the solution, and beats plain GRPO and a fixed hint for all.
Equations: G rollouts; for w in (0.25, 0.5, 0.75) in turn, a group still all wrong is drawn again with the first round(w
           |solution|) characters of the solution behind the prompt; A = (r - mean) / (std + 1e-4); gradients under the
           prompt with the hint. half: w = 0.5 only; always: w = 0.5 for every group; resample: up to three more draws
           without a hint (as many rollouts as ghpo); grpo: one draw; static: every group under hints of w = 0.75, 0.5,
           0.25 and 0 in the quarters of the run; sft_grpo: fine-tuning on the solutions, then grpo.
Left out:  the format reward of weight 0.5 (Countdown's steps have none), a cold start with hints for all, the
           released code's reset of hinted prompts to plain ones (it looks like a mistake); problems of which one
           response in twenty or fewer is right: 4 numbers are the most, the base answers 0.08 of them, and alone they
           leave GRPO at 0.10, where the gates of a bed begin.
Expect:    eval/accuracy ghpo > resample and ghpo > always; group/degenerate_fraction ghpo < resample.
Measure:   held-out Countdown with 3 and 4 numbers without hints; 8 seeds; hints/draws tells the draws of a prompt,
           the columns rollouts and tokens count all of them.
Run:       python -m experiments.curriculum.ghpo
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from experiments.curriculum.parts import hints
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import curricula, recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 300
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)  # of the solution, one further draw each
    needs: Callable[..., object] = hints.all_wrong
    quarters: tuple[float, ...] = ()  # shares for every group, one after another in equal parts of the run
    sft_steps: int = 0  # on the solutions, before
    sft_rate: float = 1e-5  # of those steps; 0: learning_rate


EMBEDDED = {
    "data": "countdown", "levels": (3, 4), "steps": 80, "eval_every": 40, "prompts_per_step": 10, "group_size": 4,
    "max_new_tokens": 28, "learning_rate": 3e-4, "eval_problems": 96, "eval_samples": 8, "train_problems": 1024,
    "sft_rate": 0.0,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 28, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 8,
}  # fmt: skip
ARMS = {
    "grpo": {"shares": ()},
    "resample": {"shares": (0.0, 0.0, 0.0)},
    "always": {"shares": (0.5,), "needs": hints.everyone},
    "half": {"shares": (0.5,)},
    "ghpo": {},
    "static": {"quarters": (0.75, 0.5, 0.25, 0.0), "needs": hints.everyone},
    "sft_grpo": {"shares": (), "sft_steps": 60},
}
BEGINNING = "\nThe following text is the beginning of the answer, which you may use: "  # before a hint in a message
METRICS = ("eval/accuracy", "eval/pass@8", "group/degenerate_fraction", "hints/draws")
CURVES = (*METRICS, "reward/mean", "policy/entropy", "grad/norm")


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose failed groups are drawn again under longer and longer prefixes."""
    found = recipes.bench(settings)
    if not settings.quarters:
        plan = recipes.one_stage(settings, found, hinted(settings, found, settings.shares))
    else:
        count = len(settings.quarters)
        steps = [settings.steps * (k + 1) // count - settings.steps * k // count for k in range(count)]
        parts = zip(settings.quarters, steps, strict=True)
        stages = [experiment.Stage(hinted(settings, found, (share,)), n) for share, n in parts if n]
        plan = curricula.make_single_turn_plan(settings, found, stages)
    if not settings.sft_steps:
        return plan
    numbers = {"steps": settings.sft_steps, "learning_rate": settings.sft_rate or settings.learning_rate}
    return plan._replace(init=lambda key: curricula.solutions_imitated(settings, **numbers))


def hinted(settings: Settings, found: recipes.Bench, shares: tuple[float, ...]):
    """GRPO whose groups that need it are drawn again under prefixes of these shares."""
    rollout = recipes.rollout_of(settings, found)
    asked = (hints.no_hint, *(hints.make_prefix_hint(share) for share in shares))
    slots = hints.make_staged_rollout(
        rollout,
        curricula.train_score(found),
        found.train.answers,
        hints.encode_hints(found.model, recipes.solved_problems(settings), asked, chat=settings.chat, phrase=BEGINNING),
        group_size=settings.group_size,
        needs=settings.needs,
    )
    return curricula.make_single_turn_grpo(
        settings,
        found,
        advantages=partial(group.group_normalized_advantages, eps=1e-4),
        row_extras=hints.draw_extras,
        diagnostics=hints.draw_figures,
        **slots,
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """Prefixes for failed groups beat as many draws without them and a fixed prefix for all, with fewer idle groups."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "ghpo", "resample"),
        experiment.greater(results, "eval/accuracy", "ghpo", "always"),
        experiment.smaller(results, "group/degenerate_fraction", "ghpo", "resample"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
