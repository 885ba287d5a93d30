"""Every method with its paper's settings as a program for TPU chips, compiled ahead of time with the extra ``plan``.

The model is a small one of random weights, in the layout of a real family. All settings that enter the step are the
paper's, with two bounds on the batch: what a batch of thousands of long responses needs is the business of
``jaxrl_llm.planning``, and says nothing about whether the step is a program for a TPU.
"""

import dataclasses
import importlib
from functools import partial

import jax
import numpy as np
import pytest

from experiments.curriculum.parts import synthesis
from experiments.efficiency import concise_rl
from experiments.reward_models import general_reasoner
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.experiment import arms, compare, curricula
from jaxrl_llm.planning import chips, compiled
from jaxrl_llm.train import offline, online
from jaxrl_llm.train import plan as plans
from tests.experiments.test_smoke import FILES, _ids, _name
from tests.models_for_tests import byte_model

FAMILIES = ("policy_gradient", "efficiency", "curriculum")
TOPOLOGY, MESH = "v5e:2x2", "data=2,fsdp=2"
PROMPTS, NEW_TOKENS = 4, 64  # at most
# what is computed once, before the first step
BEFORE = {"warm_steps": 2, "guide_steps": 2, "learn_steps": 2, "fit_problems": 4, "train_problems": 64,
          "new_problems": 16, "eval_problems": 8, "epochs": 1,
          "ladder_temperatures": (1.0, 0.7, 0.4)}  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(byte_model(tmp_path_factory.mktemp("model"), "qwen2", max_positions=4096))


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    """A model of random weights solves nothing; methods that choose problems by what it solves are told numbers."""

    def pass_rates(found, settings, rows, *, samples, **_):
        return (np.arange(len(rows)) % (samples + 1)) / samples

    def first_round(settings, epochs, seed):
        found = curricula.recipes.bench(settings)
        solved = np.linspace(0.0, 1.0, found.train.tokens.shape[0])
        return synthesis.FirstRound(found.model.params, np.stack([solved] * epochs, axis=1), solved, 0.5)

    def taught(settings):
        return pass_rates(None, settings, np.arange(curricula.recipes.bench(settings).train.tokens.shape[0]), samples=8)

    monkeypatch.setattr(curricula, "sample_pass_rates", pass_rates)
    monkeypatch.setattr(general_reasoner, "rates_once_taught", taught)
    monkeypatch.setattr(
        concise_rl, "taught_rates", lambda settings, rows, _: pass_rates(None, settings, rows, samples=8)
    )
    monkeypatch.setattr(synthesis, "first_round", first_round)
    monkeypatch.setattr(synthesis, "solved_share", lambda settings, params, table, *_: np.full(len(table.level), 0.5))


def _settings(module, model):
    """The paper's, of its own method, with the bounds above."""
    settings = arms.preset(module, smoke=False, model=model)
    settings = dataclasses.replace(settings, model=model, levels=(3, 4))
    settings = arms.resolve(module, settings, ())[compare.method_arm(module)]
    small = {k: v for k, v in BEFORE.items() if hasattr(settings, k)}
    small |= {"prompts_per_step": min(settings.prompts_per_step, PROMPTS)}
    return dataclasses.replace(settings, **small, max_new_tokens=min(settings.max_new_tokens, NEW_TOKENS))


OURS = [p for p in FILES if p.parent.name in FAMILIES]


def _step_and_state(path, model):
    """The last stage's iteration and the shapes of its state."""
    module = importlib.import_module(_name(path))
    plan = module.build(_settings(module, model))
    assert plan.stages and not plan.on_host, "chains are judged on the device"
    stage = plan.stages[-1]
    params, key = jax.eval_shape(plan.init, jax.random.key(0)), jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda params, key: plans.start(stage, params, key), params, key)
    step = online.iterate if isinstance(stage.method, online.Online) else offline.iterate
    return jax.jit(partial(step, stage.method), donate_argnums=0), state


@pytest.mark.parametrize("path", OURS, ids=_ids)
def test_the_papers_step_is_a_program_for_a_tpu(path, model):
    """Without the compiler: every operation of the step has a form for that platform."""
    step, state = _step_and_state(path, model)
    lowered = step.trace(state).lower(lowering_platforms=("tpu",))
    assert "callback" not in lowered.as_text(), "a step that asks the host waits for it"
    _, metrics = lowered.out_info
    assert all(x.shape == () for x in jax.tree.leaves(metrics))


@pytest.mark.skipif(not compiled.available(), reason="the TPU compiler is not installed: extra plan")
@pytest.mark.parametrize("path", OURS, ids=_ids)
def test_the_papers_step_compiles_for_a_slice(path, model):
    """With it: parameters and optimiser split over four chips, whose memory it fits."""
    topology = chips.parse(TOPOLOGY)
    step, state = _step_and_state(path, model)
    shardings = rules.shardings(state, meshes.parse_mesh(MESH, compiled.devices(topology)))
    placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
    memory = step.lower(placed).compile().memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < topology.chip.hbm
