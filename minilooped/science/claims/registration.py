"""When a band was fixed, and when the runs that it judges were recorded: read from git, for who doubts the order."""

import ast
import subprocess
from functools import cache
from pathlib import Path

from .claim import Claim

HERE = Path(__file__).parent
NOT_COMMITTED = "not committed"


@cache
def _git(*arguments: str, folder: Path) -> str | None:
    """What git prints, or None without git, or outside a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, encoding="utf-8")
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def _source(file: Path) -> tuple[str, ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text)


def band_words(claim: Claim) -> list[str]:
    """The words that the claim's band is made of, as its file has them: each quantity with its numbers.

    Where the numbers stand in a constant, as FLAT, the words with which that was set are another item.
    """
    file = Path(claim.line[0])
    calls = [node for node in ast.walk(_source(file)[1]) if isinstance(node, ast.Call)]
    bands = [
        word.value for call in calls if call.lineno == claim.line[1] for word in call.keywords if word.arg == "band"
    ]
    found, names = [], set()
    for band in bands:
        names |= {node.id for node in ast.walk(band) if isinstance(node, ast.Name)}
        pairs = zip(band.keys, band.values, strict=True) if isinstance(band, ast.Dict) else [(None, band)]
        for key, value in pairs:
            words = [ast.get_source_segment(_source(file)[0], node) or "" for node in (key, value) if node is not None]
            found.append(": ".join(words))
    for home in {file, HERE / "claim.py"}:
        text, module = _source(home)
        for node in module.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if names & {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}:
                found.append(ast.get_source_segment(text, node) or "")
    return found


def _since(words: str) -> tuple[int, str] | None:
    """The commit that first had these words among the claims: its time, and its name and day. None: there is none."""
    log = _git("log", "--format=%ct %h %cs", f"-S{words}", "--", ":(top)minilooped/*claims*", folder=HERE)
    if not log:
        return None
    time, _, commit = log.splitlines()[-1].partition(" ")
    return int(time), commit


def registered(claim: Claim) -> dict[str, str]:
    """The commit that completed the band, and the one that last changed each recorded file, as "abc1234 2026-11-28".

    Empty where the package is no git checkout.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py", folder=HERE) is None:
        return {}
    found = {}
    if since := [_since(words) for words in band_words(claim)]:
        commits = [commit for commit in since if commit is not None]
        found["band"] = max(commits)[1] if len(commits) == len(since) else NOT_COMMITTED
    for path in claim.recorded:
        found[path.name] = _git("log", "-1", "--format=%h %cs", "--", path.name, folder=path.parent) or NOT_COMMITTED
    return found
