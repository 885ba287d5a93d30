"""Wrong answers of one's own, corrected at the step that spoilt them (RL on incorrect synthetic data).

Paper:     Setlur et al., "RL on Incorrect Synthetic Data Scales the Efficiency of LLM Math Reasoning by Eight-Fold",
           arXiv:2406.14532.
Claim:     right answers of one's own double the value of synthetic problems; wrong ones, with credit for the step that
           spoilt them, are worth eight times the problems and unlearn spurious steps.
Equations: Q(prefix) = success of 4 rollouts, A_i = Q(y_1..i) - Q(y_1..i-1); loss -log sig(beta [log pi/ref (y+ from i)
           - log pi/ref (y- from i)]) at i = argmin A, y+ a right completion of the same prefix (shuffled: i at random;
           dpo: whole responses). sft: a teacher's answers; sft_2: of twice the problems; rft, rft_8: own right
           answers, of eight times the problems.
Left out:  rollouts from a best-of-K policy (the policy itself is used).
Expect:    eval/broken: step_dpo > rft and step_dpo > dpo; eval/accuracy: step_dpo > rft_8 - 0.03.
Measure:   sums modulo 7; in all training problems the first digit tells in 80 % the parity of the answer, in broken
           test problems never. 256 problems, twice, for each arm; 8 seeds, equal updates.
Run:       python -m experiments.preference.negative_synthetic
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from experiments.parts import running_sums, strings
from experiments.parts import running_sums_task as toy
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference

WORLD = running_sums.WORLD


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta and the number of rollouts are the paper's."""

    steps: int = 60  # of each of two rounds
    eval_every: int = 20
    learning_rate: float = 1e-3
    base_steps: int = 600
    problems: int = 256  # of a round
    rows_per_step: int = 64
    where: Callable | None = running_sums.first_pit  # None: imitation
    own: bool = False  # imitate one's own right answers
    beta: float = 0.1


SMOKE = {"steps": 1, "eval_every": 1, "base_steps": 2, "problems": 8, "rows_per_step": 4}
ARMS = {
    "sft": {"where": None},
    "step_dpo": {},
    "sft_2": {"where": None, "problems": 512},
    "rft": {"where": None, "own": True},
    "rft_8": {"where": None, "own": True, "problems": 2048},
    "dpo": {"where": running_sums.whole_response},
    "shuffled": {"where": running_sums.any_step},
}
METRICS = ("eval/accuracy", "eval/broken", "eval/cued")
CURVES = (*METRICS, "pair/kept", "loss/total")


def build(settings: Settings) -> experiment.Plan:
    """Two rounds of data from the policy of the moment."""

    def pair_loss(params, extras, batch):
        pairs, ref = batch
        both = jnp.concatenate([pairs.chosen, pairs.rejected])
        logp = running_sums.logp_from(params, jnp.tile(pairs.prompts, (2, 1)), both, jnp.tile(pairs.start, 2))
        terms = preference.dpo_loss(*jnp.split(logp, 2), *ref.T, beta=settings.beta)
        trained = jnp.asarray(float(both.size), jnp.float32)
        kept = reduce.scalars(pairs.kept.astype(jnp.float32))
        return reduce.scalars(terms.loss, pairs.kept), {"pair/kept": kept, "tokens/trained": trained}

    def imitation(params, extras, batch):
        prompts, given, kept = batch
        logp = strings.sum_logp(WORLD, params, prompts, given) / toy.RESPONSE_TOKENS
        trained = jnp.asarray(float(given.size), jnp.float32)
        shown = {"pair/kept": reduce.scalars(kept.astype(jnp.float32)), "tokens/trained": trained}
        return -reduce.scalars(logp, kept), shown

    stage = partial(
        strings.table_stage, steps=settings.steps, rows_per_step=settings.rows_per_step,
        learning_rate=settings.learning_rate,
    )  # fmt: skip
    if settings.where is None:
        made = stage(running_sums.make_answers(settings.problems, settings.own), imitation)
    else:
        made = stage(running_sums.make_rows(settings.problems, settings.where), pair_loss)
    base = strings.make_base(WORLD, toy.draw_attempts, steps=settings.base_steps, learning_rate=5e-3)
    return experiment.Plan(base, (made, made), running_sums.measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Credit for the spoilt step repairs what the cue broke, and reaches imitation of eight times the problems."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/broken", "step_dpo", "rft"),
        experiment.greater(results, "eval/broken", "step_dpo", "dpo"),
        experiment.greater(results, "eval/accuracy", "step_dpo", "rft_8", by=-0.03),
    )


if __name__ == "__main__":
    experiment.main(__name__)
