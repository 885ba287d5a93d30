"""Array aliases and records shared by every layer; no logic.

Conventions (one page, used everywhere):

* Axes: ``B`` sequences, ``T`` positions of the whole sequence (prompt + response + padding), ``V`` vocabulary,
  ``D`` width. Batch first.
* Alignment: every ``[B, T]`` array describes *the token at that index*:
  ``logp[b, t] = log p(tokens[b, t] | tokens[b, :t])``. Column 0 is 0 and masked. The shift by one happens once,
  in ``logprobs.py``.
* ``mask[b, t]`` (bool): the policy chose this token and it counts; the end token is inside; prompt, padding, tool
  output and forced tokens are outside. It is the sampler's own record. ``segment_ids[b, t]``: 0 is padding,
  1, 2, ... number the sequences packed in a row. ``positions[b, t]``: index inside the sequence.
* Masked values are *replaced* (``jnp.where``), never multiplied: NaN times 0 is NaN.
* Four log-probabilities, four names: ``logp`` (has the gradient), ``old_logp`` (learner, before this update),
  ``sampler_logp`` (recorded by the generator at its temperature), ``ref_logp`` (frozen reference).
* ``group_ids[b]``: sequences with equal id answer the same prompt. Ids are in ``[0, B)`` of their batch.
* Losses never reduce; ``reduce`` is the only place where anything is averaged.
* Losses are minimised; for rewards and advantages higher is better.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Array, Bool, Float, Int, PyTree

Params = PyTree
Key = Array  # a typed key: jax.random.key
Cache = PyTree
Metrics = dict[str, Array]


class TokenTerms(NamedTuple):
    """Unreduced loss of a batch of tokens: ``loss`` is 0 outside the mask, ``aux`` holds diagnostics."""

    loss: Float[Array, "B T"]
    aux: dict[str, Float[Array, "B T"]]


class PairTerms(NamedTuple):
    """Unreduced loss of a batch of preference pairs (or single judged sequences)."""

    loss: Float[Array, " B"]
    aux: dict[str, Float[Array, " B"]]


class Responses(NamedTuple):
    """Measured responses, all samples of a problem side by side; see ``Trajectories``."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    problem_ids: Int[Array, " B"]


class Rewards(NamedTuple):
    """Scores of ``B`` sequences; an invalid score (infrastructure failure) is not a zero: it is left out.

    ``parts``: the rewards of which ``value`` is the weighted sum, by name; NaN where one does not apply to a response.
    None: there is one reward.
    """

    value: Float[Array, " B"]
    valid: Bool[Array, " B"]
    parts: dict[str, Float[Array, " B"]] | None = None


class Problems(NamedTuple):
    """A table of ``N`` prompts: left-padded token rows, and what a jittable verifier needs to judge an answer."""

    tokens: Int[Array, "N P"]
    valid: Bool[Array, "N P"]
    answers: PyTree  # leaves [N, ...]; empty dict when only host verifiers judge
    level: Int[Array, " N"]  # difficulty or category of the prompt


class Trajectories(NamedTuple):
    """What a rollout returns: whole sequences ``[B, T]``, prompt left-padded, response right-padded."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    sampler_logp: Float[Array, "B T"]
    truncated: Bool[Array, " B"]  # ran out of tokens before an end
    group_ids: Int[Array, " B"]
    problem_ids: Int[Array, " B"]  # row of the Problems table
    extras: dict[
        str, Array
    ] = {}  # leaves with leading axis B; episodes keep their turns here, see rollout.turns.multi_turn


class Batch(NamedTuple):
    """What a loss needs, as arrays; ``total`` is the denominator of the whole optimiser step."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    advantages: Float[Array, "B T"]
    old_logp: Float[Array, "B T"]
    sampler_logp: Float[Array, "B T"]
    ref_logp: Float[Array, "B T"]
    group_ids: Int[Array, " B"]
    total: Float[Array, ""]
    extras: dict[str, Array]  # leaves with leading axis B: values, returns, weights, ...; scalars belong to the step


