"""Low-rank adapters: a frozen base and two thin matrices beside each chosen one, in PEFT's format on disk.

The parameters of an adapted policy are ``{"base": params, "lora": adapter}``; the base has no gradient, and
``train.step.make_update(trained="lora")`` gives the optimiser the adapter alone.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm.errors import read_json_object
from jaxrl_llm.models.io import safetensors_io, tensor_names
from jaxrl_llm.models.layers import LORA_A, LORA_B
from jaxrl_llm.models.spec import ModelConfig, matrix_shapes
from jaxrl_llm.types import Params, Policy

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
# parameters come first
READS_PARAMS = ("hidden", "hidden_alone", "hidden_groups", "hidden_pages", "unembed", "extend", "scored", "unstack")
_PREFIX = "base_model.model."
# what adapter_config.json may say only in this way: anything else is another computation
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "use_qalora": (False,), "modules_to_save": ([],),
    "layers_to_transform": (), "rank_pattern": ({},), "alpha_pattern": ({},), "lora_bias": (False,),
    "target_parameters": ([],), "trainable_token_indices": (), "layer_replication": (), "alora_invocation_tokens": (),
    "exclude_modules": (), "megatron_config": (),
}  # fmt: skip


_BASE_AS_IT_WAS = (True, False, None, "gaussian", "eva", "orthogonal")  # the others of PEFT begin by changing the base


@dataclasses.dataclass(frozen=True)
class Lora:
    """``W + alpha / rank A B`` for the matrices ``targets`` of every layer."""

    rank: int
    alpha: float = 32.0
    targets: tuple[str, ...] = MATRICES

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        unknown = [name for name in self.targets if name not in MATRICES]
        if unknown or not self.targets:
            raise ValueError(f"targets={self.targets} wants one or more of {', '.join(MATRICES)}")

    @property
    def scale(self) -> float:
        """What ``A B`` is multiplied with."""
        return self.alpha / self.rank


def targets_of(config: ModelConfig) -> tuple[str, ...]:
    """The matrices of a family that can be adapted: all but router and experts."""
    return tuple(name for name in MATRICES if name in matrix_shapes(config))


def init(config: ModelConfig, lora: Lora, key: Array) -> dict[str, Array]:
    """``A`` uniform in ``+- in^-1/2`` as PEFT draws it, ``B`` zero: the adapted policy is the base.

    Leaves ``<matrix>_lora_a [L, in, rank]`` and ``<matrix>_lora_b [L, rank, out]``, float32.

    Raises:
      ValueError: for a matrix that the family does not have.
    """
    shapes = matrix_shapes(config)
    absent = [name for name in lora.targets if name not in shapes]
    if absent:
        raise ValueError(
            f"{config.family} has no matrix {', '.join(absent)}; choose of {', '.join(targets_of(config))}"
        )
    adapter = {}
    for name, k in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        width, out = shapes[name]
        shape = (config.num_layers, width, lora.rank)
        adapter[name + LORA_A] = jax.random.uniform(k, shape, jnp.float32, -(width**-0.5), width**-0.5)
        adapter[name + LORA_B] = jnp.zeros((config.num_layers, lora.rank, out), jnp.float32)
    return adapter


def adapted(base: Params, adapter: dict[str, Array], scale: float) -> Params:
    """The tree that the decoder runs: the base without gradient, the adapter beside its matrices (never multiplied)."""
    scaled = {name: x * scale if name.endswith(LORA_B) else x for name, x in adapter.items()}
    base = jax.lax.stop_gradient(base)
    return base | {"layers": base["layers"] | scaled}


def merge(base: Params, adapter: dict[str, Array], scale: float) -> Params:
    """The base with ``W + scale A B`` in place of each adapted matrix: an ordinary tree, to save or to serve.

    The product is of all bits of float32, on accelerators as well, whose products leave some out by default.
    """
    layers, exact = dict(base["layers"]), jax.lax.Precision.HIGHEST
    for name in _adapted_matrices(adapter):
        a, b = adapter[name + LORA_A], adapter[name + LORA_B]
        product = jnp.einsum("lir,lro->lio", a, b, precision=exact, preferred_element_type=jnp.float32)
        layers[name] = (layers[name].astype(jnp.float32) + scale * product).astype(layers[name].dtype)
    return base | {"layers": layers}


def merge_on_host(base: Params, adapter: dict[str, Array], scale: float) -> Params:
    """``merge`` as float32 in the host's memory, of a model that fits on no device: one matrix of a layer is on it."""
    whole = jax.tree.map(lambda x: np.array(x, np.float32), base)
    for name in _adapted_matrices(adapter):
        matrices, thin = whole["layers"][name], (name + LORA_A, name + LORA_B)
        for i in range(len(matrices)):
            one = {"layers": {name: matrices[i : i + 1]}}
            merged = merge(one, {part: adapter[part][i : i + 1] for part in thin}, scale)
            matrices[i : i + 1] = merged["layers"][name]
    return whole


