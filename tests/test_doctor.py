"""Model folders with one thing wrong each: the doctor names it on one line, and its exit code says how bad it is."""

import json
import shutil
import subprocess
import sys

import jax
import pytest
import tokenizers

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import parts
from jaxrl_llm.run.commands import doctor
from tests.models_for_tests import TEMPLATE, byte_model, small_config


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return byte_model(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def _lines(folder, **settings):
    return {f"{level} {check}: {text}" for level, check, text in doctor.examine(folder, **settings)}


def _change(folder, file, **changes):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_good_folder(folder, capsys):
    assert doctor.cli([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out and "262 tokens, 262 rows, 0 of them padding" in out
    assert "21 tensors (21 in float32)" in out and "an answer ends with 2, an end id" in out
    assert "the template writes it too" in out and "a conversation grows by appending" in out
    assert all(line[:4] in ("ok  ", "note") for line in out.splitlines())


@pytest.mark.parametrize(
    ("file", "changes", "line"),
    [
        ("config.json", {"rope_scaling": {"rope_type": "yarn"}}, "FAIL config: rope_scaling type 'yarn'"),
        ("config.json", {"hidden_size": 32, "head_dim": 4}, "FAIL weights: model.safetensors: model.embed_tokens"),
        ("config.json", {"eos_token_id": [3]}, "note end ids: 2, 3 are used, but the files differ: generation"),
        ("generation_config.json", {"eos_token_id": [3]}, "FAIL template: an answer ends with"),
        ("generation_config.json", {"eos_token_id": [2, 999]}, "FAIL end ids: 999 beyond the 262 rows"),
        ("tokenizer_config.json", {"pad_token": "</s>"}, "note pad id: 3 is an end id too"),
        ("tokenizer_config.json", {"pad_token": None}, "note pad id: 2 is an end id too"),
        ("tokenizer_config.json", {"chat_template": None}, "note template: none"),
        ("tokenizer_config.json", {"chat_template": TEMPLATE.replace("{{ bos_token }}", "")}, "ok BOS: 1, once"),
        ("tokenizer_config.json", {"bos_token": None}, "ok BOS: none defined"),
        ("tokenizer_config.json", {"chat_template": "{{ raise_exception('no') }}"}, "FAIL BOS: the chat template"),
        (
            "tokenizer_config.json",
            {"chat_template": "{{ messages[-1]['content'] }}<|end|>"},
            "note template: add_generation_prompt changes nothing",
        ),
        (
            "tokenizer_config.json",
            {"chat_template": TEMPLATE.replace("m['content']", "(m['content'] if loop.last else '')")},
            "note template: several turns are not possible",
        ),
    ],
)  # fmt: skip
def test_one_thing_wrong(folder, file, changes, line):
    _change(folder, file, **changes)
    lines = _lines(folder)
    assert any(found.startswith(line) for found in lines), lines
    assert doctor.cli([str(folder)]) == int(any(found.startswith("FAIL") for found in lines))


def test_rows_and_tokens(good, tmp_path):
    config = small_config("llama", vocab_size=262, padded_vocab_size=300, eos_token_ids=(2, 3))
    params = make_policy(config).init(jax.random.key(0))
    folder = shutil.copytree(good, tmp_path / "padded")
    weights.save(folder, config, params)
    assert any("262 tokens, 300 rows, 38 of them padding" in line for line in _lines(folder))
    raw = json.loads((folder / "config.json").read_text())
    del raw["unpadded_vocab_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert any(line.startswith("note vocabulary: 38 of 300 rows have no token") for line in _lines(folder))
    config = small_config("llama", vocab_size=200, eos_token_ids=(2, 3))
    weights.save(folder, config, make_policy(config).init(jax.random.key(0)))
    assert any(line.startswith("FAIL vocabulary: the tokenizer has 262 tokens") for line in _lines(folder))


def test_a_token_without_a_row(folder):
    """Gemma 3 1B has one for an image."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens(["<image_soft_token>"])
    model.save(str(folder / "tokenizer.json"))
    lines = _lines(folder)
    assert "note vocabulary: 1 added tokens of 263 have no row: their texts are spelled out" in lines
    assert not [line for line in lines if line.startswith("FAIL")]
    found = parts.load_model(str(folder)).tokenizer
    assert found.vocab_size == 262 and max(found.encode("<image_soft_token>")) < 262
    _change(folder, "tokenizer_config.json", pad_token="<image_soft_token>")
    with pytest.raises(UserError, match=rf"--model {folder}: .*uses 262 \(<image_soft_token>\) beyond them"):
        parts.load_model(str(folder))


def test_a_bos_that_is_not_added(folder):
    _change(folder, "tokenizer.json", post_processor=None)
    _change(folder, "tokenizer_config.json", chat_template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert "ok BOS: the tokenizer adds none: in front only where the chat template writes it" in _lines(folder)


def test_absent_parts(folder):
    (folder / "tokenizer.json").unlink()
    assert any(line.startswith("FAIL tokenizer") for line in _lines(folder))
    (folder / "model.safetensors").unlink()
    assert any(line.startswith("FAIL weights") for line in _lines(folder))


def test_forward(folder):
    (line,) = (x for x in _lines(folder, forward=True) if " forward: " in x)
    assert "nats a token" in line and "a guess has -5.57" in line


def test_no_argument_is_the_embedded_model(capsys):
    assert doctor.cli([]) == 0
    assert "152,480 parameters" in capsys.readouterr().out


def test_bundled_models_are_well():
    for name in ("tiny", "nano"):
        assert not [x for x in _lines(weights.bundled(name), forward=True) if x.startswith("FAIL")]


def test_command_line(capsys):
    assert doctor.cli(["no/such/folder"]) == 2
    assert "no bundled model" in capsys.readouterr().err
    assert doctor.cli(["nano", "--forwards"]) == 2
    assert "did you mean --forward?" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm", "doctor", "nano"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("ok    config")
