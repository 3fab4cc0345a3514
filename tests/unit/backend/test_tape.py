"""Calls recorded and made again, and what no recording may hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from surefoot.backend.operands import RowLayout
from surefoot.backend.reads import HostReads
from surefoot.backend.tape import Tape, TapeError
from tests.unit.backend.tiled import KERNELS

modes = pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Operand:
    """Something an operator takes, with tensors inside."""

    pair: tuple[Tensor, list[Tensor]]
    scale: float


def spread(operand: Operand, *, into: Tensor) -> tuple[Tensor, None, tuple[Tensor]]:
    """Reads values on the host, as an operator of a test double may; writes `into`."""
    first, (second,) = operand.pair
    count = int(first.sum().item())
    into[:2] += count
    return first * operand.scale + second.numpy().max(), None, (into[2:] * 2,)


def net(x: Tensor, weight: Tensor, pool: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views, in-place writes, out=, factories, and a composite operator."""
    y = functional.linear(x, weight)
    left, right = y.chunk(2, dim=-1)
    left.mul_(2)
    flat = y.t().reshape(-1)
    pool.index_copy_(0, where, y)
    pool[0] = 5.0
    steps = torch.arange(len(x), dtype=torch.float32)
    out = torch.empty(len(x), right.shape[1])
    torch.add(left, right, out=out)
    out += steps[:, None]
    best = torch.topk(out, 2, dim=-1)
    return flat, out.to(torch.float64), best.indices


@modes
def test_a_replay_is_the_computation_again(inference: bool) -> None:
    weight, where = draw(6, 4, seed=1), torch.tensor([3, 1, 4])
    x, pool = draw(3, 4, seed=2), torch.zeros(5, 6)
    with torch.inference_mode(inference):
        tape = Tape()
        with tape.recording():
            held = net(x, weight, pool, where)
        for seed in (3, 4):
            x.copy_(draw(3, 4, seed=seed))
            where.copy_(torch.tensor([2, 4, 1]) if seed == 3 else torch.tensor([4, 3, 2]))
            pool.zero_()
            twin = torch.zeros(5, 6)
            want = net(x.clone(), weight, twin, where.clone())
            tape.replay()
            assert all(map(torch.equal, held, want))
            assert torch.equal(pool, twin)


@modes
def test_an_accumulation_goes_on_at_each_replay(inference: bool) -> None:
    x, total = torch.ones(2), torch.zeros(2)
    with torch.inference_mode(inference):
        tape = Tape()
        with tape.recording():
            total += x
        for _ in range(3):
            tape.replay()
    assert total.tolist() == [4.0, 4.0]


@modes
def test_a_view_is_not_repeated_and_a_copy_is(inference: bool) -> None:
    x = draw(2, 3)
    views, copies = Tape(), Tape()
    with torch.inference_mode(inference), views.recording():
        x.view(-1).reshape(3, 2)[1:].t().contiguous().to(torch.float32).expand(4, 2, 2)[0, None]
    with torch.inference_mode(inference), copies.recording():
        x.t().reshape(-1)
    assert [str(call) for call in views.calls] == ["aten.clone.default"]
    assert "aten.clone.default" in [str(call) for call in copies.calls]


@modes
def test_a_whole_call_is_one_record_and_finds_its_tensors(inference: bool) -> None:
    first, second, into = torch.ones(2), draw(3), torch.zeros(4)
    tape = Tape()
    with torch.inference_mode(inference):
        with tape.recording():
            held, nothing, (last,) = tape.call(spread, Operand((first, [second]), 2.0), into=into)
            after = held + 1
        assert [str(call) for call in tape.calls] == ["spread", "aten.add.Tensor"]
        first.fill_(3)
        second.copy_(torch.tensor([1.0, 9.0, 2.0]))
        into[3] = 7
        tape.replay()
    assert nothing is None
    assert held.tolist() == [15.0, 15.0]
    assert after.tolist() == [16.0, 16.0]
    assert into.tolist() == [8.0, 8.0, 0.0, 7.0]
    assert last.tolist() == [0.0, 14.0]


def test_a_call_outside_a_recording_is_just_a_call() -> None:
    tape = Tape()
    assert tape.call(lambda x: x.tolist(), torch.ones(1)) == [1.0]
    assert tape.calls == []


def test_lists_of_a_whole_call_are_those_of_the_recording() -> None:
    lengths, x = [1, 2], torch.zeros(2)
    tape = Tape()
    with tape.recording():
        held = tape.call(lambda x, lengths: x + sum(lengths), x, lengths)
    lengths.append(100)
    tape.replay()
    assert held.tolist() == [3.0, 3.0]


