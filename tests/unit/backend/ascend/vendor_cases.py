"""A few good calls of every emulated operator, for comparisons with the vendor's own functions."""

from collections.abc import Iterator

import torch

from tests.unit.backend.ascend import test_indexers, test_latent_caches, test_sparse_attention
from tests.unit.backend.ascend.attention_cases import Requests, draw, second_version
from tests.unit.backend.ascend.broken import Arguments
from tests.unit.backend.ascend.selection_cases import LAYOUTS
from tests.unit.backend.ascend.test_fused_attention import PLACES
from tests.unit.backend.ascend.vendor_cases_more import more_cases

BATCH = Requests((3, 3), (20, 5), heads=(4, 2))
SELECTING = Requests((2, 1), (17, 5), heads=(4, 1))
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def cases() -> Iterator[tuple[str, Arguments]]:
    """Names of operators, each with the arguments of a call."""
    yield from attentions()
    yield from rowwise()
    yield from stores()
    yield from more_cases()
    for layouts in LAYOUTS:
        call = test_indexers.call_of(SELECTING, layouts) | {"sparse_count": 7}
        yield "npu_lightning_indexer", call
        call = test_sparse_attention.call_of(SELECTING, layouts)
        yield "npu_sparse_flash_attention", call


def attentions() -> Iterator[tuple[str, Arguments]]:
    for layout, form in PLACES:
        for wants_lse in (False, True):
            call = BATCH.call(layout, form) | {"softmax_lse_flag": wants_lse}
            yield "npu_fused_infer_attention_score", call
            yield "npu_fused_infer_attention_score_v2", second_version(call)
    for dtype in FLOATS:
        parts = {"lse": [torch.zeros(5)] * 2, "local_out": [draw(5, 16, dtype=dtype)] * 2}
        yield "npu_attention_update", parts | {"update_type": 1}
        yield "npu_attention_update", parts | {"update_type": 0}


def rowwise() -> Iterator[tuple[str, Arguments]]:
    for dtype in FLOATS:
        x, gamma = draw(2, 3, 8, dtype=dtype), draw(8, dtype=dtype)
        for name in ("npu_rms_norm", "npu_gemma_rms_norm"):
            yield name, {"input": x, "gamma": gamma}
            yield name, {"input": x, "gamma": draw(3, 8, dtype=dtype), "epsilon": 1e-5}
        yield "npu_add_rms_norm", {"x1": x, "x2": x, "gamma": gamma}
        yield "npu_linear", {"input": x[0], "weight": x[1]}
        yield "npu_swiglu", {"input": x}
        yield "npu_swiglu", {"input": x, "dim": 0}
        angles = torch.zeros(2, 1, 8, dtype=dtype)
        yield "npu_rotary_mul", {"input": x, "r1": angles, "r2": angles}
    halves = torch.zeros(2, 3, 5, 64, dtype=torch.float16)
    angles = torch.zeros(2, 1, 5, 64, dtype=torch.float16)
    yield "npu_interleave_rope", {"x": halves, "cos": angles, "sin": angles}


def stores() -> Iterator[tuple[str, Arguments]]:
    places = torch.tensor([[1, 3], [2, 0]])
    pool = torch.zeros(4, 8, 2)
    yield "npu_scatter_nd_update_", {"input": pool, "indices": places, "updates": torch.ones(2, 2)}
    caches = {"key_cache": torch.zeros(4, 8, 2, 4), "value_cache": torch.zeros(4, 8, 2, 3)}
    tokens = {"key": torch.ones(2, 2, 4), "value": torch.ones(2, 2, 3)}
    slots = {"slot_mapping": torch.tensor([8, 31]), "cache_mode": "Norm"}
    yield "npu_scatter_pa_kv_cache", tokens | caches | slots
    for mode in ("Norm", "PA"):
        for wanted in (False, True):
            call = test_latent_caches.latent(mode) | {"is_output_kv": wanted}
            yield "npu_kv_rmsnorm_rope_cache", call
