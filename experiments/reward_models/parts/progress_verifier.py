"""Process verifiers on the base model's hidden states: a prover's chance of success, and whether a step is right.

The prover is the base model, a hotter or a taught one, or another model of its vocabulary. Its chance of success at a
prefix is measured by completions, learnt by a head on the base model's hidden states, and read off by that head while a
policy trains. The right steps of a policy's own samples teach another such head, a process reward model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.parts.beside import load_beside
from experiments.parts.text_problems import with_answer
from experiments.reward_models.parts import step_labels
from experiments.reward_models.parts import steps as reader
from jaxrl_llm.advantages import process
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import offline
from jaxrl_llm.train.methods.builders import in_row_parts
from jaxrl_llm.types import Key, Params, Trajectories

ROLLED_AT_ONCE, READ_AT_ONCE = 512, 64  # rows of one's own that are written, and read, in one piece


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


class Prover(NamedTuple):
    """Who completes prefixes: a model at a temperature, after so many supervised steps on right solutions."""

    temperature: float = 1.0
    taught_steps: int = 0


BASE, WEAK, STRONG = Prover(), Prover(temperature=1.6), Prover(taught_steps=60)


def bench_of_prover(found: Bench, name: str, *, new_tokens: int) -> Bench:
    """The bench with the model ``name`` in the place of the base model, whose tokens it reads and writes.

    Args:
      name: a folder or a bundled model of any shape; empty: the base model.
      new_tokens: of a response. A completion begins behind a whole one at most.

    Raises:
      UserError: as ``load_beside``.
    """
    if not name:
        return found
    tokens = found.train.tokens.shape[1] + 2 * new_tokens
    return found._replace(model=load_beside("--prover-model", name, found.model, tokens=tokens))


def prover_params(found: Bench, settings: OnlineSettings, prover: Prover, key: Key) -> Params:
    """The prover's weights: those of the bench's model, or of one that was taught."""
    params = found.model.params
    if not prover.taught_steps:
        return params
    problems = recipes.solved_problems(settings)
    stage = step_labels.warm_stage(settings, found, problems, steps=prover.taught_steps, most_repeats=0)
    extras = stage.extras(params, key) if stage.extras is not None else {}
    state = offline.init_state(stage.method, params, key, extras=extras)
    return offline.scan_steps(stage.method, state, prover.taught_steps)[0].params


def measured_success(
    found: Bench, settings: OnlineSettings, rows: Trajectories, keep: Bool[Array, "B T"], *, completions: int,
    params: Params | None = None, temperature: float | None = None, key: Key | None = None,
) -> Float[Array, " B"]:  # fmt: skip
    """How often a prover, by default the bench's model, finishes each kept prefix with the right answer."""
    tokens, valid, response = prefix_prompts(rows, keep, pad_id=found.model.tokenizer.pad_id)
    roll = recipes.rollout_of(settings, found, group_size=completions, temperature=temperature)
    ids = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    keys = sample_keys(jax.random.key(4) if key is None else key, 0, ids, completions)
    prover = found.model.params if params is None else params
    finished = rolled(found, partial(roll, prover), (tokens, valid, keys, ids), samples=completions)
    # the verifier reads prefix and completion
    read = jnp.pad(jnp.repeat(response, completions, axis=0), ((0, 0), (0, settings.max_new_tokens)))
    own = jax.tree.map(lambda x: x[jnp.repeat(rows.problem_ids, completions)], found.train.answers)
    whole = finished._replace(
        mask=finished.mask | read, problem_ids=jnp.repeat(rows.problem_ids, completions)
    )  # of the problems that the prefixes belong to
    right = curricula.train_score(found)(own, whole).value > 0.5
    return jnp.sum(right.reshape(-1, completions).astype(jnp.float32), axis=1) / completions


