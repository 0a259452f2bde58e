"""Which package may import which, as a table and a check over source text. Used by test_imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("formats", "gplan", "cli")

_BASE = ("formats", "gplan.core", "gplan.errors", "gplan.units")
_GRAPHS = (*_BASE, "gplan.models", "gplan.kernels", "gplan.memory", "gplan.graphs")
_ABOVE_GRAPHS = (*_GRAPHS, "gplan.scheduling")

ANY = None


@dataclass(frozen=True)
class Rule:
    """What the modules under one prefix may import.

    Attributes:
        ours: prefixes of our own modules, besides the package's own.
        third_party: top-level names outside the standard library; `ANY` for no limit.
    """

    ours: tuple[str, ...]
    third_party: tuple[str, ...] | None


RULES = {
    "formats": Rule((), ("msgspec", "zstandard")),
    "gplan.core": Rule(_BASE, ()),
    "gplan.errors": Rule((), ()),
    "gplan.units": Rule(("gplan.errors",), ()),
    "gplan.kernels": Rule(_BASE, ("torch", "numpy", "flashinfer", "triton")),
    "gplan.models": Rule((*_BASE, "gplan.kernels.base"), ANY),
    "gplan.memory": Rule((*_BASE, "gplan.kernels.base"), ("torch", "numpy")),
    "gplan.graphs": Rule(_GRAPHS, ("torch", "numpy", "triton", "msgspec")),
    "gplan.scheduling": Rule(_BASE, ()),
    "gplan.planning": Rule(_ABOVE_GRAPHS, ANY),
    "gplan.serving": Rule(_ABOVE_GRAPHS, ANY),
    "gplan": Rule((), ()),
    "cli": Rule(("formats", "gplan"), ANY),
}


def modules() -> Iterator[tuple[str, str]]:
    """(dotted name, source) of every module of ours; a package's name ends with `.__init__`."""
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text()


def violations(module: str, source: str) -> list[str]:
    """One line for each import of `module` that its rule does not allow; a module under no rule is one too."""
    prefix = _rule_of(module)
    if prefix is None:
        return [f"{module}: no rule says what it may import"]
    rule = RULES[prefix]
    return [
        f"{module}:{line}: imports {name}"
        for line, name in _imports(module, ast.parse(source))
        if not _allowed(name, prefix, rule)
    ]


def _rule_of(module: str) -> str | None:
    """The longest prefix that has a rule. `gplan` itself rules only its own `__init__`."""
    if module == "gplan.__init__":
        return "gplan"
    found = [prefix for prefix in RULES if prefix != "gplan" and _under(module, prefix)]
    return max(found, key=len, default=None)


def _allowed(name: str, prefix: str, rule: Rule) -> bool:
    top = name.split(".")[0]
    if top in OURS:
        return any(_under(name, allowed) for allowed in (*rule.ours, prefix))
    return top in sys.stdlib_module_names or rule.third_party is ANY or top in rule.third_party


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name imported anywhere in the file: at the top, in functions, for type checking, by `import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(module, node.level, node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value
            elif not isinstance(argument, ast.Name):
                yield node.lineno, "something that is not written out"


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _resolve(module: str, level: int, name: str) -> str:
    """The absolute module that `from <level dots><name>` means in `module`."""
    if level == 0:
        return name
    package = module.split(".")[:-level]
    return ".".join([*package, name] if name else package)