@modes
def test_an_expanded_result_is_renewed(inference: bool) -> None:
    x, tape = torch.ones(3, 1), Tape()
    with torch.inference_mode(inference), tape.recording(keep=False):
        held = tape.call(lambda x: (x * 2).expand(3, 4), x)
    assert bool(held.isnan().all())
    x[1] = 5
    tape.replay()
    assert held.tolist() == [[2.0] * 4, [10.0] * 4, [2.0] * 4]


def test_compiled_operators_of_a_backend_are_recorded_whole() -> None:
    layout = RowLayout((0, 2), (3,), ((1, 2),), (1,), (0,), (3,), (5,), 4)
    q, entries = draw(2, 2, 8), draw(2, 1, 8, seed=1)
    pools = [draw(3, 1, 4, 8, seed=seed) for seed in (2, 3)]
    tape = Tape()
    with torch.inference_mode():
        rows = KERNELS.rows(layout)
        with tape.recording():
            for pool in pools:
                tape.call(rows.paged_write, pool, entries)
            held = tape.call(rows.paged_attention, q, pools[0], pools[1], 0.3)
        q.copy_(draw(2, 2, 8, seed=5))
        entries.copy_(draw(2, 1, 8, seed=6))
        tape.replay()
        want = KERNELS.rows(layout).paged_attention(q, pools[0], pools[1], 0.3)
    assert torch.equal(pools[0][1, :, 3], entries[0])
    assert torch.equal(held, want)


def test_what_is_not_kept_is_undone_and_new_tensors_hold_nothing() -> None:
    x, pool, seen = torch.ones(2), torch.zeros(2), torch.zeros(2)
    tape = Tape()
    with tape.recording(keep=False):
        pool += x
        y = pool * 2
        whole = tape.call(lambda at, to: to.copy_(at) * 3, x, seen)
        places = torch.arange(2)
        y += 1
    assert pool.tolist() == [0, 0]
    assert seen.tolist() == [0, 0]
    assert bool(y.isnan().all())
    assert bool(whole.isnan().all())
    assert places.tolist() == [torch.iinfo(torch.int64).min] * 2
    tape.replay()
    assert pool.tolist() == [1, 1]
    assert seen.tolist() == [1, 1]
    assert y.tolist() == [3, 3]
    assert whole.tolist() == [3, 3]
    assert places.tolist() == [0, 1]


X, MASK, ONE = torch.arange(4.0), torch.tensor([True, False, True, False]), torch.tensor(1)

READS: Mapping[str, Callable[[], object]] = {
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "__array__": lambda: np.asarray(X),
    "__bool__": lambda: bool(ONE),
    "__int__": lambda: int(ONE),
    "__float__": lambda: float(ONE),
    "__index__": lambda: range(ONE),
    "__contains__": lambda: 1.0 in X,
    "__repr__": lambda: repr(X),
    "__format__": lambda: f"{ONE}",
    "__dlpack__": lambda: X.__dlpack__(),
    "cpu": lambda: X.cpu(),
    "to('cpu')": lambda: X.to("cpu"),
    "to('cpu') ": lambda: X.to(device=torch.device("cpu"), dtype=torch.float64),
    "_local_scalar_dense": lambda: X[ONE],
    "nonzero": lambda: MASK.nonzero(),
    "nonzero.default": lambda: torch.where(MASK),
    "unique": lambda: torch.unique(X),
    "masked_select": lambda: X.masked_select(MASK),
    "index.Tensor with a mask": lambda: X[MASK],
    "index_put_.default with a mask": lambda: X.index_put_((MASK,), X[:1]),
    "repeat_interleave.Tensor": lambda: torch.repeat_interleave(X, MASK.long()),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "bincount": lambda: torch.bincount(MASK.long()),
    "_local_scalar_dense.default": lambda: functional.one_hot(ONE),
    "__bool__ ": lambda: max(X),
}

FROM_HOST: Mapping[str, Callable[[], object]] = {
    "tensor": lambda: torch.tensor([1, 2]),
    "tensor ": lambda: torch.tensor(3.0),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "asarray": lambda: torch.asarray(np.zeros(2)),
    "an array": lambda: torch.from_numpy(np.zeros(2)),
    "a list": lambda: torch.LongTensor([1, 2]),
    "a list ": lambda: X[[1, 0]],
    "a list  ": lambda: X.new_tensor([1.0]),
}

