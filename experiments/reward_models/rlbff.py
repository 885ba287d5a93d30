"""Yes or no on a named principle as the reward (binary flexible feedback).

Paper:     Wang et al., "RLBFF: Binary Flexible Feedback to bridge between Human Feedback & Verifiable Rewards",
           arXiv:2509.21319.
Claim:     a reward model that judges whether a reply satisfies a principle ranks replies better than a Bradley-Terry
           model of the same data, follows principles that it was never trained on, and trains a policy towards the
           principle that the user names.
Equations: s = logit(yes) - logit(no) behind (principle in words, prompt, reply), loss -[l log sigma(s) + (1 - l) log
           sigma(-s)], only labels on which three annotators agree: min cosine of the phrases they name >= 0.8, equal
           verdicts, none "partly", the span written; as many yes as no. generative: a report, then yes or no, GRPO on
           the match with the label; shaded: on -|l - P(yes)|; s behind a report of its own. no_consensus: all labels of
           the first annotator. bt: one head fitted to pairs ordered by a satisfied principle, whichever it is.
           regressor: a head for each quality (an unwanted one is its negative). embedding: h . e(phrase). GRPO on s.
Left out:  the extractor of principles as a language model (its errors are drawn), and annotators' prose.
Expect:    rank/known, rank/longer_is_worse and rank/held_out rlbff > bt; rank/known rlbff > no_consensus; eval/polite,
           the named principle, rlbff > bt; rank/known generative > bt.
Measure:   rankings of fresh pairs under each of ten known and two held-out principles; true qualities of the trained
           policy; 8 seeds, equal labels (before the filter), updates and rollouts of the policy.
Run:       python -m experiments.reward_models.rlbff
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import strings
from experiments.reward_models.parts import attribute_rewards, principle_critic, principles
from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm import experiment
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.reward import label_regression_loss
from jaxrl_llm.reduce import scalars

NAMED = principles.QUALITIES.index("polite")


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """The models are decoders of 32 tokens made here; the paper's are of 32B and 70B."""

    steps: int = 60  # of GRPO under the named principle
    learning_rate: float = 1e-3
    eval_every: int = 30
    base_steps: int = 150
    fit_steps: int = 400
    judgements: int = 4096
    judge: str = "reader"  # reader, generative, embedding, bt, regressor
    keep: Callable[..., Array] = principles.agreed  # which judgements are fitted
    verdict: Callable[..., Array] = principle_critic.matches  # what the generative judge is paid for
    critic_steps: int = 150  # of its GRPO


SMOKE = {"steps": 2, "eval_every": 2, "base_steps": 2, "fit_steps": 2, "judgements": 256, "critic_steps": 2}
ARMS = {
    "bt": {"judge": "bt"},
    "rlbff": {},
    "no_consensus": {"keep": principles.anyhow},
    "regressor": {"judge": "regressor"},
    "embedding": {"judge": "embedding"},
    "generative": {"judge": "generative"},
    "shaded": {"judge": "generative", "verdict": principle_critic.shaded},
}
METRICS = ("rank/known", "rank/held_out", "rank/longer_is_worse", "eval/polite", "eval/utility")
CURVES = ("rank/known", "rank/held_out", "eval/polite", "eval/utility", "kl/ref")


def draw_ordered(task: Replies, key, n):
    """Two replies and a principle that the first one satisfies better, by an annotator who errs in a fifth."""
    pairs = task.draw_pairs(jax.random.fold_in(key, 0), n, sharpness=0.0)
    named = principles.draw_principles(jax.random.fold_in(key, 1), n)
    does = [principles.satisfied(task, pairs.prompts, x, named) for x in (pairs.first, pairs.second)]
    swap = (does[1] & ~does[0]) ^ (jax.random.uniform(jax.random.fold_in(key, 2), (n,)) < 0.2)
    first = jnp.where(swap[:, None], pairs.second, pairs.first)
    return text.Pairs(pairs.prompts, first, jnp.where(swap[:, None], pairs.first, pairs.second))


def regress(task: Replies, params, rows):
    """The head of the judged quality learns the label, turned round for an unwanted one."""
    named, _, prompts, replies, label, weight = rows
    label = jnp.where(named[:, 1] == principles.UNWANTED, 1.0 - label, label)[:, None]
    found = attribute_rewards.scores(task, params["reward"], prompts, replies)
    at = jax.nn.one_hot(named[:, 0], found.shape[1]) > 0
    terms = label_regression_loss(found, jnp.broadcast_to(label, found.shape), at)
    return scalars(terms.loss, weight > 0), {}


def head(task: Replies, params, prompts, responses, *, quality, wanted):
    found = jnp.take(attribute_rewards.scores(task, params["reward"], prompts, responses), quality, axis=1)
    return jnp.where(wanted == principles.UNWANTED, -found, found)


def build(settings: Settings, task: Replies = principles.LANGUAGE) -> experiment.Plan:
    """The arm's judge fitted, then the policy trained on what it says of one principle."""
    start = attribute_rewards.make_start(task, base_steps=settings.base_steps, outputs=principles.WIDTH)
    judged = partial(principles.draw_judgements, keep=settings.keep)
    fit = partial(attribute_rewards.fit_stage, task, steps=settings.fit_steps, table=settings.judgements)
    if settings.judge == "generative":
        stages = [
            principle_critic.warm_stage(task, steps=settings.fit_steps, table=settings.judgements),
            principle_critic.grpo_stage(
                task, settings.verdict, judged, steps=settings.critic_steps, judgements=settings.judgements,
                learning_rate=settings.learning_rate,
            ),
        ]  # fmt: skip
        proxy_of = principle_critic.proxy
    else:
        table, loss, proxy_of = {
            "reader": (judged, principles.judgement_loss, lambda q, w: partial(principles.score, quality=q, wanted=w)),
            "embedding": (
                judged, principles.matched_loss, lambda q, w: partial(principles.matched_score, quality=q, wanted=w),
            ),
            "bt": (draw_ordered, attribute_rewards.preference_loss, lambda q, w: attribute_rewards.first_output),
            "regressor": (judged, regress, lambda q, w: partial(head, quality=q, wanted=w)),
        }[settings.judge]  # fmt: skip
        stages = [fit(table, loss)]
    proxy = proxy_of(NAMED, principles.WANTED)
    stages.append(attribute_rewards.grpo_stage(task, proxy, steps=settings.steps, learning_rate=settings.learning_rate))

    def init(key):
        return start(key) | {
            "reader": task.reading.policy.init(jax.random.fold_in(key, 8)),
            "generative": task.reading.critic.policy.init(jax.random.fold_in(key, 10)),
        }

    measure = strings.bound(attribute_rewards.measure, task, proxy, (partial(principles.ranking, proxy_of=proxy_of),))
    return experiment.Plan(init, tuple(stages), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Principles rank better than Bradley-Terry, also unseen ones and against length, and steer the policy."""
    ranks = ("rank/known", "rank/longer_is_worse", "rank/held_out", "eval/polite")
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, metric, "rlbff", "bt") for metric in ranks),
        experiment.greater(results, "rank/known", "rlbff", "no_consensus"),
        experiment.greater(results, "rank/known", "generative", "bt"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
