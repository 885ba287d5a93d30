"""Do trained models solve what their base never solves? Expansion and shrinkage against a noise floor (MATH-Beyond).

Paper:     Mayilvahanan et al., "MATH-Beyond: A Benchmark for RL to Expand Beyond the Base Model", arXiv:2510.11653.
Claim:     usual reinforcement learning solves hardly any problem that the base fails in all of its samples.
Equations: U = problems without a right one of N base samples; expansion = share of U with a right one of N samples of
           the trained model; shrinkage = share of the problems solved by the base with none; chance = expansion of N
           further samples of the base; beyond = expansion - chance, of the same U. grpo: on the whole pool; easy: on
           its easiest kind; entropy: GRPO + 0.02 H; pass_at_k: pass@4 advantages; longer: twice the updates; teacher:
           SFT on solutions of the pool; floor: no training.
Left out:  the paper's filters, the union and the intersection of U over several bases, and N = 1024 (256 here).
Expect:    eval/beyond: grpo < 0.1, teacher > grpo; eval/accuracy: grpo > floor.
Measure:   128 fresh problems, none of which is one of training, of which none, two or six inputs are such that the base
           has read mostly slips there; an answer is seven tokens, all states on the way, which a guess has right in 1
           of 823543. The pool is one task of three kinds, sums modulo 7 of eight digits; --world mixed is a pool of two
           sources, half sums and half runs of a machine of seven states, in which inputs are maps whose order counts.
           The bed is invalid unless the base fails a quarter of the problems in all samples, and four fifths of those
           again. Equal updates but for longer (and none for floor).
Run:       python -m experiments.analysis.math_beyond [--world mixed --base-steps 800; of a record also --bed
           mixed]
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import optax

from experiments.analysis.parts import beyond_base, two_sources
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """Sizes for the small model."""

    steps: int = 100
    eval_every: int = 100
    learning_rate: float = 1e-3
    prompts_per_step: int = 8
    group_size: int = 8
    base_steps: int = 400
    samples: int = 256  # N
    problems: int = 128
    pool: tuple[int, ...] = beyond_base.POOL  # kinds of training problems
    kind: str = "online"  # none, online or teacher
    advantages: Callable = group.group_normalized_advantages
    entropy: float = 0.0


SMOKE = {
    "steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2, "samples": 4, "problems": 8,
}  # fmt: skip
ARMS = {
    "floor": {"kind": "none"},
    "grpo": {},
    "easy": {"pool": beyond_base.EASY},
    "entropy": {"entropy": 0.02},
    "pass_at_k": {"advantages": partial(group.pass_at_k_advantages, k=4)},
    "longer": {"steps": 200},
    "teacher": {"kind": "teacher"},
}
METRICS = (
    "eval/beyond", "eval/expansion", "eval/shrinkage", "eval/accuracy", "eval/pass", "eval/never", "eval/still_never",
    "eval/easy", "never/pass@16",
)  # fmt: skip
D_STAR = {"eval/beyond": 0.02}
BED = experiment.Bed(
    metric="eval/accuracy", baseline="grpo", judges=(("floor", "eval/never", 0.25), ("floor", "eval/still_never", 0.8))
)
CURVES = (*METRICS, "policy/entropy", "reward/mean")
WORLDS = {"sums": beyond_base.SUMS, "mixed": two_sources.MIXED}


def training(task: beyond_base.Pool, settings: Settings) -> tuple[experiment.Stage, ...]:
    """GRPO, imitation of solutions, or nothing."""
    if settings.kind == "none":
        return ()
    if settings.kind == "teacher":
        sizes = {"steps": settings.steps, "learning_rate": settings.learning_rate}
        rows = settings.prompts_per_step * settings.group_size
        return (beyond_base.teacher_stage(task, rows_per_step=rows, **sizes),)

    def bonus(logp, entropy, batch):
        return -settings.entropy * entropy

    advantages = builders.per_response(settings.advantages)
    online = strings.learned_from_prompts(
        task.world, task.draw_problems(jax.random.key(1), 2048, settings.pool),
        strings.score_of(task.world, task.right),
        estimate=builders.make_estimate(task.world.policy, advantages),
        loss=builders.make_policy_loss(
            task.world.policy, clipped_policy_loss, extra_terms=bonus if settings.entropy else None
        ),
        tx=optax.adam(settings.learning_rate),
        prompts_per_step=settings.prompts_per_step, group_size=settings.group_size,
    )  # fmt: skip
    return (experiment.Stage(strings.of_part(online, "policy"), settings.steps),)


def build(settings: Settings, task: beyond_base.Pool = beyond_base.SUMS) -> experiment.Plan:
    """The base stays beside the policy, for the problems that it fails."""
    start = beyond_base.make_start(task, steps=settings.base_steps)
    measure = strings.bound(beyond_base.measure, task, problems=settings.problems, samples=settings.samples)
    return experiment.Plan(start, training(task, settings), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """GRPO is right more often and yet solves hardly more of what its base never solved; a teacher's solutions do."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.below(results, "eval/beyond", "grpo", 0.1),
        experiment.greater(results, "eval/accuracy", "grpo", "floor"),
        experiment.greater(results, "eval/beyond", "teacher", "grpo"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
