"""template/one_machine.py: killed anywhere, it ends with the bits of an uninterrupted run.

More of it: test_swap.py (with another model and other data), test_faults.py (killed at other
moments, a second job), test_kill_test.py, test_repository.py (what it prints).
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
from snapshots import flipped_byte, pickle_in_an_archive
from support import ROOT, digest, files, fork_ranks, limit_file_size, load, tensors, variant
from torch.optim.optimizer import register_optimizer_step_pre_hook

SCRIPT = "template/one_machine.py"
# 13 windows: neither 2 nor 3 ranks nor 2 micro-batches divide them.
SMALL = ("--batch-size", 13)
NO_WORKERS = {"WORKERS = 2": "WORKERS = 0"}  # quicker
RATE = "LEARNING_RATE, WARM_UP_STEPS, CLIP = 1e-2, 10, 1.0"
WORSE = {RATE: RATE.replace("1e-2", "9.0")}  # so that each validation is worse than the last


def train(folder, *arguments, changes=NO_WORKERS, status=0, **options):
    """Run a variant of the script, which goes beside folder; it must end with that status."""
    folder.mkdir(exist_ok=True)
    script = variant(folder.parent, SCRIPT, changes)
    result = fork_ranks(script, "--snapshot-path", "snapshot.pt", *arguments, cwd=folder, **options)
    assert result.status == status, result.output
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


# ---- Killed and resumed ----

# A worker in attempt 1 alone, for the SIGTERM: elsewhere it is quicker without.
LESS = WORSE | {
    "REPORT_EVERY = 10": "REPORT_EVERY = 1",
    "WORKERS = 2": "WORKERS = int(os.environ.get('TORCHELASTIC_RESTART_COUNT') == '1')"}
VALIDATE = "    model.eval()\n    total"
KILLED_IN_VALIDATION = {VALIDATE: (
    "    if dist.get_rank() == 0 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '2':\n"
    f"        os.kill(os.getpid(), signal.SIGKILL)\n{VALIDATE}")}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 7 steps on 3 ranks, and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(folder, 7, 3, *SMALL, changes=LESS, world_size=3), folder


def sigterm_in_step_5():
    """Called in a child: the last rank and its loader's worker get SIGTERM in attempt 1."""
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("2", "1"):
        steps = itertools.count(4)

        def ask(*_):
            if next(steps) == 5:
                for child in multiprocessing.active_children():
                    os.system(f"kill {child.pid}")  # not from its rank: that would be in order
                time.sleep(0.5)  # a worker that ended would end its rank here
                os.kill(os.getpid(), signal.SIGTERM)

        register_optimizer_step_pre_hook(ask)


def test_killed_and_resumed_is_bit_for_bit_uninterrupted(tmp_path, whole):
    """SIGKILL in step 5, then SIGTERM there, then SIGKILL while it validates after step 6."""
    result, folder = whole
    again = train(
        tmp_path / "run", 7, 3, *SMALL, "--crash-step", 5, world_size=3, max_restarts=3,
        changes=LESS | KILLED_IN_VALIDATION, before=sigterm_in_step_5)
    assert "crash on purpose: SIGKILL in step 5" in again.lines(2)
    for attempt, step in (1, 3), (2, 5), (3, 6):
        resumed = f"attempt {attempt}: resumed from snapshot.pt after step {step}"
        assert again.lines(0).count(resumed) == 1
    for rank, who in enumerate(["another rank was", "another rank was", "this rank was"]):
        assert f"{who} asked to leave (SIGTERM): end after step 5" in again.lines(rank)
    found, snapshot = load(tmp_path / "run"), load(folder)
    assert len(tensors(found)) == 151  # 30 parameters; of each an average, moments, a count
    assert all(torch.equal(*pair) for pair in zip(tensors(found), tensors(snapshot), strict=True))
    assert digest(again) == digest(result)
    assert all(found[key] == snapshot[key] for key in ("step", "scheduler", "best", "batches"))
    assert found["step"] == 7 and found["averaged"]["n_averaged"] == 7
    assert reports(again) == reports(result) and len(reports(result)) == 7
    assert len(re.findall(r"\| rate ", again.output)) == 4 + 2 + 1 + 1
    assert validations(again) == validations(result) and list(validations(result)) == [3, 6, 7]
    losses = [reports(result)[step][0] for step in (4, 5, 6)]
    for run in result, again:
        mean = re.search(r"step +6/7 \| training loss (\S+), mean of 3 steps", run.output)
        assert float(mean[1]) == pytest.approx(sum(losses) / 3, abs=2e-4)
    best, its = (torch.load(path / "snapshot_best.pt") for path in (folder, tmp_path / "run"))
    assert best["step"] == its["step"] == 3 and best["loss"] == its["loss"]
    assert files(folder) == files(tmp_path / "run") == ["snapshot.pt", "snapshot_best.pt"]


