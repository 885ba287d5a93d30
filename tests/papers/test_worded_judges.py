"""Judges that write principles, critiques and scores in free words on pairs of one's own, and who writes the first."""

import dataclasses
import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import strings, text_rows
from experiments.reward_models import deepseek_grm
from experiments.reward_models.parts import judge_pairs, judge_panels, report_judges, worded_judges
from jaxrl_llm.data.demonstrations import encode_responses
from jaxrl_llm.experiment import cli
from jaxrl_llm.run import options
from tests import close
from tests.endpoint_for_tests import serving
from tests.models_for_tests import byte_model


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=1600)
    lines = [{"prompt": f"Say {k}.", "chosen": f"It is {k}.", "rejected": f"No {k}!"} for k in range(24)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"model": str(folder), "data": str(folder / "pairs.jsonl"), "max_new_tokens": 16, "report_tokens": 48}


def _open(own, **changes):
    of_rows = worded_judges.Settings(
        **{k: v for k, v in own.items() if k != "model"} | {"report": "words"} | changes
    )  # fmt: skip
    both = dataclasses.asdict(options.ModelSettings(model=own["model"])) | dataclasses.asdict(of_rows)
    settings = types.SimpleNamespace(**both, learning_rate=1e-3)
    return worded_judges.open_task(settings).task, text_rows.opened(settings).model.tokenizer


def _texts(tokenizer, tokens):
    return [tokenizer.decode([t for t in row if t != strings.PAD]) for row in np.asarray(tokens).tolist()]


def test_what_a_judge_is_asked():
    text = worded_judges.question("Say hi.", ("Hi!", "No."), "principles", told=1)
    first, second = (text.index(f"{place} response:\n<<<\n{said}\n>>>") for place, said in
                     (("First", "Hi!"), ("Second", "No.")))  # fmt: skip
    assert text.index("Prompt:\n<<<\nSay hi.") < first < second and "second response is the better one" in text
    assert text.index("principles") < text.index("critique") < text.index("begins with SCORES:")
    alone = worded_judges.question("Say hi.", ("Hi!",), "critique", told=0)
    assert "principles" not in alone and "better" not in alone and "else 0" in alone and "\nResponse:\n" in alone
    assert "critique" not in worded_judges.question("Say hi.", ("Hi!", "No."), "scores")


@pytest.mark.parametrize(
    "text",
    ["SCORES:" + " " * 100_000 + "x", "\n" * 100_000, "SCORES: " + "1, " * 50_000 + "x", "SCORES: " + "9" * 5000],
)
def test_long_reports_are_read_once(text):
    """Blanks behind the mark took the cube of their number, and a number of 4301 digits ended the run."""
    start = time.process_time()
    assert worded_judges.scores(text) is None
    assert time.process_time() - start < 5.0


def test_scores_on_lines_of_their_own():
    for text, given in (
        ("SCORES: 7\n**Scores:** [8 ,\n 6] *.\nDone.", [8, 6]), ("_SCORES_ :\n\n10, 0", [10, 0]),
        ("SCORES: 8 6", None), ("SCORES: 8, 6 7", None), ("The SCORES: 8", None), ("SCORES: 8, 6.5", None),
    ):  # fmt: skip
        assert worded_judges.scores(text) == given, text


def test_reports_on_rows_in_words(own):
    """Prompts hold the pair in either order, hints name the place of the better one, and orders are undone."""
    task, tokenizer = _open(own)
    prompts = task.draw_prompts(jax.random.key(0), 40)
    gold, texts = np.asarray(judge_pairs.principled_scores(task, prompts)), _texts(tokenizer, prompts)
    for text, (one, two) in zip(texts, gold, strict=True):
        assert (text.index("It is") < text.index("No ")) == (one > two) and "by which principles" in text
    swapped = _texts(tokenizer, task.swapped(prompts))
    assert all((a.index("It is") < a.index("No ")) != (b.index("It is") < b.index("No ")) for a, b in
               zip(texts, swapped, strict=True))  # fmt: skip
    best = jnp.argmax(jnp.asarray(gold), axis=1)
    for text, at, plain in zip(_texts(tokenizer, task.hinted(prompts, best)), best.tolist(), texts, strict=True):
        hint = worded_judges.HINT.format(("first", "second")[at])
        assert text.replace(hint, "") == plain and hint in text
    for kind in ("critique", "scores"):
        other = _texts(tokenizer, task.asking(kind).draw_prompts(jax.random.key(0), 4))
        assert not any("principles" in text for text in other) and all("SCORES:" in text for text in other)
    assert task.asking("scores") is task.asking("scores")


def test_reports_are_read_off_their_last_line(own):
    task, tokenizer = _open(own)
    panels = judge_panels.of_task(task)
    said = ["Clarity.\nSCORES: 8, 6", "SCORES: 2, 2\nNo.\nSCORES: 3, 9", "SCORES: 1", "It is 8, 6", "SCORES: 8, 6, 4",
            "SCORES: 7, 8" + " " * 60]  # fmt: skip
    tokens, valid = encode_responses(tokenizer, said[:5], width=48)
    tokens = jnp.where(valid, tokens, tokenizer.eos_ids[0])
    cut = jnp.asarray(tokenizer.encode(said[5]))[None, :48]  # it never ended
    tokens = jnp.concatenate([tokens, cut])
    tagged, scored, scores = judge_pairs.read_report(task, tokens)
    assert (tagged == scored).all() and scored.tolist() == [True, True, False, False, False, False]
    assert scores.tolist() == [[8, 6], [3, 9], [0, 0], [0, 0], [0, 0], [0, 0]]
    _, scored, scores = jax.jit(lambda x: judge_pairs.read_report(panels, x))(tokens)
    assert scored.tolist() == [True, True, True, False, False, False] and scores[2].tolist() == [1, -1]
    prompts = panels.draw_prompts(jax.random.key(1), 60)
    gold = np.asarray(panels.gold_scores(prompts))
    single = gold[:, 1] < 0
    assert 0 < single.sum() < 60
    for text, true, alone in zip(_texts(tokenizer, prompts), gold, single, strict=True):
        assert ("two responses to it" in text) != alone and (not alone or ("It is" in text) == (true[0] == 1))
    told = _texts(tokenizer, panels.hinted(prompts, jnp.zeros(60, jnp.int32)))
    assert [("better one" in text) for text in told] == (~single).tolist()


