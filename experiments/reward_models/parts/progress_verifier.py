"""A process verifier that predicts how likely a prover is to finish a partial solution, and rewards for progress.

The prover is the base model. Its chance of success at a prefix is measured by completions, learnt by a head on its own
hidden states, and read off by that head while a policy trains.
"""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from experiments.reward_models.parts import step_labels
from jaxrl_llm.advantages import process
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.types import Trajectories
from jaxrl_llm.verifiers import steps as reader


class Verifier(NamedTuple):
    """The head on the base model's hidden states; ``loss`` is what is left of its error on the prefixes it learnt."""

    weight: Float[Array, " D"]
    bias: Float[Array, ""]
    loss: Float[Array, ""]


def soft_label_loss(logits: Float[Array, " N"], rates: Float[Array, " N"], weight: Float[Array, " N"]):
    """Mean binary cross-entropy against measured rates.

    From "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning", arXiv:2410.08146, section 4.
    """
    terms = -rates * jax.nn.log_sigmoid(logits) - (1 - rates) * jax.nn.log_sigmoid(-logits)
    return jnp.sum(weight * terms) / jnp.maximum(jnp.sum(weight), 1.0)


def prefix_prompts(rows: Trajectories, keep: Bool[Array, "B T"], *, pad_id: int) -> tuple[Array, Array, Array]:
    """Prompt and kept response tokens of each row as a prompt: ``(tokens, valid, which of them are response)``."""
    real = (rows.segment_ids > 0) & (~rows.mask | keep)
    tokens, valid = given_responses.left_padded(rows.tokens, real, pad_id=pad_id)
    response, _ = given_responses.left_padded((rows.mask & keep).astype(jnp.int32), real)
    return tokens, valid, response > 0


def measured_success(
    found: Bench, settings: OnlineSettings, rows: Trajectories, keep: Bool[Array, "B T"], *, completions: int
) -> Float[Array, " B"]:
    """How often the base model finishes each kept prefix with the right answer."""
    tokens, valid, response = prefix_prompts(rows, keep, pad_id=found.model.tokenizer.pad_id)
    roll = recipes.rollout_of(settings, found, group_size=completions)
    ids = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    finished = roll(found.model.params, tokens, valid, sample_keys(jax.random.key(4), 0, ids, completions), ids)
    # the verifier reads prefix and completion
    read = jnp.pad(jnp.repeat(response, completions, axis=0), ((0, 0), (0, settings.max_new_tokens)))
    own = jax.tree.map(lambda x: x[jnp.repeat(rows.problem_ids, completions)], found.train.answers)
    right = curricula.device_score(found)(own, finished._replace(mask=finished.mask | read)).value > 0.5
    return jnp.sum(right.reshape(-1, completions).astype(jnp.float32), axis=1) / completions


def train_verifier(settings: OnlineSettings, *, prompts: int, completions: int, most: int) -> Verifier:
    """Completions of the prefixes of two responses to each of some training prompts, then the head; computed once.

    Args:
      most: steps of a response whose ends are prefixes; the prompt alone is one, too.
    """
    return _train(recipes.bench_identity(settings), settings.temperature, prompts, completions, most)


@lru_cache(maxsize=4)
def _train(identity: tuple, temperature: float, prompts: int, completions: int, most: int) -> Verifier:
    settings = OnlineSettings(**dict(identity), temperature=temperature)
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    roll = recipes.rollout_of(settings, found, group_size=2, temperature=temperature)

    @jax.jit
    def examples(key):
        ids = jnp.arange(prompts, dtype=jnp.int32)
        tokens, valid = found.train.tokens[ids], found.train.valid[ids]
        rows = roll(found.model.params, tokens, valid, sample_keys(key, 0, ids, 2), ids)
        steps, _ = step_labels.label(stepped, rows)
        hidden = step_labels.final_hidden(found.model.policy, found.model.params, rows)
        features, rates, weights = [], [], []
        for k in range(most + 1):  # k steps are kept
            keep = rows.mask & steps.inside & (steps.ids < k)
            there = steps.count >= k
            at = jnp.where(k == 0, tokens.shape[1] - 1, jnp.argmax(steps.ends & (steps.ids == k - 1), axis=1))
            features.append(jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0])
            rates.append(measured_success(found, settings, rows, keep, completions=completions))
            weights.append(there.astype(jnp.float32))
        return jnp.concatenate(features), jnp.concatenate(rates), jnp.concatenate(weights)

    features, rates, weights = examples(jax.random.key(2))
    tx, head = optax.adam(0.03), (jnp.zeros(features.shape[1:], jnp.float32), jnp.zeros((), jnp.float32))

    def loss(head):
        return soft_label_loss(features @ head[0] + head[1], rates, weights)

    def step(carry, _):
        head, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optimisers mix weak integers and floats
            updates, state = tx.update(jax.grad(loss)(head), state)
        return (jax.tree.map(jnp.add, head, updates), state), None

    (head, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, None, 300))((head, tx.init(head)))
    return Verifier(*head, loss(head))


def step_success(
    found: Bench, verifier: Verifier, rows: Trajectories, steps: reader.Steps, *, most: int
) -> tuple[Float[Array, "B K"], Float[Array, " B"], Bool[Array, "B K"]]:
    """The prover's predicted chance of success after each step, at the prompt, and which steps there are."""
    hidden = step_labels.final_hidden(found.model.policy, found.model.params, rows)
    chance = jax.nn.sigmoid(hidden @ verifier.weight + verifier.bias)
    after, valid = reader.per_step(chance, steps, most=most)
    return after, chance[:, found.train.tokens.shape[1] - 1], valid


def no_process(after: Array, before: Array, valid: Array) -> Array:
    """The outcome alone."""
    return jnp.zeros_like(after)


def success_itself(after: Array, before: Array, valid: Array) -> Array:
    """The chance of success after each step as its reward: it pays to write more steps."""
    return process.plain_steps(after, valid)


def make_progress(samples: int):
    """Progress under the best of ``samples`` completions of the prover."""

    def of_steps(after: Array, before: Array, valid: Array) -> Array:
        start = process.best_of(before[:, None], samples)[:, 0]
        return process.progress(process.best_of(after, samples), start, valid)

    return of_steps
