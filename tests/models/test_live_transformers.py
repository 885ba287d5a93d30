"""The same comparison as the stored one, against transformers itself where it is installed (extra ``parity``)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxrl_llm.models import weights  # noqa: E402
from tests.models_for_tests import FAMILIES, small_config  # noqa: E402

NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SHAPE = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 10000.0}  # fmt: skip
CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_bias": ("llama", {"attention_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied_one_kv": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_tied_bias": ("qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
}


def _model(case):
    family, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{NAMES[family]}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{NAMES[family]}ForCausalLM")(config).float().eval()
    with torch.no_grad():  # norms and biases start at one and zero: move them
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _rows():
    rng = np.random.default_rng(0)
    valid = np.zeros((5, 12), np.int32)
    for row, (start, stop) in zip(valid, ((0, 12), (4, 12), (11, 12), (0, 7), (0, 1)), strict=True):
        row[start:stop] = 1
    return rng.integers(0, 31, (5, 12)), valid


def _theirs(model, tokens, valid):
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    with torch.no_grad():
        return model(
            torch.tensor(tokens), attention_mask=torch.tensor(valid), position_ids=torch.tensor(positions)
        ).logits.numpy()


def _ours(policy, params, tokens, valid, cuts):
    tokens, valid = jnp.asarray(tokens, jnp.int32), jnp.asarray(valid)
    positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
    if not cuts:
        return np.asarray(policy.unembed(params, policy.hidden(params, tokens, positions, valid)))
    cache, parts, start = policy.init_cache(*tokens.shape), [], 0
    for stop in (*cuts, tokens.shape[1]):
        part = slice(start, stop)
        hidden, cache = policy.extend(params, cache, tokens[:, part], positions[:, part], valid[:, part], start)
        parts.append(np.asarray(policy.unembed(params, hidden)))
        start = stop
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_folder_written_by_transformers(tmp_path, case):
    """Ragged rows padded on either side, whole and through the cache; the folder in several shards."""
    model = _model(case)
    model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    policy, params, _ = weights.pretrained(tmp_path)
    tokens, valid = _rows()
    want, keep = _theirs(model, tokens, valid), valid > 0
    for cuts in ((), (8, 9, 10, 11)):
        got = _ours(policy, params, tokens, valid, cuts)
        np.testing.assert_allclose(got[keep], want[keep], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_a_folder_written_here(tmp_path, family, dtype):
    config = small_config(family, vocab_size=31)
    policy = weights.make_policy(config)
    weights.save(tmp_path, config, policy.init(jax.random.key(0)), dtype=dtype)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens, valid = _rows()
    got = _ours(policy, weights.load(tmp_path, config), tokens, valid, ())
    np.testing.assert_allclose(got[valid > 0], _theirs(model.eval(), tokens, valid)[valid > 0], atol=1e-4)


def test_bundled_model_is_a_transformers_model():
    folder = weights.bundled("nano")
    policy, params, config = weights.pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokens, valid = _rows()
    got = _ours(policy, params, tokens, valid, ())
    np.testing.assert_allclose(got[valid > 0], _theirs(model, tokens, valid)[valid > 0], atol=1e-4)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == config.vocab_size
