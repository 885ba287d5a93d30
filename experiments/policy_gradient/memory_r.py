"""Rewards for resembling remembered successes and avoiding remembered failures (Memory-R+).

Paper:     Le et al., "Reasoning Under 1 Billion: Memory-Augmented Reinforcement Learning for Large Language Models",
           arXiv:2504.02273.
Claim:     with tiny models most groups earn nothing; intrinsic rewards from an episodic memory of responses, close to
           known successes and far from known failures of the nearest prompts, make GRPO learn faster and do not
           collapse the responses.
Equations: R = r + w minmax(max_b cos(e, b)) over the bank of successes + w minmax(1 - max_b cos(e, b)) over that of
           failures, minmax within the group, banks of the K nearest prompts; GRPO on R. memory_r: successes alone;
           format: 0.1 for any response that ends instead; other_prompt: the banks of another prompt of the batch
           (control). w_01, w_10, w_50: w = 0.01, 0.1, 0.5, where others have 0.03. last_100: minmax by the last 100
           values (fading: times 0.99 with every response); dr_grpo, undivided: A = R - mean, without and with memories,
           since the deviation of GRPO divides w out of every group that earns nothing.
           e: hashed pairs of tokens; states: the mean of the base model's hidden states;
           --encoder-model DIR: of another model of its vocabulary, such as a sentence encoder made from it.
Left out:  K, both weights and the sizes of the memory are not the paper's (its code asks 1 of 10,000 prompts with 100
           responses each, and adds both terms with weight 1 to five rewards for form and answer).
Expect:    eval/accuracy: memory_r_plus > grpo, undivided > dr_grpo; eval/tokens: memory_r_plus > grpo - 3.
Measure:   held-out Countdown with four numbers, where the start solves 6 %; w is the middle of the sweep (of its
           logarithms, up to 0.1), not tuned; 8 seeds, equal rollouts and updates. Random legal steps are right for
           0.05, ceiling 1.
Run:       python -m experiments.policy_gradient.memory_r
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.policy_gradient.parts import episodic_memory
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import declared


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values where it gives them; see EMBEDDED for the small model."""

    steps: int = 300
    resemble: float = 0.03  # weight of the closeness to successes
    avoid: float = 0.03  # weight of the distance from failures
    scaled: Callable[..., episodic_memory.Scaled] = episodic_memory.by_group  # both of them, to [0, 1]
    advantages: Callable[..., Array] = group.group_normalized_advantages
    ended: float = 0.0  # reward of any response that ends by itself
    neighbours: int = 3  # remembered prompts that are asked
    queries: int = 512  # prompts in memory
    responses: int = 16  # to each
    encoder_model: str = ""  # base: --model; a folder or bundled model of its vocabulary; empty: hashed pairs of tokens
    width: int = 64  # of an embedding of pairs
    shift: int = 0  # groups between a prompt and the one whose memories it gets


EMBEDDED = {
    "data": "countdown", "levels": (4,), "steps": 160, "eval_every": 16, "prompts_per_step": 8, "max_new_tokens": 27,
    "learning_rate": 2e-4, "eval_problems": 192, "train_problems": 512, "queries": 96, "responses": 8,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4, "queries": 4, "responses": 2,
}  # fmt: skip
ARMS = {
    "grpo": {"resemble": 0.0, "avoid": 0.0},
    "memory_r_plus": {},
    "memory_r": {"avoid": 0.0},
    "format": {"resemble": 0.0, "avoid": 0.0, "ended": 0.1},
    "other_prompt": {"shift": 1},
    "states": {"encoder_model": "base"},
    "w_01": {"resemble": 0.01, "avoid": 0.01},
    "w_10": {"resemble": 0.1, "avoid": 0.1},
    "w_50": {"resemble": 0.5, "avoid": 0.5},
    "last_100": {"scaled": episodic_memory.by_last_values},
    "fading": {"scaled": partial(episodic_memory.by_last_values, fade=0.99)},
    "dr_grpo": {"resemble": 0.0, "avoid": 0.0, "advantages": group.dr_grpo_advantages},
    "undivided": {"advantages": group.dr_grpo_advantages},
}
METHOD = "memory_r_plus"
BED = experiment.Bed(chance=0.05)
METRICS = ("eval/accuracy", "eval/pass@4", "group/degenerate_fraction", "policy/entropy", "eval/tokens")
CURVES = (*METRICS, "reward/mean", "memory/reward", "grad/norm")


