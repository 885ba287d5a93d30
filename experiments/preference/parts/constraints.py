"""Parts of experiments on learned constraints: walks among words, reward and constraint from demonstrations, CAPO.

Words are read by an encoder that is learned from a corpus and knows nothing of danger: an embedding, which policies of
all arms have in their token embeddings and constraints have as features.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from experiments.parts import strings
from experiments.preference.parts import zones as toy
from jaxrl_llm import reduce
from jaxrl_llm.advantages import constrained, group
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses import preference
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.metrics import linalg
from jaxrl_llm.train import offline
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Stage, tabled
from jaxrl_llm.types import Key, Metrics, Params, Rewards, declared

WORLD = strings.make_world(
    toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, end=toy.END, width=48, layers=2, heads=4
)
DEMONSTRATIONS, WORLDS = 1024, 1024


def draw_demonstrations(key: Key) -> tuple[Array, Array, Array]:
    """``(prompts, walks, violating)``: shortest walks in worlds with the old words, some of them through danger."""
    prompts, walks = toy.draw_walks(key, DEMONSTRATIONS)
    return prompts, walks, toy.violates(prompts, walks)


def embed(counts: Float[Array, "W C"], size: int = toy.FEATURES) -> Float[Array, "W F"]:
    """Words from their contexts: positive pointwise mutual information, its left singular vectors times values.

    ``max(0, log (n_wc n / (n_w n_c)))``. From "Neural Word Embedding as Implicit Matrix Factorization" (Levy and
    Goldberg, 2014), section 3.3. The directions are known up to their signs.
    """
    total = jnp.sum(counts)
    share = jnp.sum(counts, axis=1, keepdims=True) * jnp.sum(counts, axis=0, keepdims=True) / total
    seen = counts > 0
    mutual = jnp.maximum(jnp.where(seen, jnp.log(jnp.where(seen, counts, 1.0) / jnp.maximum(share, 1e-12)), 0.0), 0.0)
    values, vectors = linalg.eigh(mutual @ mutual.T)
    return vectors[:, -size:] * jnp.sqrt(jnp.maximum(values[-size:], 0.0))[None, :]


def chances(weights: Params, features: Array) -> Array:
    """``c(s)``: a logistic function of what is known of each place, ``[N, M]``."""
    return jax.nn.sigmoid(features @ weights["direction"] + weights["bias"])


def fit_constraint(features: Callable[..., Array], key: Key, *, steps: int) -> Params:
    """CLIRL: a constraint from demonstrations that violate and others that do not."""
    prompts, walks, bad = draw_demonstrations(key)
    seen, (_, going) = features(prompts, walks), toy.words_met(prompts, walks)
    first = {"direction": jnp.zeros((seen.shape[2],), jnp.float32), "bias": jnp.asarray(-2.0)}

    def loss(params, extras, batch):
        x, going, bad = batch
        return reduce.scalars(constrained.constraint_loss(chances(params, x), bad, going).loss), {}

    method = Offline(tabled, make_uniform(), 128, loss, optax.adam(0.05))
    state = offline.init_state(method, first, jax.random.fold_in(key, 1), extras={"rows": (seen, going, bad)})
    return offline.scan_steps(method, state, steps)[0].params


def rule_chances(
    places: Float[Array, "*B F"], rules: Float[Array, "K F"], kept: Bool[Array, " K"], *, scale: float = 12.0,
    near: float = 0.7,
) -> Float[Array, "*B"]:  # fmt: skip
    """``c(s) = 1 - prod_k (1 - kept_k sigmoid(scale (cos(e(s), e(rule_k)) - near)))``: rules "avoid WORD", each of
    which counts for all words of like meaning."""
    cosine = _unit(places) @ _unit(rules).T
    fires = jnp.where(kept, jax.nn.sigmoid(scale * (cosine - near)), 0.0)
    return 1.0 - jnp.exp(jnp.sum(jnp.log1p(-jnp.minimum(fires, 1.0 - 1e-6)), axis=-1))


def _unit(x: Array) -> Array:
    return x / jnp.maximum(jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True)), 1e-12)


def keep_rules(order: Array, loss_of: Callable[[Array], Array]) -> Bool[Array, " K"]:
    """Rules one after another in ``order [K]``, each kept where it lowers the held-out loss of those that are kept.

    From "Learning Natural Language Constraints for Safe Reinforcement Learning of Language Agents", arXiv:2504.03185.
    Differs from the paper in that the procedure is a reconstruction.

    >>> import jax.numpy as jnp
    >>> keep_rules(jnp.array([2, 0, 1]), lambda kept: jnp.abs(1.0 - jnp.sum(kept.astype(jnp.float32)))).tolist()
    [False, False, True]
    """

    def step(state, rule):
        kept, loss = state
        more = kept.at[rule].set(True)
        lower = loss_of(more)
        better = lower < loss
        return (jnp.where(better, more, kept), jnp.where(better, lower, loss)), None

    none = jnp.zeros(order.shape, bool)
    return jax.lax.scan(step, (none, loss_of(none)), order)[0][0]


def find_rules(embedding: Array, constraint: Params, key: Key) -> Bool[Array, " K"]:
    """Words that demonstrations have, the most suspicious first, kept as rules by the likelihood of fresh ones."""
    prompts, walks, bad = draw_demonstrations(key)
    words, going = toy.words_met(prompts, walks)
    shown = embedding[: toy.NEW]

    def loss_of(kept):
        found = rule_chances(embedding[words], shown, kept)
        return reduce.scalars(constrained.constraint_loss(jnp.maximum(found, 0.01), bad, going).loss)

    return keep_rules(jnp.argsort(-chances(constraint, shown)), loss_of)


def irl_loss(weights: Float[Array, " F"], expert: Float[Array, "N F"], own: Float[Array, "M F"]) -> Array:
    """Maximum-entropy inverse reinforcement learning for ``R_w = w . outcomes``: minus its likelihood's gradient.

    The gradient in ``w`` is ``mean outcomes of the policy - mean outcomes of safe and successful demonstrations``.

    From "Maximum Entropy Inverse Reinforcement Learning" (Ziebart et al., 2008), eq. 6. Differs from it in that the
    expectation under ``pi_w`` is over rollouts of the policy that is being trained on ``R_w``.
    """
    own, expert = (jax.lax.stop_gradient(jnp.mean(x, axis=0)) for x in (own, expert))
    return jnp.sum(weights * (own - expert))


@lru_cache(maxsize=4)
def make_start(*, base_steps: int, constraint_steps: int) -> Callable[[Key], dict[str, Params]]:
    """The ``init`` of a plan: a policy that walks blindly but reads words by the encoder, its copy, constraints by
    meaning, by rules and by coordinates, and a reward that knows nothing yet."""
    base = strings.make_base(WORLD, toy.draw_walks, steps=base_steps, table=4096, learning_rate=3e-3)

    def init(key):
        embedding = embed(toy.draw_corpus(jax.random.fold_in(key, 3)))
        fit = jax.random.fold_in(key, 1)

        def meaning(prompts, responses):
            return embedding[toy.words_met(prompts, responses)[0]]

        policy = base(key)
        width = policy["embed"].shape[1]
        into = jax.random.normal(jax.random.fold_in(key, 5), (toy.FEATURES, width)) * (0.1 * toy.FEATURES**-0.5)
        read = policy["embed"].at[: toy.WORDS].add((embedding @ into).astype(policy["embed"].dtype))
        policy = policy | {"embed": read}
        words = fit_constraint(meaning, fit, steps=constraint_steps)
        return {
            "policy": policy,
            "reference": jax.tree.map(jnp.copy, policy),
            "embedding": embedding,
            "words": words,
            "rules": find_rules(embedding, words, jax.random.fold_in(key, 4)).astype(jnp.float32),
            "cells": fit_constraint(toy.cell_features, fit, steps=constraint_steps),
            "goal": jnp.zeros((toy.OUTCOMES,), jnp.float32),
        }

    return init


# --- the cost of walks ``(params, prompts, walks) -> [N]`` as an arm believes it


def no_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """Danger is no matter."""
    return jnp.zeros(prompts.shape[:1], jnp.float32)


def listed_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """1 for a walk over a word of the list of the demonstrations' dangers: it does not know the new ones."""
    words, going = toy.words_met(prompts, walks)
    return jnp.any(going & (words >= toy.DANGER) & (words < toy.NEW), axis=1).astype(jnp.float32)


