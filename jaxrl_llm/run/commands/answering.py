"""Replies of a model to questions that come one by one: those that wait are decoded together."""

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed import hosts, rules
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed.compiler_options import jit_sampling
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.run import parts

STEP = 64  # columns of the shortest prompts and replies, see ``parts.bucket``


class Question(NamedTuple):
    """What a model goes on with, and how."""

    ids: list[int]
    most: int  # tokens of the reply
    temperature: float
    top_p: float
    seed: int  # below 2**32: of equal questions, the replies of equal seeds are equal
    choice: int = 0  # of the draws of a request


class Reply(NamedTuple):
    """The tokens without the one that ended them, and whether one did."""

    ids: list[int]
    ended: bool


def make_decode(model: parts.Model, *, most: int) -> Callable[[Sequence[Question]], list[Reply]]:
    """Replies of at most ``most`` tokens to several questions at once.

    Rows, columns and lengths are filled up to sizes that come again: what stands beside a question, or fills up its
    row, does not change which tokens are drawn for it (but for the last digits of sums).
    """
    tokenizer, least = model.tokenizer, 1 if model.mesh is None else meshes.batch_parts(model.mesh)

    @functools.cache
    def program(new: int, cut: bool) -> Callable[..., Any]:
        def run(params, tokens, valid, keys, temperature, top_p):
            given = tokens, valid, keys, temperature, top_p
            if model.mesh is not None:
                given = rules.constrain_batch(given, model.mesh)
            tokens, valid, keys, temperature, top_p = given
            return generate(
                model.policy, params, tokens, valid, keys, group_size=1, max_new_tokens=new, eos_ids=tokenizer.eos_ids,
                pad_id=tokenizer.pad_id, temperature=temperature, top_p=top_p if cut else None,
            )  # fmt: skip

        return jit_sampling(run)

    @jax.jit
    def keys_of(seeds, choices):
        return jax.vmap(lambda seed, choice: jax.random.fold_in(jax.random.key(seed), choice))(seeds, choices)

    def decode(questions: Sequence[Question]) -> list[Reply]:
        asked, longest = max(q.most for q in questions), max(len(q.ids) for q in questions)
        new = max(asked, min(parts.bucket(asked, STEP), most, model.config.max_positions - longest))
        columns = max(longest, min(parts.bucket(longest, STEP), model.config.max_positions - new))
        # the first question fills up the batch: it ends when it ends
        rows = [*questions, *[questions[0]] * (parts.bucket(len(questions), least) - len(questions))]
        tokens = np.full((len(rows), columns), tokenizer.pad_id, np.int32)
        valid = np.zeros(tokens.shape, bool)
        for k, q in enumerate(rows):
            tokens[k, columns - len(q.ids) :], valid[k, columns - len(q.ids) :] = q.ids, True
        keys = keys_of(
            jnp.asarray([q.seed for q in rows], jnp.uint32), jnp.asarray([q.choice for q in rows], jnp.uint32)
        )
        heat, mass = (jnp.asarray([getattr(q, name) for q in rows], jnp.float32) for name in ("temperature", "top_p"))
        found = program(new, any(q.top_p < 1 for q in rows))(
            model.params, jnp.asarray(tokens), jnp.asarray(valid), keys, heat, mass
        )
        said, drawn = hosts.gathered((found.tokens, found.mask))
        return [_reply(said[k][drawn[k]].tolist(), q.most, tokenizer.eos_ids) for k, q in enumerate(questions)]

    return decode


def _reply(ids: list[int], most: int, eos_ids: Sequence[int]) -> Reply:
    ids = ids[:most]
    ended = bool(ids) and ids[-1] in eos_ids
    return Reply(ids[:-1] if ended else ids, ended)


class Batcher:
    """Decodes what is asked from many threads, at most ``rows`` questions at once, in the order in which they came."""

    def __init__(self, decode: Callable[[Sequence[Question]], list[Reply]], *, rows: int, wait_s: float):
        """Begins to wait.

        Args:
          wait_s: how long the first question of a batch waits for others.
        """
        self.decode, self.rows, self.wait_s = decode, rows, wait_s
        self.waiting: queue.SimpleQueue[tuple[Question, Future] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def ask(self, question: Question) -> "Future[Reply]":
        """The reply, when it is there."""
        promised: Future[Reply] = Future()
        self.waiting.put((question, promised))
        return promised

    def close(self) -> None:
        """Ends the thread behind what has been asked."""
        self.waiting.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (first := self.waiting.get()) is not None:
            batch, until = [first], time.monotonic() + self.wait_s
            while len(batch) < self.rows:
                try:
                    more = self.waiting.get(timeout=max(until - time.monotonic(), 0.0))
                except queue.Empty:
                    break
                if more is None:
                    self.waiting.put(None)
                    break
                batch.append(more)
            try:
                replies = self.decode([question for question, _ in batch])
            except Exception as error:  # whoever asked is told
                for _, promised in batch:
                    promised.set_exception(error)
                continue
            for (_, promised), reply in zip(batch, replies, strict=True):
                promised.set_result(reply)
