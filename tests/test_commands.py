"""Every command that the pages for people print is run: as it stands, but for sizes, and for one's own files."""

import importlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm import __main__ as front
from jaxrl_llm.experiment import __main__ as papers
from jaxrl_llm.experiment import cli
from jaxrl_llm.sandbox import __main__ as statement
from tests import test_readme
from tests.models_for_tests import byte_model
from tests.test_readme import ROOT

COMMANDS = list({tuple(words): words for _, words in test_readme.COMMANDS}.values())
SMALL = [
    "--steps", "2", "--prompts-per-step", "8", "--group-size", "2", "--max-new-tokens", "4", "--train-problems", "8",
    "--eval-problems", "8", "--eval-samples", "2",
]  # fmt: skip
TINY = ["--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--eval-problems", "4", "--seeds", "1"]
ROWS = ["--steps", "2", "--eval-every", "2", "--rows-per-step", "4", "--eval-rows", "4", "--max-new-tokens", "16"]
JOBS = {  # the front door's: sizes, and the rows that take the place of FILE.jsonl
    "sft": (ROWS, "published.jsonl"),
    "dpo": (ROWS, "dialogues.jsonl"),
    "reward-model": (ROWS, "pairs.jsonl"),
    **dict.fromkeys(("distil", "online-dpo", "ppo"), ([*TINY, "--steps", "2", "--eval-every", "2"], "rows.jsonl")),
}
SMALLER = ["--max-new-tokens", "16", "--prompts-per-step", "2", "--arm"]
PAPERS = {  # over rows of one's own: sizes, and the rows that take the place of FILE; all arms: test_own_rows
    "experiments.preference.rpo": (
        ["--max-new-tokens", "16", "--pairs-per-step", "4", "--arm", "rpo"],
        "dialogues.jsonl",
    ),
    "experiments.reward_models.judgelrm": ([*SMALLER, "judgelrm"], "pairs.jsonl"),
    "experiments.analysis.math_beyond": ([*SMALLER, "grpo"], "published.jsonl"),
}
NOT_HERE = {  # what another test runs whole, and why it is not run here
    ("jaxrl", "serve"): "tests/run/test_serve.py: it ends when it is told to",
    ("bash", "launch/test.sh"): "it is this suite",
    ("python", "-m", "experiments.pretrain_base"): "tests/test_base_models.py: an hour",
    ("python", "-m", "experiments.agents."): "tests/experiments/test_own_world.py: each with a world made for it",
    ("python", "-m", "experiments.FAMILY.SLUG"): "tests/experiment/test_standard.py: tuning, registration, looks",
    ("python", "-m", "jaxrl_llm.experiment", "pilot"): "tests/experiment/test_standard.py",
    ("python", "-m", "jaxrl_llm.experiment", "compare", "FAMILY"): "tests/experiment/test_compare.py: tuning, a record",
    (
        "python",
        "-m",
        "jaxrl_llm.experiment",
        "certify",
    ): "tests/experiment/test_controls.py: every dose of a bed, hours",
    ("python", "-m", "jaxrl_llm.experiment", "pages"): "tests/experiment/test_pages.py: it writes pages of docs",
    ("python", "docs/make_plans.py"): "tests/planning/test_plan.py compares its page",
    ("python", "docs/make_reasoning_gym.py"): "tests/verifiers/test_gym.py compares its page",
    (
        "python",
        "benchmarks/",
    ): "it measures a machine for minutes or hours and writes results; --help is run below",
    ("python", "-m", "tests.dear"): "it reads the report of a whole run of this suite, and writes tests/dear.txt",
    ("python", "-m", "venv"): "it installs another library, to be measured against",
    ("pip", "install"): "tests/test_packaging.py: launch/ installs",
}


def _begins(words, known):
    *whole, start = known
    return list(words[: len(whole)]) == whole and "".join(words[len(whole) : len(known)]).startswith(start)


def _known(words):
    return any(_begins(words, known) for known in NOT_HERE)


RUN = [words for words in COMMANDS if not _known(words)]
QUICK = ("plan", "doctor")
SCRIPTS = sorted({words[1] for words in COMMANDS if words[1].startswith("benchmarks/")})


