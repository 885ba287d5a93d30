"""A plan carried out: the six calls of PPO on the devices where the plan has them, weights moved where it says so.

The programs are those that are planned (``phases``); four models of one shape, scalar heads left out as in the cost
model: the reward model and the critic score tokens too. So a plan's times are real, what it learns is not.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.systems.parts import ppo_calls
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.planning.phases import decode_phase, kernels, prefill_phase, score_phase, update_phase
from jaxrl_llm.planning.reshard_cost import Place
from jaxrl_llm.planning.work import Work
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.types import Batch, Key, Params, TrainState

Plan = tuple[Place, ...]  # of every call of ``ppo_calls.CALLS``
MOVES = ("move_actor", "move_critic")


class Job(NamedTuple):
    """What is run: a shape, an iteration in one part (no microbatches, one wave of sampling), a place for each call."""

    config: ModelConfig
    work: Work
    plan: Plan


class Given(NamedTuple):
    """On the host: weights that all models begin with, prompts and an empty batch."""

    params: Params
    prompts: dict[str, np.ndarray]
    seeds: np.ndarray
    batch: Batch


class Models(NamedTuple):
    """The models of PPO where they train or, if they do not, where they score."""

    actor: TrainState
    critic: TrainState
    reward: Params
    reference: Params


def moved(plan: Plan) -> list[tuple[Place, Place]]:
    """From where to where the weights of the actor and of the critic go before they sample or score."""
    return [
        (plan[ppo_calls.TRAIN_ACTOR], plan[ppo_calls.GENERATE]),
        (plan[ppo_calls.TRAIN_CRITIC], plan[ppo_calls.VALUE]),
    ]


def mesh_of(place: Place) -> Mesh:
    """On the devices of that number."""
    return place.sizes.mesh([jax.devices()[k] for k in place.devices])


@lru_cache(maxsize=64)
def _generation(config: ModelConfig, work: Work, place: Place) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``(params, prompts, seeds) -> tokens``: prompts read, responses drawn, in one program."""
    mesh = mesh_of(place)
    prefill, decode = (make(config, mesh, work) for make in (prefill_phase, decode_phase))
    policy = make_policy(config, compute_dtype=work.compute_dtype, **kernels(mesh))
    seeds = decode.arguments[1]["seeds"]

    def run(params, prompts, seeds):
        return generate(
            policy, params, prompts["tokens"], prompts["valid"], jax.vmap(jax.random.key)(seeds),
            group_size=work.group, max_new_tokens=work.response, pad_id=0, early_exit=False,
            eos_ids=(config.vocab_size,),  # which no token is: responses are as long as planned
        ).tokens  # fmt: skip

    arguments = *prefill.arguments, seeds
    return jax.jit(run).lower(*arguments).compile(), arguments


