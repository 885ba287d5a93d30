"""A quick and a long-winded model merged into one that reasons briefly (long-to-short by merging).

Paper:     Wu et al., "Unlocking Efficient Long-to-Short LLM Reasoning with Model Merging", arXiv:2503.20641.
Claim:     merging a quick model with one of long reasoning, without any training, halves the length at equal accuracy;
           task arithmetic and TIES do better than plain averaging, DARE does not help.
Equations: theta_0 the quick model, delta = slow - theta_0. ta: theta_0 + alpha delta, alpha 0.7 (ta_6, ta_8, ta_9:
           0.6, 0.8, 0.9); average: mean of both, which is alpha 0.5; ties: delta with 80 % of each tensor trimmed;
           dare_ties: delta dropped at 0.3 first; aim_ties: theta_0 + (1 - 0.6 S) (ties - theta_0), S the input
           activations. About the common base: lore, twin: shared part and low-rank rests; sens: a coefficient for each
           layer, softmax of its sensitivity.
           dpo: the long-winded model trained on pairs (short preferred, long rejected).
Left out:  models with separate pre-training; Sens-Merging is a reconstruction; settings are the paper's for 1.5B
           (LoRE's penalty and Twin's rank, which it does not give, are 0.1 and 4).
Expect:    ta, chosen beforehand: eval/tokens at least 40 % below slow at eval/accuracy no more than 0.01 below; ta and
           ties > average, and dare_ties < ties, in eval/accuracy. Work written once is 50 % below slow. The registered
           margin is 0.4 times the mean length of slow over the judged seeds, without an error of its own.
Measure:   held-out chains of 2 and 3 operations; quick writes its work once, slow twice (both trained in every arm, 8
           seeds); eval/reflection: responses that begin the work again; a constant answer is right for 0.16, ceiling 1.
           In the record nothing is traded for length: quick is more accurate than slow (0.919 against 0.898), so that
           every step from it towards slow costs both. The bed is invalid unless slow is more accurate than quick.
Run:       python -m experiments.efficiency.l2s_merging
"""

import dataclasses
from collections.abc import Callable

import optax

from experiments.efficiency.parts import long_short
from jaxrl_llm import experiment
from jaxrl_llm.experiment import curricula, recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values for 1.5B; see EMBEDDED for the small model."""

    steps: int = 100  # supervised steps that make the two models
    rows_per_step: int = 32
    merge: Callable = long_short.ties
    dpo_steps: int = 0  # on the slow model, in place of a merge
    dpo_beta: float = 0.1


EMBEDDED = {
    "levels": (2, 3), "steps": 60, "eval_every": 60, "rows_per_step": 24, "max_new_tokens": 48, "learning_rate": 3e-4,
    "train_problems": 1024, "eval_problems": 96,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "max_new_tokens": 10, "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
    "rows_per_step": 4, "prompts_per_step": 2,
}  # fmt: skip
ARMS = {
    "slow": {"merge": long_short.slow},
    "ties": {},
    "ta": {"merge": long_short.make_task_arithmetic(0.7)},
    "ta_6": {"merge": long_short.make_task_arithmetic(0.6)},
    "ta_8": {"merge": long_short.make_task_arithmetic(0.8)},
    "ta_9": {"merge": long_short.make_task_arithmetic(0.9)},
    "average": {"merge": long_short.average},
    "quick": {"merge": long_short.quick},
    "dare_ties": {"merge": long_short.dare_ties},
    "lore": {"merge": long_short.lore},
    "twin": {"merge": long_short.twin},
    "aim_ties": {"merge": long_short.aim_ties},
    "sens": {"merge": long_short.sens},
    "dpo": {"merge": long_short.slow, "dpo_steps": 40},
}
METHOD = "ta"
# what merging keeps of the long-winded model must be worth keeping: its accuracy has to be above the quick one's
BED = experiment.Bed(metric="eval/accuracy", baseline="quick", chance=0.16, positive="slow")
METRICS = ("eval/accuracy", "eval/tokens", "eval/reflection", "eval/pass@4")
CURVES = ("eval/accuracy", "eval/tokens", "eval/reflection", "sft/loss")


def build(settings: Settings) -> experiment.Plan:
    """A stage that trains both models side by side; their merge is what is measured and exported."""
    found = recipes.bench(settings)
    tables = long_short.make_tables(found, curricula.train_problems(settings))
    tx = optax.adam(settings.learning_rate)
    both = long_short.make_experts(found.model.policy, tables, rows_per_step=settings.rows_per_step, tx=tx)
    stages = [experiment.Stage(both, settings.steps)]
    if settings.dpo_steps:
        tx = optax.adam(settings.learning_rate / 10)
        pairs = long_short.make_dpo(
            found.model.policy, tables, rows_per_step=settings.rows_per_step, tx=tx, beta=settings.dpo_beta
        )
        stages.append(experiment.Stage(pairs, settings.dpo_steps, long_short.reference_extras))
    plan = curricula.make_single_turn_plan(settings, found, stages, more=long_short.reflections)

    def merged(params, key):
        return settings.merge(found.model, params, tables, key)

    return plan._replace(init=lambda key: {"quick": found.model.params, "slow": found.model.params}, finish=merged)


def claim(results: experiment.Results) -> experiment.Claim:
    """Task arithmetic shortens by 40 % at 0.01 accuracy, it and TIES beat averaging, and DARE does not help."""
    length = 0.4 * float(results.values("slow", "eval/tokens").mean())
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller(results, "eval/tokens", "ta", "slow", by=length),
        experiment.greater(results, "eval/accuracy", "ta", "slow", by=-0.01),
        experiment.greater(results, "eval/accuracy", "ta", "average"),
        experiment.greater(results, "eval/accuracy", "ties", "average"),
        experiment.smaller(results, "eval/accuracy", "dare_ties", "ties"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
