"""Options that every run shares: how a model is loaded and computed, and how its responses are sampled."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import quantised
from jaxrl_llm.planning import presets
from jaxrl_llm.run import flags, lora_state, parts
from jaxrl_llm.train import packing
from jaxrl_llm.train.methods import prefixes


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Which model, how its numbers are computed and where they lie."""

    model: parts.ModelName = "nano"
    mesh: str = ""  # for example data=2,fsdp=4: where parameters and rows lie; empty: one device
    compute: Literal["float32", "bfloat16"] = "float32"  # of activations, and of weights where they are used
    remat: bool = False  # recompute layers in the backward pass, for their memory
    attention: Literal["xla", "auto", "pallas", "cudnn"] = "xla"  # who computes it; auto: a kernel where there is one
    lora: int = 0  # rank of an adapter that trains in place of the weights; 0: all weights train
    offload: Literal["", "optimiser"] = ""  # optimiser: its state waits in the host's memory while others compute


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How responses of a loaded model are sampled, in training and when measured."""

    max_new_tokens: int = 3000
    temperature: float = 1.0
    stop: tuple[str, ...] = ()  # texts that end a response as the model's end tokens do
    top_p: float = 1.0  # the most likely tokens of this mass may be drawn; 1: all. Log-probs are of all tokens
    top_k: int = 0  # so many of the most likely tokens may be drawn; 0: all
    min_p: float = 0.0  # tokens this likely beside the most likely one may be drawn; 0: all
    # responses that decode at once, the next takes the place of one that ended; 0: all of them, in lock-step
    slots: int = 0
    cache_stages: int = 1  # steps in which a rollout's cache grows: a token reads the columns there are so far
    row_stages: int = 1  # steps in which a rollout's batch shrinks as responses end
    rollout_cache: parts.CacheNumbers = ""  # rollouts keep keys and values in a byte, with a scale for every head
    # samples from weights in few bits, made anew at every step: correct for them by the sampler's log-probs
    rollout_weights: Literal["", "int8", "int4", "float8_e4m3fn"] = ""


BaseName = Literal["", "nf4", "int4", "int8", "float8_e4m3fn"]
LayoutName = Literal["", "padded", "packed", "tree"]


def planner_of(layout: LayoutName, *, own: bool) -> packing.Planner | None:
    """Who arranges the rows of an update; None: they are computed as they stand.

    Args:
      own: of a model of one's own what sequences share is computed once where nothing is asked for. Rows of a bundled
        one stay as they are: another order of sums would change the last digits of embedded records.
    """
    if layout == "tree" or (not layout and own):
        return prefixes.prefix_trees
    return packing.packed_rows if layout == "packed" else None


class Sampling(NamedTuple):
    """One record of how responses are sampled; every loop takes it."""

    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    slots: int = 0
    cache_stages: int = 1
    row_stages: int = 1
    few_bits: str = ""


OF_TRAINING = ("remat", "lora", "offload")  # of ``ModelSettings``, what changes nothing where nothing trains
OF_MODEL = (*(field.name for field in dataclasses.fields(ModelSettings)), "rollout_cache")
OF_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingSettings) if field.name != "rollout_cache")


def sampling_of(settings: Any, *, temperature: float | None = None) -> Sampling:
    """The record of ``SamplingSettings``, with another temperature where one is given.

    Raises:
      UserError: for a number out of range, or two options of different engines.
    """
    if not 0 < settings.top_p <= 1 or not 0 <= settings.min_p < 1 or settings.top_k < 0:
        raise UserError(f"--top-p {settings.top_p} must lie in (0, 1], --min-p {settings.min_p} in [0, 1), and --top-k "
                        f"{settings.top_k} must not be negative")  # fmt: skip
    heat = settings.temperature if temperature is None else temperature
    if not 0 <= heat < math.inf:
        raise UserError(f"--temperature {heat:g} must be finite and not negative; 0 is greedy")
    if not all(settings.stop):
        raise UserError("--stop '' would end every response before it begins; give texts")
    for name, least in (("slots", 0), ("cache_stages", 1), ("row_stages", 1), ("max_new_tokens", 1)):
        if getattr(settings, name) < least:
            raise UserError(f"{flags.spell(name)} {getattr(settings, name)} must be at least {least}")
        if settings.slots and name.endswith("_stages") and getattr(settings, name) > 1:
            raise UserError(f"{flags.spell(name)} {getattr(settings, name)} is of rollouts in lock-step; drop it, or "
                            f"--slots {settings.slots}")  # fmt: skip
    if settings.rollout_weights:
        quantised.check_extra()
    return Sampling(
        settings.max_new_tokens, heat, settings.stop,
        None if settings.top_p == 1 else settings.top_p, settings.top_k or None, settings.min_p or None,
        settings.slots, settings.cache_stages, settings.row_stages, settings.rollout_weights,
    )  # fmt: skip


OF_ASKING = ("max_new_tokens", "compute")  # presets of a model that is asked and does not train


def unflagged(values: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The presets that no flag of a command line says otherwise."""
    flagged = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in words}
    return {name: value for name, value in values.items() if flags.spell(name) not in flagged}


