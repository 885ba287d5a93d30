"""Reasoning improved without any label: agreement among a model's own answers as the reward (EMPO).

Paper:     Zhang et al., "Right Question is Already Half the Answer: Fully Unsupervised LLM Reasoning
           Incentivization", arXiv:2504.05812.
Claim:     minimising the entropy over the meanings of its answers, without labels, raises a base model's accuracy a
           long way towards supervised training.
Equations: answers of a group in clusters of equal meaning, p_c = |c| / G, r_i = p of its cluster, then GRPO; a group of
           all different answers and a missing answer get 0. filtered: only groups with low < -sum p log p < high.
           majority: r_i = 1 in the largest cluster. random: rewards without content, by position in the group;
           random_3, random_10: at a third and a tenth of the rate, for no reward of its own says which suits it.
           by_model: a language model says which answers mean the same (--comparer DIR; here a copy trained to compare
           numbers); of rows of one's own r_i is then -1/2 without an answer, 0 where it says the question again, 0 for
           a group without a cluster of a fifth. misled, misled_grpo: empo and grpo from a start that agrees on wrong
           answers (fine-tuned on solutions of which 7 of 10 end one too high).
Left out:  nothing of the method.
Expect:    eval/accuracy: empo rises by more than half of what labels gain (grpo), seed by seed, by more than 0.05, and
           beyond eval/majority of its start, what a vote gets without training; agreement/entropy falls.
Measure:   held-out arithmetic chains, one whole number an answer, labels hidden from all arms but grpo;
           eval/majority is the vote of the eval_samples responses that are measured (4; the groups that train have 8);
           8 seeds, equal rollouts and updates. A constant answer is right for 0.16, ceiling 1.
Run:       python -m experiments.policy_gradient.empo
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts.messages import asked_text
from experiments.policy_gradient.parts import agreement, meanings
from jaxrl_llm import experiment, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.run import parts as job
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Params, Rewards, Trajectories, declared
from jaxrl_llm.verifiers.answers import final_part


def random_rewards(clusters, group_ids, answered):
    """1 for every second member: members are exchangeable, so this says nothing about their answers."""
    return (jnp.arange(clusters.shape[0]) % 2).astype(jnp.float32)


def as_loaded(settings, bench: recipes.Bench) -> Params:
    """The model as it is."""
    return bench.model.params


def wrongly_agreed(settings, bench: recipes.Bench) -> Params:
    """The model after it has learned an error that is commoner than the truth."""
    return meanings.misled(settings, wrong=0.7, steps=settings.misled_steps)


class Judged(NamedTuple):
    """How answers are clustered and paid: the bench, clusters of rows on the device, rewards of rows."""

    bench: recipes.Bench
    clusters_of: Callable[[Trajectories], tuple[Array, Array, Array]]
    rewards: Callable[[Trajectories], Rewards]


def by_value(settings, bench: recipes.Bench) -> Judged:
    """Equal numbers, or equal texts, mean the same."""
    read = recipes.make_answer_reader(bench)

    def clusters_of(trajectories):
        values, answered = read(trajectories)
        same = agreement.same_values(values, answered)
        return agreement.greedy_clusters(same, trajectories.group_ids), trajectories.group_ids, answered

    def unlabelled(trajectories):
        clusters, ids, answered = clusters_of(trajectories)
        keep = agreement.entropy_within(clusters, ids, low=settings.low, high=settings.high)
        return Rewards(settings.rewards(clusters, ids, answered), keep)

    return Judged(bench, clusters_of, unlabelled)


def by_model(settings, bench: recipes.Bench) -> Judged:
    """A language model says which answers mean the same, on the host, where they are text."""
    generated, tokenizer, problems = settings.data == "chain", bench.model.tokenizer, recipes.solved_problems(settings)
    if settings.comparer:
        by = job.load_model(settings.comparer)
        # a comparer without a template, as a base model, is asked in plain text whatever the policy is asked in
        chat = settings.chat and by.tokenizer.chat_template is not None
        says_same = meanings.make_asked_in_words(by, by.params, chat=chat)
    elif generated:
        params = meanings.trained_comparer(settings, steps=settings.comparer_steps)
        says_same = meanings.make_says_same(bench.model, params, meanings.in_numbers, yes="T", no="F")
    else:
        says_same = meanings.make_asked_in_words(bench.model, bench.model.params, chat=settings.chat)

    def clusters_of(trajectories):
        said = [final_part(text).strip() for text in job.responses(tokenizer, trajectories)]
        asked = [asked_text(problems[k].prompt) for k in trajectories.problem_ids.tolist()]
        same = meanings.equivalence(asked, said, trajectories.group_ids.tolist(), says_same)
        again = jnp.asarray([meanings.repeats_question(*pair) for pair in zip(asked, said, strict=True)])
        clusters, ids = agreement.greedy_clusters(same, trajectories.group_ids), trajectories.group_ids
        return clusters, ids, jnp.asarray([bool(text) for text in said]), again

    def unlabelled(trajectories):
        clusters, ids, answered, again = clusters_of(trajectories)
        keep = agreement.entropy_within(clusters, ids, low=settings.low, high=settings.high)
        if generated:
            return Rewards(settings.rewards(clusters, ids, answered), keep)
        return Rewards(meanings.free_text_rewards(clusters, ids, answered, again), keep)

    return Judged(bench._replace(score=None), lambda rows: clusters_of(rows)[:3], unlabelled)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 400
    rewards: Callable[..., Array] | None = agreement.empo_rewards  # (clusters, group_ids, answered); None: the label
    slower: float = 1.0  # what the learning rate is divided by
    low: float = -1.0  # nats of semantic entropy that a group must exceed to train
    high: float = 1e9
    judge: Callable[..., Judged] = by_value
    comparer: str = ""  # folder of the model that compares meanings, in the arm that has one
    comparer_steps: int = 300  # of supervised fine-tuning of the embedded comparer
    start: Callable[..., Params] = as_loaded
    misled_steps: int = 100  # of supervised fine-tuning on misleading solutions


EMBEDDED = {
    "levels": (5, 6), "steps": 120, "eval_every": 15, "prompts_per_step": 8, "max_new_tokens": 48,
    "learning_rate": 1e-4, "eval_problems": 128,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4, "comparer_steps": 2, "misled_steps": 2,
}  # fmt: skip
ARMS = {
    "grpo": {"rewards": None},
    "empo": {},
    "empo_filtered": {"low": 0.2, "high": 1.6},
    "majority": {"rewards": agreement.majority_rewards},
    "random": {"rewards": random_rewards},
    "random_3": {"rewards": random_rewards, "slower": 3.0},
    "random_10": {"rewards": random_rewards, "slower": 10.0},
    "by_model": {"judge": by_model},
    "misled": {"start": wrongly_agreed},
    "misled_grpo": {"start": wrongly_agreed, "rewards": None},
}
BED = experiment.Bed(chance=0.16)
METRICS = ("eval/accuracy", "eval/pass@4", "agreement/entropy", "eval/majority", "eval/tokens")
CURVES = (*METRICS, "policy/entropy", "group/degenerate_fraction", "grad/norm")


class Agreed(NamedTuple):
    """Extras of a batch: the semantic entropy of each row's group."""

    semantic: Array


