"""What the pool's threads have done is counted by worker and by layer, and can be asked for from outside."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_numa_moe
from reference import random_layer
from torch_numa_moe import _C, PackedExperts, Statistics, pack_experts, runtime, stats
from torch_numa_moe.__main__ import main
from torch_numa_moe.statistics import Durations, Share, WorkerStatistics
from torch_numa_moe.statistics.server import StatisticsServer, address, ask
from torch_numa_moe.statistics.tables import MOST_LAYERS

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 48, 8, 2


def named_layer(name: str) -> PackedExperts:
    layer = random_layer(EXPERTS, HIDDEN, INTERMEDIATE)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, format="bf16")
    packed.name = name
    return packed


def call(packed: PackedExperts, times: int) -> None:
    inputs = (torch.zeros(3, HIDDEN), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.ones(3, TOP_K))
    for _ in range(times):
        packed(*inputs)


def counted(durations_ns: list[int]) -> Durations:
    """Counts one by one, by a search through the buckets' bounds."""
    begins = _C.duration_buckets()
    counts: dict[int, int] = {}
    for duration in durations_ns:
        bucket = max(index for index, begin in enumerate(begins[:-1]) if begin <= duration)
        counts[bucket] = counts.get(bucket, 0) + 1
    return Durations(counts, max(durations_ns, default=0))


def made_up(seconds: float = 2.0, factor: int = 1) -> Statistics:
    """Two workers and the calling thread, in layers of which the second has a name to escape."""
    waits = counted([1000 * factor] * 98 * factor + [90_000, 100_000])
    shares = {"first": Share(10 * factor, 1, 0.5 * factor, waits), 'b"\\': Share(5 * factor, 0, 0.1, waits)}
    slow = {name: Share(share.tasks, 0, 2 * share.busy_seconds, waits) for name, share in shares.items()}
    return Statistics(
        seconds,
        (
            WorkerStatistics("numa_moe/0.0", 0, 3, 41, shares, 0.25 * factor, 7 * factor),
            WorkerStatistics("numa_moe/1.0", 1, 5, 42, slow, None, None),
            WorkerStatistics("calling thread", 0, None, None, {}),
        ),
        {"first": counted([200_000] * 100 * factor), 'b"\\': counted([300_000] * 100 * factor)},
        {"dispatches": 200 * factor, "late_tasks_won": factor},
    )


# Durations


def test_percentiles_are_within_a_bucket_of_the_exact_ones() -> None:
    generator = random.Random(5)  # noqa: S311 - not for secrets
    durations = [int(10 ** generator.uniform(3, 9)) for _ in range(5000)]
    histogram = counted(durations)
    assert histogram.count == 5000
    exact = sorted(durations)
    for percent in (1, 25, 50, 90, 99, 99.9):
        expected_us = exact[int(len(exact) * percent / 100) - 1] / 1000
        assert histogram.percentile_us(percent) == pytest.approx(expected_us, rel=0.07)
    assert histogram.max_us == max(durations) / 1000
    assert histogram.percentile_us(100) <= histogram.max_us


def test_no_durations() -> None:
    nothing = Durations()
    assert (nothing.count, nothing.percentile_us(50), nothing.max_us) == (0, 0.0, 0.0)
    assert Durations.together([]) == nothing


def test_durations_of_an_interval() -> None:
    early, late = [1000, 2000, 50_000], [3000, 3000, 40_000]
    both = counted(early + late)
    rest = both.since(counted(early))
    assert rest.counts == counted(late).counts
    # The longest isn't among them; its bucket's end is known.
    assert 40 <= rest.max_us <= 46
    assert counted([*early, 90_000]).since(counted(early)) == counted([90_000])
    assert both.since(both) == Durations()
    assert Durations.together([counted(early), counted(late)]) == both


# What a pool counts


