"""The benchmarks run, and what their page says is what the committed results say.

No test looks at a time: it depends on the machine.
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
    "network": [
        "--rounds=1",
        "--batches=2",
        "--layers=2",
        "--width=64",
        "--rows=8",
        "--rates",
        "500mbit",
        "--machines",
        "1",
        "2",
        "4",
    ],
    "recovery": ["--rounds=1", "--megabytes", 0.1],
    "startup": ["--rounds=1", "--only", "01"],
    "watching": ["--rounds=1", "--width=8"],
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
        expected = [
            {"title": title, "columns": list(columns), "rows": rows}
            for title, columns, rows in tables(result["figures"], *more)
        ]
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


def lists(tree):
    """All lists of numbers in a result."""
    if isinstance(tree, list) and tree and all(isinstance(item, int | float) for item in tree):
        yield tree
    elif isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from lists(item)


def figures(result):
    """All medians with a least and a most of a result, of rows and lists, and one over them."""
    found = [(median(numbers), min(numbers), max(numbers)) for numbers in lists(result["figures"])]
    for ms in [each["ms"] for each in result["figures"].get("growth", {}).values()]:
        if ring := ms.get("ring of 04"):
            ratios = [a / b for a, b in zip(ring, ms["all-reduce of 1000000 bytes"], strict=True)]
            found.append((median(ratios), min(ratios), max(ratios)))
    for row in [row for table in result["tables"] for row in table["rows"]]:
        numbers = [cell for cell in row if isinstance(cell, float)]
        for i, middle in enumerate(numbers):
            found += [(middle, *pair) for pair in itertools.pairwise(numbers[i + 1 :])]
    for middle, least, most in found:
        for digits in range(3 * (0 < least <= middle <= most)):
            yield ranged(middle, least, most, digits)
            yield ranged(1 / middle, 1 / most, 1 / least, digits)


def test_the_figures_on_the_page_are_those_of_the_results():
    """Each is in the results that the pictures of its section show."""
    count = 0
    for section in PAGE.split("\n## "):
        names = re.findall(r"\]\(results/(\w+-cpu)", section)
        known = {
            figure
            for path, result in RESULTS.items()
            if path.stem in names
            for figure in figures(result)
        }
        shown = re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", " ".join(section.split()))
        assert set(shown) <= known, sorted(set(shown) - known)
        count += len(shown)
    assert count > 30


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
        assert all(
            math.isfinite(cell) for row in table["rows"] for cell in row if isinstance(cell, float)
        ), table
    if "no picture" in result.output:
        pytest.skip("matplotlib is not installed: pip install -r requirements-dev.txt")
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn and all(picture.stat().st_size > 5000 for picture in drawn)