def test_what_a_benchmark_keeps_says_its_command_commit_and_day():
    keeps = [path for path in (ROOT / "benchmarks").glob("*.py") if '"results"' in path.read_text()]
    assert len(keeps) > 12
    unnamed = {path.name for path in keeps if "**provenance.made(" not in path.read_text()}
    unnamed |= {path.name for path in keeps if '"command":' not in path.read_text()}
    assert unnamed == set()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model folder, rows of one's own in two kinds of file, and the folder of a run that was made with them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "model").mkdir()
    byte_model(folder / "model", max_positions=256)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(200)]
    talk = "\n\nHuman: {0}+1?\n\nAssistant: {1}"
    kinds = {
        "rows": rows,
        "published": [{"question": f"{n}+1=", "answer": f"so #### {n + 1}"} for n in range(200)],
        "dialogues": [{"chosen": talk.format(n, n + 1), "rejected": talk.format(n, n)} for n in range(60)],
        "pairs": [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(60)],
        "own": [{"prompt": f"{n}+1=", "completion": str(n + 1), "label": n % 2 == 0} for n in range(60)],
    }
    for name, lines in kinds.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    published = [{"question": f"{n}+1=", "answer": f"so #### {n + 1}"} for n in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(published), folder / "train.parquet")
    return folder


def _filled(words, own):
    kind = "published.jsonl" if "gsm8k" in words else "rows.jsonl"
    kind = JOBS[words[1]][1] if words[1] in JOBS else PAPERS.get("".join(words[2:3]), ((), kind))[1]
    names = {"FILE.jsonl": kind, "FILE": kind, "train.parquet": "train.parquet", "RUN_DIR": "run"}
    names |= dict.fromkeys(("DIR", "STUDENT", "TEACHER"), "model")
    words = ["run" if word.startswith("runs/") else word for word in words]
    return [str(own / names.get(word, word)) if word in names or word == "run" else word for word in words]


def _job(words, own, tmp_path):
    """The main job; the folder of the first one is that of the commands about a run."""
    if "--resume" in words:
        return front.main([*words, "--steps", "3"])
    out = tmp_path if (own / "run").exists() else own
    return front.main([*words, *SMALL, "--out", str(out / "run")])


def _without(words, sizes):
    """The words of a page but for the flags that ``sizes`` gives, each with its value."""
    here = [at for at, word in enumerate(words) if word.startswith("--") and word in sizes]
    return [word for at, word in enumerate(words) if at not in here and at - 1 not in here]


def _run(words, own, tmp_path, monkeypatch):
    """The exit code of a command of the pages, small."""
    shutil.copy(own / "own.jsonl", tmp_path)  # as if eval had found right responses, which a random model does not
    words = [str(tmp_path / word) if word == "own.jsonl" else word for word in _filled(words, own)]
    match words:
        case ["bash", "launch/quickstart.sh", *rest]:  # which installs, and hands its arguments on
            return _job(rest, own, tmp_path)
        case ["jaxrl", name, *rest] if name in JOBS:
            return front.main([name, *rest, *JOBS[name][0], "--out", str(tmp_path / "out")])
        case ["jaxrl", "eval", *rest]:
            return front.main(["eval", *rest, "--problems", "2", "--out", str(tmp_path / "eval.json")])
        case ["jaxrl", "chat", *rest]:
            monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\n"))
            return front.main(["chat", *rest, "--max-new-tokens", "4"])
        case ["python", "-m", "jaxrl_llm.sandbox"]:
            return 0 if statement.main() in (0, 1) else 2  # 1: this machine lacks a means of protection, and it says so
        case ["python", "-m", "jaxrl_llm", "plan", *rest]:
            return front.main(["plan", *rest, "--estimate"])  # tests/planning compile
        case ["python", "-m", "jaxrl_llm"]:
            return _job([], own, tmp_path)
        case ["python", "-m", "jaxrl_llm", *rest]:
            return front.main(rest)
        case ["python", "-m", "jaxrl_llm.experiment", "compare", family, *rest]:
            small = ["--smoke", "--methods", "dr_grpo", "--out", str(tmp_path)]
            return papers.main(["compare", family, *rest, *small])
        case ["python", "-m", "jaxrl_llm.experiment", "doctor", _]:
            return papers.main(["doctor", "experiments/policy_gradient/dr_grpo.py"])
        case ["python", "-m", "jaxrl_llm.experiment", *rest]:
            return papers.main([*rest, "--smoke", "--seeds", "1", "--out", str(tmp_path)])
        case ["python", "-m", module, *rest] if module in PAPERS:
            monkeypatch.setitem(
                sys.modules, "mine", types.SimpleNamespace(score=lambda prompt, response: len(response))
            )
            sizes = ["--smoke", "--seeds", "1", "--steps", "2", *PAPERS[module][0], "--out", str(tmp_path)]
            cli.run(importlib.import_module(module), [*_without(rest, sizes), *sizes])
            return 0
        case ["python", "-m", module, *rest] if module.startswith("experiments."):
            own_rows = [*TINY, "--steps", "2"] if "--data" in rest else []
            smoke = [] if "--smoke" in rest else ["--smoke"]
            rest = [*_without(rest, own_rows), *smoke, *own_rows, "--out", str(tmp_path)]
            cli.run(importlib.import_module(module), rest)
            return 0
    raise AssertionError(f"no way to run {' '.join(words)}; add one, or a reason to NOT_HERE")


