"""Tensor names of Hugging Face checkpoints, as tables, and where each stored tensor lies in the parameter tree."""

from typing import NamedTuple

from jaxrl_llm.models.spec import ModelConfig, parameter_shapes

# our name -> (stored name inside a layer, transposed). Leaves that share a stored name lie in it side by side, in
# this order, on our last axis; {e} numbers the experts.
Table = dict[str, tuple[str, bool]]

_ATTENTION: Table = {
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
    "input_norm": ("input_layernorm.weight", False),
    "post_norm": ("post_attention_layernorm.weight", False),
}
_LLAMA: Table = _ATTENTION | {
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
}
_QWEN3_MOE: Table = _ATTENTION | {
    "router": ("mlp.gate.weight", True),
    "experts_gate": ("mlp.experts.{e}.gate_proj.weight", True),
    "experts_up": ("mlp.experts.{e}.up_proj.weight", True),
    "experts_down": ("mlp.experts.{e}.down_proj.weight", True),
}
_GEMMA: Table = _LLAMA | {
    "attention_out_norm": ("post_attention_layernorm.weight", False),
    "post_norm": ("pre_feedforward_layernorm.weight", False),
    "mlp_out_norm": ("post_feedforward_layernorm.weight", False),
}
_PHI3: Table = _LLAMA | {
    "q": ("self_attn.qkv_proj.weight", True),
    "k": ("self_attn.qkv_proj.weight", True),
    "v": ("self_attn.qkv_proj.weight", True),
    "gate": ("mlp.gate_up_proj.weight", True),
    "up": ("mlp.gate_up_proj.weight", True),
}
_GPT2: Table = {  # matrices are stored [in, out]
    "q": ("attn.c_attn.weight", False),
    "k": ("attn.c_attn.weight", False),
    "v": ("attn.c_attn.weight", False),
    "q_bias": ("attn.c_attn.bias", False),
    "k_bias": ("attn.c_attn.bias", False),
    "v_bias": ("attn.c_attn.bias", False),
    "o": ("attn.c_proj.weight", False),
    "o_bias": ("attn.c_proj.bias", False),
    "up": ("mlp.c_fc.weight", False),
    "up_bias": ("mlp.c_fc.bias", False),
    "down": ("mlp.c_proj.weight", False),
    "down_bias": ("mlp.c_proj.bias", False),
    "input_norm": ("ln_1.weight", False),
    "input_norm_bias": ("ln_1.bias", False),
    "post_norm": ("ln_2.weight", False),
    "post_norm_bias": ("ln_2.bias", False),
}
_TOP: Table = {
    "embed": ("model.embed_tokens.weight", False),
    "final_norm": ("model.norm.weight", False),
    "head": ("lm_head.weight", True),
}
_GPT2_TOP: Table = {
    "embed": ("transformer.wte.weight", False),
    "position_embed": ("transformer.wpe.weight", False),
    "final_norm": ("transformer.ln_f.weight", False),
    "final_norm_bias": ("transformer.ln_f.bias", False),
    "head": ("lm_head.weight", True),
}


class Layout(NamedTuple):
    """``layers``: what stands before the number of a layer; ``base``: a prefix that older files leave out."""

    layer: Table = _LLAMA
    top: Table = _TOP
    layers: str = "model.layers."
    base: str = "model."


LAYOUTS: dict[str, Layout] = {
    "qwen3_moe": Layout(_QWEN3_MOE),
    "gemma2": Layout(_GEMMA),
    "gemma3_text": Layout(_GEMMA),
    "phi3": Layout(_PHI3),
    "gpt2": Layout(_GPT2, _GPT2_TOP, "transformer.h.", "transformer."),
}
# constants that some files carry beside the parameters
_CONSTANTS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Part(NamedTuple):
    """``leaf[index]`` is columns ``start .. start + shape[-1]`` of a stored tensor (of its transpose)."""

    tensor: str
    leaf: tuple[str, ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool
    start: int


def layout_of(config: ModelConfig) -> Layout:
    """The tables of the family."""
    return LAYOUTS.get(config.family, Layout())


def parts(config: ModelConfig) -> list[Part]:
    """Every piece of the parameter tree and the stored tensor it comes from, top leaves first, then layer by layer."""
    layout, shapes = layout_of(config), parameter_shapes(config)
    found: list[Part] = []
    used: dict[str, int] = {}

    def add(tensor: str, leaf: tuple[str, ...], index: tuple[int, ...], shape: tuple[int, ...], transposed: bool):
        found.append(Part(tensor, leaf, index, shape, transposed, used.get(tensor, 0)))
        used[tensor] = used.get(tensor, 0) + shape[-1]

    for key, (tensor, transposed) in layout.top.items():
        if key in shapes:
            add(tensor, (key,), (), shapes[key], transposed)
    for i in range(config.num_layers):
        for key, (tensor, transposed) in layout.layer.items():
            if key not in shapes["layers"]:
                continue
            shape, name = shapes["layers"][key], f"{layout.layers}{i}.{tensor}"
            if "{e}" not in tensor:
                add(name, ("layers", key), (i,), shape[1:], transposed)
                continue
            for e in range(shape[1]):
                add(name.replace("{e}", str(e)), ("layers", key), (i, e), shape[2:], transposed)
    return found


def is_constant(name: str) -> bool:
    """Whether a stored tensor is no parameter: rotary tables, causal masks."""
    return name.endswith(_CONSTANTS)
