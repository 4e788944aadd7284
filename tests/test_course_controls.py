"""What every explorer is made of: controls, and an output that follows them, in a kernel too."""

import base64

import ipywidgets
import pytest
from jupyter_client.manager import run_kernel

from minilooped.course import widgets


def test_explorer_waits_until_the_handle_is_let_go_and_keeps_its_height(shown):
    drawn = []
    controls = dict(
        n=ipywidgets.IntSlider(value=3),
        x=ipywidgets.FloatLogSlider(),
        rule=ipywidgets.Dropdown(options=("none", "sqrt")),
    )
    box = widgets.explorer(lambda **values: drawn.append(values), height="123px", **controls)
    *shown_controls, output = box.children
    assert shown_controls == list(controls.values()) and output.layout.height == "123px"
    assert controls["n"].continuous_update is controls["x"].continuous_update is False
    controls["rule"].value = "sqrt"
    assert drawn == [{"n": 3, "x": 1.0, "rule": "none"}, {"n": 3, "x": 1.0, "rule": "sqrt"}]


@pytest.fixture(scope="module")
def kernel():
    with run_kernel() as client:
        yield client


def captured(kernel, code: str) -> list[tuple[str, dict]]:
    """Run code; type and content of each message that a front end would put into an Output widget.

    An Output that captures says so by setting its msg_id. (nbclient keeps Outputs too, but while it does, on a busy
    machine, it can miss the reply of a cell until the timeout.)
    """
    messages, inside, caught = [], False, []
    reply = kernel.execute_interactive(code, timeout=180, output_hook=messages.append)
    assert reply["content"]["status"] == "ok", reply["content"]
    for message in messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_msg":
            inside = bool(content["data"].get("state", {}).get("msg_id", inside))
        elif inside:
            caught.append((kind, content))
    return caught


def test_in_a_kernel_the_output_holds_the_last_figure_and_its_text(kernel):
    captured(
        kernel,
        """
from minilooped import widgets
from minilooped.probes import Dial

dial = [Dial(n, 2.0 + n / 8, f"{n} times") for n in (1, 2, 4)]
slider, output = widgets.loop_dial(dial, 2).children
""",
    )
    (_, clear), (_, figure), (_, text) = captured(kernel, "slider.value = 4")
    assert clear == {"wait": True}
    assert "at 4 loops 2.500" in figure["metadata"]["image/png"]["alt"]
    assert base64.b64decode(figure["data"]["image/png"]).startswith(b"\x89PNG")
    assert text["text"] == "4 times\n"


def test_in_a_kernel_an_error_while_drawing_is_shown_where_the_figure_would_be(kernel):
    captured(
        kernel,
        """
import ipywidgets
from minilooped import widgets

def draw(n):
    print("drawing", n)
    1 / n

control = ipywidgets.IntSlider(value=1)
box = widgets.explorer(draw, n=control)
""",
    )
    (_, _), (_, text), (kind, error) = captured(kernel, "control.value = 0")
    assert text["text"] == "drawing 0\n"
    assert (kind, error["ename"]) == ("error", "ZeroDivisionError")
