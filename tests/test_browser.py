"""Chapters in a real JupyterLab: opened, run, and their widgets moved with the mouse and with the keyboard."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from minilooped.course import widgets

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 180_000  # ms, for a busy machine of two cores; nothing waits longer than it has to

# The chapters opened here, and what makes each of them short. Chapter 0: less training of a smaller model, less text to
# measure it on, and no claim about what only the real training brings.
CHAPTERS = {
    "00_start_here.ipynb": {
        r"max_steps=\d+": "max_steps=10",
        r"\bpreset\.model\b": "replace(preset.model, n_embd=32)",
        r"\[::6\]": "[::100]",
        r"(?m)^assert loss\[.*": "",
    },
    "02_random_walk_or_straight_line.ipynb": {},
}

# The code cells once all of them have run, or as soon as one has failed. The status bar is no help here: it says "Idle"
# between two cells, too.
RAN = """() => {
    const cells = jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.toJSON());
    const code = cells.filter(cell => cell.cell_type === "code");
    const failed = code.some(cell => cell.outputs.some(output => output.output_type === "error"));
    return failed || code.every(cell => cell.execution_count) ? code : null;
}"""


def shortened(chapter: Path, changes: Mapping[str, str]) -> nbformat.NotebookNode:
    """The chapter before anyone ran it, with each change made where its pattern stands, once."""
    notebook = nbformat.read(chapter, as_version=4)
    found = dict.fromkeys(changes, 0)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            for pattern, shorter in changes.items():
                cell.source, n = re.subn(pattern, shorter, cell.source)
                found[pattern] += n
    assert all(n == 1 for n in found.values()), f"shorten {chapter.name} in another way: {found}"
    return notebook


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        missing = "needs chromium or google-chrome"
        pytest.fail(missing) if "CI" in os.environ else pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a JupyterLab of its own on a copy of the notebooks. It leaves nothing behind outside its folder."""
    folder = tmp_path_factory.mktemp("lab")
    notebooks, runtime, config = folder / "notebooks", folder / "runtime", folder / "config"
    notebooks.mkdir()
    for name, changes in CHAPTERS.items():
        nbformat.write(shortened(NOTEBOOKS / name, changes), notebooks / name)
    no_news = config / "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    no_news.parent.mkdir(parents=True)
    no_news.write_text('{"fetchNews": "false", "checkForUpdates": false}', encoding="utf-8")

    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={notebooks}",
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "JUPYTER_CONFIG_DIR": str(config),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE / 1000
        while not (url := re.search(r"http://127\.0\.0\.1:\d+/lab\b", log.read_text(encoding="utf-8"))):
            starting = server.poll() is None and time.monotonic() < deadline
            assert starting, f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')}"
            time.sleep(0.1)
        yield url[0]
    finally:
        server.terminate()  # it ends its kernels, then itself
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
    assert not list(runtime.glob("kernel-*.json")), "a kernel was left running"


@contextmanager
def ran(browser: Browser, lab: str, name: str, tmp_path: Path) -> Iterator[tuple[Page, list[str]]]:
    """The page of a chapter of which every cell has run, and what each of them printed.

    Fails at the end if there was an error in the page; after any failure a screenshot is kept.
    """
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    page_errors = []
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    try:
        page.goto(f"{lab}/workspaces/{Path(name).stem}/tree/{name}")  # a workspace opens with its own tabs only
        yield page, run_all(page)
        assert not page_errors
    except BaseException:
        screenshot = tmp_path / "failed.png"
        page.screenshot(path=screenshot)
        print(f"What the browser showed: {screenshot}")
        raise
    finally:
        page.close()


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


def widget(page: Page, call: str) -> Locator:
    """The output of the cell that calls for a widget."""
    return page.locator(".jp-CodeCell").filter(has_text=call).locator(".jp-Cell-outputArea")


def drag(page: Page, slider: Locator, to: float) -> None:
    """Take a slider's handle with the mouse to a point of its track, 0 left to 1 right, and let go."""
    slider.locator(".noUi-handle").hover()  # scrolls there first
    page.mouse.down()
    track = slider.locator(".slider").bounding_box()
    page.mouse.move(track["x"] + to * track["width"], track["y"] + track["height"] / 2, steps=5)
    page.mouse.up()


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 0


def test_the_loop_dial_turns(browser: Browser, lab: str, tmp_path: Path):
    """From four loops to eight with the mouse, to one and two with the keyboard: another figure and text each time."""
    with ran(browser, lab, "00_start_here.ipynb", tmp_path) as (page, printed):
        samples = static_twin(printed)
        assert len({samples[n_loop] for n_loop in (1, 2, 4, 8)}) == 4
        dial = widget(page, "widgets.loop_dial(")
        slider, figure, text = dial.locator(".widget-slider"), dial.locator("img"), dial.locator(".widget-output pre")
        figures = []

        def shows(n_loop: int):
            expect(slider.locator(".widget-readout")).to_have_text(str(n_loop))
            expect(text).to_have_text(samples[n_loop])  # but for white space
            expect(figure).to_have_count(1)
            assert f"at {n_loop} loops" in figure.get_attribute("alt")
            figures.append(figure.get_attribute("src"))

        shows(4)
        drag(page, slider, to=1)
        shows(8)
        slider.locator(".noUi-handle").press("Home")
        shows(1)
        slider.locator(".noUi-handle").press("ArrowRight")
        shows(2)
        assert len(set(figures)) == 4


def static_twin(printed: list[str]) -> dict[int, str]:
    """The sample at each loop count, as the cell below the dial printed it."""
    (twin,) = (text for text in printed if text.startswith("--- loops: 1"))
    _, *parts = re.split(r"(?m)^--- loops: (\d+)\b.*$", twin)
    return {int(n_loop): sample for n_loop, sample in zip(parts[::2], parts[1::2], strict=True)}


# ----------------------------------------------------------------------------------------------------------------------
# Chapter 2


def test_the_slider_of_the_depth_redraws_norm_growth(browser: Browser, lab: str, tmp_path: Path, monkeypatch):
    """From 64 visits to 128 and to 16 with the mouse, to 32 with the keyboard: each time the static twin's figure."""
    twin = []
    monkeypatch.setattr("IPython.display.display", twin.append)
    with ran(browser, lab, "02_random_walk_or_straight_line.ipynb", tmp_path) as (page, _):
        explorer = widget(page, "widgets.norm_growth()")
        slider, figure = explorer.locator(".widget-slider").filter(has_text="visits N"), explorer.locator("img")
        figures = []

        def shows(N: int):
            widgets.draw_norm_growth(N=N)
            expect(slider.locator(".widget-readout")).to_have_text(str(N))
            expect(figure).to_have_attribute("alt", twin[-1].alt)  # with the norms it says
            assert figure.evaluate("image => image.complete && image.naturalWidth") == 700
            figures.append(figure.get_attribute("src"))

        shows(64)
        drag(page, slider, to=1)
        shows(128)
        drag(page, slider, to=2 / 5)  # of the six positions 4, 8, 16, 32, 64, 128
        shows(16)
        slider.locator(".noUi-handle").press("ArrowRight")
        shows(32)
        assert len(set(figures)) == 4
