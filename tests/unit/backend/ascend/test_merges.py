import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import RELAXED, STRICT
from tests.unit.backend.ascend.attention_cases import draw
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases

VENDOR = VENDORS[STRICT]
F32 = torch.float32
INF = float("inf")


def parts(count: int, rows: int = 5, dtype: torch.dtype = F32) -> tuple[list[Tensor], list[Tensor]]:
    lse = [draw(rows, seed=at, dtype=F32) * 3 for at in range(count)]
    return lse, [draw(rows, 16, seed=40 + at, dtype=dtype) for at in range(count)]


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [F32, torch.float16, torch.bfloat16])
def test_attention_update(count: int, rows: int, dtype: torch.dtype) -> None:
    lse, outs = parts(count, rows, dtype)
    out, total = VENDOR.npu_attention_update(lse, outs, 1)
    assert (out.dtype, total.dtype) == (dtype, F32)
    for row in range(rows):
        sums = [each[row].double().exp() for each in lse]
        pairs = zip(sums, outs, strict=True)
        wanted = sum((share * each[row].double() for share, each in pairs), torch.zeros(16))
        apart = (out[row].double() - wanted / sum(sums)).abs().max()
        assert apart < torch.finfo(dtype).eps * 4
        assert abs(total[row] - torch.stack(sums).sum().log()) < 1e-5
    again, unasked = VENDOR.npu_attention_update(tuple(lse), outs, 0)
    assert torch.equal(again, out)
    assert unasked.shape == total.shape
    assert unasked.isnan().all()


def test_a_part_without_keys_weighs_nothing() -> None:
    lse, outs = parts(2)
    lse[1][2] = -INF
    out, total = VENDOR.npu_attention_update(lse, outs, 1)
    assert torch.equal(out[2], outs[0][2])
    assert torch.equal(total[2], lse[0][2])


def test_two_halves_of_an_attention_are_the_whole() -> None:
    vendor = VENDORS[RELAXED]
    q, k, v = (draw(rows, 2, 16, seed=rows) for rows in (3, 11, 12))
    k = torch.cat([k, draw(1, 2, 16, seed=1)])

    def attend(start: int, end: int) -> tuple[Tensor, Tensor]:
        return vendor.npu_fused_infer_attention_score(
            q,
            k[start:end],
            v[start:end],
            num_heads=2,
            input_layout="TND",
            actual_seq_lengths=[3],
            actual_seq_lengths_kv=[end - start],
            softmax_lse_flag=True,
        )

    halves = attend(0, 5), attend(5, 12)
    whole, lse = attend(0, 12)
    logs, outs = [each[1].flatten() for each in halves], [each[0].flatten(0, 1) for each in halves]
    out, total = VENDOR.npu_attention_update(logs, outs, 1)
    assert (out - whole.flatten(0, 1)).abs().max() < 0.02
    assert (total - lse.flatten()).abs().max() < 1e-5


def good() -> Arguments:
    lse, outs = parts(2)
    return {"lse": lse, "local_out": outs, "update_type": 1}


@broken_cases(
    Broken("update_type", {"update_type": 2}),
    Broken("parts", {"lse": [], "local_out": []}),
    Broken("parts", dict(zip(("lse", "local_out"), parts(17), strict=True)), label="17"),
    Broken("length of local_out", lambda call: {"local_out": call["local_out"][:1]}),
    Broken("dimensions of local_out[0]", lambda call: {"local_out": [draw(5)] * 2}),
    Broken("dtype of local_out[0]", lambda call: {"local_out": [draw(5, 16).double()] * 2}),
    Broken("D of local_out", lambda call: {"local_out": [draw(5, 12)] * 2}, profile=STRICT),
    Broken(
        "D of local_out",
        lambda call: {"local_out": [draw(5, 520)] * 2},
        profile=STRICT,
        label="big",
    ),
    Broken("dtype of lse[1]", lambda call: {"lse": [call["lse"][0], call["lse"][1].half()]}),
    Broken("shape of lse[0]", lambda call: {"lse": [call["lse"][0][:, None], call["lse"][1]]}),
    Broken(
        "dtype of local_out[1]", lambda call: {"local_out": [call["local_out"][0], draw(5, 16)]}
    ),
    Broken(
        "shape of local_out[1]",
        lambda call: {"local_out": [call["local_out"][0], draw(4, 16, dtype=F32)]},
    ),
)
def test_attention_update_contract(case: Broken) -> None:
    case.check(VENDORS[case.profile].npu_attention_update, good())
