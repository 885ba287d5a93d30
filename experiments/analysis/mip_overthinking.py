"""Questions with a missing premise: who abstains, who goes on thinking, and how the habit spreads.

Paper:     Fan et al., "Missing Premise exacerbates Overthinking: Are Reasoning Models losing Critical Thinking Skill?",
           arXiv:2504.06514.
Claim:     reasoning models answer ill-posed questions at far greater length and rarely abstain; plain models abstain;
           distillation passes the habit on.
Equations: the same question with and without one needed premise: length ratio = tokens(ill) / tokens(well), abstain
           rate, accuracy on the well-posed one, WAIT tokens, place of the first WAIT, tokens and WAITs after it, and
           how alike the rounds of one answer are. Constructors: delete (a definition replaced by a copy of another),
           formula (a value rests on a name that is never defined), swap (it asks for such a name); none leaves a mark.
           plain: SFT on short right answers; rl: GRPO on right answers; neither sees an ill-posed question. distilled:
           SFT on a teacher's answers to ill-posed ones, the teacher being rl; repaired: rl with a fifth ill-posed, 1
           for abstaining, 0.01 a token taken off.
Left out:  language and judges; that plain models abstain more: neither training sees an ill-posed question, and both
           forget what the base had of abstention (half of the ill-posed questions that it read, one in ten).
Expect:    mip/length_ratio: rl > plain, distilled > plain; the ratio of rl > plain for each constructor; mip/abstain:
           repaired > rl; well/accuracy: repaired > rl - 0.03.
Measure:   512 fresh questions, each well-posed and by every constructor; equal updates but for distilled, whose teacher
           has its own. In what the base has read each round of a chain leaves a tenth of the chance of a slip, 0.5 in
           the first: thinking longer pays. (With 0.3 of 0.3 a second round was worth 0.21 at first, and little more
           once the first ones had become right, so that rl said WAIT 0.85 times.) The bed is invalid unless rl says it
           0.9 times a well-posed question (0.6 in what the base has read).
Run:       python -m experiments.analysis.mip_overthinking
"""

import dataclasses

from experiments.analysis.parts import premises
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes for the small model."""

    steps: int = 100
    eval_every: int = 25
    learning_rate: float = 1e-3
    base_steps: int = 1500
    prompts_per_step: int = 8
    group_size: int = 8
    traces: int = 64  # of the teacher, as in the paper about fifty
    problems: int = 512  # of a measurement
    kind: str = "rl"


SMOKE = {
    "steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2, "traces": 8, "problems": 8,
}  # fmt: skip
ARMS = {
    "base": {"kind": "base"},
    "plain": {"kind": "plain"},
    "rl": {},
    "distilled": {"kind": "distilled"},
    "repaired": {"kind": "repaired"},
}
METRICS = (
    "mip/length_ratio", "mip/abstain", "well/accuracy", "well/waits", "mip/waits", "mip/suspicion", "mip/first_doubt",
    "mip/tokens_after_doubt", "mip/step_similarity",
)  # fmt: skip
KINDS = ("delete", "formula", "swap")
# Of the answers that the authors released, tokens or characters of ill over well: five plain models 0.78 - 1.09 on
# MiP-GSM8K (sd 0.13), three reasoning ones 1.70 - 3.95; on MiP-MATH 0.42 - 1.20 against 1.15 - 3.73. A difference as
# small as that between two plain models is none; the paper's own is about 1.5.
D_STAR = {"mip/length_ratio": 0.1}
# imitation of short answers is no arm that a reward raises
BED = experiment.Bed(metric="well/accuracy", baseline="rl", judges=(("rl", "well/waits", 0.9),))
CURVES = (*METRICS, *(f"{kind}/{name}" for kind in KINDS for name in ("length_ratio", "abstain")), "policy/entropy")


def training(task: premises.Premises, settings: Settings) -> tuple[experiment.Stage, ...]:
    """The stages of each kind."""
    rate = {"learning_rate": settings.learning_rate, "steps": settings.steps}
    online = rate | {"prompts_per_step": settings.prompts_per_step, "group_size": settings.group_size}
    rows = settings.prompts_per_step * settings.group_size
    match settings.kind:
        case "plain":
            return (premises.imitation_stage(task, premises.plain_text(task, 2048), rows_per_step=rows, **rate),)
        case "rl":
            return (premises.reward_stage(task, premises.correct, part="policy", ill=0.0, **online),)
        case "repaired":
            return (premises.reward_stage(task, premises.correct_and_frank, part="policy", ill=0.2, **online),)
        case "distilled":
            traces = premises.teacher_traces(task, settings.traces)
            return (
                premises.reward_stage(task, premises.correct, part="teacher", ill=0.0, **online),
                premises.imitation_stage(task, traces, rows_per_step=rows, **rate),
            )
    return ()


def build(settings: Settings, task: premises.Premises = premises.CHAINS) -> experiment.Plan:
    """One base for all."""
    start = premises.make_start(task, steps=settings.base_steps)
    return experiment.Plan(
        start, training(task, settings), strings.bound(premises.measure, task, problems=settings.problems)
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """RL on well-posed questions writes longer without a premise, and so does its pupil; a mixed reward cures it."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "mip/length_ratio", "rl", "plain"),
        experiment.greater(results, "mip/length_ratio", "distilled", "plain"),
        experiment.greater(results, "mip/abstain", "repaired", "rl"),
        experiment.greater(results, "well/accuracy", "repaired", "rl", by=-0.03),
        *(experiment.greater(results, f"{kind}/length_ratio", "rl", "plain") for kind in KINDS),
    )


if __name__ == "__main__":
    experiment.main(__name__)