class Policy(NamedTuple):
    """A language model as pure functions of a parameter tree; all that the rest of the library ever sees.

    * ``init(key) -> params``
    * ``hidden(params, tokens, positions, segment_ids) -> [B, T, D]``: final normalised hidden states. A mixture also
      takes ``experts [B, T, L K]``, those that computed each token when it was sampled (``Trajectories.extras``).
    * ``unembed(params, hidden[..., D]) -> logits[..., V]`` in float32; padded vocabulary rows are -inf.
    * ``init_cache(batch, length) -> cache`` with room for ``length`` columns: a dict of arrays that all have both axes,
      whose ``segment_ids [batch, length]`` alone says what is seen; 0 is empty.
    * ``extend(params, cache, tokens[B, S], positions[B, S], segment_ids[B, S], column) -> (hidden[B, S, D], cache)``:
      run ``S`` further tokens, written at cache columns ``column .. column + S`` (prefill and decode alike); the plain
      number 0 as ``column`` says that the cache is empty.
    * ``repeat_cache(cache, repeats) -> cache``: each row ``repeats`` times, side by side.
    * ``grow_cache(cache, repeats, length) -> cache`` where the model has it: ``repeat_cache`` into one with room for
      ``length`` columns, so that a prompt's cache needs no room for what follows.
    * ``scored(params, hidden[B, S, D], targets[B, S], temperature) -> (logp[B, S], entropy[B, S])`` where the model has
      it: what ``unembed`` says of each target, without the logits; None in a policy whose ``unembed`` is replaced.
    * ``hidden_groups(params, prompts, responses) -> (hidden[P, L, D], hidden[P * G, N, D])`` where the model has it:
      both are ``(tokens, positions, segment_ids)``, and the ``G`` responses beside each other follow one prompt.
    * ``hidden_pages(params, tokens, positions, segment_ids, pages[B, N, M]) -> [B, T, D]`` where the model has it: rows
      in ``N`` equal blocks, each of which sees itself and the ``M`` blocks that are named for it (-1: none), by the
      rule of all attention. Sequences that begin alike then share the blocks of their beginning.
    * ``hidden_alone``: ``hidden`` where no gradient is taken of it, where that is computed in another way; see
      ``for_scores``.
    * ``unstack(params) -> params`` where the model has it: the same for ``extend`` and ``unembed`` alone, so laid out
      that a loop of many steps reads them where they lie; see ``for_steps``.
    * ``scored_at_once``: logits of so many tokens should exist at once where tokens are scored, if they are given.
    """

    init: Callable[..., Params]
    hidden: Callable[..., Float[Array, "B T D"]]
    unembed: Callable[..., Float[Array, "..."]]
    init_cache: Callable[..., Cache]
    extend: Callable[..., tuple[Array, Cache]]
    repeat_cache: Callable[..., Cache]
    vocab_size: int
    hidden_groups: Callable[..., tuple[Array, Array]] | None = None
    unstack: Callable[[Params], Params] | None = None
    hidden_pages: Callable[..., Array] | None = None
    grow_cache: Callable[[Cache, int, int], Cache] | None = None
    scored: Callable[..., tuple[Array, Array]] | None = None
    experts: Any = None  # of a mixture: how many there are, see ``models.spec.Experts``
    hidden_alone: Callable[..., Float[Array, "B T D"]] | None = None
    scored_at_once: int = 0

    def for_scores(self) -> "Policy":
        """The same policy for passes without a gradient, which keep nothing of a layer for the way back."""
        return self if self.hidden_alone is None else self._replace(hidden=self.hidden_alone, hidden_alone=None)

    def for_steps(self, params: Params) -> Params:
        """The parameters for a loop over ``extend`` and ``unembed``; they are laid out once, before it."""
        return params if self.unstack is None else self.unstack(params)

    def steps_at_once(self, rows: int, chunk: int) -> int:
        """Time steps of so many rows whose logits exist at once: ``chunk``, or as many as ``scored_at_once`` asks."""
        return max(chunk, self.scored_at_once // rows)


class Sampler(NamedTuple):
    """A curriculum as a pure state machine over the rows of a ``Problems`` table.

    * ``init(num_problems) -> state``
    * ``draw(state, key, n) -> (ids[n], state)``
    * ``update(state, ids[n], scores[n], valid[n]) -> state``: ``scores`` is the mean reward of each drawn prompt.
    """

    init: Callable[..., Any]
    draw: Callable[..., tuple[Int[Array, " n"], Any]]
    update: Callable[..., Any]


class TrainState(NamedTuple):
    """Everything a run needs to go on: only arrays."""

    params: Params
    opt_state: PyTree
    step: Int[Array, ""]
    key: Key
    sampler: PyTree  # curriculum state
    extras: dict[str, PyTree]  # reference, EMA, value network, running statistics


Declared = TypeVar("Declared", bound=tuple)


def declared(kind: type[Declared], extras: Mapping[str, Any]) -> Declared:
    """What a method declared of its extras: a ``NamedTuple`` whose fields are their names; others may stand beside it.

    What goes in is ``kind(...)._asdict()``: the extras stay a dict of arrays, in which several methods have their own.

    Raises:
      KeyError: where one of them is not there.

    >>> class Judged(NamedTuple):
    ...     judge: float
    >>> declared(Judged, Judged(0.5)._asdict() | {"version": 3}).judge
    0.5
    """
    return kind(*(extras[name] for name in kind._fields))  # type: ignore[attr-defined]
