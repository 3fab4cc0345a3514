"""What a command leaves behind when it runs within this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout; the parser refuses anything besides it."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of a mistake, without its beginning."""
        assert self.status == 2, (self.status, self.out, self.err)
        assert self.out == ""
        begin = "surefoot: error: "
        assert self.err.startswith(begin)
        assert self.err.count("\n") == 1
        return self.err.removeprefix(begin).rstrip("\n")


Run = Callable[..., Done]
