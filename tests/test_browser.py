"""The loop dial of chapter 0 in a real JupyterLab: opened, run, and moved with the mouse and with the keyboard."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Page, expect, sync_playwright

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CHAPTER = "00_start_here.ipynb"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 180_000  # ms, for a busy machine of two cores; nothing waits longer than it has to

# Less training of a smaller model, and no claim about what only the real training brings.
SHORTER = {
    r"max_steps=\d+": "max_steps=10",
    r"\bpreset\.model\b": "replace(preset.model, n_embd=32)",
    r"(?m)^assert loss\[.*": "",
}

# The code cells once all of them have run, or as soon as one has failed. The status bar is no help here: it says "Idle"
# between two cells, too.
RAN = """() => {
    const cells = jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.toJSON());
    const code = cells.filter(cell => cell.cell_type === "code");
    const failed = code.some(cell => cell.outputs.some(output => output.output_type === "error"));
    return failed || code.every(cell => cell.execution_count) ? code : null;
}"""


def shortened(chapter: Path) -> nbformat.NotebookNode:
    """The chapter before anyone ran it, with a short training."""
    notebook = nbformat.read(chapter, as_version=4)
    found = dict.fromkeys(SHORTER, 0)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            for pattern, shorter in SHORTER.items():
                cell.source, n = re.subn(pattern, shorter, cell.source)
                found[pattern] += n
    assert set(found.values()) == {1}, f"shorten {chapter.name} in another way: {found}"
    return notebook


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """URL of a JupyterLab of its own on a copy of the notebooks. It leaves nothing behind outside `tmp_path`."""
    notebooks, runtime, config = tmp_path / "notebooks", tmp_path / "runtime", tmp_path / "config"
    shutil.copytree(NOTEBOOKS, notebooks, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    nbformat.write(shortened(NOTEBOOKS / CHAPTER), notebooks / CHAPTER)
    no_news = config / "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    no_news.parent.mkdir(parents=True)
    no_news.write_text('{"fetchNews": "false", "checkForUpdates": false}', encoding="utf-8")

    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
        "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", "--IdentityProvider.token=",
        f"--ServerApp.root_dir={notebooks}",
    ]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "JUPYTER_CONFIG_DIR": str(config),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    log = tmp_path / "server.log"
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE / 1000
        while not (url := re.search(r"http://127\.0\.0\.1:\d+/lab\b", log.read_text(encoding="utf-8"))):
            starting = server.poll() is None and time.monotonic() < deadline
            assert starting, f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')}"
            time.sleep(0.1)
        yield f"{url[0]}/tree/{CHAPTER}"
    finally:
        server.terminate()  # it ends its kernels, then itself
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
    assert not list(runtime.glob("kernel-*.json")), "a kernel was left running"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        missing = "needs chromium or google-chrome"
        pytest.fail(missing) if "CI" in os.environ else pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        yield page
        browser.close()


def test_the_dial_turns(page: Page, lab: str, tmp_path: Path):
    page_errors = []
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    try:
        page.goto(lab)
        turn_the_dial(page, static_twin(run_all(page)))
    except BaseException:
        screenshot = tmp_path / "failed.png"
        page.screenshot(path=screenshot)
        print(f"What the browser showed: {screenshot}")
        raise
    assert not page_errors


def run_all(page: Page) -> list[str]:
    """Run every cell; what each of them printed."""
    # The notebook's own indicator is idle before a kernel is connected, and "Run All" is then lost without a word.
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator('[data-command="runmenu:run-all"]').click()
    printed = []
    for cell in page.wait_for_function(RAN).json_value():
        errors = [output for output in cell["outputs"] if output["output_type"] == "error"]
        assert not errors, "\n".join(errors[0]["traceback"])
        printed.append("".join("".join(output.get("text", "")) for output in cell["outputs"]))
    return printed


def static_twin(printed: list[str]) -> dict[int, str]:
    """The sample at each loop count, as the cell below the dial printed it."""
    (twin,) = (text for text in printed if text.startswith("--- loops: 1"))
    _, *parts = re.split(r"(?m)^--- loops: (\d+)\b.*$", twin)
    return {int(n_loop): sample for n_loop, sample in zip(parts[::2], parts[1::2], strict=True)}


def turn_the_dial(page: Page, samples: dict[int, str]):
    """From four loops to eight with the mouse, to one and two with the keyboard: another figure and text each time."""
    assert len({samples[n_loop] for n_loop in (1, 2, 4, 8)}) == 4
    handle, track = page.locator(".widget-slider .noUi-handle"), page.locator(".widget-slider .slider")
    text, figure = page.locator(".widget-output pre"), page.locator(".widget-output img")
    figures = []

    def shows(n_loop: int):
        expect(page.locator(".widget-slider .widget-readout")).to_have_text(str(n_loop))
        expect(text).to_have_text(samples[n_loop])  # but for white space
        expect(figure).to_have_count(1)
        assert f"at {n_loop} loops" in figure.get_attribute("alt")
        figures.append(figure.get_attribute("src"))

    shows(4)
    handle.hover()  # scrolls there first
    page.mouse.down()
    to = track.bounding_box()
    page.mouse.move(to["x"] + to["width"], to["y"] + to["height"] / 2, steps=5)
    page.mouse.up()
    shows(8)
    handle.press("Home")
    shows(1)
    handle.press("ArrowRight")
    shows(2)
    assert len(set(figures)) == 4
