"""Who may come in, and how much clients may hold: requests, bytes of bodies, time to send one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from surefoot.engine.models import LoadedModel
from surefoot.server.gate import LIMITS, Limits
from tests.server.serving import CHAT, COMPLETIONS, PATIENCE_S, Call, Served, running, served, until

SHORT = {"prompt": "a", "max_tokens": 2}
LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
ENOUGH = LONG | {"max_tokens": 20}


def error_of(reply: Any) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    error = body["error"]
    assert isinstance(error, dict)
    return error


def test_the_api_key_is_asked_for(target: LoadedModel) -> None:
    with served(target, api_key="sésame", drafter="none") as opened:
        body = {"prompt": "a", "max_tokens": 1}
        wrong: list[dict[str, str | bytes]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "sésame".encode()},
        ]
        for header in wrong:
            reply = asyncio.run(opened.post(COMPLETIONS, body, **header))
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        assert asyncio.run(opened.get("/v1/models")).status_code == 401
        assert asyncio.run(opened.get("/health")).status_code == 200
        right = {"authorization": "Bearer sésame".encode()}
        assert asyncio.run(opened.post(COMPLETIONS, body, **right)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(target: LoadedModel, chunked: bool) -> None:
    size = LIMITS.body_bytes // 8
    parts = [b" " * size] * 9 if chunked else [b" " * (LIMITS.body_bytes + 1)]
    with served(target, drafter="none") as opened:
        reply = asyncio.run(send(opened, parts, chunked))
        assert (reply.status_code, error_of(reply)["code"]) == (413, "request_too_large")
        assert opened.text("a", max_tokens=1) == opened.text("a", max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_more_requests_than_may_be_open_are_refused_in_json(
    target: LoadedModel, stream: bool
) -> None:
    with served(target, limits=Limits(requests=2), drafter="none") as opened:

        async def main() -> None:
            opened.engine.hold()
            body = ENOUGH | {"stream": stream}
            held = [asyncio.ensure_future(opened.post(COMPLETIONS, body)) for _ in range(2)]
            await until(lambda: opened.open_requests == 2)
            for path, late in ((COMPLETIONS, SHORT), (CHAT, {})):
                reply = await opened.post(path, late)
                assert reply.status_code == 503
                assert reply.headers["retry-after"] == "1"
                error = error_of(reply)
                assert (error["type"], error["code"]) == ("service_unavailable", "overloaded")
                assert "2 requests are open" in error["message"]
            assert (await opened.get("/health")).status_code == 200
            opened.engine.release()
            for reply in await asyncio.gather(*held):
                assert reply.status_code == 200
            assert (await opened.post(COMPLETIONS, SHORT)).status_code == 200

        asyncio.run(main())
        opened.assert_at_rest()


def test_places_come_back_whatever_the_end(target: LoadedModel) -> None:
    with served(target, limits=Limits(requests=1, total_bytes=400), drafter="none") as opened:

        async def main() -> None:
            for _ in range(3):
                assert (await opened.post(COMPLETIONS, SHORT | {"bogus": 1})).status_code == 400
                assert (await opened.post("/v1/nothing", SHORT)).status_code == 404
                call = Call(COMPLETIONS, LONG | {"stream": True})
                task = asyncio.ensure_future(call.run(opened.app))
                await call.first_event()
                call.leave()
                await asyncio.wait_for(task, PATIENCE_S)
                assert (await opened.post(COMPLETIONS, SHORT)).status_code == 200
            await until(lambda: opened.engine.idle)

        asyncio.run(main())
        opened.assert_at_rest()


def test_the_bodies_of_all_requests_together_are_bounded(target: LoadedModel) -> None:
    limits = Limits(body_bytes=1000, total_bytes=1500)
    with served(target, limits=limits, drafter="none") as opened:

        async def main() -> None:
            opened.engine.hold()
            wide = json.dumps(ENOUGH | {"user": "x" * 800}).encode()
            first = asyncio.ensure_future(send(opened, [wide]))
            await until(lambda: opened.gate._load.total_bytes == len(wide))
            # One that fits is still served, and so is one as large when the first is through.
            second = asyncio.ensure_future(send(opened, [json.dumps(SHORT).encode()]))
            reply = await send(opened, [wide[:500], wide[500:]])
            assert reply.status_code == 503
            error = error_of(reply)
            assert error["code"] == "overloaded"
            assert "1,500 bytes" in error["message"]
            opened.engine.release()
            assert [(await task).status_code for task in (first, second)] == [200, 200]
            assert (await send(opened, [wide])).status_code == 200

        asyncio.run(main())


async def send(opened: Served, parts: Sequence[bytes], chunked: bool = True) -> Any:
    """A body in pieces, whose length is not known before; or all at once."""

    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async with opened.client() as client:
        headers = {"content-type": "application/json"}
        content: Any = chunks() if chunked else b"".join(parts)
        return await client.post(COMPLETIONS, content=content, headers=headers)


QUICK = Limits(requests=2, body_seconds=0.3)


def by_hand(address: tuple[str, int], sent: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        # In one piece: the server may have closed the connection before a second one goes out.
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
        return received


def head(length: int, more: str = "") -> bytes:
    return (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{more}\r\n"
    ).encode()


def test_a_client_that_does_not_send_its_body_is_left(target: LoadedModel) -> None:
    with running(target, limits=QUICK, drafter="none") as run:
        host, port = run.url.removeprefix("http://").split(":")
        for part in (b"", b'{"prompt": '):
            answer = by_hand((host, int(port)), head(100) + part)
            start, _, body = answer.partition(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in start.lower()
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
            assert "0.3 s" in error["message"]
        assert run.served.text("a", max_tokens=2) is not None


def test_slow_bodies_do_not_keep_others_out(target: LoadedModel) -> None:
    with running(target, limits=QUICK, drafter="none") as run:
        host, port = run.url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(2)]
        try:
            for connection in slow:
                connection.sendall(head(100, "Expect: 100-continue\r\n"))
                # The server asks for the body, so the request has its place.
                assert connection.recv(100).startswith(b"HTTP/1.1 100 ")

            async def served_at_last() -> None:
                async with asyncio.timeout(PATIENCE_S):
                    while (await run.served.post(COMPLETIONS, SHORT)).status_code != 200:
                        await asyncio.sleep(0.02)

            asyncio.run(served_at_last())
        finally:
            for connection in slow:
                connection.close()


def test_an_answer_may_take_longer_than_a_body(target: LoadedModel) -> None:
    with served(target, limits=replace(QUICK, requests=3), drafter="none") as opened:

        async def never() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        async def main() -> None:
            opened.engine.hold()
            posts: list[Mapping[str, object]] = [SHORT, SHORT | {"stream": True}]
            tasks = [asyncio.ensure_future(opened.post(COMPLETIONS, body)) for body in posts]
            await until(lambda: opened.open_requests == 2)
            # When this one's time is up, that of those before it is up too.
            async with opened.client() as client:
                headers = {"content-type": "application/json"}
                reply = await client.post(COMPLETIONS, content=never(), headers=headers)
            assert error_of(reply)["code"] == "request_timeout"
            opened.engine.release()
            for task in tasks:
                assert (await task).status_code == 200

        asyncio.run(main())


def test_rendering_and_tokenising_count_as_waiting(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not in line yet are bounded like those that are."""
    go_on = threading.Event()
    begun: list[object] = []

    def blocked(render: Callable[..., Any]) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            begun.append(arguments)
            assert go_on.wait(PATIENCE_S)
            return render(*arguments)

        return work

    with served(target, drafter="none", max_waiting=3) as opened:
        front = opened.llm._front
        monkeypatch.setattr(front, "render_chat", blocked(front.render_chat))

        async def main() -> None:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            tasks = [asyncio.ensure_future(opened.post(CHAT, body)) for _ in range(5)]
            try:
                # Each of the five is rendered, or was refused.
                await until(lambda: len(begun) + sum(task.done() for task in tasks) == 5)
                done = [task for task in tasks if task.done()]
            finally:
                go_on.set()
            assert [task.result().status_code for task in done] == [429, 429]
            replies = [reply.status_code for reply in await asyncio.gather(*tasks)]
            assert sorted(replies) == [200, 200, 200, 429, 429]
            assert (await opened.post(CHAT, body | {"n": 4})).status_code == 400
            assert (await opened.post(CHAT, body)).status_code == 200

        asyncio.run(main())
        opened.assert_at_rest()
