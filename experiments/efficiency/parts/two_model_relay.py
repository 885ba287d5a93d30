"""Two models in a row: a large one writes the reasoning, a small frozen one reads it and answers.

The reasoning ends where the answer would begin, at a mark of one token (``#``). Only its tokens belong to the large
model's response; what the small model writes is environment.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts.beside import load_beside
from experiments.parts.long_winded import MARK, written_over
from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import parts
from jaxrl_llm.run.parts import Model
from jaxrl_llm.train import seed_axis
from jaxrl_llm.types import Key, Params, Rewards, Trajectories

ANSWER_TOKENS = 4


def reasoning_tokens(model: Model, problems: list[Problem], times: int = 2) -> Float[Array, " N"]:
    """Tokens of each problem's work so many ``times``, its mark included: the length that a share refers to."""
    texts = [written_over(p, times).rsplit(MARK, 1)[0] + MARK for p in problems]
    return jnp.asarray([len(model.tokenizer.encode(text)) for text in texts], jnp.float32)


def heldout_problems(settings: OnlineSettings) -> list[Problem]:
    """The problems behind ``bench(settings).heldout`` as text."""
    return tables.make_split(chain, split="heldout", n=settings.eval_problems, seed=0, levels=settings.levels or None)


class Relay(NamedTuple):
    """The model that reasons as it was loaded, the frozen one that answers, and the mark between them."""

    large: Model
    small: Model
    mark: int
    judge: Callable[[Any, Trajectories], Rewards]


def make_relay(settings: OnlineSettings, answerer: str = "") -> Relay:
    """The bench's model with one that answers: from a mark on, it can do nothing else. Loaded once.

    Args:
      answerer: a bundled model or a folder, of the same vocabulary; empty: the bench's own base model.

    Raises:
      UserError: where answers are judged on the host only, for a mesh, or a model that does not fit.
    """
    return _relay(recipes.bench_identity(settings), answerer)


@lru_cache(maxsize=2)
def _relay(identity: tuple, answerer: str) -> Relay:
    settings = OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    parts.refuse_mesh(found.model, "its frozen answerer is whole in the program that judges")
    judge, small = curricula.device_score(found), found.model
    if answerer and answerer != settings.model:
        row = found.train.tokens.shape[1] + settings.max_new_tokens + 1 + ANSWER_TOKENS
        small = load_beside("--answerer", answerer, found.model, tokens=row)
    return Relay(found.model, small, found.model.tokenizer.encode(MARK)[0], judge)


def make_reasoner(relay: Relay, *, group_size: int, max_new_tokens: int, temperature: float) -> Callable:
    """The ``rollout`` slot of the large model: its responses end with the mark (or with an end token)."""
    model = relay.large

    def rollout(params, tokens, valid, keys, problem_ids):
        return generate(
            model.policy, params, tokens, valid, keys, group_size=group_size, max_new_tokens=max_new_tokens,
            temperature=temperature, eos_ids=(*model.tokenizer.eos_ids, relay.mark), pad_id=model.tokenizer.pad_id,
            problem_ids=problem_ids, early_exit=seed_axis.in_turn(),
        )  # fmt: skip

    return rollout


def shortened(rows: Trajectories, tokens: Float[Array, " B"]) -> Trajectories:
    """At most so many of each response's first ``tokens``, rounded up: a cut that looks at nothing."""
    kept = given_responses.prefix(rows.mask, jnp.ceil(tokens).astype(jnp.int32))
    return rows._replace(mask=kept, segment_ids=jnp.where(rows.mask & ~kept, 0, rows.segment_ids))


def handed_over(relay: Relay, rows: Trajectories) -> tuple[Int[Array, "B L"], Bool[Array, "B L"]]:
    """The answerer's prompts: question, reasoning without its end, mark."""
    ends = jnp.asarray([*relay.large.tokenizer.eos_ids, relay.mark], jnp.int32)
    ended = jnp.any(rows.tokens[:, :, None] == ends[None, None, :], axis=2)
    keep = (rows.segment_ids > 0) & ~(rows.mask & ended)
    count = rows.tokens.shape[0]
    tokens = jnp.concatenate([rows.tokens, jnp.full((count, 1), relay.mark, jnp.int32)], axis=1)
    return given_responses.left_padded(tokens, jnp.concatenate([keep, jnp.ones((count, 1), bool)], axis=1))


