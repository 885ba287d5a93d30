"""Two tools, a reward in steps for using both, and the policy's own preferences between two halves of RL (Tool-Star).

Paper:     Dong et al., "Tool-Star: Empowering LLM-Brained Multi-Tool Reasoner via Reinforcement Learning",
           arXiv:2505.16410.
Claim:     after a cold start, RL with a hierarchical reward that pays for the joint use of tools, and a self-critic
           stage of DPO, beats RL on accuracy alone, which beats the cold start.
Equations: R = -1 malformed; 0 wrong; Acc + r_M where right with both tools; Acc where else right; GRPO. The critic:
           best against worst of the policy's own episodes by R, then the second best and worst, DPO at beta = 0.1.
           accuracy: r_M = 0 and no critic; no_bonus: r_M = 0; no_critic; no_cold_start: from a fresh decoder; sft: the
           cold start goes on for as many updates; single_tool: no calculator, in the cold start, training and
           measurement; two_critics: GRPO in thirds with half of the critic's updates after each of the first two.
Left out:  the web, the KL term; tool_star has one critic, amid GRPO. The embedded world has no text, so that its cold
           start is made by a rule, and nothing mends its episodes.
Expect:    eval/success: tool_star > accuracy at the end, accuracy there > cold start; eval/both: tool_star > accuracy.
Measure:   a third of the questions asks for an entry of a hidden table, a third for a sum of two numbers, for which one
           tool is enough, a third for a sum over two entries, which takes both; none of the 64 that are measured is,
           with the entries that it asks for, among the 512 that train; equal updates; the critic plays as many episodes
           as the GRPO steps in its place. eval/both: share of episodes that call both tools; the cold start imitates
           0.22, and has to begin below 0.7 (a part of the claim), so that a reward for it has something to change. A
           guess is right in 0.1, who calls what is needed in 1.
Run:       python -m experiments.agents.tool_star; at scale --model DIR --data FILE --format hotpotqa
           --tools python,search=CORPUS.jsonl, where the model itself is the cold start. Data with tools, sampled by
           prompts and hints, are made by ``rows --data FILE --tools ... --writer http://localhost:8000/v1
           --writer-model NAME --out FOLDER`` behind the same module (or by --model DIR): FOLDER/sft.jsonl for
           ``jaxrl sft``, FOLDER/rl.jsonl for --data. ``solve`` answers held-out questions with and without the code
           debugger, tool-use backtracer and chain refiner (parts/tool_data, parts/tool_chains)
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial

from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import calculator, imitation, self_critic, tool_runs, two_tools
from jaxrl_llm import experiment
from jaxrl_llm.envs import tool_question
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.run import catalog, parts
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of


def critic(settings, arena, online: Stage, **played) -> Stage:
    return self_critic.make_stage(
        arena, online.method.score, prompts=settings.critic_steps * settings.prompts_per_step,
        group_size=settings.group_size, steps=settings.critic_steps, rows_per_step=settings.critic_rows,
        learning_rate=settings.learning_rate, beta=settings.beta, pairs=settings.pairs, **played,
    )  # fmt: skip


def more_grpo(settings, arena, online: Stage, **played) -> Stage:
    return online._replace(steps=settings.critic_steps)


def halves(settings, arena, half: Stage, **played) -> tuple[Stage, ...]:
    """GRPO, what stands between, GRPO."""
    return half, settings.between(settings, arena, half, **played), half


def rounds(settings, arena, half: Stage, *, critics: int, **played) -> tuple[Stage, ...]:
    """GRPO and what stands between in turns, so many times, GRPO at the end; as many updates of each as ``halves``.

    Every critic plays with the policy of then, which is also its reference.

    From "Tool-Star", arXiv:2505.16410, algorithm 1: RL and self-critic alternate.
    """

    def share(updates, parts):  # the last one takes what is left
        return [updates // parts] * (parts - 1) + [updates - updates // parts * (parts - 1)]

    grpo = [half._replace(steps=steps) for steps in share(2 * settings.steps, critics + 1)]
    stages = [grpo[0]]
    for steps, online in zip(share(settings.critic_steps, critics), grpo[1:], strict=True):
        own = dataclasses.replace(settings, critic_steps=steps)
        stages += [settings.between(own, arena, half, **played), online]
    return tuple(stages)


def imitated(settings, arena, half: Stage, **played) -> tuple[Stage, ...]:
    """The cold start goes on, for as many updates."""
    updates = 2 * settings.steps + settings.critic_steps
    return (imitation.behaviour_stage(arena, steps=updates, learning_rate=settings.learning_rate),)


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """The paper's bonus and beta, for --data and a model of one's own, or a decoder of 32 numbers a token made here."""

    steps: int = 100  # of GRPO, before the critic and after it
    learning_rate: float = 1e-6
    eval_every: int = 16
    prompts_per_step: int = 128
    group_size: int = 8
    verifier: parts.VerifierName = "f1"
    base_steps: int = 500  # with 200 half of the seeds cannot repeat what a tool shows, and no arm learns
    bonus: float = 0.1  # r_M
    between: Callable[..., Stage] = critic
    critic_steps: int = 16
    critic_rows: int = 32  # pairs of an update
    beta: float = 0.1
    pairs: int = 2  # of each task
    then: Callable[..., tuple[Stage, ...]] = halves  # what follows the cold start
    calculate: Callable[..., tuple[Array, Array]] = calculator.calculate
    diligence: float = 0.5  # chance that the behaviour of the cold start calls the calculator
    alone: float = 2 / 3  # of the questions, one tool is enough


EMBEDDED = {"steps": 16, "learning_rate": 1e-3, "prompts_per_step": 8}
SMOKE = {
    "steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2, "critic_steps": 2,
    "critic_rows": 2, "pairs": 1,
}  # fmt: skip
ARMS = {
    "accuracy": {"bonus": 0.0, "between": more_grpo},
    "tool_star": {},
    "no_bonus": {"bonus": 0.0},
    "no_critic": {"between": more_grpo},
    "no_cold_start": {"base_steps": 0},
    "sft": {"then": imitated},
    "single_tool": {"calculate": two_tools.no_calculator, "diligence": 0.0},
    "two_critics": {"then": partial(rounds, critics=2)},
}
METRICS = ("eval/success", "eval/both", "eval/calls", "eval/malformed")
CURVES = (*METRICS, "reward/mean", "policy/entropy")
BED = experiment.Bed(metric="eval/success", baseline="accuracy", chance=0.1)


def embedded(settings: Settings) -> Setup:
    """Questions for one tool or for two."""
    arena = two_tools.make_two_tools(calculate=settings.calculate, diligence=settings.diligence, alone=settings.alone)
    slots = {"score": two_tools.score_by_conduct(bonus=settings.bonus)}
    return arenas.make_setup(arena, steps=settings.base_steps, slots=slots, samples=8, more=two_tools.figures)


def own(settings: Settings) -> Setup:
    """Questions to answer with tools of one's own."""
    if settings.base_steps == 0 or settings.then is imitated or settings.diligence == 0:
        raise UserError("arms no_cold_start, sft and single_tool are of the embedded world; "
                        "give --arm accuracy tool_star no_bonus no_critic two_critics")  # fmt: skip
    slots = {"score": tool_question.make_multi_score(bonus=settings.bonus)}
    setup = multi_turn_plan.hosted(settings, opened=catalog.questions, slots=slots, more=tool_question.figures)
    return setup._replace(tables=setup.tables | {"rows_at_once": settings.critic_rows})


def build(settings: Settings) -> Plan:
    """GRPO, the critic or as many steps of GRPO, GRPO; from a base that saw the tools of the arm."""
    setup = setup_of(settings, embedded, own)
    half = Stage(episode_methods.make_grpo(setup.tasks, settings, **setup.slots), settings.steps)
    return setup.plan(*settings.then(settings, setup.tasks, half, **setup.tables))


def claim(results: experiment.Results) -> experiment.Claim:
    """Bonus and critic together beat RL on accuracy, which beats the cold start, and more episodes use both tools."""
    last = max(results.arms["accuracy"].curves["eval/success"]["step"])
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/success", "tool_star", "accuracy"),
        experiment.greater(results, "eval/success", "accuracy", "accuracy", step=(last, 0)),
        experiment.greater(results, "eval/both", "tool_star", "accuracy"),
        experiment.below(results, "eval/both", "accuracy", 0.7, step=0),
    )


if __name__ == "__main__":
    if sys.argv[1:2] in (["rows"], ["solve"]):
        sys.exit(tool_runs.cli(sys.argv[1:]))
    experiment.main(__name__)
