"""Weights in Hugging Face layout: safetensors in and out, no PyTorch."""

import importlib.resources
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.models import config as model_config
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import init_params, make_policy
from jaxrl_llm.types import Params, Policy

# our name -> (Hugging Face name inside a layer, transposed)
_LAYER = {
    "q": ("self_attn.q_proj.weight", True),
    "k": ("self_attn.k_proj.weight", True),
    "v": ("self_attn.v_proj.weight", True),
    "o": ("self_attn.o_proj.weight", True),
    "q_bias": ("self_attn.q_proj.bias", False),
    "k_bias": ("self_attn.k_proj.bias", False),
    "v_bias": ("self_attn.v_proj.bias", False),
    "o_bias": ("self_attn.o_proj.bias", False),
    "q_norm": ("self_attn.q_norm.weight", False),
    "k_norm": ("self_attn.k_norm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
    "input_norm": ("input_layernorm.weight", False),
    "post_norm": ("post_attention_layernorm.weight", False),
}
_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}


def bundled(name: str) -> pathlib.Path:
    """Folder of a bundled base model, ``tiny`` or ``nano``."""
    path = pathlib.Path(str(importlib.resources.files("jaxrl_llm"))) / "assets" / name
    if not (path / "config.json").is_file():
        raise ValueError(f"no bundled model {name!r}; bundled are tiny and nano, or give the folder of a model")
    return path


def _shard_of(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> file, for one ``model.safetensors`` or the shards of an index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        raw = json.loads(index.read_text())
        if "weight_map" not in raw:
            raise ValueError(f"{index} has no weight_map")
        where = {name: folder / file for name, file in raw["weight_map"].items()}
        absent = sorted({path.name for path in where.values() if not path.is_file()})
        if absent:
            raise ValueError(f"{folder} lacks {', '.join(absent)}, which {index.name} names")
        return where
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"{folder} holds no model.safetensors nor model.safetensors.index.json")
    try:
        with safetensors.safe_open(single, "numpy") as file:
            return {name: single for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{single} is no readable safetensors file: {error}") from error


def _check_names(folder: pathlib.Path, config: ModelConfig, where: dict[str, pathlib.Path], wanted: list[str]) -> None:
    """Every wanted tensor is there and no other one; a tied head and stored rotary tables are let pass."""
    missing = [n for n in wanted if n not in where]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the config, the first: {', '.join(missing[:3])}")
    passed = {_TOP["head"]} if config.tie_embeddings else set()
    extra = sorted(n for n in set(where) - set(wanted) - passed if not n.endswith("rotary_emb.inv_freq"))
    if extra:
        raise ValueError(
            f"{folder} holds {len(extra)} tensors that the config does not use, the first: {', '.join(extra[:3])}; "
            "is config.json of this model?"
        )


def _expected(config: ModelConfig) -> Any:
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def load(
    folder: str | pathlib.Path,
    config: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    place: Callable[[np.ndarray], Any] = jnp.asarray,
) -> Params:
    """Reads the safetensors of ``folder`` into the parameter tree of ``decoder``.

    Args:
      dtype: precision of the tree, whatever the stored one is.
      place: where a finished leaf goes: the default device, or ``np.asarray`` to keep a model that no single device can
        hold in host memory until it is sharded.

    Raises:
      ValueError: naming the first missing or unused tensors, a tensor of a wrong shape, or a head that differs from
        the embedding where the config ties the two.
    """
    folder = pathlib.Path(folder)
    where = _shard_of(folder)
    expected = _expected(config)
    wanted = [_TOP[k] for k in expected if k != "layers"]
    wanted += [f"model.layers.{i}.{_LAYER[k][0]}" for k in expected["layers"] for i in range(config.num_layers)]
    _check_names(folder, config, where, wanted)

    def read(name: str, shape: tuple[int, ...], transposed: bool) -> np.ndarray:
        with safetensors.safe_open(where[name], "numpy") as file:
            array = file.get_tensor(name)
        array = array.T if transposed else array
        if array.shape != shape:
            raise ValueError(f"{where[name].name}: {name} has shape {array.shape}, the config wants {shape}")
        return array.astype(np.dtype(dtype))

    layers = {}
    for key, leaf in expected["layers"].items():
        name, transposed = _LAYER[key]
        stacked = np.empty(leaf.shape, np.dtype(dtype))
        for i in range(config.num_layers):
            stacked[i] = read(f"model.layers.{i}.{name}", leaf.shape[1:], transposed)
        layers[key] = place(stacked)
    params = {k: place(read(_TOP[k], leaf.shape, k == "head")) for k, leaf in expected.items() if k != "layers"}
    if config.tie_embeddings and _TOP["head"] in where:
        if not np.array_equal(read(_TOP["head"], expected["embed"].shape, False), params["embed"]):
            raise ValueError(f"{folder}: lm_head.weight differs from the embedding; set tie_word_embeddings to false")
    return params | {"layers": layers}


def save(folder: str | pathlib.Path, config: ModelConfig, params: Params, *, dtype: str = "float32") -> None:
    """Writes ``model.safetensors`` and ``config.json`` so that transformers and ``load`` read them.

    Args:
      dtype: ``float32`` or ``bfloat16``, the stored precision.
    """
    kinds = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    if dtype not in kinds:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(kinds)}")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def host(x: Any) -> np.ndarray:
        return np.asarray(x).astype(kinds[dtype])

    tensors = {_TOP[k]: host(v.T if k == "head" else v) for k, v in params.items() if k != "layers"}
    for key, stacked in params["layers"].items():
        name, transposed = _LAYER[key]
        for i in range(config.num_layers):
            tensors[f"model.layers.{i}.{name}"] = host(stacked[i].T if transposed else stacked[i])
    tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = model_config.to_hf(config) | {"torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def pretrained(
    folder: str | pathlib.Path,
    *,
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
    place: Callable[[np.ndarray], Any] = jnp.asarray,
) -> tuple[Policy, Params, ModelConfig]:
    """Policy, float32 parameters and shape of a Hugging Face folder; ``place`` as in ``load``."""
    config = model_config.read_config(folder)
    policy = make_policy(config, compute_dtype=compute_dtype, remat=remat)
    return policy, load(folder, config, place=place), config