HARMLESS: Mapping[str, Callable[[], object]] = {
    "factories": lambda: torch.zeros(2) + torch.full((2,), 3.0) + torch.arange(2),
    "dtype": lambda: X.to(torch.float64).float(),
    "where": lambda: torch.where(MASK, X, 0.0),
    "number": lambda: X.clone().__setitem__(0, 1.0),
    "gather": lambda: X[MASK.long()],
    "repeat": lambda: torch.repeat_interleave(X, MASK.long(), output_size=2),
    "unbind": lambda: [*X],
    "as_tensor": lambda: torch.as_tensor(X),
    "shape": lambda: (X.shape, len(X), X.dtype, X.data_ptr(), X.is_contiguous()),
    "any": lambda: X.any() & X.isnan().all(),
}


@modes
@pytest.mark.parametrize("name", READS)
def test_reads_are_refused_by_name(name: str, inference: bool) -> None:
    tape = Tape()
    with (
        torch.inference_mode(inference),
        pytest.raises(TapeError, match=rf"{re.escape(name.strip())}.* needs the values"),
        tape.recording(),
    ):
        READS[name]()


@modes
@pytest.mark.parametrize("name", FROM_HOST)
def test_values_of_the_host_are_refused(name: str, inference: bool) -> None:
    with (
        torch.inference_mode(inference),
        pytest.raises(TapeError, match=rf"{name.strip()}.* makes a tensor of the host's"),
        Tape().recording(),
    ):
        FROM_HOST[name]()


@modes
@pytest.mark.parametrize("name", HARMLESS)
def test_what_reads_nothing_is_let_through(name: str, inference: bool) -> None:
    with torch.inference_mode(inference), Tape().recording():
        HARMLESS[name]()


def test_a_result_for_the_host_is_refused() -> None:
    tape = Tape()
    with pytest.raises(TapeError, match="gives int to the host"), tape.recording():
        tape.call(lambda x: int(x.sum()), torch.ones(2))


def test_a_shape_that_changes_in_place_is_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(TapeError, match="changes the shape"), Tape().recording():
        x.t_()


@pytest.mark.parametrize("grown", [torch.zeros(3), torch.zeros(2, dtype=torch.int32), None])
def test_another_shape_at_replay_is_an_error(grown: Tensor | None) -> None:
    results = [torch.zeros(2), grown]
    tape = Tape()
    with tape.recording():
        tape.call(lambda: results.pop(0))
    with pytest.raises(TapeError, match=r"gave .*, recorded w"):
        tape.replay()


def test_a_tape_is_recorded_once() -> None:
    tape = Tape()
    with pytest.raises(TapeError, match="empty or unfinished"):
        tape.replay()
    with tape.recording():
        assert tape.recording_now
        with pytest.raises(TapeError, match="empty or unfinished"):
            tape.replay()
        with pytest.raises(TapeError, match="make another"), tape.recording():
            pass
        torch.zeros(1)
    with pytest.raises(TapeError, match="make another"), tape.recording():
        pass
    assert not tape.recording_now


def test_a_recording_that_fails_leaves_nothing() -> None:
    tape, x = Tape(), torch.zeros(2)
    with pytest.raises(TapeError, match="item"), tape.recording(keep=False):
        (x.add_(1)).sum().item()
    assert x.tolist() == [0, 0]
    with pytest.raises(TapeError, match="empty or unfinished"):
        tape.replay()
    with tape.recording():
        x += 2
    tape.replay()
    assert x.tolist() == [4, 4]


def fetch(x: Tensor) -> list[float]:
    return x.tolist()


@modes
def test_reads_are_counted_once_and_placed(inference: bool) -> None:
    with torch.inference_mode(inference), HostReads(allowed=[fetch]) as reads:
        fetch(X + 1)
        X[0].item()
        if X.sum() > 0:
            f"{ONE}"
        X[MASK]
        torch.zeros(3).add_(1)
    assert [read.call for read in reads.others] == [
        "item",
        "__bool__",
        "__format__",
        "aten.index.Tensor with a mask",
    ]
    assert reads.count == 4
    assert reads.allowed == 1
    assert "backend/test_tape.py:" in str(reads.others[0])
    assert "test_reads_are_counted" in reads.others[0].where[0]


@modes
def test_each_kind_of_read_is_one(inference: bool) -> None:
    for name, read in READS.items():
        with torch.inference_mode(inference), HostReads() as reads:
            read()
        assert reads.count >= 1, name
        if name not in ("__bool__ ", "_local_scalar_dense.default"):
            assert reads.count == 1, (name, reads.others)


def test_a_device_reads_what_it_likes() -> None:
    with HostReads(device=["tests.unit.backend.test_tape"]) as inner:
        X.tolist()
    with HostReads(device=["tests.unit.backend.test"]) as outer:
        X.tolist()
    assert (inner.count, outer.count) == (0, 1)


def test_harmless_calls_are_no_reads() -> None:
    with HostReads() as reads:
        for call in HARMLESS.values():
            call()
    assert reads.others == []
