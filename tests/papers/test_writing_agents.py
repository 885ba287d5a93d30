"""Language models in the roles of judges of writing: what they say, how it is read, and what a game makes of it."""

import dataclasses
import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import named_lines, text_rows
from experiments.reward_models import creative_writing
from experiments.reward_models.parts import writing_agents as agents
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.run import options
from tests.endpoint_for_tests import serving
from tests.models_for_tests import byte_model

PAIRS = [("Write 1", "so kind", "so rude"), ("Write 2", "so warm", "so cold")]


class Scripted:
    """A model in all roles: it knows a flaw by the word of a principle in its list; ``seen`` are its questions."""

    def __init__(self, **fixed):
        self.fixed, self.seen = fixed, []

    def __call__(self, question):
        self.seen.append(question)
        kinds = {"DETECT": "You look for", "GENERATE": "Below is", "LEARN": "You called", "UNLEARN": "By your",
                 "CHARGE": "You argue against", "DEFEND": "You argue for", "RULE": "You judge", "REFLECT": "A judge",
                 "SINGLE": "Would most", "RESPECT": "Look at one"}  # fmt: skip
        (kind,) = (k for k, start in kinds.items() if question.startswith(start))
        given = self.fixed.get(kind)
        if given is not None:
            return given(question) if callable(given) else given
        reply = question.rpartition("Reply:\n<<<\n")[2]
        if kind == "DETECT":
            found = any(word in question.partition("Call the reply")[0] and word in reply for word in ("rude", "cold"))
            return f"VERDICT: {'BAD' if found else 'GOOD'}"
        if kind == "GENERATE":
            word = "cold" if "1. rude" in question else "rude"
            return f"FLAW: {word}\nREPLY:\nthis is {word}"
        word = next((w for w in ("rude", "cold") if w in reply), "nothing")
        return {"LEARN": f"Well.\nPRINCIPLE: No {word} words.", "UNLEARN": "DROP: 1"}[kind]

    def all(self, questions):
        return [self(question) for question in questions]


@pytest.mark.parametrize("text", ["\n" * 100_000, "DROP: a" + " *" * 50_000 + "x", "DROP" + "\n" * 100_000])
def test_long_replies_are_read_once(text):
    start = time.process_time()
    assert agents.dropped(text, 3) is None and named_lines.behind_name(text, "PROBLEM") == ""
    assert time.process_time() - start < 5.0


@pytest.mark.parametrize(
    "said", ["RATING: **PERFECT**", "**RATING: PERFECT**", "**RATING:** _PERFECT_", "RATING: PERFECT"]
)
def test_marks_of_emphasis_are_no_part_of_what_is_named(said):
    assert named_lines.named_line(said, "RATING") == "PERFECT"


def test_a_number_of_any_length_drops_nothing():
    assert agents.dropped("DROP: " + "9" * 5000, 3) is None


def test_who_was_fooled_learns():
    """Duels by hand: passed, learnt; seen, avoided; another flaw, passed, learnt; seen, and all is known."""
    ask = Scripted()
    found = agents.played(ask, np.random.default_rng(0), PAIRS, rounds=1, examples=0, duels=3)
    # the first principles hold "not rude": the first duel is seen at once
    assert found == [*agents.FIRST, "No cold words."]
    generated = [q for q in ask.seen if q.startswith("Below is")]
    assert ["1. rude" in q for q in generated] == [False, True, True]
    assert ask.seen[-1].startswith("You look for") and "3. No cold words." in ask.seen[-1]
    assert agents.played(ask, np.random.default_rng(0), PAIRS, rounds=0, examples=4) == list(agents.FIRST)


def test_labelled_replies_add_and_drop():
    strict = Scripted(DETECT="VERDICT: BAD", GENERATE="none")
    found = agents.played(strict, np.random.default_rng(0), PAIRS, rounds=1, examples=40)
    assert found == []  # every good reply that was called bad drops the first of the list
    blind = Scripted(DETECT="VERDICT: GOOD", GENERATE="none")
    found = agents.played(blind, np.random.default_rng(0), PAIRS, rounds=1, examples=40)
    assert set(found) == {*agents.FIRST, "No rude words.", "No cold words."}
    assert not any(q.startswith("You called") and "so kind" in q for q in blind.seen)


