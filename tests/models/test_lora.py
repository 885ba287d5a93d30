"""Adapters: the same function merged and beside, gradient in the adapter alone, PEFT's files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxrl_llm import logprobs
from jaxrl_llm.models import lora
from jaxrl_llm.models.cache import ON_GPU
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.io import weights
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.run import lora_state
from jaxrl_llm.run import parts as parts_of_runs
from tests import close
from tests.models_for_tests import ALL_FAMILIES, dense_rows, small_config, small_model

TOKENS = jnp.asarray(np.random.default_rng(4).integers(0, 24, (3, 7)), jnp.int32)
SEGMENTS, POSITIONS = dense_rows(3, 7)


def _logits(policy, params):
    return policy.unembed(params, policy.hidden(params, TOKENS, POSITIONS, SEGMENTS))


def _moved(adapter, seed=5):
    """An adapter whose B is no longer zero."""
    keys = iter(jax.random.split(jax.random.key(seed), len(adapter)))
    return {name: x + 0.3 * jax.random.normal(next(keys), x.shape) for name, x in adapter.items()}


def _adapted(family, **settings):
    base_policy, base, config = small_model(family)
    chosen = Lora(**({"rank": 2, "alpha": 6.0, "targets": lora.targets_of(config)} | settings))
    return lora.make_policy(base_policy, config, chosen), base_policy, base, config, chosen


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_fresh_adapter_is_the_base_and_merged_is_unmerged(family):
    policy, base_policy, base, config, chosen = _adapted(family)
    fresh = lora.init(config, chosen, jax.random.key(0))
    close.assert_same_forward(_logits(policy, {"base": base, "lora": fresh}), _logits(base_policy, base), config)
    moved = _moved(fresh)
    beside = _logits(policy, {"base": base, "lora": moved})
    merged = _logits(base_policy, lora.merge(base, moved, chosen.scale))
    close.assert_same_forward(beside, merged, config)
    assert float(jnp.max(jnp.abs(beside - _logits(base_policy, base)))) > 0.1


def test_merged_matrix_by_hand():
    """One layer, rank 1: W + alpha / rank A B."""
    base = {"layers": {"q": jnp.array([[[1.0, 2.0], [3.0, 4.0]]])}}
    adapter = {"q_lora_a": jnp.array([[[1.0], [10.0]]]), "q_lora_b": jnp.array([[[0.5, 0.25]]])}
    merged = lora.merge(base, adapter, Lora(1, alpha=2.0).scale)
    np.testing.assert_array_equal(merged["layers"]["q"], [[[2.0, 2.5], [13.0, 9.0]]])
    program = jax.make_jaxpr(lambda b, a: lora.merge(b, a, 2.0))(base, adapter)
    (product,) = (e for e in program.eqns if e.primitive.name == "dot_general")
    assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2  # an accelerator's own leaves bits out


def test_the_cache_sees_the_adapter():
    policy, _, base, _, _ = _adapted("qwen3")
    params = {"base": base, "lora": _moved(policy.init(jax.random.key(0))["lora"])}
    cache, parts = policy.init_cache(3, 7), []
    for part in (slice(0, 4), slice(4, 7)):
        hidden, cache = policy.extend(
            params, cache, TOKENS[:, part], POSITIONS[:, part], SEGMENTS[:, part], jnp.int32(part.start)
        )
        parts.append(policy.unembed(params, hidden))
    close.assert_same_forward(jnp.concatenate(parts, axis=1), _logits(policy, params))


@pytest.mark.parametrize("layout", [None, ON_GPU])
@pytest.mark.parametrize("targets", [("q", "up"), ("down",)])
def test_parameters_laid_out_for_steps_give_the_same(layout, targets):
    """Layers apart, once before the loop; matrices with an adapter are not joined to others."""
    _, base, config = small_model("qwen3")
    chosen = Lora(2, targets=targets)
    policy = lora.make_policy(make_policy(config, layout=layout), config, chosen)
    params = {"base": base, "lora": _moved(lora.init(config, chosen, jax.random.key(0)))}
    steps = policy.for_steps(params)
    assert isinstance(steps["layers"], tuple) and ("qkv" in steps["layers"][0]) == (
        layout is not None and "q" not in targets
    )
    parts = (TOKENS, POSITIONS, SEGMENTS, jnp.int32(0))
    (want, _), (got, _) = (policy.extend(p, policy.init_cache(3, 7), *parts) for p in (params, steps))
    close.assert_same_forward(got, want)
    np.testing.assert_array_equal(policy.unembed(steps, got), policy.unembed(params, got))
    alone = lora_state.adapter_alone(parts_of_runs.load_model("nano")._replace(policy=policy, params=params))
    (again, _) = alone.policy.extend(alone.policy.for_steps(alone.params), alone.policy.init_cache(3, 7), *parts)
    np.testing.assert_array_equal(again, got)


def _loss(policy):
    return lambda params: -logprobs.token_logprobs(_logits(policy, params), TOKENS)[:, 1:].mean()


@pytest.mark.slow
def test_gradient_is_in_the_adapter_alone():
    policy, _, base, config, chosen = _adapted("qwen3")
    params = {"base": base, "lora": _moved(lora.init(config, chosen, jax.random.key(0)))}
    gradient = jax.grad(_loss(policy))(params)
    assert all(not np.any(np.asarray(g)) for g in jax.tree.leaves(gradient["base"]))
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradient["lora"]))
    # the gradient of B is that of the merged matrix, seen through A
    merged = jax.grad(_loss(small_model("qwen3")[0]))(lora.merge(base, params["lora"], chosen.scale))
    want = chosen.scale * jnp.einsum("lir,lio->lro", params["lora"]["up_lora_a"], merged["layers"]["up"])
    close.assert_same_sums(gradient["lora"]["up_lora_b"], want, close.gradient_sums(config, 3, 7))


def test_some_steps_fit_a_text():
    policy, _, base, config, chosen = _adapted("llama", rank=4, targets=("q", "v", "up", "down"))
    adapter, tx = lora.init(config, chosen, jax.random.key(1)), optax.adam(3e-2)

    @jax.jit
    def step(adapter, state):
        loss, grads = jax.value_and_grad(lambda x: _loss(policy)({"base": base, "lora": x}))(adapter)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state)
        return optax.apply_updates(adapter, updates), state, loss

    state, losses = tx.init(adapter), []
    for _ in range(30):
        adapter, state, loss = step(adapter, state)
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("family", [f for f in ALL_FAMILIES if f not in ("gpt2", "phi3")])
def test_files_of_peft_there_and_back(tmp_path, family):
    *_, config, chosen = _adapted(family)
    adapter = _moved(lora.init(config, chosen, jax.random.key(0)))
    lora.save(tmp_path, config, chosen, adapter, base_model="some/base")
    again, read = lora.load(tmp_path, config)
    assert again == chosen
    jax.tree.map(np.testing.assert_array_equal, read, adapter)


def test_names_and_shapes_are_those_of_peft(tmp_path):
    """Checkpoint format of PEFT's documentation: ``base_model.model.<module>.lora_A.weight [r, in]``."""
    config = small_config("qwen3", hidden_size=16, num_kv_heads=2, head_dim=4)
    chosen = Lora(3, 16.0, ("q", "k", "down"))
    lora.save(tmp_path, config, chosen, lora.init(config, chosen, jax.random.key(0)), base_model="x/y")
    stored = {k: x.shape for k, x in safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors").items()}
    layer = "base_model.model.model.layers.1."
    assert len(stored) == 2 * 3 * 2
    assert stored[layer + "self_attn.q_proj.lora_A.weight"] == (3, 16)
    assert stored[layer + "self_attn.k_proj.lora_B.weight"] == (8, 3)
    assert stored[layer + "mlp.down_proj.lora_A.weight"] == (3, 32)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["target_modules"] == ["down_proj", "k_proj", "q_proj"]
    assert (raw["peft_type"], raw["task_type"], raw["r"], raw["lora_alpha"]) == ("LORA", "CAUSAL_LM", 3, 16)
    assert raw["base_model_name_or_path"] == "x/y" and raw["fan_in_fan_out"] is False


def test_targets_of_gpt2_that_share_a_name_are_spelled_out(tmp_path):
    config = small_config("gpt2")
    chosen = Lora(2, targets=("o", "up"))
    lora.save(tmp_path, config, chosen, lora.init(config, chosen, jax.random.key(0)))
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["target_modules"] == ["attn.c_proj", "c_fc"] and raw["fan_in_fan_out"] is True
    assert lora.load(tmp_path, config)[0] == chosen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is a difference from a base"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": None}, "r=None and lora_alpha=6 must be numbers"),
        ({"r": 4}, r"is \(2, 16\), the config and r want \(4, 16\)"),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path, change, message):
    *_, config, chosen = _adapted("llama")
    lora.save(tmp_path, config, chosen, lora.init(config, chosen, jax.random.key(0)))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        lora.load(tmp_path, config)


