"""Small engines on a real (tiny) model."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.config import make_config
from surefoot.draft.drafter import Drafter
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.params import SamplingParams
from surefoot.request import Request


def engine_of(
    model: LoadedModel,
    depth: int = 0,
    drafter: Drafter | None = None,
    draft: LoadedModel | None = None,
    **settings: object,
) -> Engine:
    """An engine with 2 MiB of caches; drafts by n-gram, by `draft` or by a drafter of the test."""
    kind = "none" if depth == 0 else "ngram" if draft is None else "draft-model"
    values: dict[str, object] = {
        "device": "cpu",
        "drafter": kind,
        "draft_tokens": depth,
        "draft_model": None if draft is None else draft.name,
        "memory": 1 << 21,
        "max_model_len": 128,
        "page_tokens": 16,
    }
    return Engine(model, make_config(**{**values, **settings}), draft, drafter)


def drain(engine: Engine) -> None:
    """Step until nothing is left; then nothing may be held."""
    while not engine.idle:
        engine.step()
    engine.parts.ledger.audit()
    assert engine.usage.held_pages == 0
    assert engine.usage.running == engine.usage.waiting == 0


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Request]:
    """Run all prompts together, one sample each."""
    requests = [engine.submit(prompt, params)[0] for prompt in prompts]
    drain(engine)
    return requests
