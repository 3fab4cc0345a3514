"""Small engines behind the server: stepped at will, called in memory or over a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from httpx2 import ASGITransport, AsyncClient, Response

from surefoot.async_llm import AsyncLLM
from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.engine.rows import Emission
from surefoot.server.app import make_app
from surefoot.server.gate import LIMITS, Gate, Limits
from surefoot.server.run import Server, address_of, bind

NAME = "tiny"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

PATIENCE_S = 60
"""A busy machine may take its time; what waits longer than this hangs."""


class SteppedEngine(Engine):
    """Counts its steps; each of them waits for leave while `held`, and is `asking` for it."""

    steps = 0
    held = False
    asking = False

    def hold(self) -> None:
        self._leave = threading.Semaphore(0)
        self.held = True

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._leave.release()

    def release(self) -> None:
        self.held = False
        self._leave.release(1 << 20)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold it, and let it go whatever happens: later tests may share it."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def held_after(self, steps: int) -> bool:
        """Whether it has made so many steps, all that it had leave for, and asks for another."""
        return self.steps == steps and self.asking

    def step(self) -> list[Emission]:
        if self.held:
            self.asking = True
            self._leave.acquire()
            self.asking = False
        emissions = super().step()
        self.steps += 1
        return emissions


def config_of(**settings: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "device": "cpu",
        "memory": 1 << 23,
        "max_rows": 4,
        "page_tokens": 8,
        "draft_tokens": 4,  # a fixed depth needs no measurement of step costs
    }
    return {**usual, **settings}


def engine_of(target: LoadedModel, **settings: object) -> SteppedEngine:
    return SteppedEngine(target, make_config(**config_of(**settings)))


@dataclass
class Served:
    """A model that is served, in memory."""

    engine: SteppedEngine
    llm: AsyncLLM
    app: FastAPI

    async def post(self, path: str, body: object, **headers: str | bytes) -> Response:
        given: Any = headers
        async with self.client() as client:
            return await client.post(path, json=body, headers=given)

    async def get(self, path: str) -> Response:
        async with self.client() as client:
            return await client.get(path)

    @property
    def gate(self) -> Gate:
        """What stands before the routes."""
        if self.app.middleware_stack is None:
            self.app.middleware_stack = self.app.build_middleware_stack()
        layer: Any = self.app.middleware_stack
        while not isinstance(layer, Gate):
            layer = layer.app
        return layer

    @property
    def open_requests(self) -> int:
        """Requests that were let in and are not answered to their end."""
        return self.gate._load.requests

    @property
    def in_the_house(self) -> int:
        """Requests that the engine has taken in and not ended."""
        return self.engine.usage.running + self.engine.usage.waiting

    def client(self) -> AsyncClient:
        transport = ASGITransport(app=self.app, raise_app_exceptions=False)
        return AsyncClient(transport=transport, base_url="http://server")

    def text(self, prompt: object, **body: object) -> str:
        """What the server makes of a prompt."""
        reply = asyncio.run(self.post(COMPLETIONS, {"prompt": prompt, **body}))
        assert reply.status_code == 200, reply.text
        text = reply.json()["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    def assert_at_rest(self) -> None:
        """Nothing runs, waits or is held, and the books balance."""
        ledger, usage = self.engine.parts.ledger, self.engine.usage
        ledger.audit()
        assert self.engine.idle
        assert (usage.running, usage.waiting, usage.held_pages) == (0, 0, 0)
        assert usage.free_pages + usage.cached_pages == ledger.limits.pages


@contextmanager
def served(
    target: LoadedModel,
    api_key: str | None = None,
    limits: Limits = LIMITS,
    **settings: object,
) -> Iterator[Served]:
    engine = engine_of(target, **settings)
    llm = AsyncLLM(engine)
    try:
        yield Served(engine, llm, make_app(llm, NAME, api_key, limits))
    finally:
        if engine.held:
            engine.release()
        llm.close()


@dataclass
class Running:
    """A served model on a socket, in a thread of its own."""

    served: Served
    url: str
    server: Server
    thread: threading.Thread

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextmanager
def running(
    target: LoadedModel,
    api_key: str | None = None,
    limits: Limits = LIMITS,
    **settings: object,
) -> Iterator[Running]:
    ready = threading.Event()
    with served(target, api_key, limits, **settings) as inner, bind("127.0.0.1", 0) as taken:
        server = Server(inner.app, inner.llm, ready.set)
        # No connection shall end because a busy machine takes its time.
        server.config.timeout_graceful_shutdown = PATIENCE_S
        server.config.timeout_keep_alive = PATIENCE_S
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        assert ready.wait(PATIENCE_S)
        run = Running(inner, address_of(taken), server, thread)
        try:
            yield run
        finally:
            if inner.engine.held:
                inner.engine.release()
            run.stop()


@dataclass
class Call:
    """One POST by hand, whose client may leave at any moment."""

    path: str
    body: object
    events: list[bytes] = field(default_factory=list)
    status: int | None = None

    def __post_init__(self) -> None:
        self._left = asyncio.Event()
        self._came = asyncio.Event()
        self._sent = False

    async def run(self, app: FastAPI) -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"server")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": ("client", 1),
            "server": ("server", 80),
        }
        await app(scope, self._receive, self._send)

    def leave(self) -> None:
        self._left.set()

    async def first_event(self) -> None:
        await asyncio.wait_for(self._came.wait(), PATIENCE_S)

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": json.dumps(self.body).encode()}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.events.append(message["body"])
            if b'"role"' not in message["body"]:
                self._came.set()


def handed_over(llm: AsyncLLM) -> int:
    """What was asked of the engine and is done once a step ends: to take in, to drop, to stop.

    It only grows while a held engine is `asking`.
    """
    return llm._driver._inbox.qsize()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def step_until(engine: SteppedEngine, condition: Callable[[], bool]) -> None:
    """Let a held engine make one step after the other until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            begun = engine.steps
            engine.let(1)
            while engine.steps == begun and not condition():
                await asyncio.sleep(0.002)
