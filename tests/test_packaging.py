"""What an installation brings: no requirement that nothing imports, no import that nothing declares, one package."""

import ast
import configparser
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import jaxrl_llm
from jaxrl_llm import __main__ as front

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
SHIPPED, DEVELOPED = ("jaxrl_llm", "experiments"), ("tests", "benchmarks", "docs")
OURS = {"jaxrl_llm", "experiments", "tests", "benchmarks", *(p.stem for p in (ROOT / "benchmarks").glob("*.py"))}
# packages whose module has another name
MODULES = {
    "orbax-checkpoint": "orbax", "pytest-xdist": "xdist", "tensorflow-datasets": "tensorflow_datasets",
    "reasoning-gym": "reasoning_gym", "math-verify": "math_verify",
}  # fmt: skip
UNIMPORTED = {
    "libtpu": "JAX loads it: the compiler of a TPU that is not there",
    "importlib_resources": "tensorflow_datasets imports it and does not declare it",
    "pytest-xdist": "a plugin of pytest", "pytest-timeout": "a plugin of pytest",
    "pytest-rerunfailures": "a plugin of pytest", "ruff": "a program", "ipykernel": "runs the notebooks",
    "beartype": "the import hook of tests/conftest.py names it", "setuptools": "setup.py",
    "wandb": "--track", "tensorboardX": "--track",
}  # fmt: skip
# what an environment of its own has, which the message or the page beside the import says how to make
ELSEWHERE = {
    SHIPPED: {"alfworld", "appworld", "fast_downward"},
    DEVELOPED: {"tunix", "verl", "datasets"},
}


def _names(text):
    """The names in a list of requirements."""
    return [re.match(r"[\w.-]+", part.strip())[0] for part in re.split(r"[;\n]", text) if part.strip()]


CORE = _names(SETUP["options"]["install_requires"])
EXTRAS = {extra: _names(text) for extra, text in SETUP["options.extras_require"].items()}


