"""The doctor and the table of systems: every defect is one line with its remedy."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from jaxrl_llm.experiment import __main__ as commands
from jaxrl_llm.experiment import arms, cli, doctor, results
from jaxrl_llm.experiment.evidence import beds, records
from tests.experiment import tiny
from tests.experiment.made import results as made

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOC = "\n".join(["One line.", "", *(f"{name}: something" for name in doctor.FIELDS[:-1]), "Run: python -m broken"])


def _module(tmp_path=None, **changes):
    """The tiny experiment under another name, with some of it replaced."""
    found = types.ModuleType("broken", DOC)
    for name in ("Settings", "ARMS", "EMBEDDED", "SMOKE", "METRICS", "build", "claim"):
        setattr(found, name, changes.pop(name, getattr(tiny, name)))
    folder = (tmp_path or pathlib.Path("/nowhere")) / "experiments" / "family"
    found.__file__ = str(folder / "broken.py")
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def _problems(findings):
    return {f.check: f.problem for f in findings if f.problem}


def test_the_docstring_names_its_fields_and_the_command():
    assert doctor.check_docstring(_module()) == ""
    assert doctor.check_docstring(_module(__doc__=DOC.replace("Left out:", "Leftout:"))) == (
        "lacks Left out:; compare experiments/_template.py"
    )
    assert "Equations:, Left out:" in doctor.check_docstring(tiny)
    assert doctor.check_docstring(_module(__doc__=DOC.replace("-m broken", "-m other"))) == (
        "Run: must say python -m broken"
    )


def test_missing_slots_end_the_examination(tmp_path):
    module = _module(tmp_path)
    pathlib.Path(module.__file__).parent.mkdir(parents=True)
    pathlib.Path(module.__file__).write_text("\n" * 70)
    del module.claim
    found = doctor.examine(module)
    assert list(_problems(found)) == ["slots"] and found[-1].check == "slots" and "has no claim" in found[-1].problem
    assert "no arm" in doctor.check_slots(_module(ARMS={}))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("loss = terms.loss + beta * kl.k3(logp, ref, mask)", "line 3"),
        ("moved = kl.k1(logp, ref, mask)\n    loss = terms.loss - reduce.tokens(moved, mask)", "line 4"),
        ("return loss, {'kl': kl.k3(logp, ref, mask)}", ""),
        ("ref = reduce.tokens(kl.k3(logp, ref, mask), mask)\n    return loss, metrics | {'kl/ref': ref}", ""),
        ("loss = terms.loss + beta * kl.kl_gradient_terms(logp, ref, mask)", ""),
    ],
)
def test_a_loss_term_without_a_gradient_is_found(body, said, tmp_path):
    path = tmp_path / "one.py"
    path.write_text(f"from jaxrl_llm.losses import kl\ndef loss(logp, ref, mask):\n    {body}\n")
    found = doctor.check_losses(path)
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize("folder", ["experiments", "jaxrl_llm"])
def test_no_file_of_this_project_has_one(folder):
    files = [p for p in (ROOT / folder).rglob("*.py") if p.name != "kl.py"]
    assert {str(p): doctor.check_losses(p) for p in files if doctor.check_losses(p)} == {}


@dataclasses.dataclass(frozen=True)
class Online:
    verifier: str = ""
    prompts_per_step: int = 512
    group_size: int = 8
    model: str = "tiny"


@dataclasses.dataclass(frozen=True)
class Judged(Online):
    verifier: Callable = str


def test_a_field_keeps_its_meaning_and_a_smoke_run_is_small():
    assert doctor.check_settings(_module()) == ""
    clash = doctor.check_settings(_module(Settings=Judged, SMOKE={"prompts_per_step": 2}, EMBEDDED={}))
    assert clash.startswith("verifier is ") and clash.endswith("in Online; rename it")
    assert doctor.check_settings(_module(Settings=Online, SMOKE={"prompts_per_step": 32}, EMBEDDED={})) == ""
    large = doctor.check_settings(_module(Settings=Online, SMOKE={}, EMBEDDED={"prompts_per_step": 2}))
    assert large == "SMOKE leaves 4,096 responses a step; set prompts_per_step and group_size there"


def test_arms_of_a_good_file_are_fine():
    found = doctor.check_arms(_module())
    assert not _problems(found)
    assert [f.check for f in found][:2] == ["arm baseline traces", "arm baseline reads its settings"]
    assert str(found[0]) == "ok       arm baseline traces"


def test_dead_equal_and_unknown_settings_are_found():
    dead = doctor.check_arms(_module(ARMS={"baseline": {}, "other": {"model": "unread"}}))
    assert _problems(dead) == {
        "arm other reads its settings": "model changes nothing; use or drop it",
        "arms differ": "baseline and other compute the same; drop one or use its setting",
    }
    unknown = doctor.check_arms(_module(ARMS={"baseline": {"warm_step": 1}}))
    assert _problems(unknown)["settings"].startswith("arm 'baseline' sets 'warm_step', which is no setting; did you")
    assert "SMOKE sets" in _problems(doctor.check_arms(_module(SMOKE={"step": 1})))["settings"]


def test_equal_updates_and_misspelt_claims_are_found():
    assert not _problems(doctor.check_claim(_module()))
    twin = doctor.check_claim(
        _module(ARMS={"baseline": {}, "method": {"learning_rate": 0.3}, "twin": {"eval_every": 1}})
    )
    assert "baseline and twin update the parameters in the same way" in _problems(twin)["updates differ"]
    wrong = doctor.check_claim(_module(METRICS=("eval/acuracy",)))
    assert "did you mean 'eval/accuracy'" in _problems(wrong)["claim on made-up results"]


def test_an_arm_that_does_not_trace_says_why():
    def build(settings):
        plan = tiny.build(settings)
        return plan._replace(measure=lambda params, key: {"eval/accuracy": params["tabel"].sum()})

    found = _problems(doctor.check_arms(_module(build=build, ARMS={"baseline": {}})))
    assert found == {"arm baseline traces": "KeyError: 'tabel'"}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A module with a committed record of eight seeds, and a function that changes that record."""
    module = _module(tmp_path)
    eight = made(baseline=[0.1, 0.2] * 4, method=[0.3, 0.5] * 4, warm=[0.0, 0.1] * 4)
    for name, arm in eight.arms.items():
        arm.settings.update({k: cli.results.plain(v) for k, v in module.ARMS[name].items()})
    monkeypatch.chdir(tmp_path)
    module.__spec__ = types.SimpleNamespace(name="experiments.family.broken")
    claim = beds.judge(module, eight, smoke=False)
    cli.write(module, cli.Options(record=True), tiny.Settings(), eight, claim, tmp_path, "command")
    path = arms.record_path(module)
    assert path == tmp_path / "results" / "family" / "broken.json"

    def change(edit):
        record = json.loads(path.read_text())
        edit(record)
        path.write_text(json.dumps(record))
        return doctor.check_record(module)

    return module, path, change


