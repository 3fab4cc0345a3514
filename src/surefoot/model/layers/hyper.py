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
class Normed:
    """The product of streams, normed as one vector, with a matrix; in float32.

    Attributes:
        product: from n * hidden numbers.
        ones: [n * hidden] float32, as the norm has no weights.
        eps: of the norm.
        backend: computes.
    """

    product: Linear
    ones: Tensor
    eps: float
    backend: Backend

    def __call__(self, streams: Tensor) -> Tensor:
        """Map [T, n, hidden] to [T, outputs]."""
        flat = streams.flatten(1).float()
        return self.product(self.backend.rms_norm(flat, self.ones, self.eps))


@dataclass(frozen=True)
class HyperConnection:
    """What stands around one layer.

    Attributes:
        normed: to the coefficients.
        gates: how they are used.
    """

    normed: Normed
    gates: StreamGates

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's input [T, hidden], and what `write` needs besides."""
        backend = self.normed.backend
        shares, factors, mixing = backend.gate_streams(self.normed(streams), self.gates)
        return backend.read_streams(streams, shares), factors, mixing

    def write(self, streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor) -> Tensor:
        """The streams [T, n, hidden] after the layer has put out [T, hidden]."""
        return self.normed.backend.write_streams(streams, out, factors, mixing)


@dataclass(frozen=True)
class StreamHead:
    """The streams' weighted sum in the end.

    Attributes:
        normed: to one number for each stream.
        base: [n] float32.
        scale: [1] float32.
        eps: the least share.
    """

    normed: Normed
    base: Tensor
    scale: Tensor
    eps: float

    def __call__(self, streams: Tensor) -> Tensor:
        """Map [T, n, hidden] to [T, hidden]."""
        backend = self.normed.backend
        gate = self.normed(streams) * self.scale + self.base
        shares = backend.gate(gate.new_ones(gate.shape), gate) + self.eps
        return backend.read_streams(streams, shares)
