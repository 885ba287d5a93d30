"""A campaign of faults: what a run loses when it is killed, starved, damaged or doubled, as a table.

Every case compares the final weights with those of an undisturbed run, bit for bit, and keeps the line that the user
reads. Subjects: the main job, an experiment, and an asynchronous run; the three with verdicts of other processes, and
with rewards or users of a model behind an endpoint. ``--command`` takes any other command that goes on when it is
started again with the same words.

    python benchmarks/faults.py --out docs/faults.md                      # everything
    python benchmarks/faults.py --case kill --subject main --kills 20     # one
    python benchmarks/faults.py --case kill --command "python train.py --out {out}" --result "{out}/model/*"

Mounting small and read-only file systems needs privileges; without them those cases say so. Where the clock cannot be
set, the clock of the process jumps. Cases run one after another; all of them take about twenty minutes of a core.
"""

import argparse
import dataclasses
import functools
import glob
import hashlib
import http.server
import json
import os
import pathlib
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 12
SMALL = [
    "--model", "nano", "--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "12",
    "--train-problems", "64", "--eval-problems", "8", "--eval-samples", "2", "--checkpoint-every", "2",
    "--steps", str(STEPS),
]  # fmt: skip
EXPERIMENT = [
    "--smoke", "--arm", "grpo", "--seeds", "2", "--steps", "4", "--eval-every", "2", "--prompts-per-step", "4",
    "--group-size", "4", "--max-new-tokens", "12", "--loop", "host", "--checkpoint-every", "1",
]  # fmt: skip
TALKS = [
    "--smoke", "--arm", "diff_acc", "--seeds", "1", "--steps", "4", "--eval-every", "4", "--checkpoint-every", "1",
    "--loop", "host", "--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "12",
    "--max-new-tokens", "32", "--slots", "4", "--eval-problems", "2", "--eval-samples", "4", "--prompts-per-step", "2",
    "--model", "{folder}/model", "--data", "{folder}/users.jsonl", "--user", "$ENDPOINT", "--user-model", "{out}",
]  # fmt: skip
PYTHON = [sys.executable, "-u"]
ENDPOINT = "JAXRL_FAULTS_ENDPOINT"
PATIENCE_S = 900.0
HANG_S = 60.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """A command, how it goes on, and what its outcome is; ``{out}`` is its folder, ``{folder}`` the one around it."""

    name: str
    begin: str
    resume: str  # once ``started`` exists
    started: str
    outcome: Callable[[pathlib.Path], str]  # a hash of what the run is for
    loses: str = "nothing"
    steps: int = STEPS
    prepare: Callable[[pathlib.Path], None] = lambda folder: None  # writes what it reads into the folder around its own

    def command(self, out: pathlib.Path) -> list[str]:
        """To begin, or to go on."""
        there = out.joinpath(self.started).exists() if self.started else False
        words = (self.resume if there else self.begin).replace("{out}", str(out)).replace("{folder}", str(out.parent))
        return shlex.split(words.replace("$ENDPOINT", os.environ.get(ENDPOINT, "")))


def _write_rows(folder: pathlib.Path) -> None:
    rows = [{"prompt": f"m10 {i}+{j}=>", "answer": str((i + j) % 10)} for i in range(10) for j in range(10)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _write_users(folder: pathlib.Path) -> None:
    """Users of two kinds, and a small model with a chat template that talks to them."""
    if (folder / "model").is_dir():
        return
    from tests.models_for_tests import byte_model

    kinds = ("Yoga", "calm"), ("Boxing", "fights")
    rows = [{"profile": f"You like {kinds[i % 2][1]}, says {i}.", "type": kinds[i % 2][0]} for i in range(40)]
    (folder / "users.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "model").mkdir()
    byte_model(folder / "model", "qwen2", max_positions=400)


NOTHING = "nothing there"  # the outcome of a run that left no file


def _hash(paths: list[pathlib.Path]) -> str:
    if not paths:
        return NOTHING
    return hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()[:16]


def _model(out: pathlib.Path) -> str:
    return _hash(sorted((out / "model").glob("*.safetensors")))


def _seeds(out: pathlib.Path) -> str:
    """The weights of the last checkpoint of every seed, and all that was measured of it."""
    import numpy as np
    import orbax.checkpoint as ocp

    from jaxrl_llm.train import checkpoint

    parts = []
    for folder in sorted(out.rglob("seed_*")):
        path = checkpoint.latest(folder / "checkpoints" / "stage_0")
        if path is None:
            continue
        with ocp.StandardCheckpointer() as reader:
            tree = reader.restore(path.absolute() / "state")
        parts += [path.name.encode(), *_leaves(tree["params"], np.asarray)]
        parts.append((folder / "measured.jsonl").read_bytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16] if parts else NOTHING


def _leaves(tree, array) -> list[bytes]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in _leaves(tree[key], array)]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in _leaves(item, array)]
    return [array(tree).tobytes()]


