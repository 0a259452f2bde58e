"""The rest of the API, metrics, and what happens when clients leave or come in crowds."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.checkpoints import make_tokenizer
from tests.serving.live import MAX_BATCH, MAX_LEN, MODEL, Live, events, eventually, post_head

LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
LEAVING = int(os.environ.get("GPLAN_TEST_CLIENTS", "120"))
"""How many clients vanish; a thousand take a few minutes."""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def test_models(server: Live) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("text", ["hello", "Grüße, 你好 😀", "<|im_end|> as text"])
def test_tokenize_and_back(server: Live, text: str) -> None:
    answer = server.post("/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == make_tokenizer().encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_LEN)
    back = server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
    assert back == text.replace("<|im_end|>", "")


def test_health_and_request_ids(server: Live) -> None:
    answer = server.get("/health")
    assert answer.json() == {"status": "ok"}
    assert answer.headers["x-request-id"] != server.get("/health").headers["x-request-id"]
    assert server.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.get("/health", headers={"x-request-id": "no spaces"}).headers["x-request-id"] != "no spaces"


def test_server_info(server: Live) -> None:
    info = server.get("/server_info").json()
    assert info["plan_id"]
    assert info["decode"]["ladder"] == [1, 2, 4]
    assert info["prefill"]["ladder"] == [16, 64]
    ledger = {row["name"]: row for row in info["ledger"]}
    assert ledger["kv_pool"]["actual_bytes"] > 0
    assert info["accepted_drift"] == []


def test_metrics_say_what_ran(server: Live) -> None:
    def read() -> dict[str, float]:
        return {
            "prompt": server.metric("gplan_prompt_tokens_total"),
            "output": server.metric("gplan_output_tokens_total"),
            "decodes": server.metric("gplan_steps_total", phase="decode", outcome="replayed", bucket="1"),
            "prefills": server.metric("gplan_steps_total", phase="prefill", outcome="replayed", bucket="64"),
            "padding": server.metric("gplan_padding_rows_total", phase="prefill"),
            "padding_s": server.metric("gplan_padding_seconds_total", phase="prefill"),
            "ttft": server.metric("gplan_ttft_seconds_count"),
            "gaps": server.metric("gplan_inter_token_seconds_count"),
            "e2e": server.metric("gplan_e2e_seconds_count"),
        }

    before = read()
    server.post("/v1/completions", {**LONG, "prompt": [77, *range(20, 39)], "max_tokens": 12})
    after = read()
    changes = {name: after[name] - before[name] for name in before if name != "padding_s"}
    assert changes == {
        "prompt": 20, "output": 12, "decodes": 11, "prefills": 1, "padding": 44, "ttft": 1, "gaps": 11, "e2e": 1,
    }  # fmt: skip
    assert after["padding_s"] > before["padding_s"]
    assert server.metric("gplan_kv_pages") == MAX_BATCH * MAX_LEN / 16


def test_drift_is_watched_while_serving(server: Live) -> None:
    """Real replays are timed now and then, and memory was compared with the plan at the start."""
    for _ in range(2):
        server.post("/v1/completions", {**LONG, "prompt": [5, 6]})
    assert server.metric("gplan_replay_time_ratio", key="decode:1") > 0.1
    assert 'gplan_ledger_overrun_bytes{row="kv_pool"}' in server.get("/metrics").text


def pages_used(server: Live) -> float:
    return server.metric("gplan_kv_pages_used")


def test_a_client_that_leaves_a_stream_frees_its_pages(server: Live) -> None:
    before = server.metric("gplan_output_tokens_total")
    with server.stream("/v1/completions", {**LONG, "n": 60, "stream": True}) as response:
        next(response.iter_lines())
    assert eventually(lambda: pages_used(server) == 0)
    assert server.metric("gplan_output_tokens_total") - before < 15_000, "it was generated to its end"


def test_a_client_that_leaves_before_its_answer_frees_its_pages(server: Live) -> None:
    before = server.metric("gplan_output_tokens_total")
    body = json.dumps({**LONG, "n": 60}).encode()
    with server.connect() as connection:
        connection.sendall(post_head("/v1/completions", len(body)) + body)
        assert eventually(lambda: pages_used(server) > 0)
    assert eventually(lambda: pages_used(server) == 0)
    assert server.metric("gplan_output_tokens_total") - before < 15_000, "it was generated to its end"


def test_many_clients_that_vanish_leave_nothing_behind(server: Live) -> None:
    """Before an answer, as soon as their stream begins, or after its first event; those who are told to
    come again do."""
    before = server.metric("gplan_requests_total", status="200")

    async def vanish(index: int) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        stays_for = (b"", b"HTTP/1.1 200", b"data: ")[index % 3]
        body = json.dumps({**LONG, "stream": index % 3 > 0, "n": 1 + index % 2}).encode()
        for attempt in range(200):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(post_head("/v1/completions", len(body)) + body)
            received = b""
            while stays_for not in received and b"HTTP/1.1 429" not in received:
                received += await reader.read(65536)
            writer.transport.abort()
            if b"HTTP/1.1 429" not in received:
                return
            await asyncio.sleep(0.05 + 0.001 * attempt)
        pytest.fail("it was never let in")

    async def all_of_them() -> None:
        await asyncio.gather(*(vanish(index) for index in range(LEAVING)))

    asyncio.run(all_of_them())
    assert server.metric("gplan_requests_total", status="200") - before >= LEAVING // 2
    assert eventually(lambda: pages_used(server) == 0 and server.metric("gplan_requests_waiting") == 0)
    assert server.post("/v1/completions", {**LONG, "max_tokens": 3}).status_code == 200


def test_a_slow_reader_keeps_no_pages_and_gets_everything(server: Live) -> None:
    """It reads nothing until its pages are free."""
    question = {**CHAT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", question).json()["choices"][0]["message"]["content"]
    body = json.dumps({**question, "n": MAX_BATCH, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        connection.settimeout(60)
        connection.sendall(post_head("/v1/chat/completions", len(body), "Connection: close") + body)
        assert eventually(lambda: pages_used(server) > 0)
        assert eventually(lambda: pages_used(server) == 0, 30), "its pages were kept until it read"
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    texts = [""] * MAX_BATCH
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [whole] * MAX_BATCH


def test_a_full_queue_says_when_to_come_back(server: Live) -> None:
    """The server takes 256 answers at once; more are refused at once, and those taken are all answered."""
    crowd = {**LONG, "max_tokens": 4, "prompt": ["hello"] * 100}

    def ask(_: int) -> httpx.Response:
        return server.post("/v1/completions", crowd)

    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(ask, range(5)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2
    for answer in answers:
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["code"] == "queue_full"
        else:
            assert len(answer.json()["choices"]) == 100
    assert server.post("/v1/completions", {**LONG, "max_tokens": 3}).status_code == 200


def test_reading_a_long_prompt_does_not_hold_up_a_stream(server: Live) -> None:
    """A prompt of a megabyte is tokenised (and then refused) while a stream goes on."""
    refusal: list[int] = []

    def send_long_prompt() -> None:
        body = {**LONG, "prompt": "the quick brown fox " * 50_000}
        refusal.append(server.post("/v1/completions", body).status_code)

    with server.stream("/v1/completions", {**LONG, "stream": True}) as response:
        thread = threading.Thread(target=send_long_prompt)
        gaps, last = [], None
        for number, _ in enumerate(events(response)):
            if number == 20:
                thread.start()
            now = time.monotonic()
            gaps.append(now - (last or now))
            last = now
    thread.join()
    assert refusal == [400]
    assert max(gaps) < 1.0
