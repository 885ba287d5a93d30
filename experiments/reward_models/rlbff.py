"""Yes or no on a named principle as the reward (binary flexible feedback).

Paper:     Wang et al., "RLBFF: Binary Flexible Feedback to bridge between Human Feedback & Verifiable Rewards",
           arXiv:2509.21319.
Claim:     a reward model that judges whether a reply satisfies a principle ranks replies better than a Bradley-Terry
           model of the same data, follows principles that it was never trained on, and trains a policy towards the
           principle that the user names.
Equations: s = logit(yes) - logit(no) behind (principle in words, prompt, reply), loss -[l log sigma(s) + (1 - l) log
           sigma(-s)], only labels on which three annotators agree: min cosine of the phrases they name >= 0.8, equal
           verdicts, none "partly", the span written; as many yes as no. generative: a report, then yes or no, GRPO on
           the match with the label, after it imitated reports that say the label; shaded: on -|l - P(yes)|; s behind a
           report of its own. no_consensus: all labels of the first annotator. bt: one head fitted to pairs ordered by
           worth, an annotator erring in a fifth as theirs do. regressor: a head for each quality (an unwanted one is
           its negative). embedding: h . e(phrase). GRPO on s.
Left out:  the extractor of principles as a language model (its errors are drawn), and annotators' prose.
Expect:    rank/worth_longer_is_worse, rank/worth, rank/longer_is_worse (all six qualities) and eval/polite, the named
           principle, rlbff > bt; rank/held_out of rlbff above 0.5; rank/known rlbff > no_consensus; rank/worth
           generative > bt.
Measure:   rankings of fresh pairs, and of those whose worse reply is the longer one, by worth, which bt is fitted to,
           and under ten known and two held-out principles, which bt does not hear: it has one score, so that its
           rank/known is at most 0.60 and its rank/held_out falls with what it knows, and neither is compared with it.
           True qualities of the trained policy; equal labels (before the filter; bt: one annotator's, the others
           three's), updates and rollouts of the policy. The bed is invalid where rank/known of rlbff, which then has
           not learned to read, is below 0.6. In a run that was not kept a decoder that reads principles as words gets
           to 0.66, and still rises at the last of 800 updates, where heads and embeddings of their own are at 0.86 and
           0.84 after half as many: contradicted says that reading costs more labels than worth alone, here, and not
           that it never pays.
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
from jaxrl_llm.errors import UserError
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
    fit_steps: int = 800
    fit_rows: int = 128  # judgements a step, of which a fifth is agreed on
    fit_rate: float = 1e-3  # of all judges; at 3e-3 the reader learns nothing, whatever its labels
    judgements: int = 32768  # with 4,096 a reader gets 0.62 of new ones right, with these 0.82
    judge: str = "reader"  # reader, generative, embedding, bt, regressor
    keep: Callable[..., Array] = principles.agreed  # which judgements are fitted
    verdict: Callable[..., Array] = principle_critic.matches  # what the generative judge is paid for
    critic_steps: int = 150  # of its GRPO, among the fit_steps


SMOKE = {
    "steps": 2, "eval_every": 2, "base_steps": 2, "fit_steps": 2, "fit_rows": 64, "judgements": 256, "critic_steps": 1,
}  # fmt: skip
ARMS = {
    "bt": {"judge": "bt"},
    "rlbff": {},
    "no_consensus": {"keep": principles.anyhow},
    "regressor": {"judge": "regressor"},
    "embedding": {"judge": "embedding"},
    "generative": {"judge": "generative"},
    "shaded": {"judge": "generative", "verdict": principle_critic.shaded},
}
METRICS = (
    "rank/worth_longer_is_worse", "rank/worth", "rank/longer_is_worse", "rank/known", "rank/held_out", "eval/polite",
    "eval/utility",
)  # fmt: skip
CURVES = (
    "rank/worth_longer_is_worse",
    "rank/worth",
    "rank/known",
    "rank/held_out",
    "eval/polite",
    "eval/utility",
    "kl/ref",
)

# judges are compared by how they rank; what a policy makes of a score that hears no principle is no part of it
BED = experiment.Bed(
    metric="rank/worth", baseline="bt", chance=0.5, judges=(("rlbff", "rank/known", 0.6),),
)  # fmt: skip


def draw_ordered(task: Replies, key, n):
    """Two replies of which the first one is worth more, by an annotator who errs in a fifth."""
    pairs = task.draw_pairs(jax.random.fold_in(key, 0), n, sharpness=0.0)
    worth = [task.utility(pairs.prompts, x) for x in (pairs.first, pairs.second)]
    swap = ((worth[1] > worth[0]) ^ (jax.random.uniform(jax.random.fold_in(key, 1), (n,)) < 0.2))[:, None]
    first, second = (jnp.where(swap, *x) for x in ((pairs.second, pairs.first), (pairs.first, pairs.second)))
    return text.Pairs(pairs.prompts, first, second)


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
    how = {"rows_per_step": settings.fit_rows, "learning_rate": settings.fit_rate}
    fit = partial(attribute_rewards.fit_stage, task, steps=settings.fit_steps, table=settings.judgements, **how)
    if settings.judge == "generative":
        if not 0 <= settings.critic_steps <= settings.fit_steps:
            raise UserError(f"critic_steps={settings.critic_steps}: they are among the fit_steps={settings.fit_steps}, "
                            "so that all judges have equally many; take fewer")  # fmt: skip
        half = settings.judgements // 2  # of the labels for each of its two stages: as many as the others have
        stages = [
            principle_critic.warm_stage(
                task, judged, steps=settings.fit_steps - settings.critic_steps, table=half, **how
            ),
            principle_critic.grpo_stage(
                task, settings.verdict, judged, steps=settings.critic_steps, judgements=half,
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
    seldom = max(settings.fit_steps // 16, 1)
    stages = [stage._replace(eval_every=seldom) for stage in stages]
    stages.append(attribute_rewards.grpo_stage(task, proxy, steps=settings.steps, learning_rate=settings.learning_rate))

    def init(key):
        return start(key) | {
            "reader": task.reading.policy.init(jax.random.fold_in(key, 8)),
            "generative": task.reading.critic.policy.init(jax.random.fold_in(key, 10)),
        }

    ranks = tuple(partial(rank, proxy_of=proxy_of) for rank in (principles.ranking, principles.worth_ranking))
    measure = strings.bound(attribute_rewards.measure, task, proxy, ranks)
    return experiment.Plan(init, tuple(stages), measure)


def claim(results: experiment.Results) -> experiment.Claim:
    """Asked for worth it ranks better than Bradley-Terry where the worse is longer; it hears principles, also new."""
    ranks = ("rank/worth_longer_is_worse", "rank/worth", "rank/longer_is_worse", "eval/polite")
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        *(experiment.greater(results, metric, "rlbff", "bt") for metric in ranks),
        experiment.above(results, "rank/held_out", "rlbff", 0.5),
        experiment.greater(results, "rank/known", "rlbff", "no_consensus"),
        experiment.greater(results, "rank/worth", "generative", "bt"),
    )


if __name__ == "__main__":
    experiment.main(__name__)