def _imported(path):
    """Top-level modules that a file imports, also by ``importlib`` and by ``pytest.importorskip``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):
                first = first.values[0]
            if function in ("extra_module", "import_module", "importorskip") and isinstance(first, ast.Constant):
                yield str(first.value).split(".")[0]


@functools.cache
def _all_imported(folders):
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in _imported(path):
                found.setdefault(name, path.relative_to(ROOT))
    known = OURS | set(sys.stdlib_module_names)
    return {name: path for name, path in found.items() if name and name not in known}


def _module(requirement):
    return MODULES.get(requirement, requirement.replace("-", "_"))


@pytest.mark.parametrize("name", CORE)
def test_what_everyone_installs_is_imported(name):
    assert _module(name) in _all_imported(SHIPPED), f"nothing imports {name}: drop it from install_requires"


@pytest.mark.parametrize(("extra", "name"), [(e, n) for e, names in EXTRAS.items() for n in names])
def test_what_an_extra_installs_is_imported(extra, name):
    own = extra in ("test", "parity")
    imported = _module(name) in _all_imported(SHIPPED + (DEVELOPED if own else ()))
    assert imported or name in UNIMPORTED, f"nothing imports {name}: drop it from the extra {extra}"


def test_reasons_are_of_requirements():
    assert set(UNIMPORTED) <= {name for names in EXTRAS.values() for name in names}


@pytest.mark.parametrize("folders", [SHIPPED, DEVELOPED], ids=["shipped", "developed"])
def test_every_import_is_declared(folders):
    extras = {e: names for e, names in EXTRAS.items() if folders == DEVELOPED or e not in ("test", "parity")}
    declared = {_module(name) for names in (CORE, *extras.values()) for name in names}
    imported = _all_imported(folders)
    assert imported.keys() >= ELSEWHERE[folders]
    missing = {name: path for name, path in imported.items() if name not in declared | ELSEWHERE[folders]}
    assert not missing, f"imported and not declared in setup.cfg: {missing}"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What a wheel would hold."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "build", "--build-base", folder]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "lib"


def test_one_package_that_carries_the_experiments(built):
    assert [path.name for path in built.iterdir()] == ["jaxrl_llm"]
    package = built / "jaxrl_llm"
    for name in ("py.typed", "assets/nano/model.safetensors", "_checkout/experiments/systems.tsv"):
        assert (package / name).is_file(), name
    pages = {path.relative_to(ROOT / "jaxrl_llm") for path in (ROOT / "jaxrl_llm").rglob("*.html")}
    assert pages and all((package / page).is_file() for page in pages)
    for folder, there in (("experiments", package / "_checkout"), ("jaxrl_llm", built)):
        for path in (ROOT / folder).rglob("*.py"):
            assert (there / path.relative_to(ROOT)).read_text() == path.read_text(), path


def test_an_installed_copy_runs_an_experiment(built, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(built))
    command = [sys.executable, "-m", "jaxrl_llm", "run", "dr_grpo", "--smoke", "--plan"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "updates" in done.stdout, done.stderr
    code = "import sys, jaxrl_llm.experiment.locate as l; print(l.find('dr_grpo'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith(str(built)), done.stdout + done.stderr


@pytest.mark.parametrize("word", ["dr_grpo", "policy_gradient/dr_grpo", "experiments.policy_gradient.dr_grpo",
                                  "experiments/policy_gradient/dr_grpo.py"])  # fmt: skip
def test_experiments_are_found_by_any_name(word, capsys):
    assert front.main(["run", word, "--smoke", "--plan"]) == 0
    assert "updates" in capsys.readouterr().out


def test_an_unknown_experiment_is_one_line(capsys):
    assert front.main(["run", "dr_grop"]) == 2
    assert capsys.readouterr().err == "error: no experiment 'dr_grop'; did you mean dr_grpo?\n"
    assert front.main(["run", "--help"]) == 0 and "dr_grpo" in capsys.readouterr().out
    assert front.main(["run"]) == 2


def test_the_console_script_is_the_module(capsys):
    name, target = re.fullmatch(r"\s*(\w+) = (\S+)\s*", SETUP["options.entry_points"]["console_scripts"]).groups()
    assert (name, target) == ("jaxrl", "jaxrl_llm.__main__:main")
    assert front.main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["jaxrl_llm", jaxrl_llm.__version__]
    assert front.main(["--stepz", "3"]) == 2 and "--steps" in capsys.readouterr().err


def test_licence_and_version_are_what_the_metadata_says():
    assert SETUP["metadata"]["license"] == "Apache-2.0" and SETUP["metadata"]["license_files"] == "LICENSE"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert SETUP["metadata"]["version"] == "attr: jaxrl_llm.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxrl_llm.__version__)


PINS = {
    path.stem: dict(line.split("==") for line in path.read_text().splitlines() if line[:1] not in "#")
    for path in sorted((ROOT / "constraints").glob("*.txt"))
}


def _numbers(version):
    return [int(x) for x in re.findall(r"\d+", version)[:3]]


@pytest.mark.parametrize(("name", "jax"), [("py311", "0.10."), ("py312", "0.12.")])
def test_constraints_pin_what_the_suite_needs(name, jax):
    pins = {pinned.lower().replace("_", "-"): version for pinned, version in PINS[name].items()}
    assert pins["jax"].startswith(jax) and pins["jaxlib"].startswith(jax)
    asked = SETUP["options"]["install_requires"] + SETUP["options.extras_require"]["test"]
    for line in filter(None, (line.strip() for line in asked.splitlines())):
        requirement, _, least = line.partition(">=")
        if requirement != "setuptools":  # a tool of pip
            pinned = pins[requirement.lower().replace("_", "-")]
            assert _numbers(pinned) >= _numbers(least), (requirement, pinned, least)


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose Python writes down what it is asked and says that it is 3.11, or what ``FAKE`` holds."""
    for folder in ("launch", "constraints"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nif [ "$2" = venv ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; exit; fi\n'
        f'if [ "$1" = -c ]; then code="import sys; sys.version_info = $FAKE; ${{2#import sys}}"\n'
        f'exec {sys.executable} -c "$code"; fi\n'
        f'echo "$@" >>{tmp_path}/calls\n'
    )
    python.chmod(0o755)
    return tmp_path


def _install(checkout, fake="(3, 11)", **more):
    line = f'. {checkout}/launch/common.sh; install_project "[test]"'
    given = {**os.environ, "PYTHON": str(checkout / "python"), "FAKE": fake, **more}
    return subprocess.run(["bash", "-c", line], env=given, capture_output=True, text=True, timeout=60)


def test_an_install_takes_the_versions_of_its_python(checkout):
    calls = checkout / "calls"
    for fake, more, wanted in (
        ("(3, 11)", {}, "--constraint constraints/py311.txt -e .[test]"),
        ("(3, 13)", {}, "--constraint constraints/py312.txt -e .[test]"),
        ("(3, 13)", {"CONSTRAINTS": "none"}, "--disable-pip-version-check -e .[test]"),
    ):
        for _ in range(2):  # the second one finds it done
            done = _install(checkout, fake, **more)
            assert done.returncode == 0, done.stderr
        assert calls.read_text().splitlines()[-1].endswith(wanted)
    assert len(calls.read_text().splitlines()) == 3
    for fake, more, message in (
        ("(3, 10)", {}, "3.11 is needed"),
        ("(3, 11)", {"CONSTRAINTS": "absent.txt"}, "CONSTRAINTS=absent.txt does not exist"),
    ):
        done = _install(checkout, fake, **more)
        assert done.returncode == 2 and message in done.stderr, done.stderr
