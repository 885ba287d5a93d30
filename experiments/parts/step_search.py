"""Search over steps by what partial solutions are worth: beams of prefixes, against the best of as many samples.

``worth(tokens, valid) -> [N]`` values left-padded prefixes: a verifier's chance of success, or a critic's value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.distributed import hosts
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import seed_axis
from jaxrl_llm.types import Key, Params, Trajectories

Worth = Callable[[Array, Array], Array]


def kept_beams(scores: Float[Array, "P C"], done: Bool[Array, "P C"], *, branch: int, width: int) -> Int[Array, "P W"]:
    """Which candidates go on: the ``width`` best; of a finished beam, whose branches are copies, only the first.

    >>> scores = jnp.array([[0.9, 0.9, 0.2, 0.4]])
    >>> done = jnp.array([[True, True, False, False]])
    >>> kept_beams(scores, done, branch=2, width=2).tolist()
    [[0, 3]]
    """
    copies = done & (jnp.arange(scores.shape[1])[None, :] % branch > 0)
    _, best = jax.lax.top_k(jnp.where(copies, -jnp.inf, scores), width)
    return best.astype(jnp.int32)


def beam_search(
    found: Bench, worth: Worth, params: Params, key: Key, *, separators: Sequence[int], problems: int, width: int,
    branch: int, rounds: int, step_tokens: int, rest_tokens: int, temperature: float = 1.0,
    beamed: Callable[[Array, Array], Array] | None = None,
) -> tuple[Trajectories, Bool[Array, "B L"]]:  # fmt: skip
    """One solution a held-out problem: ``width`` prefixes, each continued by ``branch`` steps, the best go on.

    Returns the rows of the last round that won and which of their tokens are the response.

    From "Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning", arXiv:2410.08146, section 5; the
    step-level beam search of "Offline Reinforcement Learning for LLM Multi-Step Reasoning", arXiv:2412.16145.

    Args:
      separators: tokens that end a step.
      rounds: steps that are chosen one by one; the rest is written at once.
      beamed: of what prefixes are worth with their last step and without it, by what beams are kept; None: the
        former. Whole solutions are chosen by what they are worth.
    """
    model, table = found.model, found.heldout
    ids = jnp.repeat(jnp.arange(problems, dtype=jnp.int32), width)
    tokens, valid = table.tokens[ids], table.valid[ids]
    response, done = jnp.zeros(tokens.shape, bool), jnp.zeros(ids.shape, bool)
    ends = tuple(model.tokenizer.eos_ids)
    standing = None if beamed is None else worth(tokens, valid)
    for k in range(rounds + 1):
        last = k == rounds
        rows = generate(
            model.policy, params, tokens, valid, sample_keys(key, k, jnp.arange(ids.shape[0], dtype=jnp.int32), branch),
            group_size=branch, max_new_tokens=rest_tokens if last else step_tokens,
            eos_ids=ends if last else (*separators, *ends), pad_id=model.tokenizer.pad_id, temperature=temperature,
            problem_ids=ids, early_exit=seed_axis.in_turn(),
        )  # fmt: skip
        before = jnp.repeat(done, branch)
        new = rows.mask & ~before[:, None]
        said = (
            jnp.pad(jnp.repeat(response, branch, axis=0), ((0, 0), (0, rows.tokens.shape[1] - tokens.shape[1]))) | new
        )
        keep = (rows.segment_ids > 0) & (~rows.mask | new)
        closed = jnp.any(new & jnp.isin(rows.tokens, jnp.asarray(ends, jnp.int32)), axis=1) | before
        padded, there = given_responses.left_padded(rows.tokens, keep, pad_id=model.tokenizer.pad_id)
        after = worth(padded, there)
        ranked = after if beamed is None or last else beamed(after, jnp.repeat(standing, branch))
        scores = ranked.reshape(problems, width * branch)
        if last:
            best = kept_beams(scores, before.reshape(scores.shape), branch=branch, width=1)[:, 0]
            index = jnp.arange(problems) * width * branch + best
            return jax.tree.map(lambda x, at=index: x[at], rows), said[index]
        chosen = kept_beams(scores, before.reshape(scores.shape), branch=branch, width=width)
        index = (jnp.arange(problems)[:, None] * width * branch + chosen).reshape(-1)
        moved, _ = given_responses.left_padded(said.astype(jnp.int32), keep)
        tokens, valid, response, done = padded[index], there[index], moved[index] > 0, closed[index]
        standing = None if beamed is None else after[index]
    raise AssertionError("the last round returns")


def best_of_samples(
    found: Bench, worth: Worth, params: Params, key: Key, *, problems: int, samples: int, tokens: int
) -> tuple[Trajectories, Int[Array, " P"]]:
    """Whole samples of every held-out problem, and the row of each problem's best by what it is worth."""
    model, table, ids = found.model, found.heldout, jnp.arange(problems, dtype=jnp.int32)
    rows = generate(
        model.policy, params, table.tokens[ids], table.valid[ids], sample_keys(key, 0, ids, samples),
        group_size=samples, max_new_tokens=tokens, eos_ids=tuple(model.tokenizer.eos_ids),
        pad_id=model.tokenizer.pad_id, problem_ids=ids, early_exit=seed_axis.in_turn(),
    )  # fmt: skip
    padded, there = given_responses.left_padded(rows.tokens, rows.segment_ids > 0, pad_id=model.tokenizer.pad_id)
    best = jnp.argmax(worth(padded, there).reshape(problems, samples), axis=1)
    return rows, ids * samples + best.astype(jnp.int32)