@pytest.mark.parametrize("fixed", [{"GENERATE": "I won't."}, {"DETECT": "It is good."}, {"LEARN": "Hm."}])
def test_what_cannot_be_read_changes_nothing(fixed):
    flawless = {"GENERATE": "FLAW: dull\nREPLY: so dull"} | fixed  # is passed by whoever is asked
    assert agents.played(Scripted(**flawless), np.random.default_rng(0), PAIRS, rounds=2, examples=0) == [*agents.FIRST]


def test_labels_of_one_reader_and_of_five():
    cases = [agents.Case("p", x) for x in ("kind", "rude", "odd")]
    says = {"kind": "VERDICT: GOOD", "rude": "VERDICT: BAD", "odd": "Who knows?"}
    one = Scripted(SINGLE=lambda q: next(says[w] for w in says if w in q.rpartition("Reply:")[2]))
    assert agents.by_one(one.all, cases) == [True, False, None]

    def respect(q):
        word = next(w for w in says if w in q.rpartition("Reply:")[2])
        return says[word] if "polite" in q.partition("Reply:")[0] else "VERDICT: GOOD"

    five = Scripted(RESPECT=respect)
    assert agents.by_respects(five.all, cases) == [True, False, None] and len(five.seen) == 15


def test_a_debate_in_words():
    """The critic charges until it has nothing; the judge reads what was said; a withdrawn ruling is none."""
    cases = [agents.Case("p", x) for x in ("kind", "rude", "odd")]

    def charge(q):
        return "CHARGE: NONE" if "kind" in q or "For:" in q else "CHARGE: it hurts"

    judge = Scripted(CHARGE=charge, DEFEND="DEFENCE: it does not", RULE=lambda q: (
        "VERDICT: BAD" if "Against: it hurts\nFor: it does not" in q else "VERDICT: GOOD"
    ), REFLECT=lambda q: "VERDICT: GOOD" if "odd" in q else "VERDICT: BAD")  # fmt: skip
    known = [[(agents.Case("q", "gentle"), True)], [], []]
    assert agents.by_debate(judge.all, cases, known, rounds=3) == [True, False, True]
    kinds = [q.partition(" the")[0] for q in judge.seen]
    assert [kinds.count(x) for x in ("You argue against", "You argue for", "You judge", "A judge called")] == [
        5,
        2,
        3,
        2,
    ]
    assert all(("gentle" in q) == ("kind" in q) for q in judge.seen if q.startswith("You"))
    silent = Scripted(CHARGE="?", RULE="?")
    assert agents.by_debate(silent.all, cases, [[], [], []], rounds=2) == [None] * 3


def test_what_is_retrieved_is_another_prompt():
    store = [(agents.Case(p, r), k == 0) for k, (p, r) in enumerate([("a", "one two"), ("b", "one"), ("c", "three")])]
    near = agents.retrieved(agents.Case("a", "one two"), store, 2)
    assert [case.prompt for case, _ in near] == ["b", "c"] and agents.retrieved(agents.Case("a", "one"), store, 0) == []


# --- over a server


def says(request):
    """The scripted model; a debate charges everything, and its judge does not like an exclamation mark."""
    bad = "VERDICT: BAD" if "!" in request["messages"][0]["content"].rpartition("Reply:")[2] else "VERDICT: GOOD"
    fixed = dict.fromkeys(("DETECT", "SINGLE", "RESPECT", "RULE", "REFLECT"), bad)
    fixed |= {"CHARGE": "CHARGE: loud", "DEFEND": "DEFENCE: no", "GENERATE": "FLAW: loud\nREPLY: so loud"}
    return Scripted(**fixed)(request["messages"][0]["content"])


@pytest.fixture
def server(monkeypatch, tmp_path):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)  # replies are kept below the working folder
    with serving(monkeypatch, reply=says) as server:
        yield server


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=400)
    lines = [{"prompt": f"Say {k} kindly:", "chosen": f" {k}, please", "rejected": f" {k}! now"} for k in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"model": str(folder), "data": str(folder / "pairs.jsonl"), "max_new_tokens": 16, "scorer_steps": 3}


def _task(own, **changes):
    of_rows = agents.Settings(**{k: v for k, v in own.items() if k != "model"} | changes)
    both = dataclasses.asdict(options.ModelSettings(model=own["model"])) | dataclasses.asdict(of_rows)
    settings = types.SimpleNamespace(**both, learning_rate=1e-3)
    return agents.open_task(settings).task, text_rows.opened(settings)


