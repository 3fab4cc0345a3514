"""Hyper-connections: several residual streams, mixed anew around every layer.

A layer reads a weighted sum of the streams; what it puts out is added to each stream with a factor,
after the streams were mixed by a doubly stochastic matrix. All weights depend on the token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from surefoot.backend.operands import StreamGates
from surefoot.backend.protocol import Backend, Linear


@dataclass(frozen=True)
class StreamSizes:
    """Of the hyper-connections.

    Attributes:
        count: streams, n.
        rounds: how often the mixing matrix is normalised (`hc_sinkhorn_iters`).
        eps: `hc_eps`.
    """

    count: int
    rounds: int
    eps: float

    @property
    def gates(self) -> int:
        """Coefficients of one layer."""
        return self.count * (self.count + 2)

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights of one connection are."""
        return self.gates * (self.count * hidden + 1) + 3

    def head_parameters(self, hidden: int) -> int:
        """How many numbers the weights of a StreamHead are."""
        return self.count * (self.count * hidden + 1) + 1


@dataclass(frozen=True)
class HyperConnection:
    """What stands around one layer, the norm of its input too.

    Attributes:
        product: from the streams as one vector, n * hidden numbers, to coefficients; in float32.
        gates: how they are used.
        backend: computes.
    """

    product: Linear
    gates: StreamGates
    backend: Backend

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's normed input [T, hidden], and what `write` needs besides."""
        products = self.product(streams.flatten(1).float())
        return self.backend.enter_streams(streams, products, self.gates)

    def write(self, streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor) -> Tensor:
        """The streams [T, n, hidden] after the layer has put out [T, hidden]."""
        return self.backend.write_streams(streams, out, factors, mixing)


@dataclass(frozen=True)
class StreamHead:
    """The streams' weighted sum in the end.

    Attributes:
        product: from the streams as one vector to one number for each stream; in float32.
        ones: [n * hidden] float32, as the norm before it has no weights.
        base: [n] float32.
        scale: [1] float32.
        eps: the least share.
        norm_eps: of the norm.
        backend: computes.
    """

    product: Linear
    ones: Tensor
    base: Tensor
    scale: Tensor
    eps: float
    norm_eps: float
    backend: Backend

    def __call__(self, streams: Tensor) -> Tensor:
        """Map [T, n, hidden] to [T, hidden]."""
        backend = self.backend
        flat = backend.rms_norm(streams.flatten(1).float(), self.ones, self.norm_eps)
        gate = self.product(flat) * self.scale + self.base
        shares = backend.gate(gate.new_ones(gate.shape), gate) + self.eps
        return backend.read_streams(streams, shares)