def _marked(words):
    quick = words[:3] == ["python", "-m", "jaxrl_llm"] and words[3:4] in ([name] for name in QUICK)
    return pytest.param(words, marks=() if quick else pytest.mark.slow, id=" ".join(words)[:70])


def test_the_pages_have_commands_of_every_kind():
    assert len(RUN) > 20 and {words[1] for words in RUN if words[0] == "jaxrl"} == {*JOBS, "eval", "chat"}
    assert all(any(_begins(words, known) for words in COMMANDS) for known in NOT_HERE), "a reason for nothing"


@pytest.mark.parametrize("words", [_marked(words) for words in RUN])
def test_the_commands_of_the_pages_run(words, own, tmp_path, monkeypatch):
    if any(word == "RUN_DIR" or word.startswith("runs/") for word in words) and not (own / "run").exists():
        assert _job([], own, tmp_path) == 0
    assert _run(words, own, tmp_path, monkeypatch) == 0


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_measurements_say_how_they_are_used(script):
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


WITH_PAPERS = sorted(
    path.name
    for path in (ROOT / "benchmarks").glob("*.py")
    if re.search(r"^\s*from experiments", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "async_vs_sync.py" else pytest.mark.slow) for name in WITH_PAPERS],
)
def test_a_measurement_finds_the_papers_that_it_runs(name, tmp_path):
    """Papers are no installed package: whoever starts a script has its own folder on the path, not the checkout."""
    code = f"import runpy; runpy.run_path({str(ROOT / 'benchmarks' / name)!r}); import experiments.parts"
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def _faults(*words):
    script = ["benchmarks/faults.py", "--case", "kill", "--kills", "1", *words]
    done = subprocess.run([sys.executable, *script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_campaign_of_faults_that_compares_nothing_is_refused():
    """Two runs of which no file is looked at are always equal."""
    code, error = _faults("--command", "true")
    assert code == 2 and error.endswith("--command and --result belong together: what runs, and which of its files "
                                        "must be equal")  # fmt: skip
    code, error = _faults("--command", "true", "--result", "{out}/model/*.safetensor")
    assert code == 1
    assert error == "command leaves no file to compare: give --result a pattern of files that it writes"


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("packing.py", ["--only", "mixtures"], "argument --only: invalid choice: 'mixtures' (choose from"),
        ("quickstart.py", ["nowhere"], "nowhere is not the folder of a finished run: it has no results.json"),
        ("pin.py", ["--compare", "nowhere.json", "pin.json"], "--compare nowhere.json is not there; make it with"),
        ("pin.py", ["policy_gradient/nowhere"], "policy_gradient/nowhere is no experiment; give for example agents/"),
    ],
)
def test_what_a_measurement_does_not_know_is_one_line(script, words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    assert said in capsys.readouterr().err
