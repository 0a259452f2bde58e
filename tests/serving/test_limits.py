"""Bounds that hold before and beside answers: seats by client, time, what is left unread, heads of requests."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from gplan.core import SamplingParams
from gplan.serving.generation import AnswerGivenUpError, Generation, Job
from gplan.serving.http.connection import MAX_HEAD_BYTES, MAX_UNREAD_BYTES, Connection, give_up_silent_peers
from gplan.serving.http.errors import ApiError
from gplan.serving.http.jobs import MAX_SCORES, check_scores
from gplan.serving.http.seats import CROWD_SHARE, Seat, Seats
from gplan.serving.protocol import Output
from tests.serving.test_generation import VOCABULARY, Hand

# Seats --------------------------------------------------------------------------------------------------------------


def fill(seats: Seats, client: str) -> int:
    """Takes seats one by one until refused; returns how many."""
    before = seats.taken

    def take_all() -> None:
        for _ in range(seats.limit + 1):
            seats.take(1, client)

    with pytest.raises(ApiError) as refusal:
        take_all()
    assert refusal.value.status == 429
    assert 1 <= (refusal.value.retry_after_s or 0) <= 60
    return seats.taken - before


def test_a_crowd_leaves_seats_for_others() -> None:
    seats = Seats(100)
    assert fill(seats, "crowd") == 75
    assert fill(seats, "other") >= 18
    seats.take(1, "newcomer")
    with pytest.raises(ApiError, match="at most 100 at once"):
        seats.take(101, "newcomer")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30), st.booleans()), max_size=60))
def test_seats_add_up(events: list[tuple[str, int, bool]]) -> None:
    """Never more than there are, none lost; who holds none is refused only where there are too few for all."""
    seats, held = Seats(40), list[tuple[Seat, int]]()
    for client, count, leaves in events:
        mine = sum(taken for seat, taken in held if seat.client == client)
        free = seats.limit - seats.taken
        try:
            held.append((seats.take(count, client), count))
        except ApiError:
            assert count > free or (mine and mine + count > CROWD_SHARE * free)
        if leaves and held:
            seat, _ = held.pop(0)
            seat.give_back()
            seat.give_back()
        assert seats.taken == sum(taken for _, taken in held) <= seats.limit
    for seat, _ in held:
        seat.give_back()
    assert seats.taken == 0
    asyncio.run(asyncio.wait_for(seats.wait_until_empty(60), 1))


def test_who_would_be_answered_too_late_is_refused_at_once() -> None:
    """Answers are complete every 20 ms, and a hundred are before the newcomer: it needs two seconds."""

    async def run() -> None:
        seats = Seats(1000)
        waiting = [seats.take(1, "crowd") for _ in range(120)]
        assert seats.take(1, "crowd", time.monotonic() + 0.01), "nothing is known of how long answers take"
        for _ in range(20):
            await asyncio.sleep(0.02)
            waiting.pop().give_back(is_complete=True)
        with pytest.raises(ApiError, match="would be over before") as refusal:
            seats.take(1, "crowd", time.monotonic() + 0.5)
        assert refusal.value.retry_after_s is not None
        assert seats.take(1, "crowd", time.monotonic() + 60)
        assert seats.take(1, "other", time.monotonic() + 0.5), "its turn comes before the crowd's"
        waiting.pop().give_back()
        while waiting:
            waiting.pop().give_back(is_complete=False)

    asyncio.run(run())


# Time, and what is left unread --------------------------------------------------------------------------------------


def generation(hand: Hand, *, logprobs: int | None = None, answers: int = 1, seconds: float = 60) -> Generation:
    job = Job((5,), SamplingParams(max_tokens=100_000, logprobs=logprobs))
    deadline = time.monotonic() + seconds
    begun = Generation(hand, VOCABULARY, [job] * answers, lambda: None, deadline=deadline)
    begun.start()
    return begun


@pytest.mark.parametrize(
    ("outputs", "stage"), [([], "first token"), ([Output("", [65], [], "")], "answer was complete")]
)
def test_when_time_is_over_the_engine_is_told_at_once(outputs: list[Output], stage: str) -> None:
    async def run() -> None:
        hand = Hand()
        begun = generation(hand, answers=2, seconds=0.05)
        for output in outputs:
            for take in hand.takes.values():
                take(output)
        await asyncio.sleep(0.2)
        assert sorted(hand.aborted) == sorted(hand.takes), "it does not wait for the client to read"
        if outputs:
            assert await begun.read(), "what was generated in time is given out"
        with pytest.raises(AnswerGivenUpError, match=f"time was over before its {stage}") as failure:
            await begun.read()
        assert (failure.value.status, failure.value.code) == (504, "deadline_exceeded")
        begun.close()

    asyncio.run(run())


def test_an_answer_that_is_complete_in_time_may_be_read_later() -> None:
    async def run() -> None:
        hand = Hand()
        begun = generation(hand, seconds=0.05)
        for take in hand.takes.values():
            take(Output("", [65, 66], [], "length"))
        await asyncio.sleep(0.2)
        assert len(await begun.read()) == 1
        assert await begun.read() == []
        begun.close()
        assert hand.aborted == []

    asyncio.run(run())


def feed(hand: Hand, tokens: int) -> int:
    """Gives each answer tokens with 20 alternatives until it is given up; returns how many were given."""
    top = [(token, -1.0) for token in range(20)]
    for count in range(tokens):
        if hand.aborted:
            return count
        for take in hand.takes.values():
            take(Output("", [65], [(-1.0, top)], ""))
    return tokens


def test_what_a_client_leaves_unread_is_bounded() -> None:
    async def run(answers: int) -> int:
        hand = Hand()
        begun = generation(hand, logprobs=20, answers=answers)
        given = feed(hand, 20_000)
        assert sorted(hand.aborted) == sorted(hand.takes)
        assert await begun.read(), "what there is may still be read"
        with pytest.raises(AnswerGivenUpError, match="left unread"):
            await begun.read()
        begun.close()
        return given

    assert 3000 < asyncio.run(run(1)) < 10_000
    assert asyncio.run(run(4)) < 2600, "the bound is for the request, however many answers it has"


def test_a_client_that_reads_now_and_then_gets_everything() -> None:
    async def run() -> None:
        hand = Hand()
        begun = generation(hand, logprobs=20)
        for _ in range(8):
            assert feed(hand, 2500) == 2500
            ((_, delta),) = await begun.read()
            assert len(delta.scored) == 2500
        begun.close()

    asyncio.run(run())


def test_more_scores_than_a_process_should_hold_are_refused() -> None:
    def job(tokens: int, logprobs: int | None) -> Job:
        return Job((5,), SamplingParams(max_tokens=tokens, logprobs=logprobs))

    check_scores([job(MAX_SCORES, None)] * 128)
    check_scores([job(MAX_SCORES // 42, 20)] * 2)
    with pytest.raises(ApiError, match="log probabilities"):
        check_scores([job(MAX_SCORES // 42, 20)] * 3)


# Connections --------------------------------------------------------------------------------------------------------

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Hasty(Connection):
    head_within_s = rest_within_s = 0.3


@asynccontextmanager
async def listening(app: App, *, read_within_s: int | None = None) -> AsyncIterator[tuple[str, int]]:
    with socket.socket() as listener:
        if read_within_s is not None:
            give_up_silent_peers(listener, read_within_s)
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, http=Hasty, ws="none", log_config=None, lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (REQUEST + b"\r\n", b"HTTP/1.1 200"),
        (REQUEST + b"X: " + b"y" * (MAX_HEAD_BYTES + 300_000), b"HTTP/1.1 431"),
        (REQUEST + b"X: y\r\n" * MAX_HEAD_BYTES, b"HTTP/1.1 431"),
        (b"GET /" + b"y" * (MAX_HEAD_BYTES + 300_000), b"HTTP/1.1 431"),
        (REQUEST, b"HTTP/1.1 408"),
        (b"", b"HTTP/1.1 408"),
        (REQUEST + b"\r\n" + REQUEST, b"HTTP/1.1 200 OK.*HTTP/1.1 408"),
        (b"\x16\x03\x01 no HTTP", b"HTTP/1.1 400.*application/json"),
    ],
    ids=[
        *("whole", "one long header", "many headers", "long line", "unfinished", "nothing", "second unfinished"),
        "not HTTP",
    ],
)
def test_heads_of_requests_are_bounded(head: bytes, answer: bytes) -> None:
    async def run() -> bytes:
        async with listening(hello) as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head)
            received = b""
            with suppress(ConnectionResetError):  # where more of the head was still on its way
                while part := await asyncio.wait_for(reader.read(65536), 5):
                    received += part
                    if received.endswith(b"hi") and head.endswith(b"\r\n\r\n"):
                        break
            writer.close()
            return received

    received = asyncio.run(run())
    first, *rest = answer.split(b".*")
    assert received.startswith(first) or (not received and b"431" in answer)
    assert all(part in received for part in rest)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the names of the headers, and the body."""
    body, more = b" ".join(name for name, _ in scope["headers"]) + b"|", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def slowly(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(40):
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await asyncio.sleep(0.02)
    await send({"type": "http.response.body", "body": b"end"})


def exchange(app: App, *parts: bytes, until: bytes = b"\0") -> bytes:
    """What the server sends when it is sent `parts`, one after another: until it ends the connection or sends
    `until`."""

    async def run() -> bytes:
        received = b""
        async with listening(app) as address:
            reader, writer = await asyncio.open_connection(*address)

            async def send() -> None:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.05)

            sending = asyncio.create_task(send())
            with suppress(ConnectionResetError):
                while until not in received and (part := await asyncio.wait_for(reader.read(65536), 5)):
                    received += part
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()
        return received

    return asyncio.run(run())


POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("more", [b"GET", b"\0\0\0\0", REQUEST + b"X: " + b"y" * 400_000])
def test_what_a_client_sends_meanwhile_never_becomes_part_of_an_answer(more: bytes) -> None:
    received = exchange(slowly, REQUEST + b"\r\n", more)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"part" in received
    assert received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("cut", [0, 3])
def test_who_asks_for_another_protocol_is_answered_in_this_one(framing: bytes, cut: int) -> None:
    """Clients that prefer HTTP/2 ask for it with their first request, and send its body nevertheless."""
    whole = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQA\r\n" + framing
    first = exchange(echo, whole[: len(whole) - cut], whole[len(whole) - cut :], until=b"|body")
    assert first.endswith(b"|body")
    both = exchange(echo, whole + POST + b"Content-Length: 6\r\n\r\nsecond", until=b"|second")
    assert both.count(b"HTTP/1.1 200") == 2
    websocket = REQUEST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n\r\n"
    assert exchange(hello, websocket, until=b"hi").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_client_that_goes_is_noticed_whatever_it_asked_before_it_went(count: int) -> None:
    """Also where more of its requests wait behind the one that is answered."""
    gone = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async def run() -> None:
        async with listening(waits) as address:
            _, writer = await asyncio.open_connection(*address)
            writer.write((REQUEST + b"\r\n") * count)
            await asyncio.sleep(0.05)
            writer.close()
            await asyncio.wait_for(gone.wait(), 5)

    asyncio.run(run())


