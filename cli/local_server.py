"""A `gplan serve` of our own: started as a process, asked over HTTP as anybody would, stopped when done with."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gplan.errors import GplanError

HOST = "127.0.0.1"
READY_WITHIN_S = 300.0
STOP_WITHIN_S = 30.0
ANSWER_WITHIN_S = 300.0


class LocalServer:
    """A running server on this machine's loopback address.

    Args:
        process: the `gplan serve` that was started.
        port: where it will listen.
        log: the file that its talk goes to.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://{HOST}:{port}"
        self._log = log
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy

    def wait_until_ready(self) -> None:
        """
        Raises:
            GplanError: it ended, or is not ready in time; with the last lines that it said.
        """
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise GplanError(f"the server ended with code {self.process.returncode}:\n{self._last_words()}")
            try:
                with self._opener.open(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise GplanError(f"the server was not ready within {READY_WITHIN_S:.0f} s:\n{self._last_words()}")

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/v1/chat/completions`, whole."""
        with self._post("/v1/chat/completions", body) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def ask_streaming(self, body: dict[str, Any]) -> Iterator[str]:
        """The pieces of text of an answer, as they arrive."""
        with self._post("/v1/chat/completions", body | {"stream": True}) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield from (choice["delta"].get("content") or "" for choice in json.loads(data)["choices"])

    def model_name(self) -> str:
        """The name of the one model that is served."""
        with self._opener.open(f"{self.url}/v1/models", timeout=30) as response:
            name: str = json.load(response)["data"][0]["id"]
            return name

    def metrics(self) -> tuple[Metric, ...]:
        with self._opener.open(f"{self.url}/metrics", timeout=30) as response:
            return tuple(text_string_to_metric_families(response.read().decode()))

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=ANSWER_WITHIN_S)
        except urllib.error.HTTPError as error:
            raise GplanError(f"the server answered {error.code}: {error.read(2000).decode(errors='replace')}") from None
        return response

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-20:])


@contextmanager
def local_server(arguments: Sequence[str], log: Path) -> Iterator[LocalServer]:
    """`gplan serve ARGUMENTS` on a free port, ready; stopped, and its end checked, when the block is left.

    Raises:
        GplanError: it did not become ready, or did not end well when it was told to.
    """
    port = free_port()
    command, environment = gplan_command("serve", *arguments, "--host", HOST, "--port", str(port))
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    server = LocalServer(process, port, log)
    try:
        server.wait_until_ready()
        yield server
    except BaseException:
        _end(process)
        raise
    if (code := _end(process)) != 0:
        raise GplanError(f"the server ended with code {code} when it was told to stop")


def gplan_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of this very gplan: installed or not, whatever lies in the current folder."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return [sys.executable, "-P", "-m", "cli.entry", *arguments], os.environ | {"PYTHONPATH": path}


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> int:
    """Tells the process to stop and waits for it; one that does not listen is killed. Returns its exit code."""
    process.terminate()
    try:
        return process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
