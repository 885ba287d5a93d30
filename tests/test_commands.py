"""Every command that the README prints is run: as it stands, but for sizes, and for the names of one's own files."""

import importlib
import json

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm import __main__ as front
from jaxrl_llm.experiment import __main__ as papers
from jaxrl_llm.experiment import cli
from tests import test_readme
from tests.models_for_tests import byte_model

COMMANDS = [words for page, words in test_readme.COMMANDS if page == "README.md"]
SMALL = [
    "--steps", "2", "--prompts-per-step", "8", "--group-size", "2", "--max-new-tokens", "4", "--train-problems", "8",
    "--eval-problems", "8", "--eval-samples", "2",
]  # fmt: skip
TINY = ["--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--eval-problems", "4", "--seeds", "1"]
NOT_HERE = {  # what another test runs whole, and why it is not run here
    ("bash", "launch/test.sh"): "it is this suite",
    ("jaxrl",): "they want rows of other kinds and a teacher; test_readme.py reads their flags, nothing runs them yet",
    ("python", "-m", "experiments.pretrain_base"): "tests/test_base_models.py: an hour",
}


def _known(words):
    return any(tuple(words[: len(known)]) == known for known in NOT_HERE)


RUN = [words for words in COMMANDS if not _known(words)]
QUICK = ("plan", "doctor")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model folder, rows of one's own in two kinds of file, and the folder of a run that was made with them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "model").mkdir()
    byte_model(folder / "model", max_positions=256)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    published = [{"question": f"{n}+1=", "answer": f"so #### {n + 1}"} for n in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(published), folder / "train.parquet")
    return folder


def _filled(words, own):
    names = {"DIR": "model", "FILE.jsonl": "rows.jsonl", "train.parquet": "train.parquet", "RUN_DIR": "run"}
    words = ["run" if word.startswith("runs/") else word for word in words]
    return [str(own / names.get(word, word)) if word in names or word == "run" else word for word in words]


def _job(words, own, tmp_path):
    """The main job; the folder of the first one is that of the commands about a run."""
    if "--resume" in words:
        return front.main([*words, "--steps", "3"])
    out = tmp_path if (own / "run").exists() else own
    return front.main([*words, *SMALL, "--out", str(out / "run")])


def _run(words, own, tmp_path):
    """The exit code of a command of the README, small."""
    words = _filled(words, own)
    match words:
        case ["bash", "launch/quickstart.sh", *rest]:  # which installs, and hands its arguments on
            return _job(rest, own, tmp_path)
        case ["python", "-m", "jaxrl_llm", "plan", *rest]:
            return front.main(["plan", *rest, "--estimate"])  # tests/planning compile
        case ["python", "-m", "jaxrl_llm"]:
            return _job([], own, tmp_path)
        case ["python", "-m", "jaxrl_llm", *rest]:
            return front.main(rest)
        case ["python", "-m", "jaxrl_llm.experiment", "compare", family, *rest]:
            small = ["--smoke", "--methods", "dr_grpo", "--out", str(tmp_path)]
            return papers.main(["compare", family, *rest, *small])
        case ["python", "-m", "jaxrl_llm.experiment", *rest]:
            return papers.main([*rest, "--smoke", "--seeds", "1", "--out", str(tmp_path)])
        case ["python", "-m", module, *rest] if module.startswith("experiments."):
            own_rows = [*TINY, "--steps", "2"] if "--data" in rest else []
            smoke = [] if "--smoke" in rest else ["--smoke"]
            cli.run(importlib.import_module(module), [*rest, *smoke, *own_rows, "--out", str(tmp_path)])
            return 0
    raise AssertionError(f"no way to run {' '.join(words)}; add one, or a reason to NOT_HERE")


def _marked(words):
    quick = words[:3] == ["python", "-m", "jaxrl_llm"] and words[3:4] in ([name] for name in QUICK)
    return pytest.param(words, marks=() if quick else pytest.mark.slow, id=" ".join(words)[:70])


def test_the_readme_has_commands_of_every_kind():
    assert len(RUN) > 8 and all(any(tuple(w[: len(known)]) == known for w in COMMANDS) for known in NOT_HERE)


@pytest.mark.parametrize("words", [_marked(words) for words in RUN])
def test_the_commands_of_the_readme_run(words, own, tmp_path):
    if any(word == "RUN_DIR" or word.startswith("runs/") for word in words) and not (own / "run").exists():
        assert _job([], own, tmp_path) == 0
    assert _run(words, own, tmp_path) == 0
