"""The log of a run: log.csv, row by row, and a picture of it."""

import csv
import io
from pathlib import Path
from typing import Any, Literal

from ..files import replacing, write_atomically, writing
from .checkpoint import KEPT

# One row of log.csv. val_loss is an estimate over a few batches; a row without one has None there.
LogRow = dict[str, Any]
LOG_FIELDS = {
    "step": int,
    "loss": float,
    "val_loss": float,
    "lr": float,
    "grad_norm": float,
    "updates": int,
    "tokens": int,
    "seconds": float,
}


def write_log(path: Path, rows: list[LogRow], mode: Literal["w", "a"] = "w") -> None:
    """Write rows to a CSV file, whole or not at all, or append them; a missing value is an empty cell."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, LOG_FIELDS)
    if mode == "w":
        writer.writeheader()
    writer.writerows(rows)
    if mode == "w":
        write_atomically(path, text.getvalue())
        return
    with writing(path, KEPT), open(path, "a", encoding="utf-8", newline="") as file:
        file.write(text.getvalue())


def read_log(path: Path) -> list[LogRow]:
    """The whole rows of a log; one that a kill cut short is left out. ``ValueError`` for a file that is no log."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if None not in row.values()]
        read = [
            {name: of_type(row[name]) if row[name] else None for name, of_type in LOG_FIELDS.items()} for row in rows
        ]
        if any(row["step"] is None or row["loss"] is None for row in read):
            raise ValueError("a row has no step or no loss")
        return read
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is not the log of a run ({error!r}): restore it, or move it away") from error


def plot_losses(history: list[LogRow], val_loss: float, path: Path):
    """Draw the losses of a run over its steps into a PNG file: training, estimates on the way, the final one."""
    from matplotlib.figure import Figure  # slow to import, and needed here only; a Figure of its own asks no backend

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    ax = figure.subplots()
    estimates = [(row["step"], row["val_loss"]) for row in history if row["val_loss"] is not None]
    steps, losses = [row["step"] for row in history], [row["loss"] for row in history]
    ax.plot(steps, losses, linewidth=1, label="training batches")
    if estimates:
        ax.plot(*zip(*estimates, strict=True), marker="s", markersize=5, label="validation, a few batches")
    ax.axhline(val_loss, color="gray", linestyle="--", linewidth=1.5, label=f"validation, all of it: {val_loss:.3f}")
    ax.set(xlabel="step", ylabel="loss, nats per token", title=path.parent.name)
    ax.grid(alpha=0.3)
    ax.legend()
    with replacing(path, KEPT) as temporary:
        figure.savefig(temporary, format="png")
