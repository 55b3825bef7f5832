"""Interleaved timing."""

import time

import torch

from sparsek.core.clock import Times, host_seconds, time_rounds

CPU = torch.device("cpu")


def test_every_round_takes_one_batch_of_every_call_and_starts_with_another() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    time_rounds(calls, device=CPU, rounds=3, warmup=0, inner_ms=0.0)
    batches = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    # Setting up calls each once, then the three rounds follow.
    assert batches == ["a", "b", "c", "a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_times_hold_median_spread_and_the_number_of_rounds() -> None:
    assert Times.of([3.0, 1.0, 2.0]) == Times(2.0, 1.0, 3.0, 3)


def test_time_per_call_is_of_the_size_of_the_call() -> None:
    times = time_rounds({"sleep": lambda: time.sleep(0.004)}, device=CPU, rounds=2, warmup=0, inner_ms=8.0)
    assert 3.9 < times["sleep"].min <= times["sleep"].max < 400


def test_on_round_hears_of_every_round() -> None:
    heard: list[int] = []
    time_rounds({"nothing": lambda: None}, device=CPU, rounds=4, inner_ms=0.0, on_round=heard.append)
    assert heard == [0, 1, 2, 3]


def test_host_seconds_is_a_mean_over_calls() -> None:
    assert 0.0019 < host_seconds(lambda: time.sleep(0.002), CPU, calls=3) < 0.2