def _newest(out: pathlib.Path) -> str:
    """The weights of the newest checkpoint of an asynchronous run."""
    import jax
    import numpy as np

    from jaxrl_llm.train import checkpoint

    path = checkpoint.latest(out)
    if path is None:
        return NOTHING
    state = checkpoint.restore(path, program().start())
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state.params))).hexdigest()[:16]


def subjects() -> dict[str, Subject]:
    """Those of the table."""
    python, script = " ".join(PYTHON), f"{ROOT}/benchmarks/faults.py"
    main = f"{python} -m jaxrl_llm"
    papers = f"{python} -m jaxrl_llm run dr_grpo {' '.join(EXPERIMENT)} --out {{out}}"
    steps = f"{python} {script} --asynchronous {{out}}"
    asked = f"{main} {' '.join(SMALL)} --reward benchmarks.faults:by_endpoint --out {{out}}"
    told = f"{main} {' '.join(SMALL)} --verifier math --out {{out}}".replace("chain", "{folder}/rows.jsonl")
    told, beside = told.replace(f"--steps {STEPS}", "--steps 60"), "--loop async --staleness 0"
    marked = f"{papers} --data {{folder}}/rows.jsonl --verifier math"
    marked = marked.replace("--seeds 2 --steps 4", "--seeds 1 --steps 40")
    talks = f"{main} run curio {' '.join(TALKS)} --out {{out}}"
    return {
        "main": Subject(
            "main job", f"{main} {' '.join(SMALL)} --out {{out}}", f"{main} --resume {{out}}", "settings.json", _model
        ),
        "endpoint": Subject(
            "main job, rewards of an endpoint", asked, f"{main} --resume {{out}}", "settings.json", _model
        ),
        "endpoint experiment": Subject(
            "experiment, users of an endpoint", talks, talks, "", _seeds, steps=4, prepare=_write_users
        ),
        "endpoint async": Subject(
            "asynchronous run, rewards of an endpoint", f"{asked} {beside}", f"{main} --resume {{out}}",
            "settings.json", _model,
        ),
        "judged": Subject(
            "main job, other processes judge", told, f"{main} --resume {{out}}", "settings.json", _model,
            prepare=_write_rows,
        ),
        "judged experiment": Subject(
            "experiment, other processes judge", marked, marked, "", _seeds, steps=40, prepare=_write_rows
        ),
        "judged async": Subject(
            "asynchronous run, other processes judge", f"{told} {beside}", f"{main} --resume {{out}}",
            "settings.json", _model, prepare=_write_rows,
        ),
        "experiment": Subject("experiment", papers, papers, "", _seeds, steps=4),
        "async": Subject("asynchronous run", steps, steps, "", _newest),
    }  # fmt: skip


# an asynchronous run: this file again, as a process of its own


