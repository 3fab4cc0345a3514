"""How many threads a kernel is given."""

from __future__ import annotations

import torch

_LEAST = 1 << 16  # multiplications that are worth waking a thread for


def threads_for(parts: int, work: int) -> int:
    """As many as the framework has, but each with a part of its own, and enough to do.

    Args:
        parts: into how many the kernel can be divided.
        work: its multiplications, about.
    """
    return max(1, min(torch.get_num_threads(), parts, work // _LEAST))
