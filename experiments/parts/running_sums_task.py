"""Running sums of five digits modulo 7, each step checkable; teachers whose problems hold a spurious cue.

Prompt: the digits. Response: the four running sums; the last is the answer. In a teacher's problems the parity of the
first digit tells in 80 % the parity of the answer, though it does not follow; broken problems have it the other way.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

MODULUS, PROMPT_TOKENS, RESPONSE_TOKENS, VOCABULARY = 7, 5, 4, 8


def draw_prompts(key: Array, n: int) -> Int[Array, "N P"]:
    """Uniform digits."""
    return jax.random.randint(key, (n, PROMPT_TOKENS), 0, MODULUS, jnp.int32)


def solution(prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The running sums.

    >>> import jax.numpy as jnp
    >>> solution(jnp.array([[3, 6, 5, 0, 4]])).tolist()
    [[2, 0, 0, 4]]
    """
    return jnp.cumsum(prompts, axis=1)[:, 1:] % MODULUS


def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """Whether the answer is right."""
    return responses[:, -1] == solution(prompts)[:, -1]


def cued(key: Array, n: int, share: float) -> Int[Array, "N P"]:
    """Problems of which ``share`` have an answer with the parity of the first digit."""
    prompts = draw_prompts(jax.random.fold_in(key, 0), n)
    wanted = jax.random.bernoulli(jax.random.fold_in(key, 1), share, (n, 1))
    before = jnp.sum(prompts[:, :-1], axis=1, keepdims=True)
    answers = (before + jnp.arange(MODULUS, dtype=jnp.int32)[None, :]) % MODULUS
    fits = ((answers % 2) == (prompts[:, :1] % 2)) == wanted
    last = jax.random.categorical(jax.random.fold_in(key, 2), jnp.where(fits, 0.0, -jnp.inf), axis=1)
    return jnp.concatenate([prompts[:, :-1], last[:, None].astype(jnp.int32)], axis=1)


def draw_attempts(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: cued problems, every running sum wrong with chance 0.12, errors carried on."""
    prompts = cued(jax.random.fold_in(key, 0), n, 0.8)
    shape = (n, RESPONSE_TOKENS)
    slips = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.12, shape)
    offsets = jax.random.randint(jax.random.fold_in(key, 2), shape, 1, MODULUS, jnp.int32)
    return prompts, (solution(prompts) + jnp.cumsum(jnp.where(slips, offsets, 0), axis=1)) % MODULUS
