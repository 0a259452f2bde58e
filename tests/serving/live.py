"""Real servers for tests: a tiny checkpoint, its plan, and `gplan serve` as a process on a free port."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from formats.container import write_plan
from formats.measurements import Costs
from gplan.graphs.machine import read_fingerprint
from gplan.models import read_headers, read_spec
from tests.checkpoints import make_checkpoint
from tests.formats.plans import make_plan

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
MAX_LEN, MAX_BATCH = 512, 4


def make_served(folder: Path) -> Path:
    """Writes `tiny/` (a checkpoint) and `tiny.gplan` into `folder`; returns the plan's path."""
    checkpoint = str(make_checkpoint(folder / MODEL))
    headers = read_headers(checkpoint)
    plan = make_plan(
        max_batch=MAX_BATCH,
        max_len=MAX_LEN,
        chunk=64,
        prefill_sizes=(16, 64),
        fingerprint=read_fingerprint("cpu", "reference"),
        model=headers.identity(read_spec(checkpoint, headers)),
        dtype="float32",
    )
    decode = msgspec.structs.replace(plan.decode, costs=Costs(context=MAX_LEN))
    path = folder / f"{MODEL}.gplan"
    write_plan(msgspec.structs.replace(plan, decode=decode), path)
    return path


class Live:
    """`gplan serve` as a process. Use as a context, or `stop` it.

    Args:
        program: what Python runs; the command line by default.
        environment: variables beside its own.
        python_path: folders from which Python imports, beside the sources.

    Attributes:
        temporary: its folder for temporary files, its own.
    """

    def __init__(
        self,
        plan: Path,
        *arguments: str,
        program: Sequence[str] = ("-m", "cli.main"),
        environment: Mapping[str, str] | None = None,
        python_path: Sequence[Path] = (),
    ) -> None:
        command = [sys.executable, *program, "serve", str(plan), "--port", "0", *arguments]
        command += ["--checkpoint", str(plan.with_suffix(""))]
        self.temporary = Path(tempfile.mkdtemp(dir=plan.parent))
        variables = {
            **os.environ,
            **(environment or {}),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, python_path)]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
        }
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables, text=True, cwd=plan.parent
        )
        self.log: list[str] = []
        self.url = ""
        self._http = httpx.Client(timeout=60)
        self._has_url = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip())
            found = re.search(r"http://[\d.]+:\d+", line)
            if found and not self.url:
                self.url = found[0]
                self._has_url.set()
        self._has_url.set()

    def wait_until_ready(self) -> Live:
        assert self._has_url.wait(300), "\n".join(self.log)
        assert self.url, "it ended before it was ready:\n" + "\n".join(self.log)
        return self

    def __enter__(self) -> Live:
        return self.wait_until_ready()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Ends it, by force where it must, and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self._reader.join(5)
        self._http.close()
        return code

    @property
    def output(self) -> str:
        return "\n".join(self.log)

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self._http.post(self.url + path, **options)

    def stream(self, path: str, body: Any) -> AbstractContextManager[httpx.Response]:
        return self._http.stream("POST", self.url + path, json=body)

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels; 0 for labels that were not met yet."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        families = [family for family in families if name.startswith(family.name)]
        assert families, f"no metric {name}"
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def engine_pid(self) -> int:
        """The process that the server started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in path.read_text().split()]
        assert len(children) == 1, children
        return children[0]


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Server-sent events of a streamed response; checks that it ends with [DONE] and nothing after it."""
    done = False
    for line in response.iter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        assert not done, "an event after [DONE]"
        if line == "data: [DONE]":
            done = True
        else:
            yield json.loads(line[6:])
    assert done, "the stream ended without [DONE]"


def post_head(path: str, length: int, *more: str) -> bytes:
    """The head of a request whose body follows."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
