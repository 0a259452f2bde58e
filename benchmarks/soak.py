"""A server under a random mix of everything, for as long as one likes, against answers that it gave when it was idle.

    python -m benchmarks.soak PLAN --checkpoint DIR [--seconds 3600] [--clients 12] [--seed 0]

Whole answers and streams, several answers at once, stop strings, log probabilities, seeds, penalties, echoes, chats,
JSON schemas, shared beginnings, prompts of odd lengths, clients that leave, read slowly, come in crowds, ask nonsense
or allow too little time. Every answer must be the one that the same question got alone; everything else must be
refused by name. Prints a JSON line; the exit code is 1 if a token was wrong, a page leaked, memory grew or the server
did not end as it should.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.clients import Choice, RefusedError, ask, chunks, join, make_client, resident_mib
from cli.local_server import LocalServer, local_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MARGIN = 1e-3
"""Greedy questions where the two likeliest tokens come closer than this are not asked: rounding decides them."""
SCORE_TOLERANCE = 1e-3
GROWTH_MIB, GROWTH_SHARE = 32.0, 0.03
# fmt: off
WORDS = ["the", "king", "of", "old", "maps", "ran", "7", "miles", "—", "über", "«née»", "東京", "駅", "🙂",
         "👩\u200d🚀", "def", "f(x):", "return", "x\n\n", "{}", "[]", "\\", "\t", "end"]
# fmt: on

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    """A request whose answer is known."""

    path: str
    body: dict[str, Any]
    answer: list[Choice]


@dataclass
class Tally:
    """What became of requests, by kind and outcome; and what was wrong, the first few in full."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_right: int = 0
    resident: list[list[float]] = field(default_factory=list)

    def note_wrong(self, kind: str, question: Question, found: object) -> None:
        self.outcomes[f"{kind} WRONG"] += 1
        if len(self.wrong) < 5:
            self.wrong.append(f"{kind}: {json.dumps(question.body)}: expected {question.answer}, found {found}")


