"""The one exception for mistakes of the user: one clear line with the remedy, exit code 2 on a command line."""

import importlib
import importlib.util
import sys
from typing import Any


class UserError(ValueError):
    """Bad input: the message names the argument, the value and the remedy."""


class DataError(UserError):
    """A malformed data file: the message names the file and the line."""


def extra_module(module: str, use: str, extra: str, otherwise: str = "") -> Any:
    """The module that only an extra installs.

    Raises:
      UserError: where it is not installed: ``"{use} {package}: pip install 'jaxrl_llm[{extra}]'{otherwise}"``.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(_missing(module, use, extra, otherwise)) from error


def need_extra(module: str, use: str, extra: str) -> None:
    """``extra_module`` for a package that another process imports: this one only looks whether it is there."""
    known = sys.modules.get(module, "not imported")
    if known is None or (known == "not imported" and importlib.util.find_spec(module) is None):
        raise UserError(_missing(module, use, extra, ""))


def _missing(module: str, use: str, extra: str, otherwise: str) -> str:
    package = module.partition(".")[0].replace("_", "-")
    return f"{use} {package}: pip install 'jaxrl_llm[{extra}]'{otherwise}"