@lru_cache(maxsize=256)
def _training(config: ModelConfig, work: Work, place: Place, make: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    phase = make(config, mesh_of(place), work)
    return phase.lower().compile(), phase.arguments


def program(job: Job, call: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call compiled where the plan has it, and its abstract arguments; equal places share it."""
    if call == ppo_calls.GENERATE:
        return _generation(job.config, job.work, job.plan[call])
    make = update_phase if call in (ppo_calls.TRAIN_ACTOR, ppo_calls.TRAIN_CRITIC) else score_phase
    return _training(job.config, job.work, job.plan[call], make)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def given(config: ModelConfig, work: Work, key: Key) -> Given:
    """Random weights and prompts of full length.

    Raises:
      ValueError: for an iteration in several parts, whose programs are others.
    """
    if work.microbatches != 1 or work.rollout_rows != work.rows:
        raise ValueError(
            f"microbatches={work.microbatches}, rollout_rows={work.rollout_rows}: a plan is carried out in one part; "
            f"choose microbatches=1 and rollout_rows={work.rows}"
        )
    whole = work.rows, work.length
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    drawn = rng.integers(0, config.vocab_size, (work.rows // work.group, work.prompt)).astype(np.int32)
    columns = np.tile(np.arange(work.length, dtype=np.int32), (work.rows, 1))
    ones, zeros = np.ones(whole, np.int32), np.zeros(whole, np.float32)
    prompts = {"tokens": drawn, "valid": np.ones(drawn.shape, bool)}
    mask = columns >= work.prompt
    batch = Batch(
        tokens=np.zeros(whole, np.int32), segment_ids=ones, positions=columns, mask=mask, advantages=zeros,
        old_logp=zeros, sampler_logp=zeros, ref_logp=zeros,
        group_ids=np.arange(work.rows, dtype=np.int32) // work.group * work.group, total=np.float32(mask.sum()),
        extras={},
    )  # fmt: skip
    params = jax.device_get(make_policy(config, compute_dtype=work.compute_dtype).init(key))
    return Given(params, prompts, np.arange(work.rows, dtype=np.uint32), batch)


def begin(job: Job, start: Given) -> Models:
    """The models where the plan trains them or keeps them."""
    state = TrainState(start.params, optax.adamw(1e-6).init(start.params), jnp.int32(0), jax.random.key(0), (), {})
    where = [_shardings(program(job, call)[1][0]) for call in range(len(ppo_calls.CALLS))]
    # states are donated at every update: none may share a buffer with another one, or with the host
    trained = (
        jax.tree.map(jnp.copy, jax.device_put(state, where[call]))
        for call in (ppo_calls.TRAIN_ACTOR, ppo_calls.TRAIN_CRITIC)
    )
    kept = (jax.device_put(start.params, where[call]) for call in (ppo_calls.REWARD, ppo_calls.REFERENCE))
    return Models(*trained, *kept)


def _on(job: Job, start: Given, call: int, held: Any, **rows: Any) -> Any:
    """A call on its place; rows go there first."""
    run, (_, batch) = program(job, call)
    return run(held, jax.device_put(start.batch._replace(**rows), _shardings(batch)))


def iterate(
    job: Job, start: Given, models: Models, clock: dict[str, float] | None = None, *,
    now: Callable[[], float] = time.perf_counter,
) -> Models:  # fmt: skip
    """One iteration; nothing waits but for its data.

    Args:
      clock: where given, every call and move ends before the next begins, and its seconds are written there.
      now: what time it is.
    """

    def timed(name: str, run: Callable[..., Any], *arguments: Any, **rows: Any) -> Any:
        if clock is None:
            return run(*arguments, **rows)
        began = now()
        out = jax.block_until_ready(run(*arguments, **rows))
        clock[name] = now() - began
        return out

    def put(which: int, params: Params, call: int) -> Params:
        before, after = moved(job.plan)[which]
        if before == after:
            return params
        return timed(MOVES[which], jax.device_put, params, _shardings(program(job, call)[1][0]))

    def sample(params: Params) -> Any:
        run, (_, *rows) = program(job, ppo_calls.GENERATE)
        return run(params, *jax.device_put((start.prompts, start.seeds), _shardings(tuple(rows))))

    def score(call: int, params: Params) -> Any:
        return timed(ppo_calls.CALLS[call], _on, job, start, call, params, tokens=tokens)

    tokens = timed("generate", sample, put(0, models.actor.params, ppo_calls.GENERATE))
    reward, reference = score(ppo_calls.REWARD, models.reward), score(ppo_calls.REFERENCE, models.reference)
    value = score(ppo_calls.VALUE, put(1, models.critic.params, ppo_calls.VALUE))
    rows = {"tokens": tokens, "advantages": reward, "ref_logp": reference, "sampler_logp": value}
    actor, _ = timed("train_actor", _on, job, start, ppo_calls.TRAIN_ACTOR, models.actor, **rows)
    critic, _ = timed("train_critic", _on, job, start, ppo_calls.TRAIN_CRITIC, models.critic, **rows)
    return models._replace(actor=actor, critic=critic)
