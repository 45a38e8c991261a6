"""The benchmarks run, and what their page says is what the committed results say.

No test looks at a time: how fast something is depends on the machine, what a table makes of it not.
"""

import hashlib
import importlib
import json
import math
import re
import sys
from statistics import median

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
SIZES = 16_000, 125_000, 1_000_000  # bytes in an all-reduce of network.py
RESULTS = sorted((FOLDER / "results").glob("*.json"))


@pytest.fixture
def benchmark(monkeypatch):
    """A function that imports one of the benchmarks by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name in [name for name in sys.modules if name in SMALLEST or name.startswith("parts")]:
        del sys.modules[name]


def table_of(tables, start):
    """{first cell of a row: the others} of the one table whose title starts so."""
    [rows] = [rows for title, _, rows in tables if title.startswith(start)]
    return {row[0]: row[1:] for row in rows}


def test_ratios_are_those_of_each_round(benchmark):
    paired = benchmark("parts.common").paired
    # The machine was ten times slower in the second round: the ratio of that round still counts.
    assert paired([20, 3, 15], [10, 1, 10]) == [2, 1.5, 3]
    with pytest.raises(ValueError):
        paired([1, 2], [1])


def test_sides_take_turns_and_the_first_turn_does_not_count(benchmark):
    turns = []
    sides = {name: lambda name=name: turns.append(name) or len(turns) for name in "abc"}
    found = benchmark("parts.common").alternate(sides, 20)
    rounds = {"".join(turns[i : i + 3]) for i in range(0, 63, 3)}
    assert len(turns) == 63 and len(rounds) > 3 and {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert sorted(n for numbers in found.values() for n in numbers) == list(range(4, 64))
    assert all(turns[number - 1] == name for name in "abc" for number in found[name])


def test_network_finds_the_latency_and_bandwidth_that_were_put_in(benchmark):
    def ms(count, size):  # 0.5 ms for each message, and 25,000 bytes a ms: 200 Mbit/s
        return 2 * (count - 1) * 0.5 + 2 * (count - 1) / count * size / 25_000

    growth = {str(count): {"ms": {f"all-reduce of {size} bytes": [ms(count, size)]
                                  for size in SIZES}} for count in (1, 2, 4, 8)}  # fmt: skip
    assert benchmark("network").SIZES == SIZES
    assert benchmark("network").fit(growth) == pytest.approx((0.5, 25_000))


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
        source = f"drawn from {path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
        drawn = sorted(path.parent.glob(f"{path.stem}*.svg"))
        assert drawn, f"{path.name} has no picture: python benchmarks/parts/plot.py"
        for picture in drawn:
            assert f"](results/{picture.name})" in page, picture.name
            assert source in picture.read_text(), f"{picture.name}: python benchmarks/parts/plot.py"


def ranged(values, digits, invert=False):
    """"median (least to most)", as the documents write a figure; invert: of one over it."""
    middle, least, most = [1 / value for value in values] if invert else values
    ends = sorted((least, most))
    return f"{middle:.{digits}f} ({ends[0]:.{digits}f} to {ends[1]:.{digits}f})"


FAST = "throughput-cpu", "batch size 512, ranks on cpu: 2"
SMALL = "throughput-cpu", "batch size 64, ranks on cpu: 2"
FAST_ALONE = "throughput-cpu", "batch size 512, ranks on cpu: 1"
SMALL_ALONE = "throughput-cpu", "batch size 64, ranks on cpu: 1"
MEMORY, KILLED = ("ddp_anatomy-cpu", "memory"), ("recovery-cpu", "from SIGKILL")
BATCH, SNAPSHOTS = ("scaling-cpu", "batch against"), ("recovery-cpu", "a snapshot")
STARTUP, AT = ("startup-cpu", "to the first"), ("network-cpu", "two machines at 2gbit")
CHOSEN = "buckets of .*, chosen in the other rounds"
RATIO, SPEED = (3, 4, 5), (1, 4, 5)  # columns: median, least, most
# What benchmarks/README.md says: (words, table, row, columns, digits of the figure).
PHRASES = [
    ("without any input, {} times the speed at 512", FAST, "limit: no input", RATIO, 2),
    ("and {} times at 64", SMALL, "limit: no input", RATIO, 2),
    ("without DDP, {} times the speed at 512", FAST_ALONE, "02 without DDP", RATIO, 2),
    ("at 64, {} times", SMALL_ALONE, "02 without DDP", RATIO, 2),
    ("256 images each have {} times the speed of one",
     ("scaling-cpu", "batch size 256 per rank"), "2", SPEED, 2),
    ("nothing to do with each other have {} times", ("scaling-cpu", "strangers"), "2", SPEED, 2),
    ("with the usual scheduling: {} times the speed on two ranks", BATCH, "2", (0, 1, 2), 2),
    ("an all-reduce alone takes {} times as long", BATCH, "2", RATIO, 1),
    ("256 images in all it is {} times on two ranks",
     ("scaling-cpu", "batch size 256 in all"), "2", SPEED, 2),
    ("and {} times on four", ("scaling-cpu", "batch size 256 in all"), "4", SPEED, 2),
    ("a thread on each core has {} times", ("scaling-cpu", "one rank"), "1", SPEED, 2),
    ("take {} times the memory of the weights", MEMORY, "without", (1, 2, 3), 1),
    ("gradient_as_bucket_view=True` {} times", MEMORY, "with view", (1, 2, 3), 1),
    ("02 trains again after {} s", KILLED, "02", (0, 1, 2), 1),
    ("the smallest script with DDP after {} s", KILLED, "smallest DDP script", (0, 1, 2), 1),
    ("100 MB takes {} s", SNAPSHOTS, "100 MB", (0, 1, 2), 2),
    ("1 GB {} s", SNAPSHOTS, "1000 MB", (0, 1, 2), 1),
    ("copying 1 GB takes {} s", SNAPSHOTS, "1000 MB", (6, 7, 8), 2),
    ("01 {}", STARTUP, "01", RATIO, 2),
    ("02 {}", STARTUP, "02", RATIO, 2),
    ("03 {}", STARTUP, "03", RATIO, 2),
    ("exchange after backward takes {} times", AT, "exchange after backward", RATIO, 2),
    ("in the other rounds take {} times", AT, CHOSEN, RATIO, 2),
    ("A bucket of 8 MiB takes {} times", AT, "buckets of 8 MiB", RATIO, 2),
    ("every 16th batch takes {} times", AT, "16 batches, one exchange", RATIO, 2),
]


def tables_of(result):
    return [(table["title"], table["columns"], table["rows"]) for table in result["tables"]]


def phrases():
    """What benchmarks/README.md says of the results, with the figures that it must say."""
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS}
    found = {name: tables_of(result) for name, result in results.items()}
    for words, (name, title), wanted, columns, digits in PHRASES:
        [row] = [cells for row, cells in table_of(found[name], title).items()
                 if re.fullmatch(wanted, str(row))]  # fmt: skip
        yield words.format(ranged([row[i] for i in columns], digits))
    for words, wanted in (("without workers", "0 workers"), ("with one worker", "1 workers")):
        row = table_of(found[FAST[0]], FAST[1])[f"customary, {wanted}"]
        yield f"{words}, {ranged(row[3:6], 1, invert=True)} times"
    yield from network_rows(results["network-cpu"])


def network_rows(result):
    """The rows of the document's tables about the network."""
    def spread(ms, digits=0):
        return ranged([median(ms), min(ms), max(ms)], digits)

    tables = tables_of(result)
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
    numbers = [cell for table in found["tables"] for row in table["rows"] for cell in row
               if isinstance(cell, float)]  # fmt: skip
    assert len(numbers) > 3 and all(map(math.isfinite, numbers)) and median(numbers) > 0
    if "no picture" in result.output:
        pytest.skip("matplotlib is not installed: pip install -r requirements-dev.txt")
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn and all(picture.stat().st_size > 5000 for picture in drawn)


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
