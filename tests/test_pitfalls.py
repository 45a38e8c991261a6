"""Each pitfall shows its symptom, and with --fixed its cure: with the figures that it explains.

The scripts fail by themselves on figures that are neither. They run here in processes forked with
torch loaded; test_repository.py starts the commands of their docstrings.
"""

import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from support import ROOT, come_late, fork, fork_ranks, variant

# The rank that began to wait first times out, and closes its sockets: the other one may notice that
# before its own timeout.
TIMEOUT = ("(Timed out waiting 3000ms for (recv|send) operation to complete"
           "|Application timeout caused pair closure|.*Connection (closed|reset) by peer.*)")
FIVE_STEPS = [f"step {step} done" for step in range(1, 6)]
TWO_STEPS = [f"step {step}: losses add up to 2, gradients to 200" for step in (1, 2)]
UNUSED = "symptom: step 2: Expected to have finished reduction in the prior iteration"
MIXED_JOBS = "['first job, rank 0', 'second job, rank 1']"


def plain(*lines):
    return [re.escape(line) for line in lines]


# What ranks print: {name: (patterns of lines with the mistake, patterns of lines with the cure)}.
# Those that wait for their timeouts come first.
SHOWS = {
    # test_repository.py shows the symptom of this one, and of the two below: they take minutes.
    "orphans": (None, [r"cured: the workers reported \d times without torchrun"]),
    "collective_on_one_rank": (
        [*plain("step 1: losses add up to 101, gradients to 200",
                "step 1: losses add up to 1, gradients to 101"),
         f"symptom: all_reduce failed: {TIMEOUT}"],
        [*TWO_STEPS, "cured: both ranks have the right sums in both steps"]),
    "mismatched_shapes": (
        [f"symptom: all_reduce failed: {TIMEOUT}",
         *plain("no error: together [3, 3, 3], 9 of 14 labels")],
        plain("own labels: [2, 3, 2, 0]", "cured: together [3, 5, 3, 3], 14 of 14 labels")),
    "uneven_inputs": (
        [*FIVE_STEPS[:3], rf"symptom: backward\(\) failed: {TIMEOUT}"],
        [*FIVE_STEPS, "cured: both ranks have trained on all their batches; replicas identical"]),
    "wrapper_on_rank_0": (
        ["Linear: rank 0 has evaluated alone",
         rf"symptom: BatchNorm1d: model\(x\) failed: {TIMEOUT}"],
        ["BatchNorm1d: rank 0 has evaluated alone", "cured: rank 0 has .*"]),
    "slow_rank": (
        [f"symptom: all_reduce failed: {TIMEOUT}", "symptom: all_reduce failed: Connection.*"],
        ["back from a pause of 5 s", "cured: all_reduce over 2 ranks, after a pause .*"]),
    "rank_never_arrives": (
        [*[rf"\[rank {rank}/3\] wait timeout after 5000ms, keys: .*" for rank in (0, 1)],
         *plain("symptom: 2 of 3 processes started, 2 gave up; missing ranks: [2]")],
        plain("cured: 3 of 3 processes started, 0 gave up; missing ranks: []")),
    "download_by_all": (
        [r"symptom: of 600000 bytes the ranks have read \[600000, \d{1,5}0000\]"],
        plain("cured: of 600000 bytes the ranks have read [600000, 600000]")),
    "no_set_epoch": (
        ["symptom: 1 different order in 3 epochs; rank 0 saw 500 of the 1000 items"],
        [r"cured: 3 different orders in 3 epochs; rank 0 saw [89]\d\d of the 1000 items"]),
    "unseeded_dataset": (
        [r"symptom: \d{2,3} items are in both training shares; \d{2,3} test items were .*"],
        ["cured: 0 items are in both training shares; 0 test items were trained on"]),
    "padded_evaluation": (
        plain("images [2, 6, 0]: 2 of 3 right", "images [2, 6]: 1 of 2 right",
              "symptom: accuracy 0.6667 padded, 0.5833 as a mean of means; one process: 0.6000"),
        plain("cured: accuracy 0.6000 by sums; one process: 0.6000")),
    "mean_of_unequal_shards": (
        ["2 of 10 samples", r"symptom: gradient \S+ of its length off one process's"],
        ["8 of 10 samples", r"cured: gradient \S+ of its length off one process's"]),
    "learning_rate_and_world_size": (
        [r"global batch 1 x 16, 64 steps an epoch: loss 1\.5\d+ after it",
         r"global batch 4 x 16, 16 steps an epoch: loss 1\d\.\d+ after it",
         r"symptom: weights up to \S+ off those of one process"],
        [r"global batch 4 x 4, 64 steps an epoch: loss 1\.5\d+ after it",
         r"cured: weights up to \S+ off those of one process"]),
    "small_batch_norm": (
        [r"feature 0: tensor\(\[-?(1\.0|0\.9)\d+, +-?(1\.0|0\.9)\d+\]\); .*",
         r"symptom: outputs are off one process's by up to \S+"],
        ["on a CPU: SyncBatchNorm expected input tensor to be on GPU.*",
         r"cured: outputs are off one process's by up to \S+"]),
    "async_read_too_early": (
        ["put in 1, read 1", "symptom: the sum is 3; rank 0 read 1, and rank 1, .* wait, 2"],
        ["put in 1, read 3", "cured: the sum is 3; rank 0 read 3, and rank 1, .* wait, 3"]),
    "device_from_global_rank": (
        [" +1 +2 +0 +cuda:2 does not exist", " +1 +2 +0 +cuda:0",
         "symptom: GPUs in use: 2 of 4 by global rank, 2 of 4 by nothing"],
        [" +1 +3 +1 +cuda:1", "cured: GPUs in use: 4 of 4 by local rank"]),
    "wrapper_not_kept": (
        plain("symptom: gradients [1.0, 3.0] on the two ranks; mean 2"),
        plain("cured: gradients [2.0, 2.0] on the two ranks; mean 2")),
    "method_of_the_model": (
        plain("model.loss(): 'DistributedDataParallel' object has no attribute 'loss'",
              "symptom: gradients [1.0, 3.0] on the two ranks; mean 2"),
        plain("cured: gradients [2.0, 2.0] on the two ranks; mean 2")),
    "reentrant_checkpoint": (
        plain("with find_unused_parameters=True: Expected to mark a variable ready only once",
              "symptom: gradients [6.0, 10.0] on the two ranks; right is 8"),
        plain("cured: gradients [8.0, 8.0] on the two ranks; right is 8")),
    "keys_with_module": (
        plain('Missing key(s) in state_dict: "weight".',
              'Unexpected key(s) in state_dict: "module.weight".',
              "symptom: loaded with strict=False, without an error:"
              " the weight is 0, trained was 7"),
        plain("cured: loaded: the weight is 7, trained was 7")),
    "backend_without_cpu": (
        plain("symptom: No backend type associated with device type cpu"),
        plain("cured: the sum of 1 and 2 is 3")),
    "closed_terminal": (
        ["SIGHUP to torchrun",
         r"symptom: no worker trained to the end; SignalException: Process \.\.\. got signal: 1"],
        ["worker: done", "cured: both workers trained to the end"]),
    "unused_parameters": (
        ["step 1: gradient 2.0", rf"{UNUSED} \(parameters 2 3\)"],
        ["step 2: gradient 1.5", "cured: the gradients 1 and 2 averaged to 1.5 in both steps"]),
    "every_rank_saves": (
        [r"symptom: snapshot \d+ is (mixed|unreadable)"],
        ["cured: 10 snapshots, all of them whole"]),
    "fixed_port": (
        ["second job, rank 0: The server socket .* EADDRINUSE, message: address already in use",
         re.escape(f"symptom: the first job's group is {MIXED_JOBS}")],
        [r"cured: first job on port (\d+), second job on port (?!\1)\d+"]),
    "optimizer_not_saved": (
        [r"symptom: after epoch 3 weights differ by 0\.[0-9]+"],
        ["cured: after epoch 3 weights differ by 0"]),
    "off_by_one_epoch": (
        [r"symptom: trained epochs 1 2 3 3 4; the weights are off by 0\.\d+"],
        ["cured: trained epochs 1 2 3 4; the weights are off by 0"]),
    "snapshot_in_place": (
        ["epoch 2: exit -25, file of 100000 bytes",
         "symptom: .*failed reading zip archive: failed finding central directory"],
        [r"epoch 2: exit -25, file of 20\d{4} bytes",
         "cured: the snapshot of epoch 1 is still there"]),
}  # fmt: skip
FLAGS = ([], ["--fixed"])
OPTIONS = {"download_by_all": {"nodes": 2}}  # two local ranks 0, and one disk


