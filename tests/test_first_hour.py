"""What a new user meets in the first hour: helps, notes, files of other kinds, and a terminal that stays readable."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import __main__ as front
from jaxrl_llm.asynchronous import ray_workers
from jaxrl_llm.data import sources
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.envs import text_games
from jaxrl_llm.errors import DataError, UserError, extra_module
from jaxrl_llm.experiment import __main__ as commands
from jaxrl_llm.experiment import cli
from jaxrl_llm.jobs import dpo, grpo, rows
from jaxrl_llm.models.config import read_config
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.io import weights
from jaxrl_llm.planning import utilisation
from jaxrl_llm.planning.chips import Chip
from jaxrl_llm.run import bench, flags, parts, plan, quiet
from jaxrl_llm.run.commands import chat, evaluate_model
from jaxrl_llm.run.records import report, track
from jaxrl_llm.run.settings import Settings
from tests.models_for_tests import byte_model


def _said(action, capsys):
    with pytest.raises(SystemExit) as stop:
        action()
    assert not stop.value.code
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("command", [["train"], ["run", "dr_grpo"]], ids=lambda words: words[0])
def test_the_help_of_model_names_every_family(command, capsys):
    text = _said(lambda: front.main([*command, "--help"]), capsys)
    for family in FAMILIES:
        assert f" {family}" in text


@pytest.mark.parametrize(
    ("command", "comments"),
    [
        (["sft"], ["columns for a response, or for a whole conversation; longer ones are refused",
                   "of the whole step's gradient; 0: no bound"]),
        (["dpo"], ["LD-DPO: the weight, 0 to 1, of what a response has beyond the length of the other one"]),
        (["distil"], ["top_k: over the student's likeliest; sampled: of the sampled tokens alone",
                      "of the weights themselves, but for a loss that takes old_logp, the sampler's (iw_opd_loss)"]),
        (["ppo"], ["they train as samples of the weights themselves: only jaxrl train corrects for them"]),
        (["online-dpo"], ["they train as samples of the weights themselves: only jaxrl train corrects for them"]),
        (["run", "dr_grpo"], ["responses to each prompt", "rank of an adapter that trains in place of the weights"]),
        (["train"], ["jaxrl commands lists others", "each with --group-size responses", "--seed INT of the samples",
                     "--kl-horizon INT updates in which", "--value-beta FLOAT the temperature b"]),
    ],
    ids=lambda x: x[-1] if len(x) < 3 else "",
)  # fmt: skip
def test_help_says_what_a_flag_does(command, comments, capsys):
    text = _said(lambda: front.main([*command, "--help"]), capsys)
    for comment in comments:
        assert comment in text, comment


@pytest.mark.parametrize("kind", [Settings, evaluate_model.Settings, chat.Settings, plan.Settings, cli.Options])
def test_no_flag_has_the_text_of_another(kind):
    """A comment above a field is taken for the fields below it that have none."""
    text = "\n".join(line.strip("│ ") for line in flags.listed(kind, "jaxrl").splitlines())
    words = [re.sub(r"\(default.*", "", " ".join(flag.split())).split() for flag in text.split("\n--")[1:]]
    said = [tuple(flag[-10:]) for flag in words if len(flag) > 5]
    assert len(said) > 5 and len(set(said)) == len(said), [x for x in said if said.count(x) > 1]


@pytest.mark.parametrize("kind", [Settings, rows.RowSettings, bench.OnlineSettings], ids=lambda kind: kind.__module__)
def test_the_help_of_data_names_every_kind_of_file(kind):
    """All of them read rows by ``sources.rows``."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == "data")
    text = flags.explained(kind, field).__metadata__[0].help
    assert all(f"FILE.{suffix}," in text for suffix in ("jsonl", "json", "csv", "parquet")), text


def test_a_comment_is_the_last_one_that_was_written_for_the_field():
    fields = {field.name: field for field in dataclasses.fields(dpo.Settings)}
    helps = {name: getattr(flags.explained(dpo.Settings, field), "__metadata__", ()) for name, field in fields.items()}
    assert helps["loss_args"][0].help == "its settings, for example beta=0.05"
    assert helps["length_desensitised"][0].help.startswith("LD-DPO: the weight, 0 to 1, of what a response has beyond")
    assert (
        helps["max_new_tokens"][0].help
        == "columns for a response, or for a whole conversation; longer ones are refused"
    )
    assert helps["steps"][0].help == "iterations of the last stage", "with another default it means the same"
    assert not helps["learning_rate"], "none of its own, and not that of the field above"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evall", "--samples", "2"], "error: no command 'evall'; did you mean eval? jaxrl commands lists them\n"),
        (["xyzzy"], "error: no command 'xyzzy'; jaxrl commands lists them\n"),
        (["doctor", "--foldr", "X"], "error: unknown argument '--foldr'; did you mean --forward?\n"),
    ],
)
def test_a_word_that_is_no_command_is_one_line(words, said, capsys):
    assert front.main(words) == 2
    assert capsys.readouterr().err == said


LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--model", LONG], ["train", "--data", "chain", "--out", LONG], ["train", "--resume", LONG],
        ["sft", "--model", LONG], ["sft", "--smoke", "--out", LONG], ["dpo", "--data", LONG], ["doctor", LONG],
        ["plan", "--model", LONG], ["view", LONG], ["eval", "--model", LONG], ["eval", "--data", LONG],
        ["eval", "--out", LONG], ["chat", "--model", LONG], ["serve", "--model", LONG], ["train", "--data", LONG],
        ["train", "--data", "chain", "--eval-data", LONG], ["train", "--data", "chain", "--reward", LONG],
    ],
)  # fmt: skip
def test_a_name_that_is_too_long_is_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = front.main(words)
    except SystemExit as stopped:  # of the commands that experiments share
        code = stopped.code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and "error: " in error and LONG in error and "File name too long" in error, (code, error)


def test_an_error_in_the_middle_of_a_run_is_no_mistake_of_the_command_line(monkeypatch, capsys):
    """A full disk, a lost connection and a file that the run itself misses keep what is known of them."""
    for error in (OSError(28, "No space left on device", "x"), FileNotFoundError(2, "No such file or directory", "x"),
                  ConnectionResetError(104, "Connection reset by peer")):  # fmt: skip
        monkeypatch.setattr(grpo, "cli", _raise(error))
        with pytest.raises(type(error)):
            front.main(["train"])
    monkeypatch.setattr(grpo, "cli", _raise(PermissionError(13, "Permission denied", "/x/y")))
    assert front.main(["train"]) == 2
    assert capsys.readouterr().err == "error: /x/y: Permission denied; give another file or folder\n"


def _raise(error):
    def cli(words):
        raise error

    return cli


def test_a_record_that_is_not_there_is_not_judged(capsys):
    assert commands.main(["rejudge", "nosuch/thing"]) == 2
    assert capsys.readouterr().err.startswith("error: rejudge nosuch/thing: no record of that name; give FAMILY/SLUG")


@pytest.mark.parametrize(("command", "words"), [
    ("compare", ("policy_gradient", "curriculum", "--methods", "--baseline")),
    ("sweep", ("experiments/policy_gradient/dr_grpo.py", "--values", "--field")),
])  # fmt: skip
def test_help_needs_no_family_and_no_file(command, words, capsys):
    assert commands.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words) and "parts" not in text.splitlines()[-1]


@pytest.mark.parametrize("command", ["doctor", "pilot", "certify", "atlas", "rejudge", "pages"])
def test_help_is_no_file(command, capsys):
    assert commands.main([command, "--help"]) == 0 and f"  {command} " in capsys.readouterr().out


def test_a_mesh_without_devices_says_how_to_simulate_them():
    with pytest.raises(UserError, match="XLA_FLAGS=--xla_force_host_platform_device_count=16 simulates that many"):
        meshes.parse_mesh("data=4,fsdp=4")


def test_what_the_message_says_works(tmp_path):
    """Four devices where there was one."""
    code = "import jax; from jaxrl_llm.distributed.mesh import parse_mesh; print(parse_mesh('data=2,fsdp=2').size)"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert alone.returncode and "device_count=4 simulates" in alone.stderr
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout == "4\n"