def test_a_true_record_passes(recorded):
    module, path, _ = recorded
    assert doctor.check_record(module) == ""
    path.with_suffix(".png").unlink()
    assert "no plot beside broken.json" in doctor.check_record(module)


def test_a_control_that_failed_stands_when_a_record_is_judged_again(recorded):
    """Controls are no arms of the record: what they said is kept beside it."""
    module, path, change = recorded
    said = "control again, eval/accuracy, other seeds - these: -0.2 [-0.3, -0.1] (n=8) is not within d* 0.02"

    def edit(record):
        record["instrument"] = {"controls": [{"name": "again", "problem": said}, {"name": "more", "problem": ""}]}

    assert "the claim now says test bed invalid" in change(edit)
    record, found = results.read(path)
    assert records.judge_again(module, record, found)["claim"]["bed"] == [said]


def test_arms_that_ended_the_same_stay_one_when_a_record_is_judged_again(recorded):
    """Under the standard; before it nobody looked."""
    module, path, change = recorded

    def twins(record):
        record["arms"]["warm"]["metrics"] = record["arms"]["method"]["metrics"]

    assert change(twins) == ""
    assert "the claim now says test bed invalid" in change(lambda record: record.update(instrument={"controls": []}))
    again = records.judge_again(module, *results.read(path))["claim"]
    assert (again["verdict"], again["bed"]) == ("test bed invalid", ["method and warm ended the same in every seed"])


