"""The shape of a decoder as data: every family is a setting of the same fields."""

import dataclasses
import math

from jaxrl_llm.models.families import FAMILIES

NO_WINDOW = 0  # a layer that sees everything before it


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequency scaling: ``default``, ``linear`` or ``llama3``."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture of experts in place of the feed-forward part: ``per_token`` of ``number`` experts of width ``size``.

    ``normalise``: the weights of the chosen experts add up to one. ``balance_weight``: the family's weight of the
    balance loss, kept for training; the forward pass does not use it.
    """

    number: int
    per_token: int
    size: int
    normalise: bool = False
    balance_weight: float = 0.001

    def __post_init__(self):
        for name in ("number", "per_token", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"experts.{name}={getattr(self, name)} must be at least 1")
        if self.per_token > self.number:
            raise ValueError(f"experts.per_token={self.per_token} is more than the {self.number} experts there are")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder: Llama 2/3, Mistral, Qwen2/2.5, Qwen3, Qwen3-MoE, Gemma 2/3 (text), GPT-2, Phi-3.

    ``vocab_size`` is the number of real tokens; ``padded_vocab_size`` (at least that) the rows of the embedding:
    the padding rows get logit -inf in sampler and trainer alike.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 4096
    padded_vocab_size: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    norm: str = "rms"  # "rms_plus_one": scale 1 + w (Gemma); "layer": mean and bias too (GPT-2)
    activation: str = "silu"  # or "gelu_tanh"
    gated_mlp: bool = True  # down(act(gate x) * up x), else down(act(up x))
    mlp_bias: bool = False
    output_norms: bool = False  # norms after attention and feed-forward part as well (Gemma)
    learned_positions: bool = False  # a table of positions instead of rotary angles (GPT-2)
    rotary_dim: int = 0  # how much of a head is rotated; 0: all of it
    windows: tuple[int, ...] = ()  # per layer: how many positions back it sees, itself counted; NO_WINDOW: all
    local_rope_theta: float | None = None  # unscaled rotary base of the layers with a window (Gemma 3)
    query_scalar: float = 0.0  # scores are divided by its root; 0: head_dim
    attention_softcap: float | None = None
    final_softcap: float | None = None
    scale_embedding: bool = False  # embeddings times the root of hidden_size (Gemma)
    experts: Experts | None = None

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is not supported; choose one of {', '.join(FAMILIES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        for name, default in (("padded_vocab_size", self.vocab_size), ("rotary_dim", self.head_dim)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, default)
        if self.rotary_dim % 2 and not self.learned_positions:
            name = "head_dim" if self.rotary_dim == self.head_dim else "rotary_dim"
            raise ValueError(f"{name}={self.rotary_dim} must be even for rotary embeddings")
        if not any(self.windows):
            object.__setattr__(self, "windows", ())
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise ValueError(f"windows={self.windows} wants one width, 0 or more, for each of {self.num_layers} layers")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size={self.padded_vocab_size} is less than vocab_size={self.vocab_size}")
        for name, known in (("norm", ("rms", "rms_plus_one", "layer")), ("activation", ("silu", "gelu_tanh"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")

    @property
    def num_parameters(self) -> int:
        """Number of parameters, the tied head counted once."""
        shapes = parameter_shapes(self)
        return sum(math.prod(s) for part in (shapes, shapes["layers"]) for s in part.values() if isinstance(s, tuple))


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes ``[in, out]`` of the matrices of one layer, the experts stacked on the axis before them."""
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d)}
    if config.experts is not None:
        e, s = config.experts.number, config.experts.size
        shapes["router"] = (d, e)
        return shapes | {"experts_gate": (e, d, s), "experts_up": (e, d, s), "experts_down": (e, s, d)}
    if config.gated_mlp:
        shapes["gate"] = (d, f)
    return shapes | {"up": (d, f), "down": (f, d)}


def cast_at_use(config: ModelConfig) -> frozenset[str]:
    """Parameters that a decoder reads in its compute dtype alone: the matrices of layers, and the tables."""
    return frozenset((*matrix_shapes(config), "embed", "head", "position_embed"))


def _vector_shapes(config: ModelConfig, matrices: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    d = config.hidden_size
    norms = ["input_norm", "post_norm"]
    norms += ["attention_out_norm", "mlp_out_norm"] if config.output_norms else []
    shapes: dict[str, tuple[int, ...]] = {name: (d,) for name in norms}
    if config.norm == "layer":
        shapes |= {f"{name}_bias": (d,) for name in norms}
    biased = ["q", "k", "v"] if config.qkv_bias else []
    biased += ["o"] if config.output_bias else []
    biased += [name for name in ("gate", "up", "down") if name in matrices] if config.mlp_bias else []
    shapes |= {f"{name}_bias": (matrices[name][-1],) for name in biased}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return shapes


def parameter_shapes(config: ModelConfig) -> dict:
    """Shape of every leaf of the parameter tree, layers stacked on axis 0."""
    d, n, matrices = config.hidden_size, config.num_layers, matrix_shapes(config)
    layers = {name: (n, *shape) for name, shape in (matrices | _vector_shapes(config, matrices)).items()}
    shapes: dict = {"embed": (config.padded_vocab_size, d), "layers": layers, "final_norm": (d,)}
    if config.norm == "layer":
        shapes["final_norm_bias"] = (d,)
    if not config.tie_embeddings:
        shapes["head"] = (d, config.padded_vocab_size)
    if config.learned_positions:
        shapes["position_embed"] = (config.max_positions, d)
    return shapes
