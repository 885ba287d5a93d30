"""Answers that can be written in several ways: chains modulo m whose answer is any number of the right residue.

Every training problem has one reference, its residue ``v`` or ``v + m``; a response that gives the other form is right,
but no exact comparison sees it. The truth, used in measurement alone, compares residues.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.parts.text_problems import with_answer
from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.train.methods import builders, supervised
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Params, Policy, Rewards, Trajectories, declared

DIGITS = 2  # of a reference


class FreeBench(NamedTuple):
    """A bench with references in either form; ``answers`` go into its tables and reach every judge row by row."""

    bench: Bench
    read: Callable[[Trajectories], tuple[Array, Array]]  # (value, answered) of responses
    reference_tokens: Int[Array, "N R"]
    reference_valid: Bool[Array, "N R"]
    mark: tuple[int, ...]  # the tokens that are put before a reference
    equivalent: Callable[[Array, Array, dict[str, Array]], Array]  # the truth, of (value, answered, answers)
    exact: Callable[[Array, Array, dict[str, Array]], Array]  # the rule
    shared: Callable[[Array, Array, dict[str, Array]], Array]  # the soft rule
    size: Callable[[Array], Array]  # tokens of answers
    marked: Callable[[Array, dict[str, Array]], Array]  # a number of (value, answers), by which a judge errs
    log: Any = None  # ``answer_judges.Log``: what generative judges read and write; None: digits
    logged: Callable[..., Any] | None = None  # that log with another judge's verdicts, where answers are texts
    words: Callable[..., list[tuple[str, str, str]]] | None = None  # (problem, reference, answer) of (value, row)
    large: Callable[[Array, Array, dict[str, Array]], Array] | None = None  # a model that compares; None: the truth
    answering: Callable[[Trajectories], Array] | None = None  # tokens from an answer's mark on; None: behind ``mark``


def references(problems: Sequence[Problem], seed: int = 0) -> np.ndarray:
    """One of the two forms of each answer ``[N]``, by a coin."""
    coins = np.random.default_rng(seed).random(len(problems)) < 0.5
    return np.asarray([p.answer["value"] + c * p.answer["modulus"] for p, c in zip(problems, coins, strict=True)])


def _answers(problems: Sequence[Problem], seed: int) -> dict[str, Array]:
    return {
        "value": jnp.asarray([p.answer["value"] for p in problems], jnp.int32),
        "reference": jnp.asarray(references(problems, seed), jnp.int32),
        "modulus": jnp.asarray([p.answer["modulus"] for p in problems], jnp.int32),
    }


def make_free(settings: OnlineSettings) -> FreeBench:
    """The free-form twin of ``bench(settings)``, of chains; equal settings share one. See ``text_answers`` for rows.

    Raises:
      UserError: for another task: in what forms its answers are right is not known.
    """
    if settings.data != "chain":
        raise UserError(
            f"--data {settings.data}: in what forms an answer is right is known of chains alone; use --data chain, or "
            "rows of your own, whose answers a verifier of text compares"
        )
    return _free(recipes.bench_identity(settings))


@lru_cache(maxsize=8)
def _free(identity: tuple) -> FreeBench:
    settings = OnlineSettings(**dict(identity))
    found, levels = recipes.bench(settings), settings.levels or None
    curricula.device_score(found)
    train = curricula.train_problems(settings)
    heldout = tables.make_split(chain, split="heldout", n=settings.eval_problems, seed=0, levels=levels)
    tokenizer = found.model.tokenizer
    # the end token is cut off: only the digits are scored
    tokens, valid = encode_responses(tokenizer, [str(r) for r in references(train)], width=DIGITS + 1)
    ends = np.isin(tokens, tokenizer.eos_ids)
    bench = found._replace(
        train=found.train._replace(answers=_answers(train, 0)),
        heldout=found.heldout._replace(answers=_answers(heldout, 1)),
    )
    return FreeBench(
        bench,
        recipes.make_answer_reader(found),
        jnp.asarray(tokens[:, :DIGITS]),
        jnp.asarray((valid & ~ends)[:, :DIGITS]),
        (tokenizer.encode("#")[0],),
        equivalent,
        exact,
        shared_digits,
        digits,
        marked,
    )


def marked(value: Int[Array, " B"], answers: dict[str, Array]) -> Int[Array, " B"]:
    """A number of the answer and its reference."""
    return value * 7919 + answers["reference"] * 104729 + answers["modulus"] * 1299709


def mistaken(mixed: Int[Array, " B"], error_rate: float) -> Bool[Array, " B"]:
    """Whether a judge that errs at this rate errs on the answer and reference of this number: always on the same ones.

    Args:
      mixed: as of ``marked``.
    """
    return (jnp.abs(mixed * 48271) % 1000).astype(jnp.float32) / 1000 < error_rate


def digits(numbers: Int[Array, " B"]) -> Float[Array, " B"]:
    """Tokens of a whole number."""
    return 1.0 + sum((numbers >= 10**k).astype(jnp.float32) for k in (1, 2, 3))


def equivalent(value: Int[Array, " B"], answered: Bool[Array, " B"], answers: dict[str, Array]) -> Bool[Array, " B"]:
    """The truth: an answer of the right residue."""
    return answered & ((value - answers["value"]) % answers["modulus"] == 0)


def exact(value: Int[Array, " B"], answered: Bool[Array, " B"], answers: dict[str, Array]) -> Bool[Array, " B"]:
    """The rule: the same number as the reference."""
    return answered & (value == answers["reference"])


def shared_digits(
    value: Int[Array, " B"], answered: Bool[Array, " B"], answers: dict[str, Array]
) -> Float[Array, " B"]:
    """The soft rule: digits that answer and reference share, over all their different digits (Jaccard)."""

    def digits(x):
        used = jnp.stack([x % 10, x // 10 % 10, x // 100 % 10], axis=1)
        there = jnp.stack([x >= 0, x >= 10, x >= 100], axis=1)
        return jnp.any((used[:, :, None] == jnp.arange(10)[None, None, :]) & there[:, :, None], axis=1)

    a, b = digits(value), digits(answers["reference"])
    both, either = (jnp.sum(x.astype(jnp.float32), axis=1) for x in (a & b, a | b))
    return jnp.where(answered, both / jnp.maximum(either, 1.0), 0.0)


def score_by_judge(free: FreeBench, judge: Callable[[Array, Array, dict[str, Array]], Array]):
    """The ``score`` slot from a judge of ``(value, answered, answers)``."""

    def score(answers: dict[str, Array], rows: Trajectories) -> Rewards:
        value = judge(*free.read(rows), answers).astype(jnp.float32)
        return Rewards(value, jnp.ones(value.shape, bool))

    return score


def warm_stage(settings: OnlineSettings, *, steps: int, learning_rate: float = 1e-3) -> Stage:
    """Supervised steps after which either form of an answer is as likely: the table has each solution with both.

    Of rows of one's own it has their solutions.
    """
    found, pairs = recipes.bench(settings), []
    if settings.data != "chain":
        problems = recipes.solved_problems(settings)
        rows = recipes.with_texts(settings, found, problems, [with_answer(p.solution, p.answer) for p in problems])
        tx = optax.adam(settings.learning_rate)
        return Stage(supervised.make_supervised(found.model.policy, rows, rows_per_step=32, tx=tx), steps)
    for problem in curricula.train_problems(settings):
        work, answer = problem.solution.rsplit("#", 1)
        pairs += [(problem.prompt, f"{work}#{int(answer) + k * problem.answer['modulus']}") for k in (0, 1)]
    rows = supervised.supervised_rows(found.model, pairs, width=max(len(a) + len(b) for a, b in pairs) + 2)
    return Stage(
        supervised.make_supervised(found.model.policy, rows, rows_per_step=32, tx=optax.adam(learning_rate)), steps
    )


def by_residues(settings: OnlineSettings) -> Bench:
    """The bench that is measured: chains are right in all their forms, rows of one's own by their verifier."""
    if settings.data != "chain":
        return recipes.bench(settings)
    free = make_free(settings)
    return free.bench._replace(score=score_by_judge(free, equivalent))


