"""A proposer, a solver and a judge of one model, trained together without a label (Multi-Agent Evolve, MAE).

Paper:     Chen et al., "Multi-Agent Evolve: LLM Self-Improve through Co-evolution", arXiv:2510.23595.
Claim:     one model in three roles, told apart by their prompts and co-trained on its own questions and its own
           judgements, becomes a better solver: +4.54 points on average for Qwen2.5-3B-Instruct. Questions that the
           judge finds poor have to be kept out.
Equations: v = clip((s - 1) / 9, 0, 1) of a score s, 0.5 without one. Q: v of a question, S: mean v of n answers to it.
           proposer: (Q + (1 - S) + form) / 3, without 1 - S for Q < 0.7, which joins no pool either; solver: v / 2 +
           form / 2, on questions of the pool; judge: form. Rewards at every token, whitened over the tokens of each
           role, then one clipped update of all. solver_only: answers to the first questions alone. no_filter: the
           threshold is 0. no_difficulty: without 1 - S. no_judge: the judge, trained on answers drawn from a
           pool of all so far, does not train; step_judge: on this step's answers. batch_wide: whitened over
           all roles. half_judge, no_verdict: half of the verdicts, or all, belong to other answers. oracle: the
           truth in place of v.
Left out:  categories of questions, benchmarks in words.
Expect:    eval/accuracy of mae above its start; mae > solver_only, mae > no_verdict, pool/unsound no_filter > mae.
Measure:   held-out arithmetic chains, asked as the solver is and judged by the truth, which no arm but oracle sees; all
           begin with a copy that knows every form, errs in two of three answers and judges well, as it works them out;
           equal answers and updates; chance: 1/m, about 0.11; ceiling 1. The bed is invalid unless the judge of mae
           ranks a right answer above a wrong one in 0.75 (judge/auc, 0.5 by chance).
Run:       python -m experiments.self_play.mae; at scale --model DIR --data FILE --format gsm8k --chat
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import optax
from jaxtyping import Array

from experiments.self_play.parts import practice, role_rewards, roles, three_roles
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where its code gives them; see EMBEDDED for the small model."""

    steps: int = 200
    group_size: int = three_roles.ROWS  # rows of a place that train: one of each role
    voices: Callable[[], roles.Roles] = roles.tagged  # what each role is asked, and how it is read
    difficulty_samples: int = 5  # answers to a proposal, n
    question_tokens: int = 1024  # the most of a proposal
    judge_tokens: int = 1024
    reference_share: float = 0.5  # of proposals that begin from a question of the pool
    threshold: float = 0.7  # Q of a question that joins the pool
    pool_size: int = 4096  # questions beside the training table; answers to be judged
    difficulty: Callable[[Array], Array] = role_rewards.hardness
    verdicts: Callable[..., Array] = role_rewards.as_judged  # what answers are paid by
    judged: Callable[..., tuple[Array, Array]] = three_roles.of_pool  # what the judge trains on
    trained: Callable[[Array], Array] = role_rewards.every_role
    advantages: Callable[..., Array] = role_rewards.by_role
    warm_steps: int = 2400  # of fine-tuning on all forms, where the data are chains
    judge_noise: float = 0.0  # of the judgements in it


