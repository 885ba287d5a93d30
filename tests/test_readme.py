"""What the pages for people say is so: links, commands, flags, extras, figures and the example of the losses."""

import ast
import configparser
import dataclasses
import importlib.util
import json
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import pytest

from experiments.agents.parts import tool_runs
from jaxrl_llm.experiment import cli
from jaxrl_llm.experiment.own_rows import tasks
from jaxrl_llm.models.io import weights
from jaxrl_llm.run import flags
from jaxrl_llm.run import plan as planning
from jaxrl_llm.run.commands import chat, evaluate_model, serve
from jaxrl_llm.run.settings import Settings

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/performance.md",
    "docs/plans.md",
    "docs/agents.md",
    "docs/own-env.md",
    "docs/own-rows.md",
    "docs/real-model.md",
    "docs/asynchronous.md",
    "docs/traps.md",
    "docs/SYSTEMS.md",
    "docs/faults.md",
    "docs/foreign-code.md",
    "docs/parity.md",
    "docs/reasoning-gym.md",
    "docs/cpu-linalg.md",
)
README = (ROOT / "README.md").read_text()
# with pages whose commands other tests read, or that have none
ALL_PAGES = (
    *PAGES, "docs/methods.md", "docs/own-reward.md", "docs/words.md", "docs/schedule.md", "docs/atlas/staleness.md",
)  # fmt: skip
LIBRARY = ROOT / "jaxrl_llm"


def _commands(text):
    """Lines of the shell blocks and one-line code, without comments; a line that is continued is one."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:bash|python) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [words for words in (shlex.split(line.replace("\n", " "), comments=True) for line in lines) if words]


COMMANDS = [(page, words) for page in PAGES for words in _commands((ROOT / page).read_text())]


def _anchors(path):
    """What a link may name behind ``#``: headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_there_is_no_page_beside_these():
    pages = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "atlas").glob("*.md"), *ROOT.glob("*.md")}
    assert {path.relative_to(ROOT).as_posix() for path in pages} == {*ALL_PAGES, "CHANGELOG.md"}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_to_files(page):
    path = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if not target.startswith("https://"):
            there = path.parent / target if target else path
            assert there.exists(), target
            assert not anchor or anchor in _anchors(there), f"{target}#{anchor}"


def _is_there(parts):
    """Whether the sources of the library have ``folder.module.name``."""
    path = LIBRARY
    for at, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
            continue
        module = path / f"{part}.py"
        file, rest = (module, parts[at + 1 :]) if module.is_file() else (path / "__init__.py", parts[at:])
        bound = set()
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "id", None)
            bound |= {name} if isinstance(name, str) else set()
        return not rest or rest[0] in bound
    return True


@pytest.mark.parametrize("page", ALL_PAGES)
def test_what_a_page_names_of_the_library_is_there(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    rooms = {path.stem for path in LIBRARY.iterdir()}
    for span in re.findall(r"`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`", text):
        parts = span.removeprefix("jaxrl_llm.").split(".")
        if parts[0] in rooms and parts[-1] not in ("jsonl", "py"):
            assert _is_there(parts), span


def test_there_are_commands():
    assert sum(page == "README.md" for page, _ in COMMANDS) > 10


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda x: " ".join(x[:4]) if isinstance(x, list) else x)
def test_commands_exist(page, words):
    """The script or module is there; the flags of the main job and of the plan are ones they know."""
    match words:
        case ["bash" | "python", script, *rest] if script.endswith((".sh", ".py")):
            assert (ROOT / script).is_file()
            if script == "launch/quickstart.sh" and "--resume" not in rest:
                flags.read(Settings, [word.replace("SEED", "0") for word in rest], prog="")
        case ["python", "-m", "venv", *_]:
            pass
        case ["python", "-m", "experiments.FAMILY.SLUG", *rest]:  # of any experiment
            cli.parse(importlib.import_module("experiments.policy_gradient.dr_grpo"), rest)
        case ["python", "-m", "experiments.agents.tool_star", ("rows" | "solve") as name, *rest]:
            flags.read({"rows": tool_runs.RowSettings, "solve": tool_runs.SolveSettings}[name], rest, prog="")
        case ["python", "-m", module, *rest]:
            assert importlib.util.find_spec(module) is not None
            if module == "jaxrl_llm" and rest[:1] == ["plan"]:
                flags.read(planning.Settings, rest[1:], prog="")
            if module.startswith(("experiments.agents.", "experiments.preference.", "experiments.reward_models.")):
                cli.parse(tasks.with_rows(importlib.import_module(module)), rest)
        case ["jaxrl", ("sft" | "dpo" | "online-dpo" | "ppo" | "reward-model" | "distil") as name, *rest]:
            cli.parse(importlib.import_module(f"jaxrl_llm.jobs.{name.replace('-', '_')}"), rest)
        case ["jaxrl", "eval", *rest]:
            flags.read(evaluate_model.Settings, rest, prog="")
        case ["jaxrl", "chat", *rest]:
            flags.read(chat.Settings, rest, prog="")
        case ["jaxrl", "serve", *rest]:
            flags.read(serve.Settings, rest, prog="")
        case ["pip", "install", *_]:
            pass
        case _:
            raise AssertionError(f"{page}: no test for {words}")


