"""How weights came about that a process trained for itself.

Their bits depend on the machine, on its number of cores for one; what they were made by does not. What hashes a program
with such weights among its constants goes by their recipe.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl_llm.types import Params


class Origin(NamedTuple):
    """A leaf of ``program(given)``, the ``place``-th one."""

    program: Callable[[Params], Params]
    given: Params
    place: int


_KNOWN: dict[int, tuple[weakref.ref, Origin]] = {}  # by identity: arrays have no hash


def made_by(program: Callable[[Params], Params], given: Params, made: Params) -> Params:
    """``made``, and it is known from now on, while it lives, that it is what ``program(given)`` gives.

    >>> import jax.numpy as jnp
    >>> doubled = made_by(lambda x: 2 * x, jnp.ones(2), jnp.full(2, 2.0))
    >>> origin_of(doubled).given.tolist(), origin_of(jnp.ones(2))
    ([1.0, 1.0], None)
    """
    for place, leaf in enumerate(jax.tree.leaves(made)):
        key = id(leaf)
        gone = weakref.ref(leaf, lambda _, key=key: _KNOWN.pop(key, None))
        _KNOWN[key] = gone, Origin(program, given, place)
    return made


def origin_of(leaf: Any) -> Origin | None:
    """How it was made, where ``made_by`` was told."""
    known = _KNOWN.get(id(leaf))
    return known[1] if known is not None and known[0]() is leaf else None
