"""`--config FILE`: a TOML file that holds a command's options under the names of its flags.

A flag given on the command line goes before the file, the file before the defaults. Values are read as the flags' own
are, so the two can never mean different things; a key that is no option is refused.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from formats.errors import FormatError
from formats.files import read_bounded

Command = TypeVar("Command", bound=Callable[..., object])

MAX_BYTES = 1 << 20


def config_option(command: Command) -> Command:
    """Gives a command `--config`."""
    return click.option(
        "--config",
        metavar="FILE",
        type=click.Path(),
        is_eager=True,
        expose_value=False,
        callback=_apply,
        help="A TOML file of these options, as max-batch = 64; flags go before it.",
    )(command)


def _apply(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    options = _options_by_key(context.command, parameter)
    found: dict[str, Any] = {}
    for key, value in _read(path).items():
        option = options.get(key)
        if option is None:
            raise _usage(f"{path}: unknown key {key!r}.{_nearest(key, options)}", context)
        found[option.name or ""] = _checked(path, key, value, option, context)
    context.default_map = {**(context.default_map or {}), **found}


def _options_by_key(command: click.Command, config: click.Parameter) -> dict[str, click.Parameter]:
    """What a file may hold: flags under their long name without dashes, arguments under their own."""
    keys = {}
    for parameter in command.params:
        names = [name[2:] for name in parameter.opts if name.startswith("--")] or [parameter.name or ""]
        if parameter is not config:
            keys[names[0]] = parameter
    return keys


def _read(path: str) -> Mapping[str, Any]:
    """
    Raises:
        FormatError: cannot be read.
        click.UsageError: not TOML.
    """
    data = read_bounded(path, MAX_BYTES, "a file of options")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{path}: not TOML: {error}", "Write an option a line, as max-batch = 64.") from None


def _checked(path: str, key: str, value: Any, option: click.Parameter, context: click.Context) -> str:
    """The value as it would be written after its flag, once the option takes it."""
    try:
        text = _text(value, option)
        option.process_value(context, text)
    except click.UsageError as error:
        raise _usage(f"{path}: {key}: {error.message}", context) from None
    return text


def _text(value: Any, option: click.Parameter) -> str:
    is_switch = isinstance(option, click.Option) and option.is_flag
    if is_switch != isinstance(value, bool):
        raise click.BadParameter("is true or false." if is_switch else f"{value!r} is not a value for it.")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return ",".join(map(str, value))
    if isinstance(value, str | int | float):
        return str(value)
    raise click.BadParameter(f"{type(value).__name__} is no value of an option.")


def _nearest(key: str, options: Mapping[str, click.Parameter]) -> str:
    near = difflib.get_close_matches(key, options, 1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else f" There are {', '.join(options)}."


def _usage(message: str, context: click.Context) -> click.UsageError:
    return click.UsageError(message, context)
