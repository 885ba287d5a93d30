"""SwS over rows of one's own: a model of language names concepts, writes problems, rates and solves them."""

import dataclasses
import json
import re
from collections import Counter

import numpy as np
import pytest

from experiments.curriculum import sws
from experiments.curriculum.parts import synthesis, written_problems
from jaxrl_llm.data import problems as tables
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli, recipes
from jaxrl_llm.run.bench import problem_sets
from tests.endpoint_for_tests import serving
from tests.models_for_tests import byte_model

pytest.importorskip("openai")


def says(request):
    """Concepts by parity; problems of a running number; the judges part over sevens, the solvers over nines."""
    text = request["messages"][0]["content"]
    last = text.rpartition(":\n")[2]
    if text.startswith("Which concepts"):
        number = int(re.search(r"\d+", last)[0])
        kind = "even numbers" if number % 2 == 0 else "odd numbers"
        return "None that I know." if number % 10 == 5 else f"CONCEPTS: sums; {kind}; counting."
    if text.startswith("Write a new"):
        number = 100 + sum(map(ord, text)) % 60 + request["seed"]
        return "I refuse." if number % 6 == 5 else f"PROBLEM: What is {number} + 2?"
    number = int(re.search(r"\d+", last)[0])
    if text.startswith("Is this"):
        if number % 10 == 7:
            return "RATING: BAD" if request["seed"] else "RATING: PERFECT"
        return "RATING: ACCEPTABLE" if number % 10 == 8 else "RATING: PERFECT"
    wrong = number % 10 == 9 and request["seed"] > 0
    return f"I add.\nANSWER: {number + 2 + (request['seed'] if wrong else 0)}."


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # replies are kept below the working folder
    with serving(monkeypatch, reply=says) as server:
        yield server


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=400)
    rows = [{"question": f"What is {k} + 1 ?", "answer": f"{k} + 1 = {k + 1}.\n#### {k + 1}"} for k in range(100, 160)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"model": str(folder), "data": str(folder / "rows.jsonl"), "format": "gsm8k", "max_new_tokens": 24}


def _settings(own, server=None, **changes):
    where = {"synthesiser": server.address, "synthesiser_model": "someone"} if server else {}
    return dataclasses.replace(sws.Settings(), **sws.EMBEDDED | sws.SMOKE | {"levels": ()} | own | where | changes)


def test_problems_are_written_for_concepts_that_occur_together(server, own):
    settings = _settings(own, server)
    found, problems = recipes.bench(settings), list(problem_sets(settings)[0])
    ask_all = written_problems.open_synthesiser(settings, problems)
    server.seen.clear()
    rng, recipe = np.random.default_rng(0), synthesis.Recipe()
    made = written_problems.candidates(rng, problems, 60, found, recipe, ask_all, chat=False)
    asked = [r["messages"][0]["content"] for r in server.seen]
    kinds = Counter(text.split()[0] for text in asked)
    assert kinds["Which"] == len(problems)
    sets = {text.partition("together: ")[2].partition(". It should")[0] for text in asked if text[:5] == "Write"}
    assert len(sets) == 1 and set(next(iter(sets)).split("; ")) == {"sums", "counting", "even numbers", "odd numbers"}
    for p in made:
        number = int(p.prompt.split()[2])
        assert number % 10 not in (7, 8, 9) and p.answer == {"value": str(number + 2)} and p.prompt == p.identity
        assert not tables.is_heldout(p.identity) and p.level == problems[0].level


def test_bad_ratings_and_split_solutions_are_dropped(server, own):
    """By hand: of written problems those are kept that both judges like, one of them much, and most solutions agree."""
    settings = _settings(own, server)
    found, problems = recipes.bench(settings), list(problem_sets(settings)[0])
    ask_all = written_problems.open_synthesiser(settings, problems)
    numbers = iter(range(100, 400))

    def scripted(questions, draw=0):
        if questions and questions[0].startswith("Which"):
            return [f"CONCEPTS: a{k % 9}; b{k % 7}; c{k % 5}" for k in range(len(questions))]
        if questions and questions[0].startswith("Write"):
            return [f"PROBLEM: What is {next(numbers)} + 2 ?" for _ in questions]
        return ask_all(questions, draw)

    made = written_problems.candidates(
        np.random.default_rng(0), problems, 40, found, synthesis.Recipe(), scripted, chat=False
    )
    written = next(numbers) - 100
    want = [k for k in range(100, 100 + written) if k % 10 not in (7, 8, 9)]
    want = [k for k in want if not tables.is_heldout(f"What is {k} + 2 ?")]
    assert [p.answer["value"] for p in made] == [str(k + 2) for k in want] and len(made) > 15
    long = written_problems.candidates(
        np.random.default_rng(0), problems, 4, found, synthesis.Recipe(),
        lambda qs, draw=0: ["PROBLEM: " + "x" * 99] * len(qs) if qs and qs[0][:5] == "Write" else scripted(qs, draw),
        chat=False,
    )  # fmt: skip
    assert long == [], "what is longer than every row is left out"


