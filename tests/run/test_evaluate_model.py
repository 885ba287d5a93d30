"""``jaxrl eval`` and ``jaxrl chat``: figures with intervals, files of one's own, talks of several turns."""

import io
import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from jaxrl_llm.__main__ import main
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.problems import make_split
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs import rows as rows_of_jobs
from jaxrl_llm.jobs import sft
from jaxrl_llm.metrics.intervals import best_of_k, pass_at_k
from jaxrl_llm.planning import presets
from jaxrl_llm.run import parts
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


HALVES = [r"\boxed{2}", r"\boxed{1/2}", r"so it is $x = \frac12$.", r"<answer>0.5</answer>"]


@pytest.mark.parametrize(
    ("name", "answer", "texts", "right", "vote"),
    [
        ("number", "42", ["I think it is 41.", "So the answer is 42.", "Adding up, we get 42.", "Hence 42."], 3, 1.0),
        ("number", "42", ["So it is 41.", "we get 41", "The answer: 42", "42"], 2, 0.0),  # of two, the first
        ("number", "41", ["It is 41.", "Adding up, we get 42.", "Hence 42.", "no idea", "none"], 1, 0.0),
        ("any", "42", ["It is 41.", "So the answer is 42.", "I get 42.0"], 2, 1.0),
        ("any", "Rome", ["Paris", "rome.", "**Rome**"], 2, 1.0),
        ("exact", "C#", ["F#", "c#", "#F#", "C#."], 2, 1.0),
        ("choice", "B", ["The answer is A.", "The answer is (B).", "I choose B.", "Answer: B"], 3, 1.0),
        ("choice", "A", ["The answer is A.", "The answer is (B).", "I choose B.", "Answer: B"], 1, 0.0),
        ("math", "1/2", HALVES, 3, 1.0),
        ("math", "2", HALVES, 1, 0.0),
        ("math", "x+1", ["$y$", r"\boxed{x + 1}", r"\(x+1\)"], 2, 1.0),
        ("math", "1", ["I do not know", "nor do I"], 0, 0.0),
    ],
)  # fmt: skip
def test_samples_agree_on_what_their_verifier_reads(name, answer, texts, right, vote):
    """Right answers are the same one in other words, and so are wrong ones."""
    verify = parts.VERIFIERS[name]
    problem = Problem("rows", "?", "", {"value": answer}, 0, "?")
    value = np.array([[verify(problem.answer, text).value for text in texts]])
    assert value.sum() == right
    said = evaluate_model.answers_read([problem], verify, [texts])
    assert evaluate_model.figures(value, np.ones(value.shape, bool), said)[f"maj@{len(texts)}"].mean == vote


def test_without_one_answer_there_is_no_majority(capsys):
    assert evaluate_model.answers_read([], parts.VERIFIERS["code"], []) is None
    assert capsys.readouterr().out == (
        "no maj@k: jaxrl_llm.verifiers.code.verify reads no answer on which responses could agree\n"
    )
    assert set(evaluate_model.figures(np.ones((2, 2)), np.ones((2, 2), bool))) == {"avg@2", "pass@1", "pass@2"}


def test_the_best_of_some_is_the_mean_over_all_choices():
    values = np.random.default_rng(0).normal(size=(3, 5))
    for k in range(1, 6):
        want = [np.mean([max(some) for some in itertools.combinations(row, k)]) for row in values]
        assert best_of_k(values, k).tolist() == doubles(want, magnitude=4)
    right = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert best_of_k(right, 2).tolist() == doubles(pass_at_k([2, 0], 4, 2).tolist())
    for k in (0, 6):
        with pytest.raises(ValueError, match=rf"k={k} must lie in \[1, samples=5\]"):
            best_of_k(values, k)


def test_rewards_of_responses_and_the_best_of_each_prompt():
    value, valid = np.array([[1.0, 3.0], [-2.0, -1.0], [9.0, 9.0]]), np.ones((3, 2), bool)
    valid[2, 0] = False
    found = evaluate_model.rewards_of(value, valid)
    assert (found["reward"].mean, found["best@2"].mean, found["reward"].n) == (0.25, 1.0, 2) and len(found) == 2
    line = {"prompt": "?", "responses": ["a", "b", "c"], "value": [-1.0, 2.0, 2.0], "valid": [True] * 3,
            "truncated": [False] * 3}  # fmt: skip
    assert [row["label"] for row in evaluate_model.rows_of([line], best=True)] == [False, True, False]
    cut = line | {"truncated": [False, True, False]}
    assert [row["label"] for row in evaluate_model.rows_of([cut], best=True)] == [False, True]
    assert evaluate_model.rows_of([line | {"responses": ["", "", ""]}], best=True) == []
    with pytest.raises(UserError, match="no problem has a valid reward for all of its samples"):
        evaluate_model.rewards_of(value, ~valid)


