"""The text: Python's own standard library, its split, its licences and its tokenizer."""

from __future__ import annotations

import hashlib
import json
import platform
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
END_ID = 0
VOCABULARY = 4096
HELD_OUT_SHARE = 0.03
LONGEST_HELD_OUT = 120_000
SHORTEST = 200

# Tests, tables of numbers, other people's wheels and what a build wrote about its machine.
_SKIPPED_FOLDERS = re.compile(
    r"test.*|idle_test|encodings|lib2to3|site-packages|dist-packages|_bundled|__pycache__|config-.*"
)
_SKIPPED_FILES = re.compile(r"test.*|_sysconfigdata.*")

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Source:
    """One file of the text.

    Attributes:
        path: below the library's folder, with forward slashes.
        sha256: of the file's bytes.
        size: bytes.
        held_out: whether training never sees it.
    """

    path: str
    sha256: str
    size: int
    held_out: bool


@dataclass(frozen=True)
class Corpus:
    """The text as training wants it.

    Attributes:
        train: token ids of all training files in a row, `END_ID` before each.
        held_out: token ids of each file kept back, `END_ID` first.
        held_out_bytes: size of the files kept back; bits per byte divide by it.
    """

    train: Ids
    held_out: tuple[Ids, ...]
    held_out_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """On the files kept back, without the ids that open them."""
        return self.held_out_bytes / sum(len(ids) - 1 for ids in self.held_out)


def library_folder() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_sources(root: Path, seed: int) -> list[tuple[Source, str]]:
    """Read the library's files and choose whole files, about 3 % of the bytes, to keep back."""
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for path in _python_files(root):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= SHORTEST and text not in seen:
            seen.add(text)
            texts[path.relative_to(root).as_posix()] = text
    kept_back = _choose_held_out(texts, seed)
    return [(_source(path, text, path in kept_back), text) for path, text in texts.items()]


def _python_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        *folders, name = path.relative_to(root).parts
        if not _SKIPPED_FILES.fullmatch(name) and not any(
            _SKIPPED_FOLDERS.fullmatch(folder) for folder in folders
        ):
            yield path


def _choose_held_out(texts: dict[str, str], seed: int) -> set[str]:
    wanted = HELD_OUT_SHARE * sum(len(text.encode()) for text in texts.values())
    order = sorted(texts)
    random.Random(seed).shuffle(order)
    chosen: set[str] = set()
    size = 0
    for path in order:
        if size < wanted and len(texts[path]) <= LONGEST_HELD_OUT:
            chosen.add(path)
            size += len(texts[path].encode())
    return chosen


def _source(path: str, text: str, held_out: bool) -> Source:
    content = text.encode()
    return Source(path, hashlib.sha256(content).hexdigest(), len(content), held_out)


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level byte-pair tokenizer; `END` has id 0 and every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare(root: Path, to: Path, *, seed: int, vocabulary: int) -> Corpus:
    """Write tokenizer, token ids, source list and licences of the library at `root` into `to`."""
    to.mkdir(parents=True, exist_ok=True)
    sources = find_sources(root, seed)
    training = [text for source, text in sources if not source.held_out]
    tokenizer = train_tokenizer(training, vocabulary)
    tokenizer.save(str(to / "tokenizer.json"))

    def ids(text: str) -> Ids:
        return np.array([END_ID, *tokenizer.encode(text).ids], dtype=np.int32)

    held_out = [ids(text) for source, text in sources if source.held_out]
    np.save(to / "train.npy", np.concatenate([ids(text) for text in training]))
    np.savez(to / "held_out.npz", *held_out)
    listing = {
        "text": f"Standard library of Python {platform.python_version()}, .py files only",
        "sources": [asdict(source) for source, _ in sources],
    }
    (to / "sources.json").write_text(json.dumps(listing, indent=1) + "\n", encoding="utf-8")
    _write_licences(root, to, sources)
    return load(to)


def load(folder: Path) -> Corpus:
    """Read back what `prepare` wrote."""
    sources = read_sources(folder / "sources.json")
    with np.load(folder / "held_out.npz") as archive:
        held_out = tuple(archive[name] for name in archive.files)
    size = sum(source.size for source in sources if source.held_out)
    return Corpus(np.load(folder / "train.npy"), held_out, size)


def read_sources(path: Path) -> list[Source]:
    """Read the source list."""
    return [Source(**fields) for fields in json.loads(path.read_text("utf-8"))["sources"]]


def _write_licences(root: Path, to: Path, sources: list[tuple[Source, str]]) -> None:
    licence = (root / "LICENSE.txt").read_text(encoding="utf-8")
    (to / "LICENSE-python.txt").write_text(licence, encoding="utf-8")
    parts = [
        "Copyright and licence notices inside the files of the text, as they stand there.\n"
        "LICENSE-python.txt holds the licence of the library as a whole.\n"
    ]
    for source, text in sources:
        notices = "\n[...]\n".join(find_notices(text))
        if notices:
            parts.append(f"==== {source.path}\n{notices}\n")
    (to / "NOTICES.txt").write_text("\n".join(parts), encoding="utf-8")


def find_notices(text: str) -> list[str]:
    """Return the comments and string blocks of a file that speak of a copyright or a licence.

    A notice is the run of lines around a match, up to the first line that is code or a quote.
    """
    lines = text.splitlines()
    found: list[str] = []
    after = 0
    for index, line in enumerate(lines):
        if index < after or not re.search(r"copyright\s*(\(c\)|\d|by|©)|licen[cs]ed? ", line, re.I):
            continue
        first, after = _notice_bounds(lines, index)
        found.append("\n".join(lines[first:after]).strip())
    return found


def _notice_bounds(lines: list[str], index: int) -> tuple[int, int]:
    comment = lines[index].lstrip().startswith("#")

    def belongs(line: str) -> bool:
        return line.lstrip().startswith("#") if comment else '"""' not in line

    first = index
    while first > 0 and index - first < 40 and belongs(lines[first - 1]):
        first -= 1
    last = index + 1
    while last < len(lines) and last - index < 60 and belongs(lines[last]):
        last += 1
    return first, last
