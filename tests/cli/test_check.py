"""`gplan check` against this machine and a real checkpoint folder: what differs, how much it matters, exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from cli.check import CheckView
from cli.quickstart_random import write_random_llama
from formats.container import write_plan
from formats.plan import Plan
from gplan.graphs.machine import read_fingerprint
from gplan.models import read_headers, read_spec
from tests.cli.command import gplan
from tests.formats.plans import CUDA, make_plan

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_llama(folder)
    return folder


@pytest.fixture(scope="module")
def planned(checkpoint: Path) -> Plan:
    """A plan for this machine and that checkpoint."""
    headers = read_headers(str(checkpoint))
    identity = headers.identity(read_spec(str(checkpoint), headers))
    return make_plan(model=identity, fingerprint=read_fingerprint("cpu", "reference"), memory_bytes=64 << 20)


def test_where_nothing_differs_serve_is_next(planned: Plan, checkpoint: Path, tmp_path: Path) -> None:
    write_plan(planned, tmp_path / "p.gplan")
    done = gplan("check", tmp_path / "p.gplan", "--checkpoint", checkpoint)
    assert done.returncode == 0, done.stderr
    assert "as planned" in done.stdout
    assert f"next: gplan serve {tmp_path / 'p.gplan'} --checkpoint {checkpoint}" in done.stderr


def test_drift_is_refused_with_3_naming_field_planned_and_found(
    planned: Plan, checkpoint: Path, tmp_path: Path
) -> None:
    here = planned.fingerprint
    drifted = replace(planned, fingerprint=replace(here, torch="2.9.1", num_threads=here.num_threads + 1))
    write_plan(drifted, tmp_path / "p.gplan")
    done = gplan("check", tmp_path / "p.gplan", "--checkpoint", checkpoint)
    assert done.returncode == 3
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["torch", "2.9.1", here.torch, "must", "match", "refused"] in rows
    assert [row[-2:] for row in rows if row[0] == "num_threads"] == [["goes", "on"]]
    assert done.stderr.startswith("error: ")
    assert "torch: planned for 2.9.1" in done.stderr
    assert "--accept-drift" in done.stderr


def test_drift_that_the_user_names_is_accepted(planned: Plan, checkpoint: Path, tmp_path: Path) -> None:
    write_plan(replace(planned, fingerprint=replace(planned.fingerprint, torch="2.9.1")), tmp_path / "p.gplan")
    arguments = ("check", tmp_path / "p.gplan", "--checkpoint", checkpoint, "--accept-drift", "torch", "--json")
    done = gplan(*arguments)
    assert done.returncode == 0, done.stderr
    view = msgspec.json.decode(done.stdout, type=CheckView)
    assert (view.accepted, view.refused) == (("torch",), ())


def test_another_checkpoint_is_refused_whatever_is_accepted(planned: Plan, checkpoint: Path, tmp_path: Path) -> None:
    write_plan(replace(planned, model=replace(planned.model, config_digest="0" * 64)), tmp_path / "p.gplan")
    done = gplan("check", tmp_path / "p.gplan", "--checkpoint", checkpoint)
    assert done.returncode == 3
    assert "config_digest" in done.stdout
    accepted = gplan("check", tmp_path / "p.gplan", "--checkpoint", checkpoint, "--accept-drift", "config_digest")
    assert accepted.returncode == 1
    assert "never accepted" in accepted.stderr


def test_a_checkpoint_that_is_not_there_is_an_error(planned: Plan, tmp_path: Path) -> None:
    write_plan(planned, tmp_path / "p.gplan")
    done = gplan("check", tmp_path / "p.gplan", "--checkpoint", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "hint: " in done.stderr


def test_an_edited_chat_template_is_refused_until_it_is_accepted(
    planned: Plan, checkpoint: Path, tmp_path: Path
) -> None:
    write_plan(planned, tmp_path / "p.gplan")
    edited = Path(shutil.copytree(checkpoint, tmp_path / "edited"))
    (edited / "chat_template.jinja").write_text("{{ messages[0].content }}")
    arguments = ("check", tmp_path / "p.gplan", "--checkpoint", edited)
    refused = gplan(*arguments)
    assert refused.returncode == 3
    assert "chat_template_digest" in refused.stdout
    assert "conversations become other prompts" in refused.stderr
    assert gplan(*arguments, "--accept-drift", "chat_template_digest").returncode == 0


def test_a_tokenizer_that_cannot_be_used_is_found_here(planned: Plan, checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{}")
    headers = read_headers(str(broken))
    identity = headers.identity(read_spec(str(broken), headers))
    write_plan(replace(planned, model=identity), tmp_path / "p.gplan")
    done = gplan("check", tmp_path / "p.gplan", "--checkpoint", broken, "--json")
    assert done.returncode == 1
    assert "no usable tokenizer" in done.stderr
    assert "no usable tokenizer" in msgspec.json.decode(done.stdout, type=CheckView).tokenizer_problem


def test_a_plan_for_a_gpu_where_there_is_none(planned: Plan, checkpoint: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    write_plan(replace(planned, fingerprint=CUDA, kernels="flashinfer", dtype="bfloat16"), tmp_path / "p.gplan")
    done = gplan("check", tmp_path / "p.gplan", "--checkpoint", checkpoint)
    assert done.returncode == 3
    assert "device: planned for cuda, found cpu" in done.stderr