def test_rank_stabilised_scale_and_bfloat16(tmp_path):
    *_, config, chosen = _adapted("llama", rank=4, alpha=8.0)
    adapter = lora.init(config, chosen, jax.random.key(0))
    lora.save(tmp_path, config, chosen, adapter)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    half = {k: x.astype(jnp.bfloat16) for k, x in tensors.items()}
    safetensors.numpy.save_file(half, tmp_path / "adapter_model.safetensors")
    read, values = lora.load(tmp_path, config)
    assert read.scale == 8.0 / 4**0.5
    np.testing.assert_allclose(values["q_lora_a"], adapter["q_lora_a"], rtol=float(jnp.finfo(jnp.bfloat16).eps))


def test_wrong_files(tmp_path):
    *_, config, chosen = _adapted("llama")
    with pytest.raises(ValueError, match=r"adapter_config.json does not exist"):
        lora.load(tmp_path, config)
    lora.save(tmp_path, config, chosen, lora.init(config, chosen, jax.random.key(0)))
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    safetensors.numpy.save_file({k: x for k, x in tensors.items() if k != name}, file)
    with pytest.raises(ValueError, match="layers.1.self_attn.q_proj.lora_A.weight is absent"):
        lora.load(tmp_path, config)
    safetensors.numpy.save_file(tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 2))}, file)
    with pytest.raises(ValueError, match="1 tensors that nothing reads, the first: base_model.model.lm_head"):
        lora.load(tmp_path, config)
    file.unlink()
    with pytest.raises(ValueError, match="adapter_model.safetensors does not exist"):
        lora.load(tmp_path, config)