def _adapted_matrices(adapter: dict[str, Array]) -> list[str]:
    return [name.removesuffix(LORA_A) for name in adapter if name.endswith(LORA_A)]


def make_policy(policy: Policy, config: ModelConfig, lora: Lora) -> Policy:
    """The policy of ``{"base", "lora"}``, from one of ``decoder.make_policy``.

    What ``unstack`` makes of both is one tree, which ``extend`` and ``unembed`` take in their place.
    """

    def run(function):
        def with_adapter(params, *rest, **named):  # by name a mixture's hidden states take recorded experts
            whole = params if "layers" in params else adapted(params["base"], params["lora"], lora.scale)
            return function(whole, *rest, **named)

        return with_adapter

    def start(key):
        keys = jax.random.split(key)
        return {"base": policy.init(keys[0]), "lora": init(config, lora, keys[1])}

    reading = {name: run(function) for name, function in policy._asdict().items() if name in READS_PARAMS and function}
    return policy._replace(init=start, **reading)


def _stored_modules(config: ModelConfig) -> dict[str, str]:
    table = tensor_names.layout_of(config).layer
    return {name: table[name][0].removesuffix(".weight") for name in targets_of(config)}


def fused(config: ModelConfig, targets: tuple[str, ...]) -> list[str]:
    """The matrices among ``targets`` that the family's files store as one with others."""
    stored = _stored_modules(config)
    return [name for name in targets if list(stored.values()).count(stored[name]) > 1]


def _modules(config: ModelConfig, targets: tuple[str, ...]) -> dict[str, str]:
    """Our names -> PEFT's module inside a layer."""
    stored, shared = _stored_modules(config), fused(config, targets)
    if shared:
        raise ValueError(
            f"{config.family} stores {', '.join(shared)} as one matrix with others, whose adapter has another shape in "
            "PEFT; save the merged model instead, or choose other targets"
        )
    return {name: stored[name] for name in targets}


def _target_modules(config: ModelConfig, modules: dict[str, str]) -> list[str]:
    """The last part of a module's name, as PEFT's own files have it; more where that names another one as well."""
    ends = [module.split(".")[-1] for module in _stored_modules(config).values()]
    return sorted(m if ends.count(m.split(".")[-1]) > 1 else m.split(".")[-1] for m in modules.values())


