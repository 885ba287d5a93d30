"""``jaxrl eval`` and ``jaxrl chat``: figures with intervals, files of one's own, talks of several turns."""

import json

import numpy as np
import pytest

from jaxrl_llm.__main__ import main
from jaxrl_llm.run.commands import chat, evaluate_model
from tests.close import doubles
from tests.models_for_tests import byte_model


def test_figures_of_made_up_verdicts():
    value = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    valid = np.ones((4, 4), bool)
    valid[3, 1] = False  # judged by nobody: the problem is left out
    texts = [["#1", "#1", "#2", "#3"], ["#1", "#2", "#3", "#4"], ["#5"] * 4, ["#1", "#2", "#2", "#2"]]
    found = evaluate_model.figures(value, valid, texts)
    assert found["avg@4"].mean == doubles((0.5 + 0.0 + 1.0) / 3) and found["avg@4"].n == 3
    assert found["pass@1"].mean == doubles(found["avg@4"].mean)
    assert found["pass@2"].mean == doubles((1 - 1 / 6 + 0.0 + 1.0) / 3)
    assert found["pass@4"].mean == doubles(2 / 3)
    assert found["maj@4"].mean == doubles(2 / 3)


def test_a_model_and_rows_of_ones_own(tmp_path, capsys):
    byte_model(tmp_path, "qwen2", max_positions=96)
    rows = [{"prompt": f"{k}?", "answer": str(k)} for k in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "found.json"
    words = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), "--samples", "2", "--top-k", "9"]
    assert main(["eval", *words, "--max-new-tokens", "4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "5 problems x 2 samples" in said and "pass@2" in said and "maj@2" in said
    whole = json.loads(out.read_text())
    assert len(whole["problems"]) == 5 and len(whole["problems"][0]["responses"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "missing"], "missing"),
        (["--samples", "0"], "--samples 0"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--top-p", "2"], "--top-p 2"),
        (["--temperature", "-1"], "--temperature -1 must be finite"),
        (["--temperature", "nan"], "--temperature nan must be finite"),
        (["--max-new-tokens", "100000"], "--max-new-tokens 100000"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "missing"], "missing"),
        (["--temperature", "-1"], "--temperature -1 must be finite and not negative; 0 is greedy"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
    ],
)
def test_mistakes_of_a_talk_are_said_before_it_begins(words, said, capsys):
    assert main(["chat", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.strip().count("\n") == 0


def test_a_talk_keeps_what_was_said(capsys):
    seen = []

    def answer(messages):
        seen.append([m["role"] for m in messages])
        return f"answer {len(seen)}"

    messages = chat.talk(answer, ["one\n", "two\n", "\n", "never\n"], "be brief")
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert messages[-1] == {"role": "assistant", "content": "answer 2"}
    assert capsys.readouterr().out == "answer 1\nanswer 2\n"


def test_the_bundled_model_answers():
    answer = chat.make_answer(chat.Settings(max_new_tokens=8))
    assert isinstance(answer([{"role": "user", "content": "2+3="}]), str)
