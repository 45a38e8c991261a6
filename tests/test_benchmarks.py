"""The benchmarks run, and what their page says is what the committed results say.

No test looks at a time: how fast something is depends on the machine, what a table makes of it not.
"""

import hashlib
import importlib
import itertools
import json
import math
import re
import sys
from statistics import median

import pytest
from started import PYTHON, ROOT, run

FOLDER = ROOT / "benchmarks"
SMALLEST = {
    "throughput": ["--rounds=1", "--images=256", "--batch-sizes=64"],
    "scaling": ["--rounds=1", "--ranks", 1, 2, "--batch-size=32", "--steps=4"],
    "ddp_anatomy": ["--rounds=1", "--layers=4", "--width=256", "--batch-size=4"],
    "collectives": ["--rounds=1", "--sizes", 4096, 2**20],
    "network": ["--rounds=1", "--batches=2", "--layers=2", "--width=64", "--rows=8", "--rates",
                "500mbit", "--machines", 1, 2, 4],
    "recovery": ["--rounds=1", "--megabytes", 0.1, 1],
    "startup": ["--rounds=1", "--only", "01", "02"],
}
RESULTS = {path: json.loads(path.read_text()) for path in sorted(FOLDER.glob("results/*.json"))}
PAGE = (FOLDER / "README.md").read_text()


@pytest.fixture
def benchmark(monkeypatch):
    """A function that imports one of the benchmarks by its name."""
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name in [name for name in sys.modules if name in SMALLEST or name.startswith("parts")]:
        del sys.modules[name]