def save(
    folder: str | pathlib.Path, config: ModelConfig, lora: Lora, adapter: dict[str, Array], *, base_model: str = ""
) -> None:
    """Writes ``adapter_model.safetensors`` and ``adapter_config.json`` as PEFT reads them.

    Args:
      base_model: what the adapter belongs to, kept in ``base_model_name_or_path``.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    modules, base = _modules(config, lora.targets), tensor_names.layout_of(config).layers
    tensors = {}
    for name, module in modules.items():
        for ours, theirs in ((LORA_A, "lora_A"), (LORA_B, "lora_B")):
            for i, matrix in enumerate(np.asarray(adapter[name + ours], np.float32)):
                tensors[f"{_PREFIX}{base}{i}.{module}.{theirs}.weight"] = np.ascontiguousarray(matrix.T)
    safetensors_io.write(folder / "adapter_model.safetensors", tensors)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(config, modules),
        "bias": "none",
        "fan_in_fan_out": config.family == "gpt2",  # its matrices are stored [in, out]
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(raw, indent=2) + "\n")


def base_of(folder: str | pathlib.Path) -> pathlib.Path:
    """The folder of the model that an adapter in PEFT's format belongs to; of a whole model, the folder itself.

    Raises:
      ValueError: where ``base_model_name_or_path`` is no folder, from here or from the adapter's own.
    """
    folder = pathlib.Path(folder)
    path = folder / "adapter_config.json"
    if (folder / "config.json").is_file() or not path.is_file():
        return folder
    name = read_json_object(path).get("base_model_name_or_path")
    if isinstance(name, str) and name:
        for base in (pathlib.Path(name), folder / name):
            if (base / "config.json").is_file():
                return base
    raise ValueError(
        f"{path}: base_model_name_or_path={name!r} is no folder with config.json; write the folder of the model there "
        "that this adapter was trained on"
    )


def _settings(folder: pathlib.Path) -> tuple[int, float]:
    """Rank, and ``alpha`` of ``alpha / rank``."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; an adapter is adapter_config.json and adapter_model.safetensors")
    raw = read_json_object(path)
    for key, accepted in _PLAIN.items():
        if raw.get(key) is not None and raw[key] not in accepted:
            raise ValueError(f"{path}: {key}={raw[key]!r} is not supported")
    if raw.get("init_lora_weights", True) not in _BASE_AS_IT_WAS:
        raise ValueError(
            f"{path}: init_lora_weights={raw['init_lora_weights']!r} is a difference from a base that was changed; "
            "save it with PEFT's path_initial_model_for_weight_conversion, as a difference from the base itself"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"{path}: r={rank!r} and lora_alpha={alpha!r} must be numbers")
    return rank, alpha * rank**0.5 if raw.get("use_rslora") else float(alpha)


def _finite_rows(name: str, tensor: safetensors_io.Tensor) -> np.ndarray:
    return safetensors_io.check_finite(name, tensor, safetensors_io.rows(tensor, 0, tensor.shape[0]))


def load(folder: str | pathlib.Path, config: ModelConfig) -> tuple[Lora, dict[str, Array]]:
    """Reads an adapter in PEFT's format, of ``save`` or of PEFT itself; rank-stabilised scales become ``alpha``.

    Raises:
      ValueError: naming a setting that is not supported, or the first tensors that are missing, unused or misshapen.
    """
    folder = pathlib.Path(folder)
    rank, alpha = _settings(folder)
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    stored = safetensors_io.header(path)
    base, shapes = tensor_names.layout_of(config).layers, matrix_shapes(config)
    modules = _stored_modules(config)
    found = [name for name, module in modules.items() if any(f".{module}.lora_A" in key for key in stored)]
    if not found:
        raise ValueError(f"{folder} holds no adapter of a matrix of {config.family}")
    adapter, used = {}, set()
    for name, module in _modules(config, tuple(found)).items():
        sizes = {"lora_A": (rank, shapes[name][0]), "lora_B": (shapes[name][1], rank)}
        for ours, theirs in ((LORA_A, "lora_A"), (LORA_B, "lora_B")):
            keys = [f"{_PREFIX}{base}{i}.{module}.{theirs}.weight" for i in range(config.num_layers)]
            wrong = [k for k in keys if k not in stored or stored[k].shape != sizes[theirs]]
            if wrong:
                shape = stored[wrong[0]].shape if wrong[0] in stored else "absent"
                raise ValueError(f"{folder}: {wrong[0]} is {shape}, the config and r want {sizes[theirs]}")
            used |= set(keys)
            adapter[name + ours] = jnp.asarray(
                np.stack([_finite_rows(k, stored[k]).T for k in keys]).astype(np.float32)
            )
    unused = sorted(set(stored) - used)
    if unused:
        raise ValueError(f"{folder} holds {len(unused)} tensors that nothing reads, the first: {', '.join(unused[:3])}")
    return Lora(rank, alpha, tuple(found)), adapter
