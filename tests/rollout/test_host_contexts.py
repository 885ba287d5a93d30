"""Episodes of Python worlds that outgrow their context: those of the compiled rollout, whatever takes their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import summaries
from jaxrl_llm.models.cache import EXPERTS, experts_of
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.rollout.host import env
from jaxrl_llm.rollout.host.driver import make_host_episodes
from jaxrl_llm.rollout.host.turns import ruled
from jaxrl_llm.rollout.turns import contexts
from jaxrl_llm.rollout.turns.contexts import Context
from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.train.methods.builders import score_tokens
from tests import close
from tests.models_for_tests import small_config, small_model
from tests.rollout.test_host_episodes import IDS, PROMPTS, SIZES, TASKS, VALID, WORLD, _equal, _keys, table_policy

TURNS = 6
LONG = {name: SIZES[name] for name in ("group_size", "end_ids", "temperature")} | {"max_turns": TURNS}


def keep_first(shown, count):
    return shown[:2], jnp.minimum(count, 2)


CASES = {
    "summaries": Context(9, 2, 3, (3, 1)),
    "silent": Context(9, 2, 3),  # nothing asks for them
    "resumed": Context(11, 2, 2, (3, 1), resume=(4, 4, 1)),
    "dropped": Context(9, 3, 2, (3,), drop=True),
    "ruled": Context(8, 2, 2, rule=keep_first),
    "cut": Context(9),
    "longer": Context(9, 4, 5, (3, 1)),  # a summary may be longer than an action
}


@pytest.fixture(scope="module")
def table():
    policy = table_policy()
    return policy, policy.init(jax.random.key(3))


def on_host(policy, context, **changes):
    room = contexts.new_tokens(context, WORLD, prompt_tokens=PROMPTS.shape[1], turns=TURNS)
    slots = {"slots": 2, "decode_tokens": 2, "read_tokens": (1, 2), "rows_at_once": 2, "max_new_tokens": room}
    tasks = env.task_rows(TASKS)
    return make_host_episodes(policy, env.on_host(WORLD), tasks, context=context, **LONG | slots | changes)


def compiled(policy, params, context):
    rollout = jax.jit(summaries.make_episodes(policy, WORLD, TASKS, context, **LONG))
    return rollout(params, PROMPTS, VALID, _keys(), IDS)


@pytest.mark.parametrize("name", CASES)
def test_the_episodes_are_those_of_the_compiled_rollout(name, table):
    """Bit for bit: parts, positions, masks, summaries, what is dropped, and how episodes end."""
    context = CASES[name]
    policy, params = table
    found = on_host(policy, context).play(params, PROMPTS, VALID, _keys(), IDS).trajectories
    _equal(found, compiled(policy, params, context), 0.0)
    parts = np.asarray(contexts.summaries_of(found)) + 1
    assert parts.max() >= 1 + min(context.summaries, 2)  # there was something to get wrong
    written = np.asarray(found.extras["summaries/written"])
    assert written.any() == (context.summaries > 0 and context.rule is None)
    assert not (written & ~np.asarray(found.mask)).any()
    size = contexts.widest(context, WORLD, prompt_tokens=4, turns=TURNS)
    assert int(jnp.max(contexts.context_sizes(found))) <= size


def test_an_episode_without_room_stops_in_the_middle_of_anything(table):
    """The columns there are are those of the episode with room."""
    policy, params = table
    whole = compiled(policy, params, CASES["resumed"])
    for room in range(8, 22):
        found = on_host(policy, CASES["resumed"], max_new_tokens=room).play(params, PROMPTS, VALID, _keys(), IDS)
        for name in ("tokens", "segment_ids", "positions", "mask", "sampler_logp"):
            wanted = getattr(whole, name)[:, : PROMPTS.shape[1] + room]
            np.testing.assert_array_equal(getattr(found.trajectories, name), wanted, err_msg=f"{name} at {room}")


@pytest.mark.slow
def test_slots_begin_again_with_the_prompt_they_have():
    """A decoder: caches as long as a sub-trajectory, what was dropped is not seen, and nothing compiles anew."""
    config = small_config(num_layers=2)
    policy = make_policy(config)
    params = policy.init(jax.random.key(1))
    for name in ("resumed", "dropped"):
        context = CASES[name]
        host = on_host(policy, context, read_tokens=(2,))
        found = host.play(params, PROMPTS, VALID, _keys(), IDS).trajectories
        wanted = compiled(policy, params, context)
        within = close.bound(close.forward_sums(config, wanted.tokens.shape[1]), np.log(config.vocab_size))
        _equal(found, wanted, within)
        assert (np.asarray(turns_of(found).taken).sum(axis=1) > 2).any()
        programs = host.compiled()
        host.play(params, PROMPTS, VALID, _keys(1), IDS)
        assert host.compiled() == programs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "resumed", "dropped"])
def test_the_experts_of_a_mixture_are_recorded(name):
    """Those that computed what a sampled token has seen, in every part: the trainer takes them and has its chances."""
    policy, params, _ = small_model("qwen3_moe")
    context = CASES.get(name, Context())
    rows = on_host(policy, context, read_tokens=(2,)).play(params, PROMPTS, VALID, _keys(), IDS).trajectories
    _, cache = policy.extend(
        params, policy.init_cache(*rows.tokens.shape), rows.tokens, rows.positions, rows.segment_ids, 0
    )
    found, chosen = np.asarray(rows.extras[EXPERTS]), np.asarray(experts_of(cache))
    np.testing.assert_array_equal(found, np.where(found >= 0, chosen, -1))
    segments, later = np.asarray(rows.segment_ids), np.triu(np.ones((rows.tokens.shape[1],) * 2, bool), 1)
    seen = (segments[:, :, None] == segments[:, None]) & np.asarray(rows.mask)[:, None] & later
    assert (found[(segments > 0) & seen.any(2)] >= 0).all() and (found[segments == 0] == -1).all()
    assert segments.max() == (1 if name == "whole" else 3)
    logp, _ = score_tokens(policy, params, rows, temperature=LONG["temperature"])
    close.assert_same_forward(jnp.where(rows.mask, logp, 0), rows.sampler_logp, "qwen3_moe")


def test_a_rule_is_given_what_was_shown():
    assert ruled(CASES["ruled"], [5, 4, 3], 4) == [5, 4]
    assert ruled(CASES["ruled"], [5], 4) == [5]
    assert ruled(CASES["ruled"], [], 1) == []


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (Context(None, 2), "summaries=2"),
        (Context(6, 1, 2, (1,), resume=(1,)), "tokens=6 of context are less than the 7 of prompt and summary"),
        (Context(9, 1, 2, drop=True), "needs an instruction"),
        (Context(9, 1, 2, (1,), keep_first, drop=True), "rule and drop"),
    ],
)
def test_contexts_that_cannot_be(context, message, table):
    policy, params = table
    with pytest.raises(ValueError, match=message):
        on_host(policy, context, max_new_tokens=30).play(params, PROMPTS, VALID, _keys(), IDS)
