"""A pretended model with a draft head, whose states and entries can be read off as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend import make_backend
from surefoot.backend.operands import Fold
from surefoot.backend.protocol import Backend
from surefoot.config import make_config
from surefoot.draft.guard import GuardedDrafter
from surefoot.draft.mtp import MtpDrafter
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.model.model import Description, DraftHead
from surefoot.request import Request
from surefoot.state.ledger import Lease
from surefoot.state.pool import Pools
from surefoot.state.spec import Paged, Part
from surefoot.step import Batch

VOCAB = 50
KV = Paged("kv", 1, (Part("token", (1, 1), "float32"),))
ENTRIES = Paged("mtp.kv", 1, (Part("entry", (1, 2), "float32"),))
DESCRIPTION = Description("Fake", VOCAB, 512, 1, ("full",), (KV,), "mtp", (ENTRIES,), (1,))


def state_of(token: Tensor | int, position: Tensor | int) -> Tensor:
    """The target's hidden state of a token: a number that tells both."""
    return torch.as_tensor(token * 1000 + position, dtype=torch.float32)


def successor(token: Tensor, position: Tensor) -> Tensor:
    """What follows a token."""
    return (7 * token + 3 * position + 1) % VOCAB


class FakeHead:
    """Guesses the successor, but wrongly at every fourth position; keeps what it was given."""

    @property
    def deepens(self) -> bool:
        """See DraftHead."""
        return False

    def enter(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        return hidden

    def catch_up(self, batch: Batch, hidden: Tensor, pools: Pools) -> None:
        """See DraftHead."""
        _write(batch, hidden, pools)

    def forward(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead: its own states are negative."""
        _write(batch, hidden, pools)
        return -state_of(batch.tokens, batch.positions)[:, None]

    def deepen(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead."""
        return self.forward(batch, hidden, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        number = (-hidden[:, 0]).long()
        token, position = number // 1000, number % 1000
        guess = (successor(token, position) + (position % 4 == 3)) % VOCAB
        return torch.nn.functional.one_hot(guess, VOCAB).float()


def _write(batch: Batch, hidden: Tensor, pools: Pools) -> None:
    entry = torch.stack([batch.tokens.float(), hidden[:, 0]], dim=-1)
    batch.rows.paged_write(pools.layers("mtp.kv", "entry")[0], entry[:, None])


@dataclass(frozen=True)
class FakeModel:
    """A target whose next token depends on the last one and its position."""

    draft_head: DraftHead | None
    description: Description = DESCRIPTION

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        """See Model."""
        raise AssertionError("a model without recurrent caches is never asked to fold")

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """See Model."""
        token = batch.tokens.float()[:, None, None]
        batch.rows.paged_write(pools.layers("kv", "token")[0], token)
        return state_of(batch.tokens, batch.positions)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        number = hidden[:, 0].long()
        following = successor(number // 1000, number % 1000)
        return torch.nn.functional.one_hot(following, VOCAB).float()


def fake_model() -> LoadedModel:
    """The pretended model on the CPU."""
    backend: Backend = make_backend("cpu", None)
    return LoadedModel("fake", FakeModel(FakeHead()), backend, "float32", None, {}, 4)


def engine_on(model: LoadedModel, depth: int = 3, **settings: object) -> Engine:
    """An engine with pages of four tokens that drafts with the head."""
    values: dict[str, object] = {
        "device": "cpu",
        "drafter": "mtp" if depth else "none",
        "draft_tokens": depth,
        "memory": 1 << 20,
        "max_model_len": 128,
        "page_tokens": 4,
    }
    return Engine(model, make_config(**{**values, **settings}))


def drafter_of(engine: Engine) -> MtpDrafter:
    """The drafter behind the guard."""
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    assert isinstance(guard._drafter, MtpDrafter)
    assert guard.failures == 0
    return guard._drafter


def check_state(engine: Engine, request: Request) -> None:
    """Entries, the state kept for the next draft and those at page ends are as documented."""
    lease, tokens = engine.parts.scheduler._running[request], request.tokens
    drafter, size = drafter_of(engine), engine.parts.plan.page_tokens
    assert lease.computed // size * size <= lease.drafted <= lease.computed
    assert drafter._kept[request.id] == lease.computed
    entries = drafter._pools.paged("mtp.kv", "entry")[0]
    first = max(1, lease.draft_from)
    for position in range(first, lease.drafted):
        page, offset = divmod(position, size)
        token, state = entries[lease.pages[page], 0, offset].tolist()
        before = state_of(tokens[position - 1], position - 1)
        assert (token, state) == (tokens[position], before), f"entry {position}"
    for position in range(max(lease.draft_from, lease.drafted) - 1, lease.computed):
        if position >= 0:
            [column] = drafter._columns_of(lease, range(position, position + 1))
            assert drafter._recent[column] == state_of(tokens[position], position)
    for page in range(first // size, lease.computed // size):
        end = (page + 1) * size - 1
        assert drafter._boundary[lease.pages[page]] == state_of(tokens[end], end), f"page {page}"


def lease_of(engine: Engine, request: Request) -> Lease:
    """What a running request holds."""
    return engine.parts.scheduler._running[request]
