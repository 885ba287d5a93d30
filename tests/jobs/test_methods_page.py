"""docs/methods.md: every command of the page is one that the front door takes."""

import pathlib
import re
import shlex

import pytest

from jaxrl_llm import losses
from jaxrl_llm.experiment import cli
from jaxrl_llm.jobs import distil, dpo, online_dpo, ppo, reward_model, sft
from jaxrl_llm.run import flags, method, settings
from jaxrl_llm.run.commands import evaluate_model
from tests.jobs.test_reach import reached

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "methods.md").read_text()
JOBS = {"ppo": ppo, "dpo": dpo, "online-dpo": online_dpo, "distil": distil, "sft": sft}
ROWS = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ") and "`jaxrl" in line]
COMMANDS = [x.removeprefix("jaxrl ") for row in ROWS for x in re.findall(r"`([^`]+)`", row) if x.startswith("jaxrl ")]
OTHERS = [x for row in ROWS for x in re.findall(r"`(\w+_loss)`", row)]  # named behind the first


def test_the_page_was_read():
    assert len(COMMANDS) > 40 and len(OTHERS) > 4 and {x.split()[0] for x in COMMANDS} == {"train", "eval", *JOBS}


def test_reward_models_of_the_pages_lie_where_the_command_writes_them():
    """``tests/jobs/test_jobs.py`` writes one there."""
    rewards = (pathlib.Path(__file__).parents[2] / "docs" / "own-reward.md").read_text()
    assert tuple(reward_model.ARMS) == ("reward_model",)
    for page in (PAGE, rewards):
        assert set(re.findall(r"\bjudge/\S*model\b", page)) == {"judge/seeds/reward_model/seed_0/model"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_taken(command, own_module):
    own_module("mine", "def right(answer, response):\n    return 1.0\n\n\nbrief = right\n")
    name, *words = shlex.split(command)
    if name == "train":
        found = settings.parse(words)
        settings.check(found)
        method.check_computed(found)
        # one surrogate at each of its tokens, which LUSPO means to weigh by the length of a response
        assert "--reduction seq_sum" in command or not any("one term for a response" in x for x in method.told(found))
        return
    if name == "eval":
        flags.read(evaluate_model.Settings, words, prog="jaxrl eval")
        return
    module = JOBS[name]
    _, found, given = cli.parse(module, words)
    assert given == {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    loss = found.loss if "loss" in given else ""
    assert not loss.endswith("_loss") or f"{name} --loss" in reached(loss, getattr(losses, loss))


@pytest.mark.parametrize("loss", OTHERS)
def test_a_loss_of_the_page_is_one_of_the_command_before_it(loss):
    assert "dpo --loss" in reached(loss, getattr(losses, loss))