class Questions:
    """Makes questions up, of lengths that the plan allows."""

    def __init__(self, rng: random.Random, model: str, max_len: int) -> None:
        self._rng, self._model = rng, model
        self._longest = min(max_len // 2, 400)
        self._shared = self._text(self._longest // 4)

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=max(1, words)))

    def make(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        text = self._text(rng.choice([1, 2, 3, 7, 15, 16, 17, 31, 33, rng.randrange(1, self._longest // 4)]))
        if rng.random() < 0.3:
            text = self._shared + text
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": rng.choice([0, 0, 0.7]),
            "seed": rng.randrange(2**31),
            "max_tokens": rng.choice([1, 2, 5, 16, 17, 33, 48]),
            "ignore_eos": rng.random() < 0.7,
        }
        body |= rng.choice(
            [
                {},
                {"n": rng.randrange(2, 5)},
                {"stop": rng.choice(WORDS)},
                {"stop": rng.sample(WORDS, 3), "n": 2},
                {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
                {"logit_bias": {str(rng.randrange(5, 90)): 4.0}},
                {"top_p": 0.8, "top_k": 40},
            ]
        )
        if rng.random() < 0.35:
            return CHAT, self._chat(body, text)
        body["prompt"] = text if rng.random() < 0.8 else [rng.randrange(5, 90) for _ in range(rng.randrange(1, 70))]
        if rng.random() < 0.2:
            body["prompt"] = [text, self._shared]
        return COMPLETIONS, body | rng.choice([{}, {"echo": True}, {"logprobs": rng.randrange(3)}])

    def _chat(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        rng = self._rng
        turns = [{"role": "user", "content": text}]
        if rng.random() < 0.5:
            turns = [
                {"role": "user", "content": self._shared},
                {"role": "assistant", "content": "Yes."},
                *turns,
            ]
        body = body | {"messages": turns}
        if rng.random() < 0.25:
            schema = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
            return body | {"response_format": schema, "max_tokens": 40, "ignore_eos": False, "logit_bias": None}
        return body | rng.choice([{}, {"logprobs": True, "top_logprobs": 2}])


async def known(client: httpx.AsyncClient, questions: Questions, count: int) -> list[Question]:
    """Questions with the answers that they get alone."""
    found: list[Question] = []
    for _ in range(20 * count):
        path, body = questions.make()
        try:
            answer = await ask(client, path, body)
            if body["temperature"] > 0 or "response_format" in body or await _margin(client, path, body) > MARGIN:
                found.append(Question(path, body, answer))
        except RefusedError as error:
            if error.status != 400:
                raise
        if len(found) == count:
            break
    assert len(found) > count // 2, "too few of the questions are answered"
    return found


async def _margin(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> float:
    """How far the likeliest token was ahead of the next, at least, in a greedy answer."""
    if body.keys() & {"frequency_penalty", "logit_bias"}:
        return 1.0  # scores are those before penalties and say nothing of it
    wanted = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2, "echo": False}
    response = (await client.post(path, json=body | wanted)).json()
    margins = [1.0]
    for choice in response["choices"]:
        if path == CHAT:
            tops = [[entry["logprob"] for entry in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
        else:
            tops = [list(top.values()) for top in choice["logprobs"]["top_logprobs"]]
        margins += [max(top) - min(top) for top in tops if len(top) == 2]
    return min(margins)


class Soak:
    """The mix."""

    def __init__(self, client: httpx.AsyncClient, questions: list[Question], rng: random.Random) -> None:
        self._client, self._questions, self._rng = client, questions, rng
        self.tally = Tally()

    async def run(self, seconds: float, num_clients: int, server: LocalServer) -> None:
        until = time.monotonic() + seconds
        watcher = asyncio.create_task(self._watch(server))
        await asyncio.gather(*(self._client_loop(until) for _ in range(num_clients)))
        watcher.cancel()

    async def _watch(self, server: LocalServer) -> None:
        while True:
            self.tally.resident.append(resident_mib(server))
            await asyncio.sleep(2)

    async def _client_loop(self, until: float) -> None:
        kinds = {self._whole: 30, self._stream: 30, self._leave: 12, self._slow: 6, self._hasty: 8, self._nonsense: 6}
        while time.monotonic() < until:
            if self._rng.random() < 0.01:
                await asyncio.gather(*(self._one(self._whole) for _ in range(60)))
            await self._one(self._rng.choices(list(kinds), list(kinds.values()))[0])

    async def _one(self, kind: Any) -> None:
        question, name = self._rng.choice(self._questions), kind.__name__.strip("_")
        try:
            outcome = await kind(question)
        except RefusedError as error:
            expected = {429: "queue_full"}.get(error.status, error.code if error.code == "deadline_exceeded" else "")
            if error.code != expected:
                self.tally.note_wrong(name, question, error)
                return
            outcome = str(error.code)
            if error.status == 429:
                await asyncio.sleep(0.5)
        except Exception as error:
            self.tally.note_wrong(name, question, repr(error))
            return
        self.tally.outcomes[f"{name} {outcome}"] += 1

    def _judge(self, kind: str, question: Question, found: list[Choice]) -> str:
        if not _same(question.answer, found):
            self.tally.note_wrong(kind, question, found)
            return "judged"
        self.tally.num_right += len(found)
        return "right"

    async def _whole(self, question: Question) -> str:
        return self._judge("whole", question, await ask(self._client, question.path, question.body))

    async def _hasty(self, question: Question) -> str:
        seconds = f"{self._rng.choice([0.01, 0.05, 0.3, 2]):g}"
        headers = {"X-Request-Timeout": seconds}
        return self._judge("hasty", question, await ask(self._client, question.path, question.body, **headers))

    async def _stream(self, question: Question, pause: float = 0.0) -> str:
        choices: dict[int, Choice] = {}
        async for event in chunks(self._client, question.path, question.body):
            join(choices, event)
            if pause:
                await asyncio.sleep(pause)
        return self._judge("stream", question, [choices[index] for index in sorted(choices)])

    async def _slow(self, question: Question) -> str:
        return await self._stream(question, pause=0.05)

    async def _leave(self, question: Question) -> str:
        """Goes after a few events, or before any."""
        stays = self._rng.randrange(6)
        if stays == 0:
            work = asyncio.create_task(ask(self._client, question.path, question.body))
            await asyncio.sleep(self._rng.random() * 0.2)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return "left"
        choices: dict[int, Choice] = {}
        stream = chunks(self._client, question.path, question.body)
        async for event in stream:
            join(choices, event)
            stays -= 1
            if not stays:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        begins = all(question.answer[i].text.startswith(choices[i].text) for i in choices)
        if not begins:
            self.tally.note_wrong("leave", question, choices)
        return "left"

    async def _nonsense(self, question: Question) -> str:
        bad = self._rng.choice([{"max_tokens": -1}, {"temperature": "x"}, {"stop": [""]}, {"seed": 1.5}, {"zzz": 1}])
        response = await self._client.post(question.path, json=question.body | bad)
        if response.status_code not in (400, 429):
            self.tally.note_wrong("nonsense", question, response.text)
        return str(response.status_code)


def _same(expected: list[Choice], found: list[Choice]) -> bool:
    if len(expected) != len(found):
        return False
    for one, other in zip(expected, found, strict=True):
        if (one.text, one.finish_reason, len(one.scores)) != (other.text, other.finish_reason, len(other.scores)):
            return False
        if any(abs(a - b) > SCORE_TOLERANCE for a, b in zip(one.scores, other.scores, strict=True)):
            return False
    return True


async def idle_gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Pages, running and waiting requests, once nothing is under way."""
    names = ("gplan_kv_pages_used", "gplan_requests_running", "gplan_requests_waiting")
    values: dict[str, float] = {}
    for _ in range(100):
        text = (await client.get("/metrics")).text
        lines = [line.split() for line in text.splitlines()]
        values = {line[0]: float(line[1]) for line in lines if line[0] in names}
        if not any(values.values()):
            break
        await asyncio.sleep(0.1)
    return values


def growth_mib(resident: list[list[float]]) -> list[float]:
    """By process: the middle of the last quarter over that of the second."""
    quarter = len(resident) // 4
    if not quarter:
        return []
    second, last = resident[quarter : 2 * quarter], resident[-quarter:]
    return [
        statistics.median(a) - statistics.median(b)
        for a, b in zip(zip(*last, strict=True), zip(*second, strict=True), strict=True)
    ]


async def soak(server: LocalServer, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    async with make_client(server) as client:
        info = (await client.get("/server_info")).json()
        questions = Questions(rng, info["model"], info["limits"]["max_len"])
        asked = await known(client, questions, arguments.questions)
        mix = Soak(client, asked, rng)
        await mix.run(arguments.seconds, arguments.clients, server)
        gauges = await idle_gauges(client)
        tally, growth = mix.tally, growth_mib(mix.tally.resident)
    highest = [max(values) for values in zip(*tally.resident, strict=True)]
    allowed = [max(GROWTH_MIB, GROWTH_SHARE * most) for most in highest]
    return {
        "seconds": arguments.seconds,
        "questions": len(asked),
        "requests": sum(tally.outcomes.values()),
        "right_answers": tally.num_right,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "wrong": tally.wrong,
        "left_over": {name: value for name, value in gauges.items() if value},
        "resident_mib": [round(most) for most in highest],
        "growth_mib": [round(value, 1) for value in growth],
        "flat": all(value <= most for value, most in zip(growth, allowed, strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "serve.log"
    with local_server((arguments.plan, "--checkpoint", arguments.checkpoint), log) as server:
        report = asyncio.run(soak(server, arguments))
    # The block checked that the server ended with code 0 when it was told to.
    print(json.dumps(report, ensure_ascii=False))
    return 0 if report["flat"] and not report["wrong"] and not report["left_over"] else 1


if __name__ == "__main__":
    sys.exit(main())
