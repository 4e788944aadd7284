"""Files: whole or not at all whenever a process dies, nothing of others touched, every field checked by name."""

import errno
import io
import json
import math
import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from disk_events import Killed, all_events, disturbed

from minilooped.files import (
    SCRATCH,
    Report,
    at_least,
    check,
    one_of,
    parse_json,
    read_json,
    refuse_links,
    replacing,
    say,
    scratch,
    write_atomically,
)

# ----------------------------------------------------------------------------------------------------------------------
# Writing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("what", ["kill", "error", "full disk"])
def test_old_or_new_whatever_happens_and_when(tmp_path, what):
    """A kill, an error or a full disk at every event of the file system."""
    path = tmp_path / "file"
    write_atomically(path, "old")
    count = all_events(tmp_path, lambda: write_atomically(path, "new"))
    assert count >= 4, "a folder is made, a file opened, flushed, renamed"
    for number in range(count):
        write_atomically(path, "old")
        with disturbed(tmp_path, number, what) as died:
            write_atomically(path, "new")
        assert path.read_text(encoding="utf-8") in ("old", "new")
        assert died.error is None or isinstance(died.error, Killed | OSError)
        if what != "kill":
            assert names(tmp_path) == ["file"] or died.error is None, "nothing half-written is left"
    write_atomically(path, "new")
    assert names(tmp_path) == ["file"] and path.read_text(encoding="utf-8") == "new", "what kills left is gone"


def test_no_name_that_a_user_could_have_is_written_or_deleted(tmp_path):
    mine = {"file.tmp": "mine", "file.json.tmp": "mine", ".minilooped-notes": "mine"}
    for name, content in mine.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / f"{SCRATCH}file").write_text("not a folder", encoding="utf-8")
    write_atomically(tmp_path / "file", "new")
    assert all((tmp_path / name).read_text(encoding="utf-8") == "mine" for name in mine)
    assert names(tmp_path) == sorted([*mine, f"{SCRATCH}file", "file"])


def test_a_file_gets_the_rights_that_any_new_file_gets(tmp_path):
    (tmp_path / "usual").touch()
    write_atomically(tmp_path / "file", "new")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def hold(place: Path, ready, go_on):
    with scratch(place) as folder:
        (folder / "half").touch()
        ready.set()
        go_on.wait(60)


