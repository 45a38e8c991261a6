"""recipes/train_by_steps.py: killed anywhere, it ends with the bits of an uninterrupted run.

More of it: test_swap.py (with another model and other data), test_faults.py and test_kill_test.py
(killed at random moments), test_recipes.py (what it prints).
"""

import argparse
import itertools
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import time

import pytest
import torch
from snapshots import BAD_SNAPSHOTS
from support import (
    ROOT,
    TORCHRUN,
    digest,
    files,
    fork,
    fork_ranks,
    limit_file_size,
    load,
    run,
    tensors,
    variant,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.distributed import DistributedSampler

SCRIPT = "recipes/train_by_steps.py"
# 13 windows: neither 2 nor 3 ranks nor 2 micro-batches divide them.
SMALL = ("--batch-size", 13)
FILES = ["snapshot.pt", "snapshot_best.pt"]
EVERY_STEP = {"REPORT_EVERY = 10": "REPORT_EVERY = 1"}
NO_WORKERS = {"WORKERS = 2": "WORKERS = 0"}  # quicker
NO_DROPOUT = {"DROPOUT = 0.1": "DROPOUT = 0.0"}
SETTLE = "    settle_reduction_order(model, two_items)\n"
RATE = "LEARNING_RATE, WARM_UP_STEPS, CLIP = 1e-2, 10, 1.0"


def train(folder, *arguments, changes=NO_WORKERS, **options):
    """Run a variant of the script in folder."""
    folder.mkdir(exist_ok=True)
    (folder.parent / "variant").mkdir(exist_ok=True)
    script = variant(folder.parent / "variant", SCRIPT, changes)
    path = () if "--snapshot-path" in arguments else ("--snapshot-path", "snapshot.pt")
    return fork_ranks(script, *arguments, *path, cwd=folder, **options)


def trained(*args, **kwargs):
    """The same, and it must succeed."""
    result = train(*args, **kwargs)
    assert result.status == 0, result.output
    return result


@pytest.fixture(scope="module")
def names():
    """What the script defines."""
    return runpy.run_path(str(ROOT / SCRIPT))


def reports(result):
    """{step: (loss, learning rate, norm)} as rank 0 reported them, the last report of a step."""
    pattern = r"step +(\d+)/\d+ \| loss (\S+) \| rate (\S+) \| norm +(\S+) \| +\d+ examples/s"
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return {int(m[1]): (float(m[2]), float(m[3]), float(m[4])) for m in found if m}


def validations(result):
    """{step: validation loss}, the last one of a step."""
    pattern = r"step +(\d+)/\d+ \| validation loss (\S+) \| best after step \d+"
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return {int(m[1]): float(m[2]) for m in found if m}


def difference(one, other):
    """The largest |difference| between two snapshots' tensors, the optimizer's included."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) == 151  # 30 parameters; of each the average, two moments, a step count
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


# ---- Killed and resumed ----

# A worker in attempt 1 alone, for the SIGTERM: elsewhere it is quicker without.
LESS = EVERY_STEP | {
    "WORKERS = 2": "WORKERS = int(os.environ.get('TORCHELASTIC_RESTART_COUNT') == '1')"}
VALIDATE = "    model.eval()\n    total"
KILLED_IN_VALIDATION = {VALIDATE: (
    "    if dist.get_rank() == 0 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '2':\n"
    f"        os.kill(os.getpid(), signal.SIGKILL)\n{VALIDATE}")}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 7 steps on 3 ranks, and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return trained(folder, 7, 3, *SMALL, changes=LESS, world_size=3), folder


def start_and_end_a_process():
    """By fork and SIGTERM, as multiprocessing.Pool does. That must not reach this process."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=lambda: (its.send("here"), signal.pause()), daemon=True)  # fmt: skip
    process.start()
    ours.recv()
    process.terminate()
    process.join(10)
    process.kill()
    assert process.exitcode == -signal.SIGTERM


def sigterm_in_step_5():
    """Called in a child: the last rank and its loader's worker get SIGTERM in attempt 1."""
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("2", "1"):
        steps = itertools.count(4)

        def ask(*_):
            start_and_end_a_process()
            if next(steps) == 5:
                for pid in [child.pid for child in multiprocessing.active_children()]:
                    os.system(f"kill {pid}")  # not from its rank: that would be in order
                time.sleep(0.5)  # a worker that ended would end its rank here
                os.kill(os.getpid(), signal.SIGTERM)

        register_optimizer_step_pre_hook(ask)


def test_killed_and_resumed_is_bit_for_bit_uninterrupted(tmp_path, whole):
    """SIGKILL in step 5, then SIGTERM there, then SIGKILL while it validates after step 6."""
    result, folder = whole
    again = trained(tmp_path / "run", 7, 3, *SMALL, "--crash-step", 5, world_size=3,
                    max_restarts=3, changes=LESS | KILLED_IN_VALIDATION,
                    before=sigterm_in_step_5)  # fmt: skip
    assert "crash on purpose: SIGKILL in step 5" in again.lines(2)
    for attempt, step in (1, 3), (2, 5), (3, 6):
        resumed = f"attempt {attempt}: resumed from snapshot.pt after step {step}"
        assert again.lines(0).count(resumed) == 1
    for rank, who in enumerate(["another rank was", "another rank was", "this rank was"]):
        assert f"{who} asked to leave (SIGTERM): end after step 5" in again.lines(rank)
    found, snapshot = load(tmp_path / "run"), load(folder)
    assert difference(found, snapshot) == 0 and digest(again) == digest(result)
    assert all(found[key] == snapshot[key] for key in ("step", "scheduler", "best", "batches"))
    assert found["step"] == 7 and found["averaged"]["n_averaged"] == 7
    assert reports(again) == reports(result) and len(reports(result)) == 7
    assert len(re.findall(r"\| rate ", again.output)) == 4 + 2 + 1 + 1
    assert validations(again) == validations(result) and list(validations(result)) == [3, 6, 7]
    mean = r"step +6/7 \| (training loss \S+, mean of 3 steps)"  # of 4, 5 and 6
    assert re.findall(mean, again.output) == re.findall(mean, result.output) != []
    best, its = (torch.load(path / "snapshot_best.pt") for path in (folder, tmp_path / "run"))
    assert best["step"] == its["step"] and best["loss"] == its["loss"]
    assert files(folder) == files(tmp_path / "run") == FILES


def test_the_learning_rate_warms_up_and_falls(whole, names):
    rates = [rate for _, rate, _ in reports(whole[0]).values()]
    assert rates == [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3]
    factor = names["warm_up_and_cosine"]
    assert [round(factor(done, 60), 3) for done in (0, 9, 10, 35, 60)] == [0.1, 1, 1, 0.55, 0.1]
    assert factor(10, 10) == 1 and factor(3, 3) == 0.4  # called once more after the last step


def test_a_finished_run_trains_nothing_again(tmp_path, whole):
    shutil.copy(whole[1] / "snapshot.pt", tmp_path)
    before = (tmp_path / "snapshot.pt").read_bytes()
    again = trained(tmp_path, 1, 1, *SMALL, world_size=1)
    assert "nothing left to train: ask for more steps, or delete the snapshot" in again.lines(0)
    assert digest(again) == digest(whole[0])
    assert (tmp_path / "snapshot.pt").read_bytes() == before


def test_an_inf_on_one_rank_spoils_neither_weights_nor_snapshot(tmp_path):
    """Rank 1 has it in step 2, which it knows by the seed: all ranks fail, at once."""
    factor = "(math.inf if torch.initial_seed() == 5 else 2)"
    changes = {"(loss * weight * dist.get_world_size())": f"(loss * weight * {factor})"}
    result = train(tmp_path / "run", 4, 1, *SMALL, changes=NO_WORKERS | changes)
    assert result.status == 1 and "is non-finite" in result.output
    snapshot = load(tmp_path / "run")
    assert snapshot["step"] == 1 and all(t.isfinite().all() for t in tensors(snapshot))


def test_epochs_and_patience(tmp_path):
    """Epochs of 4 steps. With such a learning rate, each validation is worse than the last."""
    changes = {"windows[:-VALIDATION]": "windows[:53]", RATE: RATE.replace("1e-2", "9.0")}
    result = trained(tmp_path / "run", "--epochs", 3, "--patience", 1, *SMALL,
                     changes=changes)  # fmt: skip
    assert list(validations(result)) == [4, 8], result.output
    assert "stopped early: no better validation since step 4" in result.lines(0)
    assert load(tmp_path / "run")["step"] == 8
    assert torch.load(tmp_path / "run/snapshot_best.pt")["step"] == 4


def test_a_rank_that_waits_for_a_dead_one_leaves_by_itself(tmp_path):
    """SIGTERM comes while the main thread waits in torch's C++, where no handler of Python runs."""
    (tmp_path / "wait.py").write_text("""
import os, runpy, signal, sys, threading
from datetime import timedelta
import torch.distributed as dist
os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "11"  # seconds
asked = runpy.run_path(sys.argv[1])["leave_on_sigterm"]()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
store.wait(["never"], timedelta(seconds=50))
""")
    result = fork(tmp_path / "wait.py", ROOT / SCRIPT, cwd=tmp_path)
    assert result.status == 128 + signal.SIGTERM, result.output


# ---- What the ranks share ----


def test_any_number_of_ranks_takes_the_same_steps(names):
    """Any first step, any size: the same items in each step, the rest left out."""
    def steps(world_size, first_step, micro_batches=1):
        ranks = [names["GlobalBatches"](range(first_step, 20), 103, 10, rank, world_size,
                                        micro_batches) for rank in range(world_size)]  # fmt: skip
        assert {len(batches) for batches in ranks} == {(20 - first_step) * micro_batches}
        parts = [sorted(itertools.chain(*shares)) for shares in zip(*ranks, strict=True)]
        assert all(parts)
        return [sorted(itertools.chain(*parts[i : i + micro_batches]))
                for i in range(0, len(parts), micro_batches)]  # fmt: skip

    whole = steps(1, 0)
    for epoch, first in (0, 0), (1, 10):
        epochs, items = zip(*itertools.chain(*whole[first : first + 10]), strict=True)
        assert set(epochs) == {epoch} and len(set(items)) == 100 and max(items) <= 102
    assert [item for _, item in whole[0]] != [item for _, item in whole[10]]
    for world_size, first_step in itertools.product((2, 3, 7), (0, 1, 10, 20)):
        assert steps(world_size, first_step) == whole[first_step:]
    assert steps(3, 4, micro_batches=3) == whole[4:]
    # Where the ranks divide the items, those are the batches of DistributedSampler.
    theirs = DistributedSampler(range(96), 2, 1)
    theirs.set_epoch(3)
    ours = itertools.chain(*names["GlobalBatches"](range(36, 48), 96, 8, 1, 2))
    assert [item for _, item in ours] == list(theirs)


@pytest.mark.long
def test_a_job_goes_on_with_another_number_of_ranks(tmp_path):
    for folder, ranks in ("resized", 2), ("whole", 2):
        steps = 3 if folder == "resized" else 8
        trained(tmp_path / folder, steps, 8, *SMALL, changes=NO_DROPOUT, world_size=ranks)
    trained(tmp_path / "resized", 8, 8, *SMALL, changes=NO_DROPOUT, world_size=3)
    assert 0 < difference(load(tmp_path / "whole"), load(tmp_path / "resized")) < 1e-3


HOOK = """\
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    def hook(state, bucket):
        log("gradients exchanged")
        return default_hooks.allreduce_hook(state, bucket)
    model.register_comm_hook(None, hook)
"""


def first_step(folder, *arguments, world_size):
    """Its result, and the gradient as AdamW has seen it: ten times its first moment."""
    changes = NO_WORKERS | NO_DROPOUT | {RATE: RATE.replace("1.0", "0.125"), SETTLE: HOOK + SETTLE}
    result = trained(folder, 1, 1, *SMALL, *arguments, changes=changes, world_size=world_size)
    state = load(folder)["optimizer"]["state"]
    return result, torch.cat([10 * state[i]["exp_avg"].flatten() for i in range(len(state))])


def test_ranks_that_cannot_divide_a_batch_take_the_step_of_one_process(tmp_path, names):
    """3 ranks have 5, 4 and 4 windows, in micro-batches of 3, 2 or 2: the gradient of all 13."""
    result, one = first_step(tmp_path / "one", "--accumulate", 1, world_size=1)
    again, three = first_step(tmp_path / "three", "--accumulate", 2, world_size=3)
    assert (three - one).norm() / one.norm() < 1e-5
    (loss, _, norm), (same_loss, _, same_norm) = reports(result)[1], reports(again)[1]
    assert same_loss == pytest.approx(loss, abs=1e-3) and same_norm == pytest.approx(norm, abs=0.02)
    # The gradient of the whole batch is clipped.
    assert norm > 0.5 and three.norm().item() == pytest.approx(0.125, abs=1e-5)
    # One exchange for a step, and one of settle_reduction_order.
    assert again.lines(0).count("gradients exchanged") == 2

    # The validation counts each of 100 windows once, though three ranks cannot share them.
    model, best = names["GPT"]().eval(), torch.load(tmp_path / "three/snapshot_best.pt")
    model.load_state_dict(best["model"])
    _, validation_set, _ = names["load_sets"](None)
    with torch.inference_mode():
        expected = names["mean_loss"](model, validation_set.tensors, 0).item()
    assert len(validation_set) == 100 and 4 < expected < 6
    assert validations(again)[1] == pytest.approx(expected, abs=1e-4)
    assert best["loss"] == pytest.approx(expected, rel=1e-5) and best["step"] == 1


def test_all_of_the_text_is_in_the_windows(names):
    windows = torch.cat([dataset.tensors[0] for dataset in names["load_sets"](None)[:2]])
    assert windows.shape[1] == 33 and len(windows) > 5000 and windows.max() < 128
    assert torch.equal(windows[1:, 0], windows[:-1, -1])  # each begins where the last one ends
    assert "comparison" in bytes(windows[:, :-1].flatten().tolist()).decode("ascii")


# ---- Snapshots and calls that cannot work ----


def flipped_byte(path, good):
    data = bytearray(good)
    tensor = torch.load(path, weights_only=True)["model"]["head.1.weight"].numpy().tobytes()
    data[good.index(tensor) + 100] ^= 1
    path.write_bytes(data)


def without_scheduler(path, good):
    snapshot = torch.load(path, weights_only=True)
    del snapshot["scheduler"]
    torch.save(snapshot, path)


def of_another_script(path, good):
    torch.save({"model": {"layers.0.weight": torch.zeros(3)}, "next_epoch": 2}, path)


def a_folder(path, good):
    path.unlink()
    path.mkdir()


REFUSED = {function: message for function, message in BAD_SNAPSHOTS.items()
           if function.__name__ != "flipped_byte"}  # fmt: skip
REFUSED |= {
    flipped_byte: "wrong checksum",
    without_scheduler: "KeyError: 'scheduler'",
    of_another_script: "Error(s) in loading state_dict for GPT",
    a_folder: "IsADirectoryError",
}


@pytest.fixture
def call(names, monkeypatch, tmp_path, capsys):
    """Call one of the script's functions here; return the line with which it ends the process."""
    def refused(name, *arguments, status):
        with pytest.raises(SystemExit) as end:
            names[name](*arguments)
        assert end.value.code == status
        [line] = capsys.readouterr().err.splitlines()
        return line

    monkeypatch.chdir(tmp_path)
    return refused


def parts_of(names):
    model = names["GPT"]()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "averaged": names["AveragedModel"](model), "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)}  # fmt: skip


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda function: function.__name__)
def test_a_snapshot_that_cannot_be_continued_is_refused(tmp_path, whole, names, call, spoil):
    path = tmp_path / "snapshot.pt"
    shutil.copy(whole[1] / "snapshot.pt", path)
    spoil(path, path.read_bytes())
    line = call("load_snapshot", "snapshot.pt", parts_of(names), "13 of 14432 examples", status=1)
    assert "cannot continue from snapshot.pt" in line and REFUSED[spoil] in line
    assert "move it away" in line
    assert files(tmp_path) == ["snapshot.pt"], "code in the pickle was executed"


