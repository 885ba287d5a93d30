"""HybridFlow for real: logits after a change of layout on eight devices, and the controllers with calls that work."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.parts import running_sums_task as toy
from experiments.parts import strings
from experiments.systems.parts import dataflow, regroup, transfer_protocols
from experiments.systems.parts.regroup import Layout
from jaxrl_llm import reduce
from jaxrl_llm.advantages import group, returns, whiten
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.value import clipped_value_loss
from jaxrl_llm.models import heads
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.online import init_state, iterate
from jaxrl_llm.train.step import make_update
from tests import close
from tests.models_for_tests import dense_rows, small_model
from tests.papers.test_hybridflow import generation_mesh, same

pytestmark = pytest.mark.slow


def test_resharded_logits_are_the_unsharded_ones_and_the_compiler_gathers_in_micro_groups():
    policy, params, _ = small_model("llama")
    segments, positions = dense_rows(8, 6)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, 6)), jnp.int32)

    @jax.jit
    def logits(params, tokens, positions, segments):
        return policy.unembed(params, policy.hidden(params, tokens, positions, segments))

    want = logits(params, tokens, positions, segments)
    trained = rules.shard(params, meshes.parse_mesh("data=2,tensor=4"))
    mesh = generation_mesh(regroup.strided(Layout(1, 2, 4), pipeline=1, tensor=2))
    moved = jax.device_put(trained, rules.shardings(params, mesh))
    same(moved, params)
    rows = rules.shard_batch((tokens, positions, segments), mesh)
    close.assert_near(logits(moved, *rows), want)

    assert {tuple(group) for group in compiled_groups("tensor")} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    with pytest.raises(ValueError, match="collective-permute"):
        compiled_groups("micro")  # neighbours as tensor groups: pieces must change places first


def compiled_groups(axis):
    """Among whom the compiled program gathers 16 rows into 32, for a matrix over two axes that is then over one."""
    named = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 2, 2), ("data", "tensor", "micro"))
    before, after = (NamedSharding(named, P(axes)) for axes in (("tensor", "micro"), axis))
    shape = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=before)
    text = jax.jit(lambda x: x, out_shardings=after).lower(shape).compile().as_text()
    others = re.findall("all-to-all|collective-permute|all-reduce", text)
    if others:
        raise ValueError(others[0])
    ((rows, groups, sizes, order),) = re.findall(
        r"= f32\[(\d+),8\]\S* all-gather\(.*replica_groups=\[(\S+?)\]<=\[(\S+?)\]T\((\S+?)\)", text
    )
    groups, sizes, order = ([int(n) for n in x.split(",")] for x in (groups, sizes, order))
    assert rows == "32"
    return np.arange(8).reshape(sizes).transpose(order).reshape(groups).tolist()


WORLD = strings.make_world(toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, width=16)
LAYOUT, GROUP = Layout(1, 2, 2), 4
PPO_LOSS = builders.make_policy_loss(WORLD.policy, clipped_policy_loss)


def online_grpo():
    return strings.learned_from_prompts(
        WORLD, toy.draw_prompts(jax.random.key(1), 64), strings.score_of(WORLD, toy.right),
        estimate=builders.make_estimate(WORLD.policy, builders.per_response(group.group_normalized_advantages)),
        loss=PPO_LOSS, tx=optax.adam(1e-2), prompts_per_step=4, group_size=GROUP,
    )  # fmt: skip


def value_loss(params, batch):
    hidden = WORLD.policy.hidden(params["model"], batch.tokens, batch.positions, batch.segment_ids)
    values = heads.state_values(params["value"], hidden, batch.segment_ids)
    terms = clipped_value_loss(values, batch.extras["values"], batch.extras["returns"], batch.mask)
    return reduce.tokens(terms.loss, batch.mask), {}


def working_calls(online, reference):
    """The calls as functions that work: rollouts and scores on two replicas of two ranks, updates on the whole."""

    def roll(samples, temperature):
        def run(given):
            params, (tokens, _, keys) = given
            return strings.rollout(WORLD, params, tokens, keys[:, :samples].reshape(-1), samples=samples,
                                temperature=temperature)  # fmt: skip

        compiled = jax.jit(run)

        def call(actor, prompts):
            rows = transfer_protocols.spread(
                lambda part: compiled((actor.params, part)), transfer_protocols.THREE_D, LAYOUT
            )(prompts)
            return rows._replace(group_ids=jnp.repeat(prompts[1], samples))  # numbers of this batch

        return call

    def spread(run):
        return transfer_protocols.spread(jax.jit(run), transfer_protocols.DP, LAYOUT)

    def values(critic, rows):
        @jax.jit
        def run(rows):
            hidden = WORLD.policy.hidden(critic.params["model"], rows.tokens, rows.positions, rows.segment_ids)
            return heads.state_values(critic.params["value"], hidden, rows.segment_ids)

        return transfer_protocols.spread(run, transfer_protocols.DP, LAYOUT)(rows)

    return dataflow.Calls(
        roll(GROUP, 1.0), roll(1, 0.0), spread(lambda rows: online.score(None, rows)),
        spread(lambda rows: builders.score_tokens(WORLD.policy, reference, rows)[0]), values, None,
        jax.jit(lambda actor, batch: make_update(online.loss, online.tx)(actor, batch)[0]),
        jax.jit(lambda critic, batch: make_update(value_loss, online.tx)(critic, batch)[0]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def begun():
    """GRPO of the library and its state, the same prompts and keys for a controller, and calls that work."""
    online = online_grpo()
    state = init_state(online, WORLD.policy.init(jax.random.key(0)), jax.random.key(2))
    ids, _ = online.sampler.draw(state.sampler, jax.random.fold_in(jax.random.fold_in(state.key, 0x5A3D), 0), 4)
    keys = sample_keys(state.key, state.step, ids, GROUP).reshape(-1, GROUP)
    prompts = online.problems.tokens[ids], jnp.arange(4, dtype=jnp.int32), keys
    return online, state, prompts, working_calls(online, state.params)


def test_the_controller_of_grpo_is_the_library_s_grpo(begun):
    online, state, prompts, calls = begun

    def estimate(rows, rewards, reference, baseline):
        return online.estimate(state.params, {}, rows, rewards)

    found, critic = dataflow.grpo(calls._replace(estimate=estimate), state, None, prompts)
    want = jax.jit(lambda s: iterate(online, s)[0])(state)
    jax.tree.map(lambda a, b: close.assert_near(a, b), found.params, want.params)
    assert critic is None and np.any(found.params["embed"] != state.params["embed"])


def test_the_controller_of_remax_takes_the_greedy_reward_as_baseline(begun):
    _, state, prompts, calls = begun
    seen = {}

    def estimate(rows, rewards, reference, baseline):
        seen.update(baseline=baseline.value)
        values = group.per_token(group.remax_advantages(rewards.value, baseline.value[rows.group_ids]), rows.mask)
        return builders.make_estimate(WORLD.policy, lambda t, r: values)(None, {}, rows, rewards)

    after, _ = dataflow.remax(calls._replace(estimate=estimate), state, None, prompts)
    greedy = calls.greedy(state, (prompts[0], prompts[1], prompts[2][::-1]))  # whatever the keys
    same(seen["baseline"], toy.right(*strings.responses_of(WORLD, greedy)).astype(jnp.float32))
    assert np.any(after.params["embed"] != state.params["embed"])


def test_the_controller_of_ppo_teaches_a_critic_of_its_own(begun):
    online, state, prompts, calls = begun

    def estimate(rows, rewards, reference, values):
        close.assert_near(jnp.where(rows.mask, reference - rows.sampler_logp, 0.0), 0.0)
        paid = returns.at_last_token(rewards.value, rows.mask)
        advantages, targets = returns.gae_advantages(paid, values, jnp.zeros((16,)), rows.mask, gamma=1.0, lam=0.95)
        whitened = whiten.whitened_tokens(advantages, rows.mask)
        batch = builders.make_estimate(WORLD.policy, lambda t, r: whitened)(None, {}, rows, rewards)
        return batch._replace(extras={"values": values, "returns": targets})

    critic = {"model": state.params, "value": heads.init_head(16, jax.random.key(3))}
    critic = init_state(online, critic, jax.random.key(4))
    actor, taught = dataflow.ppo(calls._replace(estimate=estimate), state, critic, prompts)
    assert np.any(actor.params["embed"] != state.params["embed"])
    assert np.abs(taught.params["value"]["bias"]).max() > 0
