"""The two slots for methods with a memory: whose samples train, and what the state keeps between iterations."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train import fused, parity
from jaxrl_llm.train.methods.builders import make_policy_loss, mismatch_weights
from jaxrl_llm.train.online import answers_of, begin, estimated, iterate
from jaxrl_llm.train.step import make_update
from tests import close
from tests.close import doubles
from tests.traps.tables import VOCAB, fresh_params, online, same, start, table_policy


@pytest.mark.slow
def test_a_stale_actor_samples_with_the_weights_of_the_last_synchronisation():
    method = online(**recipes.stale_actor(every=2))
    state, states = start(method, behaviour=fresh_params()), []
    for _ in range(3):
        states.append(state)
        state, _ = iterate(method, state)
    # iterations 0 and 1 sample with the first weights, iteration 2 with those after iteration 1
    same(states[1].extras["behaviour"], states[0].params)
    assert np.abs(np.asarray(states[1].params["table"] - states[0].params["table"])).max() > 1e-4
    same(states[2].extras["behaviour"], states[2].params)
    old = begin(online(), states[1]._replace(params=states[0].params)).trajectories
    same(begin(method, states[1]).trajectories, old)


def test_every_step_synchronised_is_on_policy():
    method = online(**recipes.stale_actor(every=1))
    state, metrics = fused.run(method, start(method, behaviour=fresh_params()), 3)
    plain, plain_metrics = fused.run(online(), start(online()), 3)
    same(state.params, plain.params)
    same(metrics, plain_metrics)
    with pytest.raises(ValueError, match="every=0"):
        recipes.stale_actor(every=0)


def test_remember_sees_the_finished_iteration():
    def remember(state, batch, trajectories, rewards):
        seen = state.extras["seen"].at[state.step - 1].set(jnp.sum(rewards.value))
        return state.extras | {"seen": seen}

    method = online(remember=remember)
    state, metrics = fused.run(method, start(method, seen=jnp.zeros(3)), 3)
    rows = method.prompts_per_step * method.group_size
    close.assert_near(state.extras["seen"], metrics["reward/mean"] * rows, terms=rows, magnitude=rows)


def test_token_weights_scale_the_loss_and_carry_no_gradient():
    policy = table_policy()

    def two(weight):
        loss = make_policy_loss(policy, clipped_policy_loss, token_weights=weight)
        method = online(loss=loss, max_grad_norm=None)
        return fused.run(method, start(method), 1)

    half, metrics = two(lambda logp, entropy, batch: 0.5 * jnp.exp(logp - jax.lax.stop_gradient(logp)))
    whole, plain = two(None)
    for name in ("grad/norm", "loss/total"):  # a factor of exactly 1/2 rounds nothing, a sum in another order does
        tokens = float(plain["tokens/generated"][0])
        close.assert_near(metrics[name][0], 0.5 * float(plain[name][0]), terms=int(tokens) + policy.vocab_size)
    assert half.params["table"].shape == whole.params["table"].shape


def test_mismatch_weights_by_hand():
    """The trainer gives the sampled tokens 2, 1/2 and 9 times the sampler's probability; 9 is cut to the cap."""
    sampler, mask = jnp.log(jnp.array([[0.4, 0.4, 0.1, 0.1]])), jnp.array([[True, True, True, False]])
    batch = types.SimpleNamespace(sampler_logp=sampler, mask=mask)
    logp = sampler + jnp.log(jnp.array([[2.0, 0.5, 9.0, 9.0]]))
    close.assert_near(mismatch_weights(cap=3.0)(logp, None, batch), [[2.0, 0.5, 3.0, 0.0]])
    close.assert_near(mismatch_weights()(sampler, None, batch), [[1.0, 1.0, 1.0, 0.0]])


