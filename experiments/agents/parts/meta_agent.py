"""A meta-agent over several turns: it writes workflows, reads what they scored, and is trained offline on the better.

In every turn ``m`` programs are drawn from the same context and run on validation items; one of them goes on, and the
next context shows it with its score. All candidates are kept, each with its reward.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.agents.parts import workflows as flows
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.advantages.turns import improvement_rewards
from jaxrl_llm.losses.supervised import weighted_sft_loss
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params

VALIDATION, TEST = 32, 64  # items
SEEDS = ("s",)  # what a search begins with

Propose = Callable[[Array, Key, int], Array]  # (contexts [N, P], key, m) -> programs [N * m, A]
Met = Callable[[int, int], flows.Executor]  # (count, seed) -> the executors of an experiment, ``flows.executors``


class Search(NamedTuple):
    """``T`` turns of ``N`` searches with ``M`` candidates in each."""

    contexts: Int[Array, "T N P"]
    programs: Int[Array, "T N M A"]
    scores: Float[Array, "T N M"]  # validation accuracy
    rewards: Float[Array, "T N M"]
    chosen: Int[Array, "T N"]  # the candidate that goes on
    start: Float[Array, " N"]  # score of the seed


def best_of(scores: Float[Array, "N M"]) -> Int[Array, " N"]:
    """Goes on with the best candidate, the first of equals."""
    return jnp.argmax(scores, axis=1).astype(jnp.int32)


def first_of(scores: Float[Array, "N M"]) -> Int[Array, " N"]:
    """Goes on with a candidate whatever it scored."""
    return jnp.zeros((scores.shape[0],), jnp.int32)


def latest(key: Key, count: Int[Array, ""], size: int, rows: int) -> Int[Array, "N W"]:
    """Which of the ``count`` entries so far are shown: the last ones; below 0 for a place that stays empty."""
    found = jnp.arange(flows.WINDOW, dtype=jnp.int32) + count - flows.WINDOW
    return jnp.broadcast_to(found[None, :], (rows, flows.WINDOW))


def archive(key: Key, count: Int[Array, ""], size: int, rows: int) -> Int[Array, "N W"]:
    """Entries at random of all so far, in their order."""
    there = jnp.arange(size, dtype=jnp.int32)[None, :] < count
    order = jnp.argsort(jnp.where(there, jax.random.uniform(key, (rows, size)), 2.0), axis=1)[:, : flows.WINDOW]
    order = jnp.pad(order.astype(jnp.int32), ((0, 0), (max(0, flows.WINDOW - size), 0)), constant_values=size)
    return jnp.sort(jnp.where(order < count, order, -1), axis=1)


def proposer(params: Params) -> Propose:
    """The policy as the writer of programs."""
    return lambda contexts, key, samples: strings.sample(flows.WORLD, params, contexts, key, samples=samples)


def repaired(
    propose: Propose, table: flows.Executor, contexts: Int[Array, "N P"], programs: Int[Array, "N A"],
    last: Float[Array, " N"], key: Key, *, repairs: int,
) -> Int[Array, "N A"]:  # fmt: skip
    """The programs, those that cannot be run written anew up to ``repairs`` times before they count.

    Whoever repairs reads the context with the broken program behind it, told as a score of 0; the oldest entry goes.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3: a program
    that raises gets up to three turns of self-correction. Differs from the paper in what is trained on: the program
    that counts, behind the context without its broken attempts.
    """
    none = jnp.zeros(programs.shape[:1], jnp.float32)
    for k in range(repairs):
        broken = ~flows.can_run(table, programs)
        shown = jnp.concatenate(
            [contexts[:, :3], contexts[:, 3 + flows.ENTRY :], flows.told(programs, none, last)], axis=1
        )
        again = propose(shown, jax.random.fold_in(key, k), 1).astype(jnp.int32)
        programs, contexts = jnp.where(broken[:, None], again, programs), jnp.where(broken[:, None], shown, contexts)
    return programs


class _At(NamedTuple):
    """Where searches stand."""

    entries: Array  # [N, T + 1, S]
    best: Array  # [N]
    last: Array


def search(
    propose: Propose,
    table: flows.Executor,
    key: Key,
    *,
    turns: int,
    candidates: int,
    choose: Callable[[Array], Array] = best_of,
    window: Callable[..., Array] = latest,
    repairs: int = 0,
) -> Search:
    """Searches on all executors of a table, side by side, from the workflow that only solves.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3. Differs
    from the paper in one seed and in no analysis before a program; a program that cannot be run is written anew up to
    ``repairs`` times before it counts.
    """
    count = table.steps.shape[0]
    wide = jax.tree.map(lambda x: jnp.repeat(x, candidates, axis=0), table)
    seed = jnp.broadcast_to(jnp.asarray(flows.encode(SEEDS[0]), jnp.int32), (count, flows.LENGTH))
    start = flows.accuracies(table, seed, jax.random.fold_in(key, turns), items=VALIDATION)
    entries = jnp.zeros((count, turns + 1, flows.ENTRY), jnp.int32).at[:, 0].set(flows.told(seed, start, start))

    def turn(at: _At, i: Array) -> tuple[_At, tuple]:
        show, write, run = jax.random.split(jax.random.fold_in(key, i), 3)
        places = window(show, i + 1, turns + 1, count)
        shown = jnp.take_along_axis(at.entries, jnp.maximum(places, 0)[:, :, None], axis=1)
        contexts = flows.contexts(table, jnp.where(places[:, :, None] < 0, 0, shown))
        programs = propose(contexts, write, candidates).astype(jnp.int32)
        if repairs:
            read, last = (jnp.repeat(x, candidates, axis=0) for x in (contexts, at.last))
            mend = jax.random.fold_in(write, 1)
            programs = repaired(propose, wide, read, programs, last, mend, repairs=repairs)
        scores = flows.accuracies(wide, programs, run, items=VALIDATION)
        before = [jnp.repeat(x, candidates, axis=0) for x in (at.last, at.best)]
        rewards = improvement_rewards(scores, *before)
        chosen = choose(scores.reshape(count, candidates))
        taken = jnp.arange(count, dtype=jnp.int32) * candidates + chosen
        entry = flows.told(programs[taken], scores[taken], at.last)
        after = _At(at.entries.at[:, i + 1].set(entry), jnp.maximum(at.best, scores[taken]), scores[taken])
        found = programs.reshape(count, candidates, -1), *(x.reshape(count, candidates) for x in (scores, rewards))
        return after, (contexts, *found, chosen)

    _, found = jax.lax.scan(turn, _At(entries, start, start), jnp.arange(turns, dtype=jnp.int32))
    return Search(*found, start)


class Samples(NamedTuple):
    """What the meta-agent wrote, with its reward; a table to train on."""

    contexts: Int[Array, "N P"]
    programs: Int[Array, "N A"]
    rewards: Float[Array, " N"]


def samples_of(found: Search) -> Samples:
    """Every candidate of every turn with the context it was written in."""
    candidates = found.programs.shape[2]
    contexts = jnp.repeat(found.contexts[:, :, None], candidates, axis=2)
    flat = [x.reshape(-1, x.shape[-1]) for x in (contexts, found.programs)]
    return Samples(*flat, found.rewards.reshape(-1))


def regression(params: Params, batch: Samples, weigh: Callable[[Array], Array]) -> tuple[Array, dict[str, Array]]:
    """``mean_n w(r_n) NLL_n``, NLL the token mean of the last turn: what stands in its context does not train.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3. Differs
    from the released code in this: there the turns in the context train with the weight of the last one.
    """
    mask = strings.counted(batch.programs, flows.STOP)
    logp = strings.token_logp(flows.WORLD, params, batch.contexts, batch.programs)
    weights = weigh(batch.rewards)
    value = reduce.tokens(weighted_sft_loss(logp, weights, mask).loss, mask, mode="seq_mean")
    trained = jnp.sum((mask & (weights > 0)[:, None]).astype(jnp.float32))
    return value, {"rows/weight": reduce.scalars(weights), "tokens/trained": trained}


@lru_cache(maxsize=8)
def make_rows(met: Met, searches: int, turns: int, candidates: int, choose: Callable[[Array], Array], repairs: int = 0):
    """The data of a stage, ``(params, key) -> Samples``: arms that collect in the same way share it."""
    table = met(searches, 0)

    def rows(params: Params, key: Key) -> Samples:
        sizes = {"turns": turns, "candidates": candidates, "repairs": repairs}
        return samples_of(search(proposer(params), table, key, choose=choose, **sizes))

    return rows


def make_stage(
    rows: Callable[[Params, Key], Samples], weigh: Callable[[Array], Array], *, steps: int, rows_per_step: int,
    learning_rate: float,
) -> Stage:  # fmt: skip
    """Searches of the policy as it is, once, and regression on what they gave.

    Args:
      rows: from ``make_rows``.
      weigh: rewards ``[N]`` to weights ``[N]``.
    """
    return strings.table_stage(
        rows, lambda params, extras, batch: regression(params, batch, weigh), steps=steps,
        rows_per_step=rows_per_step, learning_rate=learning_rate,
    )  # fmt: skip


def draw_scribbles(met: Met, key: Key, rows: int) -> tuple[Array, Array]:
    """The ``draw`` of ``strings.make_base``: random programs in the contexts that random programs make."""
    turns = 10
    table = met(-(-rows // turns), 2)
    found = samples_of(search(flows.scribble, table, key, turns=turns, candidates=1))
    return found.contexts[:rows], found.programs[:rows]


def measure(
    met: Met, params: Params, key: Key, *, turns: int = 10, searches: int = 4, window: Callable[..., Array] = latest,
    repairs: int = 0,
) -> dict[str, Array]:  # fmt: skip
    """Searches with one candidate a turn on 64 executors that are not trained on.

    ``eval/test@k``: accuracy on fresh items of the program with the best validation accuracy after ``k`` turns, the
    seed counted; ``eval/seed`` that of the seed; ``eval/runs``: share of programs that can be run; ``eval/better``:
    share of turns that beat all before.
    """
    with jax.core.eval_context():
        held = jax.tree.map(lambda x: jnp.repeat(x, searches, axis=0), met(64, 1))
    marks = tuple(sorted({1, 2, min(5, turns), turns}))
    look, last = jax.random.split(key)
    found = search(proposer(params), held, look, turns=turns, candidates=1, window=window, repairs=repairs)
    seed = jnp.broadcast_to(jnp.asarray(flows.encode(SEEDS[0]), jnp.int32), found.programs[0, :, 0].shape)
    programs = jnp.concatenate([seed[None], found.programs[:, :, 0]])
    scores = jnp.concatenate([found.start[None], found.scores[:, :, 0]])
    after = (0, *marks)
    best = jnp.stack([jnp.argmax(scores[: k + 1], axis=0).astype(jnp.int32) for k in after])
    chosen = jnp.take_along_axis(programs, best[:, :, None], axis=0)
    wide = jax.tree.map(lambda x: jnp.tile(x, len(after)), held)
    tested = flows.accuracies(wide, chosen.reshape(-1, flows.LENGTH), last, items=TEST).reshape(len(after), -1)
    names = ("eval/seed", *(f"eval/test@{k}" for k in marks))
    figures = {name: reduce.scalars(tested[i]) for i, name in enumerate(names)}
    runs = jax.vmap(lambda p: flows.can_run(held, p))(found.programs[:, :, 0])
    better = (found.rewards == 1.0).astype(jnp.float32)
    return figures | {
        "eval/runs": reduce.scalars(runs.astype(jnp.float32).reshape(-1)),
        "eval/better": reduce.scalars(better.reshape(-1)),
    }
