"""Plans of expert models learned from what the finished task scores (OpenAGI's RLTF).

Paper:     Ge et al., "OpenAGI: When LLM Meets Domain Experts", arXiv:2304.04370, with its code.
Claim:     a model that chains expert models plans better when it learns from the task's score than from a few worked
           plans; decoding that keeps to names and kinds of the experts makes plans that can be run.
Equations: of n candidates one is chosen, the most probable or, with chance e, any of them, e = e0 d^(60 step / steps);
           loss -log p(plan) (R - b), p over what the grammar allows, R = -1 for a plan that cannot be run; b is the
           mean of the rewards so far. code: what was released, mean of the rewards so far in place of R and b = 0;
           no_baseline: R, b = 0; no_decay: d = 1; anything: without the grammar. zero_shot: the base; sft: taught ten
           plans, from which all others start; more_sft: taught them for as many updates more. beams: the candidates
           are the n most probable plans of a beam search, as in the paper, in place of draws. The released code
           multiplies e by d after each of 60 steps in all, so that it explores through two thirds of them; e falls here
           by as much over a run of any length. (By d at each of 200 updates it would be nothing after 44.)
Left out:  the released code's draw, which prefers the least probable candidate; plans that branch; the
           paper's experts and their scores, which the user gives.
Expect:    eval/right: rltf > sft > zero_shot, rltf > more_sft, rltf > code, rltf > anything.
Measure:   pictures of boxes damaged by up to three operations, 64 held-out tasks, the most probable of 8 plans; equal
           candidates and updates. eval/right: plans that restore all, which the right plan always does, and the best
           plan that knows only what is wanted in 0.06; eval/score is half for a result that has nothing in common with
           the wanted one, and such a plan has 0.55 of it: eval/above_blind is what is above that. eval/valid: plans
           that can be run, -1 for others, so that a gain of eval/score may be one of validity alone.
           With --model DIR --data FILE --experts MODULE:FUNCTION a language model plans over experts and tasks of one's
           own, see docs/agents.md; the loaded model is the base, held out is a tenth of the instructions.
Run:       python -m experiments.agents.openagi
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.agents.parts import expert_plans, plan_beams, task_feedback
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import Plan, Stage
from jaxrl_llm.types import Trajectories


def drawn(world, params, tokens, keys, problem_ids, kept, count) -> Trajectories:
    more = {"samples": count, "problem_ids": problem_ids, "grammar": kept}
    return strings.rollout(world, params, tokens, keys, **more)


def likeliest(world, params, tokens, keys, problem_ids, kept, count) -> Trajectories:
    sizes = {"width": count, "new": world.response_tokens, "end": world.end}
    plans, logp = plan_beams.beams(world.policy, params, tokens, kept, **sizes)
    return plan_beams.as_rows(tokens, plans, logp, problem_ids, end=world.end)


def feedback(task, settings) -> tuple[Stage, ...]:
    """One carried-out candidate of every task trains."""
    world, kept = task.world, settings.decoding(task)
    score = builders.score_tokens if kept is None else grammars.score_legal(kept)

    def rollout(params, tokens, valid, keys, problem_ids):
        return settings.candidates_of(world, params, tokens, keys, problem_ids, kept, settings.candidates)

    def terms(logp, entropy, batch):
        return reinforce_loss(logp, batch.advantages, batch.mask)

    online = strings.learned_from_prompts(
        world,
        jnp.asarray(task.prompts()[0]),
        task.score,
        estimate=task_feedback.make_estimate(world.policy, settings.credit),
        loss=builders.make_batch_loss(world.policy, terms, reduction="seq_sum", score=score),
        tx=optax.adam(settings.learning_rate),
        prompts_per_step=settings.prompts_per_step,
        group_size=settings.candidates,
        rollout=rollout,
        whole_batch="",  # a sum over the rows that train
        remember=task_feedback.make_remember(task_feedback.decay_of(settings.decay, settings.steps)),
    )
    return (Stage(online, settings.steps, task_feedback.make_extras(settings.epsilon)),)


def imitation(task, settings, steps: int | None = None) -> tuple[Stage, ...]:
    """The few worked plans."""
    shown = task.worked(settings.shots)
    more = {"table": 128, "learning_rate": settings.learning_rate}
    return (strings.supervised_stage(task.world, shown, steps=steps or settings.steps, **more),)


def nothing(task, settings) -> tuple[Stage, ...]:
    return ()


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """The released exploration; the model is a decoder of 32 numbers a token made here."""

    steps: int = 200
    learning_rate: float = 1e-3
    eval_every: int = 20
    prompts_per_step: int = 16
    candidates: int = 8  # 30 in the paper
    base_steps: int = 300
    sft_steps: int = 20
    shots: int = 10
    epsilon: float = 0.2
    decay: float = 0.9  # of epsilon, at each sixtieth of the run
    credit: Callable[[Array, Array, Array], Array] = task_feedback.above_mean
    decoding: Callable[[], grammars.Grammar] = expert_plans.grammar
    candidates_of: Callable[..., Trajectories] = drawn
    then: Callable[..., tuple[Stage, ...]] = feedback  # what follows the worked plans


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "sft_steps": 2, "prompts_per_step": 2, "candidates": 2}
ARMS = {
    "sft": {"then": nothing},
    "rltf": {},
    "zero_shot": {"then": nothing, "sft_steps": 0},
    "more_sft": {"then": imitation},
    "code": {"credit": task_feedback.mean_so_far},
    "no_baseline": {"credit": task_feedback.own_reward},
    "no_decay": {"decay": 1.0},
    "anything": {"decoding": expert_plans.anything},
    "beams": {"candidates_of": likeliest},
}
METRICS = ("eval/right", "eval/score", "eval/above_blind", "eval/valid")
CURVES = (*METRICS, "reward/mean", "policy/entropy")
# sft is not trained further: whether scores teach anything here shows on what learns from them as they are
BED = experiment.Bed(metric="eval/right", baseline="no_baseline", chance=0.0625)


def build(settings: Settings, task: expert_plans.Tasks = expert_plans.RESTORED) -> Plan:
    """The base, ten plans to imitate, then the tasks' scores."""
    first = imitation(task, settings, settings.sft_steps) if settings.sft_steps else ()
    measure = strings.bound(expert_plans.measure, task, settings.decoding)
    return Plan(task.base(settings), (*first, *settings.then(task, settings)), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Scores of tasks teach more right plans than ten plans, these than none; own scores, and the grammar, matter."""
    pairs = (("rltf", "sft"), ("sft", "zero_shot"), ("rltf", "more_sft"), ("rltf", "code"), ("rltf", "anything"))
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, "eval/right", a, b) for a, b in pairs),
    )


if __name__ == "__main__":
    experiment.main(__name__)
