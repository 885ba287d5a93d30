"""Updates whose rows are packed, against padded ones, in one process: ``python benchmarks/packing.py``.

The mixture is this library's own functions, as many as ``--rows``: signature and docstring are the prompt, the body is
the response. Their lengths are those of instructions and answers in code: many short ones, few long ones.
"""

import argparse
import ast
import json
import pathlib
import re
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.train import offline, packing
from jaxrl_llm.train.methods import supervised

VOCABULARY = 2048


def functions() -> Iterator[tuple[str, str]]:
    """``(signature and docstring, body)`` of every function of the library that has both."""
    for path in sorted((pathlib.Path(__file__).parents[1] / "jaxrl_llm").rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                begin = node.body[1].lineno - 1
                yield "\n".join(lines[node.lineno - 1 : begin]), "\n".join(lines[begin : node.end_lineno])


def ids(text: str) -> list[int]:
    """Words and signs as tokens, about as many as a tokenizer of that vocabulary makes."""
    return [2 + sum(map(ord, word)) % (VOCABULARY - 2) for word in re.findall(r"\s*\w{1,6}|\s*[^\w\s]", text)]


def mixture(width: int) -> supervised.SupervisedRows:
    """Every function that fits, as rows of ``width`` columns."""
    pairs = [(ids(prompt), ids(body)) for prompt, body in functions()]
    pairs = [(p, b) for p, b in pairs if len(p) + len(b) <= width]
    tokens, real, mask = (np.zeros((len(pairs), width), kind) for kind in (np.int32, bool, bool))
    for k, (prompt, body) in enumerate(pairs):
        end = len(prompt) + len(body)
        tokens[k, :end], real[k, :end], mask[k, len(prompt) : end] = prompt + body, True, True
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    return supervised.SupervisedRows(*(jnp.asarray(x) for x in (tokens, real.astype(np.int32), positions, mask)))


def decoder(layers: int, width: int) -> ModelConfig:
    """A small Qwen3."""
    return ModelConfig(
        family="qwen3", vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_layers=layers,
        num_heads=width // 32, num_kv_heads=width // 64, head_dim=32, max_positions=4096, qk_norm=True,
        tie_embeddings=True,
    )  # fmt: skip


def seconds(run, state, times: int) -> tuple[float, float]:
    """Of one call, the best of some after the first; and the last loss."""
    state, _ = run(state)
    best = np.inf
    for _ in range(times):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(run(state))
        best = min(best, time.perf_counter() - begin)
    return best, float(metrics["sft/loss"][-1])


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 512), ("rows", 32), ("layers", 4), ("hidden", 256), ("steps", 2), ("times", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    table = mixture(given.width)
    policy = make_policy(decoder(given.layers, given.hidden))
    params = policy.init(jax.random.key(0))
    method = supervised.make_supervised(policy, table, rows_per_step=given.rows, tx=optax.adam(1e-4))
    lengths = np.asarray(table.segment_ids).sum(1)
    spent = {}
    for name, planner in (("padded", None), ("packed", packing.packed_rows)):
        run = offline.make_run(method, given.steps, planner=planner)
        state = offline.init_state(method, jax.tree.map(jnp.copy, params), jax.random.key(1))
        spent[name], loss = seconds(run, state, given.times)
        spent[f"{name} loss"] = loss
    drawn = given.steps * given.rows * lengths.mean()  # real tokens of a call, in the mean over the table
    print(json.dumps({
        "functions": len(lengths), "width": given.width, "mean tokens": round(float(lengths.mean()), 1),
        "tokens/s padded": round(drawn / spent["padded"]), "tokens/s packed": round(drawn / spent["packed"]),
        "ratio": round(spent["padded"] / spent["packed"], 2),
        "loss": [round(spent["padded loss"], 5), round(spent["packed loss"], 5)],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
