"""Slots change when a response is written, never what it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.adapters import policy_from_forward
from jaxrl_llm.rollout import slots as engines
from jaxrl_llm.rollout import stop as stops
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.grammar import Module, plan_grammar
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import parts
from tests import close
from tests.models_for_tests import small_model
from tests.rollout.test_stop import STOP_STRING, finish_reasons

EOS, NEW, GROUP = (2, 5, 11), 14, 3
PROMPTS = jnp.array([[0, 0, 7, 8], [9, 3, 1, 6], [0, 4, 4, 1], [0, 0, 0, 3], [8, 8, 2, 1]], jnp.int32)
VALID = jnp.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]], bool)
IDS = jnp.arange(10, 15, dtype=jnp.int32)
SETTINGS = {"group_size": GROUP, "max_new_tokens": NEW, "eos_ids": EOS}


def _keys(step=0):
    return sample_keys(jax.random.key(0), step, IDS, GROUP)


@functools.cache
def _plain():
    return _lock_step()


def _lock_step(family="qwen3", **options):
    policy, params, _ = small_model(family)
    return jax.jit(
        lambda p, k: generate(policy, p, PROMPTS, VALID, k, problem_ids=IDS, **SETTINGS | options)
    )(params, _keys())  # fmt: skip


def _in_slots(slots, family="qwen3", policy=None, **options):
    own, params, _ = small_model(family)
    policy = policy or own
    return jax.jit(
        lambda p, k: engines.generate_in_slots(
            policy, p, PROMPTS, VALID, k, slots=slots, problem_ids=IDS, **SETTINGS | options
        )
    )(params, _keys())  # fmt: skip


def _same(found, wanted):
    """Bit for bit but for the log-probabilities: rows of other products may be rounded otherwise."""
    jax.tree.map(np.testing.assert_array_equal, found._replace(sampler_logp=0), wanted._replace(sampler_logp=0))
    close.assert_same_forward(found.sampler_logp, wanted.sampler_logp, temperature=0.8)


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "slots, options",
    [
        (5, {"halvings": 1, "prefill_prompts": 1, "prefill_columns": 3}),
        pytest.param(1, {}, marks=_SLOW),
        pytest.param(4, {"prefill_prompts": 4}, marks=_SLOW),
        pytest.param(40, {}, marks=_SLOW),
    ],
)
def test_any_number_of_slots_writes_the_lock_step_samples(slots, options):
    wanted = _plain()
    lengths = np.asarray(wanted.mask.sum(axis=1))
    assert len(set(lengths.tolist())) > 4 and wanted.truncated.any() and not wanted.truncated.all()
    _same(_in_slots(slots, **options), wanted)


@pytest.mark.parametrize("family", [pytest.param(f, marks=_SLOW) for f in ("mistral", "gemma2", "gpt2", "qwen3_moe")])
def test_families_whose_layers_see_windows_or_know_positions(family):
    _same(_in_slots(4, family, halvings=0), _lock_step(family))


def test_stop_strings_and_settings_of_their_own():
    """A slot forgets what its last tenant had read, and draws as its new one asked."""
    texts = [bytes([97 + i % 5]) for i in range(24)]
    stop = stops.make_stop_strings(["ab", "cdc", "ee"], texts, vocab_size=24)
    rows = jnp.arange(15) % 4
    own = {"temperature": jnp.asarray([0.0, 0.8, 1.0, 1.6])[rows], "top_p": jnp.asarray([1.0, 0.9, 1.0, 0.8])[rows]}
    wanted = _lock_step(stop=stop, **own)
    _same(_in_slots(4, halvings=0, stop=stop, **own), wanted)
    assert (finish_reasons(wanted, EOS) == STOP_STRING).any()


@pytest.mark.slow
def test_a_grammar():
    modules = [Module((3, 4), "a", "b"), Module((6,), "b", "a"), Module((7, 8, 9), "a", "a")]
    grammar = plan_grammar(modules, start="a", end=EOS[0], most=3)
    _same(_in_slots(4, halvings=0, grammar=grammar), _lock_step(grammar=grammar))


@pytest.mark.slow
def test_a_foreign_model_whose_cache_is_its_tokens():
    own, _, config = small_model()
    foreign = policy_from_forward(lambda p, *x: own.unembed(p, own.hidden(p, *x)), config.padded_vocab_size, own.init)
    _same(_in_slots(4, policy=foreign, halvings=0), _plain())


def _simulated(lengths, slots):
    """Decode steps of a queue with known lengths."""
    left, waiting, steps = [], list(lengths), 0
    while left or waiting:
        while waiting and len(left) < slots:
            left.append(waiting.pop(0))
        left, steps = [n - 1 for n in left if n > 1], steps + 1
    return steps


_TRACED = []


@functools.cache
def _engine():
    """An engine of four slots, its parameters, and its ``run`` for so many steps."""
    policy, params, _ = small_model()
    engine = engines.make_engine(policy, slots=4, **SETTINGS)

    @jax.jit
    def run(params, progress, steps):
        _TRACED.append(steps)
        return engine.run(params, progress, steps=steps)

    return engine, params, run


@functools.cache
def _whole():
    engine, params, run = _engine()
    return run(params, engine.start(PROMPTS, VALID, _keys()), jnp.int32(1000))


def test_steps_are_those_of_the_queue_and_any_pieces_give_the_whole():
    engine, params, run = _engine()
    progress, whole = engine.start(PROMPTS, VALID, _keys()), _whole()
    lengths = np.asarray(whole.length)
    assert int(whole.step) == _simulated(lengths, 4) and int(whole.work) == 4 * int(whole.step)
    assert lengths.sum() / int(whole.work) > 1.2 * lengths.mean() / lengths.max()  # more than lock-step keeps busy
    assert engines.finished(whole).all() and not engines.finished(progress).any()
    _same(engine.result(whole, IDS), _plain())
    for steps in (1, 5, 2, 100):
        progress = run(params, progress, jnp.int32(steps))
        done = np.asarray(engines.finished(progress))
        assert (np.asarray(progress.tokens)[done] == np.asarray(whole.tokens)[done]).all()
        assert (np.asarray(progress.length) <= lengths).all()
    jax.tree.map(np.testing.assert_array_equal, engine.result(progress), engine.result(whole))


def test_other_prompts_and_lengths_are_the_same_program():
    engine, params, run = _engine()
    run(params, engine.start(PROMPTS, VALID, _keys()), jnp.int32(1000))
    traced = len(_TRACED)
    for step in (1, 2):
        run(params, engine.start(PROMPTS[::-1], VALID[::-1], _keys(step)), jnp.int32(5 * step))
    assert traced and len(_TRACED) == traced


@pytest.mark.slow
def test_rollout_maker_takes_slots():
    model = parts.load_model("nano")
    ids = [model.tokenizer.encode(text) for text in ("1 2 3 = 6", "2 3 4 = 5")]
    tokens = jnp.asarray(ids, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 6)
    given = (model.params, tokens, jnp.ones_like(tokens, bool), keys, jnp.arange(2, dtype=jnp.int32))
    both = [
        jax.jit(parts.make_rollout(model, group_size=3, max_new_tokens=8, temperature=1.0, slots=n))(*given)
        for n in (0, 4)
    ]
    _same(*both)


def test_mistakes_are_named():
    policy, _, _ = small_model()
    for name in ("slots", "group_size", "max_new_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            engines.make_engine(policy, **{"slots": 2, **SETTINGS} | {name: 0})
    with pytest.raises(ValueError, match="prefill_prompts=-1"):
        engines.make_engine(policy, slots=2, prefill_prompts=-1, **SETTINGS)
    engine = _engine()[0]
    with pytest.raises(ValueError, match="one key per sequence"):
        engine.start(PROMPTS, VALID, _keys()[:3])
    with pytest.raises(ValueError, match="slots=5"):
        engines.shrunk(policy, engine.start(PROMPTS, VALID, _keys()), 5)
    flat = policy._replace(init_cache=lambda batch, length: {"segment_ids": jnp.zeros((length,))})
    with pytest.raises(ValueError, match="no axis for rows"):
        engines.shrunk(flat, engine.start(PROMPTS, VALID, _keys()), 2)
