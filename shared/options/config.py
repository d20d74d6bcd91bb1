"""Configuration: frozen dataclasses read once, from flags and from TWOSTROKE_… variables (a flag wins).

A field declared with `option()` is a flag of the same name in kebab case and a variable of the same name in upper case:
`max_num_seqs` is `--max-num-seqs` and `TWOSTROKE_MAX_NUM_SEQS`. A value that cannot be read ends the process with one line
that names it, and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from shared.base.errors import ConfigError
from shared.base.exit_codes import CONFIG_ERROR

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """A ConfigError inside ends the process with one line on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CONFIG_ERROR)


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    parse: Callable[[str], Any] | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is a flag and a variable. A `secret` value is shown neither by --help nor by `repr`."""
    metadata = {"help": help, "choices": choices, "parse": parse, "secret": secret}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def size_bytes(text: str) -> int:
    """'4GiB', '512M' or '1073741824' as bytes; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 4GiB, 512MiB or 1073741824")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")


def parse_config(cls: type[T], argv: Sequence[str], prog: str, environ: Mapping[str, str] = os.environ) -> T:
    """An instance of dataclass `cls`. Raises ConfigError, naming the flag or variable at fault."""
    doc = (cls.__doc__ or "").strip()
    parser = _Parser(prog=prog, description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = typing.get_type_hints(cls)
    for field in _options(cls):
        _add(parser, field, _scalar(hints[field.name]))
    flags = vars(parser.parse_args(list(argv)))
    values = {}
    for field in _options(cls):
        variable = f"TWOSTROKE_{field.name.upper()}"
        if field.name in flags:
            values[field.name] = flags[field.name]
        elif environ.get(variable, "") != "":
            values[field.name] = _from_text(field, _scalar(hints[field.name]), environ[variable], variable)
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{prog}: {error}") from None


def to_environ(config: Any) -> dict[str, str]:
    """The variables that make `parse_config` give back an equal instance: how a supervisor hands options on, secrets included,
    without showing them in the process list."""
    environ = {}
    for field in _options(type(config)):
        value = getattr(config, field.name)
        if value is not None and value != field.default:
            environ[f"TWOSTROKE_{field.name.upper()}"] = str(value)
    return environ


def _options(cls: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if "help" in f.metadata]


def _scalar(hint: Any) -> Callable[[str], Any]:
    """`int` for `int | None`, and so on."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return typing.cast("Callable[[str], Any]", hint)


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], scalar: Callable[[str], Any]) -> None:
    flag = "--" + field.name.replace("_", "-")
    text = field.metadata["help"].replace("%", "%%")
    if field.default is not None and not field.metadata["secret"] and field.default != "":
        text += f" (default: {field.default})"
    if scalar is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return

    def read(value: str) -> Any:
        try:
            return _from_text(field, scalar, value, flag)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    choices = field.metadata["choices"]
    metavar = "|".join(choices) if choices else flag.rsplit("-", 1)[-1].upper()
    parser.add_argument(flag, type=read, default=argparse.SUPPRESS, help=text, metavar=metavar)


def _from_text(field: dataclasses.Field[Any], scalar: Callable[[str], Any], text: str, source: str) -> Any:
    choices = field.metadata["choices"]
    if choices and text not in choices:
        raise ConfigError(f"{source} is {text!r}; it must be one of {', '.join(choices)}")
    if scalar is bool:
        if text.lower() not in _BOOLS:
            raise ConfigError(f"{source} is {text!r}; it must be true or false")
        return _BOOLS[text.lower()]
    try:
        return (field.metadata["parse"] or scalar)(text)
    except ValueError as error:
        kind = None if field.metadata["parse"] else {int: "a whole number", float: "a number"}.get(scalar)  # type: ignore[call-overload]
        raise ConfigError(f"{source} is {text!r}; " + (f"it must be {kind}" if kind else str(error))) from None
