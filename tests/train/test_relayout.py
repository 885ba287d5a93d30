"""Rollouts in a layout of their own: the samples and steps of one layout, exact weights, and what moving them costs."""

import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.distributed import rollout_weights, rules
from jaxrl_llm.distributed.mesh import batch_sharding, parse_mesh
from jaxrl_llm.jobs import grpo
from jaxrl_llm.models import lora, quantised
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.run import lora_state, parts
from jaxrl_llm.run.settings import Settings, check
from jaxrl_llm.train import host
from jaxrl_llm.train.online import init_state
from jaxrl_llm.types import Rewards
from tests import close
from tests.models_for_tests import byte_model, small_model

_, PARAMS, CONFIG = small_model()
TRAIN, ROLLOUT = "data=2,fsdp=4", "data=4,tensor=2"
JOB = [
    "--model", "nano", "--data", "chain", "--prompts-per-step", "8", "--group-size", "2", "--max-new-tokens", "8",
    "--train-problems", "32", "--eval-problems", "8", "--eval-samples", "2", "--steps", "2", "--checkpoint-every", "1",
    "--mesh", TRAIN,
]  # fmt: skip


def _same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_weights_of_an_adapter_in_another_layout_and_their_bytes():
    params, (before, after) = PARAMS, (parse_mesh(spec) for spec in (TRAIN, ROLLOUT))
    both = {"base": params, "lora": lora.init(CONFIG, Lora(2), jax.random.key(1))}
    move = rollout_weights.make_move(CONFIG, both, before, after, compute_dtype=jnp.bfloat16)
    found, figures = move(rules.shard(both, before))
    wanted = rules.shardings(found, after)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), found, wanted))
    # matrices as the decoder casts them, all else to the last bit
    assert found["base"]["layers"]["input_norm"].dtype == found["lora"]["q_lora_a"].dtype == jnp.float32
    cast = {name: params["layers"][name].astype(jnp.bfloat16) for name in ("q", "down")}
    _same({name: found["base"]["layers"][name] for name in cast}, cast)
    _same(found["lora"], both["lora"])
    held = sum(shard.data.nbytes for x in jax.tree.leaves(found) for shard in x.addressable_shards)
    assert figures.keys() == {f"reshard/{name}" for name in ("sent_bytes", "kept_bytes", "seconds")}
    assert 0 < figures["reshard/sent_bytes"] == held - figures["reshard/kept_bytes"] < held
    # the same devices in two shapes that cut nothing: all is there already
    for other in ("data=8", "data=4,context=2"):
        still = rollout_weights.make_move(
            CONFIG, params, parse_mesh("data=8"), parse_mesh(other), compute_dtype=jnp.float32
        )
        assert still.sent_bytes == 0 and still.kept_bytes == 8 * sum(x.nbytes for x in jax.tree.leaves(params))


