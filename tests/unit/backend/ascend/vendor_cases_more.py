"""As `vendor_cases`, for eight bits, experts and recurrences."""

from collections.abc import Iterator

import torch

from tests.unit.backend.ascend import (
    test_convolutions,
    test_permuting,
    test_products,
    test_quantising,
    test_recurrences,
    test_routing,
)
from tests.unit.backend.ascend.broken import Arguments

BF, HALF, INT8 = torch.bfloat16, torch.float16, torch.int8


def more_cases() -> Iterator[tuple[str, Arguments]]:
    """Names of operators, each with the arguments of a call."""
    yield from eight_bits()
    yield from experts()
    yield from recurrences()


def eight_bits() -> Iterator[tuple[str, Arguments]]:
    for dtype in (BF, HALF):
        for shape in ((3, 8), (2, 3, 8)):
            x = test_quantising.draw(*shape, dtype=dtype)
            yield "npu_dynamic_quant", {"input": x, "dst_type": INT8}
        yield "npu_dynamic_quant", {"input": x[0], "smooth_scales": x[0, 0]}
    yield "npu_dynamic_quant", test_quantising.grouped()
    yield "npu_quantize", test_quantising.factors()
    divisors = {"div_mode": True, "zero_points": None, "axis": 1}
    for kind in (torch.qint8, torch.quint8, torch.int32):
        yield "npu_quantize", test_quantising.factors(dtype=kind, **divisors)
    yield "npu_dequant_swiglu_quant", test_quantising.middle()
    yield "npu_quant_matmul", test_products.good()
    plain = {"pertoken_scale": None, "bias": None}
    for out in (None, torch.int32, HALF):
        yield "npu_quant_matmul", test_products.good(output_dtype=out, **plain)
    deep = {"x1": test_products.ints(2, 3, 8), "pertoken_scale": None}
    yield "npu_quant_matmul", test_products.good(**deep)
    yield "npu_grouped_matmul", test_products.groups()


def experts() -> Iterator[tuple[str, Arguments]]:
    yield "npu_moe_gating_top_k", test_routing.choice()
    yield "npu_moe_gating_top_k", test_routing.choice(out_flag=True)
    for dtype in (torch.float32, BF):
        x = test_routing.draw(3, 8, dtype=dtype)
        yield "npu_moe_gating_top_k_softmax", {"x": x, "k": 2}
    yield "npu_moe_init_routing_v2", test_permuting.routed()
    for changes in (
        {"expert_tokens_num_flag": False},
        {"expert_tokens_num_type": 1},
        {"scale": None, "active_num": -1},
        {"scale": None, "quant_mode": 1},
    ):
        yield "npu_moe_init_routing_v2", test_permuting.routed(**changes)
    rows = {
        "permuted_tokens": test_permuting.draw(8, 5, dtype=BF),
        "sorted_indices": test_permuting.shuffled(8),
    }
    yield "npu_moe_token_unpermute", rows
    yield "npu_moe_token_unpermute", rows | {"probs": test_permuting.draw(4, 2)}
    for mode in (0, 2):
        yield "npu_moe_finalize_routing", test_permuting.final(drop_pad_mode=mode)
        alone = {"scales": None, "bias": None, "k": 4, "skip1": None, "skip2": None}
        alone |= {"export_for_source_row": None, "drop_pad_mode": mode}
        yield "npu_moe_finalize_routing", test_permuting.final(**alone)


def recurrences() -> Iterator[tuple[str, Arguments]]:
    yield "npu_recurrent_gated_delta_rule", test_recurrences.step()
    yield "npu_chunk_gated_delta_rule", test_recurrences.prompt()
    yield "npu_fused_causal_conv1d", test_convolutions.prefill()
    for x in (test_convolutions.draw(6, test_convolutions.SIZE), None):
        flat = {} if x is None else {"x": x}
        yield "npu_fused_causal_conv1d", test_convolutions.steps(**flat)