def test_a_model_and_rows_of_ones_own(tmp_path, capsys):
    byte_model(tmp_path, "qwen2", max_positions=96)
    rows = [{"prompt": f"{k}?", "answer": str(k)} for k in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "found.json"
    words = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), "--samples", "2", "--top-k", "9"]
    own = tmp_path / "own.jsonl"
    more = ["--max-new-tokens", "4", "--out", str(out), "--responses", str(own)]
    assert main(["eval", *words, *more]) == 0
    said = capsys.readouterr().out
    assert "5 problems x 2 samples" in said and "pass@2" in said and "maj@2" in said
    whole = json.loads(out.read_text())
    assert len(whole["problems"]) == 5 and len(whole["problems"][0]["responses"]) == 2
    kept = [json.loads(line) for line in own.read_text().splitlines()]
    assert kept == evaluate_model.rows_of(whole["problems"]) and f"({len(kept)} responses, " in said


def test_responses_of_one_model_go_into_one_file(tmp_path, capsys):
    for name in "ab":
        (place := tmp_path / "run" / "seeds" / name / "model").mkdir(parents=True)
        byte_model(place, max_positions=96)
    assert main(["eval", "--model", str(tmp_path / "run"), "--responses", str(tmp_path / "own.jsonl")]) == 2
    assert "own.jsonl is of one model, and --model" in capsys.readouterr().err and not (tmp_path / "own.jsonl").exists()


@pytest.mark.slow
def test_a_model_is_tuned_on_its_own_right_responses(tmp_path, capsys):
    """Rejection sampling, by three commands; kept apart by label, and as pairs."""
    own, given = str(tmp_path / "own.jsonl"), tmp_path / "rows.jsonl"
    problems = [p for split in ("train", "heldout") for p in make_split(chain, split=split, n=24, seed=0)]
    given.write_text("\n".join(json.dumps({"prompt": p.prompt, "answer": p.answer["value"]}) for p in problems))
    words = ["--data", str(given), "--verifier", "number", "--samples", "2", "--responses", own]
    assert main(["eval", *words]) == 0
    rows = [json.loads(line) for line in open(own)]
    assert {row["label"] for row in rows} == {True, False}
    small = ["--data", own, "--format", "unpaired", "--model", "nano", "--smoke", "--max-new-tokens", "32"]
    for command, more in (("sft", []), ("sft", ["--keep", "all"]), ("dpo", ["--loss", "kto_loss"])):
        assert main([command, *small, *more, "--out", str(tmp_path / "out"), "--fresh"]) == 0, capsys.readouterr().err
    kept = [rows_of_jobs.texts(sft.Settings(data=own, keep=keep), "unpaired") for keep in ("right", "all")]
    assert [row.response for row in kept[0]] == [row["completion"] for row in rows if row["label"]]
    assert len(kept[1]) == len(rows)


