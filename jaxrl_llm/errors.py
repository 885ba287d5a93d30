"""The one exception for mistakes of the user: one clear line with the remedy, exit code 2 on a command line."""

import importlib
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
        package = module.partition(".")[0].replace("_", "-")
        raise UserError(f"{use} {package}: pip install 'jaxrl_llm[{extra}]'{otherwise}") from error
