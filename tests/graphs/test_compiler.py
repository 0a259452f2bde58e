"""The folder of compiled code and the compiler: what is wrong with them is said before anything is loaded."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from gplan.core import Phase, ShapeKey
from gplan.errors import CaptureError, GplanError
from gplan.graphs.assembly import bases_first
from gplan.graphs.compiler import cache_folder, compiling, require_cache, require_compiler
from gplan.planning.options import PlanOptions
from gplan.planning.planner import make_plan
from gplan.planning.profiler import Patience
from gplan.serving.preflight import inspect
from tests.checkpoints import make_checkpoint


@pytest.fixture
def unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that cannot be made, since a file is in its way; not even by root."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def test_a_folder_that_can_be_written_to_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "b"))
    require_cache()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_empty_variable_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "gplan" / "compiled"


def test_a_folder_that_cannot_be_used_is_named(unusable: Path) -> None:
    with pytest.raises(GplanError, match="Not a directory") as raised:
        require_cache()
    assert str(unusable) in raised.value.message
    assert "TORCHINDUCTOR_CACHE_DIR" in raised.value.hint


def test_a_folder_that_fills_up_while_compiling_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(GplanError, match="No space left") as raised, compiling():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(tmp_path) in raised.value.message
    with pytest.raises(CaptureError, match="ours"), compiling():
        raise CaptureError("an error of ours stays what it is")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(GplanError, match="nothing here to compile with"):
        require_compiler("cpu")


def test_planning_says_so_before_it_measures(unusable: Path, tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "model"))
    options = PlanOptions(checkpoint=checkpoint, device="cpu", max_batch=2, max_len=64, chunk=8, try_compile=True)
    with pytest.raises(GplanError, match="compiled code cannot be made"):
        make_plan(options, lambda *_: pytest.fail("something was measured"), Patience(3, 3, 0))


def test_a_plan_with_compiled_graphs_asks_for_both_before_it_is_served(unusable: Path, tmp_path: Path) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "model"))
    sizes = {"max_batch": 2, "max_len": 64, "chunk": 8, "memory": "1GiB"}
    options = PlanOptions(checkpoint=checkpoint, device="cpu", decode_backend="full", **sizes)
    plan = make_plan(options, lambda *_: None, Patience(3, 3, 0))
    assert not inspect(plan, checkpoint).refused
    compiled = tuple(msgspec.structs.replace(bucket, variant="compiled") for bucket in plan.decode.ladder[:1])
    decode = msgspec.structs.replace(plan.decode, ladder=compiled + plan.decode.ladder[1:])
    with pytest.raises(GplanError, match="compiled code cannot be made"):
        inspect(msgspec.structs.replace(plan, decode=decode), checkpoint)


def test_a_bucket_is_compiled_for_its_base() -> None:
    keys = [ShapeKey(Phase.DECODE, size, variant=name) for size in (4, 1) for name in ("compiled+greedy", "compiled")]
    assert [str(key) for key in bases_first(keys)] == [
        "decode:4:compiled",
        "decode:1:compiled",
        "decode:4:compiled+greedy",
        "decode:1:compiled+greedy",
    ]
