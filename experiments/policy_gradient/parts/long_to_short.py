"""What makes a long reasoner brief, from its own samples: imitation of the shortest right ones, preference for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from jaxrl_llm import reduce
from jaxrl_llm.advantages import selection
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses.preference import dpo_loss
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Stage, Tabled, tabled
from jaxrl_llm.types import Key, Params, Rewards, Trajectories

SAMPLES, FACTOR = 8, 1.5  # of a prompt; how much longer a right response has to be to be rejected
AT_ONCE = 64  # prompts that are sampled together, as many times SAMPLES rows that are scored together


class Imitated(NamedTuple):
    """Responses, and whether there is anything to imitate."""

    rows: Trajectories
    there: Bool[Array, " N"]


class Paired(NamedTuple):
    """A preferred and a rejected response a row, their log-probabilities under the start, and whether it is a pair."""

    chosen: Trajectories
    rejected: Trajectories
    reference: tuple[Array, Array]
    there: Bool[Array, " N"]


def first_repeated(kept: Bool[Array, " N"]) -> Array:
    """Indices ``[N]`` of the kept rows, again and again; all of them 0 where none is.

    >>> first_repeated(jnp.array([False, True, False, True, False])).tolist()
    [1, 3, 1, 3, 1]
    """
    order = jnp.argsort(~kept, stable=True)
    place = jnp.arange(kept.shape[0], dtype=jnp.int32) % jnp.maximum(jnp.sum(kept.astype(jnp.int32)), 1)
    return jnp.where(jnp.any(kept), order[place], 0)


def _taken(rows: Trajectories, places: Array) -> Trajectories:
    return jax.tree.map(lambda x: x[places], rows)


def _samples(settings: Any, bench: recipes.Bench) -> Callable[[Params, Key], tuple[Trajectories, Array, Array]]:
    """``(params, key) -> (rows, lengths, right)``: eight samples to each of some training prompts."""
    judge = curricula.train_score(bench)
    rollout = recipes.rollout_of(settings, bench, group_size=SAMPLES)

    def drawn(params: Params, key: Key) -> tuple[Trajectories, Array, Array]:
        table, count = bench.train, min(settings.short_problems, bench.train.tokens.shape[0])

        def of(ids: Array) -> tuple[Trajectories, Rewards]:
            rows = rollout(params, table.tokens[ids], table.valid[ids], sample_keys(key, 0, ids, SAMPLES), ids)
            right = judge(jax.tree.map(lambda x: x[rows.problem_ids], table.answers), rows)
            return jax.tree.map(lambda x: x.reshape(ids.shape[0], SAMPLES, *x.shape[1:]), (rows, right))

        ids = jnp.arange(count, dtype=jnp.int32)
        found = builders.in_row_parts(of, ids, at_once=AT_ONCE)
        rows, right = jax.tree.map(lambda x: x.reshape(count * SAMPLES, *x.shape[2:]), found)
        rows = rows._replace(group_ids=jnp.repeat(ids, SAMPLES))  # those of a part begin at 0
        lengths = reduce.sequences(jnp.ones(rows.mask.shape, jnp.float32), rows.mask)
        return rows, lengths, (right.value > 0.5) & right.valid

    return drawn


def imitation_stage(settings: Any, bench: recipes.Bench, *, steps: int) -> Stage:
    """Supervised training on the shortest right sample of each prompt.

    From "Kimi k1.5", arXiv:2501.12599, section 2.4 (shortest rejection sampling).
    """
    policy, drawn = bench.model.policy, _samples(settings, bench)

    def extras(params: Params, key: Key) -> dict[str, Any]:
        rows, lengths, right = drawn(params, key)
        shortest = selection.shortest_right(lengths, right, rows.group_ids)
        there = jnp.full(right.shape, jnp.any(shortest))
        return Tabled(Imitated(_taken(rows, first_repeated(shortest)), there))._asdict()

    def loss(params: Params, extras: dict[str, Any], part: Imitated):
        logp, _ = builders.score_tokens(policy, params, part.rows, temperature=settings.temperature)
        mask = part.rows.mask & part.there[:, None]
        value = reduce.tokens(sft_loss(logp, mask).loss, mask)
        return value, {"imitation/loss": value, "tokens/trained": jnp.sum(mask.astype(jnp.float32))}

    size, tx = settings.prompts_per_step * settings.group_size, optax.adam(settings.learning_rate)
    return Stage(Offline(tabled, make_uniform(), size, loss, tx), steps, extras)


def preference_stage(settings: Any, bench: recipes.Bench, *, steps: int, beta: float = 0.1) -> Stage:
    """DPO: a prompt's shortest right sample is preferred to longer wrong ones, and to right ones 1.5 times as long.

    From "Kimi k1.5", arXiv:2501.12599, section 2.4.
    """
    policy, drawn = bench.model.policy, _samples(settings, bench)

    def total(params: Params, rows: Trajectories) -> Array:
        logp, _ = builders.score_tokens(policy, params, rows, temperature=settings.temperature)
        return reduce.sequences(logp, rows.mask)

    def extras(params: Params, key: Key) -> dict[str, Any]:
        rows, lengths, right = drawn(params, key)
        shortest = selection.shortest_right(lengths, right, rows.group_ids)
        longer = selection.longer_rejected(lengths, right, rows.group_ids, factor=FACTOR)
        places = first_repeated(longer)
        # the members of a group lie side by side
        best = jnp.argmax(shortest.reshape(-1, SAMPLES), axis=1) + SAMPLES * jnp.arange(right.shape[0] // SAMPLES)
        chosen, rejected = _taken(rows, best[places // SAMPLES]), _taken(rows, places)
        there = jnp.full(right.shape, jnp.any(longer))
        at_once = AT_ONCE * SAMPLES
        reference = builders.in_row_parts(
            lambda pair: tuple(total(params, rows) for rows in pair), (chosen, rejected), at_once=at_once
        )
        return Tabled(Paired(chosen, rejected, reference, there))._asdict()

    def loss(params: Params, extras: dict[str, Any], part: Paired):
        terms = dpo_loss(total(params, part.chosen), total(params, part.rejected), *part.reference, beta=beta)
        value = reduce.scalars(terms.loss, part.there)
        trained = sum(jnp.sum(rows.mask.astype(jnp.float32)) for rows in (part.chosen, part.rejected))
        return value, {"dpo/loss": value, "tokens/trained": trained}

    size, tx = settings.prompts_per_step * settings.group_size // 2, optax.adam(settings.learning_rate / 4)
    return Stage(Offline(tabled, make_uniform(), size, loss, tx), steps, extras)
