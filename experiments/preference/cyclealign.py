"""A ranker and a policy that teach each other: agreed rankings become the ranker's next examples (CycleAlign).

Paper:     Hong et al., "CycleAlign: Iterative Distillation from Black-box LLM to White-box Models for Better Human
           Alignment", arXiv:2310.16271.
Claim:     a black-box ranker shown rankings on which it agreed with the policy ranks better, and so aligns the policy
           better, than with fixed examples.
Equations: rankings rho_b of the black box and rho_w by length-normalised log-probability; loss sum_{i<j in rho_b}
           relu(p_j - p_i) - lp(best) (pro: -sum_k log e^{p_k} / sum_{j>=k} e^{p_j} - lp(best)); agreement: their
           longest common subsequence, if of two or more, joins the last three examples D. white: the policy's ranking
           joins; shuffled: a random one; static: none does. All begin with three demonstrations that people wrote.
Left out:  a language model as black box that is shown D: each question waits for the examples of the last one, 512 of
           them in a row. The ranking is the true one with noise of deviation 4 (1 - 0.9 q), q the mean quality of D
           (right less wrong pairs over all): worthless or misleading examples help nothing. Over rows of one's own the
           noise is in units of the judge's deviation; a model that judges (--rater, --judge-model) errs by itself, is
           shown no examples and gets no noise, so that the arms differ in their losses alone. D lives for one round:
           each of the four begins anew with the three demonstrations.
Expect:    eval/gold at eval/kl 2: cycle > static, cycle > shuffled, cycle > white; rank/accuracy: likewise.
Measure:   true reward of samples on fresh prompts; share of pairs that the ranker orders rightly; three responses of
           the policy and one of the data for each of 128 prompts in each of four rounds; equal updates. In the first
           record static had no demonstration, and any example helped as much as an agreed one. In the second, judged at
           4 nats, static ended at 2.9: what agreement brings is a longer way for the same updates. At 2 nats, where
           both arms come by, they earned alike, +0.16 [-0.21, +0.54]; there it is judged now. Tuned, static takes twice
           the rate of cycle; with 0.004 for both, cycle gains +0.35 [-0.15, +0.85].
Run:       python -m experiments.preference.cyclealign [--world larger, a base of seven times the parameters]
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import noisy_ranker
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import ranking

CANDIDATES = noisy_ranker.CANDIDATES


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Numbers of candidates, examples and rounds are the paper's; the rest fits the small model."""

    steps: int = 40  # of a round
    eval_every: int = 10
    learning_rate: float = 1e-3
    reference_steps: int = 200
    rounds: int = 4
    prompts: int = 128
    example: Callable = noisy_ranker.agreed
    loss: Callable = ranking.rrhf_loss
    likelihood: float = 1.0


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "rounds": 1, "prompts": 8}
ARMS = {
    "static": {"example": noisy_ranker.nothing},
    "cycle": {},
    "white": {"example": noisy_ranker.own},
    "shuffled": {"example": noisy_ranker.shuffled},
    "cycle_pro": {"loss": ranking.pro_loss},
    "static_pro": {"example": noisy_ranker.nothing, "loss": ranking.pro_loss},
}
WORLDS = {"strings": toy.STRINGS, "larger": toy.LARGER}
METRICS = ("eval/gold", "rank/accuracy", "eval/kl", "eval/unseen")
CURVES = METRICS


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """Rounds of sampling, ranking and training on the order."""

    def loss(params, extras, batch):
        asked, ordered, right = batch
        flat = ordered.reshape(-1, ordered.shape[2])
        logp = strings.sum_logp(task.world, params["policy"], jnp.repeat(asked, CANDIDATES, axis=0), flat)
        logp = logp.reshape(-1, CANDIDATES)
        each = logp / strings.token_counts(task.world, ordered)
        value = settings.loss(each, logp[:, 0], likelihood=settings.likelihood)
        trained = jnp.asarray(float(flat.size), jnp.float32)
        return reduce.scalars(value), {"rank/accuracy": reduce.scalars(right), "tokens/trained": trained}

    stage = strings.table_stage(
        noisy_ranker.make_rows(task, settings.prompts, settings.example), loss, steps=settings.steps, rows_per_step=32,
        learning_rate=settings.learning_rate,
    )  # fmt: skip
    start = preference_strings.make_start(task, reference_steps=settings.reference_steps)

    def init(key):
        return start(key) | {"examples": noisy_ranker.fixed_examples(task, jax.random.fold_in(key, 12))}

    return experiment.Plan(init, (stage,) * settings.rounds, strings.bound(preference_strings.measure_parts, task))


def claim(results: experiment.Results) -> experiment.Claim:
    """With agreed rankings as its examples the ranker is right more often and the policy earns more."""
    fixed = experiment.at("eval/kl", 2.0)
    others = ("static", "shuffled", "white")
    parts = [experiment.greater(results, "eval/gold", "cycle", other, step=fixed) for other in others]
    ranks = [experiment.greater(results, "rank/accuracy", "cycle", other) for other in others]
    return experiment.conclude(" ".join(claim.__doc__.split()), *parts, *ranks)


if __name__ == "__main__":
    experiment.main(__name__)