def test_each_layer_has_its_calls_and_tasks(fresh_runtime: None) -> None:
    torch_numa_moe.stop()
    first, second = named_layer("first"), named_layer("second")
    before = stats()
    call(first, 20)
    call(second, 30)
    call(first, 1)
    # A worker counts its tasks once nobody waits for them any more.
    end = time.monotonic() + 10
    while True:
        taken = stats().since(before)
        shares = {
            name: sum(worker.layers.get(name, Share()).tasks for worker in taken.workers)
            for name in ("first", "second")
        }
        # The same calls have the same tasks.
        if shares["first"] / 21 == shares["second"] / 30 > 0:
            break
        assert time.monotonic() < end, shares
    assert {name: times.count for name, times in taken.layers.items() if times.count} == {
        "first": 21,
        "second": 30,
    }
    assert taken.counters["dispatches"] == 51
    for name in ("first", "second"):
        busy = sum(worker.layers.get(name, Share()).busy_seconds for worker in taken.workers)
        called = taken.layers[name]
        longest = called.count * called.max_us / 1e6
        assert 0 < busy <= len(taken.workers) * longest
    for worker in taken.workers:
        assert worker.total.tasks == sum(share.tasks for share in worker.layers.values())
        assert worker.total.waits.count <= 51


def test_packing_is_no_layers(fresh_runtime: None) -> None:
    torch_numa_moe.stop()
    packed = named_layer("only")
    assert "only" not in stats().layers
    call(packed, 4)
    again = pack_experts(*_weights(packed), format="bf16")
    again.name = "again"
    assert stats().layers["only"].count == 4
    assert "again" not in stats().layers


def _weights(packed: PackedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    unpacked = packed.unpack()
    return unpacked.gate_up_proj, unpacked.down_proj


def test_workers_are_the_pools(fresh_runtime: None) -> None:
    call(named_layer("layer"), 1)
    read = stats()
    states = _C.workers()
    workers = [worker for worker in read.workers if worker.name != "calling thread"]
    assert [worker.thread_id for worker in workers] == [state.thread_id for state in states]
    for worker, state in zip(workers, states, strict=True):
        assert worker.cpu == (state.requested_cpu if state.pinned else None)
        comm = Path(f"/proc/self/task/{worker.thread_id}/comm").read_text().strip()
        assert comm == worker.name
        if Path(f"/proc/self/task/{worker.thread_id}/schedstat").exists():
            assert worker.run_delay_seconds is not None
            assert worker.run_delay_seconds >= 0
        assert worker.preempted is not None
    running = runtime.running()
    assert running is not None
    assert len(read.workers) - len(workers) == running.plan.caller_helps


def test_layers_without_a_name_or_with_the_same_one(fresh_runtime: None) -> None:
    torch_numa_moe.stop()
    layers = [named_layer(""), named_layer("twice"), named_layer("twice")]
    for times, packed in enumerate(layers, 1):
        call(packed, times)
    counts = {name: times.count for name, times in stats().layers.items() if name != "others"}
    assert counts == {"experts 0": 1, "twice": 2, "twice (2)": 3}


def test_patched_layers_are_named_as_the_model_names_them(fresh_runtime: None) -> None:
    from tiny_models import build_model

    torch_numa_moe.stop()
    model = build_model("qwen3_moe")
    report = torch_numa_moe.patch(model, progress=False)
    with torch.inference_mode():
        model(torch.randint(0, 50, (1, 4)))
    assert {module.name for module in report.modules} == set(stats().layers) - {"others"}


def test_without_a_pool() -> None:
    torch_numa_moe.stop()
    nothing = stats()
    assert nothing == Statistics(0.0)
    assert str(nothing) == "no pool is running"
    assert Statistics.from_json(nothing.to_json()) == nothing


def test_a_pool_that_was_started_again_counts_from_its_start(fresh_runtime: None) -> None:
    packed = named_layer("layer")
    call(packed, 50)
    before = stats()
    torch_numa_moe.stop()
    call(packed, 3)
    assert stats().since(before).layers["layer"].count == 3


def test_reading_while_others_call(fresh_runtime: None) -> None:
    packed = named_layer("layer")
    call(packed, 1)
    begin = stats().layers["layer"].count
    threads = [threading.Thread(target=call, args=(packed, 200)) for _ in range(3)]
    for thread in threads:
        thread.start()
    counts = [begin]
    while any(thread.is_alive() for thread in threads):
        counts.append(stats().layers["layer"].count)
    for thread in threads:
        thread.join()
    assert counts == sorted(counts)
    assert stats().layers["layer"].count == begin + 600


# As text


def test_json_holds_everything() -> None:
    assert Statistics.from_json(made_up().to_json()) == made_up()


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"format": 0}', json.dumps({"format": 2, "seconds": 1})])
def test_another_versions_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="another version"):
        Statistics.from_json(text)


