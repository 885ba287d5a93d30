"""How far the sampler's log-probabilities lie from the trainer's, by family, shape and precision.

    python benchmarks/parity_gaps.py [FAMILY ...]

Random decoders of every family sample 32 responses of up to 64 tokens through the cache; the trainer scores the same
rows in one pass. The gap is the absolute difference of the log-probability of a sampled token, in nats. `int8`
and `float8` keep keys and values in a byte. With `rollout.strict` the gap is 0 (tests/rollout/test_strict.py). Nothing
here is timed. A mixture's experts are those that computed the token when it was sampled, and in rows "router decides
anew" those that the trainer's router takes. Writes results/benchmarks/parity_gaps.json and docs/parity.md; of named
families only these rows are new.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp

from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.run.records import record
from jaxrl_llm.train import parity
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.methods.packed import without_record

ROOT = pathlib.Path(__file__).resolve().parents[1]
GEMMA = {"norm": "rms_plus_one", "activation": "gelu_tanh", "output_norms": True, "scale_embedding": True}
FAMILIES = {
    "llama": {}, "mistral": {"windows": 16}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True, "experts": True},
    "gemma2": GEMMA | {"windows": (16, 0), "attention_softcap": 50.0, "final_softcap": 30.0},
    "gemma3_text": GEMMA | {"windows": (16, 0), "qk_norm": True, "local_rope_theta": 1e4, "rope_theta": 1e6},
    "gpt2": {"norm": "layer", "activation": "gelu_tanh", "gated_mlp": False, "mlp_bias": True, "qkv_bias": True,
             "output_bias": True, "learned_positions": True},
    "phi3": {},
}  # fmt: skip
SHAPES = {"2 x 64": (2, 64, 2), "8 x 128": (8, 128, 4)}  # layers, width, heads
SAMPLERS = {  # dtypes of computing, and of a cache of few bits
    "float32": (jnp.float32, None),
    "bfloat16": (jnp.bfloat16, None),
    "bfloat16, int8 cache": (jnp.bfloat16, jnp.int8),
    "bfloat16, float8 cache": (jnp.bfloat16, jnp.float8_e4m3fn),
}
PROMPTS, GROUP, COLUMNS, NEW = 8, 4, 32, 64


def config_of(family: str, shape: str) -> ModelConfig:
    """A decoder with all that sets its family apart; weights are drawn so that logits have a spread of a few nats."""
    layers, width, heads = SHAPES[shape]
    own = dict(FAMILIES[family])
    window = own.pop("windows", None)
    if window:
        own["windows"] = ((window if isinstance(window, tuple) else (window,)) * layers)[:layers]
    if own.pop("experts", False):
        own["experts"] = Experts(8, 2, width, normalise=True)
    return ModelConfig(
        family=family, vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_layers=layers,
        num_heads=heads, num_kv_heads=heads if family == "gpt2" else heads // 2, head_dim=width // heads,
        max_positions=128, tie_embeddings=True, initializer_range=0.08, **own,
    )  # fmt: skip


def gaps(config: ModelConfig, dtype, few) -> dict[str, dict[str, float]]:
    """Mean, quantiles and largest gap of one sampler, by what the trainer does beside."""
    sampler, trainer = (make_policy(config, compute_dtype=dtype, cache_dtype=few) for few in (few, None))
    tokens = jax.random.randint(jax.random.key(1), (PROMPTS, COLUMNS), 2, config.vocab_size)
    lengths = jnp.arange(PROMPTS) * COLUMNS // PROMPTS  # left pads
    valid = jnp.arange(COLUMNS)[None, :] >= lengths[:, None]
    keys = jax.random.split(jax.random.key(2), PROMPTS * GROUP)
    settings = {"group_size": GROUP, "max_new_tokens": NEW, "eos_ids": (0,)}
    params = trainer.init(jax.random.key(0))
    rows = jax.jit(lambda p: generate(sampler, p, tokens, valid, keys, **settings))(params)

    @jax.jit
    def measured(params, rows):
        logp, _ = score_tokens(trainer, params, rows)
        return parity.finished(parity.metrics_of(jnp.abs(logp - rows.sampler_logp), rows.mask))

    def figures(rows):
        found = measured(params, rows)
        return {name.removeprefix("kl/sampler_"): float(f"{float(x):.3g}") for name, x in found.items()}

    free = {} if config.experts is None else {", router decides anew": figures(without_record(rows))}
    return {"": figures(rows)} | free


def table(found: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """A page of the gaps."""
    lines = [
        "# Sampler and trainer",
        "",
        "Absolute difference of the log-probabilities of sampled tokens in nats, on this machine's CPU: what sampled",
        "through the cache against one pass of the trainer. Quantiles come from a histogram, eight bins to a decade.",
        "Every run records the same figures at each step (`kl/sampler_*` in `metrics.jsonl`). Written by",
        "`python benchmarks/parity_gaps.py`; shapes are layers x width. `rollout.strict` has none. A mixture's trainer",
        "takes the experts that the sampler took, or its router decides anew.",
        "",
        "| family | shape | sampler | mean | median | 99 % | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, shapes in found.items():
        for shape, samplers in shapes.items():
            for name, x in samplers.items():
                figures = " | ".join(f"{x[k]:.2g}" for k in ("mean", "p50", "p99", "max"))
                lines.append(f"| {family} | {shape} | {name} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", metavar="FAMILY", choices=[[], *FAMILIES], help="measured anew; none: all")
    path, asked = ROOT / "results" / "benchmarks" / "parity_gaps.json", parser.parse_args().family
    found: dict = json.loads(path.read_text())["gaps"] if asked else {}
    for family in asked or FAMILIES:
        for shape in SHAPES:
            for name, how in SAMPLERS.items():
                for beside, one in gaps(config_of(family, shape), *how).items():
                    found.setdefault(family, {}).setdefault(shape, {})[name + beside] = one
                    print(family, shape, name + beside, one, flush=True)
    whole = {"command": "python benchmarks/parity_gaps.py", **provenance.made(ROOT)}
    whole |= {"versions": record.versions(), "gaps": found}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    (ROOT / "docs" / "parity.md").write_text(table(found))


if __name__ == "__main__":
    main()
