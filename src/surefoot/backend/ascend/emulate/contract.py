"""What every emulated operator shares: its profile, its errors, how it is called and recorded.

An operator is a method under the vendor's public name with the vendor's published signature. A
`torch.Tensor` stands for device memory; lists and plain numbers stand for host memory. The two are
never mixed up silently: an argument is checked against the annotation of its parameter, and a
test holds the annotations to the published schemas.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import Lasting
from surefoot.backend.reads import unwatched

# A host list: SymInt[] in a published schema.
HostInts: TypeAlias = Sequence[int]
# A list of device tensors: Tensor[] in a published schema.
Tensors: TypeAlias = Sequence[Tensor]


class ContractError(RuntimeError):
    """A call that breaks what the operator's publications say.

    Attributes:
        operator: its public name.
        rule: a few words that name the rule.
    """

    def __init__(self, operator: str, rule: str, message: str) -> None:
        super().__init__(message)
        self.operator = operator
        self.rule = rule


class RefusedError(ContractError):
    """The real stack raises here; the text is shaped like the real one."""


class SilentError(ContractError):
    """The real stack notices nothing here: the device would corrupt memory or read garbage."""


class NotEmulatedError(ContractError):
    """The published operator may allow this; the emulation does not have it."""


@dataclass(frozen=True)
class Profile:
    """How strict the emulation is.

    Attributes:
        size_limits: whether fixed sizes hold (head counts, head sizes, block sizes, most selected
            entries). Everything else holds always: dtypes, lengths, contiguity, ranges.
        most_graphs: how many captured graphs the device has room for.
    """

    size_limits: bool
    most_graphs: int = 64


STRICT = Profile(size_limits=True)
# For models smaller than any that the operators were made for.
RELAXED = Profile(size_limits=False)


class Recorder(Protocol):
    """Takes calls as wholes; see `surefoot.backend.tape`."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` once and keep the call."""
        ...


class Operators:
    """Base of the classes that hold operators.

    Attributes:
        profile: how strict they are.
        tapes: while any is here, the last one takes every call.
        lasting: wide copies of weights.
    """

    def __init__(self, profile: Profile = STRICT) -> None:
        self.profile = profile
        self.tapes: list[Recorder] = []
        self.lasting = Lasting()


O = TypeVar("O", bound=Operators)  # noqa: E741
P = ParamSpec("P")
R = TypeVar("R")


