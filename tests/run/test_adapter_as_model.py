"""The folder of an adapter is a model: its base with the adapter merged, for every command."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora
from jaxrl_llm.models.io import weights
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.planning import known_models, presets
from jaxrl_llm.run import lora_state, parts
from jaxrl_llm.run.commands import doctor, evaluate_model
from tests import close

RANK = 3


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """An adapter of nano that says something, and the folder it is in."""
    folder = tmp_path_factory.mktemp("run") / "adapter"
    _, base, config = weights.pretrained(weights.bundled("nano"))
    spec = Lora(RANK, targets=lora.targets_of(config))
    keys = jax.random.split(jax.random.key(0), 32)
    adapter = lora.init(config, spec, jax.random.key(1))
    adapter = {n: 0.05 * jax.random.normal(k, x.shape) for k, (n, x) in zip(keys, adapter.items(), strict=False)}
    lora.save(folder, config, spec, adapter, base_model=str(weights.bundled("nano")))
    return folder, base, config, spec, adapter


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_it_is_its_base_with_the_adapter_merged(adapted, mesh):
    folder, base, config, spec, adapter = adapted
    model = parts.load_model(str(folder), mesh=meshes.given_mesh(mesh))
    want = lora.merge(base, adapter, spec.scale)
    assert model.folder == weights.bundled("nano") and jax.tree.structure(model.params) == jax.tree.structure(want)
    for path, got in jax.tree.leaves_with_path(model.params):
        expected = want
        for key in path:
            expected = expected[key.key]
        close.assert_same_sums(np.asarray(got), np.asarray(expected), RANK + 2)
    if mesh:
        assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(model.params))
    name = "q"
    assert float(jnp.abs(model.params["layers"][name] - base["layers"][name]).max()) > 0.1


def test_where_nothing_trains_the_sums_are_kept_in_the_type_of_the_computation(adapted):
    """Matrices in bfloat16, each the float32 sum rounded once; norms stay as they are."""
    folder = adapted[0]
    whole = parts.load_model(str(folder)).params
    small = parts.load_model(str(folder), compute_dtype=jnp.bfloat16, frozen=True).params
    assert {str(x.dtype) for x in jax.tree.leaves(whole)} == {"float32"}
    assert small["layers"]["q"].dtype == jnp.bfloat16 and small["final_norm"].dtype == jnp.float32
    for got, want in zip(jax.tree.leaves(small), jax.tree.leaves(whole), strict=True):
        assert bool(jnp.all(got == want.astype(got.dtype)))


def test_plans_presets_doctor_and_eval_know_it(adapted, capsys):
    folder, _, config, *_ = adapted
    assert known_models.shape_of(str(folder)) == config
    assert presets.for_model(str(folder)) == presets.for_model(str(weights.bundled("nano")))
    assert evaluate_model.folders(str(folder)) == [str(folder)]
    assert doctor.cli([str(folder)]) == 0
    assert f"rank {RANK} beside q, k, v" in capsys.readouterr().out


def test_the_base_may_be_named_from_the_adapter(adapted, tmp_path):
    folder, *_ = adapted
    (tmp_path / "adapter").mkdir()
    for path in folder.iterdir():
        (tmp_path / "adapter" / path.name).write_bytes(path.read_bytes())
    raw = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(raw | {"base_model_name_or_path": "../model"}))
    with pytest.raises(UserError, match=r"base_model_name_or_path='../model' is no folder with config.json; write"):
        parts.load_model(str(tmp_path / "adapter"))
    (tmp_path / "model").symlink_to(weights.bundled("nano"))
    assert lora.base_of(tmp_path / "adapter") == tmp_path / "adapter/../model"
    assert lora.base_of(tmp_path / "model") == tmp_path / "model"
    assert parts.load_model(str(tmp_path / "adapter")).config.num_layers > 0


def test_an_adapter_on_top_of_an_adapter_is_kept_as_a_whole_model(adapted, tmp_path):
    """Its own file would name the base of both, and lose the first one."""
    folder, *_ = adapted
    for name, written in (("nano", True), (str(folder), False)):
        model = lora_state.with_adapter(parts.load_model(name), 2, 0)
        out = tmp_path / str(written)
        whole = lora_state.save(out, model, model.params, 2)
        assert (out / "adapter_config.json").is_file() == written
        jax.tree.map(np.testing.assert_array_equal, whole, parts.load_model(name).params)  # a fresh one says nothing


def test_an_adapter_of_another_model_is_one_line(adapted, tmp_path):
    folder, *_ = adapted
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = json.loads((folder / "adapter_config.json").read_text())
    other = raw | {"base_model_name_or_path": str(weights.bundled("tiny"))}
    (tmp_path / "adapter_config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="--model .*the config and r want"):
        parts.load_model(str(tmp_path))
    assert doctor.cli([str(tmp_path)]) == 1


def test_the_tokenizer_that_was_trained_beside_it_counts(adapted, tmp_path):
    """As trainers save it: with the chat template that the base lacks; ends stay those of the base, too."""
    folder, base = shutil.copytree(adapted[0], tmp_path / "adapter"), weights.bundled("nano")
    bare = tokenizers.load(base)
    assert parts.load_model(str(folder)).tokenizer.files == bare.files
    for path in bare.files:
        if path.name.startswith("tokenizer"):
            shutil.copy(path, folder / path.name)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = parts.load_model(str(folder)).tokenizer
    assert bare.chat_template is None and tokenizer.chat_template.startswith("{% for m")
    assert tokenizer.eos_ids == bare.eos_ids and tokenizer.encode("1+2") == bare.encode("1+2")
    assert {path.name: path.parent for path in tokenizer.files}["chat_template.jinja"] == folder
