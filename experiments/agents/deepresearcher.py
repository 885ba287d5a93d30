"""Searching learned where the web is as bad as it is (DeepResearcher).

Paper:     Zheng et al., "DeepResearcher: Scaling Deep Research via Reinforcement Learning in Real-world Environments",
           arXiv:2504.03160.
Claim:     an agent trained by RL on the live web, with its wrong hits, long pages and failures, does better there than
           a prompted one, and than one trained where every search brings the right passage.
Equations: r = -1 where the form is broken or no answer comes, else F1 of the sets of words; A_i = (r_i - mean) / std of
           the group; clipped surrogate and 0.001 k3 over the tokens the policy chose. prompted: not trained; rag_rl:
           trained where searches hit and pages load; no_reader: pages are their first segment, in training and after;
           no_mask: the loss also covers what the tools say; no_search: trained and measured with a single action, which
           has to be the answer. All others are measured on the noisy web.
Left out:  thoughts; in the embedded web text, several queries or pages in one action, and a model that reads: its
           reading agent is a rule. With --tools pages=CORPUS.jsonl web_search takes queries, web_browse addresses and a
           goal, and --reader ADDRESS --reader-model NAME reads segment by segment; with --closed-book 10 questions that
           the model answers without tools in one of 10 tries are left out, and those that the reader finds unsuitable.
           The penalty of -1 is the paper's and constant, not annealed: of three episodes that do all they can one finds
           nothing in six turns, and a guess pays 0.2, so that guessing may be learned first; then the bed is invalid.
Expect:    eval/exact, both words right: deep > prompted, deep > rag_rl, and deep > no_reader, as the reading agent
           matters; eval/f1: deep > prompted. Nothing is claimed of no_mask.
Measure:   held-out questions of one and two hops, 30 % wrong hits, 20 % failures; equal episodes and updates. A guess
           has eval/exact 1 / 24 = 0.04 and eval/f1 5 / 24 = 0.21; who always acts as it should has eval/exact 0.70 in
           six turns, the behaviour that the base imitates 0.47. The bed is invalid unless the base (prompted) has 0.1.
Run:       python -m experiments.agents.deepresearcher; at scale --model DIR --data FILE --format hotpotqa
           --tools pages=CORPUS.jsonl (or search=), whose searches go wrong as often; no_reader sees beginnings
"""

import dataclasses
from collections.abc import Callable
from functools import partial

from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import closed_book, multi_hop, noisy_web
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.envs import tool_question
from jaxrl_llm.experiment import multi_turn_plan
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.run import catalog, parts
from jaxrl_llm.tools import endpoints, pages
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of
from jaxrl_llm.types import Trajectories


def taught(stage: Stage) -> tuple[Stage, ...]:
    """RL."""
    return (stage,)


def untaught(stage: Stage) -> tuple[Stage, ...]:
    """The model as it is: no episode is played to change nothing."""
    return ()


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, multi_turn_plan.Settings):
    """The paper's batch, rewards and KL, for --data and a model of one's own, or a decoder made here."""

    steps: int = 150
    learning_rate: float = 1e-6
    eval_every: int = 20
    prompts_per_step: int = 256
    group_size: int = 16
    max_turns: int = 10
    verifier: parts.VerifierName = "deep_research"
    reader: str = ""  # address of the model that reads pages, https://HOST/v1, and its name; empty: a rule
    reader_model: str = ""
    # answers without tools (the paper's: 10); a question of which one is right does not train; 0: all questions do
    closed_book: int = 0
    base_steps: int = 400
    wrong_reward: float = 0.0  # no F1 and a right form
    malformed_reward: float = -1.0
    kl_weight: float = 0.001
    astray: float = 0.3  # in training; the measurement keeps the web's
    failing: float = 0.2
    read: Callable[..., tuple[Array, Array]] = noisy_web.read_on
    trained: Callable[..., Trajectories] = multi_turn.chosen_only
    teach: Callable[..., tuple[Stage, ...]] = taught


SKILL = 0.85  # of the behaviour that the base imitates: at 0.7 it finishes too few searches to learn from
EMBEDDED = {"steps": 100, "learning_rate": 5e-4, "prompts_per_step": 12, "group_size": 5, "max_turns": 6}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "prompted": {"teach": untaught},
    "rag_rl": {"astray": 0.0, "failing": 0.0},
    "deep": {},
    "no_reader": {"read": noisy_web.first_segment},
    "no_mask": {"trained": multi_turn.with_observations},
    "no_search": {"max_turns": 1},
}
METRICS = ("eval/exact", "eval/f1", "eval/f1_1", "eval/f1_2", "eval/formed", "eval/searches")
# prompted is not trained: whether the web can be learned shows on what is trained where it never fails
BED = experiment.Bed(
    metric="eval/exact", baseline="rag_rl", chance=1 / 24, ceiling=0.7, judges=(("prompted", "eval/exact", 0.1),)
)
CURVES = ("eval/exact", "eval/f1", "eval/f1_2", "eval/searches", "eval/formed", "reward/mean", "policy/entropy")


def rewarded(settings: Settings) -> Callable[..., Array]:
    """The reward of an answer by its F1."""
    rewards = {"wrong_reward": settings.wrong_reward, "malformed_reward": settings.malformed_reward}
    return partial(shaping.graded_rewards, **rewards)


def embedded(settings: Settings) -> Setup:
    """The web of the arm; every arm is measured on the noisy one."""
    web = noisy_web.make_noisy_web(settings.read, astray=settings.astray, failing=settings.failing)
    arena, noisy = (arenas.shortened(x, settings.max_turns) for x in (web, noisy_web.make_noisy_web(settings.read)))
    score = multi_hop.score_by_f1(rewarded(settings), formed=noisy_web.well_formed)
    return Setup(
        arena, arenas.make_base(noisy_web.make_noisy_web(skill=SKILL), steps=settings.base_steps),
        strings.bound(arenas.measure, noisy, samples=4, figures=noisy_web.figures),
        slots={"rollout": arenas.trained_episodes(arena, settings), "score": score},
    )  # fmt: skip


def own(settings: Settings) -> Setup:
    """Questions to answer with tools, whose luck is that of the arm in training and that of the web in the test."""
    blind = settings.read is noisy_web.first_segment
    day = partial(tool_question.noisy, beginnings=blind)
    luck = [partial(day, astray=a, failing=f) for a, f in ((settings.astray, settings.failing), (0.3, 0.2))]
    opened = partial(
        catalog.questions, luck=tuple(luck), reader=pages.first_segment if blind else None,
        change=closed_book.left_out(settings),
    )  # fmt: skip
    score = tool_question.score_by_form(rewarded(settings))
    slots = {"score": score, "trained": multi_turn_plan.trained(settings)}
    return multi_turn_plan.hosted(settings, opened=opened, slots=slots, more=tool_question.figures)


def build(settings: Settings) -> Plan:
    """One online stage on the web of the arm; every arm is measured on the noisy one."""
    setup = setup_of(settings, embedded, own)
    online = episode_methods.make_grpo(setup.tasks, settings, kl_weight=settings.kl_weight, **setup.slots)
    stage = Stage(online, settings.steps, episode_methods.reference_for(settings.kl_weight))
    return setup.plan(*settings.teach(stage))


def claim(results: experiment.Results) -> experiment.Claim:
    """Training on the noisy web beats prompting, training where searches are perfect, and reading only beginnings."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/exact", "deep", "prompted"),
        experiment.greater(results, "eval/exact", "deep", "rag_rl"),
        experiment.greater(results, "eval/exact", "deep", "no_reader"),
        experiment.greater(results, "eval/f1", "deep", "prompted"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
