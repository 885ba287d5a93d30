"""A judge whose principles grow by play against flawed replies, and reward models of labels by several agents.

Paper:     Wei et al., "Igniting Creative Writing in Small Language Models: LLM-as-a-Judge versus Multi-Agent Refined
           Rewards", arXiv:2508.21476.
Claim:     both a reward model of labels refined by several agents and a judge with adversarially found principles lift
           a small model's writing; the judge does so more, with fewer labels.
Equations: adversarial: 12 rounds of 4 replies with one flaw each (fooled: the detector adds the rule; seen: the
           generator avoids the flaw) and of 4 labelled replies (the detector adds or drops rules), at most 10 of 50
           rules; reward: the share of its rules that a reply keeps, by what a fitted reader sees of its qualities.
           no_reflection: without the labelled ones; fixed: the two first rules. rm_multi: Bradley-Terry on pairs
           labelled good in every respect, 5 % wrong; rm_single: on lenient labels, 20 % wrong. rm_debate: labels of
           agents that err in reading: the four most similar of 64 labelled references are looked up, in six rounds a
           critic charges the worst quality and an advocate reads it again, a judge rules, a lone charge is checked;
           no_retrieval: without the references; one_reading: no rounds. GRPO, k3 of weight 0.02. Over pairs of one's
           own with --agents ADDRESS --agents-model NAME a language model plays all roles in words: generator and
           detector, whose rules are then sentences and whose verdict is the reward (1, 0, half where it cannot be
           read); critic, advocate, judge and reflection, whom the four most similar preferred or other responses to
           other prompts are shown; rm_multi: five readers of one respect each; rm_single: one lenient reader.
Left out:  language models in the embedded world, whose replies are no text; there the share of rules stands for the
           binary verdict. A detector's list of sentences stands for the paper's text of a strategy; one model in all
           roles; a verdict has no likelihood, so that a model in a folder is asked where a server serves it.
Expect:    eval/utility adversarial > fixed, adversarial > rm_multi and rm_multi > rm_single; judge/agreement with the
           truth adversarial > fixed and adversarial > no_reflection; rm_debate > one_reading as a secondary figure.
           The record says contradicted of rules that agreed with the truth in 0.71 of cases, the two fixed ones in
           0.83: play found worse rules there. The bed asks for 0.65, below which a judge is near chance.
Measure:   true utility and qualities of replies to fresh prompts; each seed plays its own games; equal rollouts; labels
           used: 48 by the judge's reflection and 256 by its reader, 1024 pairs by a reward model.
Run:       python -m experiments.reward_models.creative_writing [--world briefings, where a topic is secret]
"""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import strings
from experiments.reward_models.parts import adversarial_rules, attribute_briefings, attribute_rewards, writing_agents
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes

OWN_ROWS = "experiments.reward_models.parts.writing_agents"
FIRST_RULES = (2, 12)  # not too unsafe, not too impolite: a quarter of either


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes of the play are the paper's; the writer is a decoder of 32 tokens made here."""

    steps: int = 100
    learning_rate: float = 1e-3
    eval_every: int = 25
    base_steps: int = 150
    fit_steps: int = 200
    rounds: int = 12  # of play; 0: the first rules stay
    examples: int = 4  # labelled replies of each round
    label_pairs: int = 1024  # of a reward model
    labels: str = ""  # multi, single or debate: a reward model in place of the judge
    arguments: int = 6  # rounds of a debate; 0: the first reading counts
    trust: float = 0.2  # weight of the retrieved references in a first opinion
    kl_weight: float = 0.02


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "fit_steps": 2, "rounds": 2, "label_pairs": 8}
ARMS = {
    "rm_single": {"labels": "single"},
    "adversarial": {},
    "rm_multi": {"labels": "multi"},
    "fixed": {"rounds": 0},
    "no_reflection": {"examples": 0},
    "rm_debate": {"labels": "debate"},
    "no_retrieval": {"labels": "debate", "trust": 0.0},
    "one_reading": {"labels": "debate", "arguments": 0},
}
BED = experiment.Bed(metric="eval/utility", baseline="fixed", judges=(("adversarial", "judge/agreement", 0.65),))
WORLDS = {"language": text.LANGUAGE, "briefings": attribute_briefings.BRIEFINGS}
METRICS = ("eval/utility", "judge/agreement", "eval/varied", "eval/safe", "eval/proxy")
CURVES = ("eval/utility", "eval/varied", "eval/safe", "eval/length", "kl/ref")