class Memories(NamedTuple):
    """Extras of a state."""

    successes: Any
    failures: Any
    histories: Any  # of both terms


class Embedded(NamedTuple):
    """Extras of a batch: what its rows are found by, and what the memories paid them."""

    queries: Array
    responses: Array
    bonus: Array
    terms: episodic_memory.Nearness


def build(settings: Settings) -> experiment.Plan:
    """One online stage of GRPO; both memories live in the state's extras and are written after they were read."""
    bench = recipes.bench(settings)
    policy, size = bench.model.policy, settings.group_size
    advantages = builders.per_response(settings.advantages)
    plain = builders.make_estimate(policy, advantages, temperature=settings.temperature)
    longest = bench.train.tokens.shape[1] + settings.max_new_tokens
    encode, width = episodic_memory.make_encoder(
        settings.encoder_model, bench.model, width=settings.width, tokens=longest
    )

    def paid(terms, histories, rows):
        weights = {"resemble": settings.resemble, "avoid": settings.avoid}
        return episodic_memory.paid(terms, histories, rows.group_ids, scaled=settings.scaled, **weights)

    def estimate(params, extras, rows, rewards):
        prompt = (rows.segment_ids > 0) & ~rows.mask
        queries, responses = encode(rows.tokens, prompt), encode(rows.tokens, rows.mask)
        *memories, histories = declared(Memories, extras)
        asked = jnp.roll(queries, settings.shift * size, axis=0)
        terms = episodic_memory.nearness(*memories, asked, responses, neighbours=settings.neighbours)
        bonus, _ = paid(terms, histories, rows)
        bonus = bonus + settings.ended * (~rows.truncated).astype(jnp.float32)
        batch = plain(params, extras, rows, rewards._replace(value=rewards.value + bonus))
        return batch._replace(extras=Embedded(queries, responses, bonus, terms)._asdict())

    def remember(state, batch, rows, rewards):
        found = declared(Embedded, batch.extras)
        right, entries = rewards.value > 0.5, (found.queries, found.responses)
        successes, failures, histories = declared(Memories, state.extras)
        successes = episodic_memory.remembered(successes, *entries, right & rewards.valid)
        failures = episodic_memory.remembered(failures, *entries, ~right & rewards.valid)
        return state.extras | Memories(successes, failures, paid(found.terms, histories, rows)[1])._asdict()

    def extras(params, key):
        sizes, histories = (settings.queries, settings.responses, width), [episodic_memory.first_history()] * 2
        return Memories(*(episodic_memory.empty_memory(*sizes) for _ in range(2)), tuple(histories))._asdict()

    def bonus(logp, entropy, batch):
        return {"memory/reward": jnp.broadcast_to(declared(Embedded, batch.extras).bonus[:, None], logp.shape)}

    loss = builders.make_policy_loss(policy, clipped_policy_loss, temperature=settings.temperature, diagnostics=bonus)
    tx = optax.adam(settings.learning_rate)
    online = recipes.make_online(settings, bench, estimate=estimate, loss=loss, tx=tx, remember=remember)
    return recipes.one_stage(settings, bench, online, extras=extras)


def claim(results: experiment.Results) -> experiment.Claim:
    """With both memories the policy becomes more accurate than with GRPO alone, without shorter responses."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "memory_r_plus", "grpo"),
        experiment.greater(results, "eval/accuracy", "undivided", "dr_grpo"),
        experiment.greater(results, "eval/tokens", "memory_r_plus", "grpo", by=-3.0),
    )


if __name__ == "__main__":
    experiment.main(__name__)