EMBEDDED = {
    "levels": (2, 3), "steps": 18, "eval_every": 2, "prompts_per_step": 24, "max_new_tokens": 26,
    "learning_rate": 5e-5, "eval_problems": 128, "train_problems": 2048, "voices": roles.terse, "difficulty_samples": 3,
    "question_tokens": 14, "judge_tokens": 26, "pool_size": 2048,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
    "warm_steps": 2, "difficulty_samples": 2,
}  # fmt: skip
ARMS = {
    "solver_only": {"trained": role_rewards.solver_alone, "threshold": 2.0},
    "mae": {},
    "oracle": {"verdicts": role_rewards.true_answers},
    "half_judge": {"verdicts": role_rewards.half_permuted},
    "no_verdict": {"verdicts": role_rewards.permuted},
    "no_filter": {"threshold": 0.0},
    "no_difficulty": {"difficulty": role_rewards.no_hardness},
    "no_judge": {"trained": role_rewards.without_judge},
    "step_judge": {"judged": three_roles.of_step},
    "batch_wide": {"advantages": role_rewards.batch_wide},
}
METRICS = ("eval/accuracy", "judge/auc", "pool/unsound", "pool/solved", "judge/unread", "eval/tokens")
CURVES = (
    "eval/accuracy", "judge/auc", "judge/unread", "pool/joined", "pool/unsound", "pool/solved", "proposer/sound",
    "proposer/reward", "solver/reward", "judge/reward", "proposer/spread", "solver/spread", "judge/spread",
    "policy/entropy", "grad/norm",
)  # fmt: skip
# without labels an arm has no baseline but its start; the curve that has to rise is that of answers paid by the judge
BED = experiment.Bed(baseline="solver_only", chance=0.11, positive="oracle", judges=(("mae", "judge/auc", 0.75),))
D_STAR = {"eval/accuracy": 0.02}


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose rollout plays all roles; the arm says who is paid by what, and who trains."""
    if settings.group_size != three_roles.ROWS:
        raise UserError(f"--group-size {settings.group_size}: a place has {three_roles.ROWS} rows, one of each role; "
                        "drop the flag and give --difficulty-samples")  # fmt: skip
    check_voices(settings)
    bench, voices = recipes.bench(settings), settings.voices()
    seeds = three_roles.seed_questions(settings, voices)
    lengths = {"answer": settings.max_new_tokens, "judgement": settings.judge_tokens}
    text = three_roles.text_of(
        bench, voices, seeds, chat=settings.chat, question=settings.question_tokens, **lengths
    )  # fmt: skip
    same = {"temperature": settings.temperature}
    online = recipes.make_online(
        settings,
        bench,
        rollout=three_roles.rollout_of_roles(settings, bench, text, seeds),
        score=partial(three_roles.score, settings.trained),
        estimate=builders.make_estimate(
            bench.model.policy,
            three_roles.role_advantages(settings.advantages, settings.trained),
            row_extras=three_roles.row_extras,
            **same,
        ),
        loss=builders.make_policy_loss(bench.model.policy, clipped_policy_loss, **same),
        tx=optax.adam(settings.learning_rate),
        actor=three_roles.acting,
        remember=three_roles.remember,
        figures=three_roles.figures,
    )
    extras = three_roles.pool_extras(text.question, text.prompts[role_rewards.JUDGE], settings.pool_size)
    plan = recipes.one_stage(settings, bench, online, extras=extras)
    solved = recipes.make_measure(settings, three_roles.asked_as_solver(settings.voices))
    plan = plan._replace(measure=recipes.beside(solved, three_roles.measure_of_judge(settings), "judge"))
    if settings.voices is not roles.terse:  # a model of your own reads what it is asked
        return plan
    warm = {"steps": settings.warm_steps, "noise": settings.judge_noise}
    return plan._replace(init=lambda key: practice.practised(settings, settings.voices, **warm))


def check_voices(settings: Settings) -> None:
    """Refuses questions that the roles cannot read.

    Raises:
      UserError: for a bundled model without chains, or chains and Countdown for a model that is asked in words.
    """
    terse = settings.voices is roles.terse
    if terse and settings.data != "chain":
        raise UserError(f"--data {settings.data}: the three roles of a bundled model speak of arithmetic chains alone; "
                        "drop the flag, or give an instructed model with --model DIR")  # fmt: skip
    if not terse and settings.data in ("chain", "countdown"):
        raise UserError(f"--data {settings.data}: its questions are in a code of the bundled models, and the roles of "
                        "a model of your own are asked in words; give --data FILE")  # fmt: skip


def claim(results: experiment.Results) -> experiment.Claim:
    """Three roles of one model improve its answers, more than answers alone do; the filter keeps the pool sound."""
    last = results.curve("mae", "eval/accuracy")[0][-1]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "mae", "mae", step=(last, 0)),
        experiment.greater(results, "eval/accuracy", "mae", "solver_only"),
        experiment.greater(results, "eval/accuracy", "mae", "no_verdict"),
        experiment.greater(results, "pool/unsound", "no_filter", "mae"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