def test_bad_settings():
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        Lora(0)
    with pytest.raises(ValueError, match="wants one or more of q, k"):
        Lora(2, targets=("router",))
    with pytest.raises(ValueError, match="gpt2 has no matrix gate; choose of q, k, v, o, up, down"):
        lora.init(small_config("gpt2"), Lora(2, targets=("gate",)), jax.random.key(0))
    with pytest.raises(ValueError, match="phi3 stores q as one matrix with others"):
        lora.save("unwritten", small_config("phi3"), Lora(2, targets=("q",)), {})


def test_peft_itself_computes_the_same(tmp_path):
    """Where PEFT is installed: it reads our files and gives our logits, and we read its files."""
    torch, transformers, peft = (pytest.importorskip(n) for n in ("torch", "transformers", "peft"))
    policy, _, base, config, chosen = _adapted("qwen2", targets=("q", "v", "down"))
    adapter = _moved(lora.init(config, chosen, jax.random.key(0)))
    weights.save(tmp_path / "base", config, base)
    lora.save(tmp_path / "ours", config, chosen, adapter, base_model=str(tmp_path / "base"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    model = peft.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    with torch.no_grad():
        want = model(torch.tensor(np.asarray(TOKENS, np.int64))).logits.numpy()
    close.assert_same_forward(_logits(policy, {"base": base, "lora": adapter}), want, config)
    model.save_pretrained(tmp_path / "theirs")
    again, read = lora.load(tmp_path / "theirs", config)
    assert again == chosen
    jax.tree.map(np.testing.assert_array_equal, read, adapter)
