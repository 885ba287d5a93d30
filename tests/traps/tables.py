"""A policy that is a table of logits, and a whole online method around it: traps tested in milliseconds."""

import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import losses, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss
from jaxrl_llm.train.online import Online, init_state
from jaxrl_llm.types import Batch, Policy, Problems, Rewards, TokenTerms, Trajectories

VOCAB = 6
EOS = (1, 2)
NEW = 5


def table_policy(vocab: int = VOCAB) -> Policy:
    """``logits[b, t] = table[tokens[b, t]]``."""

    def one_hot(tokens):
        return jax.nn.one_hot(tokens, vocab, dtype=jnp.float32)

    return Policy(
        # the ends are made rarer, so that some sequences reach the limit
        init=lambda key: {"table": jax.random.normal(key, (vocab, vocab), jnp.float32).at[:, 1:3].add(-1.5)},
        hidden=lambda params, tokens, positions, segment_ids: one_hot(tokens),
        unembed=lambda params, hidden: hidden @ params["table"],
        init_cache=lambda batch, length: {},
        extend=lambda params, cache, tokens, positions, segment_ids, column: (one_hot(tokens), cache),
        repeat_cache=lambda cache, repeats: cache,
        vocab_size=vocab,
    )


@functools.cache
def params():
    return table_policy().init(jax.random.key(7))


def fresh_params():
    return jax.tree.map(jnp.copy, params())


@functools.cache
def problems(n: int = 6) -> Problems:
    tokens = np.zeros((n, 3), np.int32)
    tokens[:, 1], tokens[:, 2] = np.arange(n) % 3 + 3, 3
    return Problems(
        jnp.asarray(tokens), jnp.asarray(tokens > 0), {"wanted": jnp.asarray(tokens[:, 1])}, jnp.zeros((n,), jnp.int32)
    )


def rollout(params, tokens, valid, keys, ids, *, group_size=4, temperature=1.0, eos_ids=EOS) -> Trajectories:
    return generate(
        table_policy(), params, tokens, valid, keys, group_size=group_size, max_new_tokens=NEW, eos_ids=eos_ids,
        temperature=temperature, problem_ids=ids,
    )  # fmt: skip


def score(answers, trajectories: Trajectories) -> Rewards:
    """Share of the wanted token among the sampled ones."""
    hits = (trajectories.tokens == answers["wanted"][:, None]).astype(jnp.float32)
    return Rewards(reduce.sequences(hits, trajectories.mask, mode="mean"), jnp.ones((hits.shape[0],), bool))


def advantages(trajectories, rewards):
    values = group.group_normalized_advantages(rewards.value, trajectories.group_ids, valid=rewards.valid)
    return group.per_token(values, trajectories.mask)


def online(**changes) -> Online:
    policy = table_policy()
    settings = {
        "policy": policy, "problems": problems(), "sampler": make_epochs(), "prompts_per_step": 4, "group_size": 4,
        "rollout": rollout, "score": score, "estimate": make_estimate(policy, advantages),
        "loss": make_policy_loss(policy, clipped_policy_loss), "tx": optax.adam(1e-2),
    }  # fmt: skip
    return Online(**(settings | changes))


def start(method: Online, seed: int = 0, **extras):
    return init_state(method, fresh_params(), jax.random.key(seed), extras=extras)


def random_batch(rows: int = 8, length: int = 6, mode: str = "token_mean", seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    mask = jnp.asarray(rng.random((rows, length)) < 0.6).at[:, 0].set(False)
    old = jnp.asarray(-rng.random((rows, length)) * 3, jnp.float32)
    return Batch(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (rows, length)), jnp.int32),
        segment_ids=jnp.ones((rows, length), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length)),
        mask=mask, advantages=jnp.asarray(rng.normal(size=(rows, length)), jnp.float32), old_logp=old,
        sampler_logp=old, ref_logp=old, group_ids=jnp.arange(rows, dtype=jnp.int32) // 2,
        total=reduce.denominator(mask, mode=mode), extras={},
    )  # fmt: skip


def same(left, right):
    """Bitwise equality of two trees, typed keys included."""

    def plain(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a), plain(b)), left, right)


def policy_losses() -> list:
    """Every public loss of ``(logp, [old_logp,] advantages, mask)``, also those that are added later."""
    found = []
    for module in pkgutil.iter_modules(losses.__path__):
        for name, function in inspect.getmembers(
            importlib.import_module(f"jaxrl_llm.losses.{module.name}"), inspect.isfunction
        ):
            needed = {k for k, p in inspect.signature(function).parameters.items() if p.default is p.empty}
            if (
                function.__annotations__.get("return") is TokenTerms
                and function.__module__.endswith("." + module.name)
                and not name.startswith("_")
                and needed - {"old_logp"} == {"logp", "advantages", "mask"}
            ):
                found.append(function)
    return found
