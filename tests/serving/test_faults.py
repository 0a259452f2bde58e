"""Signals and deaths: whatever dies first, requests end in an answer or an error, and no process is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from formats.container import read_plan, write_plan
from gplan.errors import GplanError
from gplan.serving.client import EngineClient
from gplan.serving.metrics import Metrics
from tests.serving.live import MODEL, Live, events, eventually

KEY = "s3cret-key"
LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
ENDLESS = {**LONG, "n": 100}


@dataclass
class Servers:
    """Servers for one test each; started together, because starting is what takes long."""

    drained: Live
    engine_killed: Live
    told_twice: Live
    on_failing_device: Live


@pytest.fixture(scope="module")
def servers(plan_path: Path) -> Iterator[Servers]:
    started = [Live(plan_path, "--api-key", KEY), Live(plan_path)]
    started.append(Live(plan_path, python_path=[Path(__file__).parent / "jumping"]))
    started.append(on_failing_device(plan_path))
    try:
        for live in started:
            live.wait_until_ready()
        yield Servers(*started)
    finally:
        for live in started:
            live.stop()


def on_failing_device(plan_path: Path) -> Live:
    """A server whose engine is `failing_worker`; its device fails for good once `broken` is there. It has copies of
    plan and checkpoint of its own."""
    own = plan_path.parent / "own" / plan_path.name
    shutil.copytree(plan_path.with_suffix(""), own.with_suffix(""))
    shutil.copyfile(plan_path, own)
    main = "import gplan.serving.client as c, cli.main as m; c.WORKER = 'tests.serving.failing_worker'; m.main()"
    return Live(own, program=("-c", main), environment={"GPLAN_TEST_DEVICE_FAILS": str(plan_path.parent / "broken")})


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_api_key_is_asked_for_everywhere_but_health(servers: Servers) -> None:
    live = servers.drained
    assert live.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/server_info", "/nothing"):
        assert live.get(path).status_code == 401
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    for given in ("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \u00e9"):
        headers = {"Authorization": given.encode("latin-1")}
        refused = live.post("/v1/completions", body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        live.client().models.list()
    client = live.client().with_options(api_key=KEY)
    assert client.completions.create(model=MODEL, prompt="hello", max_tokens=1).choices


def test_sigterm_finishes_what_runs_and_takes_no_more(servers: Servers) -> None:
    live = servers.drained
    engine = live.engine_pid()
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=LONG, headers=headers, timeout=60) as response:
        chunks = events(response)
        text = next(chunks)["choices"][0]["text"]
        live.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        health = httpx.get(f"{live.url}/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "stopping")
        refused = httpx.post(f"{live.url}/v1/completions", json=LONG, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert int(refused.headers["retry-after"]) >= 1
        for chunk in chunks:
            text += chunk["choices"][0]["text"]
        assert chunk["choices"][0]["finish_reason"] == "length"
    assert live.process.wait(20) == 0, live.output
    assert eventually(lambda: "finishing 1 answer; told again, the server ends at once" in live.output, 5)
    assert not is_running(engine)


def test_an_engine_that_is_killed_turns_health_red_and_ends_the_server(servers: Servers) -> None:
    live = servers.engine_killed
    engine = live.engine_pid()
    with live.stream("/v1/completions", ENDLESS) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert '"error"' in last
    assert "engine" in last
    health = live.get("/health")
    assert health.status_code == 503
    assert "SIGKILL" in health.json()["error"]["message"]
    assert live.post("/v1/completions", {**LONG, "stream": False}).status_code == 503
    assert live.process.wait(10) == 128 + signal.SIGKILL
    assert "the engine process was killed by SIGKILL" in live.output


def test_a_wall_clock_that_leaps_by_days_changes_nothing(servers: Servers) -> None:
    live = servers.told_twice
    body = {**LONG, "stream": False, "max_tokens": 5}
    asked = [live.post("/v1/completions", body, headers={"X-Request-Timeout": "60"}).json() for _ in range(5)]
    assert max(answer["created"] for answer in asked) - min(answer["created"] for answer in asked) > 86_400
    assert all(answer["choices"] == asked[0]["choices"] for answer in asked)
    late = live.post("/v1/completions", {**body, "n": 100, "max_tokens": 400}, headers={"X-Request-Timeout": "0.5"})
    assert late.status_code == 504
    assert live.metric("gplan_e2e_seconds_sum") < 600
    assert live.metric("gplan_ttft_seconds_sum") >= 0


def test_plan_and_checkpoint_may_go_while_they_are_served(servers: Servers, plan_path: Path) -> None:
    own = plan_path.parent / "own" / plan_path.name
    own.write_bytes(b"no plan")
    for file in own.with_suffix("").iterdir():
        file.write_bytes(file.read_bytes()[:10])
        file.unlink()
    body = {**LONG, "stream": False, "max_tokens": 5}
    asked = (servers.on_failing_device.post("/v1/completions", body) for _ in range(5))
    answer = next(answer for answer in asked if answer.status_code == 200)
    assert answer.json()["choices"] == servers.told_twice.post("/v1/completions", body).json()["choices"]


def test_memory_that_runs_out_while_serving_fails_no_more_than_it_must(servers: Servers) -> None:
    """Of every 61 replays of a segment one finds no memory: those steps are run again, with fewer requests."""
    live = servers.on_failing_device
    body = {**LONG, "stream": False, "max_tokens": 40, "prompt": [[5 + index] * 9 for index in range(12)]}
    expected = servers.told_twice.post("/v1/completions", body).json()["choices"]
    for _ in range(3):
        answer = live.post("/v1/completions", body)
        assert answer.status_code in (200, 500)
        if answer.status_code == 200:
            assert answer.json()["choices"] == expected
        else:
            assert answer.json()["error"]["code"] == "answer_failed"
    assert "out of memory in a" in live.output, "no step was run without memory"
    assert eventually(lambda: live.metric("gplan_kv_pages_used") == 0)
    assert live.get("/health").status_code == 200


def test_a_device_that_fails_ends_the_server_with_its_own_code_and_the_key(servers: Servers, plan_path: Path) -> None:
    live = servers.on_failing_device
    engine = live.engine_pid()
    with live.stream("/v1/completions", ENDLESS) as response:
        lines = response.iter_lines()
        next(lines)
        (plan_path.parent / "broken").touch()
        last = [line for line in lines if line][-1]
    assert '"error"' in last
    health = live.get("/health")
    assert health.status_code == 503, "it is red before the server ends"
    assert "the device failed: CUDA error: an illegal memory access" in health.json()["error"]["message"]
    assert live.process.wait(10) == 6
    assert not is_running(engine)
    live.stop()
    assert re.search(r"the device failed: CUDA error: an illegal .* \(replayed from \w+:\d+\)", live.log[-1])


def test_a_second_signal_ends_at_once(servers: Servers) -> None:
    live = servers.told_twice
    engine = live.engine_pid()
    with live.stream("/v1/completions", ENDLESS) as response:
        lines = response.iter_lines()  # held: one that is dropped hangs up
        next(lines)
        live.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert live.process.poll() is None, "it drains while the stream runs"
        assert eventually(lambda: "finishing 100 answers" in live.output, 5), live.output
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(5) != 0
    assert eventually(lambda: not is_running(engine), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_starting_leaves_nothing_behind(plan_path: Path, number: signal.Signals) -> None:
    """SIGKILL leaves the socket's folder, which nobody can remove then."""
    live = Live(plan_path)
    assert eventually(lambda: len(_children(live.process.pid)) == 1, 60)
    (engine,) = _children(live.process.pid)
    live.process.send_signal(number)
    assert live.process.wait(20) == (130 if number is signal.SIGINT else -number)
    assert not live.url
    assert eventually(lambda: not is_running(engine), 10)
    assert "Traceback" not in live.output
    if number is not signal.SIGKILL:
        assert live.output.splitlines()[-1] == "interrupted"
        assert list(live.temporary.iterdir()) == []


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_no_socket_lies_about_while_serving(server: Live) -> None:
    assert server.get("/health").status_code == 200
    assert list(server.temporary.iterdir()) == []


def test_without_a_temporary_folder_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch, plan_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(plan_path.parent / "none"))
    with pytest.raises(GplanError) as refused:
        EngineClient(Metrics(read_plan(plan_path)))
    assert "TMPDIR" in refused.value.hint


def test_a_port_that_is_taken_is_known_at_once(plan_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = _serve(plan_path, "--checkpoint", str(plan_path.with_suffix("")), "--port", port)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr
    assert "load" not in ended.stderr, "the model was loaded first"


def test_drift_ends_with_its_own_code_and_names_the_field(plan_path: Path, tmp_path: Path) -> None:
    plan = read_plan(plan_path)
    other = msgspec.structs.replace(plan, fingerprint=msgspec.structs.replace(plan.fingerprint, torch="1.0.0"))
    write_plan(other, tmp_path / "other.gplan")
    ended = _serve(tmp_path / "other.gplan", "--checkpoint", str(plan_path.with_suffix("")), "--port", "0")
    assert ended.returncode == 3
    assert "torch" in ended.stderr
    assert "1.0.0" in ended.stderr


def _serve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "cli.main", "serve", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