def operator(function: Callable[Concatenate[O, P], R]) -> Callable[Concatenate[O, P], R]:
    """Make a method an operator: its arguments are checked by kind, a tape may take the call."""
    signature = inspect.signature(function)
    kinds = {name: each.annotation for name, each in signature.parameters.items()}
    del kinds["self"]
    strange = [kind for kind in kinds.values() if _base(kind) not in KINDS]
    if strange:
        raise TypeError(f"{function.__name__}: wanted annotations of {list(KINDS)}, came {strange}")

    @functools.wraps(function)
    def checked(self: O, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as problem:
            raise _misspelt(function.__name__, signature, kwargs, problem) from None
        for name, kind in kinds.items():
            if name in given:
                _check_kind(function.__name__, name, kind, given[name])
        with unwatched():
            return function(self, *args, **kwargs)

    @functools.wraps(function)
    def call(self: O, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.tapes:
            taken: R = self.tapes[-1].call(checked, self, *args, **kwargs)
            return taken
        return checked(self, *args, **kwargs)

    return cast("Callable[Concatenate[O, P], R]", call)


def _misspelt(
    name: str, signature: inspect.Signature, given: Mapping[str, object], problem: TypeError
) -> RefusedError:
    """What the real dispatcher says of arguments that fit no parameter."""
    known = list(signature.parameters)[1:]
    unknown = [each for each in given if each not in known]
    if unknown:
        text = f"Unknown keyword argument '{unknown[0]}' for operator 'npu::{name}'."
    else:
        text = f"npu::{name}() {problem}."
    return RefusedError(name, "signature", f"{text} Its parameters: {', '.join(known)}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ints(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_int(each) for each in value)


def _is_tensors(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value)


KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "Tensor": ("a tensor (device memory)", lambda value: isinstance(value, Tensor)),
    "Tensors": ("a list of tensors (device memory)", _is_tensors),
    "HostInts": ("a list of ints (host memory)", _is_ints),
    # A dtype passes as its number, as it does for torch's own operators.
    "int": ("an int (host memory)", lambda value: _is_int(value) or isinstance(value, torch.dtype)),
    "float": ("a number (host memory)", lambda value: _is_int(value) or isinstance(value, float)),
    "bool": ("a bool (host memory)", lambda value: isinstance(value, bool)),
    "str": ("a string", lambda value: isinstance(value, str)),
}


def _base(kind: object) -> str:
    return str(kind).removesuffix(" | None")


def _check_kind(operator_name: str, name: str, kind: str, value: object) -> None:
    base = _base(kind)
    if value is None and base != kind:
        return
    wanted, holds = KINDS[base]
    if not holds(value):
        raise RefusedError(
            operator_name,
            "host or device",
            f"npu::{operator_name}() Expected a value of type '{kind}' for argument '{name}', "
            f"that is {wanted}, but instead found {describe(value)}.",
        )


def describe(value: object) -> str:
    """A value in an error message: tensors by dtype and shape."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
        return f"[{', '.join(describe(each) for each in value)}]"
    return f"{value!r}"


@dataclass(frozen=True)
class Contract:
    """Raises the errors of one operator.

    Attributes:
        operator: its public name.
        kernel: the name of what it calls, which the real error texts carry.
        profile: of the vendor that the call goes to.
    """

    operator: str
    kernel: str
    profile: Profile

    def require(self, holds: bool, rule: str, wanted: str, came: object) -> None:
        """What the real stack checks before it runs."""
        if not holds:
            raise RefusedError(
                self.operator,
                rule,
                f"{self.operator}: {rule}: wanted {wanted}, got {describe(came)}\n"
                f"call {self.kernel} failed, detail: {rule}, error code is 161002\n"
                "[ERROR] ERR01100 OPS call acl api failed",
            )

    def require_size(self, holds: bool, rule: str, wanted: str, came: object) -> None:
        """A fixed size that the real stack checks; a relaxed profile lets it pass."""
        self.require(holds or not self.profile.size_limits, rule, wanted, came)

    def trust(self, holds: bool, rule: str, wanted: str, came: object) -> None:
        """What the real stack leaves to its caller without a check."""
        if not holds:
            raise SilentError(
                self.operator,
                rule,
                f"{self.operator}: {rule}: wanted {wanted}, got {describe(came)}; "
                "the device would not notice and corrupt memory or read garbage",
            )

    def emulated(self, holds: bool, rule: str, wanted: str, came: object) -> None:
        """What the emulation has of the operator."""
        if not holds:
            raise NotEmulatedError(
                self.operator,
                rule,
                f"{self.operator}: {rule}: the emulation has {wanted} only, got {describe(came)}",
            )

    def unused(self, **arguments: object) -> None:
        """Arguments of features that the emulation leaves out: none of them may be given."""
        for name, value in arguments.items():
            self.emulated(value is None, name, "None", value)

    def dtype(self, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
        """The dtype of one tensor."""
        names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
        self.require(tensor.dtype in allowed, f"dtype of {name}", names, tensor)

    def dims(self, name: str, tensor: Tensor, *allowed: int) -> None:
        """The number of dimensions of one tensor."""
        wanted = f"{' or '.join(map(str, allowed))} dimensions"
        self.require(tensor.dim() in allowed, f"dimensions of {name}", wanted, tensor)

    def shape(self, name: str, tensor: Tensor, *wanted: int) -> None:
        """The whole shape of one tensor."""
        self.require(tuple(tensor.shape) == wanted, f"shape of {name}", str(list(wanted)), tensor)

    def contiguous(self, **tensors: Tensor | None) -> None:
        """Each given tensor must lie in memory without gaps, in order."""
        for name, tensor in tensors.items():
            if tensor is not None:
                came = f"strides {tensor.stride()} of shape {list(tensor.shape)}"
                holds = tensor.is_contiguous()
                self.require(holds, f"{name} contiguous", "a contiguous tensor", came)