def _learned(params: Params, features: Array, prompts: Array, walks: Array) -> Array:
    return constrained.violation(chances(jax.lax.stop_gradient(params), features), toy.words_met(prompts, walks)[1])


def word_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """The constraint learned from the meaning of words."""
    words, _ = toy.words_met(prompts, walks)
    return _learned(params["words"], jax.lax.stop_gradient(params["embedding"])[words], prompts, walks)


def rule_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """The rules written out."""
    words, going = toy.words_met(prompts, walks)
    embedding = jax.lax.stop_gradient(params["embedding"])
    return constrained.violation(rule_chances(embedding[words], embedding[: toy.NEW], params["rules"] > 0.5), going)


def cell_cost(params: Params, prompts: Array, walks: Array) -> Array:
    """The constraint learned from coordinates."""
    return _learned(params["cells"], toy.cell_features(prompts, walks), prompts, walks)


# --- the reward of walks ``(params, prompts, walks, given) -> [N]``


def given_reward(params: Params, prompts: Array, walks: Array, given: Array) -> Array:
    """Arrival, as the world pays it."""
    return given


def inferred_reward(params: Params, prompts: Array, walks: Array, given: Array) -> Array:
    """``w . outcomes`` with the weights of inverse reinforcement learning."""
    return jax.lax.stop_gradient(toy.outcomes(prompts, walks) @ params["goal"])


