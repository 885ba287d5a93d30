"""Functions chosen by name on a command line: a public function of a package, or ``module:function`` of one's own."""

import ast
import difflib
import inspect
import math
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax

from jaxrl_llm.data.own import own
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import PairTerms, TokenTerms

EACH = {TokenTerms: "token", PairTerms: "pair or response"}
GIVEN_BY = {TokenTerms: "a loss of tokens", PairTerms: "a loss on preferences"}


def find(package: ModuleType, name: str, flag: str) -> Callable[..., Any]:
    """A function of the public list of ``package``, or ``module:function``, found beside the command.

    Raises:
      UserError: naming the nearest public function, or what is wrong with the module.
    """
    if ":" in name:
        return own(name, flag)
    public = [x for x in getattr(package, "__all__", ()) if inspect.isfunction(getattr(package, x, None))]
    if name in public:
        return getattr(package, name)
    near = difflib.get_close_matches(name, public, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"see {package.__name__}.__all__"
    given = f"{flag}{'' if flag.endswith('=') else ' '}{name}"
    raise UserError(f"{given}: no public function of {package.__name__}; {hint} Your own is MODULE:FUNCTION")


def arrays(function: Callable[..., Any]) -> tuple[str, ...]:
    """The arrays that a function takes: its positional parameters, without those already given."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


def settings(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword settings of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def with_settings(function: Callable[..., Any], words: Sequence[str], flag: str, package: ModuleType):
    """``function`` with ``name=value`` words as its keyword settings.

    A value is a literal, ``inf``, a word where the default is one (``over=sum``), or a function's name.

    Raises:
      UserError: for a word that is no setting of the function, or a setting without a default that is missing.
    """
    known, given = settings(function), {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            names = ", ".join(f"{k}={v!r}" for k, v in known.items() if not callable(v)) or "none"
            raise UserError(f"{flag} {word}: the settings of {function.__name__} are {names}")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            if isinstance(known[name], int | float) and text != "inf":
                raise UserError(f"{flag} {word}: {text or 'nothing'} is no value such as {known[name]}") from error
            if text == "inf":
                value = math.inf
            else:
                value = text if isinstance(known[name], str) else find(package, text, f"{flag} {name}=")
        parameter = _annotated(function).parameters[name]
        if isinstance(parameter.default, str) and not isinstance(value, str):
            value = text
        if wanted := _unlike(value, parameter):
            raise UserError(f"{flag} {word}: {text} is no {wanted}")
        whole = type(value) is int and parameter.annotation is float
        given[name] = float(value) if whole else value
    missing = [k for k, v in known.items() if v is inspect.Parameter.empty and k not in given]
    if missing:
        raise UserError(f"{function.__name__} needs {flag} {' '.join(f'{k}=...' for k in missing)}")
    return partial(function, **given) if given else function


def _annotated(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function; annotations that are texts, as those of ``from __future__``, by what they say."""
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # whatever the text of a user's own says, also a name that is there for type checkers alone
        return inspect.signature(function)


def _unlike(value: Any, parameter: inspect.Parameter) -> str:
    """What a setting takes, in words, where a value is of another kind; empty where it is of that kind."""
    usual = None if parameter.default is inspect.Parameter.empty else parameter.default
    union = typing.get_origin(parameter.annotation) in (typing.Union, types.UnionType)
    within = typing.get_args(parameter.annotation)
    kinds = within if union else (parameter.annotation,)
    if value is None and types.NoneType in kinds:
        return ""
    such = "" if usual is None else f"value such as {getattr(usual, '__name__', usual)}"
    numbers = [kind for kind in kinds if kind in (int, float)]
    if isinstance(usual, int | float) or numbers and {*kinds} <= {int, float, types.NoneType}:
        if not _is_number(value):
            return such or "number"
        return "whole number" if numbers == [int] and not isinstance(value, int) else ""
    if isinstance(usual, tuple):
        several = isinstance(value, tuple | list) and (all(map(_is_number, value)) or not all(map(_is_number, usual)))
        # of so many, where the annotation says it
        return "" if several and (union or ... in within or len(value) == len(within or value)) else such
    return such if callable(usual) and not callable(value) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def check_arrays(function: Callable[..., Any], offered: Sequence[str], flag: str) -> tuple[str, ...]:
    """The arrays that a function takes, all of which are offered.

    Raises:
      UserError: naming those that are not.
    """
    wanted = arrays(function)
    absent = [name for name in wanted if name not in offered]
    if absent:
        name = getattr(function, "__name__", getattr(getattr(function, "func", None), "__name__", "it"))
        raise UserError(f"{flag}: {name} takes {', '.join(absent)}, which this command has not; it has "
                        f"{', '.join(offered)}")  # fmt: skip
    return wanted


def of_kind(terms: Any, kind: type, flag: str, shape: tuple[int, ...] | None = None) -> Any:
    """What a loss gave.

    Args:
      shape: of its numbers; None: whoever adds them up looks.

    Raises:
      UserError: where it is not of this kind, as of a ratio or a loss on other rows, whose arrays fit all the same; or
        has other numbers, as a mean that is taken already, which would count as that of one row.
    """
    if not isinstance(terms, kind):
        raise UserError(f"{flag}: gives no {kind.__name__}, as {GIVEN_BY[kind]} does; choose one that does")
    found = getattr(terms.loss, "shape", type(terms.loss).__name__)
    if shape is not None and found != shape:
        raise UserError(f"{flag}: gives a loss of {found}, not of {shape}, one number for each {EACH[kind]}; leave the "
                        "mean to the command")  # fmt: skip
    return terms


def tried(function: Callable[..., Any], given: Sequence[Any], flag: str) -> Any:
    """The shapes of what a function makes of arrays of these shapes, traced and not computed.

    Raises:
      UserError: for one that cannot take them, which is of another kind than the flag asks for, or wrong.
    """
    try:
        return jax.eval_shape(function, *given)
    except Exception as error:  # whatever a function of the user's own raises
        where = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)
                 if "site-packages" not in f.filename]  # fmt: skip
        said = (str(error).splitlines() or [""])[0]
        raise UserError(f"{flag}: does not take the arrays of a batch: {type(error).__name__}: {said} ({where[-1]}); "
                        "choose another function, or mend it") from error  # fmt: skip
