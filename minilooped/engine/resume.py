"""Whether a run may go on with these settings and this data, and what about it is no longer as it was."""

from pathlib import Path
from typing import Any

from ..data import check_same_tokenizer, same_tokens, tokenizer_from_spec
from ..data.storage import Tokens
from .checkpoint import run_tokenizer

# What a resumed run may change: where it and its data lie, where it runs, what memory it takes, how long it goes on,
# how often it reports. The bytes of the data are compared instead of their place, and the tokens of a step instead of
# their division into micro-batches. A new `max_steps` moves the schedule, and so does a new `decay_steps` of wsd.
FREE_ON_RESUME = {
    *("name", "runs", "data", "device", "threads", "compile", "peak_tflops", "recompute_loops", "loss_chunk"),
    *("max_steps", "log_every", "eval_every", "eval_batches", "sample_every", "save_every", "batch_size", "grad_accum"),
}


def changes(before: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any]) -> str:
    """What differs in the settings of model and training, but for those that a resumed run may change.

    Each of the three is {"model": ..., "train": ...}. A setting that came later than the run had its default.
    """
    before = {part: defaults[part] | before[part] for part in ("model", "train")}
    free = FREE_ON_RESUME | ({"decay_steps"} if before["train"]["schedule"] == "wsd" else set())
    found = [
        f"{name} was {before[part][name]!r} and is now {value!r}"
        for part in before
        for name, value in now[part].items()
        if name not in free and before[part][name] != value
    ]
    was, is_now = (settings["train"]["batch_size"] * settings["train"]["grad_accum"] for settings in (before, now))
    if was != is_now:
        found.append(f"batch_size x grad_accum was {was} and is now {is_now}")
    return "; ".join(found)


def refuse_changes(run: Path, stored: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any]) -> None:
    """``ValueError`` that lists what differs from the settings the run was trained with."""
    if changed := changes(stored, now, defaults):
        raise ValueError(f"{run} cannot go on with other settings ({changed}): give the old ones, or a new run")
    check_same_tokenizer(run_tokenizer(run, stored), tokenizer_from_spec(now["tokenizer"]))


def refuse_other_data(run: Path, data: str, count: int, sha256: str, tokens: Tokens) -> None:
    """``ValueError`` unless the training tokens are the `count` tokens of that digest, which the run was trained on."""
    if count != len(tokens):
        told = f"{count} tokens, {data!r} now has {len(tokens)}"
    elif not same_tokens(tokens, sha256):
        told = f"other tokens than {data!r} now has"
    else:
        return
    raise ValueError(f"{run} was trained on {told}: bring the old data back, or start a new run")


def other_circumstances(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A notice for each fact about the machine that differs, and with which the bits of a run therefore do."""
    return [
        f"notice   {name} was {before[name]}, now {value}: not the bits of an uninterrupted run"
        for name, value in now.items()
        if before[name] != value
    ]
