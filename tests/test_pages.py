"""What the pages say in passing holds: variables, options, ways to meet, messages of PyTorch."""

import mmap
import os
import pathlib
import random
import re
import shutil
import tempfile

import pytest
import shown
import torch
import torch.distributed as dist
import torch.distributed.run
from forked import forkserver
from one_gpu import page
from one_gpu.checks import CHECKS
from one_gpu.report import Report, load
from started import PYTHON, ROOT, TORCHRUN, free_port, run

NEW_MESSAGES = ("Operation timed out after", "Aborting process on rank", "Expected tensor on")
LIBRARIES = pathlib.Path(torch.__file__).parent / "lib"
MESSAGES = {  # those that nothing here makes PyTorch say; they must still be in its library
    "libtorch_cpu.so": (
        "The client socket has timed out after",
        "wait timeout after",
        "Failed to recv, got 0 bytes",
        "expect_autograd_hooks_",
        "refer to a single memory location",
        "Grad strides do not match bucket",
    ),
    "libtorch_cuda.so": (
        "Watchdog caught collective operation timeout",
        "watchdog got stuck for",
        "destroy_process_group() was not called before program exit",
        *NEW_MESSAGES * hasattr(dist, "ProcessGroupNCCL2"),
    ),
}


def section(title):
    """A section of docs/how_a_job_starts.md."""
    return shown.JOB.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def quoted(message):
    """The message, which pitfalls/README.md quotes; so that a quotation cannot outlive its test."""
    assert message in shown.PITFALLS.read_text(), message
    return message


def first_column(title, head):
    """The cells of the first column of the table with that head, as one text."""
    table = section(title).partition(f"| {head} |")[2].partition("\n\n")[0]
    return " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))


def test_the_page_of_trainers_has_the_tables_of_its_results(tmp_path):
    page = tmp_path / "trainers.md"
    shutil.copy(ROOT / "tools/trainers.md", page)
    run(PYTHON, ROOT / "tests/trainers", "--page", page, cwd=tmp_path).ok()
    assert page.read_text() == (ROOT / "tools/trainers.md").read_text()
    assert page.read_text().count("nothing found") > 5


def test_the_table_of_variables_is_what_torchrun_sets():
    named = re.findall(r"`([A-Z_]+)`", first_column("What torchrun tells each process", "Variable"))
    _, lines = shown.read(shown.FOLDER / "environment.txt")
    assert len(named) > 10 and set(named) == {re.search(r"(\w+)=", line)[1] for line in lines}


def test_the_options_of_torchrun_exist():
    cells = first_column("The options of torchrun", "Option")
    options = re.findall(r"(?<!-)-(?:-[a-z-]+|m)\b", cells)
    help_text = torch.distributed.run.get_args_parser().format_help()
    assert len(options) > 12 and [o for o in options if o not in help_text] == []


def meet(rank, line, port, path):
    """In a forked process: run a line of the document, on a port and a path of the test's own."""
    line = line.replace(":29605", f":{port}").replace("/tmp/meet-here", f"{path}/meet")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    store = dist.FileStore(f"{path}/store", 2)
    exec(line, {"dist": dist, "rank": rank, "store": store})  # noqa: S102 a line of ours
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    assert total == 3
    dist.destroy_process_group()