@pytest.mark.skipif(os.name != "posix", reason="a kill that leaves no trace")
def test_scratch_of_a_living_process_stays_and_that_of_a_dead_one_goes(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, go_on = context.Event(), context.Event()
    child = context.Process(target=hold, args=(tmp_path, ready, go_on), daemon=True)
    child.start()
    assert ready.wait(60)
    theirs = names(tmp_path)
    write_atomically(tmp_path / "file", "new")
    assert names(tmp_path) == [*theirs, "file"]
    child.kill()
    child.join()
    assert names(tmp_path) == [*theirs, "file"]
    write_atomically(tmp_path / "file", "new")
    assert names(tmp_path) == ["file"]


def test_scratch_inside_scratch_and_a_link_for_one(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "half").touch()
    place = tmp_path / "place"
    place.mkdir()
    (place / f"{SCRATCH}12345678").symlink_to(secret)
    with scratch(place) as outer, scratch(place) as inner:
        assert outer != inner and outer.is_dir() and inner.is_dir()
    assert names(place) == [f"{SCRATCH}12345678"] and names(secret) == ["half"]


def test_what_cannot_be_written_is_one_line_with_the_file(tmp_path):
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "inside").touch()
    with pytest.raises(OSError, match="file could not be written .*: make room or choose another place; all is well"):
        write_atomically(tmp_path / "file", "new", "all is well")
    with pytest.raises(OSError, match="could not be written"), replacing(tmp_path / "other"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert names(tmp_path) == ["file"]


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def test_only_links_that_lead_out_are_refused_and_only_where_they_matter(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").touch()
    (folder / "inside").touch()
    (folder / "fine").symlink_to("inside")
    refuse_links(folder)
    (folder / "out").symlink_to("../secret")
    refuse_links(folder, ["inside", "fine", "missing"])
    for files in (None, ["inside", "out"]):
        with pytest.raises(ValueError, match="out is a link that leads out of .*folder: put the file itself there"):
            refuse_links(folder, files)


NEEDS = {
    "count": at_least(1),
    "format": one_of(1, 2),
    "share": float,
    "name": str,
    "done": bool,
    "threads": int | None,
    "parts": [{"file": str, "sizes": [int]}],
    "of": {"what": str | None},
}
GOOD = {
    "count": 3,
    "format": 1,
    "share": 0.5,
    "name": "x",
    "done": False,
    "threads": 2,
    "parts": [{"file": "a", "sizes": []}, {"file": "b", "sizes": [1, -2]}],
    "of": {"what": "y"},
    "and": "what it does not know",
}


def changed(place: str, value: object = None, *, without: bool = False) -> dict:
    content = json.loads(json.dumps(GOOD))
    *path, last = [int(part) if part.isdigit() else part for part in place.split("/")]
    target = content
    for part in path:
        target = target[part]
    if without:
        del target[last]
    else:
        target[last] = value
    return content


@pytest.mark.parametrize("content", [GOOD, changed("share", 3), changed("threads"), changed("threads", without=True)])
def test_what_was_written_is_read(tmp_path, content):
    write_atomically(tmp_path / "x.json", json.dumps(content))
    assert read_json(tmp_path / "x.json", NEEDS, "the way out") == content


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (changed("count"), "count is null, but has to be a whole number of 1 or more"),
        (changed("count", 0), "count is 0, but has to be a whole number of 1 or more"),
        (changed("count", True), "count is true, but has to be"),
        (changed("count", 1.0), "count is 1.0, but has to be"),
        (changed("count", without=True), "count is missing"),
        (changed("format", 3), "format is 3, but has to be 1 or 2"),
        (changed("format", True), "format is true, but has to be 1 or 2"),
        (changed("share", "0.5"), 'share is "0.5", but has to be a finite number'),
        (changed("share", math.nan), "share is NaN, but has to be a finite number"),
        (changed("share", True), "share is true, but has to be"),
        (changed("name", ["x"]), r'name is \["x"\], but has to be text'),
        (changed("name", 7), "name is 7, but has to be text"),
        (changed("done", 0), "done is 0, but has to be true or false"),
        (changed("threads", "abc"), 'threads is "abc", but has to be a whole number or null'),
        (changed("parts", {}), r"parts is {}, but has to be a list"),
        (changed("parts/1", 5), r"parts\[1\] is 5, but has to be an object"),
        (changed("parts/1/file"), r"parts\[1\].file is null, but has to be text"),
        (changed("parts/1/sizes/1", "a"), r'parts\[1\].sizes\[1\] is "a", but has to be a whole number'),
        (changed("parts", without=True), "parts is missing"),
        (changed("of", without=True), "of is missing"),
        (changed("of/what", 3), "of.what is 3, but has to be text or null"),
        ([GOOD], r"the content is \[{.* \.\.\., but has to be an object"),
        (None, "the content is null, but has to be an object"),
    ],
)
def test_an_odd_value_is_one_line_with_file_and_field(tmp_path, content, line):
    write_atomically(tmp_path / "x.json", json.dumps(content))
    with pytest.raises(ValueError, match=rf"x\.json: {line}.*: restore it$") as caught:
        read_json(tmp_path / "x.json", NEEDS, "restore it")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("content", [b"", b"{", b"\xff{}", b"[" * 100_000, b'{"count": ' + b"9" * 5000 + b"}"])
def test_what_is_not_json_is_one_line_with_the_file(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.json is not JSON \(.*\): restore it$"):
        read_json(tmp_path / "x.json", NEEDS, "restore it")


def test_what_is_missing_or_read_elsewhere_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x\.json is missing: restore it"):
        read_json(tmp_path / "x.json", NEEDS, "restore it")
    with pytest.raises(ValueError, match="the first line of x.csv: count is missing: begin anew"):
        parse_json("{}", "the first line of x.csv", NEEDS, "begin anew")
    check(5, int)
    with pytest.raises(ValueError, match="seconds is Infinity, but has to be a finite number"):
        check({"seconds": math.inf}, {"seconds": float})


# ----------------------------------------------------------------------------------------------------------------------
# Saying


class Closing(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def flush(self):
        self.write("")


def test_what_only_reports_ends_nothing(monkeypatch):
    windows = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", newline="")
    monkeypatch.setattr("sys.stdout", windows)
    say("Käse, 日本")
    assert windows.buffer.getvalue().decode("cp1252") == "Käse, ??\n"
    closed = io.StringIO()
    closed.close()
    for stream in (closed, Closing(), None):
        monkeypatch.setattr("sys.stdout", stream)
        say("nobody reads this")
    Report(None).flush()
