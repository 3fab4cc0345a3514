"""`surefoot serve`: answer over HTTP, in the shapes of OpenAI's interface."""

# Annotations are not postponed: the parser would evaluate them anew at every start.
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from cyclopts import Group, Parameter

from surefoot.cli.flags import flag, whole
from surefoot.cli.options import (
    DEFAULT_MODEL,
    ENGINE_DEFAULTS,
    EngineOptions,
    ModelName,
)
from surefoot.cli.show import Screen
from surefoot.errors import SettingError

HOST, PORT = "127.0.0.1", 8000
MAX_WAITING = 1024
"""Most requests that wait; a client is better told to come back than to wait for longer."""
_NEEDED = ("fastapi", "uvicorn")
_HIGHEST_PORT = 65535
_LOCAL = ("127.0.0.1", "::1", "localhost")


@Parameter(name="*", group=Group("Server", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the server listens, and to whom."""

    host: Annotated[str, flag("Address to listen on; 0.0.0.0 lets other machines in.", HOST)] = HOST
    port: Annotated[int, flag("Port to listen on; 0 takes a free one.", PORT, convert=whole)] = PORT
    api_key: Annotated[str | None, flag("Clients must send it as their API key.")] = None
    served_model_name: Annotated[
        str | None, flag("What clients call the model; else its name as given here.")
    ] = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            SettingError: one is out of range.
        """
        if not 0 <= self.port <= _HIGHEST_PORT:
            raise SettingError("port", f"must be from 0 to {_HIGHEST_PORT}, not {self.port}")
        for name in ("api_key", "served_model_name"):
            if getattr(self, name) == "":
                raise SettingError(name, "must not be empty; leave it out to do without")


SERVER_DEFAULTS = ServerOptions()


def serve(
    model: ModelName = DEFAULT_MODEL,
    *,
    server: ServerOptions = SERVER_DEFAULTS,
    engine: EngineOptions = ENGINE_DEFAULTS,
) -> int:
    """Serve a model to many clients at once, over HTTP as OpenAI's clients speak it.

    Routes: /v1/chat/completions, /v1/completions, /v1/models and /health. Ctrl-C ends it.
    """
    screen = Screen()
    config = engine.single(max_waiting=MAX_WAITING)
    check_packages(_NEEDED)
    # The model's side loads torch, which --help and a mistyped flag need not wait for.
    from surefoot.async_llm import AsyncLLM
    from surefoot.engine.engine import Engine
    from surefoot.server.app import make_app
    from surefoot.server.run import Server, address_of, bind

    with bind(server.host, server.port) as taken:
        with screen.loading(f"loading {model}") as progress:
            llm = AsyncLLM(Engine.open(model, config, progress))
        name = server.served_model_name or model

        def announce() -> None:
            for line in greeting(address_of(taken), name, server):
                screen.note(line, style=None)

        try:
            Server(make_app(llm, name, server.api_key), llm, announce).run(sockets=[taken])
        except KeyboardInterrupt:
            screen.note("stopped")
        finally:
            llm.close()
    return 0 if llm.failure is None else 1


def check_packages(names: Sequence[str]) -> None:
    """Make sure that the packages of the extra are there.

    Raises:
        SettingError: one is not.
    """
    absent = [name for name in names if find_spec(name) is None]
    if absent:
        raise SettingError(
            "serve", f"needs {' and '.join(absent)}; get them by: pip install 'surefoot[serve]'"
        )


def greeting(address: str, name: str, server: ServerOptions) -> list[str]:
    """What is said once requests are served: where, and how to send one."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    words = ["curl", f"{address}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if server.api_key is not None:
        words += ["-H", "Authorization: Bearer KEY"]
    lines = [f"serving {name} at {address}", shlex.join([*words, "-d", json.dumps(body)])]
    if server.api_key is None and server.host not in _LOCAL:
        lines.append("everybody who reaches this address may use it; --api-key asks for a key")
    return lines