def test_interval_of_made_up_statistics() -> None:
    between = made_up(5.0, 3).since(made_up(2.0, 1))
    assert between.seconds == 3.0
    assert between.counters == {"dispatches": 400, "late_tasks_won": 2}
    assert between.workers[0].layers["first"].tasks == 20
    assert between.workers[0].run_delay_seconds == pytest.approx(0.5)
    assert between.workers[0].preempted == 14
    assert between.workers[1].run_delay_seconds is None
    assert between.layers["first"].count == 200
    # Of another pool: nothing to compare with.
    assert made_up(1.0, 3).since(made_up(2.0)) == made_up(1.0, 3)


def test_tables_name_the_slow_worker() -> None:
    text = str(made_up())
    assert text.startswith("200 calls in 2 s, 100 a second; 1 tasks run again")
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "50.0%" in rows["numa_moe/0.0"]  # of the tasks; the other one has as many
    assert "12.5%" in rows["numa_moe/0.0"]  # ready for 0.25 of 2 s
    assert rows["first"].endswith("numa_moe/1.0 (1.33 x)")


def test_only_the_slowest_layers_are_shown() -> None:
    layers = {f"layer {index}": counted([1000 * (index + 1)] * 3) for index in range(30)}
    text = str(Statistics(1.0, made_up().workers, layers, {"dispatches": 90}))
    assert re.findall(r"^layer (\d+)", text, re.MULTILINE) == [str(i) for i in range(30 - MOST_LAYERS, 30)]
    assert "... and 18 layers that took less" in text


def test_prometheus_text() -> None:
    lines = made_up().prometheus().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert len(samples) == sum(not line.startswith("#") for line in lines), "a sample is there twice"
    assert samples["numa_moe_dispatches_total"] == "200"
    where = 'worker="numa_moe/0.0",cpu="3",node="0",layer="first"'
    assert samples[f"numa_moe_tasks_total{{{where}}}"] == "10"
    assert float(samples[f'numa_moe_wait_seconds{{{where},quantile="0.5"}}']) == pytest.approx(1e-6, rel=0.07)
    assert samples[f"numa_moe_wait_seconds_count{{{where}}}"] == "100"
    assert samples['numa_moe_layer_seconds_count{layer="b\\"\\\\"}'] == "100"
    assert samples['numa_moe_run_delay_seconds_total{worker="numa_moe/0.0",cpu="3"}'] == "0.250000000"
    # The grammar of the format: a family is declared once, before its samples.
    declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    sample = re.compile(r'^numa_moe_\w+(\{(\w+="([^"\\\n]|\\["\\n])*",?)*\})? [-+.0-9e]+$')
    for line in lines:
        if line.startswith("#"):
            family = line.split()[2]
        else:
            assert sample.match(line), line
            assert line.startswith(family)


@pytest.mark.parametrize("statistics", [made_up(), Statistics(0.0)], ids=["made up", "empty"])
def test_heat_map(statistics: Statistics, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    statistics.plot(tmp_path / "map.svg")
    text = (tmp_path / "map.svg").read_text()
    assert "<svg" in text
    if statistics.workers:
        assert "numa_moe/1.0" in text


# Asked from outside

PROGRAM = """
import sys, time, torch, torch_numa_moe
weights = torch.randn(4, 64, 32, dtype=torch.bfloat16), torch.randn(4, 32, 32, dtype=torch.bfloat16)
packed = torch_numa_moe.pack_experts(*weights)
packed.name = "the layer"
inputs = torch.randn(1, 32), torch.tensor([[0, 3]]), torch.ones(1, 2)
packed(*inputs)
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    packed(*inputs)
sys.exit(5)
"""


@contextlib.contextmanager
def program(seconds: float, watch: str = "1") -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "NUMA_MOE_WATCH": watch}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(seconds)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_top_shows_a_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with program(60) as process:
        assert main(["top", "--once", str(process.pid)]) == 0
        assert "the layer" in capsys.readouterr().out
        assert main(["top", "--prometheus", str(process.pid)]) == 0
        assert 'numa_moe_layer_seconds_count{layer="the layer"}' in capsys.readouterr().out
        # Live, until the process is gone.
        threading.Timer(1.0, process.kill).start()
        assert main(["top", "--interval", "0.2", "--plot", str(tmp_path / "map.svg"), str(process.pid)]) == 0
    shown = capsys.readouterr().err
    assert shown.count("the last 0.2") >= 2
    assert "the layer" in shown
    assert "<svg" in (tmp_path / "map.svg").read_text()
    assert main(["top", "--once", str(process.pid)]) == 1
    assert f"there is no process {process.pid}" in capsys.readouterr().err


