"""Logits and greedy tokens of transformers, as stored by ``tests/golden/make_transformers.py``."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.models import config as model_config
from jaxrl_llm.models import weights
from jaxrl_llm.rollout.generate import generate
from tests.golden import make_transformers as golden

STORED = json.loads(golden.PATH.read_text())


def _folder(tmp_path, case):
    """A model folder as transformers would write it."""
    raw = STORED["cases"][case]["config"]
    config = model_config.from_hf(raw)
    policy, params = weights.make_policy(config), None
    params = jax.tree.map(np.asarray, policy.init(jax.random.key(0)))
    weights.save(tmp_path, config, params)
    names = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    made = {n: golden.tensor(n, x.shape) for n, x in names.items()}
    safetensors.numpy.save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.mark.parametrize("case", golden.CASES)
def test_logits_on_ragged_rows(tmp_path, case):
    policy, params, _ = weights.pretrained(_folder(tmp_path, case))
    valid = jnp.asarray(STORED["valid"], jnp.int32)
    positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
    hidden = policy.hidden(params, jnp.asarray(STORED["rows"], jnp.int32), positions, valid)
    got, keep = np.asarray(policy.unembed(params, hidden)), np.asarray(valid, bool)
    want = np.asarray(STORED["cases"][case]["logits"])
    np.testing.assert_allclose(got[keep], want[keep], atol=1e-4)


@pytest.mark.parametrize("case", golden.CASES)
def test_greedy_tokens(tmp_path, case):
    policy, params, config = weights.pretrained(_folder(tmp_path, case))
    row = jnp.asarray(STORED["rows"][:1], jnp.int32)
    out = generate(
        policy, params, row, jnp.ones_like(row, bool), jax.random.split(jax.random.key(0), 1),
        group_size=1, max_new_tokens=16, eos_ids=(config.vocab_size,), temperature=0.0,
    )  # fmt: skip
    assert out.tokens[0, 8:].tolist() == STORED["cases"][case]["greedy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", golden.CASES)
def test_save_and_load_back(tmp_path, case, dtype):
    _, params, config = weights.pretrained(_folder(tmp_path / "a", case)) if (tmp_path / "a").mkdir() is None else None
    weights.save(tmp_path / "b", config, params, dtype=dtype)
    again = model_config.read_config(tmp_path / "b")
    assert again == config
    loaded = weights.load(tmp_path / "b", again)
    want = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)).astype(jnp.float32), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, want)


def test_sharded_files_and_missing_tensors(tmp_path):
    folder = _folder(tmp_path, "qwen3")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    _, params, config = weights.pretrained(folder)
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        safetensors.numpy.save_file({n: tensors[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    jax.tree.map(np.testing.assert_array_equal, weights.load(folder, config), params)
    del index["weight_map"][names[0]]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=names[0]):
        weights.load(folder, config)


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt5"}, {"hidden_act": "gelu"}, {"use_sliding_window": True},
               {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {"quantization_config": {"bits": 4}}]
)  # fmt: skip
def test_unsupported_configuration_is_named(change):
    raw = golden.BASE | {"model_type": "qwen3", "head_dim": 8} | change
    with pytest.raises(
        ValueError, match=str(next(iter(change.values()))) if "model_type" in change else next(iter(change))
    ):
        model_config.from_hf(raw)
