"""Seeds of an arm on the host are kept: ended anywhere they go on bit for bit, and what is done stays done."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from experiments.policy_gradient import dr_grpo
from jaxrl_llm.asynchronous import threads
from jaxrl_llm.asynchronous.limits import Sizes
from jaxrl_llm.asynchronous.roles import make_program
from jaxrl_llm.asynchronous.workers import Threads
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.experiment import cli, durable, loop
from jaxrl_llm.experiment.durable import Keeping, Remote, Stopped
from jaxrl_llm.experiment.evidence import store
from jaxrl_llm.run.records import record, report, track
from jaxrl_llm.run.stop import Stop
from jaxrl_llm.train import checkpoint, skipped
from jaxrl_llm.train.skipped import NotFinite
from tests.experiment import tiny
from tests.models_for_tests import byte_model

SETTINGS = tiny.Settings(steps=5, eval_every=3, warm_steps=3, on_host=True)
SEEDS = [0, 1]


class Killed(BaseException):
    """In the place of a signal that leaves no time."""


def run(folder, **changes):
    keeping = Keeping(folder=folder, identity="one", checkpoint_every=2)._replace(**changes)
    return loop.run_arm(tiny.build(SETTINGS), SETTINGS, SEEDS, keeping=keeping)


def alike(one, other):
    assert one.curves == other.curves and one.metrics == other.metrics
    assert (one.tokens, one.rollouts, one.updates) == (other.tokens, other.rollouts, other.updates)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(folder), folder


def test_a_kept_run_is_the_run_without_a_folder(undisturbed):
    alike(undisturbed[0], loop.run_arm(tiny.build(SETTINGS), SETTINGS, SEEDS))


@pytest.mark.parametrize("kind", ["append_line", "save"])
@pytest.mark.parametrize("after", [0, 1, 3, 8, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 5, 13))])
def test_killed_anywhere_it_goes_on_bit_for_bit(kind, after, undisturbed, tmp_path, monkeypatch):
    """Killed before the ``after``-th line is written, or just behind the ``after``-th checkpoint."""
    count, module = iter(range(1000)), record if kind == "append_line" else checkpoint
    whole = getattr(module, kind)

    def dying(*given, **named):
        if kind == "save":
            whole(*given, **named)
        if next(count) == after:
            raise Killed
        if kind != "save":
            whole(*given, **named)

    monkeypatch.setattr(module, kind, dying)
    try:
        run(tmp_path)
    except Killed:
        monkeypatch.setattr(module, kind, whole)
    alike(run(tmp_path), undisturbed[0])
    for seed in SEEDS:
        rows, wanted = (record.read_lines(f / f"seed_{seed}" / "metrics.jsonl") for f in (tmp_path, undisturbed[1]))
        assert [row["step"] for row in rows] == list(range(1, 9))
        assert [row.get("reward/mean") for row in rows] == [row.get("reward/mean") for row in wanted]


def test_what_is_done_is_not_done_again(undisturbed, tmp_path, monkeypatch):
    run(tmp_path)

    def refused(*given):
        raise AssertionError("a finished seed trains again")

    monkeypatch.setattr(durable.host, "iterations", refused)
    monkeypatch.setattr(durable.offline, "make_run", refused)
    alike(run(tmp_path), undisturbed[0])


def one_seed(folder, **given):
    keeping = Keeping(folder=folder, identity="one", checkpoint_every=50, of_seed="", of_stage="")
    plan = tiny.build(dataclasses.replace(SETTINGS, warm_steps=0))
    own = plan._replace(init=lambda key: jax.tree.map(jnp.copy, plan.init(key)))  # parameters that nobody else has
    return durable.SeedRun(own, 5, "", keeping, **{"start": durable.given_start} | given).run(0, Stop())


def test_what_a_measurement_between_steps_lacks_keeps_its_step(tmp_path):
    """The state before it is given away by then; the figures that were not measured are not there."""

    def lacking(iteration):
        if int(iteration.state.step) == 3:
            raise RunStopped("the budget is spent")
        return {"eval/more": 0.5}

    for _ in one_seed(tmp_path / "whole"):
        pass
    said = f"the budget is spent; {tmp_path}/cut is kept at step 3, continue with: python -m jaxrl_llm --resume "
    with pytest.raises(RunStopped, match=said):
        for _ in one_seed(tmp_path / "cut", between=lacking):
            pass
    for _ in one_seed(tmp_path / "cut"):
        pass
    rows, wanted = (record.read_lines(tmp_path / name / "metrics.jsonl") for name in ("cut", "whole"))
    assert [row.get("eval/more") for row in rows] == [0.5, 0.5, None, None, None]
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in wanted]
    assert [row["step"] for row in report.steady(rows)] == [2, 3, 5], "who goes on compiles again"
    ends = (record.read_lines(tmp_path / name / "measured.jsonl")[-1] for name in ("cut", "whole"))
    assert next(ends) == next(ends)


def test_a_run_that_goes_on_holds_no_state_twice(tmp_path, monkeypatch):
    """Where the state is read nothing is left of the one that says its shapes; what was loaded is gone behind it."""
    for _ in one_seed(tmp_path):
        pass
    restore, moments, loaded = checkpoint.restore, [], []

    def start(*given):
        state = durable.given_start(*given)
        moments.extend(map(weakref.ref, jax.tree.leaves(state.opt_state)))
        loaded.extend(jax.tree.leaves(state.params))
        return state

    def watched(path, like):
        assert moments and not any(moment() for moment in moments)
        return restore(path, like)

    monkeypatch.setattr(checkpoint, "restore", watched)
    for _ in one_seed(tmp_path, start=start):
        pass
    assert loaded and all(x.is_deleted() for x in loaded)


def test_a_damaged_checkpoint_costs_the_steps_behind_it_only(undisturbed, tmp_path, monkeypatch, capsys):
    run(tmp_path)
    newest = checkpoint.latest(tmp_path / "seed_1" / "checkpoints" / "stage_1")
    for file in newest.rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[:-7])
    alike(run(tmp_path), undisturbed[0])
    assert "skipping checkpoint" in capsys.readouterr().err


def test_a_damaged_line_of_figures_is_left_out_of_them(undisturbed, tmp_path, capsys):
    """The run ends all the same: what it has trained is there, and what it counts is what can be read."""
    run(tmp_path)
    figures = tmp_path / "seed_1" / "metrics.jsonl"
    lines = figures.read_text().splitlines()
    figures.write_text("\n".join([*lines[:4], lines[4][:9], *lines[5:]]) + "\n")
    again = run(tmp_path)
    assert "metrics.jsonl:5 is damaged" in capsys.readouterr().err
    assert again.metrics["eval/accuracy"] == undisturbed[0].metrics["eval/accuracy"]
    assert 0 < again.tokens < undisturbed[0].tokens


def test_a_request_to_stop_keeps_the_step(undisturbed, tmp_path, monkeypatch):
    whole = record.append_line

    def asking(path, row):
        whole(path, row)
        if row["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(record, "append_line", asking)
    with pytest.raises(Stopped, match="stopped at step 5"):
        run(tmp_path)
    monkeypatch.setattr(record, "append_line", whole)
    assert checkpoint.note(checkpoint.latest(tmp_path / "seed_0" / "checkpoints" / "stage_1"))["step"] == 5
    alike(run(tmp_path), undisturbed[0])


@pytest.mark.parametrize("method", ["_measured", "_advance"])
def test_a_request_to_stop_where_no_checkpoint_is_due_keeps_the_step(method, undisturbed, tmp_path, monkeypatch):
    """The signal comes while step 6 is measured, or when its line was written and nobody had asked yet."""
    whole = getattr(durable.SeedRun, method)

    def measured(own, logs, step, params, key):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(own, logs, step, params, key)

    def advance(own, index, stage, state, begin, end, *rest):
        yield from whole(own, index, stage, state, begin, end, *rest)
        if end == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(durable.SeedRun, method, {"_measured": measured, "_advance": advance}[method])
    with pytest.raises(Stopped, match="stopped at step 6"):
        run(tmp_path)
    monkeypatch.setattr(durable.SeedRun, method, whole)
    assert checkpoint.note(checkpoint.latest(tmp_path / "seed_0" / "checkpoints" / "stage_1"))["step"] == 6
    lines = record.read_lines(tmp_path / "seed_0" / "measured.jsonl")
    assert [row["step"] for row in lines] == ([0, 3, 6] if method == "_measured" else [0, 3])
    alike(run(tmp_path), undisturbed[0])


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("step", [5, 6])
def test_a_request_to_stop_keeps_the_step_of_an_asynchronous_run(step, workers, undisturbed, tmp_path, monkeypatch):
    """No checkpoint is due for long; step 6 is the last one before a measurement."""
    remote = Remote(Threads, a_worker) if workers else None
    keeping = Keeping(tmp_path, "one", checkpoint_every=50, staleness=0, remote=remote)
    again = partial(loop.run_arm, tiny.build(SETTINGS), SETTINGS, [0], keeping=keeping)
    see = skipped.Streak.see

    def asking(streak, row, at):
        see(streak, row, at)
        if at == step - 3 and isinstance(row["loss/total"], float):  # of the second stage; those of an arm are arrays
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(durable.skipped.Streak, "see", asking)
    with pytest.raises(Stopped, match=f"stopped at step {step}"):
        again()
    monkeypatch.setattr(durable.skipped.Streak, "see", see)
    folder = tmp_path / "seed_0"
    assert checkpoint.note(checkpoint.latest(folder / "checkpoints" / "stage_1"))["step"] == step
    assert [row["step"] for row in record.read_lines(folder / "metrics.jsonl")] == list(range(1, step + 1))
    found = again()
    for name, curve in undisturbed[0].curves.items():
        assert found.curves[name]["values"] == curve["values"][:1], name


def test_a_request_to_stop_before_the_first_step_behind_a_measurement_keeps_what_was_done(tmp_path, monkeypatch):
    """Step 6 has no checkpoint yet, and the rollout of step 7 is not waited for."""
    seen, make = [], durable.host.make_host_loop

    def scored(score, rows):
        seen.append(rows)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2 * threads.ASK_S)  # the main thread has heard of it
        return score(rows)

    def made(*given, **named):
        whole = make(*given, **named)
        return whole._replace(score=partial(scored, whole.score))

    monkeypatch.setattr(durable.host, "make_host_loop", made)
    keeping = Keeping(tmp_path, "one", checkpoint_every=50, staleness=0)
    with pytest.raises(Stopped, match="stopped at step 6"):
        loop.run_arm(tiny.build(SETTINGS), SETTINGS, [0], keeping=keeping)
    folder = tmp_path / "seed_0"
    assert checkpoint.note(checkpoint.latest(folder / "checkpoints" / "stage_1"))["step"] == 6
    assert [row["step"] for row in record.read_lines(folder / "metrics.jsonl")] == list(range(1, 7))


def test_checkpoints_of_a_stage_on_rows_are_as_far_apart_as_was_asked(tmp_path, monkeypatch):
    """Measurements in between shift none: every third step of the imitation, and both ends of the stages."""
    saved, save = [], checkpoint.save

    def noted(folder, state, *, note):
        save(folder, state, note=note)
        saved.append(note["step"])

    monkeypatch.setattr(checkpoint, "save", noted)
    settings = dataclasses.replace(SETTINGS, warm_steps=10, steps=1, eval_every=4)
    loop.run_arm(tiny.build(settings), settings, [0], keeping=Keeping(tmp_path, "one", checkpoint_every=3))
    assert saved == [3, 6, 9, 10, 11]


@pytest.mark.parametrize("workers", [False, True])
def test_skipped_updates_are_counted_across_checkpoints(workers, tmp_path):
    """Three in a row, where the asynchronous loop begins anew behind every second step."""
    settings = dataclasses.replace(SETTINGS, warm_steps=0)
    plan = tiny.build(settings)
    method = plan.stages[0].method
    broken = method._replace(loss=lambda params, batch: (jnp.nan * jnp.sum(params["table"]), {}))
    plan = plan._replace(stages=(plan.stages[0]._replace(method=broken),))

    def worker(index):
        start = partial(durable.shared_start, plan.stages[0], plan.init(None), jax.random.key(0), index)
        return make_program(broken, start, plan.host_score)

    keeping = Keeping(
        tmp_path, "one", checkpoint_every=2, staleness=1, most_skipped=3,
        remote=Remote(Threads, worker, Sizes()) if workers else None,
    )  # fmt: skip
    seed = durable.SeedRun(plan, 5, "", keeping).run(0, Stop("stopped"))
    with pytest.raises(NotFinite, match="step 3: 3 updates in a row"):
        list(seed)


def test_a_folder_of_another_run_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(UserError, match="holds a run of other settings.*--fresh"):
        run(tmp_path, identity="two")


def test_fewer_steps_than_a_run_has_trained_are_refused(tmp_path):
    """Its newest weights would stand beside an older measurement."""
    run(tmp_path)
    lines = (tmp_path / "seed_0" / "metrics.jsonl").read_bytes()
    fewer = dataclasses.replace(SETTINGS, steps=4)
    with pytest.raises(UserError, match="seed_0 is at step 8, beyond the 7 that are asked for.*give more --steps"):
        loop.run_arm(tiny.build(fewer), fewer, SEEDS, keeping=Keeping(tmp_path, "one"))
    assert (tmp_path / "seed_0" / "metrics.jsonl").read_bytes() == lines


def test_a_seed_that_another_process_trains_is_refused(tmp_path):
    with checkpoint.locked(tmp_path / "seed_0"), pytest.raises(UserError, match="seed_0 is in use by another process"):
        run(tmp_path)


def test_fresh_leaves_a_seed_alone_that_another_process_trains(tmp_path, monkeypatch):
    """Its folder was removed, and its lock with it: two processes would have written into one."""
    arm, left = tmp_path / "arm", []
    for seed in SEEDS:
        (arm / f"seed_{seed}" / "checkpoints").mkdir(parents=True)
        (arm / f"seed_{seed}" / "metrics.jsonl").write_text("{}")
        (arm / f"seed_{seed}" / ".lock").write_text("")

    def ran(*given, **named):
        left.extend(str(path.relative_to(arm)) for path in arm.rglob("*"))
        raise Killed

    monkeypatch.setattr(loop, "run_arm", ran)
    given = (tiny.build(SETTINGS), SETTINGS, SEEDS, tmp_path / "store")
    again = partial(store.seeds_of, *given, fresh=True, keeping=Keeping(arm, "one"))
    with checkpoint.locked(arm / "seed_1"), pytest.raises(UserError, match="seed_1 is in use by another process"):
        again()
    assert left == [] and all((arm / f"seed_{seed}" / "metrics.jsonl").exists() for seed in SEEDS)
    lock = (arm / "seed_1" / ".lock").stat().st_ino
    with pytest.raises(Killed):
        again()
    assert sorted(left) == ["seed_0", "seed_0/.lock", "seed_1", "seed_1/.lock"]
    assert (arm / "seed_1" / ".lock").stat().st_ino == lock


def test_heads_that_do_not_fit_on_the_disk_are_an_error_of_the_disk(tmp_path, monkeypatch):
    """That of safetensors is of no kind that anybody reads, and a model before them stays."""

    def full(*given, **named):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def model(folder, *given, **named):
        (folder / "model").mkdir()

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "before").write_text("")
    monkeypatch.setattr(durable.lora_state, "save", lambda *given: {})
    monkeypatch.setattr(durable.report, "save_model", model)
    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    monkeypatch.setattr(durable, "save_file", full, raising=False)
    with pytest.raises(OSError, match="No space left on device") as found:
        durable._write_export(tmp_path, None, {}, {"value": {"weight": np.ones(3, np.float32)}})
    assert found.value.errno == 28 and found.value.filename.endswith("heads.safetensors")
    assert (tmp_path / "model" / "before").exists()


def test_without_staleness_the_asynchronous_loop_is_the_host_loop(undisturbed, tmp_path):
    found = run(tmp_path, staleness=0, scorers=2)
    for name, curve in undisturbed[0].curves.items():
        assert found.curves[name] == curve, name
    stale = run(tmp_path / "stale", staleness=2)
    behind = np.asarray(stale.curves["sampler/staleness"]["values"])
    assert np.nanmax(behind) <= 2


def a_worker(index):
    """The program of a stage, which every worker makes for itself."""
    plan = tiny.build(SETTINGS)

    def start():
        return durable.shared_start(plan.stages[index], plan.init(jax.random.key(0)), jax.random.key(0), index)

    return make_program(plan.stages[index].method, start, plan.host_score)


@pytest.mark.parametrize("sizes", [Sizes(rollers=1), Sizes(units=2, swaps=1)], ids=["plain", "units and swaps"])
def test_without_staleness_workers_train_what_the_host_loop_does(undisturbed, tmp_path, sizes):
    """They begin at a checkpoint in the middle, too; at the end nothing is left of their folder."""
    keeping = Keeping(tmp_path, "one", checkpoint_every=4, staleness=0, remote=Remote(Threads, a_worker, sizes))
    found = loop.run_arm(tiny.build(SETTINGS), SETTINGS, [0], keeping=keeping)
    for name, curve in undisturbed[0].curves.items():
        assert found.curves[name]["values"] == curve["values"][:1], name
    assert found.curves["sampler/staleness"]["values"] and not list((tmp_path / "seed_0" / "workers").iterdir())


@pytest.mark.slow
def test_an_experiment_in_processes_of_ray_is_the_host_loop(tmp_path):
    pytest.importorskip("ray")
    words = ["--smoke", "--seeds", "1", "--arm", "grpo", "--fresh"]
    more = {"host": ["--loop", "host"], "ray": ["--loop", "async", "--staleness", "0", "--workers", "ray:1"]}
    for name, loops in more.items():
        command = [sys.executable, "-m", dr_grpo.__name__, *words, *loops, "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
    one, other = (json.loads((tmp_path / name / "results.json").read_text())["arms"]["grpo"]["curves"] for name in more)
    assert all(other[name] == curve for name, curve in one.items())


WRONG = {
    ("--workers", "ray:0"): "must be threads:N, local:N or ray:N",
    ("--workers", "ray:\u00b2", "--loop", "async"): "must be threads:N, local:N or ray:N",
    ("--loop", "async", "--storage-units", "-1"): "--storage-units -1 must be at least 0",
    ("--storage-units", "2"): "--storage-units 2 belongs to --loop async",
    (
        "--loop",
        "async",
        "--weight-swaps",
        "1",
    ): "--weight-swaps 1 is of several workers: give --workers",
    ("--loop", "async", "--workers", "local:2", "--patience", "0"): "--patience 0.0 must be positive",
    ("--loop", "async", "--patience", "2"): "--patience 2.0 is of workers of --loop async",
    ("--loop", "async", "--workers", "local:2", "--step-parts", "3"): "--step-parts 3 does not divide the 2 prompts",
    ("--workers", "ray:2"): "--workers ray:2 belongs to --loop async",
    ("--loop", "async", "--workers", "ray:2", "--mesh", "data=2"): "does not go with --mesh data=2",
    ("--loop", "async", "--workers", "ray:2", "--layout", "packed"): "drop --layout packed",
}


@pytest.mark.parametrize("words", WRONG)
def test_workers_that_cannot_be_are_one_line(words, tmp_path, capsys):
    pytest.importorskip("ray")
    with pytest.raises(SystemExit) as ended:
        cli.main(dr_grpo.__name__, ["--smoke", "--arm", "grpo", "--out", str(tmp_path), *words])
    assert ended.value.code == 2 and WRONG[words] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (("--workers", "threads:2"), "give --workers threads:1 with --hosts"),
        (("--workers", "local:2"), "--workers local:2 are of one process"),
        (("--storage-units", "2"), "--storage-units 2 are of one process: drop them, or --hosts"),
    ],
)
def test_workers_of_one_process_are_refused_with_several(words, message, tmp_path, monkeypatch, capsys):
    """Each process would start its programs in an order of its own."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    job = ["--smoke", "--arm", "grpo", "--out", str(tmp_path), "--loop", "async", *words]
    with pytest.raises(SystemExit) as ended:
        cli.main(dr_grpo.__name__, job)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_limit_is_refused_where_one_program_runs_all_seeds(tmp_path, capsys):
    """Nothing looks at its figures before the last step is done."""
    with pytest.raises(SystemExit) as ended:
        cli.main(dr_grpo.__name__, ["--smoke", "--arm", "grpo", "--out", str(tmp_path), "--most-gap", "0.5"])
    said = "--most-gap 0.5 stops one seed after another: give --loop host with it, or drop it"
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_trackers_write_what_the_log_has(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(tmp_path, trackers=("tensorboard", "wandb"))
    assert list((tmp_path / "seed_0" / "tensorboard").glob("events*"))
    assert list((tmp_path / "seed_0" / "wandb").glob("offline-run*"))


@pytest.mark.parametrize("begin", [0, 3])
def test_tensorboard_forgets_the_steps_behind_the_one_that_a_run_goes_on_from(begin, tmp_path):
    """Those that an earlier try wrote before its first checkpoint too; step 0 is measured once and stays."""
    from tensorboardX.proto.event_pb2 import Event

    for first in (0, begin):
        tracker = track.open_trackers(("tensorboard",), tmp_path, begin=first)
        tracker.write(first + 1, {"loss": 1.0})
        tracker.close()
    newest = max((tmp_path / "tensorboard").glob("events*"), key=lambda p: p.stat().st_mtime_ns)
    left, events = newest.read_bytes(), []
    while left:  # a record: its length, a checksum of four bytes, the event, another one
        size = int.from_bytes(left[:8], "little")
        events.append(Event.FromString(left[12 : 12 + size]))
        left = left[16 + size :]
    assert [event.step for event in events if event.HasField("session_log")] == [begin + 1]
    assert events[-1].step == begin + 1 and events[-1].summary.value[0].tag == "loss"


def test_a_run_has_an_identity_of_its_own_for_its_tracker(tmp_path, monkeypatch):
    """Folders of the same name are other runs, whose figures the service would take for those of one."""
    begun = []
    service = SimpleNamespace(init=lambda **said: begun.append(said) or SimpleNamespace(finish=lambda: None))
    monkeypatch.setitem(sys.modules, "wandb", service)
    folders = [tmp_path / place / "runs" / "grpo" / "seed_0" for place in ("here", "there")]
    for folder in (*folders, folders[0]):
        folder.mkdir(parents=True, exist_ok=True)
        track.open_trackers(("wandb",), folder).close()
    names, ids = [x["name"] for x in begun], [x["id"] for x in begun]
    assert names == ["runs-grpo-seed_0"] * 3
    assert ids[0] == ids[2] != ids[1] and all(x.isalnum() for x in ids)


def test_an_unknown_tracker_is_one_line():
    with pytest.raises(UserError, match="--track paper: the trackers are tensorboard, wandb"):
        track.check(("paper",))


FLAGS = [
    "--format", "gsm8k", "--max-new-tokens", "8", "--prompts-per-step", "2", "--group-size", "2", "--steps", "5",
    "--eval-every", "5", "--eval-problems", "4", "--eval-samples", "2", "--seeds", "1", "--arm", "dr_grpo",
    "--checkpoint-every", "2", "--compute", "bfloat16", "--remat", "--lora", "2", "--top-k", "50",
]  # fmt: skip
DYING = """
import os, signal, sys
from jaxrl_llm.train import host
whole = host.iterations
def iterations(*given):
    for one in whole(*given):
        if int(one.state.step) == 4: os.kill(os.getpid(), signal.SIGKILL)
        yield one
if {die}: host.iterations = iterations
from experiments.policy_gradient import dr_grpo
from jaxrl_llm.experiment import cli
sys.exit(cli.main("experiments.policy_gradient.dr_grpo", {words!r}))
"""


@pytest.mark.slow
def test_an_experiment_with_a_model_of_ones_own_survives_kill_9(tmp_path):
    """Rows and model of files, bfloat16, recomputed layers and an adapter; the exported models are the same files."""
    byte_model(tmp_path, "qwen2", max_positions=300)
    rows = [{"question": f"{k} + 1?", "answer": f"#### {k + 1}"} for k in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--model", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), *FLAGS]

    def start(out, die=False):
        code = DYING.format(die=die, words=[*words, "--out", str(tmp_path / out)])
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)

    assert start("whole").returncode == 0
    killed = start("cut", die=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    again = start("cut")
    assert again.returncode == 0 and "resuming" in again.stdout, again.stderr[-2000:]
    whole, cut = (tmp_path / out / "seeds" / "dr_grpo" / "seed_0" for out in ("whole", "cut"))
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes()
    one, other = (json.loads((tmp_path / out / "results.json").read_text())["arms"] for out in ("whole", "cut"))
    assert one["dr_grpo"]["curves"] == other["dr_grpo"]["curves"]
    assert (cut / "episodes.jsonl").is_file()
    third = start("cut")
    assert "taken from" in third.stdout


def test_settings_of_the_test_train_in_two_stages():
    assert dataclasses.asdict(SETTINGS)["warm_steps"] == 3 and len(tiny.build(SETTINGS).stages) == 2