def program():
    """The main job's method as roles; every process builds its own."""
    from functools import partial

    import jax
    import jax.numpy as jnp

    from jaxrl_llm.asynchronous.roles import make_program
    from jaxrl_llm.jobs import grpo
    from jaxrl_llm.run import parts, settings
    from jaxrl_llm.train.online import init_state

    given = settings.parse([*SMALL, "--out", "unused"])
    model = parts.load_model(given.model)
    problems = parts.load_problems(given.data, train=given.train_problems, heldout=given.eval_problems, seed=given.seed)
    tables = parts.make_tables(model, problems, prompt_tokens=0, max_new_tokens=given.max_new_tokens)
    online = grpo.method_of_flags(given, model, tables, None)
    copied = partial(jax.tree.map, jnp.copy, model.params)
    score = parts.make_scorer(model.tokenizer, tables.train, tables.verifier)
    return make_program(online, lambda: init_state(online, copied(), jax.random.key(given.seed)), score)


def killed(function, *arguments):
    """The worker dies before its work."""
    os.kill(os.getpid(), signal.SIGKILL)


def asynchronous(out: str, victim: str) -> None:
    """Trains; with a ``victim`` as actors on a cluster of two nodes, of which one worker of that role is killed."""
    from functools import partial

    from jaxrl_llm.asynchronous import conductor
    from jaxrl_llm.asynchronous.limits import Limit, Limits, Sizes
    from jaxrl_llm.asynchronous.workers import Threads

    limits = Limits(score=Limit(300.0, 300.0))
    train = partial(conductor.run, folder=out, sizes=Sizes(rollers=1, staleness=0), limits=limits, checkpoint_every=2)
    if not victim:
        report = train(Threads(), program, STEPS)
    else:
        with two_nodes() as where:
            report = train(_with_victim(victim, where), program, STEPS)
    for event in report.events:
        print(f"{event.kind} {event.who}: {event.cause}")
    print(f"{STEPS} updates")


def _with_victim(victim: str, where: dict):
    from functools import partial

    from jaxrl_llm.asynchronous.ray_workers import RayWorkers

    class Workers(RayWorkers):
        calls = 0

        def call(self, name, function, *arguments):
            if function.__name__ == victim:
                self.calls += 1
                if self.calls == 5:
                    function = partial(killed, function)
            return super().call(name, function, *arguments)

    return Workers(where)


@contextmanager
def two_nodes() -> Iterator[dict]:
    """A learner's node and a rollout node of a Ray cluster on this machine; yields the options of the roles."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Cluster(
        initialize_head=True, head_node_args=node | {"resources": {"learner": 1}, "include_dashboard": False}
    )
    try:
        made.add_node(**node, resources={"roller": 1})
        ray.init(address=made.address, log_to_driver=False)
        yield {"learn": {"resources": {"learner": 0.1}}, "roll": {"resources": {"roller": 0.1}}}
    finally:
        ray.shutdown()
        made.shutdown()


# a model behind an endpoint: this file again, as its server and as the reward of the run that asks it


class Judge(http.server.BaseHTTPRequestHandler):
    """Speaks the OpenAI protocol; its reply is a number that a text always gets."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        digest = hashlib.sha256(request["messages"][-1]["content"].encode()).digest()
        message = {"role": "assistant", "content": str(digest[0] / 255)}
        body = {
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        """Silent."""


class Server:
    """A process that answers at one address, and may be killed and come back there."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def __enter__(self):
        os.environ[ENDPOINT] = f"http://127.0.0.1:{self.port}/v1"
        self.up()
        return self

    def up(self) -> None:
        self.process = subprocess.Popen([*PYTHON, __file__, "--serve", str(self.port)], start_new_session=True)

    def __exit__(self, *_):
        end(self.process)


@functools.cache
def _chat():
    """Asks for every text once in the life of a process; what an earlier one was told is asked again."""
    from jaxrl_llm.tools import endpoints

    folder = tempfile.TemporaryDirectory(prefix="jaxrl_faults_")
    return endpoints.make_chat(os.environ[ENDPOINT], "judge", cache=f"{folder.name}/replies.jsonl"), folder


def by_endpoint(answer, response: str) -> float:
    """The reward of the subject that asks."""
    return float(_chat()[0]([{"role": "user", "content": response}]))


# running


def environment() -> dict[str, str]:
    """One processor, little output; programs of an earlier process are taken up."""
    ours = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    # Ray kills workers of its own accord where other programs fill the memory
    return dict(os.environ) | ours | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}


def start(subject: Subject, out: pathlib.Path, log: pathlib.Path, **more) -> subprocess.Popen:
    """The subject as a process in a group of its own, which writes to ``log``."""
    subject.prepare(out.parent)
    with log.open("ab") as file:
        return subprocess.Popen(
            subject.command(out), cwd=ROOT, env=environment(), stdout=file, stderr=file, start_new_session=True, **more
        )


def finish(subject: Subject, out: pathlib.Path, log: pathlib.Path, **more) -> int:
    """Runs to its end; the exit code."""
    process = start(subject, out, log, **more)
    try:
        return process.wait(PATIENCE_S)
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """``kill -9`` of all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: pathlib.Path) -> str:
    """What the user reads last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error:", "stopped", "skipping"))] or lines[-1:]
    return said[-1] if said else ""


def children(pid: int, word: str) -> list[int]:
    """Processes below ``pid`` whose command line holds ``word``."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if word in (folder / "cmdline").read_text():
                found.append((int(folder.name), parent))
    below, grown = {pid}, True
    parents = {int(f.name): _parent(f) for f in pathlib.Path("/proc").glob("[0-9]*")}
    while grown:
        more = {child for child, parent in parents.items() if parent in below} - below
        below, grown = below | more, bool(more)
    return [child for child, _ in found if child in below and child != pid]