def test_top_runs_a_program_and_ends_with_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMA_MOE_WATCH", "1")
    assert main(["top", "--interval", "0.2", sys.executable, "-c", PROGRAM, "1.5"]) == 5
    shown = capsys.readouterr().err
    assert "up to the end of process" in shown
    assert "the layer" in shown


def test_top_tells_why_nobody_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with program(60, watch="0") as process:
        assert main(["top", "--once", str(process.pid)]) == 1
    assert "NUMA_MOE_WATCH=0" in capsys.readouterr().err
    assert main(["top", sys.executable, "-c", "import sys; sys.exit(3)"]) == 3
    assert "never had a pool" in capsys.readouterr().err
    assert main(["top", str(tmp_path / "missing")]) == 127
    assert "No such file" in capsys.readouterr().err
    assert main(["top", "1", "more"]) == 2
    assert main(["top", "--once", "true"]) == 2
    with pytest.raises(SystemExit):
        main(["top", "--interval", "0", "1"])


def test_interrupted_top_lets_the_program_end(tmp_path: Path) -> None:
    """Ctrl-C reaches both; the program has the last word."""
    source = PROGRAM.replace("sys.exit(5)", "").replace(
        "end = ", "import signal; signal.signal(signal.SIGINT, lambda *_: sys.exit(9)); end = "
    )
    with subprocess.Popen(
        [sys.executable, "-m", "torch_numa_moe", "top", sys.executable, "-c", source, "60"],
        env={**os.environ, "NUMA_MOE_WATCH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 9
    assert "up to the end of process" in shown


def test_server_answers_again_and_again_until_stopped() -> None:
    server = StatisticsServer(lambda: "x" * 300_000)
    try:
        assert [len(ask(os.getpid())) for _ in range(3)] == [300_000] * 3
        # One that asks and goes away without reading keeps nobody from being answered.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hasty:
            hasty.connect(address(os.getpid()))
        assert len(ask(os.getpid())) == 300_000
        with pytest.raises(OSError, match="in use"):
            StatisticsServer(str)
    finally:
        server.stop()
    with pytest.raises(ConnectionError):
        ask(os.getpid())
    StatisticsServer(str).stop()  # the address is free again


def test_server_survives_an_answer_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str:
        raise RuntimeError("no statistics today")

    server = StatisticsServer(fail)
    try:
        assert [ask(os.getpid()) for _ in range(2)] == ["{}"] * 2
    finally:
        server.stop()
    assert "no statistics today" in caplog.text


def test_forked_child_has_statistics_of_its_own(fresh_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_numa_moe.stop()
    monkeypatch.setenv("NUMA_MOE_WATCH", "1")
    runtime._settings = None
    packed = named_layer("layer")
    call(packed, 5)
    parent = os.getpid()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        before = len(stats().workers)
        call(packed, 2)
        counts = stats().layers["layer"].count
        asked = Statistics.from_json(ask(os.getpid())).layers["layer"].count
        of_parent = Statistics.from_json(ask(parent)).layers["layer"].count
        sender.send((before, counts, asked, of_parent))

    process = context.Process(target=child)
    process.start()
    assert receiver.poll(60)
    assert receiver.recv() == (0, 2, 2, 5)
    process.join(60)
    assert process.exitcode == 0
    assert Statistics.from_json(ask(parent)).layers["layer"].count == 5
