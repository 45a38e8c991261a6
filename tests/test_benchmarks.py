"""The benchmarks run, their tables follow from what was measured, and the results shown are theirs.

No test looks at a time: how fast something is depends on the machine, what a table makes of it not.
"""

import importlib
import json
import math
import re
import shutil
import sys
from statistics import median
from xml.etree import ElementTree

import pictures
import pytest
from support import PYTHON, ROOT, run

FOLDER = ROOT / "benchmarks"
SMALLEST = {
    "throughput": ["--rounds=1", "--images=256", "--batch-sizes=64"],
    "scaling": ["--rounds=1", "--ranks", 1, 2, "--batch-size=32", "--steps=4"],
    "ddp_anatomy": ["--rounds=1", "--layers=4", "--width=256", "--batch-size=4"],
    "network": ["--rounds=1", "--batches=2", "--layers=2", "--width=64", "--rows=8",
                "--rates", "500mbit", "--machines", 1, 2, 4],
    "recovery": ["--rounds=1", "--megabytes", 0.1, 1],
    "startup": ["--rounds=1", "--only", "01", "02"],
}
RESULTS = sorted((FOLDER / "results").glob("*.json"))


@pytest.fixture
def benchmark(monkeypatch):
    """A function that imports one of the benchmarks by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name in [*SMALLEST, "common", "launched", "machines", "plot"]:
        sys.modules.pop(name, None)


def table_of(tables, start):
    """{first cell of a row: the others} of the one table whose title starts so."""
    [rows] = [rows for title, _, rows in tables if title.startswith(start)]
    return {row[0]: row[1:] for row in rows}


# ---- The arithmetic, with figures small enough to check by hand ----


def test_ratios_are_those_of_each_round(benchmark):
    paired = benchmark("common").paired
    # The machine was ten times slower in the second round: the ratio of that round still counts.
    assert paired([20, 3, 15], [10, 1, 10]) == [2, 1.5, 3]
    with pytest.raises(ValueError):
        paired([1, 2], [1])


def test_sides_take_turns_and_the_first_turn_does_not_count(benchmark):
    turns = []
    sides = {name: lambda name=name: turns.append(name) or len(turns) for name in "abc"}
    found = benchmark("common").alternate(sides, 20)
    assert turns[:3] == list("abc")
    rounds = ["".join(turns[i : i + 3]) for i in range(3, len(turns), 3)]
    assert len(rounds) == 20 and {"".join(sorted(turn)) for turn in rounds} == {"abc"}
    assert len(set(rounds)) > 3, "always the same order"
    assert sorted(n for numbers in found.values() for n in numbers) == list(range(4, 64))
    assert all(turns[number - 1] == name for name in "abc" for number in found[name])


def test_throughput_compares_with_02(benchmark):
    figures = {"64 2": {"customary, 1 workers": [10, 40, 30], "02": [20, 20, 20]}}
    [(title, _, rows)] = benchmark("throughput").tables(figures, "cpu")
    assert title == "batch size 64, ranks on cpu: 2"
    assert rows == [["customary, 1 workers", 30, 10, 40, 1.5, 0.5, 2],
                    ["02", 20, 20, 20, 1, 1, 1]]


def test_scaling_is_ideal_where_each_core_counts_once(benchmark):
    figures = {"per rank 1": [10], "per rank 2": [18], "per rank 4": [19], "in all 1": [8],
               "in all 2": [8], "usual 1": [10], "usual 2": [13], "all cores 1": [15],
               "strangers 1": [10], "strangers 2": [20], "strangers 4": [20],
               "exchange 1": [1], "exchange 2": [2], "exchange 4": [3],
               "exchange, usual 1": [1], "exchange, usual 2": [20]}
    tables = benchmark("scaling").tables(figures, 256, places=2)
    assert table_of(tables, "batch size 256 per rank") == {
        1: [10, 1, 1, 1, 1, 1], 2: [18, 1.8, 2, 0.9, 1.8, 1.8], 4: [19, 1.9, 2, 0.95, 1.9, 1.9]}
    assert table_of(tables, "batch size 256 in all")[2] == [8, 1, 2, 0.5, 1, 1]
    assert table_of(tables, "strangers")[2] == [20, 2, 2, 1, 2, 2]
    assert table_of(tables, "one rank")[1] == [15, 1.5, 2, 0.75, 1.5, 1.5]
    assert table_of(tables, "batch against")[2] == pytest.approx([18 / 13] * 3 + [10] * 3)
    # 256 images on each of two ranks at 18 images/s: 28.4 s a step, and 25.6 s for a stranger.
    step, alone, exchange, rest = table_of(tables, "ms of a step")[2]
    assert [round(step), alone, exchange, round(rest)] == [28444, 25600, 2, 2842]


def test_anatomy_adds_up_what_a_step_shows(benchmark):
    figures = {"memory": {"without": [8, 7, 9], "with view": [4, 4, 4]},
               "timeline": [["backward", 1, 8], ["all_reduce", 2, 4.5], ["layers", 1, 2]]}
    tables = benchmark("ddp_anatomy").tables(figures, parameters=1_000_000)
    assert table_of(tables, "timeline") == {1: [2.5]} and "7.0 ms" in tables[0][0]
    assert table_of(tables, "memory") == {
        "without": [8, 2, 1.75, 2.25], "with view": [4, 1, 1, 1]}  # fmt: skip


def growth_of(latency, bandwidth, counts=(1, 2, 4, 8)):
    """What machines would measure whose all-reduce follows the model; the step is 50 ms more."""
    def ms(count, size):
        return 2 * (count - 1) * latency + 2 * (count - 1) / count * size / bandwidth

    return {str(count): {
        "begin": 1.0, "connected": 3.5, "joining": 0.5, "traffic": 2000,
        "ms": {f"all-reduce of {size} bytes": [ms(count, size)] for size in SIZES}
        | {"step": [50 + ms(count, SIZES[-1])]}
        | ({"ring of 04": [2 * ms(count, SIZES[-1])]} if count > 1 else {}),
    } for count in counts}  # fmt: skip


SIZES = (16_000, 125_000, 1_000_000)


def test_network_finds_the_latency_and_bandwidth_that_were_put_in(benchmark):
    network = benchmark("network")
    growth = growth_of(latency=0.5, bandwidth=25_000)  # 25,000 bytes a ms: 200 Mbit/s
    assert network.SIZES == SIZES
    assert network.fit(growth) == pytest.approx((0.5, 25_000))
    sides = {"no exchange": [40, 40], "exchange alone": [110, 90],
             "exchange after backward": [150, 140], "exchange during backward": [100, 120],
             "buckets of 1 MiB": [80, 110], "buckets of 8 MiB": [90, 100]}
    figures = {"ddp": {"1gbit": sides}, "growth": growth, "growth rate": "200mbit"}
    tables = network.tables(figures, weights=12_500_000)
    ddp = table_of(tables, "two machines at 1gbit")
    assert ddp["exchange after backward"] == [145, 140, 150, pytest.approx(4 / 3), 140 / 120, 1.5]
    # 8 MiB won the second round, so the first takes it, and 1 MiB the other way round.
    assert ddp["buckets of 1 or 8 MiB, chosen in the other rounds"][:3] == [100, 90, 110]
    assert table_of(tables, "all-reduce of 12.5 MB") == {"1gbit": [100, 100, 90, 110, 105]}
    # Of 1 MB over 8 machines: 14 messages of 0.5 ms, and 1.75 MB at 25 KB a ms.
    assert table_of(tables, "machines at 200mbit")[8] == pytest.approx(
        [2.5, 0.5, 2, 127, 127, 127, 50 / 127, 2])
    [(_, _, rows)] = [table for table in tables if table[0].startswith("the model: 0.50 ms")]
    assert rows[-1] == pytest.approx(["8, predicted", 1000, 77, 77, 77, 77, 0])
    assert table_of(tables, "the model's line")[16] == pytest.approx([90, 50 / 140])


def test_recovery_adds_its_parts_up(benchmark):
    figures = {"recoveries": {"02": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 8], [0, 2, 3, 4, 5, 6]]},
               "snapshots": {"10": [[0.5, 0.1], [0.25, 0.2], [0.5, 0.1]]}, "epoch": 2}  # fmt: skip
    tables = benchmark("recovery").tables(figures)
    assert table_of(tables, "from SIGKILL") == {"02": [21, 20, 23, 1, 2, 3, 4, 5, 6]}
    assert table_of(tables, "a snapshot; an epoch of 02 took 2.00 s") == {
        "10 MB": [0.5, 0.25, 0.5, 20, 0.25, 50, 0.1, 0.1, 0.2, 0.8]}


def test_startup_compares_each_script_with_its_own_launcher(benchmark):
    figures = {"smallest, mp.spawn": [[1, 1, 1, 1, 1]], "01": [[1, 1, 1, 1, 2]],
               "smallest, torchrun": [[2, 2, 2, 2, 2]], "02": [[2, 2, 2, 2, 3]]}  # fmt: skip
    rows = table_of(benchmark("startup").tables(figures), "to the first")
    assert rows["01"] == [6, 6, 6, 1.2, 1.2, 1.2, 1, 1, 1, 1, 2]
    assert rows["02"] == [11, 11, 11, 1.1, 1.1, 1.1, 2, 2, 2, 2, 3]


# ---- What is committed ----


def nine_digits(tables):
    """The tables with so many digits of each number: the rest depends on torch's version."""
    return json.loads(json.dumps(tables), parse_float=lambda text: f"{float(text):.9g}")


