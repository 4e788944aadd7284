"""What is lost when things go wrong: a tenth or less of benchmarks/reliability.py, and its record."""

import json
import random
import shutil
import sys
from contextlib import chdir

import pytest

if sys.platform == "win32":
    pytest.skip("the cases use POSIX limits and signals", allow_module_level=True)

import resource  # noqa: E402 (there is none on Windows)

import reliability  # noqa: E402

CASES = dict(kills=range(1), events=range(4), disk=range(6), configs=range(20), mangled=range(20, 50))


@pytest.mark.parametrize("part", CASES)
def test_nothing_is_lost(part):
    row = reliability.measure(part, CASES[part].start, len(CASES[part]))
    assert not row["failed"], f"python benchmarks/reliability.py --replay {part} NUMBER: {row['failed']}"
    assert len(row["figures"]) > 1, "more than one thing came out"


@pytest.mark.parametrize("number", range(len(reliability.ATTACKS)), ids=reliability.ATTACKS)
def test_a_strangers_file_is_refused(number):
    assert reliability.case("strangers", number) == dict(refused=1)


WRITERS = {
    "sweep": [*reliability.START["sweep"], "--max-steps", "1"],
    "export": ["export", "tiny"],
    "claims": ["claims", "P1-a", "--out", "record"],
    "train": [*reliability.DATA, "--save-every", "0", "--n-layer", "3"],
}


@pytest.mark.parametrize("room", [0, 1500], ids=["no room", "little room"])
@pytest.mark.parametrize("name", WRITERS)
def test_on_a_full_disk_every_command_names_the_file_and_leaves_no_half(tmp_path, name, room):
    shutil.copytree(reliability.stage(), tmp_path, dirs_exist_ok=True)
    before = reliability.contents(tmp_path)
    with chdir(tmp_path), reliability.limit(resource.RLIMIT_FSIZE, room):
        status, message = reliability.command(*WRITERS[name])
    assert status == 1 and "could not be written" in message and "File too large" in message, message
    after = reliability.contents(tmp_path)
    assert before.items() <= after.items() and not [path for path in after if ".tmp" in path]


def test_an_interrupted_cell_leaves_a_kernel_a_model_and_a_run_to_go_on_with(tmp_path):
    assert reliability.kernels(random.Random(1), tmp_path, interrupts=1)


def test_a_long_run_keeps_its_memory_and_its_log(tmp_path):
    figures = reliability.long(random.Random(), tmp_path, steps=200)
    assert figures["log_rows"] == 20
    assert figures["megabytes_at_the_end"] < figures["megabytes_after_a_twentieth"] + 20


def test_the_record_breaks_no_promise_and_the_page_is_made_of_it():
    stored = json.loads(reliability.PATH.read_text(encoding="utf-8"))
    for part, (_, cases, _) in reliability.PARTS.items():
        rows = [row for row in stored["runs"] if row["part"] == part]
        assert sum(row["cases"] for row in rows) == cases and not any(row["failed"] for row in rows), part
    figures = next(row["figures"] for row in stored["runs"] if row["part"] == "long")
    assert figures["megabytes_at_the_end"] < figures["megabytes_after_a_twentieth"] + 5
    assert figures["last_to_first"] < 1.2
    assert reliability.PATH.with_suffix(".md").read_text(encoding="utf-8") == reliability.page(stored)


# -- the checks themselves can fail ------------------------------------------------------------------------------------


def test_a_hang_a_traceback_and_a_second_line_are_noticed(monkeypatch):
    def fails(error: BaseException):
        def command(argv):
            raise error

        monkeypatch.setitem(reliability.cli.COMMANDS, "plan", command)
        return reliability.command("plan")

    assert fails(ValueError("n_loop is 0")) == (1, "n_loop is 0\n")
    with pytest.raises(AssertionError, match="not one line"):
        fails(ValueError("two\nlines"))
    with pytest.raises(AssertionError, match="not one line"):
        fails(ValueError(""))
    with pytest.raises(KeyError):
        fails(KeyError("n_tokens"))
    with pytest.raises(reliability.Hang), reliability.time_limit(0.05):
        while True:
            pass


def test_other_bits_and_another_log_are_noticed(tmp_path):
    run = reliability.stage() / "runs" / "tiny"
    copy = shutil.copytree(run, tmp_path / "copy")
    reliability.same_run(run, copy)
    log = copy / "log.csv"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(AssertionError, match="another log"):
        reliability.same_run(run, copy)
    shutil.rmtree(copy / "step-4")
    with pytest.raises(AssertionError, match="other bits"):
        reliability.same_run(run, copy)
