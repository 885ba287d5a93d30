"""Updates whose rows are packed, or trees of what they share, against padded rows, in one process.

Run: python benchmarks/packing.py [--only mixture groups turns]; all of them write results/benchmarks/packing.json

``groups``: a policy update on groups of 8 with 256 + 256 tokens. ``turns``: on episodes of ten turns, every turn a row
of its own: the conversation so far, and 16 new tokens after 35 of the other side. ``mixture``: supervised rows, this
library's own functions; signature and docstring are the prompt, the body is the response. Their lengths are those of
instructions and answers in code: many short ones, few long ones.
"""

import argparse
import ast
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.experiment.evidence import provenance
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.train import offline, packing
from jaxrl_llm.train.methods import supervised
from jaxrl_llm.train.methods.builders import make_policy_loss
from jaxrl_llm.train.methods.prefixes import prefix_trees
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Batch, Params, Policy

VOCABULARY = 2048
RECORD = pathlib.Path(__file__).resolve().parents[1] / "results" / "benchmarks" / "packing.json"
PARTS = ("mixture", "groups", "turns")


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


def seconds(runs: dict[str, Callable[[], Any]], times: int) -> dict[str, list[float]]:
    """Of one call of each, ``times`` of them after the first, taken in turn.

    Of the processor, all threads together: what else the machine does then counts little.
    """
    spent = {name: [] for name in runs}
    for k in range(times + 1):
        for name, run in runs.items():
            begin = time.process_time()
            jax.block_until_ready(run())
            if k:
                spent[name].append(time.process_time() - begin)
    return spent


def times_faster(slow: list[float], fast: list[float]) -> tuple[float, list[float]]:
    """Ratio of the medians, and its 95 % interval by resampling the repetitions, which are pairs."""
    pairs, rng = np.array([slow, fast]), np.random.default_rng(0)
    drawn = pairs[:, rng.integers(0, pairs.shape[1], (2000, pairs.shape[1]))]
    found = np.median(drawn, axis=2)
    low, high = np.quantile(found[0] / found[1], (0.025, 0.975))
    return float(np.median(slow) / np.median(fast)), [round(float(low), 2), round(float(high), 2)]


def supervised_runs(policy: Policy, params: Params, given: argparse.Namespace) -> tuple[dict, dict]:
    """Padded and packed runs on the mixture, and what is to be said of it."""
    table = mixture(given.width)
    method = supervised.make_supervised(policy, table, rows_per_step=given.rows, tx=optax.sgd(1e-4))
    lengths = np.asarray(table.segment_ids).sum(1)
    runs = {}
    for name, planner in (("padded", None), ("packed", packing.packed_rows)):
        run = offline.make_run(method, given.steps, planner=planner)

        def again(run: Any = run) -> Any:
            return run(offline.init_state(method, jax.tree.map(jnp.copy, params), jax.random.key(1)))[1]

        runs[name] = again
    said = {"functions": len(lengths), "mean tokens": round(float(lengths.mean()), 1)}
    return runs, said | {"real tokens of a run, about": round(given.steps * given.rows * float(lengths.mean()))}


def batch_of(lines: list[tuple[list[int], int]], group: int) -> Batch:
    """Sequences, and how many tokens of each are its prompt, as rows."""
    width = max(len(line) for line, _ in lines)
    tokens, real, mask = (np.zeros((len(lines), width), kind) for kind in (np.int32, bool, bool))
    for k, (line, prompt) in enumerate(lines):
        tokens[k, : len(line)], real[k, : len(line)], mask[k, prompt : len(line)] = line, True, True
    ones, rows = jnp.where(jnp.asarray(mask), 1.0, 0.0), np.arange(len(lines), dtype=np.int32)
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    return Batch(
        tokens=jnp.asarray(tokens), segment_ids=jnp.asarray(real, jnp.int32), positions=jnp.asarray(positions),
        mask=jnp.asarray(mask), advantages=ones, old_logp=-ones, sampler_logp=-ones, ref_logp=-ones,
        group_ids=jnp.asarray(rows // group), total=jnp.sum(ones), extras={},
    )  # fmt: skip


def groups(count: int) -> Batch:
    """Groups of 8 with 256 + 256 tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCABULARY, (count, 256))
    lines = [[*prompt, *rng.integers(2, VOCABULARY, 256)] for prompt in prompts for _ in range(8)]
    return batch_of([(line, 256) for line in lines], 8)


def turns(count: int) -> Batch:
    """Episodes of ten turns, each turn a row that begins with all before it."""
    rng = np.random.default_rng(1)
    said = rng.integers(2, VOCABULARY, (count, 10 * 51))
    return batch_of([(list(line[: 51 * k]), 51 * k - 16) for line in said for k in range(1, 11)], 10)


def policy_runs(policy: Policy, params: Params, batch: Batch) -> tuple[dict, dict]:
    """Flat and tree updates of a batch, and what is to be said of it."""
    slot = make_policy_loss(policy, clipped_policy_loss)
    rows = packing.rows_of(jax.tree.map(np.asarray, batch))
    layout = prefix_trees(rows)
    run = jax.jit(lambda params, batch: accumulate(slot, params, batch, 1)[:2])
    laid = batch._replace(extras={packing.LAYOUT: jax.tree.map(jnp.asarray, layout)})
    losses = [float(run(params, each)[1]) for each in (batch, laid)]
    runs = {"flat": lambda: run(params, batch), "tree": lambda: run(params, laid)}
    begin = time.perf_counter()
    prefix_trees(rows)
    planning = time.perf_counter() - begin
    return runs, {
        "columns": [rows.mask.size, layout.source.size], "loss": losses, "seconds to plan": round(planning, 4)
    }  # fmt: skip


def main() -> None:
    """Prints a line of JSON for each part, and keeps them where all parts were measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("width", 512),
        ("rows", 32),
        ("layers", 4),
        ("hidden", 256),
        ("steps", 1),
        ("times", 10),
        ("groups", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    policy = make_policy(decoder(given.layers, given.hidden))
    params = policy.init(jax.random.key(0))
    parts = {
        "mixture": lambda: supervised_runs(policy, params, given),
        "groups": lambda: policy_runs(policy, params, groups(given.groups)),
        "turns": lambda: policy_runs(policy, params, turns(given.groups)),
    }
    told = []
    for name in given.only:
        runs, said = parts[name]()
        spent = seconds(runs, given.times)
        ratio, interval = times_faster(*spent.values())
        figures = {f"processor seconds {k}": round(float(np.median(v)), 3) for k, v in spent.items()}
        figures |= {"times faster": round(ratio, 2), "95 % interval": interval, "repetitions": given.times}
        told.append({"part": name} | said | figures)
        print(json.dumps(told[-1]), flush=True)
    if set(given.only) == set(parts):
        command = " ".join(["python benchmarks/packing.py", *sys.argv[1:]])
        whole = {"command": command, **provenance.made(RECORD.parent), "parts": told}
        RECORD.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