def test_the_results_shown_are_those_measured(benchmark):
    """The tables in the JSON are what today's code makes of the figures in it."""
    assert {path.stem for path in RESULTS} >= {f"{name}-cpu" for name in SMALLEST}
    page = (FOLDER / "README.md").read_text()
    for path in RESULTS:
        result = json.loads(path.read_text())
        settings, tables = result["settings"], benchmark(result["benchmark"]).tables
        more = {
            "throughput": [result["device"]],
            "scaling": [settings.get("batch size"), settings.get("cores or GPUs")],
            "ddp_anatomy": [settings.get("parameters")],
            "network": [settings.get("bytes")],
        }.get(result["benchmark"], [])
        expected = [{"title": title, "columns": list(columns), "rows": rows}
                    for title, columns, rows in tables(result["figures"], *more)]  # fmt: skip
        assert nine_digits(result["tables"]) == nine_digits(expected), path.name
        drawn = sorted(path.parent.glob(f"{path.stem}*.svg"))
        assert drawn, f"{path.name} has no picture: python benchmarks/plot.py"
        for picture in drawn:
            assert f"](results/{picture.name})" in page, picture.name


@pytest.fixture
def plot(benchmark):
    pytest.importorskip("matplotlib", reason="pip install -r benchmarks/requirements.txt")
    return benchmark("plot")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_pictures_are_those_of_the_results(plot, tmp_path, path):
    drawn = plot.draw(shutil.copy(path, tmp_path))
    assert {p.name for p in drawn} == {p.name for p in path.parent.glob(f"{path.stem}*.svg")}
    for picture in drawn:
        found = pictures.differences(path.parent / picture.name, picture)
        assert not found, f"{picture.name}: {found}; draw it anew: python benchmarks/plot.py"