def test_line_breaks_keep_no_connection() -> None:
    received = exchange(hello, REQUEST + b"\r\n", *[b"\r\n"] * 20)
    assert received.count(b"HTTP/1.1 200") == received.count(b"HTTP/1.1 408") == 1


def test_headers_behind_a_body_are_not_used_and_bounded() -> None:
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n"
    few = exchange(echo, chunked + b"Authorization: x\r\n\r\n", until=b"|body")
    assert few.endswith(b"\r\n\r\nhost transfer-encoding|body")
    many = exchange(echo, chunked, b"X: " + b"y" * (MAX_HEAD_BYTES + 400_000))
    assert many.startswith(b"HTTP/1.1 431") or not many


def test_a_body_that_nobody_reads_any_more_is_bounded() -> None:
    """In size and time; within that, the connection goes on."""
    head = POST + b"Content-Length: %d\r\n\r\n"
    assert exchange(hello, head % (1 << 30), b"x" * (MAX_UNREAD_BYTES + (1 << 20))).count(b"HTTP/1.1 200") <= 1
    assert exchange(hello, head % 100, *[b"x"] * 50).count(b"HTTP/1.1 200") == 1
    whole = exchange(hello, head % 4, b"bo", b"dy" + REQUEST + b"X-Last: 1\r\n\r\n" + REQUEST + b"X: ")
    assert whole.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("read_within_s", [1, None])
def test_a_client_that_never_reads_is_given_up(read_within_s: int | None) -> None:
    """Without the kernel's help (the control) its connection stays."""
    gone = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        watcher = asyncio.create_task(watch())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await watcher

    async def run() -> bool:
        async with listening(endless, read_within_s=read_within_s) as (host, port):
            with socket.create_connection((host, port)) as client:
                client.sendall(REQUEST + b"\r\n")
                with suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), 4)
            return gone.is_set()

    assert asyncio.run(run()) is (read_within_s is not None)
