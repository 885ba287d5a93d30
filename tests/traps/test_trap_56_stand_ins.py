"""Trap 56, stand-ins that hide the fault under test: every adapter meets its real package in some joined test."""

import json
import pathlib

import numpy as np
import pytest

from experiments.agents import research_search
from jaxrl_llm.experiment import cli
from tests.models_for_tests import byte_model

TESTS = pathlib.Path(__file__).resolve().parents[1]
MET = {  # adapter: where it meets what it adapts, and a word of that test
    "TextWorld and TextArena in processes": ("traps/test_trap_50_threads.py", "import textworld"),
    "an OpenAI-compatible server": ("traps/test_trap_51_budget.py", "with serving("),
    "an index of bm25s": ("traps/test_trap_56_stand_ins.py", "search={folder}"),
    "MCP servers": ("tools/test_mcp_servers.py", "mcp_server_for_tests"),
    "Gymnasium": ("rollout/test_host_texts.py", 'importorskip("gymnasium")'),
    "Ray": ("asynchronous/test_ray.py", 'importorskip("ray"'),
}


@pytest.mark.parametrize("adapter", MET)
def test_every_adapter_has_its_joined_test(adapter):
    place, word = MET[adapter]
    assert word in (TESTS / place).read_text()


def test_training_with_a_real_index(tmp_path):
    """Two updates of an arm that retrieves before it answers; nothing in the place of the index."""
    pytest.importorskip("bm25s")
    folder = tmp_path
    byte_model(folder, "qwen2", max_positions=1400)
    rows = [{"prompt": f"What is {k} + {k}?", "answer": str(2 * k), "level": 1 + k % 3} for k in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [{"contents": f"{k} and {k} make {2 * k}"} for k in range(20)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, texts)))
    sizes = ["--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "8", "--max-new-tokens", "24",
             "--slots", "4", "--eval-problems", "2"]  # fmt: skip
    given = ["--data", f"{folder}/rows.jsonl", "--verifier", "f1", "--tools", f"search={folder}/corpus.jsonl"]
    run = ["--smoke", "--seeds", "1", "--arm", "rag", "--out", str(tmp_path / "out"), "--model", str(folder)]
    arm = cli.run(research_search, [*run, *sizes, *given]).arms["rag"]
    assert arm.updates == 2 and np.isfinite(arm.metrics["loss/total"]).all()
    assert arm.metrics["world/failed_fraction"] == [0.0]