def _parent(folder: pathlib.Path) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return -1


def trained(out: pathlib.Path, lines: int) -> bool:
    """Whether the metrics of that many steps are there, or a checkpoint behind them."""
    try:
        counts = [path.read_bytes().count(b"\n") for path in out.rglob("metrics.jsonl")]
        counts += [_step(path) for path in out.rglob("step_*")]
    except FileNotFoundError:  # a checkpoint got its name meanwhile: look again
        return False
    return max(counts, default=0) >= lines


def _lines(out: pathlib.Path) -> int:
    """Of the metrics that are written."""
    return sum(path.read_bytes().count(b"\n") for path in out.rglob("metrics.jsonl"))


def _step(checkpoint: pathlib.Path) -> int:
    """Of its name, once it is written."""
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number.isdigit() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Until the condition holds or the process is over."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@contextmanager
def small_disk(size: str) -> Iterator[tuple[pathlib.Path, Callable[[str], None]]]:
    """A file system of its own, and a function that mounts it anew with other options."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxrl_faults_"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield folder, lambda options: subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


# cases: each returns what it did, what the user read, and the outcome's hash

Found = tuple[str, str, str]


def kill(subject: Subject, folder: pathlib.Path, kills: int, seconds: float) -> Found:
    """``kill -9`` at random moments of its life, start-up included; then it runs to its end."""
    out, log, rng = folder / "run", folder / "log", random.Random(kills)
    moments, outcomes, whole = [], set(), 0
    while len(moments) < kills:
        process, began = start(subject, out, log), time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, seconds))
        if process.poll() is None:
            moments.append(time.monotonic() - began)
            end(process)
        else:  # it came to its end before: another run takes the next kills
            outcomes.add(subject.outcome(out))
            whole += 1
            shutil.rmtree(out)
    code = finish(subject, out, log)
    outcomes.add(subject.outcome(out))
    did = f"{kills} kills in {whole + 1} runs, {min(moments):.0f} to {max(moments):.0f} s after a start; exit {code}"
    return did, last_line(log), outcomes.pop() if len(outcomes) == 1 else f"{len(outcomes)} outcomes"


def full_disk(subject: Subject, folder: pathlib.Path, *_) -> Found:
    """A disk with room for one checkpoint; then it gets more."""
    with small_disk("3m") as (disk, remount):
        code = finish(subject, disk / "run", folder / "log")
        said = last_line(folder / "log")
        remount("size=200m")
        again = finish(subject, disk / "run", folder / "log")
        return f"exit {code}, with room again {again}", said, subject.outcome(disk / "run")


def read_only(subject: Subject, folder: pathlib.Path, *_) -> Found:
    """The folder becomes read-only in the middle; then it is writable again."""
    out = folder / "run"
    process = start(subject, out, folder / "log")
    wait_for(lambda: trained(out, 3), process)
    try:
        subprocess.run(["mount", "--bind", out, out], check=True)
        while subprocess.run(["mount", "-o", "remount,ro,bind", out], capture_output=True).returncode:
            time.sleep(0.02)  # refused while a file is open for writing
            if process.poll() is not None:
                raise subprocess.CalledProcessError(32, ["mount"])
        code = process.wait(PATIENCE_S)
        said = last_line(folder / "log")
    finally:
        end(process)
        subprocess.run(["umount", "-l", out], check=False)
    again = finish(subject, out, folder / "log")
    return f"exit {code}, writable again {again}", said, subject.outcome(out)


def damage(subject: Subject, folder: pathlib.Path, *_) -> Found:
    """Every file of the newest checkpoint cut in half, and with one bit flipped; each time the run goes on."""
    whole, log = folder / "whole", folder / "log"
    process = start(subject, whole, log)
    wait_for(lambda: trained(whole, subject.steps // 2 + 1), process)
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)
    newest = max(whole.rglob("step_*"), key=lambda path: (_step(path), str(path)))
    files = sorted(p.relative_to(whole) for p in newest.rglob("*") if p.is_file())
    outcomes, skipped = set(), 0
    for name in files:
        for how in ("cut", "flipped"):
            out = folder / "run"
            shutil.copytree(whole, out)
            content = bytearray((out / name).read_bytes())
            if how == "cut":
                content = content[: len(content) // 2]
            elif content:
                content[len(content) // 2] ^= 1
            (out / name).write_bytes(content)
            mark = log.stat().st_size
            finish(subject, out, log)
            skipped += "skipping checkpoint" in log.read_text(errors="replace")[mark:]
            outcomes.add(subject.outcome(out))
            shutil.rmtree(out)
    did = f"{len(files)} files, {2 * len(files)} damages; {skipped} times the checkpoint before it was taken"
    return did, last_line(log), outcomes.pop() if len(outcomes) == 1 else f"{len(outcomes)} outcomes"


def twice(subject: Subject, folder: pathlib.Path, *_) -> Found:
    """A second process in the same folder."""
    out = folder / "run"
    first = start(subject, out, folder / "log")
    wait_for(lambda: trained(out, 2), first)
    first.send_signal(signal.SIGSTOP)  # or it might be over before the second has loaded anything
    second = finish(subject, out, folder / "second")
    first.send_signal(signal.SIGCONT)
    return (
        f"second exit {second}, first exit {first.wait(PATIENCE_S)}",
        last_line(folder / "second"),
        subject.outcome(out),
    )


def memory(subject: Subject, folder: pathlib.Path, *_) -> Found:
    """No more memory from the middle on; then there is some again."""
    out = folder / "run"
    process = start(subject, out, folder / "log")
    wait_for(lambda: trained(out, 3), process)
    with suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_AS, (2**28, 2**28))
    try:
        ended = f"exit {process.wait(HANG_S)}"
    except subprocess.TimeoutExpired:
        ended = f"no end in {HANG_S:.0f} s (a thread of a library could not start), killed"
        end(process)
    said = last_line(folder / "log")
    return f"{ended}; with memory again {finish(subject, out, folder / 'log')}", said, subject.outcome(out)


CLOCK = """
import runpy, sys, time
true, began = time.time, time.monotonic()
time.time = lambda: true() + (0.0, -86400.0, 3600.0 * 24 * 400)[int(time.monotonic() - began) // 4 % 3]
sys.argv = sys.argv[1:]
if sys.argv[0] == "jaxrl_llm":
    runpy.run_module("jaxrl_llm", run_name="__main__")
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def clock(subject: Subject, folder: pathlib.Path, *_) -> Found:
    """The clock jumps a day back and a year ahead, every four seconds."""
    script = folder / "clock.py"
    script.write_text(CLOCK)
    python, words = " ".join(PYTHON), subject.begin.replace("-m jaxrl_llm", "jaxrl_llm")
    other = dataclasses.replace(subject, begin=words.replace(python, f"{python} {script}"))
    code = finish(other, folder / "run", folder / "log")
    return f"exit {code}", last_line(folder / "log"), subject.outcome(folder / "run")


def verifier(subject: Subject, folder: pathlib.Path, *_) -> Found:
    """Processes of the verifier are stopped for good, and killed, in turn, ten in all."""
    out = folder / "run"
    process, count = start(subject, out, folder / "log"), 0
    wait_for(lambda: trained(out, 2), process)
    while process.poll() is None and count < 10:
        for pid in children(process.pid, "jaxrl_llm")[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, (signal.SIGSTOP, signal.SIGKILL)[count % 2])
                count += 1
        done = _lines(out)
        # one that is killed before it is ready three times in a row ends the run, which is another fault than this
        wait_for(lambda done=done: _lines(out) > done + 1, process)
    code = process.wait(PATIENCE_S)
    (metrics,) = out.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    left = sum(16 * (1 - row["reward/valid_fraction"]) for row in rows)
    did = f"{count} processes stopped or killed; {left:.0f} of {16 * len(rows)} rows judged invalid; exit {code}"
    return did, last_line(folder / "log"), f"{len(rows)} steps"


def on_ray(victim: str) -> Callable[..., Found]:
    """A worker of that role is killed at its fifth call, on a cluster of two nodes."""

    def case(subject: Subject, folder: pathlib.Path, *_) -> Found:
        other = dataclasses.replace(subject, begin=f"{subject.begin} --victim {victim}")
        code = finish(other, folder / "run", folder / "log")
        lost = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.startswith("lost ")]
        return f"{len(lost)} lost; exit {code}", lost[0] if lost else "", subject.outcome(folder / "run")

    return case


