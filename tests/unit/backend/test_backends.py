"""Backends by name, and what they say of themselves."""

from __future__ import annotations

import pytest
import torch

from surefoot.backend import BACKENDS, make_backend
from surefoot.errors import SettingError
from surefoot.state.pool import DTYPES


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_backend_says_what_it_is(name: str) -> None:
    backend = make_backend(name, None)
    limits = backend.capabilities
    assert limits.name == name
    assert limits.bitwise
    assert set(limits.dtypes) <= DTYPES.keys()
    assert limits.page_tokens > 0
    assert limits.max_draft_tokens > 0
    assert backend.device == torch.device("cpu")
    assert backend.free_memory() > 0


def test_the_cpu_may_forgo_the_bitwise_promise() -> None:
    assert make_backend("cpu", True).capabilities.bitwise
    assert not make_backend("cpu", False).capabilities.bitwise


def test_auto_takes_what_is_there() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert make_backend("auto", None).capabilities.name == wanted


def test_an_unknown_device_is_named_with_those_that_are_known() -> None:
    with pytest.raises(SettingError, match="'tpu' is unknown; known are auto") as caught:
        make_backend("tpu", None)
    assert caught.value.parameter == "device"
    assert all(name in str(caught.value) for name in BACKENDS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_is_named() -> None:
    with pytest.raises(SettingError, match="no CUDA device") as caught:
        make_backend("cuda", None)
    assert caught.value.parameter == "device"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda_does_not_promise_bits() -> None:
    assert not make_backend("cuda", None).capabilities.bitwise
    with pytest.raises(SettingError, match="cannot promise it") as caught:
        make_backend("cuda", True)
    assert caught.value.parameter == "bitwise"