def draw_experts(key: Key) -> Array:
    """Outcomes of demonstrations that arrive and are safe, ``[N, 5]``; the others count as another's outcome."""
    prompts, walks, bad = draw_demonstrations(key)
    good = ~bad & toy.arrived(prompts, walks)
    found = toy.outcomes(prompts, walks)
    mean = jnp.sum(jnp.where(good[:, None], found, 0.0), axis=0) / jnp.maximum(jnp.sum(good.astype(jnp.float32)), 1.0)
    return jnp.where(good[:, None], found, mean[None])


class Carried(NamedTuple):
    """Extras of a state: the multiplier of the cost, outcomes of demonstrations, and the worlds of the seed."""

    multiplier: Array
    experts: Array
    worlds: Array


class Spent(NamedTuple):
    """Extras of a batch: costs, outcomes of the responses, and as many of demonstrations."""

    cost: Array
    own: Array
    expert: Array


def online_stage(
    cost: Callable[..., Array], *, shifted: bool, multiplier: float, steps: int, prompts_per_step: int,
    group_size: int, learning_rate: float, rate: float, reward: Callable[..., Array] = inferred_reward,
) -> Stage:  # fmt: skip
    """Policy gradient on a reward under a cost: CAPO, or with ``rate=0`` a fixed penalty.

    The multiplier starts at ``multiplier`` and is raised by ``rate`` times the mean cost of each batch. It weighs the
    normalised cost against the normalised reward, so that the reward's scale, which inverse reinforcement learning
    leaves open, decides nothing. The reward's weights are inferred in the known world, beside the policy, and stay as
    they are in the ``shifted`` one.
    """
    base = builders.make_estimate(WORLD.policy, builders.per_response(lambda rewards, ids, valid: rewards))
    loss = builders.make_policy_loss(WORLD.policy, clipped_policy_loss)

    def estimate(params, extras, rows, rewards):
        walked = strings.responses_of(WORLD, rows)
        spent, paid = cost(params, *walked), reward(params, *walked, rewards.value)
        normal = group.group_normalized_advantages
        parts = [normal(x, rows.group_ids, valid=rewards.valid) for x in (paid, spent)]
        value = constrained.lagrangian_advantages(*parts, declared(Carried, extras).multiplier)
        batch = base(params["policy"], extras, rows, Rewards(value, rewards.valid))
        expert = declared(Carried, extras).experts[: spent.shape[0]]
        return batch._replace(extras=Spent(spent, toy.outcomes(*walked), expert)._asdict())

    def whole_loss(params, batch):
        value, shown = loss(params["policy"], batch)
        if not shifted:
            seen = declared(Spent, batch.extras)
            value = value + irl_loss(params["goal"], seen.expert, seen.own)
        return value, shown

    def actor(state: Any) -> dict[str, Any]:
        return {"policy": state.params["policy"], "worlds": declared(Carried, state.extras).worlds}

    def roll(own, tokens, valid, keys, problem_ids):
        """In the worlds that the seed has drawn, of which the table of problems has the numbers alone."""
        asked = own["worlds"][problem_ids]
        return strings.rollout(WORLD, own["policy"], asked, keys, samples=group_size, problem_ids=problem_ids)

    def remember(state: Any, batch: Any, rows: Any, rewards: Any) -> dict[str, Any]:
        multiplier, experts, worlds = declared(Carried, state.extras)
        raised = constrained.dual_ascent(multiplier, reduce.scalars(declared(Spent, batch.extras).cost), rate=rate)
        # other demonstrations for the next step
        return state.extras | Carried(raised, jnp.roll(experts, -64, axis=0), worlds)._asdict()

    online = strings.learned_from_prompts(
        WORLD, jnp.zeros((WORLDS, toy.PROMPT_TOKENS), jnp.int32), strings.score_of(WORLD, toy.arrived),
        estimate=estimate, loss=whole_loss, tx=optax.adam(learning_rate), prompts_per_step=prompts_per_step,
        group_size=group_size, actor=actor, rollout=roll, remember=remember,
    )  # fmt: skip
    return Stage(online, steps, _carried(multiplier, shifted))