def test_sides_take_turns_and_ratios_are_those_of_each_round(benchmark):
    """The first turn does not count."""
    common, turns = benchmark("parts.common"), []
    sides = {name: lambda name=name: turns.append(name) or len(turns) for name in "abc"}
    found = common.alternate(sides, 20)
    rounds = {"".join(turns[i : i + 3]) for i in range(0, 63, 3)}
    assert len(turns) == 63 and len(rounds) > 3 and {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert sorted(n for numbers in found.values() for n in numbers) == list(range(4, 64))
    assert all(turns[number - 1] == name for name in "abc" for number in found[name])
    # The machine was ten times slower in the second round: the ratio of that round still counts.
    assert common.paired([20, 3, 15], [10, 1, 10]) == [2, 1.5, 3]


def test_network_finds_the_latency_and_bandwidth_that_were_put_in(benchmark):
    def ms(count, size):  # 0.5 ms for each message, and 25,000 bytes a ms: 200 Mbit/s
        return 2 * (count - 1) * 0.5 + 2 * (count - 1) / count * size / 25_000

    network = benchmark("network")
    growth = {str(count): {"ms": {f"all-reduce of {size} bytes": [ms(count, size)]
                                  for size in network.SIZES}} for count in (1, 2, 4, 8)}
    assert network.fit(growth) == pytest.approx((0.5, 25_000))


def nine_digits(tables):
    """The tables with so many digits of each number: the rest depends on torch's version."""
    return json.loads(json.dumps(tables), parse_float=lambda text: f"{float(text):.9g}")


def test_the_results_shown_are_those_measured(benchmark):
    """The tables in the JSON are what today's code makes of the figures in it."""
    assert {path.stem for path in RESULTS} >= {f"{name}-cpu" for name in SMALLEST}
    for path, result in RESULTS.items():
        settings, tables = result["settings"], benchmark(result["benchmark"]).tables
        more = {
            "throughput": [result["device"]],
            "scaling": [settings.get("batch size"), settings.get("cores or GPUs")],
            "ddp_anatomy": [settings.get("parameters")],
            "collectives": [settings.get("ranks")],
            "network": [settings.get("bytes")],
        }.get(result["benchmark"], [])
        expected = [{"title": title, "columns": list(columns), "rows": rows}
                    for title, columns, rows in tables(result["figures"], *more)]
        assert nine_digits(result["tables"]) == nine_digits(expected), path.name
        source = f"drawn from {path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
        drawn = sorted(path.parent.glob(f"{path.stem}*.svg"))
        assert drawn, f"{path.name} has no picture: python benchmarks/parts/plot.py"
        for picture in drawn:
            assert f"](results/{picture.name})" in PAGE, picture.name
            assert source in picture.read_text(), f"{picture.name}: python benchmarks/parts/plot.py"


def ranged(middle, least, most, digits=0):
    """As the page writes a figure."""
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def figures(result):
    """All medians with a least and a most in the rows of a result, and one over them."""
    for row in [row for table in result["tables"] for row in table["rows"]]:
        numbers = [cell for cell in row if isinstance(cell, float)]
        for i, middle in enumerate(numbers):
            for least, most in itertools.pairwise(numbers[i + 1 :]):
                for digits in range(3 * (0 < least <= middle <= most)):
                    yield ranged(middle, least, most, digits)
                    yield ranged(1 / middle, 1 / most, 1 / least, digits)


def test_the_figures_in_the_text_are_those_of_the_results():
    """Each is in the results that the pictures of its section show."""
    count = 0
    for section in PAGE.split("\n## "):
        names = re.findall(r"\]\(results/(\w+-cpu)", section)
        known = {figure for path, result in RESULTS.items() if path.stem in names
                 for figure in figures(result)}
        text = re.sub(r"^\|.*", "", section, flags=re.MULTILINE)  # the tables: see below
        shown = re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", " ".join(text.split()))
        assert set(shown) <= known, sorted(set(shown) - known)
        count += len(shown)
    assert count > 20


def network_rows(result):
    """The rows of the page's tables about the network."""
    def spread(ms, digits=0):
        return ranged(median(ms), min(ms), max(ms), digits)

    def table_of(start):
        """The rows of the one table whose title starts so."""
        [rows] = [table["rows"] for table in result["tables"] if table["title"].startswith(start)]
        return rows

    for rate, sides in result["figures"]["ddp"].items():
        customary, fewer = ([spread(sides[name]) for name in names] for names in (
            ("no exchange", "exchange after backward", "exchange during backward"),
            ("sent as fp16", "sent as bf16", "sent by PowerSGD", "16 batches, one exchange")))
        name, *best = table_of(f"two machines at {rate}")[-1]
        size = re.fullmatch("buckets of (.*), chosen in the other rounds", name)[1]
        best = f"{size}: {ranged(*best[:3])}" if best[5] < 1 else "no best"
        yield f"| {rate} | {' | '.join(customary)} | {best} |"
        yield f"| {rate} | {' | '.join(fewer)} |"
    for machines, to_group, joining, traffic, *step, efficiency, _ in table_of("machines at"):
        ring, ms = "-", result["figures"]["growth"][str(machines)]["ms"]
        if "ring of 04" in ms:
            of_gloo = ms["all-reduce of 1000000 bytes"]
            ring = spread([a / b for a, b in zip(ms["ring of 04"], of_gloo, strict=True)], 1)
        yield (f"| {machines} | {to_group:.1f} | {joining:.2f} | {traffic:.0f} |"
               f" {ranged(*step)} | {efficiency:.2f} | {ring} |")
    for machines, size, *measured, model, off in table_of("the model: "):
        if machines.endswith("predicted"):
            yield f"| {size:.0f} kB | {ranged(*measured, 1)} | {model:.1f} | {off:+.0%} |"


def test_the_tables_about_the_network_are_those_of_the_results():
    rows = list(network_rows(RESULTS[FOLDER / "results/network-cpu.json"]))
    assert len(rows) > 10 and [row for row in rows if row not in PAGE] == []


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
    for table in found["tables"]:
        assert table["title"] in result.output and table["rows"], table
        assert all(math.isfinite(cell) for row in table["rows"] for cell in row
                   if isinstance(cell, float)), table
    if "no picture" in result.output:
        pytest.skip("matplotlib is not installed: pip install -r requirements-dev.txt")
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn and all(picture.stat().st_size > 5000 for picture in drawn)
