"""Names of the hub: what is in its cache is found without a network, what is not is one line."""

import json

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from jaxrl_llm.__main__ import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.io import hub
from jaxrl_llm.planning import known_models
from tests.models_for_tests import byte_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as the hub's library lays it out: a model with two revisions, and a file of a data set."""
    folder = tmp_path / "cache"
    for kind, name, commit, branch in (
        ("models", "org--judge.v2", "aaaa", "main"),
        ("models", "org--judge.v2", "bbbb", "step-10"),
        ("datasets", "org--rows", "cccc", "main"),
    ):
        place = folder / f"{kind}--{name}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / branch).write_text(commit)
        snapshot = place / "snapshots" / commit
        snapshot.mkdir(parents=True)
        if kind == "models":
            byte_model(snapshot)
        else:
            (snapshot / "main").mkdir()
            rows = [{"prompt": f"{k}+1=", "answer": str(k + 1)} for k in range(64)]
            (snapshot / "main" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_words_become_folders_and_files_of_the_cache(cache, tmp_path, monkeypatch):
    judge, rows = cache / "models--org--judge.v2" / "snapshots", cache / "datasets--org--rows" / "snapshots" / "cccc"
    for given, wanted in (
        (["--model", "org/judge.v2"], ["--model", str(judge / "aaaa")]),
        (["--model=org/judge.v2@step-10"], [f"--model={judge / 'bbbb'}"]),
        (["--teacher", "org/judge.v2", "self"], ["--teacher", str(judge / "aaaa"), "self"]),
        (["--reward", "hf://org/judge.v2", "mine:brief"], ["--reward", str(judge / "aaaa"), "mine:brief"]),
        (["hf://org/judge.v2@step-10"], [str(judge / "bbbb")]),
        (["--data", "hf://datasets/org/rows/main/train.jsonl@0.5,b.jsonl@0.5"],
         ["--data", f"{rows / 'main' / 'train.jsonl'}@0.5,b.jsonl@0.5"]),
        (["--out", "org/judge.v2", "--reward", "org/judge.v2"], ["--out", "org/judge.v2", "--reward", "org/judge.v2"]),
        (["--model", "runs/a/model", "--model", "/tmp/x", "--data", "tfds:gsm8k"], None),
    ):  # fmt: skip
        assert hub.located(given) == (given if wanted is None else wanted)
    (tmp_path / "org" / "judge.v2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.located(["--model", "org/judge.v2"]) == ["--model", "org/judge.v2"], "a folder of one's own comes first"


def test_one_copy_of_the_weights_is_fetched(monkeypatch):
    """Mistral publishes them twice, others once more in a folder of another format."""
    given = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **rest: given.update(rest) or "folder")
    assert hub.located(["--model", "org/twice"]) == ["--model", "folder"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    wanted = ["config.json", "model.safetensors.index.json", *shards, "tokenizer.json", "tokenizer.model",
              "chat_template.jinja"]  # fmt: skip
    others = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/params.json",
              "consolidated.safetensors.index.json", "onnx/model.safetensors", "original/tokenizer.model",
              "pytorch_model.bin"]  # fmt: skip
    patterns = {name: given[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*others, *wanted], **patterns)) == wanted


def test_what_the_hub_does_not_give_is_one_line(cache, capsys):
    assert main(["train", "--model", "org/nothing", "--data", "chain"]) == 2
    said = capsys.readouterr().err
    assert "--model hf://org/nothing is no path here, and the hub does not give it" in said and said.count("\n") == 1
    with pytest.raises(UserError, match="--data hf://datasets/org: give hf://ORG/NAME, or hf://datasets/ORG/NAME/PATH"):
        hub.located(["--data", "hf://datasets/org"])


def test_a_run_of_a_model_and_rows_of_the_hub(cache, tmp_path):
    words = ["--model", "org/judge.v2", "--data", "hf://datasets/org/rows/main/train.jsonl", "--prompts-per-step", "2",
             "--group-size", "2", "--max-new-tokens", "4", "--eval-problems", "4", "--eval-samples", "1",
             "--steps", "1", "--out", str(tmp_path / "run"), "--no-filter-groups"]  # fmt: skip
    assert main(["train", *words]) == 0
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["model"].endswith("snapshots/aaaa"), "the commit stands in the settings of the run"


def test_a_plan_knows_a_model_by_either_name():
    assert known_models.shape_of("Qwen/Qwen3-8B") == known_models.shape_of("qwen3-8b")