def test_a_loaded_model_begins_as_it_is(own):
    task, _ = _open(own)
    start = report_judges.make_start(task, steps=5)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, start["judge"], task.world.start())


# --- who writes the first reports


def says(request):
    """Right where the preferred response comes first, else wrong; of a number with a 3 it says nothing."""
    text = request["messages"][0]["content"]
    if "Say 3." in text:
        return "Who knows?"
    return f"Principle: clarity {len(text)}.\nSCORES: 9, 4"


@pytest.fixture
def server(monkeypatch, tmp_path):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    with serving(monkeypatch, reply=says) as server:
        yield server


def test_a_judge_begins_with_right_reports_of_a_model(server, own, capsys):
    task, tokenizer = _open(own, writer=server.address, writer_model="someone")
    prompts, said = task.first(jax.random.key(0), 50)
    texts = _texts(tokenizer, prompts)
    assert all(text.index("It is") < text.index("No ") and "Say 3." not in text for text in texts)
    for text, report in zip(texts, np.asarray(said).tolist(), strict=True):
        written = tokenizer.decode(report[: report.index(tokenizer.eos_ids[0])])
        assert written.endswith("SCORES: 9, 4") and f"clarity {len(text)}." in written  # each behind its own prompt
    assert "of 50 reports are right" in capsys.readouterr().out
    drawn = _texts(tokenizer, task.draw_prompts(jax.random.key(0), 50))
    assert len(server.seen) == 1 + len(set(drawn)) and set(texts) <= set(drawn)
    start = report_judges.make_start(task, steps=2)(jax.random.key(0))["judge"]
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), start, task.world.start())
    assert any(jax.tree.leaves(moved))


@pytest.mark.slow
@pytest.mark.parametrize("written", [False, True])
def test_two_steps(written, server, own, tmp_path):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    where = ["--writer", server.address, "--writer-model", "someone"] if written else []
    arms = ["panels"] if written else ["direct", "hinted"]
    given = [
        "--smoke",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "run"),
        "--report",
        "words",
        "--arm",
        *arms,
        "--sampled",
        "4",
        "--measured",
        "2",
    ]
    found = cli.run(deepseek_grm, [*given, *words, *where])
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all(), name


WRONG = {
    "no words": (["--writer", "ADDRESS"], "--writer http", "is of reports in words: give --report words, too"),
    "no name": (["--report", "words", "--writer", "ADDRESS"], "needs --writer-model NAME", ""),
    "no address": (["--report", "words", "--writer-model", "x"], "--writer-model x needs --writer ADDRESS", ""),
    "no rows": (["NOTHING", "--report", "words"], "--report is of rows of your own: give --model", ""),
    "too long": (["--report", "words", "--report-tokens", "1500"], "the model's context of 1600", "--report-tokens"),
    "no scores": (["--report", "words", "--writer", "ADDRESS", "--writer-model", "x", "--endpoint-seed", "5"],
                  "asked for a line SCORES: with two numbers it says 'Hello.'", ""),
    "no right report": (["--report", "words", "--writer", "ADDRESS", "--writer-model", "x", "--endpoint-seed", "6"],
                        "no report of 1024 is right and within --report-tokens 512; take another model", ""),
    "embedded": (["NOTHING", "--asked", "scores"], "--asked is read by no chosen arm", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case, server, own, capsys, monkeypatch):
    given, *said = WRONG[case]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in own.items() if name != "report_tokens"]
    words = [] if given[0] == "NOTHING" else words
    server.reply = lambda request: "SCORES: 5, 5" if case == "no right report" else "Hello."
    monkeypatch.setattr("sys.argv", ["x"])
    given = [server.address if x == "ADDRESS" else x for x in given if x != "NOTHING"]
    with pytest.raises(SystemExit) as stop:
        cli.main(deepseek_grm.__name__, ["--smoke", "--seeds", "1", "--arm", "rl", *words, *given])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and all(part in lines[0] for part in said), lines


def test_many_reports_are_those_of_few_at_a_time(own, monkeypatch):
    task, _ = _open(own, report_tokens=4)
    params, prompts = task.world.start(), task.draw_prompts(jax.random.key(0), 5)
    meta = report_judges.init_meta(task, jax.random.key(1))
    said = strings.sample(task.world, params, prompts, jax.random.key(2), samples=2)
    sure = report_judges.meta_logits(task, meta, jnp.repeat(prompts, 2, axis=0), said)
    monkeypatch.setattr(strings, "AT_ONCE", 4)
    np.testing.assert_array_equal(strings.sample(task.world, params, prompts, jax.random.key(2), samples=2), said)
    few = report_judges.meta_logits(task, meta, jnp.repeat(prompts, 2, axis=0), said)
    close.assert_same_forward(few, sure, text_rows.parts.load_model(own["model"]).config, columns=prompts.shape[1] + 4)