def solved(found: Bench, rows: Trajectories, response: Bool[Array, "B L"]) -> Float[Array, " B"]:
    """Which of the solutions are right: 1 or 0; judged on the device, or where the bench judges, in Python."""
    rows = rows._replace(mask=response)
    if found.score is None:
        rewards = found.heldout_score(hosts.gathered(rows))
    else:
        rewards = found.score(jax.tree.map(lambda x: x[rows.problem_ids], found.heldout.answers), rows)
    return (jnp.asarray(rewards.value) > 0.5).astype(jnp.float32)


def make_figures(
    found: Bench, worth: Callable[..., Array], *, separators: Sequence[int], problems: int, new_tokens: int,
    width: int = 2, branch: int = 4, rounds: int = 3, step_tokens: int = 10,
    beamed: Callable[[Array, Array], Array] | None = None,
) -> Callable[[Any, Params, Key], dict[str, Array]]:  # fmt: skip
    """``figures(judge, params, key)``: the share solved by beam search, by the best of as many samples, and by one.

    ``search/beam``, ``search/best_of``, ``search/sample``; ``search/gain``: beam less best of samples; ``search/lift``:
    beam less one sample.

    Args:
      worth: ``(judge, tokens, valid) -> [N]``; the judge is a verifier, or parameters with a critic.
      beamed: as of ``beam_search``.
    """

    def searched(judge, params, key):
        def value(tokens, valid):
            return worth(judge, tokens, valid)

        beam = beam_search(
            found, value, params, jax.random.fold_in(key, 0), separators=separators, problems=problems, width=width,
            branch=branch, rounds=rounds, step_tokens=step_tokens,
            rest_tokens=max(new_tokens - rounds * step_tokens, step_tokens), beamed=beamed,
        )  # fmt: skip
        samples = width * branch
        whole = best_of_samples(
            found, value, params, jax.random.fold_in(key, 1), problems=problems, samples=samples, tokens=new_tokens
        )
        return beam, whole

    search = searched if found.score is not None else jax.jit(searched)

    def figures(judge, params, key):
        beam, (rows, best) = search(judge, params, key)
        by_beam = reduce.scalars(solved(found, *beam))
        each = solved(found, rows, rows.mask)
        best_of, one = reduce.scalars(each[best]), reduce.scalars(each)
        return {
            "search/beam": by_beam, "search/best_of": best_of, "search/sample": one, "search/gain": by_beam - best_of,
            "search/lift": by_beam - one,
        }  # fmt: skip

    return figures