def test_a_changed_figure_is_seen_in_its_picture(plot, tmp_path):
    """A point that moves by a fiftieth, and the number at the end of a bar."""
    for name, row, column, factor in (("scaling-cpu", 1, 2, 1.02), ("throughput-cpu", 0, 1, 1.001)):
        result = json.loads((FOLDER / f"results/{name}.json").read_text())
        result["tables"][0]["rows"][row][column] *= factor
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
        [picture] = plot.draw(tmp_path / f"{name}.json")
        assert pictures.differences(FOLDER / "results" / picture.name, picture), name


def ranged(values, digits, invert=False):
    """"median (least to most)", as the documents write a figure; invert: of one over it."""
    middle, least, most = [1 / value for value in values] if invert else values
    ends = sorted((least, most))
    return f"{middle:.{digits}f} ({ends[0]:.{digits}f} to {ends[1]:.{digits}f})"


def phrases():
    """What benchmarks/README.md says of the results, with the figures that it must say."""
    tables = {path.stem: json.loads(path.read_text())["tables"] for path in RESULTS}
    tables = {name: [(t["title"], t["columns"], t["rows"]) for t in found]
              for name, found in tables.items()}  # fmt: skip
    fast = table_of(tables["throughput-cpu"], "batch size 512, ranks on cpu: 2")
    small = table_of(tables["throughput-cpu"], "batch size 64, ranks on cpu: 2")
    one = table_of(tables["throughput-cpu"], "batch size 512, ranks on cpu: 1")
    alone = table_of(tables["throughput-cpu"], "batch size 64, ranks on cpu: 1")
    per_rank, in_all, strangers, all_cores = (
        {ranks: [row[1], *row[4:6]] for ranks, row in table_of(tables["scaling-cpu"], name).items()}
        for name in ("batch size 256 per rank", "batch size 256 in all", "strangers", "one rank"))
    batch = table_of(tables["scaling-cpu"], "batch against")
    memory = table_of(tables["ddp_anatomy-cpu"], "memory")
    recovery = table_of(tables["recovery-cpu"], "from SIGKILL")
    snapshots = table_of(tables["recovery-cpu"], "a snapshot")
    startup = table_of(tables["startup-cpu"], "to the first")
    at = table_of(tables["network-cpu"], "two machines at 2gbit")
    [best] = [row for name, row in at.items() if name.endswith("chosen in the other rounds")]
    return [
        f"without workers, {ranged(fast['customary, 0 workers'][3:6], 1, invert=True)} times",
        f"with one worker, {ranged(fast['customary, 1 workers'][3:6], 1, invert=True)} times",
        f"without any input, {ranged(fast['limit: no input'][3:6], 2)} times the speed at 512",
        f"and {ranged(small['limit: no input'][3:6], 2)} times at 64",
        f"without DDP, {ranged(one['02 without DDP'][3:6], 2)} times the speed at 512",
        f"at 64, {ranged(alone['02 without DDP'][3:6], 2)} times",
        f"256 images each have {ranged(per_rank[2], 2)} times the speed of one",
        f"nothing to do with each other have {ranged(strangers[2], 2)} times",
        f"with the usual scheduling: {ranged(batch[2][:3], 2)} times the speed on two ranks",
        f"an all-reduce alone takes {ranged(batch[2][3:6], 1)} times as long",
        f"256 images in all it is {ranged(in_all[2], 2)} times on two ranks",
        f"and {ranged(in_all[4], 2)} times on four",
        f"a thread on each core has {ranged(all_cores[1], 2)} times",
        f"take {ranged(memory['without'][1:4], 1)} times the memory of the weights",
        f"gradient_as_bucket_view=True` {ranged(memory['with view'][1:4], 1)} times",
        f"02 trains again after {ranged(recovery['02'][:3], 1)} s",
        f"the smallest script with DDP after {ranged(recovery['smallest DDP script'][:3], 1)} s",
        f"100 MB takes {ranged(snapshots['100 MB'][:3], 2)} s",
        f"1 GB {ranged(snapshots['1000 MB'][:3], 1)} s",
        f"copying 1 GB takes {ranged(snapshots['1000 MB'][6:9], 2)} s",
        *(f"{script} {ranged(startup[script][3:6], 2)}" for script in ("01", "02", "03")),
        f"exchange after backward takes {ranged(at['exchange after backward'][3:6], 2)} times",
        f"in the other rounds take {ranged(best[3:6], 2)} times",
        f"A bucket of 8 MiB takes {ranged(at['buckets of 8 MiB'][3:6], 2)} times",
        f"every 16th batch takes {ranged(at['16 batches, one exchange'][3:6], 2)} times",
        *network_rows(json.loads((FOLDER / "results/network-cpu.json").read_text())),
    ]


