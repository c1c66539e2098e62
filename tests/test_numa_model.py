"""The cost model of several NUMA nodes: formulas against numbers worked out by hand, limits, a study."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import numa_model  # noqa: E402
from numa_cost.box import Box, Engine, Experts  # noqa: E402
from numa_cost.layer_time import (  # noqa: E402
    Arm,
    barrier_time,
    layer_time,
    make_arms,
    step_seconds,
    tokens_per_second,
)
from numa_cost.published import CELLS, calibrate, compare, other_models  # noqa: E402
from numa_cost.scaling import scale, with_nodes  # noqa: E402

# A node's cores get through 3 x 20 = 60 GB/s, its memory gives 100, the other node's 40.
BOX = Box(nodes=2, cores=4, memory_bandwidth=100, link_bandwidth=40, core_bandwidth=20)
EXPERTS = Experts(layers=10, layer_bytes=120e6)
NO_BARRIERS = Engine(barriers=0)


def reading_ms(box: Box, arm: str) -> float:
    return 1e3 * layer_time(box, EXPERTS, NO_BARRIERS, make_arms(box)[arm]).reading


def test_arms_use_the_workers_that_the_plan_would() -> None:
    # 24 cores: one is the caller's, and with workers on both nodes another one is free.
    arms = make_arms(dataclasses.replace(BOX, cores=12))
    assert arms["one socket"].workers == (11, 0)
    assert arms["split, few workers"].workers == (6, 6)
    for name in ("all cores, no split", "all cores, one node's memory", "split", "split, pages spread"):
        assert arms[name].workers == (11, 11)


def test_one_socket_reads_half_over_the_link() -> None:
    # Cores: 120 MB at 60 GB/s. Half of it crosses the link: it may be read at 2 x 40.
    assert reading_ms(BOX, "one socket") == pytest.approx(2.0)
    # 2 x 20 = 40 GB/s.
    assert reading_ms(dataclasses.replace(BOX, link_bandwidth=20), "one socket") == pytest.approx(3.0)
    # 60 MB from each memory at 25 GB/s.
    assert reading_ms(dataclasses.replace(BOX, memory_bandwidth=25), "one socket") == pytest.approx(2.4)


def test_the_split_reads_from_both_memories_and_no_link() -> None:
    # 60 MB a node at 60 GB/s.
    assert reading_ms(BOX, "split") == pytest.approx(1.0)
    assert reading_ms(dataclasses.replace(BOX, link_bandwidth=1e-6), "split") == pytest.approx(1.0)
    assert reading_ms(dataclasses.replace(BOX, memory_bandwidth=50), "split") == pytest.approx(1.2)
    # 2 + 2 workers: 60 MB at 40 GB/s.
    assert reading_ms(BOX, "split, few workers") == pytest.approx(1.5)


def test_pages_on_one_node_hold_everybody_up() -> None:
    # One memory gives 120 MB at 100 GB/s; cores and link would allow 60 + 40 GB/s, which is the same.
    assert reading_ms(BOX, "all cores, one node's memory") == pytest.approx(1.2)
    # 60 + 10 GB/s, whoever gets to a task first.
    slow_link = dataclasses.replace(BOX, link_bandwidth=10)
    assert reading_ms(slow_link, "all cores, one node's memory") == pytest.approx(120 / 70)
    # With a slice for each node, the far one has 60 MB to read at 10 GB/s.
    assert reading_ms(slow_link, "split, one node's memory") == pytest.approx(6.0)
    # All links of the node with the pages give 30 GB/s to three others: 20 cores of GB/s of its own, 3 x 10.
    four = Box(
        nodes=4, cores=2, memory_bandwidth=1e6, link_bandwidth=40, core_bandwidth=20, all_links_bandwidth=30
    )
    arm = Arm("", (1, 1, 1, 1), False, "one node")
    assert 1e3 * layer_time(four, EXPERTS, NO_BARRIERS, arm).reading == pytest.approx(120 / 50)


def test_pages_spread_evenly_over_four_nodes() -> None:
    # 3/4 of what a node reads crosses links that give 24 GB/s, of which every byte uses up 1.5: 16 / (3/4).
    four = Box(
        nodes=4,
        cores=9,
        memory_bandwidth=1e6,
        link_bandwidth=40,
        core_bandwidth=20,
        all_links_bandwidth=24,
        hops=1.5,
    )
    assert 1e3 * layer_time(four, EXPERTS, NO_BARRIERS, make_arms(four)["all cores, no split"]).reading == (
        pytest.approx(120 / (4 * 16 / 0.75))
    )
    # A single reader has the links to itself: 24 / (3/4).
    one = layer_time(four, EXPERTS, NO_BARRIERS, make_arms(four)["one socket"])
    assert 1e3 * one.reading == pytest.approx(120 / 32)
    assert one.limit == "links"
    # From one other node come 2 GB/s, and those are a quarter of what is read.
    narrow = dataclasses.replace(four, link_bandwidth=2, all_links_bandwidth=None, hops=1.0)
    assert 1e3 * layer_time(narrow, EXPERTS, NO_BARRIERS, make_arms(narrow)["one socket"]).reading == (
        pytest.approx(120 / 8)
    )


def test_barriers_pass_a_line_around_twice() -> None:
    box = dataclasses.replace(BOX, line_ns=50, remote_line_ns=150)
    arms = make_arms(box)
    central, per_node = Engine(barrier="central"), Engine(barrier="per node")
    assert barrier_time(box, central, arms["one socket"]) == pytest.approx(2 * 3 * 50e-9)
    # Six workers on two nodes: every second transfer crosses.
    assert barrier_time(box, central, arms["split"]) == pytest.approx(2 * 6 * 100e-9)
    assert barrier_time(box, per_node, arms["split"]) == pytest.approx(2 * 3 * 50e-9 + 2 * 2 * 150e-9)
    assert barrier_time(box, per_node, arms["all cores, no split"]) == pytest.approx(2 * 6 * 100e-9)


def test_a_step_is_the_sum_of_its_parts() -> None:
    experts = Experts(layers=10, layer_bytes=120e6, outside_ms=5, fixed_us=100, exchange_bytes=80e3, tokens=2)
    box = dataclasses.replace(BOX, line_ns=50, remote_line_ns=150)
    engine = Engine(barriers=4, barrier="central")
    # Of 80 kB every node takes half over 40 GB/s: 1 us. A barrier takes 1.2 us.
    layer_us = 1000 + 100 + 1 + 4 * 1.2
    assert step_seconds(box, experts, engine, make_arms(box)["split"]) == pytest.approx(
        5e-3 + 10 * layer_us * 1e-6
    )
    assert tokens_per_second(box, experts, engine, make_arms(box)["split"]) == pytest.approx(
        2 / (5e-3 + 10 * layer_us * 1e-6)
    )
    # Nothing is exchanged without the split.
    assert layer_time(box, experts, engine, make_arms(box)["all cores, no split"]).exchange == 0


def test_bytes_of_a_shape_by_counting() -> None:
    made = Experts.of_shape(layers=3, hidden_size=10, intermediate_size=6, top_k=2, bits_per_weight=4.25)
    numbers = sum(rows * columns for rows, columns in ((6, 10), (6, 10), (10, 6)) for _ in range(2))
    assert made.layer_bytes == numbers * 4.25 / 8
    assert made.exchange_bytes == 2 * 6 * 4


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_with_an_infinite_link_placement_does_not_matter(nodes: int) -> None:
    box = Box(
        nodes=nodes,
        cores=8,
        memory_bandwidth=90,
        link_bandwidth=float("inf"),
        core_bandwidth=9,
        line_ns=50,
        remote_line_ns=50,
    )
    arms = make_arms(dataclasses.replace(box, cores=8))
    # Nodes with as many workers each, so that equal slices take equally long.
    even = {name: dataclasses.replace(arm, workers=(7,) * nodes) for name, arm in arms.items()}
    engine = Engine(barrier="central")
    split = step_seconds(box, EXPERTS, engine, even["split"])
    for name in ("all cores, no split", "split, pages spread"):
        assert step_seconds(box, EXPERTS, engine, even[name]) == pytest.approx(split)


def test_on_one_node_all_arms_are_equal() -> None:
    box = Box(nodes=1, cores=16, memory_bandwidth=100, link_bandwidth=10, core_bandwidth=9)
    times = {step_seconds(box, EXPERTS, Engine(), arm) for arm in make_arms(box).values()}
    assert len(times) == 1
    # 120 MB at 100 GB/s, and four barriers of 15 workers.
    assert times.pop() == pytest.approx(10 * (1.2e-3 + 4 * 2 * 15 * 55.6e-9))


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "name", ["memory_bandwidth", "link_bandwidth", "core_bandwidth", "all_links_bandwidth"]
)
def test_more_bandwidth_never_makes_a_step_slower(name: str, nodes: int) -> None:
    changed = 0
    for memory, link, core, links in itertools.product((20, 150), (5, 60), (2, 15), (8, 90)):
        box = Box(nodes, 8, memory, link, core, links)
        for arm in make_arms(box).values():
            before = step_seconds(box, EXPERTS, Engine(), arm)
            for factor in (1.2, 5.0):
                more = dataclasses.replace(box, **{name: factor * getattr(box, name)})
                after = step_seconds(more, EXPERTS, Engine(), arm)
                assert after <= before * (1 + 1e-12)
                changed += after < before
    # Each of them limits something, links only where there are some.
    assert (changed > 0) == (nodes > 1 or name in {"memory_bandwidth", "core_bandwidth"})


def test_links_of_eight_nodes_are_the_edges_of_a_cube() -> None:
    # Hops from a corner of a cube to the seven others: bits that differ.
    hops = [corner.bit_count() for corner in range(1, 8)]
    box = with_nodes(BOX, 8)
    assert box.hops == pytest.approx(sum(hops) / 7)
    assert box.intake == BOX.link_bandwidth  # three links, as the two nodes have between them
    assert with_nodes(BOX, 4).link_bandwidth == pytest.approx(40 / 3)
    with pytest.raises(ValueError, match="nodes must be one of 1, 2, 4, 8, got 3"):
        with_nodes(BOX, 3)


def test_a_split_with_nothing_else_scales_with_its_nodes() -> None:
    wide = dataclasses.replace(BOX, cores=64, line_ns=0, remote_line_ns=0)
    scaled = scale(wide, EXPERTS, Engine())["split"]
    # Memory limits each node: 120 MB / n at 100 GB/s, ten layers.
    assert scaled == pytest.approx({nodes: nodes / 12e-3 for nodes in (1, 2, 4, 8)})


def test_calibration_by_an_independent_computation() -> None:
    model = calibrate()
    assert model is not None
    # Eleven cores at 8.6 GB/s are slower than two links' worth, 2 x 51.3 GB/s; with half a link, 51.3 GB/s.
    full, half = 1 / (11 * 8.6), 1 / 51.3  # ms of a MB
    window_tokens = 0.030 * 54.05
    cpu, half_cpu = 17.5, 1e3 * window_tokens / 41.9 - 12.5
    megabytes = (half_cpu - cpu) / (half - full)
    barriers = 48 * 4 * 2 * 11 * 55.6e-6
    experts = model.experts["passthrough"]
    assert experts.layers * experts.layer_bytes / 1e6 == pytest.approx(megabytes)
    assert experts.layers * experts.fixed_us / 1e3 == pytest.approx(cpu - megabytes * full - barriers)
    assert experts.outside_ms == pytest.approx(12.5)
    # And with it the split: memory limits it, half of the bytes from each of two at 81.4 GB/s.
    fixed = experts.layers * experts.fixed_us / 1e3
    split_barriers = 48 * 4 * 2 * 22 * (55.6e-6 + 147e-6) / 2
    window = 12.5 + fixed + split_barriers + megabytes / 2 / 81.4
    (cell,) = [one for one in CELLS if one.median == 59.3]
    assert model.predict(cell) == (pytest.approx(1e3 * window_tokens / window),)


def test_the_default_comes_out_as_it_went_in() -> None:
    model = calibrate()
    assert model is not None
    predicted = {(cell.column, cell.half_link): model.predict(cell)[0] for cell in CELLS if cell.calibrates}
    assert predicted == {
        ("passthrough", False): pytest.approx(54.05),
        ("translated", False): pytest.approx(52.6),
        ("passthrough", True): pytest.approx(41.9),
    }


def test_inputs_that_allow_no_calibration_give_none() -> None:
    # Cores so slow that the link's width makes no difference.
    assert calibrate(core_bandwidth=1.0) is None
    # The slower the default at half width, the less is left of its time at full width.
    assert calibrate(half_link=25.0) is None
    assert len(other_models()) == 64


def test_published_figures_are_consistent() -> None:
    assert len(CELLS) == 11
    for cell in CELLS:
        assert cell.lowest < cell.highest
        if cell.median is not None:
            assert cell.lowest <= cell.median <= cell.highest


def test_what_is_within_and_what_is_missed() -> None:
    model = calibrate()
    assert model is not None
    found = compare(model)
    for one in found:
        if one.lowest == one.highest:
            assert one.within == (one.cell.lowest <= one.lowest <= one.cell.highest)
        else:
            assert one.within == (one.lowest <= one.cell.median <= one.highest)
    missed = {(one.cell.name, one.cell.column) for one in found if not one.within}
    assert missed == {
        ("both sockets, no split, 22", "passthrough"),
        ("split, few workers, 6 + 6", "passthrough"),
        ("split, 22, link halved", "passthrough"),
    }
    # What is missing, put into the fixed time, gives the published median.
    few = next(one for one in found if one.cell.median == 51.45)
    experts = model.experts["passthrough"]
    mended = dataclasses.replace(experts, fixed_us=experts.fixed_us + few.missing_us)
    arm = model.arms()["split, few workers"]
    assert tokens_per_second(model.box, mended, model.engine, arm) == pytest.approx(51.45)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "numa_model.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_prints_the_check_and_its_status_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run()
    assert result.returncode == 1, result.stderr
    assert result.stdout.count("MISSED") == 3
    assert "5 of 8 cells within the published spread" in result.stdout
    assert "split, few workers, 6 + 6   passthrough      51.45    50-52.9       55.2" in result.stdout
    monkeypatch.setattr(numa_model, "compare", lambda *given: [one for one in compare(*given) if one.within])
    assert numa_model.main([]) == 0
    assert "Every miss" not in capsys.readouterr().out


def test_the_documentation_quotes_what_the_command_prints() -> None:
    printed = run().stdout
    text = (ROOT / "docs/numa.md").read_text(encoding="utf-8")
    blocks = text.split("```text\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        quoted = block.split("```")[0]
        assert len(quoted.splitlines()) > 5
        assert quoted.strip() in printed


def test_a_box_of_the_readers_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 100, "intermediate_size": 200, "top_k": 1000}
    described = {
        "box": {
            "nodes": 2,
            "cores": 4,
            "memory_bandwidth": 100,
            "link_bandwidth": 40,
            "core_bandwidth": 20,
        },
        "experts": {"layers": 10, **sizes},
        "engine": {"barriers": 0},
    }
    file = tmp_path / "box.json"
    file.write_text(json.dumps(described))
    assert numa_model.main(["--box", str(file)]) == 0
    # 120 MB a layer, as above: 2 ms a layer for one socket. The split's 1 ms, and 0.01 to exchange 400 kB.
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["one", "socket", "3", "20.00", "50.0", "1.00x", "cores", "2000", "0.0"] in rows
    assert ["split,", "placed", "6", "10.10", "99.0", "1.98x", "cores", "1000", "10.0"] in rows

    options = (
        "--nodes 2 --cores 4 --memory-gbs 100 --link-gbs 40 --core-gbs 20 --layers 10 --shape 100x200x1000"
    )
    assert numa_model.main(options.split()) == 0
    rows = [line.split()[:5] for line in capsys.readouterr().out.splitlines()]
    # And four barriers of three workers: 1.3 us a layer.
    assert ["one", "socket", "3", "20.01", "50.0"] in rows
    # An option counts more than the file.
    assert numa_model.main(["--box", str(file), "--layers", "20"]) == 0
    rows = [line.split()[:5] for line in capsys.readouterr().out.splitlines()]
    assert ["one", "socket", "3", "40.00", "25.0"] in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nodes 2", "box: cores, memory_bandwidth, link_bandwidth must be given"),
        ("--nodes 2 --cores 4 --memory-gbs 9 --link-gbs 9", "experts: layers, hidden_size"),
        ("--nodes 0 --cores 4 --memory-gbs 9 --link-gbs 9", "nodes must be a whole number from 1, got 0"),
        ("--nodes 2 --cores 4 --memory-gbs -9 --link-gbs 9", "memory_bandwidth must be a number above 0"),
        (
            "--nodes 2 --cores 4 --memory-gbs 9 --link-gbs 9 --shape 4x4x4 --layers 2 --bits 0",
            "bits_per_weight must be a number above 0, got 0",
        ),
        ("--box {folder}/none.json", "No such file"),
        ("--box {folder}/text.json", "isn't JSON"),
        ("--box {folder}/list.json", "must have the sections box, experts and engine"),
        ("--box {folder}/unknown.json", "[box] has sockets; it takes"),
        ("--box {folder}/both.json", "can't be given along with"),
        ("--box {folder}/text_number.json", "cores must be a whole number from 1, got '4'"),
        ("--box {folder}/barrier.json", "barrier must be one of per node, central, got 'none'"),
        ("--box {folder}/good.json --plot x.svg", "--plot draws the study's check"),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = {"nodes": 2, "cores": 4, "memory_bandwidth": 9, "link_bandwidth": 9}
    experts = {"layers": 2, "layer_bytes": 1e6}
    for name, content in {
        "text": "nodes = 2",
        "list": "[1]",
        "unknown": json.dumps({"box": {**box, "sockets": 2}, "experts": experts}),
        "both": json.dumps({"box": box, "experts": {**experts, "top_k": 2}}),
        "text_number": json.dumps({"box": {**box, "cores": "4"}, "experts": experts}),
        "barrier": json.dumps({"box": box, "experts": experts, "engine": {"barrier": "none"}}),
        "good": json.dumps({"box": box, "experts": experts}),
    }.items():
        (tmp_path / f"{name}.json").write_text(content)
    assert numa_model.main(arguments.format(folder=tmp_path).split()) == 2
    assert message in capsys.readouterr().err


def test_an_arm_for_another_box_is_refused() -> None:
    with pytest.raises(ValueError, match="arm must have workers for 2 nodes, at least one, got"):
        layer_time(BOX, EXPERTS, Engine(), Arm("", (3,), False, "even"))


def test_the_figure_is_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for file in (first, second):
        numa_model.main(["--plot", str(file)])
    assert first.read_bytes() == second.read_bytes()
    assert "split, placed" in first.read_text()
