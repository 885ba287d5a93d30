"""Search agents trained on episodes that outlive several versions of the weights (ASearcher).

Paper:     Gao et al., "Beyond Ten Turns: Unlocking Long-Horizon Agentic Search with Large-Scale Asynchronous RL",
           arXiv:2508.07976.
Claim:     long searches are learned only where training allows many turns; this makes few episodes very long, which is
           affordable where rollouts run independently of each other and of the trainer, and costs no accuracy.
Equations: r = F1 [every turn well formed], -0.5 for calling the question invalid; A = r - mean of the group, whitened
           over the tokens of groups whose rewards differ; loss -w min(rho A, clip(rho, 1 +- 0.4) A), rho = pi / pi_old,
           w = pi_old / mu, 0 above 5, one update a batch. asearcher: limit 8, tokens of weights 4 to 0 updates old;
           sync: weights never old; short: so, limit 4; coupled: ratio and clip around mu, w = 1; no_filter: all groups.
Left out:  thoughts; a judge. At scale pages are read by a model (--tools pages=CORPUS.jsonl --reader ADDRESS
           --reader-model NAME), which with --rounds N also makes the questions harder and checks them before training;
           in the embedded world pages are facts and questions are drawn. Here all of a batch begin with weights 4
           updates old, and keys and values outlive a swap of the weights; at scale the old weights are those of the
           asynchronous loop, not copies beside the new ones, questions cannot be refused, and hours are not simulated.
           flow/hours comes from a simulator of events and from no timeline that was measured.
Expect:    eval/exact_many (4 and 5 hops, 8 turns allowed): sync > short, |asearcher - sync| < 0.05; flow/hours:
           asearcher < sync. Nothing is claimed of coupled and no_filter.
Measure:   held-out questions of 1 to 5 hops; equal episodes and updates. flow/hours is simulated: turns as the policy
           takes them, each log-normal with median 20 s; asynchronously half of the machines sample, half as many
           episodes at a time, and half train, in twice the time.
Run:       python -m experiments.agents.asearcher; at scale --model DIR --data FILE --tools pages=CORPUS.jsonl
           --loop async, in which every arm has the staleness of its own
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import optax
from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import independent_episodes, many_hops, question_agent, swapped_weights
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group, whiten
from jaxrl_llm.envs import tool_question
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import multi_turn_plan, recipes
from jaxrl_llm.losses import off_policy, policy
from jaxrl_llm.rewards import shaping
from jaxrl_llm.run import catalog, parts
from jaxrl_llm.tools import endpoints
from jaxrl_llm.train.methods import builders, episode_methods
from jaxrl_llm.train.plan import Setup, setup_of
from jaxrl_llm.types import TokenTerms


def decoupled(logp, entropy, batch, clip, cap):  # with one update a batch the policy is its own proximal policy
    rows = builders.current_anchor(logp, batch), batch.sampler_logp, batch.advantages, batch.mask
    return off_policy.decoupled_policy_loss(logp, *rows, clip_low=clip, clip_high=clip, cap=cap)


def coupled(logp, entropy, batch, clip, cap):  # one ratio corrects and is clipped
    rows = batch.sampler_logp, batch.advantages, batch.mask
    return policy.clipped_policy_loss(logp, *rows, clip_low=clip, clip_high=clip)


@dataclasses.dataclass(frozen=True)
class Settings(endpoints.Settings, multi_turn_plan.Settings):
    """The paper's staleness and bounds, turns and batch for --data and a model of one's own, or a decoder made here."""

    steps: int = 200
    eval_every: int = 20
    prompts_per_step: int = 128
    group_size: int = 16
    max_turns: int = 32
    verifier: parts.VerifierName = "f1"
    reader: str = ""  # address of the model that reads pages, https://HOST/v1, and its name; empty: a rule
    reader_model: str = ""
    rounds: int = 0  # in which that model makes each training question harder, before the first step
    base_steps: int = 300
    turns: int = 32  # at most, of an episode that trains
    eta: int = 4  # updates by which the weights that sample may lag
    loss: Callable[..., TokenTerms] = decoupled  # (logp, entropy, batch, clip, cap)
    clip: float = 0.4
    cap: float = 5.0
    keep: Callable[..., Array] = group.informative_groups  # with rewards that differ


EMBEDDED = {"steps": 300, "learning_rate": 1e-3, "prompts_per_step": 6, "group_size": 8, "turns": 8}
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "sync": {"eta": 0}, "asearcher": {}, "coupled": {"loss": coupled}, "no_filter": {"keep": group.mean_within},
    "short": {"eta": 0, "turns": 4},
}  # fmt: skip
METRICS = ("eval/exact_many", "eval/exact", "eval/f1", "eval/searches_many", "flow/hours")
CURVES = (*METRICS, "reward/mean", "kl/sampler_mean", "policy/staleness", "policy/entropy")
# short cannot reach many hops by design; whether they are learned shows with eight turns
BED = experiment.Bed(baseline="sync")


def agent_of(settings: Settings) -> Callable | None:
    """The data agent, where the settings ask for one."""
    if not settings.rounds:
        return None
    chat = catalog.reading_chat(settings)
    if chat is None:
        raise UserError(f"--rounds {settings.rounds}: a model makes questions harder; give --reader and --reader-model")
    return partial(question_agent.all_harder, chat=chat, rounds=settings.rounds)


def embedded(settings: Settings) -> Setup:
    """Chains of links; what an asynchronous run would do to the samples befalls their weights; its hours are told."""
    whole, eta, size = many_hops.make_many_hops(), settings.eta, settings.group_size
    arena, batch = arenas.shortened(whole, settings.turns), settings.prompts_per_step * size
    hours = independent_episodes.make_hours(updates=settings.steps, batch=batch, most=settings.turns, staleness=eta)
    return Setup(
        arena, arenas.make_base(whole, steps=settings.base_steps),
        strings.bound(many_hops.measure, whole, samples=3, more=hours),
        slots={"score": many_hops.score, **arenas.swapping_actor(arena, lag=eta, group_size=size)},
        extras=recipes.lagged_extras(eta),
    )  # fmt: skip


def own(settings: Settings) -> Setup:
    """Questions to answer with tools, in the asynchronous loop: copies of a model would fill the devices."""
    setup = multi_turn_plan.hosted(
        settings, opened=partial(catalog.questions, change=agent_of(settings)), turns=settings.turns,
        slots={"score": tool_question.score_by_form(partial(shaping.graded_rewards, wrong_reward=0.0))},
        more=tool_question.figures,
    )  # fmt: skip
    return setup._replace(fields=setup.fields | {"staleness": settings.eta})


def build(settings: Settings) -> experiment.Plan:
    """One online stage whose weights are swapped while episodes run."""
    terms = partial(settings.loss, clip=settings.clip, cap=settings.cap)

    def keep(rows, rewards):
        return settings.keep(rewards.value, rows.group_ids, low=-1.0, high=1.0, valid=rewards.valid)

    def advantages(rows, rewards):
        mask = rows.mask & keep(rows, rewards)[:, None]
        return whiten.centred_token_advantages(rewards.value, rows.group_ids, mask, valid=rewards.valid)

    setup = setup_of(settings, embedded, own)
    loss = builders.make_batch_loss(setup.tasks.policy, terms, diagnostics=swapped_weights.shown)
    noted = swapped_weights.noted(settings.eta)
    online = episode_methods.learned_from_episodes(
        setup.tasks, loss=loss, tx=optax.adam(settings.learning_rate), prompts_per_step=settings.prompts_per_step,
        estimate=builders.make_estimate(setup.tasks.policy, advantages, keep=keep, row_extras=noted),
        group_size=settings.group_size, **setup.slots,
    )  # fmt: skip
    return setup.plan(experiment.Stage(online, settings.steps, setup.extras))


def claim(results: experiment.Results) -> experiment.Claim:
    """More turns in training answer questions of many hops; old weights cost no accuracy and save hours."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/exact_many", "sync", "short"),
        experiment.close(results, "eval/exact_many", "asearcher", "sync", within=0.05),
        experiment.smaller(results, "flow/hours", "asearcher", "sync"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
