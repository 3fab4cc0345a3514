"""What a check asks: texts of many kinds, some with a long beginning in common."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.text.tokenizer import Tokenizer

_PREFACE = """\
You answer questions about the harbour of Anderby. The harbour has three basins. The north basin
takes fishing boats of up to twenty metres, the middle basin takes ferries and pilot boats, and the
south basin is kept for small sailing boats. The tide gate of the south basin opens two hours before
high water and closes two hours after it. Between November and March the crane on the west quay
works on weekdays only. Visitors report to the harbour office first, which stands beside the old
lighthouse and is open from seven in the morning until eight at night. Diesel is sold at the fuel
berth, water is free at every pontoon, and rubbish goes into the green boxes at the gate. Boats that
stay longer than a week pay by the month. Answer in one or two plain sentences, and say so if the
text above does not tell.

"""

_TEXTS = (
    ("one word", "The"),
    (
        "prose",
        "When the rain stopped, the old clockmaker opened the shutters of his shop and looked down "
        "the lane. Nobody had come for a week, and yet the clocks on the wall all showed a "
        "different time, as if each of them were waiting for somebody else. He took the smallest "
        "one down, wound it with care, and",
    ),
    ("question: ferries", _PREFACE + "Question: Which basin do the ferries use?\nAnswer:"),
    ("question: tide", _PREFACE + "Question: When does the tide gate open?\nAnswer:"),
    ("question: crane", _PREFACE + "Question: Does the crane work on a Sunday in June?\nAnswer:"),
    ("question: office", _PREFACE + "Where is the harbour office, and when is it open? It"),
    (
        "code",
        "class Stack:\n"
        "    def __init__(self):\n"
        "        self.items = []\n\n"
        "    def push(self, item):\n"
        "        self.items.append(item)\n\n"
        "    def pop(self):\n"
        "        return self.items.pop()\n\n\n"
        "class Queue:\n"
        "    def __init__(self):\n"
        "        self.items = []\n\n"
        "    def push(self, item):\n",
    ),
    (
        "table",
        "| city | river | bridges |\n"
        "|---|---|---|\n"
        "| Ulm | Danube | 9 |\n"
        "| Basel | Rhine | 6 |\n"
        "| Lyon | Rhone | 14 |\n"
        "| Turin | Po | 11 |\n"
        "| Seville | Guadalquivir | 7 |\n"
        "| Prague |",
    ),
    (
        "list",
        "1. Open the box. Take out the red part. Close the box.\n"
        "2. Open the box. Take out the blue part. Close the box.\n"
        "3. Open the box. Take out the green part. Close the box.\n"
        "4. Open the box. Take out the red part. Close the box.\n"
        "5. Open the box.",
    ),
    (
        "records",
        '{"id": 1, "name": "left wheel", "stock": 14, "place": "A1"}\n'
        '{"id": 2, "name": "right wheel", "stock": 12, "place": "A2"}\n'
        '{"id": 3, "name": "front lamp", "stock": 7, "place": "B1"}\n'
        '{"id": 4, "name": "rear lamp", "stock": 9, "place": "B2"}\n'
        '{"id": 5,',
    ),
    (
        "other letters",
        "Die Straße führt über den Fluss. 川の上に橋があります。 Мост старый, но крепкий. "
        "الجسر قديم. पुल पुराना है। 🌉🚶 Zażółć gęślą jaźń. Der Fluss",
    ),
    (
        "letter",
        "Dear Marta,\n\nthank you for the seeds. The beans came up within a week, the peas took "
        "longer, and of the pumpkins only one has shown itself so far. Next spring I want to try "
        "the long white radishes that you wrote about. Could you send me",
    ),
)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a check.

    Attributes:
        label: short name for reports.
        tokens: its token ids, at least one.
    """

    label: str
    tokens: Sequence[int]


def text_prompts(tokenizer: Tokenizer) -> list[Prompt]:
    """The built-in texts: prose, code, tables, lists, questions on one text, many scripts."""
    return [Prompt(label, tokenizer.encode(text)) for label, text in _TEXTS]


def random_prompts(vocab_size: int, seed: int) -> list[Prompt]:
    """Random token ids for a model without tokenizer, with repetition and common beginnings.

    Args:
        vocab_size: ids lie below it.
        seed: the same seed brings the same prompts.
    """
    rng = random.Random(f"{seed}/prompts")

    def some(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    preface = some(140)
    prompts = [Prompt("one token", some(1))]
    prompts += [Prompt(f"random ids {number}", some(10 + 13 * number)) for number in range(1, 4)]
    prompts += [
        Prompt(f"common beginning {number}", preface + some(3 * number)) for number in range(1, 5)
    ]
    for number in range(1, 5):
        motif = some(3 + 4 * number)
        prompts.append(Prompt(f"repetition {number}", motif * 4 + motif[:2]))
    return prompts


def fit(prompts: Sequence[Prompt], longest: int, length: int | None = None) -> list[Prompt]:
    """The prompts, each repeated and cut to `length` tokens if given, then cut to `longest`.

    The beginning stays, so what prompts have in common stays too.

    Args:
        prompts: any number.
        longest: tokens there is room for, at least 1.
        length: tokens wanted.
    """
    sized = []
    for prompt in prompts:
        tokens = list(prompt.tokens)
        if length is not None:
            tokens = (tokens * (length // len(tokens) + 1))[:length]
        sized.append(Prompt(prompt.label, tokens[:longest]))
    return sized
