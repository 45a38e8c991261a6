"""Each pitfall shows its symptom, and with --fixed its cure: with the figures that it explains.

The scripts fail by themselves on figures that are neither. They run here in processes forked with
torch loaded; test_repository.py starts some as their docstrings say.
"""

import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from forked import come_late, fork, fork_ranks, wait_before_forks
from started import ROOT

TEXTS = {path.stem: path.read_text() for path in sorted(ROOT.glob("pitfalls/*.py"))}
# These take minutes: test_repository.py runs them, or there is a shorter way below.
TOO_LONG = {
    "orphans",
    "stale_addresses",
    "stale_addresses --fixed",
    "no_destroy",
    "no_destroy --fixed",
    "own_name_unknown",
    "own_name_unknown --fixed",
    "small_shared_memory",
}
SLOW = {
    "closed_terminal",
    "closed_terminal --fixed",
    "small_shared_memory --fixed",
    "slow_rank",
    "slow_rank --fixed",
    "uneven_inputs",
    "async_read_too_early",
    "rank_never_arrives",
    "collective_on_one_rank",
    "mismatched_shapes",
    "download_by_all",
    "async_read_too_early --fixed",
    "too_many_open_files --fixed",
}
# Those that wait for their timeouts come first.
NAMES = sorted(TEXTS, key=lambda name: not re.search(r"sleep\(|seconds=[35]\)", TEXTS[name]))
CALLS = [call for name in NAMES for call in (name, f"{name} --fixed") if call not in TOO_LONG]

# The rank that times out first closes its sockets: the other may notice that before its timeout.
TIMEOUT = (
    "(Timed out waiting 3000ms for (recv|send) operation to complete"
    "|Application timeout caused pair closure|.*Connection (closed|reset) by peer.*)"
)
UNUSED = "symptom: step 2: Expected to have finished reduction in the prior iteration"
# What a script prints, or claims, and does not look at itself: {call: patterns of lines}.
SAID = {
    "collective_on_one_rank": [
        "step 1: losses add up to 101, gradients to 200",
        "step 1: losses add up to 1, gradients to 101",
        f"symptom: all_reduce failed: {TIMEOUT}",
    ],
    "mismatched_shapes": [f"symptom: all_reduce failed: {TIMEOUT}"],
    "wrapper_on_rank_0": [rf"symptom: BatchNorm1d: model\(x\) failed: {TIMEOUT}"],
    "slow_rank": [f"symptom: all_reduce failed: {why}" for why in (TIMEOUT, "Connection.*")],
    "device_from_global_rank": [" +1 +2 +0 +cuda:2 does not exist"],
    "backend_without_cpu": ["symptom: No backend type associated with device type cpu"],
    "closed_terminal": [".*; SignalException: Process ... got signal: 1"],
    "too_many_open_files": ["symptom: Too many open files.*"],
    "unused_parameters": [rf"{UNUSED} \(parameters 2 3\)"],
    "fixed_port": ["second job, rank 0: The server socket .* EADDRINUSE, message: address alr.*"],
    "snapshot_in_place": ["symptom: .*zip archive: failed finding central directory"],
    "snapshot_in_place --fixed": ["cured: the snapshot of epoch 1 is still there"],
}


def fork_the_workers():
    """Called in a child: the script forks its processes, so that they have torch loaded."""

    def fork_instead(function, args=(), nprocs=1, join=True):
        return mp.start_processes(function, args, nprocs, join, start_method="fork")

    wait_before_forks()
    mp.spawn = fork_instead
    mp.set_start_method("fork", force=True)  # for Process: a forkserver's child would start another


def show(call, folder, **options):
    """Run a pitfall with as many ranks as its docstring says; return the lines that it printed."""
    name, *flags = call.split()
    folder = folder / call
    folder.mkdir()
    docstring = TEXTS[name].partition('\n"""\n')[0]
    if ranks := re.search(r"torchrun --standalone --nproc-per-node=(\d)", docstring):
        options |= {"nodes": 2} if name == "download_by_all" else {}  # two ranks 0, and one disk
        result = fork_ranks(
            f"pitfalls/{name}.py", *flags, cwd=folder, world_size=int(ranks[1]), **options
        )
    else:
        result = fork(
            f"pitfalls/{name}.py", *flags, cwd=folder, before=fork_the_workers, timeout=120
        )
    if name == "small_shared_memory" and "cannot mount" in result.output:
        pytest.skip(result.output)
    assert result.status == 0, result.output
    assert not list(folder.iterdir()), "files left in the reader's folder"
    return [re.sub(r"^\[rank \d/\d\] (?!wait)", "", line) for line in result.output.splitlines()]


@pytest.fixture(scope="module")
def shows(request, tmp_path_factory):
    """{call: future of its lines}, of those that are asked for: most of them wait."""
    wanted = {
        item.callspec.params["call"]
        for item in request.session.items
        if hasattr(item, "callspec") and "call" in item.callspec.params
    }
    folder = tmp_path_factory.mktemp("pitfalls")
    with ThreadPoolExecutor(5) as pool:
        yield {call: pool.submit(show, call, folder) for call in CALLS if call in wanted}


def assert_said(lines, patterns):
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, lines)


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=[pytest.mark.long] * (call in SLOW)) for call in CALLS]
)
def test_symptom_or_cure(shows, call):
    lines = shows[call].result()
    found = {line.partition(": ")[0] for line in lines} & {"symptom", "cured"}
    assert found == {"cured" if call.endswith(" --fixed") else "symptom"}, lines
    assert_said(lines, SAID.get(call, []))


def debug(level):
    """Called in a child: TORCH_DISTRIBUTED_DEBUG, in front of the command."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()  # torch, loaded already, has read it


@pytest.mark.parametrize(
    ("pitfall", "level", "said"),
    [
        ("unused_parameters", "INFO", rf"{UNUSED} \(parameters idle.bias, idle.weight\)"),
        ("mismatched_shapes", "DETAIL", r"symptom: all_reduce failed: Detected mismatch between.*"),
    ],
)
def test_torch_says_more_when_asked(tmp_path, pitfall, level, said):
    assert_said(show(pitfall, tmp_path, before=functools.partial(debug, level)), [said])


def test_stale_addresses_cured(tmp_path):
    """One restart is enough; here with a store for all attempts, as torchrun has it."""
    result = fork_ranks(
        "pitfalls/stale_addresses.py", "--fixed", cwd=tmp_path, max_restarts=1, before=come_late
    )
    assert (result.status, result.attempts) == (0, 2), result.output
    attempts = [line for line in result.output.splitlines() if line.startswith("attempt ")]
    assert sorted(attempts) == [*["attempt 0"] * 2, *["attempt 1"] * 2], result.output


def test_every_pitfall_has_its_row():
    page = (ROOT / "pitfalls/README.md").read_text()
    for name in TEXTS:
        rows = re.findall(rf"^\| .+ \[{name}\]\({name}\.py\) \|$", page, re.MULTILINE)
        assert len(rows) == 1, f"{name} has {len(rows)} rows in pitfalls/README.md"