def _by_hand(method, parts, passes, enough=lambda metrics: False):
    """Updates one after another, of a part of random rows each, until one is found enough."""
    state = start(method)
    drawn = begin(method, state)
    rewards = method.score(answers_of(method, drawn.trajectories), drawn.trajectories)
    batch = estimated(method, state, drawn.trajectories, rewards)
    update = jax.jit(make_update(method.loss, method.tx, max_grad_norm=method.max_grad_norm))
    key = jax.random.fold_in(jax.random.fold_in(state.key, 0x4B19), state.step)
    found, rows = [], batch.mask.shape[0]
    for k in range(passes * parts):
        order = np.asarray(jax.random.permutation(jax.random.fold_in(key, k // parts), rows)).reshape(parts, -1)
        some = jax.tree.map(lambda x, mine=order[k % parts]: x if x.ndim == 0 else x[mine], batch)
        part = some._replace(total=jnp.sum(some.mask.astype(jnp.float32)))
        new, metrics = update(state, part if parts > 1 else batch)
        found.append(metrics)
        if enough(metrics):
            break
        state = new
    return state, found


def same_table(left, right):
    close.assert_near(left.params["table"], right.params["table"], terms=VOCAB)


TOKENS = functools.partial(reduce.denominator, mode="token_mean")


def test_minibatches_are_parts_of_random_rows_in_every_pass():
    method = online(tx=optax.sgd(0.5), minibatches=4, updates_per_rollout=2, divisor=TOKENS)
    state, found = _by_hand(method, 4, 2)
    after, metrics = jax.jit(functools.partial(iterate, method))(start(method))
    same_table(after, state)
    assert float(metrics["update/made"]) == 1.0
    close.assert_near(metrics["loss/total"], np.mean([m["loss/total"] for m in found]))
    with pytest.raises(ValueError, match="minibatches=5 does not divide the batch of"):
        jax.eval_shape(functools.partial(iterate, method._replace(minibatches=5)), start(method))
    with pytest.raises(ValueError, match="minibatches=4 needs divisor="):
        jax.eval_shape(functools.partial(iterate, method._replace(divisor=None)), start(method))


def test_figures_of_the_first_update_do_not_see_what_the_updates_do():
    """How far the sampler lies from the policy that it stands for is the same however many updates follow."""
    method = online(tx=optax.sgd(1.0), updates_per_rollout=4)
    found = {}
    for name, slots in (("one", {"updates_per_rollout": 1}), ("all", {}), ("first", {"of_first": parity.NAMES})):
        _, found[name] = jax.jit(functools.partial(iterate, method._replace(**slots)))(start(method))
    gaps = [name for name in found["one"] if name.startswith("kl/sampler_")]
    assert len(gaps) == 5
    for name in gaps:
        close.assert_near(found["first"][name], found["one"][name])
    moved = 0.01  # nats, by four updates of this rate; rounding is below a millionth
    assert float(found["one"]["kl/sampler_max"]) < moved < float(found["all"]["kl/sampler_max"])
    same({k: x for k, x in found["first"].items() if k not in gaps},
         {k: x for k, x in found["all"].items() if k not in gaps})  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2])
def test_the_update_that_finds_enough_is_the_first_that_is_not_made(parts):
    method = online(tx=optax.sgd(1.0), updates_per_rollout=4, minibatches=parts, divisor=TOKENS)
    free, figures = _by_hand(method, parts, 4)
    drift = [float(m["kl/sampler_mean"]) for m in figures]
    bound = max(drift[:2]) * 1.0001  # the first beyond it is what the others stop at
    cut = next(k for k, x in enumerate(drift) if x > bound)
    assert 1 < cut < 4 * parts - 1

    def enough(metrics):
        return metrics["kl/sampler_mean"] > bound

    state, found = _by_hand(method, parts, 4, enough)
    after, metrics = jax.jit(functools.partial(iterate, method._replace(enough=enough)))(start(method))
    same_table(after, state)
    assert np.abs(np.asarray(jax.tree.leaves(free.params)[0]) - jax.tree.leaves(after.params)[0]).max() > 1e-4
    assert float(metrics["update/made"]) == cut / (4 * parts) and len(found) == cut + 1
    close.assert_near(metrics["kl/sampler_mean"], np.mean(drift[: cut + 1]))
    assert float(metrics["kl/sampler_max"]) == doubles(max(float(m["kl/sampler_max"]) for m in found))
