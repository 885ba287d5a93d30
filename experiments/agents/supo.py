"""Agents that write summaries of what no longer fits into their context, trained with the answer's reward (SUPO).

Paper:     Lu et al., "Scaling LLM Multi-turn RL with End-to-end Summarization-based Context Management",
           arXiv:2510.06727.
Claim:     trained end to end, summaries let an agent solve as much with a small working context as with a large one,
           more than with the same context and none; more summaries at test time than in training help further.
Equations: after a turn with more than L tokens in context the policy writes a summary z and goes on from prompt and z,
           at most S times; A_i = (R_i - mean) / std over the rollouts of a group, at all sub-trajectories of i; J = sum
           o_i min(rho A, clip(rho, 0.8, 1.28) A) / (sum o_i tokens), o_i = 0 for a rollout without an answer. long:
           GRPO without a limit, truncated: GRPO with L and S = 0, both with o_i = 1; rule: the summary is the beginning
           of what was shown last; no_mask: o_i = 1; per_part: mean and std over sub-trajectories.
Left out:  taking out the turn that made the context too long, in the embedded world, where a page is not shown twice;
           at scale --last-turn dropped does. Differs from the paper in that the tokens of rollouts with o_i = 0 are in
           no denominator either, so that others weigh more where many have no answer. S, turns and group of the paper
           are not known here; it had L = 65,536.
Expect:    eval/more: supo > rule, supo > truncated, supo > long - 0.05; supo gains by more summaries, eval/gained > 0.
           Of no_mask and per_part nothing is claimed.
Measure:   ledgers of 1 to 8 pages, 2 in a context; none of the 64 that are measured, of 2 and of 4 to 8 pages, is among
           the 512 that train; trained with 2 summaries, enough for 6 pages; eval/more: measured with 3, enough for all
           (what trains without them has none); equal episodes and updates. The primary part, supo against rule, says
           what a policy writes into summaries; supo against long what they cost. truncated reads the 2 pages that fit,
           so that of longer ledgers it can but guess, which can hardly be contradicted.
Run:       python -m experiments.agents.supo; at scale --model DIR --data FILE --tools search=CORPUS.jsonl
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import ledger, sub_trajectories
from experiments.parts import strings
from jaxrl_llm import experiment
from jaxrl_llm.advantages import turns
from jaxrl_llm.envs import tool_question
from jaxrl_llm.experiment import multi_turn_plan, text_contexts
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.turns import contexts
from jaxrl_llm.run import catalog, parts
from jaxrl_llm.train.methods import builders, episode_methods
from jaxrl_llm.train.plan import Plan, Setup, Stage, setup_of


def per_part(rewards: Array, group_ids: Array, present: Array) -> Array:
    """Every sub-trajectory is a member of the group: long rollouts count more."""
    return turns.pooled_turn_advantages(
        jnp.broadcast_to(rewards[:, None], present.shape), group_ids, present, gamma=0.0
    )


@dataclasses.dataclass(frozen=True)
class Settings(multi_turn_plan.Settings):
    """The paper's context, for --data and a model of one's own, or a decoder of 32 numbers a token made here."""

    steps: int = 200
    eval_every: int = 20
    prompts_per_step: int = 32
    group_size: int = 8
    verifier: parts.VerifierName = "f1"
    max_turns: int = 64
    max_new_tokens: int = 262144
    base_steps: int = 400
    context_tokens: int | None = 65536  # L
    summary_tokens: int = 2048
    summaries: int = 2  # S in training
    more_summaries: int = 3  # and when measured
    last_turn: Literal["kept", "dropped"] = "kept"  # the one that made the context too long, before a summary
    rule: Callable[[int], Callable[..., tuple[Array, Array]]] | None = None
    keep: Callable[..., Array] = sub_trajectories.finished_rollouts
    advantages: Callable[..., Array] = turns.shared_advantages


EMBEDDED = {"steps": 60, "learning_rate": 1e-3, "eval_every": 30, "prompts_per_step": 8, "context_tokens": 7,
            "summary_tokens": ledger.SUMMARY_TOKENS}  # fmt: skip
SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "prompts_per_step": 2, "group_size": 2}
ARMS = {
    "long": {"context_tokens": None, "summaries": 0, "more_summaries": 0, "keep": sub_trajectories.every_rollout},
    "truncated": {"summaries": 0, "more_summaries": 0, "keep": sub_trajectories.every_rollout},
    "rule": {"rule": contexts.beginning},
    "supo": {},
    "no_mask": {"keep": sub_trajectories.every_rollout},
    "per_part": {"advantages": per_part},
}
METRICS = ("eval/success", "eval/more", "eval/far", "eval/overlong", "eval/right_summaries", "eval/context")
CURVES = ("eval/more", "eval/far", "eval/right_summaries", "length/truncated_fraction", "reward/mean", "policy/entropy")
# what truncation costs shows beside the context that holds everything
# a rule writes nothing to learn from: that the task can be learned is seen of the arm that has read all of it
BED = experiment.Bed(metric="eval/more", baseline="long")


def rules_of(settings: Settings) -> dict[str, Any]:
    """How a context that is too long is shortened."""
    return {"rule": settings.rule and settings.rule(settings.summary_tokens), "drop": settings.last_turn == "dropped"}


def embedded(settings: Settings) -> Setup:
    """A ledger to keep; measured with as many summaries as in training, and with more."""
    arena, times = ledger.make_ledger(), (settings.summaries, settings.more_summaries)
    trained, more = (ledger.context_of(settings.context_tokens, count, **rules_of(settings)) for count in times)
    rollout = ledger.episodes_in_context(arena, trained, arena.train, group_size=settings.group_size)
    width = contexts.widest(trained, arena.env, prompt_tokens=1, turns=arena.turns)
    base = arenas.make_base(arena, steps=settings.base_steps, played=ledger.make_played())
    measure = strings.bound(ledger.measure, arena, trained, more, samples=4, far=6)
    return Setup(arena, base, measure, slots={"rollout": rollout, "width": width})


def own(settings: Settings) -> Setup:
    """Questions to answer with tools, in messages."""
    times = settings.summaries, settings.more_summaries
    sight = text_contexts.sight(settings.context_tokens, times, settings.summary_tokens, **rules_of(settings))
    return multi_turn_plan.hosted(settings, sight=sight, opened=catalog.questions, more=tool_question.figures)


def build(settings: Settings) -> Plan:
    """One online stage on the sub-trajectories; every arm starts from a base that saw both kinds of contexts."""

    def method(tasks, *, width, **slots):
        estimate = sub_trajectories.make_split_estimate(
            tasks.policy, settings.advantages, keep=settings.keep, most=settings.summaries + 1, width=width
        )
        loss = builders.make_policy_loss(tasks.policy, partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28))
        return episode_methods.make_grpo(tasks, settings, estimate=estimate, loss=loss, **slots)

    setup = setup_of(settings, embedded, own)
    return setup.plan(Stage(method(setup.tasks, **setup.slots), settings.steps))


def claim(results: experiment.Results) -> experiment.Claim:
    """Summaries beat a rule, and the same context without; they reach the large context, and more of them help."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/more", "supo", "rule"),
        experiment.greater(results, "eval/more", "supo", "truncated"),
        experiment.greater(results, "eval/more", "supo", "long", by=-0.05),
        experiment.above(results, "eval/gained", "supo", 0.0),
    )


if __name__ == "__main__":
    experiment.main(__name__)
