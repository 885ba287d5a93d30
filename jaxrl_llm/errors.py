"""The one exception for mistakes of the user: one clear line with the remedy, exit code 2 on a command line."""

import importlib
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """Bad input: the message names the argument, the value and the remedy."""


class DataError(UserError):
    """A malformed data file: the message names the file and the line."""


class RunStopped(UserError):
    """What a run needs is used up or gone for good: no episode is to blame, and the run ends here, saved."""


@contextmanager
def from_callbacks() -> Iterator[None]:
    """What Python raises in the middle of a compiled program comes out of the program as it was raised.

    JAX makes a RuntimeError of it, whose text ends with the traceback.
    """
    try:
        yield
    except RuntimeError as error:
        found = re.findall(r"^(?:[\w.]+\.)?(UserError|DataError|RunStopped): (.*)$", str(error), re.MULTILINE)
        if not found:
            raise
        kind, message = found[-1]
        raise {"UserError": UserError, "DataError": DataError, "RunStopped": RunStopped}[kind](message) from error


def extra_module(module: str, use: str, extra: str, otherwise: str = "") -> Any:
    """The module that only an extra installs.

    Raises:
      UserError: where it is not installed: ``"{use} {package}: pip install 'jaxrl_llm[{extra}]'{otherwise}"``; where it
        is, and cannot be imported, with the reason.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(_missing(module, use, extra, otherwise, broken(module, error))) from error


def broken(module: str, error: ImportError) -> str:
    """That a package is installed and cannot be imported, and why; empty where it is not installed."""
    own = (error.name or "").partition(".")[0] == module.partition(".")[0]
    if own and isinstance(error, ModuleNotFoundError):
        return ""
    return f", which is installed and cannot be imported ({' '.join(str(error).split())})"


def need_extra(module: str, use: str, extra: str) -> None:
    """``extra_module`` for a package that another process imports: this one only looks whether it is there."""
    known = sys.modules.get(module, "not imported")
    if known is None or (known == "not imported" and importlib.util.find_spec(module) is None):
        raise UserError(_missing(module, use, extra, ""))


def _missing(module: str, use: str, extra: str, otherwise: str, because: str = "") -> str:
    package = module.partition(".")[0].replace("_", "-")
    return f"{use} {package}{because}: pip install 'jaxrl_llm[{extra}]'{otherwise}"


MOST_JSON = 1 << 28  # bytes of a file


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file that someone else wrote.

    Raises:
      UserError: in one line, for a file that cannot be read or holds no JSON object.
    """
    try:
        if path.stat().st_size > MOST_JSON:
            raise UserError(f"{path} is larger than {MOST_JSON >> 20} MB; is it the right file?")
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    return json_object(raw, str(path))


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object in JSON text; a name that is there twice is an error, as one of the two would be lost.

    Raises:
      UserError: in one line that begins with ``where``.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise UserError(f"{where} holds {next(n for n in names if names.count(n) > 1)[:80]!r} twice")
        return found

    try:
        found = json.loads(raw, object_pairs_hook=once)
    except UserError:
        raise
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply to be read") from error
    except ValueError as error:  # no JSON, no text, or a number of too many digits
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} holds no JSON object")
    return found