def told_of_size(model: str, size: int, taken: dict[str, Any]) -> str:
    """A line on the presets that were taken; empty where none was."""
    shown = [
        flags.spell(name) if value is True else f"{flags.spell(name)} {value}"
        for name, value in taken.items()
        if value is not False
    ]
    line = f"{model}: {size:,} parameters; for this size, where no flag says otherwise: {' '.join(shown)}"
    return line if shown else ""


def sized(settings: Any, words: Sequence[str], *, least: int = 0) -> tuple[Any, str]:
    """The settings with what a model of one's own is asked with by its size where no flag says it, and a line on it.

    Of a bundled model, or where every one is given, the settings as they are and no line.

    Args:
      least: tokens of a response, which no preset makes shorter.
    """
    values, size = presets.for_model(settings.model)
    taken = {name: value for name, value in unflagged(values, words).items() if name in OF_ASKING}
    if "max_new_tokens" in taken:
        taken["max_new_tokens"] = max(taken["max_new_tokens"], least)
    return dataclasses.replace(settings, **taken), told_of_size(settings.model, size, taken)


def keeps_narrow(settings: Any, *, trains: bool = True) -> bool:
    """Whether weights are kept in the type that computes: those that never train, such as the base of an adapter.

    Of a model that is only asked, in few bits, the numbers stay as they are, to be rounded once; what an adapter trains
    beside is what its rollouts round.
    """
    return settings.lora > 0 or not (trains or getattr(settings, "rollout_weights", ""))


def open_model(settings: Any, *, trains: bool = True) -> parts.Model:
    """The model of ``ModelSettings``, on its mesh, with an adapter where one trains.

    Args:
      trains: else, and beside an adapter, its weights are kept in the type that computes.

    Raises:
      UserError: as ``parts.load_model``, or for a negative rank.
    """
    check_rank(settings)
    model = parts.load_model(
        settings.model,
        mesh=meshes.given_mesh(settings.mesh),
        rollout_cache=getattr(settings, "rollout_cache", ""),
        compute_dtype=jnp.dtype(settings.compute),
        remat=settings.remat,
        attention=settings.attention,
        frozen=keeps_narrow(settings, trains=trains),
    )
    return lora_state.with_adapter(model, settings.lora, 0, base=base_of(settings))


def check_rank(settings: Any) -> None:
    """Raises UserError for a negative rank of an adapter."""
    if settings.lora < 0:
        raise UserError(f"--lora {settings.lora} must not be negative; 0 trains all weights")


def base_of(settings: Any) -> str:
    """What the base of an adapter is kept in; empty: in the type that computes.

    Raises:
      UserError: where nothing of it is frozen, or what reads it does not know it.
    """
    base = getattr(settings, "lora_base", "")
    if not base:
        return ""
    if not settings.lora:
        raise UserError(f"--lora-base {base} is of the frozen weights beside an adapter: give --lora RANK")
    for name in ("rollout_weights", "rollout_mesh", "generator_mesh"):
        if value := getattr(settings, name, ""):
            raise UserError(f"{flags.spell(name)} {value} makes other weights of those that train, and those of "
                            f"--lora-base {base} are in few bits already; drop one of them")  # fmt: skip
    quantised.check_extra()
    return base
