"""Parts of experiments on stated confidence: a small model that answers sums and facts, rewards, measurements."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.parts import confidence_task as toy
from experiments.parts import strings
from experiments.parts.read_confidence import read_confidence, verdict_chances
from jaxrl_llm import reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.metrics import calibration
from jaxrl_llm.run import parts
from jaxrl_llm.types import Key, Metrics, Params, Rewards, Trajectories

WORLD = strings.make_world(toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=64, heads=4)
TEMPERATURE = 0.6
KINDS = {
    "sums": toy.draw_sums, "facts": partial(toy.draw_facts, weights=toy.EVERY), "hidden": toy.draw_unanswerable,
}  # fmt: skip


def make_base(*, steps: int) -> Callable[[Key], Params]:
    """The ``init`` of a plan: trained on right and wrong answers with confidences that say little."""
    return strings.make_base(WORLD, toy.draw_behaviour, steps=steps, table=8192, learning_rate=5e-3)


def make_reward(value: Callable[[Array, Array], Array]) -> Callable[[Any, Trajectories], Rewards]:
    """The ``score`` of an online method: ``value(right, confidence)`` of what is readable, else 0."""

    def score(answers, trajectories):
        prompts, responses = strings.responses_of(WORLD, trajectories)
        said = toy.read(responses)
        right = (said.readable & (said.answer == toy.truth(prompts))).astype(jnp.float32)
        worth = jnp.where(said.readable, value(right, said.confidence), 0.0)
        return Rewards(worth, jnp.ones(worth.shape, bool))

    return score


def majority(answers: Array, readable: Array) -> tuple[Array, Array]:
    """``(answer, share)`` of the most frequent readable answer in each row ``[N, G]``, the first of equals.

    >>> answer, share = majority(jnp.array([[3, 5, 5, 2]]), jnp.array([[True, True, True, False]]))
    >>> int(answer[0]), float(share[0])
    (5, 0.5)
    """
    same = (answers[:, :, None] == answers[:, None, :]) & readable[:, :, None] & readable[:, None, :]
    votes = jnp.sum(same.astype(jnp.float32), axis=2)
    best = jnp.argmax(votes, axis=1)[:, None]
    picked = jnp.take_along_axis(answers, best, axis=1)[:, 0]
    return picked, jnp.take_along_axis(votes, best, axis=1)[:, 0] / answers.shape[1]


def verdict_chance(params: Params, prompts: Array, answers: Array) -> Float[Array, " N"]:
    """P(True): the share of ``YES`` in the two verdict tokens when each answer is proposed to its question.

    From "Language Models (Mostly) Know What They Know", arXiv:2207.05221, section 3.
    """
    asked = toy.propose(prompts, answers)
    rows = strings.whole(WORLD, asked, asked[:, :0])
    hidden = WORLD.policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    logits = WORLD.policy.unembed(params, hidden[:, -1]).astype(jnp.float32)
    return jax.nn.sigmoid(logits[:, toy.YES] - logits[:, toy.NO])


CHOSEN = ("ece", "adaptive_ece", "brier", "auroc", "overconfidence", "nce", "readable")


def _figures(stated: Float[Array, "N G"], right: Array, readable: Array, votes: Array, agreed: Array, name: str):
    flat = calibration.summary(stated.reshape(-1), right.reshape(-1), readable.reshape(-1))
    return {f"{name}/{k}": flat[k] for k in CHOSEN} | {
        f"{name}/accuracy": reduce.scalars(right.reshape(-1).astype(jnp.float32)),
        f"{name}/vote_ece": calibration.expected_error(calibration.reliability(votes, agreed)),
    }


def measure(params: Params, key: Key, *, questions: int = 512, samples: int = 4) -> Metrics:
    """Stated confidence, agreement and P(True) of ``samples`` answers, on fresh sums and on all facts, taught or not.

    On sums with a hidden digit nothing is right: what is stated there is ``hidden/overconfidence``, and
    ``hidden/told_auroc`` is how well confidences tell such questions from those that have an answer. Training finds the
    worked sums or does not: ``sums/found`` says which.
    """
    found, told = {}, {}
    for k, (name, draw) in enumerate(KINDS.items()):
        prompts = draw(jax.random.fold_in(key, 2 * k), questions)
        drawn = jax.random.fold_in(key, 2 * k + 1)
        said = toy.read(strings.sample(WORLD, params, prompts, drawn, samples=samples, temperature=TEMPERATURE))
        answers, stated, readable = (x.reshape(questions, samples) for x in said)
        wanted = toy.truth(prompts)
        agreed, votes = majority(answers, readable)
        can = toy.answerable(prompts)
        right = readable & (answers == wanted[:, None]) & can[:, None]
        told[name] = (stated.reshape(-1), readable.reshape(-1))
        if name == "hidden":
            gap = calibration.overconfidence(*(x.reshape(-1) for x in (stated, right, readable)))
            sure = (jnp.concatenate([told["sums"][k], told[name][k]]) for k in (0, 1))
            has = jnp.arange(2 * questions * samples) < questions * samples
            both, read = sure
            found |= {"hidden/overconfidence": gap, "hidden/told_auroc": calibration.auroc(both, has, read)}
            continue
        found |= _figures(stated, right, readable, votes, (agreed == wanted) & (votes > 0), name)
        judged = verdict_chance(params, jnp.repeat(prompts, samples, axis=0), answers.reshape(-1))
        ptrue = calibration.summary(judged, right.reshape(-1), readable.reshape(-1))
        found |= {f"{name}/ptrue_{k}": ptrue[k] for k in ("ece", "brier", "auroc")}
    return found | {"sums/found": (found["sums/accuracy"] > 0.5).astype(jnp.float32)}


def make_text_measure(settings: recipes.OnlineSettings) -> Callable[[Params, Key], Metrics]:
    """The measurement of a language model on problems of its own: it states its confidence in words.

    The prompts must ask for it; ``experiments.parts.read_confidence.ASK`` is a wording. P(True) is asked behind every
    response, whatever the prompts say. For a plan ``on_host``.
    """
    found, samples = recipes.bench(settings), settings.eval_samples
    rollout = jax.jit(
        recipes.rollout_of_model(
            found.model, group_size=samples, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature
        )
    )

    def measured(params, key):
        pieces = []
        for rows, real in recipes.sample_in_parts(rollout, params, found.heldout, key, samples):
            rewards = found.heldout_score(rows)
            said = [read_confidence(text) for text in parts.responses(found.model.tokenizer, rows)]
            readable = np.array([c is not None for c in said])
            stated = np.array([0.0 if c is None else c for c in said], np.float32)
            chances = verdict_chances(found.model, params, rows)
            pieces.append([np.asarray(x)[:real] for x in (rewards.value, rewards.valid, readable, stated, chances)])
        value, valid, readable, stated, chances = (jnp.asarray(np.concatenate(x)) for x in zip(*pieces, strict=True))
        right = valid & (value > 0.5)
        figures = calibration.summary(stated, right, readable & valid)
        asked = calibration.summary(chances, right, valid)
        return (
            {f"text/{k}": v for k, v in figures.items()}
            | {f"text/ptrue_{k}": asked[k] for k in ("ece", "brier", "auroc")}
            | {"text/accuracy": reduce.scalars(value, valid)}
        )

    return measured
