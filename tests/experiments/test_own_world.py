"""Agents' experiments in worlds of files: two steps with random weights, or one line that says what to do."""

import importlib
import json

import numpy as np
import pytest

from jaxrl_llm.experiment import cli
from jaxrl_llm.tools import boxes
from tests.models_for_tests import byte_model

SIZES = ["--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "8", "--max-new-tokens", "24",
         "--slots", "4", "--eval-problems", "2"]  # fmt: skip
ROWS = ["--data", "{folder}/rows.jsonl", "--verifier", "f1"]
SEARCH = [*ROWS, "--tools", "search={folder}/corpus.jsonl"]
CASES = {  # experiment: its arms, and what it is given
    "torl": (["no_tool", "outputs_too"], [*ROWS, "--tools", "calculator"]),
    "research_search": (["rag", "no_mask"], SEARCH),
    "deepresearcher": (["deep", "no_reader"], SEARCH),
    "asearcher": (["asearcher", "coupled"], SEARCH),
}
UNMEASURED = {  # what the embedded world alone can tell, or two held-out questions cannot
    "research_search": {"eval/f1_2", "eval/f1_3", "eval/searches_rise"},
    "deepresearcher": {"eval/f1_1", "eval/f1_2"},
    "asearcher": {"eval/exact_many", "eval/searches_many", "flow/hours"},
}


def module_of(slug):
    family = "systems" if slug == "asyncflow" else "agents"
    return importlib.import_module(f"experiments.{family}.{slug}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, questions with answers, and a corpus."""
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=1400)
    rows = [{"prompt": f"What is {k} + {k}?", "answer": str(2 * k), "level": 1 + k % 3} for k in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [{"contents": f"{k} and {k} make {2 * k}"} for k in range(20)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


@pytest.fixture(autouse=True)
def plain_search(monkeypatch):
    """A search that needs no package."""
    monkeypatch.setattr(boxes, "bm25", lambda texts: lambda query, count: range(count))


@pytest.mark.slow
@pytest.mark.parametrize("slug", CASES)
def test_two_steps(slug, folder, tmp_path):
    chosen, given = CASES[slug]
    given = [word.format(folder=folder) for word in given]
    arguments = ["--smoke", "--seeds", "1", "--arm", *chosen, "--out", str(tmp_path), "--model", str(folder)]
    found = cli.run(module_of(slug), [*arguments, *SIZES, *given])
    for name, arm in found.arms.items():
        assert arm.updates == 0 or np.isfinite(arm.metrics["loss/total"]).all(), name
        assert arm.updates == 0 or arm.metrics["world/failed_fraction"] == [0.0], name
        missing = set(module_of(slug).METRICS) - set(arm.metrics)
        assert missing <= UNMEASURED.get(slug, set()), f"{name} does not measure {missing}"
