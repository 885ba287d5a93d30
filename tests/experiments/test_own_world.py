"""Agents' experiments in worlds of files: two steps with random weights, or one line that says what to do."""

import importlib
import json
import sys
import types

import numpy as np
import pytest

from jaxrl_llm.experiment import cli
from jaxrl_llm.tools import boxes
from jaxrl_llm.worlds import host_shop
from tests.models_for_tests import byte_model
from tests.shop_for_tests import first_products, forty_mugs

SIZES = ["--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "8", "--max-new-tokens", "24",
         "--slots", "4", "--eval-problems", "2"]  # fmt: skip
ROWS = ["--data", "{folder}/rows.jsonl", "--verifier", "f1"]
SEARCH = [*ROWS, "--tools", "search={folder}/corpus.jsonl"]
CASES = {  # experiment: its arms, and what it is given
    "torl": (["no_tool", "outputs_too"], [*ROWS, "--tools", "calculator"]),
    "research_search": (["rag", "no_mask"], SEARCH),
    "deepresearcher": (["deep", "no_reader"], SEARCH),
    "asearcher": (["asearcher", "coupled"], SEARCH),
    "igpo": (["igpo"], SEARCH),
    "agentgym_rl": (["scaling"], ["--data", "webshop:{folder}/shop", "--turns", "1", "2"]),
    "spa_rl": (["spa"], ["--data", "webshop:{folder}/shop"]),
    "loop": (["loop", "critic"], ["--data", "appworld:{folder}"]),
    "tool_star": (["tool_star"], [*SEARCH[:-1], "calculator,search={folder}/corpus.jsonl"]),
    "ufo": (["ufo", "grpo"], ROWS),
}
UNMEASURED = {  # what the embedded world alone can tell, or two held-out questions cannot
    "research_search": {"eval/f1_2", "eval/f1_3", "eval/searches_rise"},
    "deepresearcher": {"eval/f1_1", "eval/f1_2"},
    "agentgym_rl": {"eval/success_near", "eval/success_far", "policy/entropy"},
    "ufo": {"eval/success@3", "eval/success@4", "eval/success@5"},
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
    write_apps(folder / "data")
    (folder / "shop").mkdir()
    forty_mugs(folder / "shop")
    return folder


def write_apps(data):
    """AppWorld's files of three tasks to train on, and one scenario of two variants held out."""
    who = {"first_name": "Ann", "last_name": "Lee", "email": "ann@example.com", "phone_number": "1"}
    (data / "datasets").mkdir(parents=True)
    for split, names in (("train", ("a_1", "b_1", "b_2")), ("dev", ("c_1", "c_2"))):
        (data / "datasets" / f"{split}.txt").write_text("\n".join(names))
        for name in names:
            truth = data / "tasks" / name / "ground_truth"
            truth.mkdir(parents=True)
            specs = {"instruction": "Which song?", "supervisor": who, "datetime": "2023-05-18T12:00:00"}
            (data / "tasks" / name / "specs.json").write_text(json.dumps(specs))
            (truth / "metadata.json").write_text(json.dumps({"difficulty": 1}))


class AppWorld:
    """AppWorld's interface: every second action ends the task, wrong."""

    def __init__(self, task_id, experiment_name, **settings):
        self.actions = 0

    def execute(self, code):
        self.actions += 1
        return "ran"

    def task_completed(self):
        return self.actions > 1

    def evaluate(self):
        return types.SimpleNamespace(success=False)

    def close(self):
        self.actions = 0


@pytest.fixture(autouse=True)
def plain_packages(monkeypatch):
    """In the place of what the searches and AppWorld need."""
    monkeypatch.setattr(boxes, "bm25", lambda texts: lambda query, count: range(count))
    monkeypatch.setattr(host_shop, "bm25_search", first_products)
    monkeypatch.setitem(sys.modules, "appworld", types.SimpleNamespace(AppWorld=AppWorld))


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