# ------------------------------------------------------------------ the reference under a response's own reasoning


class Referenced(NamedTuple):
    """Rows of question, reasoning and reference; ``mask`` is true on the reference."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    mask: Bool[Array, "B T"]


def reasoning_of(free: FreeBench, rows: Trajectories) -> Bool[Array, "B T"]:
    """The tokens of each response before the mark of its answer; of one without a mark all but its end."""
    ends = jnp.asarray(free.bench.model.tokenizer.eos_ids, jnp.int32)
    ended = jnp.any(rows.tokens[:, :, None] == ends[None, None, :], axis=2)
    if free.answering is not None:
        return rows.mask & ~free.answering(rows) & ~ended
    marks = jnp.cumsum(((rows.tokens == free.mark[0]) & rows.mask).astype(jnp.int32), axis=1)
    return rows.mask & (marks == 0) & ~ended


def with_reference(free: FreeBench, rows: Trajectories, *, reasoning: bool = True) -> Referenced:
    """Each response with its mark and answer replaced by ``free.mark`` and the reference; a missing mark is put in.

    Args:
      reasoning: False leaves the response out: the reference right behind the question.

    From "RLPR: Extrapolating RLVR to General Domains without Verifiers", arXiv:2506.18254, section 3.1.
    """
    work = reasoning_of(free, rows) & reasoning
    count = rows.tokens.shape[0]
    marks = [jnp.full((count, 1), token, jnp.int32) for token in free.mark]
    mark = jnp.concatenate(marks, axis=1), jnp.ones((count, len(free.mark)), bool)
    reference = free.reference_tokens[rows.problem_ids], free.reference_valid[rows.problem_ids]
    keep = jnp.concatenate([((rows.segment_ids > 0) & ~rows.mask) | work, mark[1], reference[1]], axis=1)
    tokens, valid = given_responses.right_padded(jnp.concatenate([rows.tokens, mark[0], reference[0]], axis=1), keep)
    scored = jnp.pad(reference[1].astype(jnp.int32), ((0, 0), (rows.tokens.shape[1] + len(free.mark), 0)))
    scored, _ = given_responses.right_padded(scored, keep)
    positions = jnp.where(valid, jnp.arange(valid.shape[1], dtype=jnp.int32)[None, :], 0)
    return Referenced(tokens, positions, valid.astype(jnp.int32), (scored > 0) & valid)


def mean_probability(logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Mean of the tokens' probabilities, not of their logarithms; 0 where there is no token.

    One bad token cannot ruin the whole, as in a product.

    From "RLPR", arXiv:2506.18254, eq. 3.

    >>> import jax.numpy as jnp
    >>> f"{float(mean_probability(jnp.log(jnp.array([[0.9, 0.8, 0.01]])), jnp.ones((1, 3), bool))[0]):.4f}"
    '0.5700'
    """
    count = jnp.maximum(jnp.sum(mask.astype(jnp.float32), axis=1), 1.0)
    return jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, logp, 0.0)), 0.0), axis=1) / count