def test_few_bits_are_made_before_they_move():
    pytest.importorskip("qwix")
    params, (before, after) = PARAMS, (parse_mesh(spec) for spec in (TRAIN, ROLLOUT))
    moves = [
        rollout_weights.make_move(CONFIG, params, before, after, compute_dtype=jnp.float32, few_bits=bits)
        for bits in ("", "int8")
    ]
    placed = rules.shard(params, before)
    program = moves[1].program.lower(placed).compile()
    _same(program(placed), jax.jit(lambda x: quantised.quantise(CONFIG, x, "int8"))(params))
    assert moves[1].sent_bytes < moves[0].sent_bytes / 2
    gathered = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", program.as_text())
    matrix = CONFIG.hidden_size * CONFIG.intermediate_size
    of_layers = [kind for kind, shape in gathered if int(np.prod([*map(int, shape.split(","))])) == matrix // 2]
    assert of_layers and set(of_layers) == {"s8"}  # and of each matrix the half that the device keeps, not all


def _steps(folder, **changes):
    """Rows and metrics of two steps of the main job's loop, rewarded by the parity of the tokens."""
    settings = dataclasses.replace(
        Settings(model=str(folder), data="chain", prompts_per_step=8, group_size=4, max_new_tokens=6,
                 train_problems=16, eval_problems=8, steps=2, mesh=TRAIN, learning_rate=0.01),
        **changes,
    )  # fmt: skip
    check(settings)
    mesh = parse_mesh(settings.mesh)
    model = lora_state.with_adapter(parts.load_model(settings.model, mesh=mesh), settings.lora, 0)
    model = model._replace(params=rules.shard(model.params, mesh))
    problems = parts.load_problems("chain", train=16, heldout=8, seed=0)
    tables = parts.make_tables(model, problems, prompt_tokens=0, max_new_tokens=6)
    # plain descent: behind Adam no bound of a sum follows (``close.assert_same_descent``)
    online = grpo.method_of_flags(settings, model, tables, mesh)._replace(tx=optax.sgd(0.01))

    def score(rows):
        odd = jnp.sum(jnp.where(rows.mask, rows.tokens, 0), axis=1) % 2
        return Rewards(odd.astype(jnp.float32), odd >= 0)

    move = grpo.make_move(settings, model, mesh, few_bits=settings.rollout_weights)
    loop = host.make_host_loop(online, score, place=partial(rules.constrain, mesh=mesh), move=move)
    state = rules.shard(init_state(online, model.params, jax.random.key(0)), mesh)
    return [(x.drawn.trajectories, x.metrics) for x in host.iterations(loop, state, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"slots": 3, "rollout_mesh": "fsdp=8"}, {"lora": 2, "rollout_weights": "int8"}],
    ids=lambda x: "-".join(x),
)
def test_two_steps_are_those_of_one_layout(tmp_path, more):
    if "rollout_weights" in more:
        pytest.importorskip("qwix")
    folder = byte_model(tmp_path)
    own = {"rollout_mesh": "tensor=2,data=4"} | more
    one, two = (_steps(folder, **changes) for changes in (own | {"rollout_mesh": ""}, own))
    rows, config = batch_sharding(parse_mesh(TRAIN)), parts.load_model(str(folder)).config
    for (wanted, plain), (found, figures) in zip(one, two, strict=True):
        _same(found._replace(sampler_logp=0), wanted._replace(sampler_logp=0))
        logp = wanted.sampler_logp
        close.assert_same_sums(found.sampler_logp, logp, close.forward_sums(config, logp.shape[1]))
        assert found.tokens.sharding.is_equivalent_to(rows, 2)  # the update divides them as ever
        added = {name: figures.pop(name) for name in list(figures) if name.startswith("reshard/")}
        assert min(added.values()) > 0 and len(added) == 3
        assert figures.keys() == plain.keys() and plain["grad/norm"] > 0
        close.assert_same_figures(figures, plain, 2 * close.gradient_sums(config, *logp.shape))


@pytest.mark.slow
def test_equal_layouts_move_nothing(tmp_path):
    assert not [name for _, figures in _steps(byte_model(tmp_path), rollout_mesh="fsdp=4,data=2")
                for name in figures if name.startswith("reshard/")]  # fmt: skip


@pytest.mark.slow
def test_main_job_and_resume(tmp_path, capsys):
    runs = [tmp_path / name for name in ("one", "two")]
    assert grpo.cli([*JOB, "--out", str(runs[0])]) == 0
    assert grpo.cli([*JOB, "--rollout-mesh", ROLLOUT, "--out", str(runs[1])]) == 0
    assert "weights to the rollout's layout: " in capsys.readouterr().out
    results = [json.loads((run / "results.json").read_text()) for run in runs]
    assert results[0]["reshard"] is None and results[1]["reshard"]["sent_bytes"] > 0
    for part in ("before", "after"):
        assert results[0][part]["pass@1"] == results[1][part]["pass@1"]
    (runs[1] / "checkpoints" / "step_00000002").rename(tmp_path / "later")  # as if it had ended after one step
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    assert grpo.cli(["--resume", str(runs[1]), "--rollout-mesh", "tensor=8"]) == 2
    assert "drop --rollout-mesh" in capsys.readouterr().err
    (runs[1] / "model").rename(tmp_path / "model")
    assert grpo.cli(["--resume", str(runs[1])]) == 0
    again = (runs[1] / "metrics.jsonl").read_text().splitlines()
    for old, new in zip(map(json.loads, lines), map(json.loads, again), strict=True):
        assert {k: v for k, v in old.items() if k.startswith(("loss", "reward", "kl"))} == {
            k: v for k, v in new.items() if k.startswith(("loss", "reward", "kl"))
        }
        assert new["reshard/sent_bytes"] == old["reshard/sent_bytes"] > 0
