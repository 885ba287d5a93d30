"""Training, a real index and a real server in one run: what a response finds in the index, the server judges."""

import functools
import json
import os

import numpy as np
import pytest

from experiments.agents import research_search
from jaxrl_llm.experiment import cli as experiments
from jaxrl_llm.jobs.grpo import cli
from jaxrl_llm.tools import boxes, endpoints
from tests.endpoint_for_tests import serving
from tests.models_for_tests import byte_model

CORPUS = [f"Number {k} comes before {k + 1}" for k in range(10, 60)]
ASKED = "JUDGE_OF_THE_TEST"  # variable: address and file of replies


@functools.cache
def _index():
    return boxes.bm25(CORPUS)


@functools.cache
def _judge(asked):
    address, cache = asked.split(" ")
    return endpoints.make_chat(address, "judge", cache=cache)


def judged(answer, response):
    """A reward of one's own: the judge is shown the response and what the index has for it."""
    (found,) = _index()(f"number {20 + answer['value']}", 1)
    said = _judge(os.environ[ASKED])([{"role": "user", "content": f"{CORPUS[int(found)]}\n{response}"}])
    return float(said)


def grade(request):
    """By what was shown, so that responses differ."""
    return str(sum(map(ord, request["messages"][-1]["content"])) % 5 / 4)


def test_an_index_and_a_server_are_behind_the_rewards_of_a_run(tmp_path, monkeypatch):
    with serving(monkeypatch, reply=grade) as server:
        monkeypatch.setenv(ASKED, f"{server.address} {tmp_path / 'replies.jsonl'}")
        words = ["--data", "chain", "--prompts-per-step", "4", "--group-size", "3", "--max-new-tokens", "8",
                 "--train-problems", "16", "--eval-problems", "4", "--eval-samples", "2", "--steps", "2",
                 "--reward", f"{__name__}:judged", "--no-filter-groups"]  # fmt: skip
        assert cli([*words, "--out", str(tmp_path / "run")]) == 0
        shown = [request["messages"][-1]["content"].split("\n")[0] for request in server.seen]
        asked = len(server.seen)
        assert asked > 8 and set(shown) <= set(CORPUS) and len(set(shown)) > 3, "documents follow the question"
        assert cli(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
        assert len(server.seen) > asked
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["grad/norm"] > 0 and line["reward/valid_fraction"] == 1 for line in lines)
    assert all(0 < line["reward/mean"] < 1 for line in lines)


@pytest.mark.slow
def test_what_an_index_finds_stands_in_the_prompt_that_trains(tmp_path):
    """One search for the question itself, by bm25s: the documents that share its words."""
    byte_model(tmp_path, "qwen2", max_positions=1400)
    rows = [{"prompt": f"What comes after number {k}?", "answer": str(k + 1)} for k in range(10, 60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"contents": text}) for text in CORPUS))
    given = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), "--verifier", "f1", "--tools",
             f"search={tmp_path}/corpus.jsonl", "--max-turns", "2", "--action-tokens", "4", "--observation-tokens",
             "8", "--max-new-tokens", "24", "--slots", "4", "--eval-problems", "2", "--smoke", "--seeds",
             "1"]  # fmt: skip
    seen = []
    plain = boxes.bm25

    def watched(texts, **settings):
        find = plain(texts, **settings)

        def search(query, count):
            ids = list(find(query, count))
            seen.append((query, [texts[int(i)] for i in ids]))
            return ids

        return search

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "bm25", watched)
        found = experiments.run(research_search, [*given, "--arm", "rag", "--out", str(tmp_path / "out")])
    metrics = found.arms["rag"].metrics
    assert np.isfinite(metrics["loss/total"]).all() and metrics["world/failed_fraction"] == [0.0]
    numbers = [(query, "".join(c for c in query if c.isdigit()), texts) for query, texts in seen]
    assert len(numbers) > 4 and all(any(n in text for text in texts) for _, n, texts in numbers)