def with_majority(found: recipes.Bench, answers: Any, rows: Trajectories, rewards: Rewards) -> dict[str, Array]:
    """The usual figures, and ``eval/majority``: problems whose largest cluster of answers is right."""
    samples = rows.tokens.shape[0] // found.heldout.tokens.shape[0]
    values, answered = recipes.make_answer_reader(found)(rows)
    ids = jnp.arange(rows.tokens.shape[0], dtype=jnp.int32) // samples
    clusters = agreement.greedy_clusters(agreement.same_values(values, answered), ids)
    largest = agreement.majority_rewards(clusters, ids, answered) > 0
    right = jnp.any((largest & rewards.valid & (rewards.value > 0.5)).reshape(-1, samples), axis=1)
    return recipes.of_samples(found, answers, rows, rewards) | {
        "eval/majority": reduce.scalars(right.astype(jnp.float32))
    }


def build(settings: Settings) -> experiment.Plan:
    """One online stage: GRPO whose reward the arm makes from answers, or from the label."""
    bench, clusters_of, unlabelled = settings.judge(settings, recipes.bench(settings))

    def advantages(trajectories, rewards):
        values = group.group_normalized_advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
        return group.per_token(values, trajectories.mask)

    def row_extras(extras, trajectories, rewards):
        return Agreed(agreement.semantic_entropy(*clusters_of(trajectories)[:2]))._asdict()

    def diagnostics(logp, entropy, batch):
        return {"agreement/entropy": jnp.broadcast_to(declared(Agreed, batch.extras).semantic[:, None], logp.shape)}

    policy, labelled, on_host = bench.model.policy, settings.rewards is None, bench.score is None
    online = recipes.make_online(
        settings,
        bench,
        estimate=builders.make_estimate(
            policy, advantages, temperature=settings.temperature, row_extras=None if on_host else row_extras
        ),
        loss=builders.make_policy_loss(
            policy, clipped_policy_loss, temperature=settings.temperature, diagnostics=None if on_host else diagnostics
        ),
        tx=optax.adam(settings.learning_rate / settings.slower),
        **({} if labelled or on_host else {"score": lambda answers, trajectories: unlabelled(trajectories)}),
    )
    measure = recipes.make_measure(settings, figures=with_majority)
    plan = recipes.one_stage(settings, bench, online)._replace(
        init=lambda key: settings.start(settings, bench),
        measure=jax.jit(measure)
        if on_host and recipes.bench(settings).score
        else measure,  # it does not compile itself
    )
    return plan if labelled or not on_host else plan._replace(host_score=unlabelled)


def claim(results: experiment.Results) -> experiment.Claim:
    """Without labels EMPO gains more than half of what labels gain, 0.05, and what a vote of its start gets; answers
    agree more."""
    last = results.arms["empo"].curves["eval/accuracy"]["step"][-1]
    first = results.arms["empo"].curves["agreement/entropy"]["step"][0]
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        # random rewards spoil the policy: to beat them shows nothing
        experiment.grows_more(results, "eval/accuracy", "empo", "grpo", start=0, share=0.5),
        experiment.greater(results, "eval/accuracy", "empo", "empo", by=0.05, step=(last, 0)),
        experiment.exceeds_own(results, "eval/accuracy", "eval/majority", "empo", step=(last, 0)),
        experiment.smaller(results, "agreement/entropy", "empo", "empo", step=(last, first)),
    )


if __name__ == "__main__":
    experiment.main(__name__)
