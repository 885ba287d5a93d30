"""Functions of installed packages that read model text, called one text after another in one limited process.

Such a function may run what it reads. The process refuses to: code that comes from no file of the library is not
executed (``guard``), whoever asks. The kernel holds the process, too, as it holds model-written programs.
"""

import io
import json
import os
import sys
from typing import Any

from jaxrl_llm.sandbox import filters


class Refused(RuntimeError):
    """Text was about to be executed."""


def guard(files: tuple[str, ...]) -> None:
    """From here on this process executes code of files below ``files`` alone; for good, no code can take it back.

    Python's own library may execute what it writes itself (named tuples, data classes).
    """
    library = os.path.dirname(os.path.realpath(os.__file__)) + os.sep

    def refuse(event: str, arguments: tuple) -> None:
        if event != "exec":
            return
        file = getattr(arguments[0], "co_filename", "")
        if file.startswith(files):
            return
        asking = sys._getframe(1).f_code.co_filename
        if asking.startswith(library) and "-packages" not in asking:
            return
        raise Refused("text is not executed here")

    sys.addaudithook(refuse)


def answer(reading: int, writing: int, shown: tuple[str, ...]) -> int:
    """Answers calls of ``module:function`` with plain arguments until the other side closes.

    Args:
      shown: folders whose files may be executed.
    """
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    guard((*filters.readable(), *shown))
    reader = io.BufferedReader(io.FileIO(reading), 1 << 16)
    while text := reader.readline():
        said = _said(*json.loads(text))
        text = json.dumps(said).encode() + b"\n"
        while text:
            text = text[os.write(writing, text) :]
        if not said["again"]:
            break
    return 0


def goes_on(said: bytes) -> bool:
    """Whether a process that answered so is as good as before."""
    return said.endswith(b'"again": true}\n')


def _said(function: str, arguments: list[Any]) -> dict[str, Any]:
    """The value, or what was raised; ``again``: whether this process is as good as before."""
    module, _, name = function.partition(":")
    try:
        value = getattr(sys.modules[module], name)(*arguments)
        json.dumps(value)
    except MemoryError:
        return {"raised": "MemoryError", "text": "", "again": False}
    except BaseException as error:  # also SystemExit: whatever the text made of it
        return {"raised": type(error).__name__, "text": _text(error), "again": not isinstance(error, RecursionError)}
    return {"value": value, "again": True}


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:300]
    except BaseException:
        return "an error whose text raises"
