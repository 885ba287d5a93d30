"""One problem in five asks to judge a solution instead of writing one (Critique-Coder).

Paper:     Ruan et al., "Critique-Coder: Enhancing Coder Models by Critique Reinforcement Learning", arXiv:2509.22824.
Claim:     replacing 20 % of the problems of RL by judging given solutions (critique RL, CRL), rewarded for the right
           verdict alone, makes a better solver than RL on all of them; judging alone does not.
Equations: reward of a solution: right or not; of a critique: 1 when its last label equals that of the candidate,
           whatever it says before. Advantages (r - mean) / std within the group of one question; groups of equal
           rewards do not train. crl_20, crl_50, crl_100: share of questions to judge; unbalanced: 90 % of the
           candidates are right. cft: no RL, -log pi of written critiques with the right label, as many rows a step.
Left out:  transfer to other reasoning (the paper's logic puzzles): of what the small model knows, chains alone are
           worked in steps of which one may be wrong. Of the method nothing: --data programs asks for small Python
           programs, labelled and rewarded by their tests in the sandbox (--tests share: by the share that passes); rows
           of one's own (--format mbpp) have the starting model's own samples to judge.
Expect:    eval/accuracy: crl_20 > rl; critique/accuracy: crl_20 > rl + 0.05.
Measure:   held-out chains of six operations to solve, of which a constant guess gets one in six, and to judge: half of
           the candidates are right, of wrong ones the first step that counts. Every arm starts from one copy that knows
           both forms and errs in four of five answers, the same for all seeds; 8 seeds, equal rollouts and updates. The
           bed is invalid unless who trains on nothing but judging (crl_100) judges 70 % rightly.
Run:       python -m experiments.policy_gradient.critique_coder [--data programs --levels 1 2; of a record also --bed
           programs]
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import optax

from experiments.policy_gradient.parts import critique_task, host_judging
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.run import parts as job
from jaxrl_llm.run.bench import is_generated, problem_sets
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Problems
from jaxrl_llm.verifiers import code


def reinforced(settings, bench, judging, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    return stages


def imitated(settings, bench, judging, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    if not is_generated(settings.data):
        raise UserError(f"--data {settings.data}: cft imitates written critiques; choose --data chain or programs")
    return (Stage(critique_task.fine_tuning(settings, bench, judging), settings.steps),)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 300
    max_new_tokens: int = 16384
    temperature: float = 0.6
    share: float = 0.2  # of the questions that ask for a judgement
    right_share: float = 0.5  # of the candidates
    warm_steps: int = 500  # of supervised fine-tuning on attempts and critiques
    learn: Callable[..., tuple[Stage, ...]] = reinforced
    tests: Literal["all", "share"] = "all"  # that a program has to pass, or the share of them that pays


EMBEDDED = {
    "levels": (6,), "steps": 30, "eval_every": 3, "prompts_per_step": 8, "max_new_tokens": 64, "temperature": 1.0,
    "learning_rate": 1e-4, "eval_problems": 128, "train_problems": 1024, "warm_steps": 600,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "train_problems": 64, "eval_problems": 8,
    "eval_samples": 4, "warm_steps": 2,
}  # fmt: skip
ARMS = {
    "rl": {"share": 0.0},
    "crl_20": {},
    "crl_50": {"share": 0.5},
    "crl_100": {"share": 1.0},
    "unbalanced": {"right_share": 0.9},
    "cft": {"learn": imitated},
}
BED = experiment.Bed(chance=0.17, judges=(("crl_100", "critique/accuracy", 0.7),))
METRICS = ("eval/accuracy", "eval/pass@4", "critique/accuracy", "critique/says_true", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "group/degenerate_fraction", "grad/norm")


class Asked(NamedTuple):
    """Both kinds of questions of an arm."""

    judging: list[Problem]
    problems: Problems
    judges: dict[str, Callable]  # slots of ``make_online``
    host_score: Callable | None
    judged: Callable  # measures judging


def on_device(settings: Settings, bench: recipes.Bench) -> Asked:
    """Chains, judged where they are sampled."""
    if settings.tests == "share":
        raise UserError("--tests share: chains have no tests; give --data programs, or code of your own")
    solving = curricula.train_problems(settings)
    judging = critique_task.critique_problems(solving, right_share=settings.right_share)
    table = critique_task.table(bench, critique_task.mixed(solving, judging, share=settings.share))
    judged = recipes.make_measure(settings, critique_task.judging, critique_task.judged)
    return Asked(judging, table, {"score": critique_task.score_by_kind(bench)}, None, judged)


def on_host(settings: Settings, bench: recipes.Bench) -> Asked:
    """Programs, judged by their tests in the sandbox, and rows of one's own by their verifier."""
    judging = host_judging.questions(settings, right_share=settings.right_share)
    solving, _, verify = problem_sets(settings)
    mixed = host_judging.mixture(solving, judging, share=settings.share)
    if settings.tests == "share":
        if verify is not code.verify:
            raise UserError("--tests share: these answers are no programs with tests; give --data programs, or code")
        pool = job.make_pool(code.verify_share)
        paid = job.make_scorer(bench.model.tokenizer, solving, code.verify_share, pool)
        bench = bench._replace(host_score=paid)
    table = tables.encode_problems(bench.model.tokenizer, mixed.problems, chat=settings.chat)
    host_score = host_judging.make_host_score(bench, mixed)
    return Asked(judging, table, {}, host_score, host_judging.judging_measure(settings))


def build(settings: Settings) -> experiment.Plan:
    """One online stage of GRPO on a table of both kinds of questions."""
    bench = recipes.bench(settings)
    asked = (on_host if bench.score is None else on_device)(settings, bench)
    policy, temperature = bench.model.policy, settings.temperature

    def informative(rows, rewards):
        return group.informative_groups(rewards.value, rows.group_ids, low=0.0, high=1.0, valid=rewards.valid)

    online = recipes.make_online(
        settings,
        bench,
        problems=asked.problems,
        **asked.judges,
        estimate=builders.make_estimate(
            policy,
            builders.per_response(group.group_normalized_advantages),
            temperature=temperature,
            keep=informative,
        ),
        loss=builders.make_policy_loss(policy, clipped_policy_loss, temperature=temperature),
        tx=optax.adam(settings.learning_rate),
    )
    plan = recipes.one_stage(settings, bench, online, host_score=asked.host_score)
    plan = plan._replace(
        stages=settings.learn(settings, bench, asked.judging, plan.stages),
        measure=recipes.beside(plan.measure, asked.judged, "critique"),
    )
    if not is_generated(settings.data):
        return plan
    start = {"kind": critique_task.kind_of(settings), "wrong": 0.8, "steps": settings.warm_steps}
    return plan._replace(init=lambda key: critique_task.practised(settings, **start))


def claim(results: experiment.Results) -> experiment.Claim:
    """A fifth of judging raises accuracy, and teaches to judge."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "crl_20", "rl"),
        experiment.greater(results, "critique/accuracy", "crl_20", "rl", by=0.05),
    )


if __name__ == "__main__":
    experiment.main(__name__)