def test_the_learning_rate_warms_up_and_falls(whole, names):
    rates = [rate for _, rate, _ in reports(whole[0]).values()]
    assert rates == [0.9, 1.8, 2.7, 3.6, 4.5, 5.4, 6.3]
    factor = names["warm_up_and_cosine"]
    assert [round(factor(done, 60), 3) for done in (0, 9, 10, 35, 60)] == [0.1, 1, 1, 0.55, 0.1]
    assert factor(10, 10) == 1 and factor(3, 3) == 0.4  # called once more after the last step


def test_a_finished_run_trains_nothing_again(tmp_path, whole):
    folder = shutil.copytree(whole[1], tmp_path / "run")
    before = (folder / "snapshot.pt").read_bytes()
    again = train(folder, 1, 1, *SMALL, world_size=1)
    assert "nothing left to train: ask for more steps, or delete the snapshot" in again.lines(0)
    assert digest(again) == digest(whole[0])
    assert (folder / "snapshot.pt").read_bytes() == before


def test_an_inf_on_one_rank_spoils_neither_weights_nor_snapshot(tmp_path):
    """Rank 1 has it in step 2, which it knows by the seed: all ranks fail, at once."""
    factor = "(math.inf if torch.initial_seed() == 5 else 2)"
    changes = {"(loss * weight * dist.get_world_size())": f"(loss * weight * {factor})"}
    result = train(tmp_path / "run", 4, 1, *SMALL, changes=NO_WORKERS | changes, status=1)
    snapshot = load(tmp_path / "run")
    assert "is non-finite" in result.output and snapshot["step"] == 1
    assert all(tensor.isfinite().all() for tensor in tensors(snapshot))


def fail_in_backward():
    """Called in a child: what torchrun would read of the error is to be in report.json."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.abspath("report.json")

    def backward(*args, **options):
        raise RuntimeError("says this test")

    torch.Tensor.backward = backward


def test_an_error_reaches_torchrun(tmp_path):
    train(tmp_path / "run", 1, *SMALL, status=1, world_size=1, before=fail_in_backward)
    assert "says this test" in (tmp_path / "run/report.json").read_text()


def test_epochs_and_patience(tmp_path):
    """Epochs of 4 steps."""
    changes = WORSE | {"windows[:-VALIDATION]": "windows[:53]"}
    result = train(tmp_path / "run", "--epochs", 3, "--patience", 1, *SMALL, changes=changes)
    assert list(validations(result)) == [4, 8], result.output
    assert "stopped early: no better validation since step 4" in result.lines(0)
    assert load(tmp_path / "run")["step"] == 8
    assert torch.load(tmp_path / "run/snapshot_best.pt")["step"] == 4


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


SETTLE = "    settle_reduction_order(model, two_items)\n"
HOOK = """\
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    model.register_comm_hook(None, lambda state, bucket: (
        log("gradients exchanged") or allreduce_hook(state, bucket)))
