"""Trap 37, config plumbing: a setting that no code reads does not exist; an unknown one is an error."""

import ast
import dataclasses
import pathlib

import pytest

import jaxrl_llm
from jaxrl_llm.models import config
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.train.online import Online
from jaxrl_llm.types import Batch, Policy, Trajectories
from tests.models_for_tests import small_config

SOURCES = sorted(pathlib.Path(jaxrl_llm.__file__).parent.rglob("*.py"))


def _read_attributes():
    return {
        node.attr
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("record", [Settings, ModelConfig, Online, Batch, Policy, Trajectories])
def test_every_field_is_read_somewhere(record):
    names = {f.name for f in dataclasses.fields(record)} if dataclasses.is_dataclass(record) else set(record._fields)
    assert names - _read_attributes() <= {"extras", "ref_logp"}  # these two are for losses that an experiment brings


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", "gelu"), ("use_sliding_window", True), ("attention_dropout", 0.1)]
)
def test_a_key_that_changes_the_computation_is_refused(key, value):
    raw = config.to_hf(small_config("qwen2"))
    config.from_hf(raw)
    with pytest.raises(ValueError, match=key):
        config.from_hf(raw | {key: value})


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="kl_coefficient"):
        Settings(kl_coefficient=0.1)
