"""The architecture as tests: which package imports which, what stays light, and what no file may mention."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.import_rules import ROOT, modules, violations


def test_every_import_follows_the_direction() -> None:
    found = [line for module, source in modules() for line in violations(module, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("formats.plan", "import torch"),
        ("formats.plan", "from gplan.core import Phase"),
        ("formats.plan", "def late():\n    import torch.cuda"),
        ("formats.plan", "import importlib\nimportlib.import_module('gplan.core')"),
        ("gplan.units", "from gplan.core import Phase"),
        ("gplan.core", "from gplan import graphs"),
        ("gplan.kernels.reference", "from gplan.models.base import Model"),
        ("gplan.models.decoder", "from gplan.kernels.reference import ReferenceKernels"),
        ("gplan.models.decoder", "from ..kernels import reference"),
        ("gplan.memory.kv_pool", "from gplan.graphs import runner"),
        ("gplan.graphs.runner", "import gplan.scheduling.scheduler"),
        ("gplan.scheduling.scheduler", "import torch"),
        ("gplan.scheduling.scheduler", "import numpy as np"),
        ("gplan.scheduling.scheduler", "from gplan.memory.kv_pool import KVPool"),
        ("gplan.planning.planner", "from gplan.serving.server import serve"),
        ("gplan.planning.planner", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gplan.serving"),
        ("gplan.serving.engine", "from ..planning import planner"),
        ("gplan.serving.engine", "import cli.main"),
        ("gplan.new_package.thing", "import json"),
    ],
)
def test_a_violation_is_reported(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("formats.plan", "import json\nimport msgspec\nfrom . import container"),
        ("gplan.models.decoder", "from gplan.kernels.base import Kernels"),
        ("gplan.serving.engine", "from gplan.scheduling import Scheduler\nfrom ..graphs.executor import Executor"),
        ("cli.plan", "from gplan.planning.planner import make_plan\nimport click"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert violations(module, source) == []


def _loaded(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after it ran `code`."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "transformers", "numpy", "safetensors", "tokenizers"}


def test_the_command_line_starts_without_torch() -> None:
    assert not HEAVY & _loaded("import cli.main")


def test_help_of_every_command_needs_no_torch() -> None:
    code = (
        "from click.testing import CliRunner\nfrom cli.main import cli\n"
        "for args in [[], *([name] for name in cli.commands)]:\n"
        "    assert CliRunner().invoke(cli, [*args, '--help']).exit_code == 0, args"
    )
    assert not HEAVY & _loaded(code)


@pytest.mark.parametrize("package", ["formats", "gplan.scheduling"])
def test_pure_packages_load_without_torch(package: str) -> None:
    names = [module.removesuffix(".__init__") for module, _ in modules() if module.startswith(package + ".")]
    loaded = _loaded("\n".join(f"import {name}" for name in names))
    assert not HEAVY & loaded


def test_torch_would_be_seen() -> None:
    assert "numpy" in _loaded("import numpy")


def _texts() -> list[tuple[str, str]]:
    folders = ("formats", "gplan", "cli", "tests", "benchmarks", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml")]
    return [
        (str(path.relative_to(ROOT)), path.read_text(errors="replace"))
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    ]


PRIVATE_PATH = re.compile(r"(?<![\w.])/(?:work|home|root|Users)(?=/\w)")


def test_no_file_mentions_a_path_of_somebodys_machine() -> None:
    found = [f"{name}: {match[0]}" for name, text in _texts() for match in PRIVATE_PATH.finditer(text)]
    assert not found, "\n".join(found)


def test_such_a_path_would_be_seen() -> None:
    assert PRIVATE_PATH.search("see " + "/".join(["", "home", "ada", "model"]))
    assert not PRIVATE_PATH.search("https://example.org/" + "work/model")