GONE_S = 20.0


def gone(subject: Subject, folder: pathlib.Path, kills: int, seconds: float, server: Server) -> Found:
    """``kill -9`` of the server in the middle; it comes back at the same address."""
    out, log = folder / "run", folder / "log"
    process = start(subject, out, log)
    wait_for(lambda: trained(out, subject.steps // 4), process)
    end(server.process)
    time.sleep(GONE_S)
    before = trained(out, subject.steps)
    server.up()
    code = process.wait(PATIENCE_S)
    said = [line for line in log.read_text(errors="replace").splitlines() if " is lost " in line]
    did = f"gone for {GONE_S:.0f} s, {'before' if not before else 'after'} the last step; exit {code}"
    return did, said[-1] if said else last_line(log), subject.outcome(out)


CASES: dict[str, tuple[tuple[str, ...], Callable[..., Found]]] = {
    "kill": (("main", "experiment", "async"), kill),
    "full disk": (("main", "experiment", "async"), full_disk),
    "read-only": (("main", "experiment", "async"), read_only),
    "damaged checkpoint": (("main", "experiment", "async"), damage),
    "two processes": (("main", "experiment", "async"), twice),
    "memory limit": (("main", "experiment", "async"), memory),
    "clock": (("main", "experiment", "async"), clock),
    "verifier": (("judged", "judged experiment", "judged async"), verifier),
    "endpoint gone": (("endpoint", "endpoint experiment", "endpoint async"), gone),
    "ray rollout worker": (("async",), on_ray("roll")),
    "ray learner": (("async",), on_ray("learn")),
}
OTHER = {"verifier": "rows judged invalid train nothing; no more is lost"}


def undisturbed(subject: Subject) -> tuple[str, float]:
    """The outcome of a run that nothing happens to, and its seconds."""
    with tempfile.TemporaryDirectory(prefix="jaxrl_faults_") as calm:
        began = time.monotonic()
        code = finish(subject, pathlib.Path(calm) / "run", pathlib.Path(calm) / "log")
        if code:
            raise SystemExit(f"{subject.name} fails undisturbed: {last_line(pathlib.Path(calm) / 'log')}")
        seconds, outcome = time.monotonic() - began, subject.outcome(pathlib.Path(calm) / "run")
        if outcome == NOTHING:  # of a disturbed run, too: they would be equal
            raise SystemExit(
                f"{subject.name} leaves no file to compare: give --result a pattern of files that it writes"
            )
        return outcome, seconds


def campaign(chosen: list[tuple[str, Subject]], cases: list[str], kills: int, keep: Callable[[str], None]) -> None:
    """Runs the cases; ``keep`` gets a line of the table as soon as there is one."""
    for key, subject in chosen:
        mine = [case for case in cases if key == "other" or key in CASES[case][0]]
        if not mine:
            continue
        with Server() if key.startswith("endpoint") else nullcontext() as server:
            want, seconds = undisturbed(subject)
            if "kill" in mine:  # with programs that are compiled: the moments spread over the whole of a life
                again, seconds = undisturbed(subject)
                if again != want:
                    raise SystemExit(f"{subject.name} ends otherwise when it is run again: {want}, {again}")
            for case in mine:
                more = () if server is None else (server,)
                with tempfile.TemporaryDirectory(prefix="jaxrl_faults_") as folder:
                    keep(row(key, subject, case, want, pathlib.Path(folder), kills, seconds, *more))


def row(key: str, subject: Subject, case: str, want: str, folder: pathlib.Path, kills: int, seconds: float, *more):
    """A line of the table."""
    run = CASES[case][1]
    try:
        did, said, outcome = run(subject, folder, kills, seconds, *more)
    except subprocess.CalledProcessError as error:
        did, said, outcome = "not possible here", f"{error.cmd[0]}: needs privileges", "-"
    said = re.sub(rf"{re.escape(tempfile.gettempdir())}/jaxrl_faults_\w+", "...", said)
    same = "bitwise equal" if outcome == want else OTHER.get(case, f"DIFFERENT ({outcome})")
    same = "-" if outcome == "-" else same
    loses = subject.loses if case == "kill" else "nothing"
    what = "`kill -9` at random moments of its life, start-up included" if case == "kill" else case
    return f"| {subject.name} | {what} | {did} | {same} | {loses} | `{said[:160]}` |"


HEAD = """| run | fault | what happened | final outcome | lost | what the user reads |
|---|---|---|---|---|---|"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--subject", nargs="+", choices=list(subjects()), default=list(subjects()))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--command", default="", help="any command that goes on when started again; {out}: its folder")
    parser.add_argument("--result", default="", help="files of --command that must be equal, a pattern with {out}")
    parser.add_argument("--out", default="", help="file behind whose text the table is written; empty: none")
    parser.add_argument("--asynchronous", default="", help=argparse.SUPPRESS)
    parser.add_argument("--victim", default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        http.server.ThreadingHTTPServer(("127.0.0.1", given.serve), Judge).serve_forever()
    if given.asynchronous:
        from jaxrl_llm.errors import UserError

        try:
            asynchronous(given.asynchronous, given.victim)
        except UserError as error:  # as every command of the package does
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error
        return
    chosen = [(name, subjects()[name]) for name in given.subject]
    if bool(given.command) != bool(given.result):
        parser.error("--command and --result belong together: what runs, and which of its files must be equal")
    if given.command:
        files = lambda out: sorted(map(pathlib.Path, glob.glob(given.result.replace("{out}", str(out)))))  # noqa: E731
        chosen = [("other", Subject("command", given.command, given.command, "", lambda out: _hash(files(out))))]
    lines = [HEAD]
    print(HEAD, flush=True)

    def keep(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    with tempfile.TemporaryDirectory(prefix="jaxrl_faults_") as compiled:  # a start again takes up what was compiled
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
        campaign(chosen, given.case, given.kills, keep)
    print(f"{sum(os.times()[2:4]) / 60:.0f} minutes of a core", flush=True)
    if given.out:
        command = " ".join(["python benchmarks/faults.py", *sys.argv[1:]])
        with open(given.out, "a") as file:
            file.write(f"\n`{command}`\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
