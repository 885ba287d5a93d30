"""Small models and problem tables that many tests share; shapes are shared so that compiled programs are too."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers as hugging_face
from jax.extend import core

from jaxrl_llm.data import problems as problem_tables
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.io import weights

FAMILIES = ("llama", "qwen2", "qwen3")
GEMMA = {"norm": "rms_plus_one", "activation": "gelu_tanh", "output_norms": True, "scale_embedding": True,
         "windows": (3, 0), "query_scalar": 6.0, "tie_embeddings": True}  # fmt: skip
SMALL = {  # what sets a family apart, in small
    "llama": {},
    "mistral": {"windows": (3, 3)},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": True},
    "qwen3_moe": {"qk_norm": True, "experts": Experts(4, 2, 8, normalise=True)},
    "gemma2": GEMMA | {"attention_softcap": 2.0, "final_softcap": 3.0},
    "gemma3_text": GEMMA | {"qk_norm": True, "local_rope_theta": 50.0},
    "gpt2": {"norm": "layer", "activation": "gelu_tanh", "gated_mlp": False, "mlp_bias": True, "qkv_bias": True,
             "output_bias": True, "learned_positions": True, "num_kv_heads": 4, "tie_embeddings": True},
    "phi3": {"rotary_dim": 2},
}  # fmt: skip
ALL_FAMILIES = tuple(SMALL)


def small_config(family: str = "qwen3", **changes) -> ModelConfig:
    settings = {
        "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 4, "max_positions": 64, "initializer_range": 0.3,
    }  # fmt: skip
    return ModelConfig(family=family, **(settings | SMALL[family] | changes))


@functools.cache
def small_model(family: str = "qwen3"):
    config = small_config(family)
    policy = make_policy(config)
    return policy, policy.init(jax.random.key(1)), config


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<pad>", "<s>", "<|end|>", "</s>", "<|user|>", "<|assistant|>")


def byte_tokenizer(folder):
    """Tokenizer files: bytes as tokens, a chat template that begins with BOS and ends turns with ``<|end|>``."""
    alphabet = sorted(hugging_face.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    model = hugging_face.Tokenizer(hugging_face.models.BPE(vocabulary, []))
    model.pre_tokenizer = hugging_face.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = hugging_face.decoders.ByteLevel()
    model.add_special_tokens([hugging_face.AddedToken(t, special=True) for t in SPECIALS])
    model.post_processor = hugging_face.processors.TemplateProcessing("<s> $A", None, [("<s>", SPECIALS.index("<s>"))])
    model.save(str(folder / "tokenizer.json"))
    texts = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return folder


def byte_model(folder, family: str = "llama", **changes):
    """A Hugging Face folder: ``byte_tokenizer`` and a small decoder of random weights."""
    byte_tokenizer(folder)
    ends = {"bos_token_id": 1, "eos_token_ids": (2, 3), "pad_token_id": 0}
    size = len(SPECIALS) + len(hugging_face.pre_tokenizers.ByteLevel.alphabet())
    config = small_config(family, vocab_size=size, **ends, **changes)
    weights.save(folder, config, make_policy(config).init(jax.random.key(0)))
    return folder


@functools.cache
def nano():
    folder = weights.bundled("nano")
    policy, params, config = weights.pretrained(folder)
    return policy, params, config, tokenizers.load(folder)


@functools.cache
def chain_table(n: int = 64):
    _, _, _, tokenizer = nano()
    problems = problem_tables.make_split(chain, split="train", n=n, seed=3, levels=(1, 2))
    return problem_tables.encode_problems(tokenizer, problems, prompt_tokens=16, answers=problem_tables.value_answers)


def dense_rows(batch: int, length: int):
    """Segments and positions of unpadded rows."""
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    return jnp.ones((batch, length), jnp.int32), positions


def cubes(function, *arguments, size: int) -> set[int]:
    """Positions of every array ``[..., size]`` of three axes or more that a traced program forms, in its loops too."""
    found: set[int] = set()

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            for value in equation.outvars:
                shape = getattr(value.aval, "shape", ())
                if len(shape) > 2 and shape[-1] == size:
                    found.add(int(np.prod(shape[:-1])))
            for inner in core.jaxprs_in_params(equation.params):
                walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found