def answered(relay: Relay, params: Params, rows: Trajectories, answers: Any) -> Rewards:
    """What the greedy answers of the small model with these parameters earn; ``answers`` row for row.

    From "HAWKEYE: Model Collaboration for Efficient Reasoning", arXiv:2504.00424.
    """
    tokens, valid = handed_over(relay, rows)
    keys = jax.random.split(jax.random.key(0), tokens.shape[0])  # greedy: they are not used
    model = relay.small
    said = generate(
        model.policy, params, tokens, valid, keys, group_size=1, max_new_tokens=ANSWER_TOKENS, temperature=0.0,
        eos_ids=model.tokenizer.eos_ids, pad_id=model.tokenizer.pad_id, early_exit=seed_axis.in_turn(),
    )  # fmt: skip
    # the verifier reads from the mark on
    return relay.judge(answers, said._replace(mask=said.mask.at[:, tokens.shape[1] - 1].set(True)))


def price(
    reasoning: Float[Array, " B"], answer: float, *, large_price: float, small_price: float
) -> Float[Array, " B"]:
    """Cost of each response pair: tokens of either model times its price a token."""
    return large_price * reasoning + small_price * answer


def measure_of_pair(
    settings: OnlineSettings, *, answerer: str = "", times: int = 2, read_share: float = 0.35
) -> Callable[[Params, Key], dict[str, Array]]:
    """``measure(params, key)`` on held-out problems: accuracy of the pair, accuracy without any reasoning and with its
    beginning alone, its length (as a share of the long-winded one, too) and its cost at a tenth of the price for the
    answerer's tokens.

    Args:
      answerer: as in ``make_relay``.
      times: how often the long-winded reasoning has the work.
      read_share: of the long-winded reasoning, what the answerer reads at most for ``eval/cut``; see ``shortened``.
    """
    sampled = settings.temperature, settings.eval_samples
    return _measure(recipes.bench_identity(settings), answerer, *sampled, times, read_share)


@lru_cache(maxsize=8)
def _measure(identity: tuple, answerer: str, temperature: float, samples: int, times: int, read_share: float):
    settings = OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    relay, problems = make_relay(settings, answerer), found.heldout
    reference = reasoning_tokens(found.model, heldout_problems(settings), times)
    roll = make_reasoner(relay, group_size=samples, max_new_tokens=settings.max_new_tokens, temperature=temperature)

    def measure(params, key):
        ids = jnp.arange(problems.tokens.shape[0], dtype=jnp.int32)
        rows = roll(params, problems.tokens, problems.valid, sample_keys(key, 0, ids, samples), ids)
        own = jax.tree.map(lambda x: x[rows.problem_ids], problems.answers)
        length = jnp.sum(rows.mask.astype(jnp.float32), axis=1)
        long = reference[rows.problem_ids]

        def accuracy(rows):
            right = answered(relay, relay.small.params, rows, own).value > 0.5
            return reduce.scalars(right.astype(jnp.float32))

        cost = price(length, float(ANSWER_TOKENS), large_price=10.0, small_price=1.0)
        return {
            "eval/accuracy": accuracy(rows),
            "eval/cut": accuracy(shortened(rows, read_share * long)),
            "eval/alone": accuracy(shortened(rows, jnp.zeros_like(long))),
            "eval/tokens": reduce.scalars(length),
            "eval/share": reduce.scalars(length / long),
            "eval/cost": reduce.scalars(cost),
        }

    return measure


def score_by_answerer(
    relay: Relay, reference: Float[Array, " N"], penalty: Callable[[Array, Array], Array]
) -> Callable[[Any, Trajectories], Rewards]:
    """The ``score`` slot: the answerer's verdict plus ``penalty(tokens, reference tokens)`` of the reasoning."""

    def score(answers, rows):
        verdict = answered(relay, relay.small.params, rows, answers)
        length = jnp.sum(rows.mask.astype(jnp.float32), axis=1)
        return Rewards(verdict.value + penalty(length, reference[rows.problem_ids]), verdict.valid)

    return score
