"""Weights in few bits: near the model they come from, smaller, and sampled as they are scored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora, quantised
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.quantised import multiplied, opened, quantise
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods.builders import score_tokens
from tests import close
from tests.models_for_tests import dense_rows, small_config, small_model

qwix = pytest.importorskip("qwix")
TOKENS = jnp.asarray(np.random.default_rng(4).integers(0, 24, (3, 7)), jnp.int32)
ROWS = dense_rows(3, 7)


def stored_bits(params):
    return sum(x.size * jax.dtypes.itemsize_bits(x.dtype) for x in jax.tree.leaves(params))


def _logits(policy, params):
    segments, positions = ROWS
    return policy.unembed(params, policy.hidden(params, TOKENS, positions, segments))


def test_a_matrix_by_hand():
    """Each output has the scale of its largest weight, 127.5 steps of it: 2 of 4 is 64 of them, rounded."""
    _, params, config = small_model()
    weight = jnp.zeros_like(params["layers"]["o"]).at[0, :2, 0].set(jnp.array([2.0, -4.0])).at[0, 0, 1].set(0.5)
    one = quantise(config, {**params, "layers": {**params["layers"], "o": weight}}, "int8")["layers"]["o"]
    assert one.qvalue.dtype == jnp.int8 and one.qvalue.shape == weight.shape
    assert one.qvalue[0, :2, 0].tolist() in ([63, -127], [64, -127]) and one.qvalue[0, 0, 1] == 127
    assert one.scale.shape == (weight.shape[0], 1, weight.shape[2])
    steps = np.asarray([4.0, 0.5]) / 127.5
    close.assert_relative(one.scale[0, 0, :2], steps)
    back = opened({"o": one})["o"]
    np.testing.assert_allclose(back, weight, rtol=0, atol=steps.max() / 2 + close.near(back, weight))


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_near_the_model_it_comes_from_and_smaller(family):
    policy, params, config = small_model(family)
    exact = np.asarray(_logits(policy, params))
    gaps = {}
    for kind in ("int8", "int4"):
        few = jax.jit(lambda p, k=kind: quantise(config, p, k))(params)
        assert few["embed"] is not None and isinstance(few["layers"]["input_norm"], jax.Array)
        gaps[kind] = np.abs(np.asarray(_logits(policy, few)) - exact).mean() / exact.std()
        assert stored_bits(few) < stored_bits(params)
    assert 0 < gaps["int8"] < 0.02 < gaps["int4"] < 0.6
    if family == "qwen3_moe":
        assert isinstance(few["layers"]["router"], jax.Array)


def test_what_samples_is_recorded_and_its_gap_to_the_trainer_is_seen():
    policy, params, config = small_model()
    few = quantise(config, params, "int8")
    ids = jnp.arange(2, dtype=jnp.int32)
    keys = sample_keys(jax.random.key(3), 0, ids, 2)
    rows = generate(
        policy, few, TOKENS[:2], jnp.ones((2, 7), bool), keys, group_size=2, max_new_tokens=6, eos_ids=(1,),
        problem_ids=ids,
    )  # fmt: skip
    own, _ = score_tokens(policy, few, rows)
    trained, _ = score_tokens(policy, params, rows)
    mask = np.asarray(rows.mask)
    close.assert_same_forward(np.asarray(own)[mask], np.asarray(rows.sampler_logp)[mask], columns=13)
    gap = np.abs(np.asarray(trained) - np.asarray(rows.sampler_logp))[mask]
    assert 1e-5 < gap.mean() < 0.1


def test_whole_arrays_are_left_alone():
    layer = {"q": jnp.ones((2, 2))}
    assert opened(layer) is layer


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("remat", [False, True])
def test_a_backward_pass_opens_a_base_again_and_keeps_none_of_it(family, remat):
    """Of eight layers a step needs no more room beside int8 than beside whole weights; the slopes are those of them."""
    config = small_config(family, num_layers=8, hidden_size=128, intermediate_size=256)
    plain = make_policy(config, remat=remat)
    params = plain.init(jax.random.key(1))
    spec = Lora(2, targets=lora.targets_of(config))
    policy, adapter = lora.make_policy(plain, config, spec), lora.init(config, spec, jax.random.key(3))
    adapter = jax.tree.map(lambda x: x + 0.02, adapter)
    directions = jax.random.normal(jax.random.key(4), (*TOKENS.shape, config.hidden_size))
    few = quantise(config, params, "int8", block=64)
    whole = params | {"layers": jax.jit(opened)(few["layers"])}

    def loss(adapter, base):
        hidden = policy.hidden({"base": base, "lora": adapter}, TOKENS, ROWS[1], ROWS[0])
        return jnp.sum(hidden * directions)  # not their squares, which a norm keeps as they are

    room, slopes = {}, {}
    for name, base in (("few", few), ("whole", whole)):
        program = jax.jit(jax.grad(loss)).lower(adapter, base).compile()
        room[name], slopes[name] = program.memory_analysis().temp_size_in_bytes, program(adapter, base)
    layer = 4 * sum(x.size for x in jax.tree.leaves(whole["layers"])) // 8
    assert room["few"] < room["whole"] + 2 * layer
    jax.tree.map(close.assert_near, slopes["few"], slopes["whole"])


def test_an_output_is_scaled_after_its_product():
    """The one scale of an output may come last; a matrix of several blocks is opened first, and once for steps."""
    _, params, config = small_model()
    x = jax.random.normal(jax.random.key(5), (3, 2, params["layers"]["o"].shape[1]))
    one = {name: x[0] for name, x in params["layers"].items()}

    def product(x, matrix):
        return jnp.einsum("bsi,io->bso", x, matrix)

    for block, kinds in ((0, quantised.TYPES), (8, quantised.BASES)):
        for kind in kinds:
            few = quantised.quantise_layers(config, one, kind, block=block)
            assert few["o"].scale.shape[0] == (2 if block else 1)
            close.assert_near(multiplied(product, x, few["o"]), product(x, opened(few)["o"]))
            steps = quantised.opened_for_steps(few)
            assert isinstance(steps["o"], jax.Array) == bool(block)
            np.testing.assert_array_equal(opened(steps)["o"], opened(few)["o"])


def test_wrong_kind_and_missing_extra(monkeypatch):
    _, params, config = small_model()
    with pytest.raises(ValueError, match="kind='int3' is not one of int8, int4, float8_e4m3fn"):
        quantise(config, params, "int3")
    monkeypatch.setitem(__import__("sys").modules, "qwix", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[quant\]'"):
        quantise(config, params, "int8")
    assert quantised.TYPES == ("int8", "int4", "float8_e4m3fn")