def test_a_record_under_the_standard_is_withdrawn_by_its_registration(recorded):
    """The same file's next record has another registration, and stands."""
    module, path, change = recorded
    rows = "name\treason\tregistered\nfamily/broken\tanother search\tabc\n"
    (path.parents[1] / "withdrawn.tsv").write_text(rows)
    assert change(lambda record: record.update(instrument={"registered": "abd"})) == ""
    said = change(lambda record: record.update(instrument={"registered": "abc"}))
    assert said == "withdrawn, and not marked so; run python -m jaxrl_llm.experiment rejudge family/broken"
    record, found = results.read(path)
    reason = records.reason_withdrawn(path, record)
    again = records.judge_again(module, record, found, reason)["claim"]
    assert (reason, again["verdict"], again["bed"]) == ("another search", "withdrawn", ["another search"])
    assert records.reason_withdrawn(path, record | {"instrument": None}) == ""


def test_an_arm_that_the_file_has_won_since_leaves_the_record_as_it_is(recorded):
    assert recorded[2](lambda record: record["arms"].pop("warm")) == ""
    assert "has the arms" not in recorded[2](lambda record: record.update(instrument={"looks": [8]}))


def _fewer_seeds(record):
    for arm in record["arms"].values():
        arm["seeds"] = arm["seeds"][:3]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda r: r["arms"].update(cold=r["arms"].pop("warm")),
            "has the arms baseline, method, cold, the file baseline, method, warm",
        ),
        (lambda r: r["arms"]["warm"]["settings"].update(warm_steps=3), "warm was recorded with another warm_steps"),
        (_fewer_seeds, "3 seeds; run python -m experiments.family.broken --record with 8, or state the reason"),
        (lambda r: r["claim"].update(verdict="undecided"), "as undecided, the claim now says supported here; run"),
        (lambda r: r["claim"].update(statement="other"), "the claim's statement has changed"),
        (lambda r: r["claim"]["primary"].update(high=0.5), "the parts of the claim say something else now; run"),
        (lambda r: r["claim"]["primary"].pop("undefined"), "the parts of the claim say something else now; run"),
    ],
    ids=["arms", "settings", "seeds", "verdict", "statement", "numbers", "fields"],
)
def test_a_record_that_does_not_belong_is_refused(recorded, edit, said):
    assert said in recorded[2](edit)


def test_fewer_seeds_pass_with_a_reason(recorded):
    module, path, change = recorded
    module.FEWER_SEEDS = "an hour a seed"
    assert "the parts of the claim say something else now" in change(_fewer_seeds), "it spoke of eight"
    again = records.judge_again(module, *results.read(path))
    assert change(lambda record: record.update(again)) == ""


def test_the_command_reports_one_file(capsys):
    assert doctor.doctor(str(ROOT / "experiments" / "policy_gradient" / "dr_grpo.py")) == 0
    said = capsys.readouterr().out
    assert "ok       docstring" in said and "ok       arm dr_grpo traces" in said and "problem" not in said


def test_a_file_that_does_not_import_is_a_problem(tmp_path, capsys):
    (tmp_path / "lost.py").write_text("import jaxrl_llm.nothing_here\n")
    assert commands.main(["doctor", str(tmp_path / "lost.py")]) == 1
    assert capsys.readouterr().out.startswith("problem  import: ModuleNotFoundError: ")


@pytest.mark.parametrize("arguments", [[], ["doctor"], ["heal", "x.py"], ["doctor", "missing.py"], ["doctor", "a.txt"]])
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, capsys):
    assert commands.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.experiment", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "doctor FILE" in done.stdout