def network_rows(result):
    """The rows of the document's tables about the network."""
    def spread(ms, digits=0):
        return ranged([median(ms), min(ms), max(ms)], digits)

    tables = [(t["title"], t["columns"], t["rows"]) for t in result["tables"]]
    for rate, sides in result["figures"]["ddp"].items():
        cells = [spread(sides[name]) for name in (
            "no exchange", "exchange after backward", "exchange during backward")]  # fmt: skip
        name, row = [*table_of(tables, f"two machines at {rate}").items()][-1]
        found = re.fullmatch("buckets of (.*), chosen in the other rounds", name)[1]
        best = f"{found}: {ranged(row[:3], 0)}" if row[5] < 1 else "no best"
        yield f"| {rate} | {' | '.join(cells)} | {best} |"
        cells = [spread(sides[name]) for name in (
            "sent as fp16", "sent as bf16", "sent by PowerSGD", "16 batches, one exchange",
        )]  # fmt: skip
        yield f"| {rate} | {' | '.join(cells)} |"
    for machines, row in table_of(tables, "machines at").items():
        to_group, joining, traffic, *step, efficiency, _ = row
        start = f"| {machines} | {to_group:.1f} | {joining:.2f} | {traffic:.0f} |"
        ring, ms = "-", result["figures"]["growth"][str(machines)]["ms"]
        if "ring of 04" in ms:
            of_gloo = ms[f"all-reduce of {SIZES[-1]} bytes"]
            ring = spread([a / b for a, b in zip(ms["ring of 04"], of_gloo, strict=True)], 1)
        yield f"{start} {ranged(step, 0)} | {efficiency:.2f} | {ring} |"
    [rows] = [rows for title, _, rows in tables if title.startswith("the model: ")]
    for machines, size, *measured, model, off in rows:
        if machines.endswith("predicted"):
            yield f"| {size:.0f} kB | {ranged(measured, 1)} | {model:.1f} | {off:+.0%} |"