def rolled(
    found: Bench, roll: Callable[..., Trajectories], given: tuple[Array, Array, Key, Array], *, samples: int
) -> Trajectories:
    """A rollout of ``(tokens, valid, keys, ids)``, so many samples of each; of text in parts.

    Completions of every prefix of every response are thousands of rows, whose caches no device has room for at once.
    """
    tokens, valid, keys, ids = given
    if found.score is not None:
        return roll(tokens, valid, keys, ids)

    def some(given):
        rows = roll(given[0], given[1], given[2].reshape(-1), given[3])
        return jax.tree.map(lambda x: x.reshape(-1, samples, *x.shape[1:]), rows)

    parts = tokens, valid, keys.reshape(-1, samples), ids
    rows = in_row_parts(some, parts, at_once=max(1, ROLLED_AT_ONCE // samples))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


def sampled_rows(found: Bench, settings: OnlineSettings, params: Params, key: Key, *, prompts: int) -> Trajectories:
    """Two responses of a model to each of some training prompts."""
    roll = recipes.rollout_of(settings, found, group_size=2)
    count = found.train.tokens.shape[0]
    ids = jax.random.permutation(jax.random.fold_in(key, 0), count)[:prompts].astype(jnp.int32)
    given = found.train.tokens[ids], found.train.valid[ids], sample_keys(key, 0, ids, 2), ids
    return rolled(found, partial(roll, params), given, samples=2)


def step_states(
    found: Bench, rows: Trajectories, steps: reader.Steps, kept: Sequence[int], start: int
) -> Float[Array, "B K D"]:
    """The base model's hidden states ``behind_steps``, for each number of steps that is kept; of text in parts."""

    def some(given):
        hidden = step_labels.final_hidden(found.model.policy, found.model.params, given[0])
        return jnp.stack([behind_steps(hidden, given[1], k, start) for k in kept], axis=1)

    at_once = rows.tokens.shape[0] if found.score is not None else READ_AT_ONCE
    return in_row_parts(some, (rows, steps), at_once=at_once)


def behind_steps(
    hidden: Float[Array, "B T D"], steps: reader.Steps, kept: Array | int, start: int
) -> Float[Array, "B D"]:
    """The hidden state at the end of step ``kept`` (1 is the first; one number, or one a row), at 0 of the prompt."""
    kept = jnp.broadcast_to(jnp.asarray(kept, jnp.int32), hidden.shape[:1])
    end = jnp.argmax(steps.ends & (steps.ids == kept[:, None] - 1), axis=1)
    at = jnp.where(kept == 0, start, end)
    return jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]


def first_pit(rates: Float[Array, "B K"], there: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """The first prefix that no completion finished rightly; the last one there is, where all were finished.

    Args:
      rates: measured chances of success behind 0, 1, 2 ... steps.
      there: which of these prefixes a response has; it always has the first, the prompt alone.

    From "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning", arXiv:2410.08146, appendix D.

    >>> import jax.numpy as jnp
    >>> first_pit(jnp.array([[0.5, 0.0, 0.25], [0.5, 0.5, 0.0]]), jnp.array([[True] * 3, [True, True, False]])).tolist()
    [1, 1]
    """
    pit = (rates <= 0) & there
    last = jnp.sum(there.astype(jnp.int32), axis=1) - 1
    return jnp.where(jnp.any(pit, axis=1), jnp.argmax(pit, axis=1), last).astype(jnp.int32)


def covered(
    rates: Float[Array, "B K"], there: Bool[Array, "B K"], pit: Int[Array, " B"], more: Float[Array, "B 2"],
    *, first: int, added: int,
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:  # fmt: skip
    """``(rates, weights)`` once ``added`` completions were spent on the pit and on the prefix before it.

    A prefix's rate is that of all its completions, of which ``first`` were there; prefixes behind the pit have weight
    0. ``more`` holds the added completions' rates before the pit and at it; a pit at the prompt has both.

    From "Rewarding Progress", arXiv:2410.08146, appendix D: a long solution beyond its first mistake says little.
    Differs from the paper in that the coverage is spent evenly on two prefixes.

    >>> import jax.numpy as jnp
    >>> given = jnp.array([[0.5, 0.0, 0.25]]), jnp.ones((1, 3), bool), jnp.array([1]), jnp.array([[1.0, 0.5]])
    >>> [x[0].tolist() for x in covered(*given, first=2, added=2)]
    [[0.75, 0.25, 0.25], [1.0, 1.0, 0.0]]
    """
    place = jnp.arange(rates.shape[1], dtype=jnp.int32)[None, :]
    total, count = rates * first, jnp.full(rates.shape, first, jnp.float32)
    for k, at in enumerate((jnp.maximum(pit - 1, 0), pit)):
        here = place == at[:, None]
        total = total + jnp.where(here, more[:, k : k + 1] * added, 0.0)
        count = count + jnp.where(here, float(added), 0.0)
    return total / count, (there & (place <= pit[:, None])).astype(jnp.float32)


Measured = Callable[[int, Array | int, int], Float[Array, " B"]]  # (completions, steps kept, of the draw) -> rates


def everywhere(measured: Measured, there: Bool[Array, "B K"], completions: int) -> tuple[Array, Array]:
    """``(rates, weights)`` of all prefixes of 0, 1, 2 ... steps, each by as many completions."""
    rates = jnp.stack([measured(completions, k, k) for k in range(there.shape[1])], axis=1)
    return rates, there.astype(jnp.float32)


def around_pits(measured: Measured, there: Bool[Array, "B K"], completions: int) -> tuple[Array, Array]:
    """``everywhere`` with half of the completions, which look for each ``first_pit``; the others are spent around it.

    Prefixes behind it have weight 0. In all there are no more completions.

    Raises:
      ValueError: for fewer than two completions.
    """
    if completions < 2:
        raise ValueError(f"completions={completions} must be at least 2: half of them look for the first mistake")
    width, first = there.shape[1], completions // 2
    rates, _ = everywhere(measured, there, first)
    added, pit = (completions - first) * width // 2, first_pit(rates, there)
    around = (jnp.maximum(pit - 1, 0), pit)
    more = jnp.stack([measured(added, k, width + n) for n, k in enumerate(around)], axis=1)
    return covered(rates, there, pit, more, first=first, added=added)


def make_verifier(
    settings: OnlineSettings, *, prompts: int, completions: int, most: int, prover: Prover = BASE,
    prover_model: str = "", spend: Callable[[Measured, Array, int], tuple[Array, Array]] = everywhere,
) -> Callable[[Key], Verifier]:  # fmt: skip
    """``fit(key)``: completions of the prefixes of two responses to each of some training prompts, then the head.

    The key is the seed's own: every seed has its own prefixes, completions and head.

    Args:
      most: steps of a response whose ends are prefixes; the prompt alone is one, too.
      prover_model: who completes, see ``bench_of_prover``; prefixes and hidden states are the base model's.
      spend: which prefixes are completed how often, ``everywhere`` or ``around_pits``.
    """
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)
    proves = bench_of_prover(found, prover_model, new_tokens=settings.max_new_tokens)
    own = settings.temperature * prover.temperature

    def examples(params, key):
        rows = sampled_rows(found, settings, found.model.params, key, prompts=prompts)
        steps, _ = step_labels.label(stepped, rows)

        def measured(count, number, drawn):
            keep = rows.mask & steps.inside & (steps.ids < jnp.asarray(number, jnp.int32).reshape(-1, 1))
            return measured_success(
                proves, settings, rows, keep, completions=count, params=params, temperature=own,
                key=jax.random.fold_in(key, 100 + drawn),
            )  # fmt: skip

        start = found.train.tokens.shape[1] - 1
        features = step_states(found, rows, steps, range(most + 1), start)
        there = steps.count[:, None] >= jnp.arange(most + 1, dtype=jnp.int32)[None, :]
        rates, weights = spend(measured, there, completions)
        return features.reshape(-1, features.shape[-1]), rates.reshape(-1), weights.reshape(-1)

    def fit(key):
        params = prover_params(proves, settings, prover, jax.random.fold_in(key, 1))
        return fit_head(*examples(params, jax.random.fold_in(key, 2)))

    return fit


def make_step_model(settings: OnlineSettings, *, prompts: int, most: int) -> Callable[[Params, Key], Verifier]:
    """``fit(params, key)``: a head that tells from the base model's hidden states whether the step that ends is right.

    Its examples are the first ``most`` steps of two responses of ``params`` to each of some training prompts, with the
    labels of the reference, by which a repeated right step is right: what the head learns pays for repeating, too.

    From "On Designing Effective RL Reward at Training Time for LLM Reasoning", arXiv:2410.15115, section 3: a process
    reward model is a classifier of steps. Differs from the paper, whose labels are success rates of completions and
    whose model is one of language.
    """
    found, stepped = recipes.bench(settings), step_labels.make_stepped(settings)

    def fit(params, key):
        rows = sampled_rows(found, settings, params, key, prompts=prompts)
        steps, right = step_labels.label(stepped, rows)
        labels, valid = reader.per_step(right.astype(jnp.float32), steps, most=most)
        features = step_states(found, rows, steps, range(1, most + 1), 0)
        flat = features.reshape(-1, features.shape[-1]), labels.reshape(-1), valid.astype(jnp.float32).reshape(-1)
        return fit_head(*flat)

    return fit


def make_outcome_model(settings: OnlineSettings, *, prompts: int) -> Callable[[Params, Key], Verifier]:
    """``fit(params, key)``: a head that tells from the base model's last hidden state whether a response is right.

    Its examples are two responses of ``params`` to each of some training prompts, judged as in training.
    """
    found = recipes.bench(settings)

    def fit(params, key):
        rows = sampled_rows(found, settings, params, key, prompts=prompts)
        own = jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers)
        right = (curricula.train_score(found)(own, rows).value > 0.5).astype(jnp.float32)
        return fit_head(last_states(found, rows), right, jnp.ones(right.shape))

    return fit


def last_states(found: Bench, rows: Trajectories) -> Float[Array, "B D"]:
    """The base model's hidden states at the last token of each response; of text in parts."""

    def some(rows):
        hidden = step_labels.final_hidden(found.model.policy, found.model.params, rows)
        columns = jnp.arange(rows.mask.shape[1], dtype=jnp.int32)[None, :]
        last = jnp.max(jnp.where(rows.mask, columns, 0), axis=1)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    return in_row_parts(some, rows, at_once=rows.tokens.shape[0] if found.score is not None else READ_AT_ONCE)


def outcome_success(found: Bench, verifier: Verifier, rows: Trajectories) -> Float[Array, " B"]:
    """What an outcome reward model says of each response."""
    return chance_of(verifier, last_states(found, rows))


def fit_head(features: Float[Array, "N D"], rates: Float[Array, " N"], weights: Float[Array, " N"]) -> Verifier:
    """The head that predicts the rates from the features, by 300 steps of Adam."""
    tx, head = optax.adam(0.03), (jnp.zeros(features.shape[1:], jnp.float32), jnp.zeros((), jnp.float32))

    def loss(head):
        return soft_label_loss(features @ head[0] + head[1], rates, weights)

    def step(carry, _):
        head, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optimisers mix weak integers and floats
            updates, state = tx.update(jax.grad(loss)(head), state)
        return (jax.tree.map(jnp.add, head, updates), state), None

    (head, _), _ = jax.lax.scan(step, (head, tx.init(head)), None, 300)
    return Verifier(*head, loss(head))


def chance_of(verifier: Verifier, hidden: Float[Array, "... D"]) -> Float[Array, "..."]:
    """The prover's predicted chance of success behind hidden states; no gradient reaches the verifier."""
    weight, bias = jax.lax.stop_gradient((verifier.weight, verifier.bias))
    return jax.nn.sigmoid(hidden @ weight + bias)


def last_chance(found: Bench, verifier: Verifier, tokens: Array, valid: Array) -> Float[Array, " N"]:
    """What the verifier says of each left-padded prefix, at its last token."""

    def some(given):
        tokens, valid = given
        positions = jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)
        return found.model.policy.hidden(found.model.params, tokens, positions, valid.astype(jnp.int32))[:, -1]

    at_once = tokens.shape[0] if found.score is not None else READ_AT_ONCE
    return chance_of(verifier, in_row_parts(some, (tokens, valid), at_once=at_once))


