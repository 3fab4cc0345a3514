"""The vendor's operators that this backend calls, by their public names; the one way to them.

Signatures are the published ones, cut to the arguments that are used. What each operator demands
is written in `emulate`, which enforces it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch
from torch import Tensor

from surefoot.errors import SettingError


class Graph(Protocol):
    """A captured sequence of device calls."""

    def replay(self) -> None:
        """Run it."""
        ...

    def update(self, cpu_update_input: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Give captured operators new host lists; one mapping serves all of them."""
        ...


class Device(Protocol):
    """The vendor's device module."""

    def NPUGraph(self) -> Graph:  # the public name
        """An empty graph."""
        ...

    def graph(
        self, npu_graph: Graph, *, auto_dispatch_capture: bool
    ) -> AbstractContextManager[object]:
        """Capture what is called inside."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        ...


class Vendor(Protocol):
    """The vendor's module."""

    @property
    def npu(self) -> Device:
        """The device module."""
        ...

    def npu_fused_infer_attention_score(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        atten_mask: Tensor | None = None,
        actual_seq_lengths: Sequence[int] | None = None,
        actual_seq_lengths_kv: Sequence[int] | None = None,
        block_table: Tensor | None = None,
        num_heads: int = 1,
        scale: float = 1.0,
        input_layout: str = "BSH",
        num_key_value_heads: int = 0,
        sparse_mode: int = 0,
        block_size: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Attention over pages."""
        ...

    def npu_scatter_nd_update_(self, input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        """Write updates at indices, in place."""
        ...

    def npu_rms_norm(
        self,
        input: Tensor,
        gamma: Tensor,
        epsilon: float = 1e-6,
    ) -> tuple[Tensor, Tensor]:
        """The normed input, and 1 / root mean square."""
        ...

    def npu_rotary_mul(
        self,
        input: Tensor,
        r1: Tensor,
        r2: Tensor,
        rotary_mode: str = "half",
    ) -> Tensor:
        """Input * cos + rotated input * sin."""
        ...

    def npu_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Input times the transposed weight, plus bias."""
        ...

    def npu_swiglu(self, input: Tensor, dim: int = -1) -> Tensor:
        """Silu of the left half times the right half."""
        ...

    def npu_lightning_indexer(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        *,
        actual_seq_lengths_query: Tensor | None = None,
        actual_seq_lengths_key: Tensor | None = None,
        block_table: Tensor | None = None,
        layout_query: str = "BSND",
        layout_key: str = "BSND",
        sparse_count: int = 2048,
        sparse_mode: int = 3,
    ) -> tuple[Tensor, Tensor]:
        """The positions with the greatest scores, in no particular order, then -1."""
        ...

    def npu_sparse_flash_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sparse_indices: Tensor,
        scale_value: float,
        *,
        block_table: Tensor | None = None,
        actual_seq_lengths_query: Tensor | None = None,
        actual_seq_lengths_kv: Tensor | None = None,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
        sparse_block_size: int = 1,
        layout_query: str = "BSND",
        layout_kv: str = "BSND",
        sparse_mode: int = 3,
        attention_mode: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of each row over the positions that its indices name."""
        ...

    def npu_chunk_gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        beta: Tensor | None = None,
        initial_state: Tensor | None = None,
        actual_seq_lengths: Tensor | None = None,
        scale: float | None = None,
        g: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs and final states."""
        ...

    def npu_dynamic_quant(
        self,
        input: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """int8 numbers and a scale for each row."""
        ...

    def npu_quant_matmul(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        *,
        pertoken_scale: Tensor | None = None,
        bias: Tensor | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """int8 product, scaled."""
        ...

    def npu_moe_init_routing_v2(
        self,
        x: Tensor,
        expert_idx: Tensor,
        *,
        active_num: int = -1,
        expert_capacity: int = -1,
        expert_num: int = -1,
        drop_pad_mode: int = 0,
        expert_tokens_num_type: int = 0,
        expert_tokens_num_flag: bool = False,
        quant_mode: int = -1,
        active_expert_range: Sequence[int] = (),
        row_idx_type: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows sorted by expert, where each went, tokens of each expert, scales."""
        ...

    def npu_grouped_matmul(
        self,
        x: Sequence[Tensor],
        weight: Sequence[Tensor],
        *,
        scale: Sequence[Tensor] | None = None,
        per_token_scale: Sequence[Tensor] | None = None,
        group_list: Tensor | None = None,
        split_item: int = 0,
        group_type: int | None = None,
        group_list_type: int = 0,
        output_dtype: torch.dtype | None = None,
    ) -> Sequence[Tensor]:
        """Products of groups of rows with a weight each."""
        ...

    def npu_moe_token_unpermute(
        self, permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None
    ) -> Tensor:
        """Sums of each token's rows, weighted."""
        ...


def installed_vendor() -> Vendor:
    """The vendor's module on a machine that has it.

    Raises:
        SettingError: it is not installed, or does not start.
    """
    try:
        return cast("Vendor", importlib.import_module("torch_npu"))
    except (ImportError, OSError, RuntimeError) as error:
        raise SettingError(
            "device",
            "'npu' was asked for, and torch_npu cannot be used here "
            f"({type(error).__name__}: {error}); --emulate runs the same operators on the CPU",
        ) from error