def test_a_snapshot_of_another_batch_size_is_refused(whole, names, call):
    path, batches = whole[1] / "snapshot.pt", load(whole[1])["batches"]
    line = call("load_snapshot", path, parts_of(names), batches.replace("13", "12"), status=1)
    assert f"goes on with batches of {batches}, as before: with 12 of" in line


BAD_WORDS = {
    "--accumulate must be 1 or more": ["--accumulate", "0"],
    "TOTAL_STEPS must be 1 or more": ["-3"],
    "SAVE_EVERY must be 1 or more": ["3", "0"],
    "--epochs must be 1 or more": ["--epochs", "0"],
    "--patience must be 1 or more": ["--patience", "-1"],
    "this script is for one machine": [],
}


@pytest.mark.parametrize("message", BAD_WORDS)
def test_wrong_words_end_in_one_line(monkeypatch, call, message):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *BAD_WORDS[message]])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert message in call("parse_args", status=2)


def test_what_is_not_given(monkeypatch, names):
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    for variable in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, "1")
    assert names["parse_args"]() == argparse.Namespace(
        total_steps=60, save_every=20, epochs=None, patience=None, batch_size=32, accumulate=2,
        snapshot_path="train_by_steps.pt", crash_step=None)  # fmt: skip


BATCH = "--batch-size must be from 4 (an example for each of 2 ranks in each of 2 micro-batches) to"
BAD_CALLS = {
    "batch too small": (["--batch-size", 3], BATCH),
    "batch too large": (["--batch-size", 10**6], BATCH),
    "folder missing": (["--snapshot-path", "no/such.pt"], "cannot write no/such.pt"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_wrong_calls_end_in_one_line(tmp_path, name):
    arguments, message = BAD_CALLS[name]
    result = train(tmp_path / "run", *arguments)
    assert result.status == 2, result.output
    assert message in result.error() and "Traceback" not in result.output
    assert files(tmp_path / "run") == []


def test_a_second_job_with_the_same_snapshot_is_refused(tmp_path, names):
    with open(tmp_path / "snapshot.pt.lock", "w") as file:
        names["fcntl"].lockf(file, names["fcntl"].LOCK_EX)
        result = train(tmp_path, world_size=1)
    assert result.status == 1
    assert "another job is running with snapshot.pt: end it, or choose" in result.error()


def test_a_full_disk_keeps_the_last_snapshot(tmp_path, whole):
    path = tmp_path / "snapshot.pt"
    # Validated: otherwise the run begins with a validation, and the best model is written first.
    torch.save(load(whole[1]) | {"due": False}, path)
    before = path.read_bytes()
    result = train(tmp_path, 8, 1, *SMALL, world_size=1, before=limit_file_size)
    assert result.status == 1
    assert "cannot write snapshot.pt, which stays as it was" in result.error()
    assert path.read_bytes() == before and files(tmp_path) == ["snapshot.pt"]


# ---- A real launch ----


@pytest.mark.long
def test_the_command_of_the_docstring_learns_after_a_crash(tmp_path):
    result = run(*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3", ROOT / SCRIPT,
                 60, 20, "--crash-step", 30, cwd=tmp_path)  # fmt: skip
    assert result.status == 0, result.output
    assert "attempt 1: resumed from train_by_steps.pt after step 20" in result.lines(0)
    assert files(tmp_path) == ["train_by_steps.pt", "train_by_steps_best.pt"]
    assert validations(result)[60] < 2.9