def fork_the_workers():
    """Called in a child: the script forks its processes, so that they have torch loaded."""
    def fork_instead(function, args=(), nprocs=1, join=True):
        return mp.start_processes(function, args, nprocs, join, start_method="fork")

    mp.spawn = fork_instead
    mp.set_start_method("fork", force=True)  # for Process: a forkserver's child would start another


def show(name, folder, *flags, **options):
    """Run a pitfall with as many ranks as its docstring says; return what it printed."""
    folder = folder / "-".join([name, *flags])
    folder.mkdir()
    script = f"pitfalls/{name}.py"
    docstring = (ROOT / script).read_text().partition('\n"""\n')[0]
    ranks = re.search(r"torchrun --standalone --nproc-per-node=(\d)", docstring)
    if ranks:
        result = fork_ranks(script, *flags, cwd=folder, world_size=int(ranks[1]), **options)
    else:
        result = fork(script, *flags, cwd=folder, before=fork_the_workers, timeout=120)
    assert result.status == 0, result.output
    assert not list(folder.iterdir()), "files left in the reader's folder"
    return result.output


def lines(output):
    return [re.sub(r"^\[rank \d/\d\] (?!wait)", "", line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def shows(request, tmp_path_factory):
    """{(name, flags): future of the output}, of those that are asked for: most of them wait."""
    wanted = {item.callspec.params["name"] for item in request.session.items
              if hasattr(item, "callspec") and "name" in item.callspec.params}  # fmt: skip
    folder = tmp_path_factory.mktemp("pitfalls")
    with ThreadPoolExecutor(5) as pool:
        yield {
            (name, *flags): pool.submit(show, name, folder, *flags, **OPTIONS.get(name, {}))
            for name in SHOWS if name in wanted
            for flags, patterns in zip(FLAGS, SHOWS[name], strict=True) if patterns
        }


@pytest.mark.parametrize("name", SHOWS)
def test_symptom_and_cure(shows, name):
    for flags, patterns in zip(FLAGS, SHOWS[name], strict=True):
        output = shows[(name, *flags)].result() if patterns else ""
        for pattern in patterns or []:
            assert any(re.fullmatch(pattern, line) for line in lines(output)), (pattern, output)
        other = "symptom: " if flags else "cured: "
        assert not any(line.startswith(other) for line in lines(output)), output


def debug(level):
    """Called in a child: TORCH_DISTRIBUTED_DEBUG, in front of the command."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()  # torch, loaded already, has read it


@pytest.mark.parametrize(("pitfall", "level", "said"), [
    ("unused_parameters", "INFO", rf"{UNUSED} \(parameters idle.bias, idle.weight\)"),
    ("mismatched_shapes", "DETAIL", "symptom: all_reduce failed: Detected mismatch between"
     + r" collectives on ranks.*TensorShape=\[4\].*TensorShape=\[3\].*"),
])  # fmt: skip
def test_torch_says_more_when_asked(tmp_path, pitfall, level, said):
    output = show(pitfall, tmp_path, before=functools.partial(debug, level))
    assert any(re.fullmatch(said, line) for line in lines(output)), output


def test_stale_addresses_cured(tmp_path):
    """One restart is enough; here with a store for all attempts, as torchrun has it."""
    result = fork_ranks("pitfalls/stale_addresses.py", "--fixed", cwd=tmp_path, max_restarts=1,
                        before=come_late)  # fmt: skip
    assert (result.status, result.attempts) == (0, 2), result.output
    attempts = [line for line in result.output.splitlines() if line.startswith("attempt ")]
    assert sorted(attempts) == [*["attempt 0"] * 2, *["attempt 1"] * 2], result.output


def test_no_destroy_cured(tmp_path):
    """Forked processes skip the end of the interpreter, where the others abort."""
    script = variant(tmp_path, "pitfalls/no_destroy.py", {"range(500)": "range(5)"})
    result = fork(script, "--fixed", cwd=tmp_path, before=fork_the_workers)
    assert result.output == "cured: fixed(): 0 of 3 jobs aborted\n"


def test_every_pitfall_has_its_row():
    text = (ROOT / "pitfalls/README.md").read_text()
    found = {path.stem for path in ROOT.glob("pitfalls/*.py")}
    assert found == SHOWS.keys() | {"stale_addresses", "no_destroy"}
    for name in found:
        rows = re.findall(rf"^\|.+\| \[{name}\]\({name}.py\)", text, re.MULTILINE)
        assert len(rows) == 1, f"{name} has {len(rows)} rows in pitfalls/README.md"
