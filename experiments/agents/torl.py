"""A calculator inside the rollout: code is executed where it is written, and its output trains nothing (ToRL).

Paper:     Li et al., "ToRL: Scaling Tool-Integrated RL", arXiv:2503.23383.
Claim:     RL with a code interpreter in the rollout, from a base model and without imitation of tool use, beats RL
           without tools; the model learns by itself to write code; a penalty for code that fails adds nothing.
Equations: R = 1 right, -1 else (penalty: less 0.5 where a call failed); GRPO without KL over what the policy wrote; at
           most C calls of an episode are executed. no_tool: C = 0, from a base that imitates guesses alone, as a model
           that is told of no tool writes no code; unheard: C = 0, from the base of the others, whose calls nobody
           answers, embedded alone; torl: C = 1; two_calls: C = 2; outputs_too: the tool's tokens are in the mask as
           well.
Left out:  programs (a call is one expression) and reasoning in text: what is written is a call or the answer. With
           --data a call is what the model's own template makes of it, not a block between ```python and ```output.
Expect:    eval/success: torl > no_tool, torl > unheard, and penalty no more than 0.05 above torl; eval/code rises more
           than where nobody answers.
Measure:   held-out chains of three digits modulo 10; equal episodes and updates. eval/code: share of episodes with a
           call; eval/passed: of executed calls without an error. Guessing is right one time in ten; no_tool can hardly
           do better, so that whether the world is learned shows on two_calls.
Run:       python -m experiments.agents.torl; at scale --model DIR --data FILE --format gsm8k [--tools calculator]
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import calculator
from jaxrl_llm import experiment
from jaxrl_llm.envs import tool_question
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.run import catalog
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of
from jaxrl_llm.types import Rewards, Trajectories


def written(rows: Trajectories) -> Array:
    return rows.mask


def written_and_shown(rows: Trajectories) -> Array:
    return rows.mask | multi_turn.shown(rows)


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """The paper's calls and rewards, and its batch for --data and a model of one's own, or a decoder made here."""

    steps: int = 200
    learning_rate: float = 1e-6
    eval_every: int = 20
    prompts_per_step: int = 128
    group_size: int = 16
    tools: str = "python"
    base_steps: int = 200
    calls: int = 1  # C
    code: float = 0.4  # chance that what the base made here imitates calls where it knows nothing
    penalty: float = 0.0
    trained: Callable[[Trajectories], Array] = written


EMBEDDED = {"steps": 80, "learning_rate": 1e-3, "prompts_per_step": 8, "group_size": 8}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "no_tool": {"calls": 0, "code": 0.0},
    "torl": {},
    "two_calls": {"calls": 2},
    "penalty": {"penalty": 0.5},
    "outputs_too": {"trained": written_and_shown},
    "unheard": {"calls": 0},
}
ONLY = "its questions are answered with a tool, and an env has actions of its own"
METRICS = ("eval/success", "eval/code", "eval/passed", "eval/turns")
CURVES = ("eval/success", "eval/code", "eval/passed", "reward/mean", "policy/entropy")
D_STAR = {"eval/success": 0.05}  # one episode in twenty: less changes no choice between having a tool and having none
# without the tool an answer is a guess; whether the world is learned shows where calls are answered
BED = experiment.Bed(metric="eval/success", baseline="two_calls", chance=0.1)


def embedded(settings: Settings) -> Setup:
    """Sums and a calculator; the base saw two calls where it saw any."""
    arena = calculator.make_calculator(calls=settings.calls)
    seen = calculator.make_calculator(calls=2, code=settings.code)
    setup = arenas.make_setup(
        arena, steps=settings.base_steps, slots={"failed": calculator.failed}, samples=8, more=calculator.figures
    )
    return setup._replace(init=arenas.make_base(seen, steps=settings.base_steps))


def own(settings: Settings) -> Setup:
    """Questions to answer with tools.

    Raises:
      UserError: for calls that nobody answers, of which a model of one's own is not told.
    """
    if settings.calls == 0 and settings.code:
        rest = " ".join(name for name in ARMS if name != "unheard")
        raise UserError(f"--data {settings.data}: with --calls 0 a model is told of no tool, and arm unheard is "
                        f"no_tool; give --arm {rest}, without --calls")  # fmt: skip
    return multi_turn_plan.hosted(
        settings, opened=partial(catalog.questions, calls=settings.calls), slots={"failed": tool_question.failed},
        more=tool_question.figures, only=ONLY,
    )  # fmt: skip


def build(settings: Settings) -> Plan:
    """One online stage in the world with so many calls, from a base that saw two where it saw any."""

    def method(tasks, failed, **slots):
        def score(answers, rows):
            found = multi_turn.episode_rewards(answers, rows)
            value = shaping.execution_rewards(found.value > 0.5, failed(rows), penalty=settings.penalty)
            return Rewards(value, found.valid)

        def trained(rows):
            return rows._replace(mask=settings.trained(rows))

        return episode_methods.make_grpo(tasks, settings, trained=trained, score=score, **slots)

    setup = setup_of(settings, embedded, own)
    return setup.plan(Stage(method(setup.tasks, **setup.slots), settings.steps))


def claim(results: experiment.Results) -> experiment.Claim:
    """The tool beats RL without it, its use grows, and punishing failed calls adds nothing."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "torl", "no_tool"),
        experiment.greater(results, "eval/success", "torl", "unheard"),
        experiment.grows_more(results, "eval/code", "torl", "unheard", start=0),
        experiment.smaller(results, "eval/success", "penalty", "torl", by=-0.05),
    )


if __name__ == "__main__":
    experiment.main(__name__)