def test_responses_to_imitate_are_the_right_ones(tmp_path, capsys):
    rows = tmp_path / "own.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": "3", "label": False, "reward": 0.0}) + "\n")
    with pytest.raises(UserError, match="none of 1 responses has label true; give others, or --keep all"):
        rows_of_jobs.texts(sft.Settings(data=str(rows)), "unpaired")
    assert rows_of_jobs.texts(sft.Settings(data=str(rows), keep="all"), "unpaired") == [("1+1=", "3")]
    with pytest.raises(SystemExit):
        main(["sft", "--keep", "all", "--smoke", "--out", str(tmp_path / "out")])
    assert "--keep all belongs to --format unpaired: give it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "missing"], "missing"),
        (["--samples", "0"], "--samples 0"),
        (["--reward", "nobody"], "--reward nobody is no MODULE:FUNCTION and no folder of a reward model"),
        (
            ["--reward", "tests.run.test_rated:length", "--verifier", "exact"],
            "judges in place of --verifier exact; drop one",
        ),
        (["--reward-weights", "2"], "1 for 0 rewards"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--top-p", "2"], "--top-p 2"),
        (["--temperature", "-1"], "--temperature -1 must be finite"),
        (["--temperature", "nan"], "--temperature nan must be finite"),
        (["--max-new-tokens", "100000"], "--max-new-tokens 100000"),
        (["--seed", "99999999999999999999"], "--seed 99999999999999999999 must be below 2**32"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--model", ""], "--model '' names nothing; give a model or run folder"),
        (["--lora", "8"], "--lora 8 is of training: give it to jaxrl train, or drop --lora"),
        (["--offload", "optimiser"], "--offload optimiser is of training: give it to jaxrl train, or drop --offload"),
        (["--data", "countdown", "--verifier", "math"], "--verifier math is of rows of your own"),
        (["--format", "gsm8k"], "--format gsm8k is of rows of your own, and --data countdown is generated"),
        (["--remat"], "--remat is of training: give it to jaxrl train, or drop --remat"),
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
        (["--seed", "4294967296"], "--seed 4294967296 must be below 2**32"),
        (["--lora", "8"], "--lora 8 is of training: give it to jaxrl train, or drop --lora"),
        (["--system", "be brief"], "--system 'be brief' is a message for a chat template, and --model nano has none"),
    ],
)
def test_mistakes_of_a_talk_are_said_before_it_begins(words, said, capsys):
    assert main(["chat", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.strip().count("\n") == 0


def test_what_no_flag_says_is_taken_by_the_size_of_the_model(tmp_path, capsys, monkeypatch):
    """As in training: a model of one's own is not cut at the 28 tokens of the bundled ones."""
    byte_model(tmp_path, max_positions=96)
    monkeypatch.setattr(presets, "PRESETS", (presets.Preset(math.inf, 1e-4, 33, "bfloat16", False),))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1?", "answer": "1"}))
    seen = []
    monkeypatch.setattr(
        evaluate_model, "evaluate", lambda settings: seen.append(settings) or ({}, [{"truncated": [False]}])
    )
    words = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl")]
    assert main(["eval", *words]) == 0 and main(["eval", *words, "--max-new-tokens=4"]) == 0 and main(["eval"]) == 0
    assert [(x.max_new_tokens, x.compute) for x in seen] == [(33, "bfloat16"), (4, "bfloat16"), (28, "float32")]
    said = capsys.readouterr().out
    assert "where no flag says otherwise: --max-new-tokens 33 --compute bfloat16\n" in said
    assert "where no flag says otherwise: --compute bfloat16\n" in said and said.count("no flag says") == 2


@pytest.mark.parametrize("told", [True, False])
def test_answers_of_a_talk_are_as_long_as_the_model_has_them(told, tmp_path, capsys, monkeypatch):
    byte_model(tmp_path, max_positions=400)
    monkeypatch.setattr(presets, "PRESETS", (presets.Preset(math.inf, 1e-4, 65 if told else 28, "float32", False),))
    seen = []
    monkeypatch.setattr(chat, "make_answer", lambda settings: seen.append(settings.max_new_tokens) or str)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--model", str(tmp_path)]) == 0 and seen == [65 if told else 64]
    assert ("--max-new-tokens 65" in capsys.readouterr().err) == told


def test_problems_of_reasoning_gym_are_those_that_training_holds_out():
    data = "reasoning_gym:basic_arithmetic"
    _, held, verify = parts.load_problems(data, train=4, heldout=3, seed=5)
    assert evaluate_model.asked(evaluate_model.Settings(data=data, problems=3)) == (held, verify)
    assert parts.load_evaluated(data, most=3, layout="plain") == (held, verify)
    with pytest.raises(UserError, match="^--eval-data missing.jsonl does not exist"):
        parts.load_evaluated("missing.jsonl", most=3, layout="plain")


def test_rows_that_a_mixture_repeats_are_measured_once(tmp_path, capsys):
    for name, count in (("a", 6), ("b", 2)):
        lines = [json.dumps({"prompt": f"{name}{k}?", "answer": str(k)}) for k in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = f"{tmp_path}/a.jsonl@0.5,{tmp_path}/b.jsonl@0.5"
    found, _ = evaluate_model.asked(evaluate_model.Settings(data=data))
    assert [row.prompt for row in found] == ["a0?", "a1?", "a2?", "a3?", "a4?", "a5?", "b0?", "b1?"]
    assert parts.load_evaluated(data, most=99, layout="plain")[0] == found and capsys.readouterr().out == ""
    assert len(evaluate_model.asked(evaluate_model.Settings(data=data, problems=3))[0]) == 3
    assert capsys.readouterr().out.startswith("the first 3 of 8 rows of ")


def test_a_talk_keeps_what_was_said(capsys):
    seen = []

    def answer(messages):
        seen.append([m["role"] for m in messages])
        return f"answer {len(seen)}"

    messages = chat.talk(answer, ["one\n", "two\n", "\n", "never\n"], "be brief")
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert messages[-1] == {"role": "assistant", "content": "answer 2"}
    assert capsys.readouterr().out == "answer 1\nanswer 2\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_message_that_is_no_text_ends_the_talk_in_one_line(errors, capsys, monkeypatch):
    monkeypatch.setattr(chat, "make_answer", lambda settings: lambda messages: "answer")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff 2+3=\n"), "utf-8", errors))
    assert main(["chat"]) == 2
    error = capsys.readouterr().err
    assert "error: a message is not UTF-8" in error and error.count("\n") == 1


def _no_evaluation(settings):
    raise AssertionError("the mistake is found before an evaluation")


@pytest.mark.parametrize("out", ["missing/found.json", "folder"])
def test_a_file_that_cannot_be_written_is_said_before_the_evaluation(out, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(evaluate_model, "evaluate", _no_evaluation)
    assert main(["eval", "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert f"error: cannot write {tmp_path / out}: " in error and "choose another --out" in error


def test_a_file_of_responses_that_cannot_be_written_names_its_flag(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_model, "evaluate", _no_evaluation)
    assert main(["eval", "--responses", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"error: cannot write {tmp_path}: Is a directory; choose another --responses\n" in error


@pytest.mark.parametrize(("flag", "more"), [("out", ""), ("data", ""), ("data", "@1,other.jsonl@2")])
def test_responses_do_not_take_the_place_of_another_file(flag, more, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_model, "evaluate", _no_evaluation)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert main(["eval", f"--{flag}", f"rows.jsonl{more}", "--responses", f"{tmp_path}/rows.jsonl"]) == 2
    said = f"error: --responses {tmp_path}/rows.jsonl is the file of --{flag}, which would be lost; give another\n"
    assert capsys.readouterr().err == said
    assert pathlib.Path("rows.jsonl").read_text() == '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize("more", ["", "@1,other.jsonl@2"])
def test_figures_do_not_take_the_place_of_the_rows(more, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_model, "evaluate", lambda settings: ({}, [{"truncated": [False]}]))
    monkeypatch.chdir(tmp_path)
    pathlib.Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert main(["eval", "--data", f"rows.jsonl{more}", "--out", "./rows.jsonl"]) == 2
    said = "error: --out rows.jsonl is the file of --data, which would be lost; give another\n"
    assert capsys.readouterr().err == said
    assert pathlib.Path("rows.jsonl").read_text() == '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(("stage", "written"), [("evaluate", False), ("write", True)])
def test_only_what_is_written_is_a_mistake_in_out(stage, written, tmp_path, capsys, monkeypatch):
    """A server that is not there, say, has nothing to do with the file of the figures."""

    def evaluate(settings):
        if stage == "evaluate":
            raise ConnectionRefusedError(111, "Connection refused")
        (tmp_path / "x.json").mkdir()  # as if someone else took the name meanwhile
        return {}, [{"truncated": [False]}]

    monkeypatch.setattr(evaluate_model, "evaluate", evaluate)
    words = ["eval", "--out", str(tmp_path / "x.json")]
    if written:
        assert main(words) == 2
        assert f"cannot write {tmp_path}/x.json: Is a directory; choose another --out" in capsys.readouterr().err
    else:
        with pytest.raises(ConnectionRefusedError):
            main(words)


def test_one_file_does_not_hold_the_figures_of_two_models(tmp_path, capsys, monkeypatch):
    for seed in ("seed_0", "seed_1"):
        (tmp_path / seed / "model").mkdir(parents=True)
        (tmp_path / seed / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(evaluate_model, "evaluate", _no_evaluation)
    assert main(["eval", "--model", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"has 2; drop it, which writes eval.json beside each, or give one of them: {tmp_path}/seed_0/model" in error
    whole = {"avg@1": evaluate_model.Interval(0.5, 0.25, 0.75, 4)}
    lines = [{"truncated": [False]}]
    monkeypatch.setattr(evaluate_model, "evaluate", lambda settings: (whole, lines))
    assert main(["eval", "--model", str(tmp_path)]) == 0
    for seed in ("seed_0", "seed_1"):
        found = json.loads((tmp_path / seed / "eval.json").read_text())
        assert found["model"] == str(tmp_path / seed / "model")


def test_the_bundled_model_answers():
    answer = chat.make_answer(chat.Settings(max_new_tokens=8))
    assert isinstance(answer([{"role": "user", "content": "2+3="}]), str)
