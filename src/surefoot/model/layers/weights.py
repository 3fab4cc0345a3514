"""Weights of linears, be they floats or int8: joined, reordered, gathered for experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import FixedInput, Int8Weight, Weight
from surefoot.backend.protocol import Backend, Linear
from surefoot.errors import WeightsError
from surefoot.weights.load import TensorTaker

Pick = Callable[[Tensor], Tensor]


def take_alike(take: TensorTaker, shapes: Mapping[str, tuple[int, ...]]) -> list[Weight]:
    """Weights by name, in the order of `shapes`, that one product joins as they read one input.

    Raises:
        WeightsError: some are floats and some int8, or they take their input in different ways.
    """
    weights = [take.weight(name, shape) for name, shape in shapes.items()]
    forms = {name: _form(weight) for name, weight in zip(shapes, weights, strict=True)}
    if len(set(forms.values())) > 1:
        told = ", ".join(f"{name!r} {form}" for name, form in forms.items())
        raise WeightsError(
            f"one product joins these tensors, so all must be stored in the same way: {told}"
        )
    return weights


def take_linears(
    take: TensorTaker, outputs: Mapping[str, int], inputs: int, biased: bool = False
) -> tuple[Weight, Tensor | None]:
    """Weight and bias of linears that read the same input, one below the other.

    Args:
        take: where tensors come from.
        outputs: of each linear, by its name.
        inputs: of all of them.
        biased: whether they have biases. Where inputs are made int8 in a fixed way, the sums of
            products have the bias already, and the stored one is left out.

    Raises:
        WeightsError: see take_alike, or a tensor is missing or has another shape.
    """
    shapes = {name + ".weight": (count, inputs) for name, count in outputs.items()}
    weight = joined(take_alike(take, shapes))
    if not biased:
        return weight, None
    if isinstance(weight, Int8Weight) and weight.fixed is not None:
        for name in outputs:
            take.skip(name + ".bias")
        return weight, None
    return weight, torch.cat([take.take(n + ".bias", (size,)) for n, size in outputs.items()])


def joined(weights: Sequence[Weight]) -> Weight:
    """Alike weights, one below the other."""
    if len(weights) == 1:
        return weights[0]
    eights = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if not eights:
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    assert len(eights) == len(weights), "joined weights are alike"
    fixed = [weight.fixed for weight in eights if weight.fixed is not None]
    added = torch.cat([each.added for each in fixed]) if fixed else None
    return Int8Weight(
        torch.cat([weight.values for weight in eights]),
        torch.cat([weight.scales for weight in eights]),
        None if added is None else FixedInput(fixed[0].scale, fixed[0].offset, added),
    )


def pick_rows(weight: Weight, pick: Pick) -> Weight:
    """Some of the outputs, or all in a new order; `pick` says which, along the first axis."""
    return weight.rows(pick) if isinstance(weight, Int8Weight) else pick(weight)


def pick_columns(weight: Weight, order: Tensor) -> Weight:
    """The inputs in a new order."""
    return weight.columns(order) if isinstance(weight, Int8Weight) else weight[..., order]


def stacked(names: Sequence[str], make: Callable[[str], Weight]) -> Weight:
    """A weight of experts: the experts' own weights, in the order of their names.

    Args:
        names: of the experts, for the message of an error.
        make: gives the weight of an expert. One after the other is called for, so that no more
            than one is there twice.

    Raises:
        WeightsError: they are not stored alike.
    """
    first = make(names[0])
    whole = _room(first, len(names))
    for place, name in enumerate(names):
        weight = make(name) if place else first
        if _form(weight) != _form(first) or (isinstance(weight, Int8Weight) and weight.fixed):
            raise WeightsError(
                f"experts must all be floats, or int8 whose inputs are scaled row by row: "
                f"{names[0]!r} {_form(first)}, {name!r} {_form(weight)}"
            )
        for part, own in zip(_parts(whole), _parts(weight), strict=True):
            part[place] = own
    return whole


def _room(like: Weight, count: int) -> Weight:
    parts = [part.new_empty(count, *part.shape) for part in _parts(like)]
    return Int8Weight(parts[0], parts[1]) if len(parts) > 1 else parts[0]


def _parts(weight: Weight) -> list[Tensor]:
    return [weight.values, weight.scales] if isinstance(weight, Int8Weight) else [weight]


def _form(weight: Weight) -> str:
    """How it is stored, in words."""
    if not isinstance(weight, Int8Weight):
        return "in floats"
    if weight.groups:
        return f"in int8 with scales for {weight.groups} groups of inputs"
    if weight.fixed is None:
        return "in int8"
    return f"in int8 for inputs of scale {weight.fixed.scale} and offset {weight.fixed.offset}"


@dataclass(frozen=True)
class Beside:
    """Linears of one input whose results stand side by side."""

    linears: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, the sum of outputs]."""
        return torch.cat([linear(x) for linear in self.linears], dim=1)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


@dataclass(frozen=True)
class Reordered:
    """A linear whose input comes in another order than its weight has."""

    linear: Linear
    places: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]; the weight's input i is `places[i]` of x."""
        return self.linear(x[:, self.places])

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return self.linear.add(x[:, self.places], stream)


def pack_reordered(backend: Backend, weight: Weight, order: Tensor) -> Linear:
    """A linear for inputs in a new order; its weight takes that on unless groups forbid it."""
    if not isinstance(weight, Int8Weight) or not weight.groups:
        return backend.pack_linear(pick_columns(weight, order), None)
    return Reordered(backend.pack_linear(weight, None), order.argsort().to(backend.device))


def pack_beside(backend: Backend, weights: Sequence[Weight]) -> Linear:
    """One product for weights of one input if all are floats, else one for each."""
    if any(isinstance(weight, Int8Weight) for weight in weights):
        return Beside(tuple(backend.pack_linear(weight, None) for weight in weights))
    return backend.pack_linear(joined(weights), None)
