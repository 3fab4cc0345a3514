"""Texts that commands bring along, so that speeds are measured on what people write.

Random token ids would not do: what a drafter guesses right depends on the text.
"""

from __future__ import annotations

PROMPT_TOKENS = 64
"""How long prompts are when a benchmark is not told."""

COPYING = """\
Shopping list, as written:
- two loaves of rye bread
- a small jar of plum jam
- six brown eggs
- half a pound of salted butter

The same list once more, with the prices:
- two loaves of rye bread, 5.40
- a small jar of plum jam, 3.10
- six brown eggs, 2.80
- half a pound of salted butter, 4.20

The same list for a party of four times as many guests:
- eight loaves of rye bread, 21.60
- four small jars of plum jam, 12.40
"""

STORY = """\
The ferry left the harbour before sunrise, and nobody on deck said a word. Ruth had wrapped her
scarf twice around her neck and watched the lights of the town grow small. She had lived there for
eleven years, first in the room above the bakery and then in the white house by the mill, and now
everything she owned stood in two boxes next to her feet. When the first gulls came, an old man
beside her broke his bread in half and threw one part into the air.
"""

REPORT = """\
The bridge was inspected in the last week of October. Both bearings on the northern side show rust
where the paint has come off, but the steel below is sound. The deck drains well except at the
second joint, where leaves had blocked the outlet. We recommend that the joint be cleaned before
winter and that the bearings be painted next year. No repairs are needed to the piers, and the
railing meets the present rules. The next inspection is due in three years.
"""

CLASS = '''\
class Reader:
    """Reads lines from a file and counts them."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self.count = 0

    def read_line(self):
        """Return the next line, or an empty string at the end of the file."""
'''

FUNCTION = '''\
def moving_average(values: list[float], width: int) -> list[float]:
    """Mean of each run of `width` neighbours."""
    if width < 1:
        raise ValueError("width must be at least 1")
    averages = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        if index >= width - 1:
            averages.append(total / width)
    return averages


def moving_sum(values: list[float], width: int) -> list[float]:
'''

TABLE = """\
| station  | line  | platforms | opened |
|----------|-------|-----------|--------|
| Alder    | green | 2         | 1911   |
| Birch    | green | 2         | 1911   |
| Cedar    | blue  | 4         | 1934   |
| Elm      | blue  | 2         | 1934   |
| Hawthorn | red   | 3         | 1958   |
| Juniper  | red   | 2         | 1958   |
"""

LETTER = """\
Dear Mr Okafor,

thank you for the three chairs, which arrived on Tuesday without a scratch. They fit the long table
better than we had hoped, and my daughter has already claimed the one by the window. You asked
whether we would like a fourth one in the same wood. We would, and there is no hurry: if it is ready
before the guests come in March, that is soon enough. Could you tell us how to care for the oil
finish, and whether it stands the sun?
"""

RECIPE = """\
Barley soup for six. Rinse two cups of barley and leave them in cold water overnight. Cut two
onions, three carrots and a leek into small pieces, and fry them slowly in butter until they are
soft. Add the barley and two litres of stock, bring it to the boil, and let it simmer for an hour.
Stir now and then, since barley likes to stick to the bottom. Season with salt, pepper and a little
vinegar, and serve it with the bread of the day before.
"""

SETTINGS = """\
{
  "service": "mailroom",
  "port": 8025,
  "workers": [
    {"name": "intake", "threads": 2, "retries": 3, "timeout_seconds": 20},
    {"name": "sorting", "threads": 4, "retries": 3, "timeout_seconds": 20},
    {"name": "delivery", "threads": 8, "retries": 5, "timeout_seconds": 60},
"""

TALK = """\
Nadia: Did the parcel come?
Ben: Not yet. The tracking page says it is in the depot.
Nadia: It said that yesterday.
Ben: I know. I called them, and they told me to call again tomorrow.
Nadia: Then we need another plan for the birthday.
Ben: We could bake something. We still have flour, sugar and the last of the apples.
Nadia: An apple cake, then. Who is going to buy the candles?
"""

TEXTS = (STORY, FUNCTION, COPYING, REPORT, TABLE, LETTER, SETTINGS, RECIPE, TALK)
"""What `bench` measures on: prose, code, lists, tables and talk."""
