"""What a user names as ``MODULE:NAME``, found beside the command."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import UserError


def own(name: str, flag: str, kind: str = "function") -> Callable[..., Any]:
    """``module:function`` or ``module:Class`` of one's own.

    Args:
      flag: that names it, for the error.
      kind: what it should be, likewise.

    Raises:
      UserError: for what is no such thing.
    """
    module, _, attribute = name.partition(":")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")
    try:
        named = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of the user's own raises where it is read
        kinds = (ImportError, AttributeError, ValueError)
        said = f"{error}" if isinstance(error, kinds) else f"{type(error).__name__}: {error}"
        raise UserError(f"{flag} {name}: {said}; give MODULE:{kind.upper()} of a module beside this command") from error
    if not callable(named):
        raise UserError(f"{flag} {name} is {type(named).__name__}; give a {kind}")
    return named
