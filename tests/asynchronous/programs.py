"""Small programs for the roles, and faults for the workers that run them."""

import os
import signal
import time
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.parts import running_sums_task as toy
from experiments.parts import strings
from jaxrl_llm.asynchronous import roles
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import lora
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rollout.generate import go_on
from jaxrl_llm.train import host
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.online import init_state
from jaxrl_llm.types import Rewards

WORLD = strings.make_world(toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, width=16, heads=1)
ESTIMATE = partial(builders.make_estimate, WORLD.policy, builders.per_response(lambda v, ids, valid: v - 0.5))


@lru_cache(maxsize=1)
def method():
    """Two groups of two, plain gradient descent."""
    return strings.learned_from_prompts(
        WORLD, toy.draw_prompts(jax.random.key(1), 16), strings.score_of(WORLD, toy.right),
        estimate=ESTIMATE(),
        loss=builders.make_policy_loss(WORLD.policy, clipped_policy_loss, anchor=builders.sampler_anchor),
        tx=optax.sgd(0.5), prompts_per_step=2, group_size=2,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _params():
    return jax.tree.map(np.asarray, jax.jit(WORLD.policy.init)(jax.random.key(0)))


def start():
    """The state before the first update, always the same."""
    return init_state(method(), jax.tree.map(jnp.array, _params()), jax.random.key(3))


@lru_cache(maxsize=1)
def adapted():
    """The same with an adapter of rank 2 that alone trains, and its first state."""
    config = ModelConfig(
        family="qwen3", vocab_size=toy.VOCABULARY, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=16, tie_embeddings=True, qk_norm=True,
        max_positions=toy.PROMPT_TOKENS + toy.RESPONSE_TOKENS,
    )  # fmt: skip
    spec = lora.Lora(2, alpha=64.0)
    policy = lora.make_policy(WORLD.policy, config, spec)
    world, thin = WORLD._replace(policy=policy), lora.init(config, spec, jax.random.key(5))
    own = strings.learned_from_prompts(
        world, toy.draw_prompts(jax.random.key(1), 16), strings.score_of(world, toy.right),
        estimate=partial(builders.make_estimate, policy, builders.per_response(lambda v, ids, valid: v - 0.5))(),
        loss=builders.make_policy_loss(policy, clipped_policy_loss, anchor=builders.sampler_anchor),
        tx=optax.sgd(0.5), prompts_per_step=2, group_size=2,
    )._replace(trained="lora")  # fmt: skip

    def begin():
        return init_state(own, jax.tree.map(jnp.array, {"base": _params(), "lora": thin}), jax.random.key(3))

    return own, begin


def judge(rows) -> Rewards:
    """A verifier on the host: how much of the response is low digits."""
    low = (np.asarray(rows.tokens)[:, toy.PROMPT_TOKENS :] < 3).mean(axis=1)
    return Rewards(low.astype(np.float32), np.ones(low.shape, bool))


@lru_cache(maxsize=1)
def program() -> roles.Program:
    """The healthy one."""
    return roles.make_program(method(), start, judge)


@lru_cache(maxsize=1)
def wanted(steps):
    """Parameters and metrics of the host loop."""
    state, history = host.run(host.make_host_loop(method(), judge), start(), steps)
    return jax.tree.map(np.asarray, state.params), history


@lru_cache(maxsize=1)
def in_parts() -> roles.Program:
    """Two tokens, then one and one more."""
    short = WORLD._replace(response_tokens=2)

    def roll(params, tokens, valid, keys, ids):
        return strings.rollout(short, params, tokens, keys, samples=2, problem_ids=ids)

    def later(done):
        return partial(go_on, WORLD.policy, done=done, max_new_tokens=1, eos_ids=(WORLD.end,), pad_id=WORLD.end)

    return roles.make_program(method()._replace(rollout=roll), start, judge, go_on=(later(2), later(3)))


def penalised():
    """Measures the distance to the first weights, whose log-probabilities are not the learner's work."""
    estimate = ESTIMATE(reference=lambda extras: {}, score=roles.given_reference)
    loss = builders.make_policy_loss(
        WORLD.policy, clipped_policy_loss, anchor=builders.sampler_anchor, diagnostics=builders.reference_kl
    )
    return method()._replace(estimate=estimate, loss=loss)


@lru_cache(maxsize=1)
def with_reference() -> roles.Program:
    """``penalised`` with a reference scorer."""
    score = jax.jit(lambda rows: builders.score_tokens(WORLD.policy, jax.tree.map(jnp.array, _params()), rows)[0])
    return roles.make_program(penalised(), start, judge, reference=score)


# faults: wrapped around the work of a role, they run where the role runs


def killed_before(function, *arguments):
    """The kernel's killer comes first."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_after(function, *arguments):
    """The work is done, and nobody hears of it."""
    function(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


def left_before(function, *arguments):
    """The death of a thread."""
    raise SystemExit("killed")


def left_after(function, *arguments):
    """The death of a thread behind its work."""
    function(*arguments)
    raise SystemExit("killed")


def raising(function, *arguments):
    """An environment with a mistake in it."""
    raise KeyError("the shop has no such item")


def hanging(function, *arguments):
    """Longer than any limit of a test."""
    time.sleep(600)


def slowed(seconds, function, *arguments):
    """As always, but late."""
    time.sleep(seconds)
    return function(*arguments)


def make_faulty(kind, faults, *, cut_at=(), sender_dies=None):
    """A crew of ``kind`` in which something happens to some calls.

    Args:
      faults: ``{(name of the function, number of its call, from 1): wrapper}``; number 0 is every call by the first
        worker of its role.
      cut_at: numbers of the requests for weights at which the line breaks.
      sender_dies: ``(number of the request, file)``: whoever answers it is killed, once; the file tells the next.
    """

    class Faulty(kind):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.counts, self.firsts, self.work = {}, {}, {}

        def call(self, name, function, *arguments):
            what = function.__name__
            number = self.counts[what] = self.counts.get(what, 0) + 1
            done = self.work.setdefault(what, {})
            done[name] = done.get(name, 0) + 1
            first = self.firsts.setdefault(what, name) == name
            wrapper = faults.get((what, number)) or (faults.get((what, 0)) if first else None)
            return super().call(name, partial(wrapper, function) if wrapper else function, *arguments)

        def aside(self, name, function, timeout_s):
            if sender_dies:
                function = partial(dying, sender_dies, function)
            fetch = super().aside(name, function, timeout_s)
            return partial(breaking, frozenset(cut_at), fetch) if cut_at else fetch

    return Faulty


ASKED = []  # requests for weights of this process


def breaking(cut_at, fetch, version, names):
    """A line that breaks at some requests."""
    ASKED.append(names)
    if len(ASKED) in cut_at:
        raise ConnectionError("the line broke")
    return fetch(version, names)


def dying(when, function, *arguments):
    """A sender that is killed at a request, unless one was before."""
    number, path = when
    ASKED.append(arguments[-1])
    if len(ASKED) == number and not os.path.exists(path):
        open(path, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments)
