"""Runs the application on a socket until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from surefoot.async_llm import AsyncLLM
from surefoot.errors import SettingError

_GRACE_SECONDS = 5


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, before anybody can connect to it.

    Args:
        host: a name or an address.
        port: 0 takes one that is free.

    Raises:
        SettingError: the address is taken, or cannot be had; it names the setting at fault.
    """
    try:
        kind, _, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise SettingError("host", f"{host!r} is no address of this machine: {error}") from None
    taken = socket.socket(kind, socket.SOCK_STREAM, protocol)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
        # Two may bind an address as long as neither listens, so this decides whose it is.
        taken.listen()
    except OSError as error:
        taken.close()
        raise SettingError(
            "port", f"{port} cannot be had on {host} ({error.strerror}); choose another --port"
        ) from None
    return taken


def address_of(taken: socket.socket) -> str:
    """The URL that leads to a bound socket."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Ends the engine before it waits for open connections, so that those end too."""

    def __init__(
        self, app: FastAPI, llm: AsyncLLM, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        """Serve `app`, whose engine is `llm`; `on_ready` is called once requests are served."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._llm = llm
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await asyncio.to_thread(self._llm.close)
        await super().shutdown(sockets)