def test_flags_in_the_text_are_flags():
    """Those between backquotes outside the blocks belong to the main job."""
    known = {flags.spell(field.name) for field in dataclasses.fields(Settings)} | {"--help", "--dry-run"}
    known |= {flags.spell(f"no_{field.name}") for field in dataclasses.fields(Settings) if field.type is bool}
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    found = {flag for span in re.findall(r"`([^`]+)`", text) if span.startswith("--") for flag in span.split()[:1]}
    assert len(found) > 8 and found <= known, found - known


def test_extras_are_those_of_the_package():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    named = re.search(r"\(extras: (.*?)\)", README, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", named)) == set(parser["options.extras_require"])


def test_figures_are_the_records():
    record = json.loads((ROOT / "results" / "quickstart" / "nano.json").read_text())
    first, *others = sorted(record["runs"], key=lambda run: run["seed"])

    def shown(part, k):
        found = part[f"pass@{k}"]
        return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}] (n={found['n']})"

    for k in (1, 8):
        assert f"pass@{k}  before {shown(first['before'], k)}   after {shown(first['after'], k)}" in README
    assert f"gain {first['gain']:+.3f}" in README
    for run in others:
        assert f"{run['gain']:+.3f}" in README
    for run in record["runs"]:  # what the quickstart is for
        assert run["gain"] >= 0.25 and run["before"]["pass@1"]["high"] < run["after"]["pass@1"]["low"]
        assert run["before"]["pass@1"]["n"] >= 1000
    assert len(record["runs"]) >= 3
    assert f"{record['settings']['steps']} steps in {first['training_seconds']:.0f} s of training" in README


@pytest.mark.parametrize("name", ["nano", "nano_1", "tiny"])
def test_base_models_are_the_records(name):
    record = json.loads((ROOT / "results" / "pretrain_base" / f"{name}.json").read_text())
    assert f"| `{name}` | {record['parameters']:,} | `{record['command']}` |" in README
    assert record["parameters"] == weights.pretrained(weights.bundled(name))[2].num_parameters


def test_the_example_of_the_losses_runs():
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope = {}
    exec(source, scope)  # the page's own code
    tokens = jnp.array([[5, 1, 2, 3], [5, 3, 1, 0], [4, 2, 2, 1], [4, 1, 0, 0]], jnp.int32)
    mask = jnp.arange(4)[None, :] >= 2
    mask = jnp.broadcast_to(mask, tokens.shape)
    logits = jax.random.normal(jax.random.key(0), (4, 4, 6))
    given = jnp.full((4, 4), -1.5), jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 1, 1], jnp.int32)
    value, gradient = jax.value_and_grad(scope["loss"])(logits, tokens, mask, *given)
    assert jnp.isfinite(value) and jnp.any(gradient != 0)
