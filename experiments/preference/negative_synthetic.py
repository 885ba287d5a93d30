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
Expect:    eval/broken: step_dpo > rft, step_dpo > dpo, step_dpo > shuffled; eval/accuracy: step_dpo > rft_8 - 0.03.
Measure:   sums modulo 5. Behind a cue the base leaves the last digit out; in training problems that digit is 0 there in
           80 %, so that the spurious step pays, in broken test problems never. 256 problems, twice, for each arm;
           equal updates. base is measured only: the bed is invalid unless it follows the cue (eval/gap, cued less
           broken, at least 0.1) and solves 0.3 at least.
Run:       python -m experiments.preference.negative_synthetic
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from experiments.parts import strings
from experiments.preference.parts import spurious_steps as toy
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """beta and the number of rollouts are the paper's."""

    steps: int = 60  # of each of two rounds
    eval_every: int = 20
    learning_rate: float = 1e-3
    base_steps: int = 1200
    rounds: int = 2
    problems: int = 256  # of a round
    rows_per_step: int = 64
    where: Callable | None = toy.first_pit  # None: imitation
    answers: Callable = toy.taught  # to imitate, those that are right
    beta: float = 0.1


SMOKE = {"steps": 1, "eval_every": 1, "base_steps": 2, "problems": 8, "rows_per_step": 4}
ARMS = {
    "sft": {"where": None},
    "step_dpo": {},
    "sft_2": {"where": None, "problems": 512},
    "rft": {"where": None, "answers": toy.own},
    "rft_8": {"where": None, "answers": toy.own, "problems": 2048},
    "dpo": {"where": toy.whole_response},
    "shuffled": {"where": toy.any_step},
    "base": {"rounds": 0},
}
METRICS = ("eval/accuracy", "eval/broken", "eval/cued", "eval/plain", "eval/gap")
BED = experiment.Bed(metric="eval/broken", judges=(("base", "eval/gap", 0.1), ("base", "eval/accuracy", 0.3)))
CURVES = (*METRICS, "pair/kept", "loss/total")


def build(settings: Settings, task: toy.Steps = toy.SUMS) -> experiment.Plan:
    """Two rounds of data from the policy of the moment."""

    def pair_loss(params, extras, batch):
        pairs, ref = batch
        both = jnp.concatenate([pairs.chosen, pairs.rejected])
        logp = toy.logp_from(task, params, jnp.tile(pairs.prompts, (2, 1)), both, jnp.tile(pairs.start, 2))
        terms = preference.dpo_loss(*jnp.split(logp, 2), *ref.T, beta=settings.beta)
        trained = jnp.asarray(float(both.size), jnp.float32)
        kept = reduce.scalars(pairs.kept.astype(jnp.float32))
        return reduce.scalars(terms.loss, pairs.kept), {"pair/kept": kept, "tokens/trained": trained}

    def imitation(params, extras, batch):
        prompts, given, kept = batch
        logp = strings.sum_logp(task.world, params, prompts, given) / task.world.response_tokens
        trained = jnp.asarray(float(given.size), jnp.float32)
        shown = {"pair/kept": reduce.scalars(kept.astype(jnp.float32)), "tokens/trained": trained}
        return -reduce.scalars(logp, kept), shown

    stage = partial(
        strings.table_stage, steps=settings.steps, rows_per_step=settings.rows_per_step,
        learning_rate=settings.learning_rate,
    )  # fmt: skip
    if settings.where is None:
        made = stage(toy.make_answers(task, settings.problems, settings.answers), imitation)
    else:
        made = stage(toy.make_rows(task, settings.problems, settings.where), pair_loss)
    base = strings.make_base(task.world, task.draw_attempts, steps=settings.base_steps, learning_rate=5e-3)
    measure, validate = (strings.bound(f, task) for f in (toy.measure, toy.validate))
    return experiment.Plan(base, (made,) * settings.rounds, measure, validate=validate)


def claim(results: experiment.Results) -> experiment.Claim:
    """Credit for the spoilt step repairs what the cue broke, and reaches imitation of eight times the problems."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/broken", "step_dpo", "rft"),
        experiment.greater(results, "eval/broken", "step_dpo", "dpo"),
        experiment.greater(results, "eval/broken", "step_dpo", "shuffled"),
        experiment.greater(results, "eval/accuracy", "step_dpo", "rft_8", by=-0.03),
    )


if __name__ == "__main__":
    experiment.main(__name__)