def test_verdicts_and_labels_of_rows(server, own):
    task, rows = _task(own, agents=server.address, agents_model="someone")
    params = {"rules": jnp.asarray(agents.as_numbers(["No shouting."]))}
    server.seen.clear()
    table = rows.train
    for replies, want in ((table.chosen, 1.0), (table.rejected, 0.0)):
        assert (jax.jit(lambda x: agents.detector(task, params, table.prompts, x))(replies) == want).all()
    asked = server.seen[0]["messages"][0]["content"]
    assert "1. No shouting.\n" in asked and "kindly:\n>>>" in asked
    for kind in agents.KINDS:
        pairs = agents.draw_pairs(task, jax.random.key(0), 12, kind=kind, rounds=1, references=4)
        texts = text_rows.make_texts(rows.model)
        assert not any("!" in said for _, said in texts(pairs.prompts, pairs.first))
        assert all("!" in said for _, said in texts(pairs.prompts, pairs.second))
    ruled = [r["messages"][0]["content"] for r in server.seen]
    ruled = [q for q in ruled if q.startswith("You judge")]
    numbers = [{line for line in q.splitlines() if "kindly:" in line} for q in ruled]
    assert all("It is bad." in q or "It is good." in q for q in ruled)
    assert all(len(found) > 1 for found in numbers)  # references are of other prompts
    before = len(server.seen)
    agents.draw_pairs(task, jax.random.key(1), 12, kind="debate", rounds=1, trust=0.0)
    assert not any("what is known of them" in r["messages"][0]["content"] for r in server.seen[before:])
    sentences = task.agents.play(jax.random.key(0), 1, 0)
    assert agents.as_sentences(sentences) == [*agents.FIRST, "No nothing words."]
    assert agents.as_sentences(task.agents.play(jax.random.key(0), 0, 4)) == list(agents.FIRST)


def test_a_verdict_that_cannot_be_read_is_half(server, own, capsys):
    task, rows = _task(own, agents=server.address, agents_model="someone", endpoint_seed=1)
    server.reply = lambda request: "I like it."
    table, params = rows.train, {"rules": jnp.asarray(agents.as_numbers(["Short."]))}
    assert (agents.detector(task, params, table.prompts, table.chosen) == 0.5).all()
    pairs = agents.draw_pairs(task, jax.random.key(0), 12, kind="single")
    drawn = task.draw_pairs(jax.random.fold_in(jax.random.key(0), 0), 12, sharpness=0.0)
    assert (pairs.first == drawn.first).all() and (pairs.second == drawn.second).all()
    assert capsys.readouterr().err.count("counts as neither") == 1


@pytest.mark.slow
def test_two_steps(server, own, tmp_path):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    where = ["--agents", server.address, "--agents-model", "someone"]
    found = cli.run(creative_writing, ["--smoke", "--seeds", "1", "--out", str(tmp_path / "run"), *words, *where])
    assert found.arms.keys() == creative_writing.ARMS.keys()
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all() and 0 <= arm.metrics["judge/agreement"][0] <= 1, name
    assert 0 <= found.arms["adversarial"].metrics["eval/proxy"][0] <= 1


WRONG = {
    "no name": (["--agents", "ADDRESS"], "needs --agents-model NAME, by which the server knows its model"),
    "no address": (["--agents-model", "someone"], "--agents-model someone needs --agents ADDRESS"),
    "no rows": (["NOTHING", "--agents", "ADDRESS"], "--agents is of rows of your own: give --model and --data with it"),
    "nobody": (["--agents", "http://127.0.0.1:9/v1", "--agents-model", "x"], "does not answer"),
    "no verdict": (["--agents", "ADDRESS", "--agents-model", "x", "--endpoint-seed", "5"],
                   "asked for a line VERDICT: GOOD or BAD it says 'Hello.'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case, server, own, capsys, monkeypatch):
    given, said = WRONG[case]
    words = [] if given[0] == "NOTHING" else [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    server.reply = lambda request: "Hello."
    monkeypatch.setattr("sys.argv", ["x"])
    given = [server.address if x == "ADDRESS" else x for x in given if x != "NOTHING"]
    with pytest.raises(SystemExit) as stop:
        cli.main(creative_writing.__name__, ["--smoke", "--seeds", "1", *words, *given])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and said in lines[0], lines


def test_the_opener_refuses_several_processes(server, own, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="asked in the middle of a step, by one process; run without --hosts"):
        _task(own, agents=server.address, agents_model="someone")