def agreement(task: Replies, params, key, *, proxy):
    """How often the judge's better half of replies, or what a model calls good, is the better half by the truth."""
    prompts, replies = task.draw_behaviour(key, 512)
    said, true = proxy(task, params, prompts, replies), task.utility(prompts, replies)
    cut = 0.5 if proxy is writing_agents.detector else jnp.median(said)
    same = (said > cut) == (true > jnp.median(true))
    return {"judge/agreement": reduce.scalars(same.astype(jnp.float32))}


@lru_cache(maxsize=8)
def make_agreement(proxy):
    return partial(agreement, proxy=proxy)


def labelled(task: Replies, settings: Settings):
    """How the arm's reward model gets its pairs: by language models, or by recipes that err."""
    debate = {"rounds": settings.arguments, "trust": settings.trust} if settings.labels == "debate" else {}
    if task.agents is not None:
        return partial(writing_agents.draw_pairs, kind=settings.labels, **debate)
    if debate:
        return partial(adversarial_rules.draw_debated_pairs, **debate)
    error, strict = {"multi": (0.05, True), "single": (0.2, False)}[settings.labels]
    return partial(adversarial_rules.draw_labelled_pairs, error_rate=error, strict=strict)


def build(settings: Settings, task: Replies = text.LANGUAGE) -> experiment.Plan:
    """The arm's reward, found by play or fitted to labels, then GRPO on it."""
    stages, proxy = [], attribute_rewards.first_output if settings.labels else adversarial_rules.detector
    if settings.labels:
        fitted, loss, table = labelled(task, settings), attribute_rewards.preference_loss, settings.label_pairs
    else:
        fitted, loss, table = adversarial_rules.draw_labelled, attribute_rewards.label_loss, 256
    if task.agents is not None and not settings.labels:
        proxy = writing_agents.detector  # it reads for itself
    else:
        stages.append(attribute_rewards.fit_stage(task, fitted, loss, steps=settings.fit_steps, table=table))
    shared = {"learning_rate": settings.learning_rate, "kl_weight": settings.kl_weight}
    stages.append(attribute_rewards.grpo_stage(task, proxy, steps=settings.steps, **shared))
    outputs = 1 if settings.labels else len(text.NAMES)
    start = attribute_rewards.make_start(task, base_steps=settings.base_steps, outputs=outputs)

    def init(key):
        sizes, own = {"rounds": settings.rounds, "examples": settings.examples}, jax.random.fold_in(key, 15)
        if task.agents is not None:
            return start(key) | ({} if settings.labels else {"rules": task.agents.play(own, **sizes)})
        found = adversarial_rules.play(task, own, FIRST_RULES, **sizes)
        return start(key) | {"rules": (found.rules > 0).astype(jnp.float32)}

    return experiment.Plan(
        init, tuple(stages), strings.bound(attribute_rewards.measure, task, proxy, (make_agreement(proxy),))
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """Principles found by play beat fixed ones and labels of several agents, and these the labels of one."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/utility", "adversarial", "fixed"),
        experiment.greater(results, "eval/utility", "adversarial", "rm_multi"),
        experiment.greater(results, "eval/utility", "rm_multi", "rm_single"),
        experiment.greater(results, "judge/agreement", "adversarial", "fixed"),
        experiment.greater(results, "judge/agreement", "adversarial", "no_reflection"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