def test_old_and_new_problems_are_judged_by_the_verifier_of_the_rows(own):
    settings = _settings(own)
    found, problems = recipes.bench(settings), list(problem_sets(settings)[0])[:3]
    new = problems[0]._replace(prompt="What is 7 + 2 ?", answer={"value": "9"}, identity="new")
    both = written_problems.bench_of(settings, found, [*problems, new])
    assert both.train.tokens.shape == (4, found.train.tokens.shape[1])
    encode, eos = found.model.tokenizer.encode, found.model.tokenizer.eos_ids[0]
    said = [[*encode(f"#### {x}"), eos] for x in ("9", "8")]
    tokens = np.concatenate([np.asarray(both.train.tokens[np.asarray([3, 3])]), np.asarray(said)], axis=1)
    mask = np.arange(tokens.shape[1]) >= both.train.tokens.shape[1]
    rows = recipes.Trajectories(
        tokens=tokens, mask=np.stack([mask] * 2), problem_ids=np.asarray([3, 3]), positions=tokens * 0,
        segment_ids=tokens * 0 + 1, sampler_logp=np.zeros(tokens.shape, np.float32), group_ids=np.asarray([0, 0]),
        truncated=np.asarray([False] * 2),
    )  # fmt: skip
    assert both.host_score(rows).value.tolist() == [1.0, 0.0]


@pytest.mark.slow
def test_two_steps(server, own, tmp_path):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    where = ["--synthesiser", server.address, "--synthesiser-model", "someone"]
    given = ["--smoke", "--seeds", "1", "--out", str(tmp_path / "run"), *words, *where, "--new-problems", "8"]
    found = cli.run(sws, [*given, "--arm", "continued", "sws", "no_filter"])
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all() and "eval/accuracy" in arm.metrics, name
    assert any(r["messages"][0]["content"].startswith("Solve") for r in server.seen)


WRONG = {
    "nobody": ([], "a model writes problems like rows of your own; give --synthesiser ADDRESS"),
    "no name": (["--synthesiser", "ADDRESS"], "needs --synthesiser-model NAME, by which the server knows its model"),
    "no rating": (["--synthesiser", "ADDRESS", "--synthesiser-model", "x", "--endpoint-seed", "5"],
                  "asked for a line RATING: it says 'Hello.'"),
    "generated": (["NOTHING", "--synthesiser", "ADDRESS", "--synthesiser-model", "x"],
                  "--data chain is generated: drop it"),
    "countdown": (["NOTHING", "--data", "countdown", "--levels", "3"], "not of countdown: --data chain"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case, server, own, capsys, monkeypatch):
    given, said = WRONG[case]
    words = [] if given[:1] == ["NOTHING"] else [f"--{k.replace('_', '-')}={v}" for k, v in own.items()]
    server.reply = lambda request: "Hello."
    monkeypatch.setattr("sys.argv", ["x"])
    given = [server.address if x == "ADDRESS" else x for x in given if x != "NOTHING"]
    with pytest.raises(SystemExit) as stop:
        cli.main(sws.__name__, ["--smoke", "--seeds", "1", "--arm", "sws", *words, *given])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and said in lines[0], lines


def test_rows_of_several_answers_are_refused(own, server):
    settings = _settings(own, server)
    problems = [problem_sets(settings)[0][0]._replace(answer={"tests": ["assert f(1) == 2"]})]
    with pytest.raises(UserError, match="answers hold tests, which a majority of solutions does not give"):
        written_problems.open_synthesiser(settings, problems)