def test_the_figures_in_the_document_are_those_of_the_results():
    page = " ".join((FOLDER / "README.md").read_text().split())
    assert [phrase for phrase in phrases() if phrase not in page] == []


def test_the_figures_of_the_front_page_are_those_of_the_document():
    page = (FOLDER / "README.md").read_text()
    front = (ROOT / "README.md").read_text().partition("\n## What it costs\n")[2]
    front = front.partition("\n## ")[0]
    figures = re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", front)
    assert len(figures) == 6
    assert [figure for figure in figures if figure not in page] == []


# ---- Real runs, at the smallest size ----


@pytest.mark.long
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(tmp_path, name):
    command = [PYTHON, FOLDER / f"{name}.py", *SMALLEST[name], "--results-dir", tmp_path]
    result = run(*command, cwd=tmp_path, timeout=600)
    if result.status and "this benchmark needs machines of launch/lab" in result.output:
        pytest.skip(result.output.splitlines()[-1])
    assert result.status == 0, result.output
    found = json.loads((tmp_path / f"{name}-cpu.json").read_text())
    assert json.dumps(found) in result.output.splitlines()
    assert found["machine"]["torch"] in result.output
    for table in found["tables"]:
        assert table["title"] in result.output and table["rows"], table
        for row in table["rows"]:  # each in a line of its own, the names as they are
            words = [cell for cell in row if isinstance(cell, str)]
            assert any(all(word in line for word in words) and len(line.split()) >= len(row)
                       for line in result.output.splitlines()), row  # fmt: skip
    numbers = [cell for table in found["tables"] for row in table["rows"] for cell in row
               if isinstance(cell, float)]  # fmt: skip
    assert len(numbers) > 3 and all(map(math.isfinite, numbers)) and median(numbers) > 0
    if "no picture" in result.output:
        pytest.skip("matplotlib is not installed: pip install -r benchmarks/requirements.txt")
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for picture in drawn:
        words = " ".join(ElementTree.parse(picture).getroot().itertext())
        assert re.search("Date|date", words) is None and picture.stat().st_size > 5000


@pytest.mark.long
def test_bad_calls_measure_nothing(tmp_path):
    for name, words, message in (
        ("startup", ["--rounds", 0], "must be a whole number from 1 up, not '0'"),
        ("throughput", ["--batch-sizes", 1], "from 2 (an image for each rank) to 8192 (--images)"),
        ("scaling", ["--batch-size", 2], "--batch-size: 4 or more, an image for each rank"),
        ("recovery", ["--folder", "missing"], "cannot write in missing: give another --folder"),
    ):
        result = run(PYTHON, FOLDER / f"{name}.py", *words, cwd=tmp_path)
        assert result.status == 2 and message in result.output.splitlines()[-1], result.output
        assert "Traceback" not in result.output


@pytest.mark.long
def test_without_matplotlib_a_benchmark_still_measures(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    command = [PYTHON, FOLDER / "scaling.py", "--rounds=1", "--ranks", 1, "--batch-size=32",
               "--steps=4", "--results-dir", tmp_path]  # fmt: skip
    result = run(*command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert result.status == 0, result.output
    assert "no picture: No module named matplotlib; pip install" in result.output
    assert [path.name for path in tmp_path.glob("scaling*")] == ["scaling-cpu.json"]
