"""Kills and signals."""

import os
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
from tiny_runs import DENSE, ENDLESS, LOOM, children, fingerprint, newest_step, settings, start_child, train_in_child

from minilooped import train as trainer
from minilooped.engine.checkpoint import shell_command
from minilooped.engine.log import read_log
from minilooped.engine.stopping import StopSignal
from minilooped.train import train


def test_ten_kills_at_random_moments_and_the_run_ends_as_if_there_had_been_none(tmp_path):
    config, run, draw = settings(tmp_path, **ENDLESS), tmp_path / "runs" / "tiny", random.Random(1)
    for kill in range(10):
        child = start_child(config, kill > 0, newest_step(run), run)
        time.sleep(draw.uniform(0, 0.05))
        child.kill()
        child.join()
    config = replace(config, max_steps=newest_step(run) + 3)
    assert config.max_steps >= 13
    train(LOOM, config, resume=True)
    straight = train(LOOM, replace(config, name="straight", save_every=0))
    assert fingerprint(run) == fingerprint(straight.run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside_saves_at_the_end_of_the_step(tmp_path, number):
    config, run = settings(tmp_path, **ENDLESS | dict(save_every=0)), tmp_path / "runs" / "tiny"
    child = children.Process(target=train_in_child, args=(LOOM, config, False), daemon=True)  # it may not stop
    child.start()
    deadline = time.monotonic() + 60
    while not (run / "log.csv").exists() or len(read_log(run / "log.csv")) < 3:
        assert child.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(child.pid, number)
    child.join(60)
    assert child.exitcode == 0 and newest_step(run) >= 3
    config = replace(config, max_steps=newest_step(run) + 3)
    train(LOOM, config, resume=True)
    straight = train(LOOM, replace(config, name="straight"))
    assert fingerprint(run) == fingerprint(straight.run)


def signal_at(step, number, monkeypatch, times=1):
    """Let the signal arrive in the middle of a step."""
    rate = trainer.learning_rate

    def interrupted(now, config):
        if now == step:
            for _ in range(times):
                signal.raise_signal(number)
        return rate(now, config)

    monkeypatch.setattr(trainer, "learning_rate", interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_notebook_kernel_ends_the_call_and_not_the_kernel(tmp_path, capsys, monkeypatch, number):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    config = settings(tmp_path, save_every=0)
    with monkeypatch.context() as patch:
        signal_at(6, number, patch)
        result = train(DENSE, config)
    assert result.step == 7 and result.val_loss is None and newest_step(result.run) == 7
    printed = capsys.readouterr().out
    assert f"Stopped after step 7 of 12; saved {result.run / 'step-7'}. To go on:" in printed
    assert f"{shell_command()} train --resume {result.run}\n" in printed
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    train(DENSE, config, resume=True)
    straight = train(DENSE, replace(config, name="straight"))
    assert fingerprint(result.run) == fingerprint(straight.run)


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    signal_at(6, signal.SIGINT, monkeypatch, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(DENSE, settings(tmp_path))
    assert newest_step(tmp_path / "runs" / "tiny") == 5, "the regular checkpoint stands"
    assert signal.getsignal(signal.SIGINT) is handler
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # not impatience: torchrun may repeat it
    assert stop.asked


def test_outside_the_main_thread_signals_are_left_alone(tmp_path):
    handler, results = signal.getsignal(signal.SIGINT), []

    def work():
        results.append(train(DENSE, settings(tmp_path, max_steps=2)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].step == 2 and signal.getsignal(signal.SIGINT) is handler
