"""Small worlds of token strings: a decoder made on the spot, a base trained from a behaviour, stages that train it.

A world fixes the lengths of prompt and response. Its data are functions of a key, ``draw(key, n) -> (prompts [N, P],
responses [N, T])``; behind the first end token of a response all tokens are end tokens. Everything is compiled, so that
all arms and seeds of an experiment take minutes.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm import reduce
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import heads as model_heads
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.grammar import Grammar
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import offline, seed_axis
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Stage, tabled
from jaxrl_llm.types import Key, Params, Policy, Problems, Rewards, Trajectories


class World(NamedTuple):
    """A decoder and the shape of its strings; an ``end`` beyond the vocabulary means that no token ends a response.

    A world of text has ``start``, the weights that were loaded: there a prompt is filled up on its left with ``PAD``,
    which is no token, and what lies behind the end of a response belongs to no row.
    """

    policy: Policy
    prompt_tokens: int
    response_tokens: int
    end: int
    start: Callable[[], Params] | None = None
    rate: float = 0.0  # of every optimiser on loaded weights, in the place of those for decoders made on the spot
    ends: tuple[int, ...] = ()  # all tokens that end a response, of which ``end`` is one


PAD = -1  # in the columns before a prompt of text
AT_ONCE = 256  # responses of text that are sampled or read together where many are


@lru_cache(maxsize=64)
def bound(function: Callable[..., Any], *first: Any, **named: Any) -> Callable[..., Any]:
    """``function`` with its task and other first arguments: the same object each time, so that arms share programs.

    A paper's measurement is a function ``measure(task, ..., params, key)``; what a plan holds is that function bound.
    """
    return partial(function, *first, **named)


class Rows(NamedTuple):
    """Whole sequences for ``builders.score_tokens``."""

    tokens: Int[Array, "N L"]
    positions: Int[Array, "N L"]
    segment_ids: Int[Array, "N L"]


def make_world(
    vocabulary: int, prompt_tokens: int, response_tokens: int, *, end: int | None = None, width: int = 32,
    layers: int = 1, heads: int = 2,
) -> World:  # fmt: skip
    """A decoder of about ten thousand parameters (at ``width`` 32) for strings of these sizes."""
    config = ModelConfig(
        family="qwen3", vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_layers=layers,
        num_heads=heads, num_kv_heads=heads, head_dim=16, tie_embeddings=True, qk_norm=True,
        max_positions=prompt_tokens + response_tokens,
    )  # fmt: skip
    return World(make_policy(config), prompt_tokens, response_tokens, vocabulary if end is None else end)


def first_params(world: World, key: Key) -> Params:
    """The weights that were loaded, or fresh ones."""
    return world.policy.init(key) if world.start is None else jax.tree.map(jnp.copy, world.start())


def whole(world: World, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Rows:
    """Prompt and response side by side; prompts of generated strings are all of full length."""
    tokens = jnp.concatenate([prompts, responses], axis=1)
    if world.start is not None:
        real = jnp.concatenate([prompts != PAD, counted(responses, world.end)], axis=1).astype(jnp.int32)
        return Rows(jnp.where(real > 0, tokens, world.end), jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0), real)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    return Rows(tokens, positions, jnp.ones_like(tokens))


def counted(responses: Int[Array, "N T"], end: int) -> Bool[Array, "N T"]:
    """True up to and including the first end token.

    >>> counted(jnp.array([[4, 9, 9], [4, 5, 6]]), 9).tolist()
    [[True, True, False], [True, True, True]]
    """
    ended = jnp.cumsum((responses == end).astype(jnp.int32), axis=1)
    return (ended == 0) | ((ended == 1) & (responses == end))


def rollout(world: World, params: Params, prompts: Array, keys: Key, *, samples: int, temperature: float = 1.0,
            problem_ids: Array | None = None, grammar: Grammar | None = None) -> Trajectories:  # fmt: skip
    """``samples`` responses to each prompt, side by side, with everything that training needs."""
    valid = jnp.ones(prompts.shape, bool) if world.start is None else prompts != PAD
    return generate(
        world.policy, params, prompts if world.start is None else jnp.where(valid, prompts, world.end), valid, keys,
        group_size=samples, max_new_tokens=world.response_tokens, eos_ids=world.ends or (world.end,),
        pad_id=world.end, temperature=temperature, problem_ids=problem_ids, early_exit=seed_axis.in_turn(),
        grammar=grammar,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _text_rollout(world: World, samples: int, temperature: float) -> Callable[..., Trajectories]:
    """Compiled once: what is measured of a text is no program of its own."""

    def roll(params, prompts, keys):
        return rollout(world, params, prompts, keys, samples=samples, temperature=temperature)

    return jax.jit(roll)


def sample(world: World, params: Params, prompts: Int[Array, "N P"], key: Key, *, samples: int = 1,
           temperature: float = 1.0) -> Int[Array, "R T"]:  # fmt: skip
    """Only the responses of ``rollout``; those of texts come ``AT_ONCE`` at a time, whose memory is that of a batch."""
    keys = sample_keys(key, 0, jnp.arange(prompts.shape[0]), samples)
    if world.start is not None:
        roll, step = _text_rollout(world, samples, temperature), max(1, AT_ONCE // samples)
        parts = [
            roll(params, prompts[k : k + step], keys[k * samples : (k + step) * samples])
            for k in range(0, prompts.shape[0], step)
        ]
        return jnp.concatenate([responses_of(world, part)[1] for part in parts])
    return rollout(world, params, prompts, keys, samples=samples, temperature=temperature).tokens[:, prompts.shape[1] :]


def responses_of(world: World, rows: Trajectories) -> tuple[Int[Array, "B P"], Int[Array, "B T"]]:
    """``(prompts, responses)`` of rollouts, for a judge of strings; whatever ends a text becomes ``end``."""
    asked, said = rows.tokens[:, : world.prompt_tokens], rows.tokens[:, world.prompt_tokens :]
    if world.start is None:
        return asked, said
    ended = ~rows.mask[:, world.prompt_tokens :] | jnp.isin(said, jnp.asarray(world.ends, jnp.int32))
    return jnp.where(rows.segment_ids[:, : world.prompt_tokens] > 0, asked, PAD), jnp.where(ended, world.end, said)


def spoken(world: World, responses: Int[Array, "N T"]) -> Bool[Array, "N T"]:
    """The tokens of a response up to its end, with which a text goes on to be filled up; all of a generated string."""
    return responses >= 0 if world.start is None else counted(responses, world.end)


def token_counts(world: World, responses: Int[Array, "*N T"]) -> int | Float[Array, "*N"]:
    """How many tokens a response has, its end inside; of generated strings all of them: one number."""
    if world.start is None:
        return world.response_tokens
    there = spoken(world, responses.reshape(-1, responses.shape[-1]))
    return jnp.sum(there.astype(jnp.float32), axis=1).reshape(responses.shape[:-1])


def over_tokens(world: World, values: Shaped[Array, "N T"], responses: Int[Array, "N T"]) -> Float[Array, ""]:
    """Mean of what is said of single tokens: of texts up to their ends, of generated strings over all columns."""
    there = () if world.start is None else (spoken(world, responses).reshape(-1),)
    return reduce.scalars(values.reshape(-1).astype(jnp.float32), *there)


def in_pieces(world: World, read: Callable[..., Array], *rows: Array) -> Array:
    """``read(*rows)``, which keeps rows apart; of texts ``AT_ONCE`` at a time, whose memory is that of a batch."""
    count = rows[0].shape[0]
    if world.start is None or count <= AT_ONCE:
        return read(*rows)
    return jnp.concatenate([read(*(x[k : k + AT_ONCE] for x in rows)) for k in range(0, count, AT_ONCE)])


def mean_hidden(
    world: World, params: Params, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]
) -> Float[Array, "N D"]:
    """Mean of the last hidden states over the response."""

    def read(prompts, responses):
        hidden = world.policy.hidden(params, *whole(world, prompts, responses))[:, world.prompt_tokens :]
        if world.start is None:
            return jnp.mean(hidden, axis=1)
        there = counted(responses, world.end).astype(jnp.float32)[:, :, None]
        return jnp.sum(hidden.astype(jnp.float32) * there, axis=1) / jnp.sum(there, axis=1)

    return in_pieces(world, read, prompts, responses)


def last_hidden(world: World, hidden: Float[Array, "N L D"], rows: Rows) -> Float[Array, "N 1 D"]:
    """The last state of each row: that of its last token, where texts are filled up behind their end."""
    if world.start is None:
        return hidden[:, -1:]
    return jnp.take_along_axis(hidden, model_heads.last_index(rows.segment_ids)[:, None, None], axis=1)


def token_logp(
    world: World, params: Params, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]
) -> Float[Array, "N T"]:
    """Log-probability of each response token; 0 behind the end."""
    if world.start is not None:
        return in_pieces(world, partial(_text_logp(world), params), prompts, responses)
    logp, _ = builders.score_tokens(world.policy, params, whole(world, prompts, responses))
    return jnp.where(counted(responses, world.end), logp[:, world.prompt_tokens :], 0.0)


@lru_cache(maxsize=4)
def _text_logp(world: World) -> Callable[..., Array]:
    def logp_of(params, prompts, responses):
        logp, _ = builders.score_tokens(world.policy, params, whole(world, prompts, responses))
        return jnp.where(counted(responses, world.end), logp[:, world.prompt_tokens :], 0.0)

    return jax.jit(logp_of)


def sum_logp(
    world: World, params: Params, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]
) -> Float[Array, " N"]:
    """Log-probability of each response."""
    return jnp.sum(token_logp(world, params, prompts, responses), axis=1)


def drift(
    world: World, params: Params, start: Params, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]
) -> Float[Array, ""]:
    """How far a policy is from another, in nats: the mean of ``log pi - log pi_start`` of its own responses."""
    both = [sum_logp(world, x, prompts, responses) for x in (params, start)]
    return reduce.scalars(both[0] - both[1])


@lru_cache(maxsize=32)
def make_supervised(world: World, rows_per_step: int, learning_rate: float) -> Offline:
    """Token mean of the negative log-likelihood of the table ``Tabled((prompts, responses))``."""

    def loss(params, extras, batch):
        prompts, responses = batch
        mask = counted(responses, world.end)
        value = -reduce.tokens(token_logp(world, params, prompts, responses), mask)
        return value, {"tokens/trained": jnp.sum(mask.astype(jnp.float32))}

    return Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(world.rate or learning_rate))


@lru_cache(maxsize=16)
def make_imitation(world: World, part: str = "") -> Callable[..., Any]:
    """The loss of ``table_stage`` for rows ``(prompts, responses, kept [N])``: imitation of those that are kept.

    Args:
      part: where the policy lies in the parameters, if they hold more.
    """

    def loss(params, extras, batch):
        prompts, responses, kept = batch
        mask = counted(responses, world.end) & kept[:, None]
        policy = params[part] if part else params
        value = -reduce.tokens(token_logp(world, policy, prompts, responses), mask)
        shown = {"rows/kept": reduce.scalars(kept.astype(jnp.float32))}
        return value, shown | {"tokens/trained": jnp.sum(mask.astype(jnp.float32))}

    return loss


@lru_cache(maxsize=32)
def make_table(draw: Callable[..., Any], rows: int) -> Callable[[Params, Key], dict[str, Any]]:
    """The ``extras`` of a supervised stage: ``rows`` draws of ``draw(key, n)``."""
    return lambda params, key: {"rows": draw(key, rows)}


def supervised_stage(
    world: World, draw: Callable[..., Any], *, steps: int, table: int = 2048, rows_per_step: int = 64,
    learning_rate: float = 1e-3,
) -> Stage:  # fmt: skip
    """Supervised training on ``table`` strings of ``draw(key, n)``."""
    return Stage(make_supervised(world, rows_per_step, learning_rate), steps, make_table(draw, table))


@lru_cache(maxsize=16)
def make_base(
    world: World, draw: Callable[..., Any], *, steps: int, table: int = 4096, rows_per_step: int = 64,
    learning_rate: float = 3e-3, start: Callable[[], Params] | None = None,
    schedule: Callable[[float, int], Any] | None = None,
) -> Callable[[Key], Params]:  # fmt: skip
    """The ``init`` of a plan: a decoder trained on a behaviour. It counts in no budget: every arm starts from it.

    Args:
      start: weights to train further; None: fresh ones, or those that were loaded.
      schedule: ``(learning rate, steps) ->`` the rate of every step, an optax schedule; None: it stays.
    """
    method = make_supervised(world, rows_per_step, learning_rate)
    if schedule is not None:
        method = method._replace(tx=optax.adam(schedule(world.rate or learning_rate, steps)))

    def init(key):
        first, data, run = jax.random.split(key, 3)
        rows = {"rows": draw(data, table)}
        params = first_params(world, first) if start is None else jax.tree.map(jnp.copy, start())
        state = offline.init_state(method, params, run, extras=rows)
        return offline.scan_steps(method, state, steps)[0].params

    return init


def to_nothing(rate: float, steps: int) -> optax.Schedule:
    """A rate that comes down to 0 along a line: what a base has all but learned it then keeps."""
    return optax.linear_schedule(rate, 0.0, steps)


@lru_cache(maxsize=64)
def rows_of(make_rows: Callable[[Params, Key], Any]) -> Callable[[Params, Key], dict[str, Any]]:
    """The ``extras`` of ``table_stage``."""
    return lambda params, key: {"rows": make_rows(params, key)}


def table_stage(
    make_rows: Callable[[Params, Key], Any], loss: Callable[..., Any], *, steps: int, rows_per_step: int,
    learning_rate: float,
) -> Stage:  # fmt: skip
    """A ``loss(params, extras, batch)`` of a table that is made when the stage begins, from the parameters of then."""
    method = Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(learning_rate))
    return Stage(method, steps, rows_of(make_rows))


def learned_from_prompts(
    world: World, prompts: Int[Array, "N P"], score: Callable[..., Any], *, estimate: Callable, loss: Callable, tx,
    prompts_per_step: int, group_size: int, temperature: float = 1.0, **slots: Any,
) -> Online:  # fmt: skip
    """The ``Online`` of a world: uniform draws from a table of prompts; ``score(answers, trajectories)``."""
    rows = prompts.shape[0]
    valid = jnp.ones(prompts.shape, bool) if world.start is None else prompts != PAD
    table = Problems(prompts, valid, {}, jnp.zeros((rows,), jnp.int32))

    def roll(params, tokens, valid, keys, problem_ids):
        return rollout(
            world, params, tokens, keys, samples=group_size, temperature=temperature, problem_ids=problem_ids
        )

    small, means = "its world is embedded and small", "its judge and its losses take means over the batch"
    why = small if world.start is None else means
    parts = {
        "policy": world.policy, "problems": table, "sampler": make_uniform(), "prompts_per_step": prompts_per_step,
        "group_size": group_size, "rollout": roll, "score": score, "whole_batch": why,
    }  # fmt: skip
    return Online(**parts | {"estimate": estimate, "loss": loss, "tx": tx} | slots)


def score_of(world: World, reward: Callable[[Array, Array], Array]) -> Callable[..., Rewards]:
    """The ``score`` of a ``reward(prompts, responses)`` that is always valid."""

    def score(answers: Any, rows: Trajectories) -> Rewards:
        value = reward(*responses_of(world, rows)).astype(jnp.float32)
        return Rewards(value, jnp.ones(value.shape, bool))

    return score


def of_part(online: Online, part: str) -> Online:
    """A method of plain parameters as one of ``{part: ..., ...}``."""
    return online._replace(
        estimate=lambda params, *rest: online.estimate(params[part], *rest),
        loss=lambda params, batch: online.loss(params[part], batch),
        actor=lambda state: state.params[part],
    )


def grpo_stage(
    world: World, prompts: Int[Array, "N P"], reward: Callable[[Array, Array], Array], *, steps: int,
    prompts_per_step: int, group_size: int, learning_rate: float, part: str = "",
) -> Stage:  # fmt: skip
    """Plain GRPO on a ``reward(prompts, responses)``.

    Args:
      part: where the policy lies in the parameters, if they hold more.
    """
    advantages = builders.per_response(group_normalized_advantages)
    online = learned_from_prompts(
        world, prompts, score_of(world, reward), estimate=builders.make_estimate(world.policy, advantages),
        loss=builders.make_policy_loss(world.policy, clipped_policy_loss), tx=optax.adam(learning_rate),
        prompts_per_step=prompts_per_step, group_size=group_size,
    )  # fmt: skip
    return Stage(of_part(online, part) if part else online, steps)
