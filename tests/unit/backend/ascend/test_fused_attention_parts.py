"""Rules of rotated parts and of what the second version of fused attention has more."""

import torch

from surefoot.backend.ascend.emulate import RELAXED, STRICT, NotEmulatedError
from tests.unit.backend.ascend.attention_cases import Requests, draw, second_version
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases, gaps

BATCH = Requests((2, 1), (17, 5))
ONE = torch.ones(1)


def latent(layout: str, form: str, batch: Requests, rotated: int) -> Arguments:
    """A call with rotated parts."""
    call = batch.call(layout, form)
    for name in ("query", "key"):
        tensor = call[name]
        flat = tensor.unflatten(-1, (-1, batch.size))
        call[f"{name}_rope"] = flat[..., :rotated].flatten(-2).clone()
    return call


@broken_cases(
    Broken("dtype of query_rope", lambda call: {"query_rope": call["query_rope"].half()}),
    Broken("dtype of key_rope", lambda call: {"key_rope": call["key_rope"].half()}),
    Broken("dimensions of query_rope", lambda call: {"query_rope": call["query_rope"][None]}),
    Broken("dimensions of key_rope", lambda call: {"key_rope": call["key_rope"][0]}),
    Broken("query_rope contiguous", gaps("query_rope")),
    Broken("key_rope contiguous", lambda call: {"key_rope": call["key_rope"].mT}),
    Broken("shape of query_rope", lambda call: {"query_rope": call["query_rope"][:2]}),
    Broken("shape of key_rope", lambda call: {"key_rope": call["key_rope"][1:]}),
    Broken("softmax lse", {"softmax_lse_flag": True}),
)
def test_rotated_parts(case: Broken) -> None:
    batch = Requests((2, 1), (17, 5), heads=(4, 1))
    good = latent("TND", "flat", batch, 8)
    case.check(VENDORS[RELAXED].npu_fused_infer_attention_score, good)


LATENT = Requests((2, 1), (130, 5), heads=(4, 1), size=512, block=128)


def other_latent(rule: str, layout: str = "TND", rotated: int = 64, **sizes: object) -> Broken:
    batch = Requests(**{**vars(LATENT), **sizes})
    return Broken(rule, latent(layout, "flat", batch, rotated), profile=STRICT)


@broken_cases(
    other_latent("D of query_rope", rotated=32),
    other_latent("D of query with query_rope", layout="BSND", size=256),
    other_latent("number of key heads", heads=(4, 2)),
    other_latent("number of query heads", heads=(3, 1)),
    other_latent("block_size", block=64),
    other_latent("queries of a request", queries=(17, 1)),
)
def test_sizes_with_rotated_parts(case: Broken) -> None:
    good = latent("TND", "flat", LATENT, 64)
    case.check(VENDORS[STRICT].npu_fused_infer_attention_score, good)


@broken_cases(
    Broken("sparse_mode of one query with ropes", {"sparse_mode": 3}),
    Broken("atten_mask", {"atten_mask": torch.zeros(2, 1, 512, dtype=torch.bool)}),
)
def test_one_query_with_rotated_parts(case: Broken) -> None:
    batch = Requests((1, 1), (17, 5), heads=(4, 1))
    good = latent("BSND", "flat", batch, 8)
    case.check(VENDORS[RELAXED].npu_fused_infer_attention_score, good)


SECOND = (
    "pse_shift",
    "dequant_scale_query",
    "dequant_scale_key",
    "dequant_offset_key",
    "dequant_scale_value",
    "dequant_offset_value",
    "dequant_scale_key_rope",
    "quant_scale_out",
    "quant_offset_out",
    "quant_scale_p",
)
DTYPES = (
    "query_dtype",
    "key_dtype",
    "value_dtype",
    "query_rope_dtype",
    "key_rope_dtype",
    "key_shared_prefix_dtype",
    "value_shared_prefix_dtype",
    "dequant_scale_query_dtype",
    "dequant_scale_key_dtype",
    "dequant_scale_value_dtype",
    "dequant_scale_key_rope_dtype",
    "out_dtype",
)


@broken_cases(
    *(Broken(name, {name: ONE}, NotEmulatedError) for name in SECOND),
    *(Broken(name, {name: 1}, NotEmulatedError) for name in DTYPES),
    *(
        Broken("quant modes", {name: 3}, NotEmulatedError, label=name)
        for name in ("query_quant_mode", "key_quant_mode", "value_quant_mode")
    ),
    Broken("last of actual_seq_qlen", {"actual_seq_qlen": [2, 4]}),
    Broken("actual_seq_kvlen", {"actual_seq_kvlen": [17, -1]}),
    Broken("dtype of learnable_sink", {"learnable_sink": torch.zeros(4)}),
    Broken("shape of learnable_sink", {"learnable_sink": draw(2)}),
    Broken("lse with learnable_sink", {"return_softmax_lse": True}, NotEmulatedError),
    Broken(
        "ropes with learnable_sink",
        {"query_rope": draw(3, 4, 8), "key_rope": draw(7, 2, 16, 8)},
    ),
)
def test_second_version(case: Broken) -> None:
    good = second_version(BATCH.call("TND", "head")) | {"learnable_sink": draw(4)}
    case.check(VENDORS[RELAXED].npu_fused_infer_attention_score_v2, good)


def test_a_sink_goes_with_packed_queries_and_small_values() -> None:
    good = second_version(BATCH.call("BSND", "flat"))
    case = Broken("input_layout with learnable_sink", {"learnable_sink": draw(4)})
    case.check(VENDORS[RELAXED].npu_fused_infer_attention_score_v2, good)
    batch = Requests((1,), (3,), size=192)
    rows = second_version(batch.call("TND", "rows")) | {"num_key_value_heads": 4}
    rows |= {"key": draw(3, 4, 192), "value": draw(3, 4, 192)}
    case = Broken("D of value with learnable_sink", {"learnable_sink": draw(4)}, profile=STRICT)
    case.check(VENDORS[STRICT].npu_fused_infer_attention_score_v2, rows)
