"""What load tools share: asking a server as many clients do, and reading what its processes take."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cli.local_server import LocalServer

PAGE_BYTES = 4096


@dataclass(slots=True)
class Choice:
    """One answer, whole or joined from its stream. `scores` are log probabilities of its tokens, where asked for."""

    text: str = ""
    finish_reason: str | None = None
    scores: list[float] = field(default_factory=list)


class BrokenStreamError(Exception):
    """A stream that does not end as streams do."""


class RefusedError(Exception):
    """The server answered with an error, perhaps within a stream."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code = status, code


def make_client(server: LocalServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False)


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> list[Choice]:
    """
    Raises:
        RefusedError: with the status and the API's code.
    """
    response = await client.post(path, json=body, headers=headers)
    if response.status_code != 200:
        raise _refused(response.status_code, response.json()["error"])
    return [_choice(choice) for choice in response.json()["choices"]]


async def chunks(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str
) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream; leaving early closes the connection.

    Raises:
        RefusedError, BrokenStreamError: as its name says.
    """
    async with client.stream("POST", path, json=body | {"stream": True}, headers=headers) as response:
        if response.status_code != 200:
            raise _refused(response.status_code, json.loads(await response.aread())["error"])
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _refused(200, event["error"])
                yield event
    raise BrokenStreamError("it ended without [DONE]")


def join(choices: dict[int, Choice], event: dict[str, Any]) -> None:
    """Adds an event of a stream to the answers so far."""
    for part in event["choices"]:
        choice, more = choices.setdefault(part["index"], Choice()), _choice(part)
        choice.text += more.text
        choice.scores += more.scores
        choice.finish_reason = more.finish_reason or choice.finish_reason


def resident_mib(server: LocalServer) -> list[float]:
    """MiB of memory that the server's process and its engine's hold."""
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in _processes(server)]
    return [count * PAGE_BYTES / 2**20 for count in pages]


def cpu_seconds(server: LocalServer) -> dict[str, float]:
    """What this process, the server's and its engine's have computed so far."""
    found = {}
    for name, pid in zip(("generator", "http", "engine"), (os.getpid(), *_processes(server)), strict=True):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _processes(server: LocalServer) -> tuple[int, ...]:
    pid = server.process.pid
    return pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _choice(part: dict[str, Any]) -> Choice:
    message = part.get("message") or part.get("delta") or {}
    logprobs = part.get("logprobs") or {}
    scores = logprobs.get("token_logprobs") or [token["logprob"] for token in logprobs.get("content") or ()]
    text = part.get("text") or message.get("content") or ""
    return Choice(text, part.get("finish_reason"), [score for score in scores if score is not None])


def _refused(status: int, error: dict[str, Any]) -> RefusedError:
    return RefusedError(status, error.get("code"), error.get("message", ""))