@pytest.mark.parametrize(("name", "mark"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_separated_values(name, mark, tmp_path):
    path = tmp_path / name
    text = f'\ufeffprompt{mark}answer\r\n"say ""a{mark}b""\nhere"{mark}ä\r\n\r\n1+1={mark}2\r\n'
    path.write_bytes(text.encode())
    rows, bad = sources.read(str(path))
    assert [row.columns for row in rows] == [
        {"prompt": f'say "a{mark}b"\nhere', "answer": "ä"}, {"prompt": "1+1=", "answer": "2"},
    ]  # fmt: skip
    assert not bad and rows[1].where == f"{path}:5"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,prompt\n1,2\n", "first line must name the columns, each once"),
        (b"prompt,\n1,2\n", "first line must name the columns"),
        (b"prompt,answer\n1\n", r"rows.csv:2: 1 values where the first line names 2 columns"),
        (b"prompt,answer\n1,\xff\n", "is not UTF-8"),
        (b'prompt,answer\n"1,2\n', "rows.csv:2: .*quote texts with double quotes"),
        (b"prompt,answer\n", "holds no rows"),
        (b"", "holds no rows"),
    ],
)
def test_unreadable_separated_values_are_one_line(content, message, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as found:
        sources.read(str(path))
    assert "\n" not in str(found.value)


def _file(tmp_path, prompts):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": "1"}) for p in prompts))
    return str(path)


def _load(data, **more):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        parts.load_problems(data, train=8, heldout=4, seed=0, **more)
    return [str(warning.message) for warning in found]


def test_messages_without_chat_and_fewer_held_out_problems_are_said(tmp_path):
    def messages(n):
        return [{"role": "user", "content": f"{n}?"}]

    texts = [f"{n}?" for n in range(200)]
    assert _load(_file(tmp_path, texts), chat=False) == []
    (mixed,) = _load(_file(tmp_path, [*texts, *map(messages, range(5))]), chat=False)
    assert mixed.startswith("5 prompts of") and "200 are text and do not; give --chat" in mixed
    (whole,) = _load(_file(tmp_path, map(messages, range(200))), chat=False)
    assert "are messages: they go through the chat template" in whole
    assert _load(_file(tmp_path, map(messages, range(200))), chat=True) == []
    (fewer,) = _load(_file(tmp_path, texts[:20]), chat=False)
    assert fewer.startswith("--eval-problems 4: ") and "held out (10 % by hash); all are used" in fewer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_exported_as_it_came(dtype, tmp_path):
    (tmp_path / "given").mkdir()
    folder = byte_model(tmp_path / "given")
    config = read_config(folder)
    weights.save(folder, config, weights.load(folder, config), dtype=dtype)
    model = parts.load_model(str(folder))
    assert {str(x.dtype) for x in jax.tree.leaves(model.params)} == {"float32"}  # what trains
    (tmp_path / "run").mkdir()
    report.save_model(tmp_path / "run", model, model.params)
    out = tmp_path / "run" / "model"
    assert set(weights.check(out, config).kinds) == {dtype}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    again = parts.load_model(str(out)).params
    jax.tree.map(lambda a, b: None if bool(jnp.all(a == b)) else pytest.fail("another weight"), model.params, again)


def test_a_share_above_one_says_why(monkeypatch):
    assert utilisation.above_roof(1.0) == ""
    monkeypatch.setattr(utilisation, "measured", lambda dtype: Chip(0.0, 2e9, 3e9, 0.0))
    why = utilisation.above_roof(1.5)
    assert why.startswith("above 1: the peak was measured here (3 GFLOP/s, 2 GB/s of memory)")
    assert report._at_roof(1.5, "float32") == f" at 1.5 of the roof ({why})"
    assert report._at_roof(0.5, "float32") == " at 0.5 of the roof" and report._at_roof(None, "float32") == ""


def test_a_librarys_warning_is_one_line():
    file = "/x/lib/python3.11/site-packages/some_library/deep/inside.py"
    text = quiet.one_line("first " + 300 * "x" + "\nsecond", FutureWarning, file, 3, "the_source()")
    assert text.startswith("note (some_library): first xxx") and text.count("\n") == 1 and len(text) < 240
    ours = quiet.one_line(300 * "y", UserWarning, "/x/site-packages/jaxrl_llm/run/parts.py", 3)
    assert ours == f"note: {300 * 'y'}\n"


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (None, ""),
        (
            "from json import nothing",
            ", which is installed and cannot be imported (cannot import name 'nothing' from 'json'",
        ),
        ("import own_board", ", which is installed and cannot be imported (No module named 'own_board')"),
    ],
    ids=["missing", "broken", "lacking"],
)
def test_a_package_that_is_there_is_not_called_missing(text, because, own_module):
    """Who has it installed would install it again and again."""
    package = "own_chess"
    if text is not None:
        own_module(package, text)
    with pytest.raises(UserError) as error:
        extra_module(package, "games need", "games")
    message = str(error.value)
    assert message.startswith(f"games need own-chess{because}")
    assert message.endswith(": pip install 'jaxrl_llm[games]'") and "\n" not in message


@pytest.mark.parametrize(
    ("name", "use", "said"),
    [
        ("tensorboardX", lambda: track.check(["tensorboard"]), "--track tensorboard needs tensorboardX{}: pip install"),
        ("wandb", lambda: track.check(["wandb"]), "--track wandb needs wandb{}: pip install 'jaxrl_llm[track]'"),
        ("appworld", text_games.appworld_env, "AppWorld needs appworld{}: pip install appworld; appworld install; "),
        ("ray", ray_workers.load_ray, "ray is installed and cannot be imported{}; pip install 'jaxrl_llm"),
    ],
)
def test_nor_is_one_of_trackers_worlds_or_workers(name, use, said, own_module, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    own_module(name, "import own_board")
    reason = " (No module named 'own_board')"
    with pytest.raises(UserError) as error:
        use()
    because = reason if name == "ray" else f", which is installed and cannot be imported{reason}"
    assert str(error.value).startswith(said.format(because))


def test_a_tpus_library_is_told_that_there_is_no_tpu(monkeypatch, tmp_path):
    """It would ask a metadata server and say so over five lines; see ``test_plan`` for what it compiles."""
    code = (
        "import os; from jaxrl_llm import __main__ as f; f.main(['--version'])\n"
        "print(os.environ['TPU_WORKER_HOSTNAMES'], os.environ['TPU_ACCELERATOR_TYPE'])\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("TPU_")} | {"TPU_ACCELERATOR_TYPE": "mine"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    wanted = "localhost" if not quiet.has_tpu() else None
    assert wanted is None or done.stdout.splitlines()[1] == f"{wanted} mine"
    assert done.stderr == ""
