"""Experiments with a model and rows of one's own: two steps of the first two arms, or one line that says what to do."""

import importlib
import json
import shutil

import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.models.io import weights
from tests.experiments.test_smoke import FILES, _ids, _name
from tests.models_for_tests import byte_model

# These write their own problems or work, which is known of generated tasks only, and say so.
GENERATED = ("hawkeye", "l2s_merging")
# These choose problems by pass rates, which a model of random weights has not, or have them written by another model.
CHOOSING = {
    "sws": "a model writes problems like rows of your own",
    "pcl": "no training problem is",
    "staged_difficulty": "no training problem is",
    "concise_rl": "no training problem is",
    "critique_coder": "none has right and wrong answers",
}


def _takes_rows(path):
    """Whether an experiment trains on the problems of a bench."""
    return path.parent.name in ("policy_gradient", "curriculum", "efficiency", "offline", "search")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    byte_model(folder, "qwen2", max_positions=400)
    lines = [{"question": f"What is {k} + 1?", "answer": f"{k} + 1 = {k + 1}.\n#### {k + 1}"} for k in range(100)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return ["--model", str(folder), "--data", str(folder / "rows.jsonl"), "--format", "gsm8k", "--max-new-tokens", "28"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = shutil.copytree(weights.bundled("nano"), tmp_path_factory.mktemp("trained") / "model")
    return ["--model", str(folder), "--data", "chain", "--levels", "3", "4", "--max-new-tokens", "32"]


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in FILES if _takes_rows(p)], ids=_ids)
def test_two_steps(path, own, trained, tmp_path):
    module = importlib.import_module(_name(path))
    chosen = list(module.ARMS)[:2]
    arguments = ["--smoke", "--seeds", "1", "--arm", *chosen, "--out", str(tmp_path)]
    if path.stem in (*GENERATED, *CHOOSING):
        message = CHOOSING.get(path.stem, "this method knows how chain")
        with pytest.raises(UserError, match=message):
            cli.run(module, [*arguments, *own])
    found = cli.run(module, [*arguments, *(trained if path.stem in (*GENERATED, *CHOOSING) else own)])
    for name, arm in found.arms.items():
        for metric in ("loss/total", "grad/norm"):
            assert np.isfinite(arm.metrics.get(metric, [0.0])).all(), f"{name}: {metric} {arm.metrics[metric]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slug", "chosen", "further"),
    [
        ("policy_gradient.critique_grpo", ("self_critique", "model_critique"), "--critic-model"),
        ("policy_gradient.empo", ("by_model", "misled"), "--comparer"),
    ],
)
def test_two_steps_where_a_model_reads_the_answers(slug, chosen, further, own, tmp_path):
    """With --model in the place of the model that judges, and with a folder that is named."""
    module = importlib.import_module(f"experiments.{slug}")
    for more in ([], [further, own[1]]):
        arguments = ["--smoke", "--seeds", "1", "--arm", *chosen, "--out", str(tmp_path / str(len(more)))]
        found = cli.run(module, [*arguments, *own, *more])
        assert set(found.arms) == set(chosen)
        for name, arm in found.arms.items():
            for metric in ("loss/total", "grad/norm"):
                assert np.isfinite(arm.metrics[metric]).all(), f"{name}: {metric} {arm.metrics[metric]}"