def test_the_four_ways_to_meet(tmp_path):
    lines = shown.block("four ways to meet").splitlines()
    assert len(lines) == 4
    for line in lines:
        with free_port() as port, tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            ranks = [
                forkserver.Process(target=meet, args=(rank, line, port, folder)) for rank in (0, 1)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(60)
                process.kill()
            assert [process.exitcode for process in ranks] == [0, 0], line


def test_the_messages_of_save_and_load(tmp_path):
    torch.save({"path": pathlib.PurePosixPath("x")}, tmp_path / "snapshot.pt")
    with pytest.raises(Exception, match=quoted("Weights only load failed")) as error:
        torch.load(tmp_path / "snapshot.pt")
    assert quoted(error.typename)
    for count, message in ((9, "iostream error"), (99999, "unexpected pos")):
        with pytest.raises(RuntimeError, match=quoted(message)):
            torch.save(torch.zeros(count), "/dev/full")


@pytest.mark.long
def test_the_messages_of_torchrun(tmp_path):
    (tmp_path / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n"  # else tracebacks would mix
        "    raise RuntimeError('no record above main')\n"
        "time.sleep(60)\n"
    )
    result = run(*TORCHRUN, "--standalone", "--nproc-per-node=2", "fails.py", cwd=tmp_path)
    assert (
        quoted("Setting OMP_NUM_THREADS environment variable for each process to be 1")
        in result.output
    )
    assert quoted("To enable traceback see") in result.output.partition("Root Cause")[2]
    assert "RuntimeError: no record above main" in result.output.partition("Root Cause")[0]

    result = run(
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=gpu",
        "fails.py",
        cwd=tmp_path,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert quoted("Cuda is not available.") in result.output

    (tmp_path / "strict.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    result = run(PYTHON, "-m", "torch.distributed.launch", "strict.py", cwd=tmp_path)
    assert quoted("unrecognized arguments: --local-rank=0") in result.output

    result = run(
        *TORCHRUN,
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-id=1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=nobody.invalid:29603",
        "--rdzv-conf=read_timeout=5",
        "never.py",
        cwd=tmp_path,
    )
    assert quoted("The connection to the C10d store has failed") in result.output


@pytest.mark.parametrize("name", MESSAGES)
def test_the_messages_are_in_the_library(name):
    """Some need a GPU to be seen; that they still read so can be seen without."""
    if not (LIBRARIES / name).exists():
        pytest.skip(f"a build of PyTorch without {name}")
    with open(LIBRARIES / name, "rb") as file:
        library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for message in MESSAGES[name]:
            assert library.find(quoted(message).encode()) > 0, message


def test_each_row_of_a_table_has_the_cells_of_its_header():
    """A row begins and ends with a pipe. One that is escaped ends no cell."""
    tables = 0
    for document in shown.DOCUMENTS:
        for table in re.findall(r"(?:^ *\|.*\n)+", shown.without_code(document), re.MULTILINE):
            header, *rows = [row.strip().replace(r"\|", "") for row in table.splitlines()]
            tables += 1
            for row in rows:
                assert row.endswith("|") and row.count("|") == header.count("|"), (document, row)
    assert tables > 25


# ---- The pictures: each is drawn from committed logs, and a page shows it ----


@pytest.fixture
def draw(monkeypatch):
    """The module that draws."""
    pytest.importorskip("matplotlib", reason="pip install -r requirements-dev.txt")
    monkeypatch.syspath_prepend(shown.PICTURES)
    import draw

    return draw


def test_the_pictures_are_those_of_their_logs(draw):
    """Each still one says from what it was drawn; those that move are drawn anew."""
    drawn = {path.stem: path for path in shown.PICTURES.glob("*.svg")}
    assert drawn.keys() == draw.STILL.keys() | draw.MOVING.keys()
    linked = {
        (document.parent / link).resolve()
        for document in shown.DOCUMENTS
        for link in shown.links(document)
    }
    for name, path in drawn.items():
        assert path in linked, f"{name}: no document shows it"
        whole = path.read_text()
        assert (
            draw.source(*draw.STILL[name][1:]) in whole
            if name in draw.STILL
            else draw.MOVING[name]().text() == whole
        ), f"draw {name} anew: python docs/pictures/draw.py --redraw"


def test_the_killed_run_goes_on_with_the_losses_of_the_other(draw):
    whole = {
        epoch: loss for *_, epoch, loss in draw.epochs(draw.read(draw.LOGS / "uninterrupted.log"))
    }
    lines = draw.read(draw.LOGS / "killed.log")
    [crash] = [i for i, (_, line) in enumerate(lines) if "crash on purpose" in line]
    before, after = draw.epochs(lines[:crash]), draw.epochs(lines[crash:])
    assert sorted(whole) == list(range(1, 21)) and before[-1][2] == 10 and after[0][2] == 9
    assert all(whole[epoch] == loss for *_, epoch, loss in before + after)
    [checksum] = {line for _, line in lines if "sha256" in line}
    assert checksum in (draw.LOGS / "uninterrupted.log").read_text()


def test_the_page_shows_what_one_gpu_has_shown():
    report = load(page.KEPT) if page.KEPT.exists() else Report()
    table = page.BLOCK.search(page.PAGE.read_text())[0]
    assert table.strip().splitlines() == page.rows_of(report)


@pytest.mark.long
def test_all_that_one_gpu_can_show_starts_without_one(tmp_path):
    """On a CPU, a check runs to its end, or says that it needs a GPU. A third of them is drawn."""
    command, drawn = (PYTHON, ROOT / "tests/one_gpu", tmp_path), random.sample([*CHECKS], 8)
    words = "--pretend", "--seconds", 1500, "--only", *drawn
    result = run(*command, *words, cwd=tmp_path, timeout=1600).ok()
    checks = load(tmp_path / "one_gpu.json").checks
    assert set(checks) == set(drawn)
    results = [entry.result for entry in checks.values()]
    fine = [re.match("ok$|skipped: (needs|there is)", each) for each in results]
    assert "ok" in results and all(fine), result.output
    result = run(*command, "--write", cwd=tmp_path)
    assert result.status == 1 and "comes from a pretended GPU" in result.output
