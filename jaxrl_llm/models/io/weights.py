"""Weights in Hugging Face layout: safetensors in and out, no PyTorch."""

import collections
import dataclasses
import importlib.resources
import json
import pathlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.models import config as model_config
from jaxrl_llm.models.decoder import Remat, make_policy
from jaxrl_llm.models.io import safetensors_io as files
from jaxrl_llm.models.io import tensor_names
from jaxrl_llm.models.spec import ModelConfig, cast_at_use, parameter_shapes
from jaxrl_llm.types import Params, Policy

SCORE = "score.weight"  # the head of transformers' sequence classifiers
HEADS, REWARD = "heads.safetensors", "reward/weight"  # what trained beside a model of this project
_KINDS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def bundled(name: str) -> pathlib.Path:
    """Folder of a bundled base model: ``tiny``, ``nano``, or ``nano_1``, which is nano of another seed."""
    path = pathlib.Path(str(importlib.resources.files("jaxrl_llm"))) / "assets" / name
    if name != path.name or not (path / "config.json").is_file():  # a path of the user's own stays outside
        raise ValueError(f"no bundled model {name!r}; bundled are tiny, nano and nano_1, or give the folder of a model")
    return path


def _check_names(folder: pathlib.Path, config: ModelConfig, stored: dict, parts: list[tensor_names.Part],
                 judges: bool) -> None:  # fmt: skip
    """Every wanted tensor is there and no other one; a tied head and stored constants are let pass."""
    wanted = list(dict.fromkeys(part.tensor for part in parts))
    missing = [n for n in wanted if n not in stored]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of the config, the first: {', '.join(missing[:3])}")
    passed = {tensor_names.layout_of(config).top["head"][0]} if config.tie_embeddings else set()
    passed |= {SCORE} if judges or (folder / HEADS).is_file() else set()
    extra = sorted(n for n in set(stored) - set(wanted) - passed if not tensor_names.is_constant(n))
    if extra:
        raise ValueError(
            f"{folder} holds {len(extra)} tensors that the config does not use, the first: {', '.join(extra[:3])}; "
            "is config.json of this model?"
        )


def _check_shapes(stored: dict[str, files.Tensor], parts: list[tensor_names.Part]) -> None:
    """Every tensor has the shape of the parts that lie in it side by side."""
    wanted: dict[str, tuple[bool, tuple[int, ...]]] = {}
    for part in parts:
        wanted[part.tensor] = (part.transposed, (*part.shape[:-1], part.start + part.shape[-1]))
    for name, (transposed, shape) in wanted.items():
        found = stored[name].shape[::-1] if transposed else stored[name].shape
        if found != shape:
            raise ValueError(f"{stored[name].path.name}: {name} has shape {found}, the config wants {shape}")


def _open(
    folder: pathlib.Path, config: ModelConfig, judges: bool, block_bytes: int = 2**24
) -> tuple[dict[str, files.Tensor], list[tensor_names.Part]]:
    """Stored tensors by their full names, checked against the config, and the parts of the tree."""
    base, parts = tensor_names.layout_of(config).base, tensor_names.parts(config)
    stored = files.tensors_of(folder)
    if not any(name.startswith(base) for name in stored):  # written from the model without its head
        stored = {name if name.startswith(("lm_head.", SCORE)) else base + name: x for name, x in stored.items()}
    _check_names(folder, config, stored, parts, judges)
    _check_shapes(stored, parts)
    if not judges:
        _check_tied(folder, config, stored, block_bytes)
    return stored, parts


