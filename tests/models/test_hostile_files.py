"""Model folders from anywhere: whatever is wrong with a file is one line that names it, before it costs memory."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.data import tokenizer
from jaxrl_llm.errors import UserError, read_json_object
from jaxrl_llm.models import config as model_config
from jaxrl_llm.models import lora
from jaxrl_llm.models.io import safetensors_io, weights
from tests.models_for_tests import small_model


@pytest.fixture
def folder(tmp_path):
    _, params, config = small_model()
    weights.save(tmp_path / "model", config, params)
    return tmp_path / "model"


def _raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _entry(start, stop, shape=None, dtype="F32"):
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


HEADERS = {
    "overlap": ({"a": _entry(0, 8), "b": _entry(4, 12)}, 12, "b overlaps the tensor before it"),
    "the same bytes twice": ({"a": _entry(0, 8), "b": _entry(0, 8)}, 8, "overlaps the tensor before it"),
    "negative": ({"a": _entry(-8, 0)}, 8, r"a has data_offsets=\[-8, 0\]"),
    "negative shape": ({"a": _entry(0, 8, [-1, -2])}, 8, r"a has shape=\[-1, -2\]"),
    "backwards": ({"a": _entry(8, 0, [0])}, 8, r"a has data_offsets=\[8, 0\]"),
    "a hole": ({"a": _entry(4, 8)}, 8, "a leaves 4 bytes before it to nobody"),
    "cut off": ({"a": _entry(0, 16)}, 8, "it is cut off, 8 bytes of tensors in place of 16"),
    "too long": ({"a": _entry(0, 4)}, 8, "it goes on too long, 8 bytes of tensors in place of 4"),
    "other shape": ({"a": _entry(0, 8, [3])}, 8, "8 bytes, which are not shape"),
    "overflow": ({"a": _entry(0, 8, [1 << 33, 1 << 33])}, 8, "8 bytes, which are not shape"),
    "huge shape": ({"a": _entry(0, 0, [1 << 70])}, 0, "a has shape="),
    "many axes": ({"a": _entry(0, 4, [1] * 40)}, 4, "a shape of 40 axes"),
    "truth values": ({"a": _entry(0, 4, [True])}, 4, "a has shape="),
    "fractions": ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, 4, "a has shape="),
    "one offset": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}, 4, "a has data_offsets="),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "a lacks dtype, shape or data_offsets"),
    "no entry": ({"a": 3}, 0, "a lacks dtype, shape or data_offsets"),
    "a list": ([], 0, "holds no JSON object"),
    "deep": (b'{"a":' * 100_000, 0, "nested too deeply"),
    "twice": (b'{"a": 1, "a": 2}', 0, "holds 'a' twice"),
    "no text": (b"\xff\xfe\xff", 0, "is not JSON"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", 0, "is not JSON"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(tmp_path, name):
    header, size, message = HEADERS[name]
    path = _raw(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(UserError, match=message) as found:
        safetensors_io.header(path)
    assert str(found.value).startswith(str(path)) and "\n" not in str(found.value)


def test_a_header_longer_than_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little"))
    with pytest.raises(UserError, match=f"a header of {1 << 62} bytes"):
        safetensors_io.header(path)


INDEXES = {
    "above": ("../secret/model.safetensors", "it must be a .*file of the same folder"),
    "below": ("deep/model.safetensors", "same folder"),
    "elsewhere": ("/etc/passwd", "same folder"),
    "windows": ("..\\secret.safetensors", "same folder"),
    "no tensors": ("config.json", "same folder"),
    "a null": ("a\0.safetensors", "same folder"),
    "a number": (3, "same folder"),
    "nothing": (None, "same folder"),
    "a list": (["model.safetensors"], "same folder"),
    "empty": ("", "same folder"),
    "long": ("a" * 5000 + ".safetensors", "same folder"),
    "colours of a terminal": ("\x1b[31m\n.safetensors", r"lacks \\x1b\[31m\\n.safetensors"),
    "absent": ("other.safetensors", "lacks other.safetensors"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(folder, name):
    file, message = INDEXES[name]
    secret = folder.parent / "secret"
    secret.mkdir()
    (secret / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    names = safetensors_io.header(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    with pytest.raises(UserError, match=message) as found:
        weights.pretrained(folder)
    assert str(found.value).isprintable()


@pytest.mark.parametrize("raw", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"a":' * 100_000, "\0"])
def test_odd_indexes(folder, raw):
    (folder / "model.safetensors.index.json").write_text(raw)
    with pytest.raises(UserError, match="model.safetensors.index.json (has no weight_map|is |holds )"):
        weights.pretrained(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_weights_that_are_no_numbers(folder, value, kind):
    path = folder / "model.safetensors"
    stored = {n: safetensors_io.rows(t, 0, t.shape[0]).astype(kind) for n, t in safetensors_io.header(path).items()}
    safetensors_io.write(path, stored)
    _, _, config = weights.pretrained(folder)  # all are numbers yet
    stored["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    safetensors_io.write(path, stored)
    with pytest.raises(UserError, match="model.layers.1.mlp.up_proj.weight holds values that are infinite or not a"):
        weights.load(folder, config)


def test_weights_that_float32_does_not_hold(folder):
    path = folder / "model.safetensors"
    stored = {n: safetensors_io.rows(t, 0, t.shape[0]) for n, t in safetensors_io.header(path).items()}
    last = stored["model.norm.weight"] = stored["model.norm.weight"].astype(np.float64)
    last[-1] = 1e300
    safetensors_io.write(path, stored)
    with pytest.raises(UserError, match="model.norm.weight holds values beyond 3.39e"):
        weights.pretrained(folder)


def test_adapters_that_are_no_numbers(tmp_path):
    _, _, config = small_model()
    adapter = lora.init(config, lora.Lora(2, 4.0, ("q",)), jax.random.key(0))
    lora.save(tmp_path, config, lora.Lora(2, 4.0, ("q",)), adapter)
    lora.load(tmp_path, config)
    path = tmp_path / "adapter_model.safetensors"
    stored = {n: safetensors_io.rows(t, 0, t.shape[0]) for n, t in safetensors_io.header(path).items()}
    next(iter(stored.values()))[0, 0] = np.nan
    safetensors_io.write(path, stored)
    with pytest.raises(UserError, match="lora_A.weight holds values"):
        lora.load(tmp_path, config)
    (tmp_path / "adapter_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(UserError, match="adapter_config.json is nested too deeply"):
        lora.load(tmp_path, config)


CONFIGS = {
    "endless layers": ({"num_hidden_layers": 10**8}, "num_hidden_layers=100000000 is beyond 10000"),
    "endless words": ({"vocab_size": 10**12}, "vocab_size=1000000000000 is beyond"),
    "endless width": ({"hidden_size": 1 << 40}, "hidden_size=1099511627776 is beyond"),
    "endless heads": ({"num_attention_heads": 1 << 30}, "num_attention_heads=1073741824 is beyond"),
    "no number": ({"rms_norm_eps": "small"}, "rms_norm_eps='small' is not a finite number"),
    "not a number": ({"rope_theta": float("nan")}, "rope_theta=nan is not a finite number"),
    "infinite": ({"initializer_range": float("inf")}, "initializer_range=inf is not a finite number"),
    "no variance": ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be above 0"),
    "no turn": ({"rope_theta": 0}, "rope_theta=0.0 must be above 0"),
    "rope of zero": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 4}},
        "factor=0.0 must be above 0",
    ),
    "rope as text": ({"rope_scaling": "llama3"}, "holds llama3, which is no table"),
    "rope as list": ({"rope_parameters": [1, 2]}, "which is no table"),
    "rope of nothing": ({"rope_scaling": {"type": "linear", "factor": None}}, "factor=None is not a finite number"),
    "ends as text": ({"eos_token_id": "</s>"}, "eos_token_id='</s>' is not a whole number"),
    "ends as lists": ({"eos_token_id": [[1]]}, r"eos_token_id=\[1\] is not a whole number"),
    "begin as list": ({"bos_token_id": [1]}, r"bos_token_id=\[1\] is not a whole number"),
    "kind as list": ({"model_type": ["llama"]}, "is not supported"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(folder, name):
    change, message = CONFIGS[name]
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("rope_parameters" if "rope_scaling" in change else "rope_scaling", None)
    path.write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message) as found:
        model_config.read_config(folder)
    assert "\n" not in str(found.value) and len(str(found.value)) < 500


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"a":' * 100_000, b"[1]", b"\xff\xff", b"{", b'{"a": 1, "a": 1}'])
def test_every_small_file(tmp_path, name, content):
    source = weights.bundled("nano")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} (is|holds) "):
        model_config.read_config(tmp_path)
        tokenizer._eos_ids(tmp_path)
        tokenizer._chat_template(tmp_path)


def test_odd_tokenizers(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    for template in (3, {"default": "x"}):
        path.write_text(json.dumps({"chat_template": template}))
        with pytest.raises(UserError, match="chat_template is a (int|dict)"):
            tokenizer._chat_template(tmp_path)
    path.write_text(json.dumps({"chat_template": [{"name": "other"}, 5, {"name": ["default"]}]}))
    assert tokenizer._chat_template(tmp_path) is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["a"]}')
    with pytest.raises(UserError, match=r"eos_token_id=\['a'\] is no token id"):
        tokenizer._eos_ids(tmp_path)


def test_large_files_are_not_read(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot be read"):
        read_json_object(tmp_path)
    monkeypatch.setattr("jaxrl_llm.errors.MOST_JSON", 10)
    (tmp_path / "a.json").write_text('{"a": "bcdefgh"}')
    with pytest.raises(UserError, match="is larger than"):
        read_json_object(tmp_path / "a.json")
