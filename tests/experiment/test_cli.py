"""The command line: mistakes are one line, runs are written, resumed and repeatable."""

import errno
import json
import shutil

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import Results, arms, cli, main, results
from jaxrl_llm.experiment.evidence import beds, records
from jaxrl_llm.jobs import online_dpo
from tests import close
from tests.close import doubles
from tests.experiment import tiny
from tests.experiment.made import arm as one_arm
from tests.experiment.made import results as made

NAME = tiny.__name__


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A finished smoke run and what it returned."""
    out = tmp_path_factory.mktemp("smoke")
    return out, cli.run(tiny, ["--smoke", "--out", str(out)])


def test_an_arm_of_so_many_times_the_settings_takes_a_flag(monkeypatch, capsys):
    """Its own number is that of the flag, times so many: the flag is not in vain, though the two are never equal."""
    monkeypatch.setitem(tiny.ARMS, "warm", {"warm_steps": arms.Times(2)})
    assert cli.run(tiny, ["--arm", "warm", "--warm-steps", "5", "--plan"]) is None
    assert "warm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--stepz", "3"], "unknown argument '--stepz'; did you mean --steps?"),
        (["--arms", "method"], "unknown argument '--arms'; did you mean --arm?"),
        (["--steps", "three"], "three"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--eval-every", "0"], "--eval-every 0 must be at least 1"),
        (["--learning-rate", "-1"], "--learning-rate -1.0 must not be negative"),
        (["--learning-rate", "nan"], "--learning-rate nan must be finite"),
        (["--learning-rate", "inf"], "--learning-rate inf must be finite"),
        (["--seeds", "0"], "--seeds 0 must be at least 1"),
        (["--arm", "cold"], "--arm cold: the arms are baseline, method, warm"),
        (["--temperature", "0.5"], "unknown argument '--temperature'"),
        (["--model", "folder"], "--model is read by no chosen arm (baseline, method, warm); drop it"),
        (["--arm", "warm", "--warm-steps", "5"], "--warm-steps is set by every chosen arm (warm) itself; drop it"),
        (["--record", "--smoke"], "--record keeps whole runs only: drop --smoke or --record"),
        (["--record", "--arm", "warm"], "--record keeps every arm: drop --arm or --record"),
        (["--record", "--loop", "async"], "--loop async is read by no record or certificate: give it to a run that"),
        (["--record", "--checkpoint-every", "5"], "--checkpoint-every 5 is read by no record or certificate"),
        (["--record", "--export", "always"], "--export always: a record or certificate leaves no models; drop it"),
        (["--force-record"], "--force-record belongs to a record: give --record with it, or drop it"),
        (["--tune", "0.1", "0.2"], "--tune belongs to a record: give --record with it, or drop it"),
        (["--coefficient", "x=1,2,3"], "--coefficient belongs to a record: give --record with it, or drop it"),
        (["--record", "--coefficient", "x=1,2,3"], "--coefficient x=1,2,3 is tried at the best rate of --tune"),
        (["--until-decided", "--seeds", "4"], "--until-decided chooses the number of seeds: drop it or --seeds"),
        (["--until-decided", "--smoke"], "--until-decided takes whole runs: drop it, or --smoke"),
        (["--steps", "3", "--steps", "4"], "--steps is given twice; give it once"),
        (["--mesh", "rows=2"], "rows"),
        (["--mesh", "data=3"], "--mesh data=3 needs 3 devices, which does not divide the 8 there are"),
        (["--microbatches", "-1"], "--microbatches -1 must not be negative"),
        (["--arm", "method", "--microbatches", "3"], "--microbatches 3 does not divide the 4 prompts of a step"),
        (["--microbatches", "2"], "--microbatches 2: this method takes its batch whole (its supervised loss is a mean"),
        (["--out", "/proc/nobody"], "--out /proc/nobody cannot be written"),
    ],
    ids=lambda x: "_".join(x).replace("/", "") if isinstance(x, list) else "",
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(arguments, line, capsys):
    with pytest.raises(SystemExit) as stop:
        main(NAME, arguments)
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert line in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert "arm " not in said.out, "nothing runs before the mistake is found"


def test_help_lists_every_setting_but_functions(capsys):
    with pytest.raises(SystemExit) as stop:
        main(NAME, ["--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in (
        "--arm",
        "--seeds",
        "--smoke",
        "--plan",
        "--mesh",
        "--microbatches",
        "--steps",
        "--learning-rate",
        "--warm-steps",
    ):
        assert flag in said
    assert "--advantages" not in said


def test_commands_of_the_front_door_are_called_by_their_words(tmp_path):
    """Their modules do nothing when they are run; records and workers still know them by the module."""
    assert cli.command_name(online_dpo) == "jaxrl online-dpo" and cli.module_name(online_dpo) == online_dpo.__name__
    assert cli.command_name(tiny) == "python -m tests.experiment.tiny"
    found = Results({"online_dpo": one_arm([0.1])})
    claim = online_dpo.claim(found)
    cli.write(online_dpo, cli.Options(), online_dpo.Settings(), found, claim, tmp_path, "jaxrl online-dpo")
    assert json.loads((tmp_path / "results.json").read_text())["experiment"] == "jobs.online_dpo"


def test_parse_puts_flags_on_top_of_the_preset():
    options, settings, given = cli.parse(tiny, ["--smoke", "--learning-rate=0.3", "--arm", "warm", "method"])
    assert (settings.steps, settings.learning_rate, options.arm) == (2, 0.3, ("warm", "method"))
    assert given == {"learning_rate"}
    assert settings.advantages is tiny.Settings().advantages
    assert cli.parse(tiny, [])[1].steps == 6
    assert cli.parse(tiny, ["--model", "some/folder"])[1].steps == 100
    assert cli.parse(tiny, ["--model=some/folder"])[1].steps == 100


def test_a_flag_of_many_may_stand_several_times():
    for words in (["--arm", "warm", "--arm", "method"], ["--arm=warm", "--smoke", "--arm", "method"]):
        assert cli.parse(tiny, words)[0].arm == ("warm", "method")


def test_a_flag_counts_where_one_chosen_arm_reads_it():
    # only the arm "warm" has its own value: the flag still reaches the others
    assert cli.run(tiny, ["--plan", "--warm-steps", "1", "--arm", "method", "warm"]) is None


def test_plan_runs_nothing_and_says_what_would(capsys, tmp_path):
    assert cli.run(tiny, ["--plan", "--seeds", "5", "--out", str(tmp_path / "none")]) is None
    said = capsys.readouterr().out
    assert "method: baseline; 6 updates and 96 rollouts for each of 5 seeds; one compiled program" in said
    assert "warm: {'warm_steps': 2}; 8 updates and 96 rollouts" in said
    assert not (tmp_path / "none").exists()


def test_an_optimiser_waits_on_the_host_in_the_host_loop_alone(tmp_path):
    found = []
    for words in (["--loop", "host"], ["--loop", "host", "--offload", "optimiser"]):
        out = tmp_path / str(len(found))
        found.append(cli.run(tiny, ["--smoke", "--arm", "baseline", "--seeds", "1", "--out", str(out), *words]))
    assert found[0].arms["baseline"].metrics == found[1].arms["baseline"].metrics
    with pytest.raises(UserError, match="--offload optimiser is of the host loop: give --loop host with it"):
        cli.run(tiny, ["--smoke", "--offload", "optimiser", "--out", str(tmp_path / "fused")])


def test_smoke_run_writes_records_table_and_plot(smoke):
    out, found = smoke
    record, read = results.read(out / "results.json")
    assert list(record) == (
        ["experiment", "paper", "command", "versions", "settings"] + ["looks", "d_star", "instrument", "arms", "claim"]
    )
    assert record["experiment"] == "experiment.tiny" and "0000.00000" in record["paper"]
    assert record["command"] == f"python -m {NAME} --smoke"
    assert {"jax", "numpy", "device"} <= set(record["versions"])
    assert record["settings"]["steps"] == 2
    assert list(record["arms"]) == list(tiny.ARMS) == list(found.arms)
    for name, arm in read.arms.items():
        assert arm.seeds == [0, 1] and arm.updates == (4 if name == "warm" else 2)
        assert arm.rollouts == 2 * 4 * 4 and arm.tokens > 0 and arm.seconds > 0
        assert all(len(values) == 2 for values in arm.metrics.values())
        assert (arm.settings["warm_steps"], arm.settings["steps"]) == (2 if name == "warm" else 0, 2)
    assert record["claim"]["verdict"] == "not judged" and "not judged: smoke run" in record["claim"]["statement"]
    assert (out / "table.md").read_text() == results.table(found, tiny.METRICS)
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_arm_is_taken_up_again(smoke, capsys):
    out, found = smoke
    files = sorted((out / "arms").glob("*/*.json"))
    assert len(files) == 6 and {path.stem for path in files} == {"0", "1"}
    (lost,) = {p for p in files if "0.json" in p.name and json.loads(p.read_text())["settings"]["warm_steps"] == 2}
    lost.unlink()
    trained = lost.with_name("1.json").read_text()
    again = cli.run(tiny, ["--smoke", "--out", str(out)])
    said = capsys.readouterr().out
    assert "arm baseline: 2 of 2 seeds taken from" in said and "arm warm: 1 of 2 seeds taken from" in said
    assert lost.is_file() and lost.with_name("1.json").read_text() == trained
    for name in tiny.ARMS:
        for metric, values in found.arms[name].metrics.items():
            close.assert_near(again.arms[name].metrics[metric], values, err_msg=metric)


def test_fresh_and_other_settings_run_again_and_more_seeds_only_the_new_ones(smoke, capsys, tmp_path):
    out = shutil.copytree(smoke[0], tmp_path / "copy")  # other tests read the run as it was
    number = len(list((out / "arms").iterdir()))
    for arguments in (["--fresh"], ["--learning-rate", "0.2"]):
        cli.run(tiny, ["--smoke", "--arm", "baseline", "--out", str(out), *arguments])
        assert "taken from" not in capsys.readouterr().out
    assert len(list((out / "arms").iterdir())) == number + 1
    cli.run(tiny, ["--smoke", "--arm", "baseline", "--out", str(out), "--seeds", "3"])
    assert "arm baseline: 2 of 3 seeds taken from" in capsys.readouterr().out, "more seeds train only those"


def test_the_first_seeds_are_the_same_however_many_run(tmp_path, smoke):
    _, found = smoke
    more = cli.run(tiny, ["--smoke", "--seeds", "3", "--arm", "method", "--out", str(tmp_path)])
    assert more.arms["method"].seeds == [0, 1, 2]
    two, three = (r.values("method", "eval/accuracy") for r in (found, more))
    close.assert_relative(three[:2], two)


def test_claims_are_judged_only_on_whole_runs():
    whole = made(baseline=[0.1, 0.2, 0.3], method=[0.3, 0.4, 0.5], warm=[0.0, 0.0, 0.0])
    assert beds.judge(tiny, whole, smoke=False).verdict == "supported here"
    assert beds.judge(tiny, whole, smoke=True).verdict == "not judged"
    other = Results({name: one_arm([0.1, 0.2], metric="eval/f1") for name in tiny.ARMS})
    assert beds.judge(tiny, other, smoke=False).statement.endswith("[not judged: no arm measures eval/accuracy]")
    part = beds.judge(tiny, made(baseline=[0.1, 0.2], method=[0.3, 0.4]), smoke=False)
    assert part.verdict == "not judged" and "without warm" in part.statement


def test_a_record_lies_beside_its_plot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = made(baseline=[0.1, 0.2, 0.3], method=[0.3, 0.4, 0.5], warm=[0.0, 0.0, float("nan")])
    claim = beds.judge(tiny, found, smoke=False)
    arguments = ["--out", "somewhere", "--record", "--fresh", "--seeds", "3", "--out=other"]
    command = cli.said(cli.command_name(tiny), arguments)
    cli.write(tiny, cli.Options(record=True), tiny.Settings(), found, claim, tmp_path, command)
    record, read = results.read(tmp_path / "results" / "experiment" / "tiny.json")
    assert record["command"] == f"python -m {NAME} --seeds 3"
    assert tiny.claim(read).verdict == record["claim"]["verdict"] == "supported here"
    kept = records.read_claim(record).primary
    assert kept.text == "eval/accuracy, method - baseline > 0" and kept.mean == doubles(0.2)
    assert (tmp_path / "results" / "experiment" / "tiny.png").is_file()


def test_what_the_library_refuses_names_the_flags_that_were_given(tmp_path, monkeypatch):
    def refuse(settings):
        raise ValueError(f"learning_rate={settings.learning_rate} must be positive\nand more")

    monkeypatch.setattr(tiny, "build", refuse)
    said = r"^--learning-rate 9.0: learning_rate=9.0 must be positive$"
    with pytest.raises(UserError, match=said):
        cli.run(tiny, ["--learning-rate", "9", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="and more") as found:
        cli.run(tiny, ["--out", str(tmp_path)])
    assert not isinstance(found.value, UserError), "a mistake in the file keeps its traceback"


def test_every_chosen_arm_is_read_before_the_first_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tiny.ARMS, "warm", {"warm_step": 3})
    with pytest.raises(UserError, match="arm 'warm' sets 'warm_step', which is no setting; did you mean 'warm_steps'"):
        cli.run(tiny, ["--out", str(tmp_path)])
    assert capsys.readouterr().out == ""


def test_a_disk_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    def full(module, arguments):
        raise OSError(errno.EROFS, "Read-only file system", "seeds/grpo/seed_0/episodes.jsonl")

    monkeypatch.setattr(cli, "run", full)
    with pytest.raises(SystemExit) as stopped:
        cli.main(__name__, [])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "error: cannot write seeds/grpo/seed_0/episodes.jsonl: Read-only file system; free space or fix the folder, "
        "then give the same command\n"
    )
