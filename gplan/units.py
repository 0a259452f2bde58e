"""Byte sizes as people write them: `24GiB`, `512MiB`, `90%`."""

import re

from gplan.errors import GplanError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTORS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")


def parse_size(text: str, total: int | None = None) -> int:
    """Reads a size in bytes. A percentage is of `total`, and an error where there is none.

    Raises:
        GplanError: not a size, a percentage outside (0, 100], or no bytes at all.
    """
    hint = "Write a size as 24GiB, 512MiB or 90%."
    match = _SIZE.fullmatch(text)
    if match is None:
        raise GplanError(f"{text!r} is not a size", hint)
    value, unit = float(match[1]), match[2]
    if unit == "%":
        if total is None:
            raise GplanError(f"{text!r}: a percentage of nothing known", hint)
        if not 0 < value <= 100:
            raise GplanError(f"{text!r} is outside 0% to 100%", hint)
        return int(total * value / 100)
    factor = _FACTORS.get(unit.upper())
    if factor is None:
        raise GplanError(f"{text!r}: unknown unit {unit!r}", hint)
    size = int(value * factor)
    if size <= 0:
        raise GplanError(f"{text!r} is no bytes at all", hint)
    return size


def format_size(nbytes: int) -> str:
    """Writes a size for people: three significant digits and a binary unit."""
    magnitude = abs(nbytes)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= factor:
            return f"{nbytes / factor:.3g} {unit}" if magnitude < 999.5 * factor else f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes} B"