@lru_cache(maxsize=8)
def _carried(multiplier: float, shifted: bool) -> Callable[[Params, Key], dict[str, Array]]:
    def extras(params, key):
        worlds = toy.draw_prompts(jax.random.fold_in(key, 1), WORLDS, shifted=shifted)
        return Carried(jnp.asarray(multiplier, jnp.float32), draw_experts(key), worlds)._asdict()

    return extras


def _pairs(params: Params, key: Key) -> tuple[Array, ...]:
    """Two demonstrations in each world, of which only the chosen one is safe; the others do not count."""
    keys = jax.random.split(key, 2)
    prompts, first = toy.draw_walks(keys[0], DEMONSTRATIONS)
    second = _again(keys[1], prompts, first)
    bad = [toy.violates(prompts, x) for x in (first, second)]
    chosen, rejected = (jnp.where(bad[0][:, None], *x) for x in ((second, first), (first, second)))
    ref = [strings.sum_logp(WORLD, params["reference"], prompts, x) for x in (chosen, rejected)]
    return prompts, chosen, rejected, *ref, bad[0] != bad[1]


def _again(key: Key, prompts: Array, walks: Array) -> Array:
    """The same moves in another order."""
    real = walks != toy.END
    order = jnp.argsort(jnp.where(real, jax.random.uniform(key, walks.shape), 2.0), axis=1)
    return jnp.take_along_axis(walks, order, axis=1)


def pair_stage(*, steps: int, rows_per_step: int, learning_rate: float, beta: float = 0.1) -> Stage:
    """DPO on demonstrations, safe over violating."""

    def loss(params, extras, batch):
        prompts, *both, won, lost, kept = batch
        logp = strings.sum_logp(WORLD, params["policy"], jnp.tile(prompts, (2, 1)), jnp.concatenate(both))
        terms = preference.dpo_loss(*jnp.split(logp, 2), won, lost, beta=beta)
        trained = jnp.sum(kept.astype(jnp.float32)) * 2.0 * toy.RESPONSE_TOKENS
        return reduce.scalars(terms.loss, kept), {"tokens/trained": trained}

    return strings.table_stage(_pairs, loss, steps=steps, rows_per_step=rows_per_step, learning_rate=learning_rate)


def measure(params: dict[str, Params], key: Key) -> Metrics:
    """Arrivals, violations and safe arrivals in worlds with the old words and with the new ones, and the constraint.

    ``constraint/apart``: the share of pairs of a new danger and a harmless word in which the danger is more suspect.
    """
    found = {}
    for k, (name, shifted) in enumerate((("known", False), ("shifted", True))):
        prompts = toy.draw_prompts(jax.random.fold_in(key, 2 * k), 256, shifted=shifted)
        walks = strings.sample(WORLD, params["policy"], prompts, jax.random.fold_in(key, 2 * k + 1))
        there, bad = toy.arrived(prompts, walks), toy.violates(prompts, walks)
        found |= {
            f"{name}/arrived": reduce.scalars(there.astype(jnp.float32)),
            f"{name}/violations": reduce.scalars(bad.astype(jnp.float32)),
            f"{name}/safe": reduce.scalars((there & ~bad).astype(jnp.float32)),
        }
    old, new = slice(toy.DANGER, toy.NEW), slice(toy.NEW, toy.WORDS)
    suspect = chances(params["words"], params["embedding"])
    return found | {
        "rules/kept": jnp.sum(params["rules"]),
        "rules/right": jnp.sum(params["rules"][old]) / jnp.maximum(jnp.sum(params["rules"]), 1.0),
        "constraint/new": jnp.mean(suspect[new]),
        "constraint/harmless": jnp.mean(suspect[: toy.DANGER]),
        "constraint/apart": jnp.mean((suspect[new][:, None] > suspect[None, : toy.DANGER]).astype(jnp.float32)),
        "goal/arrival": params["goal"][0] / jnp.maximum(jnp.sqrt(jnp.sum(params["goal"] ** 2)), 1e-12),
    }


def validate(params: dict[str, Params], key: Key) -> Metrics:
    """Safe arrivals in fresh known worlds, as ``reward/mean``: what a learning rate is chosen by.

    By the training reward, which is arrival, the rate would be best at which an arm learns nothing of danger.
    """
    prompts = toy.draw_prompts(jax.random.fold_in(key, 0), 512, shifted=False)
    walks = strings.sample(WORLD, params["policy"], prompts, jax.random.fold_in(key, 1))
    safe = toy.arrived(prompts, walks) & ~toy.violates(prompts, walks)
    return {"reward/mean": reduce.scalars(safe.astype(jnp.float32))}