def product_probability(logp: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Product of the tokens' probabilities; 0 where there is no token."""
    total = jnp.exp(jnp.sum(jnp.where(mask, logp, 0.0), axis=1))
    return jnp.where(jnp.any(mask, axis=1), total, 0.0)


def reference_score(
    free: FreeBench, policy: Policy, params: Params, rows: Trajectories, *, how=mean_probability, reasoning: bool = True
) -> Float[Array, " B"]:
    """How likely the reference is behind each response's own reasoning, without gradient."""
    shown = with_reference(free, rows, reasoning=reasoning)
    logp, _ = builders.score_tokens(policy, params, shown)
    return jax.lax.stop_gradient(how(logp, shown.mask))


def debiased(score: Float[Array, " B"], before: Float[Array, " B"]) -> Float[Array, " B"]:
    """``clip(score - before, 0, 1)``: what the reasoning adds to a reference that could be guessed.

    From "RLPR", arXiv:2506.18254, eq. 4.
    """
    return jnp.clip(score - before, 0.0, 1.0)


class Likelihood(NamedTuple):
    """Extras of a batch: rows whose reference is made likelier, and how much each counts."""

    shown: Referenced
    weight: Float[Array, " B"]


def with_likelihood(policy: Policy, loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of rollouts to which the reference's own likelihood is added, weighed by each response's reward.

    ``- mean_b R_b log p(y* | x, z_b)`` over the rows of ``Likelihood``; the weight has no gradient.

    From "Reinforcing General Reasoning without Verifiers" (VeriFree), arXiv:2505.21493, eq. 4.
    """

    def joined(params, batch):
        value, metrics = loss(params, batch)
        shown, weight = declared(Likelihood, batch.extras)
        logp, _ = builders.score_tokens(policy, params, shown)
        own = jnp.sum(jnp.where(shown.mask, logp, 0.0), axis=1)
        raised = reduce.scalars(jax.lax.stop_gradient(weight) * own)
        return value - raised, metrics | {"reference/raised": raised}

    return joined
