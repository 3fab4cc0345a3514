"""Everything surefoot raises on purpose. A message says what was wanted, what came, what to do."""


class SurefootError(Exception):
    """Base of all errors that a user may meet; never carries a bug of our own."""


class SettingError(SurefootError, ValueError):
    """A setting or sampling value is out of range, unknown or contradicts another.

    Attributes:
        parameter: the name of the offending parameter, as the user writes it.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


class PromptError(SettingError):
    """A prompt cannot be served: empty, too long, or with token ids outside the vocabulary."""

    def __init__(self, message: str) -> None:
        super().__init__("prompt", message)


class ModelError(SettingError):
    """The model cannot be found, is damaged, or belongs to no supported family."""

    def __init__(self, message: str, parameter: str = "model") -> None:
        super().__init__(parameter, message)


class WeightsError(ModelError):
    """A tensor is missing, unused, mis-shaped or of an unknown format; the message names it."""


class TokenizerError(ModelError):
    """The model's tokenizer or chat template is absent, damaged or of an unsupported kind."""


class MemoryPlanError(SettingError):
    """Weights or caches do not fit in the memory that may be used."""

    def __init__(self, message: str) -> None:
        super().__init__("memory", message)


class NumericalError(SurefootError):
    """The model produced logits that are not numbers; the request that met them has been ended."""


class EngineClosedError(SurefootError):
    """The engine was used after `close()`."""