def _blocks(stored: dict, part: tensor_names.Part, block_bytes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Pieces of one part as they are stored: where the piece begins inside the part, and the piece."""
    tensor, last = stored[part.tensor], part.start + part.shape[-1]
    if part.transposed or len(part.shape) == 1:  # stored rows are our last axis
        for first, block in files.row_blocks(tensor, part.start, last, block_bytes):
            files.check_finite(part.tensor, tensor, block)
            yield (first - part.start, *(0,) * (len(part.shape) - 1)), block
        return
    for first, block in files.row_blocks(tensor, 0, tensor.shape[0], block_bytes):
        files.check_finite(part.tensor, tensor, block)
        yield (first, 0), block[:, part.start : last]


def _check_tied(folder: pathlib.Path, config: ModelConfig, stored: dict, block_bytes: int) -> None:
    top = tensor_names.layout_of(config).top
    head, embed = stored.get(top["head"][0]), stored[top["embed"][0]]
    if not config.tie_embeddings or head is None:
        return
    # by the rows of a block of the head: as many bytes of another type are other rows
    if head.shape != embed.shape or not all(
        np.array_equal(block, files.rows(embed, first, first + len(block)))
        for first, block in files.row_blocks(head, 0, head.shape[0], block_bytes)
    ):
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding; set tie_word_embeddings to false")


class Stored(NamedTuple):
    """What the files of a folder hold: ``kinds`` counts tensors by type."""

    tensors: int
    bytes: int
    files: int
    kinds: dict[str, int]


def check(folder: str | pathlib.Path, config: ModelConfig, *, judges: bool = False) -> Stored:
    """Reads names, types and shapes (of a tied head the values too), no more.

    Args:
      judges: as in ``pretrained``.

    Raises:
      ValueError: as ``load`` does.
    """
    folder = pathlib.Path(folder)
    stored, _ = _open(folder, config, judges)
    sizes = [int(np.prod(x.shape)) * x.dtype.itemsize for x in stored.values()]
    kinds = collections.Counter(x.dtype.name for x in stored.values())
    return Stored(len(stored), sum(sizes), len({x.path for x in stored.values()}), dict(kinds))


def export_type(folder: str | pathlib.Path, config: ModelConfig) -> str:
    """``dtype`` of ``save`` for a model loaded from ``folder``: bfloat16 where most tensors are, else float32."""
    kinds = check(folder, config).kinds
    return "bfloat16" if 2 * kinds.get("bfloat16", 0) > sum(kinds.values()) else "float32"


def _nested(leaves: dict[tuple[str, ...], Any]) -> Params:
    tree: dict[str, Any] = {path[0]: leaf for path, leaf in leaves.items() if len(path) == 1}
    return tree | {"layers": {path[1]: leaf for path, leaf in leaves.items() if len(path) == 2}}


def _flat(tree: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    flat = {(name,): leaf for name, leaf in tree.items() if name != "layers"}
    return flat | {("layers", name): leaf for name, leaf in tree["layers"].items()}


def as_computed(config: ModelConfig, compute_dtype: Any) -> Callable[[tuple[str, ...]], Any]:
    """The ``dtype`` of ``load`` for weights that never train: matrices and tables as a policy casts them at use.

    Its results are those of float32 weights to the last bit, in half of the memory. Norms and biases stay float32.
    """
    narrow = cast_at_use(config)
    return lambda path: compute_dtype if path[-1] in narrow else jnp.float32


def load(
    folder: str | pathlib.Path,
    config: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    place: Callable[[np.ndarray], Any] = jnp.asarray,
    judges: bool = False,
) -> Params:
    """Reads the safetensors of ``folder`` into the parameter tree of ``decoder``.

    Args:
      dtype: precision of the tree, whatever the stored one is; or a function of a leaf's path, see ``as_computed``.
      place: where a finished leaf goes: the default device, or ``np.asarray`` to keep a model that no single device can
        hold in host memory until it is sharded. ``stream`` shards while it reads.
      judges: as in ``pretrained``.

    Raises:
      ValueError: naming the first missing or unused tensors, a tensor of a wrong shape, or a head that differs from
        the embedding where the config ties the two.
    """
    folder = pathlib.Path(folder)
    stored, parts = _open(folder, config, judges)
    leaves = {}
    for path, shape in _flat(parameter_shapes(config)).items():
        whole = np.empty(shape, np.dtype(_of_leaf(dtype, path)))
        for part in (p for p in parts if p.leaf == path):
            target = whole[part.index].T if part.transposed else whole[part.index]
            for low, piece in _blocks(stored, part, 2**26):
                target[tuple(slice(x, x + n) for x, n in zip(low, piece.shape, strict=True))] = piece
        leaves[path] = place(whole)
    return _nested(leaves)


def _of_leaf(dtype: Any, path: tuple[str, ...]) -> Any:
    return dtype(path) if callable(dtype) and not isinstance(dtype, type) else dtype


def _turned(axes: tuple, transposed: bool) -> tuple:
    return (*axes[:-2], axes[-1], axes[-2]) if transposed else axes


def _assembled(
    stored: dict, group: list[tensor_names.Part], shape: tuple[int, ...], sharding: NamedSharding, block_bytes: int
) -> jax.Array:
    """The parts of one layer (or of a leaf without layers) as they are stored, each device's share kept for it alone.

    Args:
      shape, sharding: of the whole group in the stored orientation.
    """
    indices = sharding.addressable_devices_indices_map(shape)
    where = {d: tuple(s.indices(n)[:2] for s, n in zip(i, shape, strict=True)) for d, i in indices.items()}
    kinds = {stored[part.tensor].dtype for part in group}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)
    buffers = {window: np.empty([b - a for a, b in window], kind) for window in where.values()}
    for part in group:
        for low, piece in _blocks(stored, part, block_bytes):
            low = (*part.index[1:], *low)
            piece = piece[(None,) * (len(low) - piece.ndim)]
            for window, buffer in buffers.items():
                spans = [(max(x, w[0]), min(x + n, w[1])) for x, n, w in zip(low, piece.shape, window, strict=True)]
                if all(a < b for a, b in spans):
                    into = tuple(slice(a - w[0], b - w[0]) for (a, b), w in zip(spans, window, strict=True))
                    buffer[into] = piece[tuple(slice(a - x, b - x) for (a, b), x in zip(spans, low, strict=True))]
    arrays = [jax.device_put(buffers[window], device) for device, window in where.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _write(transposed: bool, leaf: jax.Array, piece: jax.Array, number: jax.Array) -> jax.Array:
    piece = jnp.swapaxes(piece, -1, -2) if transposed else piece
    start = (number, *(jnp.zeros((), jnp.int32) for _ in piece.shape))
    return jax.lax.dynamic_update_slice(leaf, piece.astype(leaf.dtype)[None], start)


def _streamed(
    stored: dict,
    group: list[tensor_names.Part],
    shape: tuple[int, ...],
    sharding: NamedSharding,
    dtype: Any,
    block: int,
) -> jax.Array:
    """One leaf, layer by layer; what a layer needed on the host is free before the next one is read."""
    layered, transposed = bool(group[0].index), group[0].transposed
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    inner = NamedSharding(sharding.mesh, P(*_turned(spec[layered:], transposed)))
    inner_shape = _turned(shape[layered:], transposed)
    if not layered:
        whole = _assembled(stored, group, inner_shape, inner, block)
        turn = jax.jit(lambda x: (x.T if transposed else x).astype(dtype), out_shardings=sharding)
        return jax.block_until_ready(turn(whole))
    leaf = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
    write = jax.jit(partial(_write, transposed), donate_argnums=0, out_shardings=sharding)
    for number in range(shape[0]):
        layer = [part for part in group if part.index[0] == number]
        piece = _assembled(stored, layer, inner_shape, inner, block)
        leaf = jax.block_until_ready(write(leaf, piece, jnp.int32(number)))
    return leaf


def stream(
    folder: str | pathlib.Path,
    config: ModelConfig,
    shardings: Params,
    *,
    dtype: Any = jnp.float32,
    block_bytes: int = 2**24,
    judges: bool = False,
) -> Params:
    """``load`` straight into sharded arrays: the host never holds more than one layer of one leaf, as it is stored.

    Args:
      shardings: a tree of ``NamedSharding`` like the parameters, see ``distributed.rules.shardings`` of
        ``jax.eval_shape`` of ``init``; on several hosts each reads all files and keeps what its own devices hold.
      block_bytes: how much is read from a file at once.
      judges: as in ``pretrained``.

    Raises:
      ValueError: as ``load`` does.
    """
    folder = pathlib.Path(folder)
    stored, parts = _open(folder, config, judges, block_bytes)
    groups: dict[tuple[str, ...], list[tensor_names.Part]] = {}
    for part in parts:
        groups.setdefault(part.leaf, []).append(part)
    wanted = _flat(shardings)
    return _nested({
        path: _streamed(stored, groups[path], shape, wanted[path], _of_leaf(dtype, path), block_bytes)
        for path, shape in _flat(parameter_shapes(config)).items()
    })  # fmt: skip


def _stored_tensors(config: ModelConfig, params: Params) -> dict[str, Callable[[], np.ndarray]]:
    """Stored name -> the tensor, gathered when it is asked for."""
    flat = _flat(params)
    pieces: dict[str, list[tensor_names.Part]] = {}
    for part in tensor_names.parts(config):
        pieces.setdefault(part.tensor, []).append(part)

    def gather(found: list[tensor_names.Part]) -> np.ndarray:
        whole = np.concatenate([np.asarray(flat[p.leaf][p.index]) for p in found], axis=-1)
        return whole.T if found[0].transposed else whole

    return {name: partial(gather, found) for name, found in pieces.items()}


def save(
    folder: str | pathlib.Path,
    config: ModelConfig,
    params: Params,
    *,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    score: np.ndarray | None = None,
) -> None:
    """Writes safetensors and ``config.json`` so that transformers and ``load`` read them.

    Args:
      dtype: ``float32`` or ``bfloat16``, the stored precision.
      shard_bytes: a model beyond this goes into several files and an index.
      score: weights ``[1, hidden]`` of a reward, which transformers reads as a sequence classifier of one label; they
        stay float32.
    """
    if dtype not in _KINDS:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(_KINDS)}")
    raw = model_config.to_hf(config) | {"torch_dtype": dtype}
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    for part in tensor_names.parts(config):
        sizes[part.tensor] = sizes.get(part.tensor, 0) + int(np.prod(part.shape)) * _KINDS[dtype].itemsize
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    tensors, where = _stored_tensors(config, params), {}
    if score is not None:
        raw |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        sizes[SCORE] = score.size * 4
        shards[-1].append(SCORE)
        tensors[SCORE] = lambda: score
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        kinds = {name: np.float32 if name == SCORE else _KINDS[dtype] for name in names}
        held = {name: np.ascontiguousarray(tensors[name]().astype(kinds[name])) for name in names}
        files.write(folder / file, held)
        where |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if len(shards) > 1:
        (folder / "model.safetensors").unlink(missing_ok=True)
        index.write_text(json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}, indent=2))
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def config_of(folder: str | pathlib.Path, *, judges: bool = False) -> ModelConfig:
    """The shape of a Hugging Face folder; ``judges`` as in ``pretrained``."""
    config = model_config.read_config(folder)
    return dataclasses.replace(config, tie_embeddings=True) if judges else config


def pretrained(
    folder: str | pathlib.Path,
    *,
    compute_dtype: Any = jnp.float32,
    remat: Remat = False,
    place: Callable[[np.ndarray], Any] = jnp.asarray,
    shardings: Callable[[Params], Params] | None = None,
    make: Callable[..., Policy] = make_policy,
    frozen: bool = False,
    judges: bool = False,
) -> tuple[Policy, Params, ModelConfig]:
    """Policy, float32 parameters and shape of a Hugging Face folder.

    Args:
      place: as in ``load``.
      shardings: of a tree of shapes, where each leaf goes: then the files are read by ``stream``.
      make: builds the policy, ``decoder.make_policy`` with further arguments on a mesh.
      frozen: the weights never train and are kept ``as_computed``.
      judges: it gives hidden states to a head of its own, see ``reward_head``, and never a token: no projection to the
        vocabulary is read.
    """
    config = config_of(folder, judges=judges)
    dtype = as_computed(config, compute_dtype) if frozen else jnp.float32
    policy = make(config, compute_dtype=compute_dtype, remat=remat)
    if shardings is None:
        return policy, load(folder, config, dtype=dtype, place=place, judges=judges), config
    wanted = shardings(jax.eval_shape(policy.init, jax.random.key(0)))
    return policy, stream(folder, config, wanted, dtype=dtype, judges=judges), config


def is_judge(folder: str | pathlib.Path) -> bool:
    """Whether ``reward_head`` finds one in a model folder; an adapter's has none."""
    folder = pathlib.Path(folder)
    if not (folder / "config.json").is_file():
        return False
    if (folder / HEADS).is_file():
        return REWARD in files.header(folder / HEADS)
    return SCORE in files.tensors_of(folder)


def reward_head(folder: str | pathlib.Path, width: int) -> Params:
    """The head of ``models.heads`` that makes a reward of hidden states of ``width`` numbers.

    It is that of ``jaxrl reward-model`` (``heads.safetensors``), or of a sequence classifier of transformers with one
    output (``score.weight``).

    Raises:
      ValueError: for a folder without such a head, or one of another shape.
    """
    folder = pathlib.Path(folder)
    if (folder / HEADS).is_file():
        stored = files.header(folder / HEADS)
        if REWARD not in stored:
            raise ValueError(f"{folder / HEADS} holds {', '.join(sorted(stored))[:80]}, no {REWARD}: it is of no "
                             "reward model")  # fmt: skip
        weight, bias = (_whole(name, stored[name]) for name in (REWARD, "reward/bias"))
    else:
        stored = files.tensors_of(folder)
        if SCORE not in stored:
            raise ValueError(f"{folder} has neither {HEADS} nor {SCORE}: it is of no reward model")
        weight = _whole(SCORE, stored[SCORE]).T
        bias = np.zeros(weight.shape[-1:], np.float32)
    if weight.shape != (width, 1) or bias.shape != (1,):
        raise ValueError(f"{folder}: a reward is one number of {width}, its head has the shape {weight.shape}")
    return {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}


def _whole(name: str, tensor: files.Tensor) -> np.ndarray:
    values = files.rows(tensor, 0, tensor.shape[0] if tensor.shape else 0)
    return files.check_finite(name, tensor, values).astype(np.float32)