def chance_alone(after: Float[Array, " N"], before: Float[Array, " N"]) -> Float[Array, " N"]:
    """Among beams a prefix is worth its chance of success."""
    return after


def with_progress(after: Float[Array, " N"], before: Float[Array, " N"]) -> Float[Array, " N"]:
    """``Q + 0.5 A``, ``A`` the progress of the last step under the best of 4: by it the paper ranks beams.

    From "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning", arXiv:2410.08146, section 4.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 3) for x in with_progress(jnp.array([0.5, 0.5]), jnp.array([0.2, 0.5]))]
    [0.674, 0.5]
    """
    now, then = process.best_of(jnp.stack([after, before], axis=1), 4).T
    return after + 0.5 * (now - then)


def prefixes_of(settings: OnlineSettings) -> int:
    """Steps of a response whose ends a verifier learns: of chains all, of rows as many as the median solution has."""
    if settings.data == "chain":
        return max(settings.levels or (4,))
    return int(np.median([len(lines) for lines in _lines(settings)]))


def search_sizes(settings: OnlineSettings) -> dict[str, int]:
    """Rounds of a search and the most tokens of a step, by the worked solutions of rows; of chains those of the search.

    A step is as long as nineteen of twenty lines, and half of a response at most; the rest is written at once.
    """
    if settings.data == "chain":
        return {}
    encode = recipes.bench(settings).model.tokenizer.encode
    long = int(np.quantile([len(encode(line)) + 1 for lines in _lines(settings) for line in lines], 0.95))
    step = max(1, min(long, settings.max_new_tokens // 2))
    rounds = min(prefixes_of(settings), settings.max_new_tokens // step) - 1
    return {"rounds": max(rounds, 1), "step_tokens": step}


def _lines(settings: OnlineSettings, most: int = 256) -> list[list[str]]:
    told = [with_answer(p.solution, p.answer) for p in recipes.solved_problems(settings)[:most]]
    return [[line for line in text.splitlines() if line.strip()] for text in told]


def step_success(
    found: Bench, verifier: Verifier, rows: Trajectories, steps: reader.Steps, *, most: int
) -> tuple[Float[Array, "B K"], Float[Array, " B"], Bool[Array, "B K"]]:
    """The prover's predicted chance of success after each step, at the prompt, and which steps there are."""
    hidden = step_labels.final_hidden(found.model.policy, found.model.params, rows)
    chance = chance_of(verifier, hidden)
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