"""


def first_step(folder, *arguments, world_size):
    """Its result, and the gradient as AdamW has seen it: ten times its first moment."""
    changes = NO_WORKERS | {"DROPOUT = 0.1": "DROPOUT = 0.0", SETTLE: HOOK + SETTLE,
                            RATE: RATE.replace("1.0", "0.125")}
    result = train(folder, 1, 1, *SMALL, *arguments, changes=changes, world_size=world_size)
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


def edited(**entries):
    """A function that spoils a snapshot so."""
    return lambda path, good: torch.save(torch.load(path, weights_only=True) | entries, path)


REFUSED = [
    (flipped_byte, "cannot continue from snapshot.pt (ValueError: wrong checksum of "),
    (pickle_in_an_archive, "cannot continue from snapshot.pt (UnpicklingError: "),
    (edited(scheduler={}), "cannot continue from snapshot.pt (KeyError: "),
    (edited(batches="12 of 14432 examples"),
     "goes on with batches of 12 of 14432 examples, as before: with 13 of 14432 examples, some"),
]


def refusal(capsys, status, function, *arguments):
    """The line with which the script's function ends the process."""
    with pytest.raises(SystemExit) as end:
        function(*arguments)
    assert end.value.code == status
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("spoil", "message"), REFUSED)
def test_a_bad_snapshot_is_refused(tmp_path, monkeypatch, capsys, whole, names, spoil, message):
    monkeypatch.chdir(tmp_path)
    model = names["GPT"]()
    optimizer = torch.optim.AdamW(model.parameters())
    parts = {"model": model, "averaged": names["AveragedModel"](model), "optimizer": optimizer,
             "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)}
    path = shutil.copy(whole[1] / "snapshot.pt", tmp_path / "snapshot.pt")
    spoil(path, path.read_bytes())
    before = path.read_bytes()
    load_it = names["load_snapshot"], "snapshot.pt", parts, "13 of 14432 examples"
    assert message in refusal(capsys, 1, *load_it)
    assert path.read_bytes() == before
    assert files(tmp_path) == ["snapshot.pt"], "code in the pickle was executed"


def test_the_command_line(monkeypatch, capsys, names):
    def say(*words, ranks_here="2"):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *words])
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "2")
    say()
    assert names["parse_args"]() == argparse.Namespace(
        total_steps=60, save_every=20, epochs=None, patience=None, batch_size=32, accumulate=2,
        snapshot_path="one_machine.pt", crash_step=None)  # fmt: skip
    say(ranks_here="1")
    assert "this script is for one machine" in refusal(capsys, 2, names["parse_args"])
    say("-3", "0", "--accumulate", "0", "--epochs", "0", "--patience", "-1")
    wrong = "TOTAL_STEPS and SAVE_EVERY and --accumulate and --epochs and --patience"
    assert f"{wrong} must be 1 or more" in refusal(capsys, 2, names["parse_args"])


BATCH = "--batch-size must be from 4 (an example for each of 2 ranks in each of 2 micro-batches) to"


def test_sets_that_do_not_fit_are_named(monkeypatch, capsys, names):
    """Without workers, in this process. (Items of two sizes: below.)"""
    check, args = names["check_sets"], argparse.Namespace(batch_size=2, accumulate=1)
    monkeypatch.setitem(check.__globals__, "WORKERS", 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    a, b = torch.rand(2), torch.rand(3)
    good = [(a, a, 0), (b[:2], a, 1)]
    assert torch.equal(check(good, good, args)[0], torch.stack([a, b[:2]]))
    for wrong, word in (([], "is empty"), ([a, a], "a batch is Tensor"),
                        ([(a, "seven")], "['Tensor'"), ([()], "a batch is list"),
                        ([(object(), 1)], "found <class 'object'>")):
        for name, sets in (("training", (wrong, good)), ("validation", (good, wrong))):
            with pytest.raises(SystemExit) as end:
                check(*sets, args)
            message = capsys.readouterr().err
            assert end.value.code == 1 and f"the {name} set " in message and word in message


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--batch-size", 3, BATCH),
    ("--batch-size", 10**6, BATCH),
    ("--snapshot-path", "no/such.pt", "cannot write no/such.pt"),
])
def test_wrong_calls_end_in_one_line(tmp_path, option, value, message):
    result = train(tmp_path / "run", option, value, status=2)
    assert message in result.error() and "Traceback" not in result.output
    assert files(tmp_path / "run") == []


def test_items_of_two_sizes_end_in_one_line(tmp_path):
    sets = "sets = TensorDataset(windows[:-VALIDATION]), TensorDataset(windows[-VALIDATION:])"
    two_sizes = {sets: "sets = [[(windows[0],), (windows[0, 1:],)]] * 2"}
    result = train(tmp_path / "run", changes=two_sizes, status=1, world_size=1)
    assert "the validation set " in result.error() and "they differ in size" in result.error()
    assert "Traceback" not in result.output


def test_a_full_disk_keeps_the_last_snapshot(tmp_path, whole):
    folder = shutil.copytree(whole[1], tmp_path / "run")
    # Validated: otherwise the run begins with a validation, and the best model is written first.
    torch.save(load(folder) | {"due": False}, folder / "snapshot.pt")
    before, left = (folder / "snapshot.pt").read_bytes(), files(folder)
    result = train(folder, 8, 1, *SMALL, world_size=1, before=limit_file_size, status=1)
    assert "cannot write snapshot.pt, which stays as it was" in result.error()
    assert (folder / "snapshot.pt").read_bytes() == before and files(folder) == left


@pytest.mark.long
def test_it_learns_and_a_crash_costs_the_steps_since_the_last_snapshot(tmp_path):
    result = train(tmp_path / "run", 60, 20, "--crash-step", 30, max_restarts=1)
    assert "attempt 1: resumed from snapshot.pt after step 20" in result.lines(0)
    assert validations(result)[60] < 2.9
