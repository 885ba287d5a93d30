"""Logits and greedy tokens of transformers, as stored by ``tests/golden/make_transformers.py``."""

import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.models import config as model_config
from jaxrl_llm.models.io import weights
from jaxrl_llm.rollout.generate import generate
from tests import close
from tests.golden import make_transformers as golden

STORED = json.loads(golden.PATH.read_text())


@functools.cache
def _model(case):
    """The case's model as read from a folder in the layout of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        return weights.pretrained(golden.write_folder(pathlib.Path(folder), STORED["cases"][case]["config"]))


def test_stored_cases_are_those_of_the_script():
    assert {case: found["config"] for case, found in STORED["cases"].items()} == golden.CASES


@pytest.mark.parametrize("case", golden.CASES)
def test_logits_on_ragged_rows(case):
    policy, params, config = _model(case)
    valid = jnp.asarray(STORED["valid"], jnp.int32)
    positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
    hidden = policy.hidden(params, jnp.asarray(STORED["rows"], jnp.int32), positions, valid)
    got, keep = np.asarray(policy.unembed(params, hidden)), np.asarray(valid, bool)
    want = np.asarray(STORED["cases"][case]["logits"])
    close.assert_same_forward(got[keep], want[keep], config, columns=valid.shape[1])


@pytest.mark.parametrize("case", golden.CASES)
def test_greedy_tokens_through_the_cache(case):
    """64 tokens, those of the plain forward pass of transformers."""
    policy, params, config = _model(case)
    row = jnp.asarray(STORED["rows"][:1], jnp.int32)
    out = generate(
        policy, params, row, jnp.ones_like(row, bool), jax.random.split(jax.random.key(0), 1),
        group_size=1, max_new_tokens=golden.NEW_TOKENS, eos_ids=(config.vocab_size,), temperature=0.0,
    )  # fmt: skip
    assert out.tokens[0, 8:].tolist() == STORED["cases"][case]["greedy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", golden.CASES)
def test_save_and_load_back(tmp_path, case, dtype):
    """One file and several; the configuration and, to the stored precision, every number."""
    _, params, config = _model(case)
    weights.save(tmp_path / "one", config, params, dtype=dtype)
    weights.save(tmp_path / "several", config, params, dtype=dtype, shard_bytes=4096)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    want = jax.tree.map(lambda x: np.asarray(x.astype(jnp.dtype(dtype)).astype(jnp.float32)), params)
    for folder in (tmp_path / "one", tmp_path / "several"):
        assert model_config.read_config(folder) == config
        jax.tree.map(np.testing.assert_array_equal, weights.load(folder, config, place=np.asarray), want)


def test_sharded_files_and_missing_tensors(tmp_path):
    folder = golden.write_folder(tmp_path, STORED["cases"]["qwen3"]["config"])
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
