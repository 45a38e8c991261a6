"""recipes/train_by_steps.py: killed anywhere, it ends with the bits of an uninterrupted run."""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import re
import runpy
import shutil
import signal
import time

import pytest
import torch
from snapshots import BAD_SNAPSHOTS
from support import (
    ROOT,
    TORCHRUN,
    Result,
    assert_nothing_left,
    digest,
    end,
    files,
    fork_ranks,
    limit_file_size,
    load,
    read_until,
    run,
    start,
    tensors,
    variant,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

SCRIPT = "recipes/train_by_steps.py"
# 13 windows: neither 2 nor 3 ranks nor 2 micro-batches divide them.
SMALL = ("--batch-size", 13)
EVERY_STEP = {"REPORT_EVERY = 10": "REPORT_EVERY = 1"}
SETTLE = "    settle_reduction_order(model, validation[:1].to(device), args)\n"
SEEDED = "SEED + step * world_size + rank)\n        share"
SHARED = "        loss = add_up_gradients(model, windows, share, args)\n"


def train(folder, *arguments, script=SCRIPT, changes=None, **options):
    """Run the script, or a variant of it, in folder; test_recipes.py runs it with its own path."""
    folder.mkdir(exist_ok=True)
    if changes:
        (folder.parent / "variant").mkdir(exist_ok=True)
        script = variant(folder.parent / "variant", SCRIPT, changes)
    path = () if "--snapshot-path" in arguments else ("--snapshot-path", "snapshot.pt")
    return fork_ranks(script, *arguments, *path, cwd=folder, **options)


def trained(*args, **kwargs):
    """The same, and it must succeed."""
    result = train(*args, **kwargs)
    assert result.status == 0, result.output
    return result


def reports(result):
    """{step: (loss, learning rate, norm)} as rank 0 reported them, the last report of a step."""
    pattern = r"step +(\d+)/\d+ \| loss (\S+) \| rate (\S+) \| norm +(\S+) \| +\d+ tokens/s"
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return {int(m[1]): (float(m[2]), float(m[3]), float(m[4])) for m in found if m}


def validations(result):
    """{step: validation loss} after each save."""
    pattern = r"step +(\d+)/\d+ \| validation loss (\S+) \| saved in \S+"
    found = [re.fullmatch(pattern, line) for line in result.lines(0)]
    return {int(m[1]): float(m[2]) for m in found if m}


def difference(one, other):
    """The largest |difference| between two snapshots' tensors, the optimizer's included."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) == 4 * 28  # each parameter has two moments and a step count
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


# ---- Killed and resumed ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{number of ranks: an uninterrupted run of 7 steps}, its snapshot in the folder beside it."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        ranks: (trained(folder / str(ranks), 7, 3, *SMALL, changes=EVERY_STEP, world_size=ranks),
                load(folder / str(ranks)))
        for ranks in (2, 3)
    }  # fmt: skip


def killed(folder, ranks, changes=None):
    """A run whose last rank was killed in step 5, two steps after the snapshot."""
    arguments = (7, 3, *SMALL, "--crash-step", 5)
    changes = EVERY_STEP | (changes or {})
    return trained(folder / "killed", *arguments, changes=changes, world_size=ranks, max_restarts=1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_killed_and_resumed_is_bit_for_bit_uninterrupted(tmp_path, whole, ranks):
    result, snapshot = whole[ranks]
    again = killed(tmp_path, ranks)
    assert again.attempts == 2
    assert "crash on purpose: SIGKILL in step 5" in again.lines(ranks - 1)
    assert "attempt 1: resumed from snapshot.pt after step 3" in again.lines(0)
    found = load(tmp_path / "killed")
    assert difference(found, snapshot) == 0 and digest(again) == digest(result)
    assert list(found) == ["model", "optimizer", "scheduler", "step", "batch_size"]
    assert found["step"] == 7
    assert found["scheduler"] == snapshot["scheduler"]
    assert reports(again) == reports(result) and len(reports(result)) == 7
    assert validations(again) == validations(result) and list(validations(result)) == [3, 6, 7]


@pytest.mark.parametrize(("ranks", "changes"), [
    (3, {SETTLE: ""}),
    pytest.param(2, {f"torch.manual_seed({SEEDED}": f"rank == 9 and torch.manual_seed({SEEDED}"},
                 marks=pytest.mark.long),
    (2, {"        scheduler.load_state_dict(": "        (lambda state: None)("}),
    pytest.param(2, {"        optimizer.load_state_dict(": "        (lambda state: None)("},
                 marks=pytest.mark.long),
])  # fmt: skip
def test_each_part_of_the_cure_is_needed(tmp_path, whole, ranks, changes):
    """Resumed without it, the weights are others. (An uninterrupted run is the same or not.)"""
    again = killed(tmp_path, ranks, changes)
    reference = whole[ranks][1]
    if "manual_seed" in str(changes):  # the variant draws other masks from the start
        trained(tmp_path / "whole", 7, 3, *SMALL, changes=changes, world_size=ranks)
        reference = load(tmp_path / "whole")
    off = difference(load(tmp_path / "killed"), reference)
    assert off > 0
    if "scheduler" in str(changes):
        assert [rate for _, rate, _ in reports(again).values()] == [
            1e-3, 2e-3, 3e-3, 4e-3, 2e-3, 3e-3, 4e-3]  # fmt: skip


def test_the_learning_rate_warms_up_and_falls(whole):
    rates = [rate for _, rate, _ in reports(whole[2][0]).values()]
    assert rates == [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3]
    factor = runpy.run_path(str(ROOT / SCRIPT))["warm_up_and_cosine"]
    assert [round(factor(done, 60), 3) for done in (0, 9, 10, 35, 60)] == [0.1, 1, 1, 0.55, 0.1]
    assert factor(10, 10) == 1 and factor(3, 3) == 0.4  # called once more after the last step


@pytest.mark.long
def test_bf16_and_no_accumulation_resume_alike(tmp_path):
    arguments = (4, 2, *SMALL, "--bf16", "--accumulate", 1)
    result = trained(tmp_path / "whole", *arguments)
    again = trained(tmp_path / "killed", *arguments, "--crash-step", 4, max_restarts=1)
    assert difference(load(tmp_path / "whole"), load(tmp_path / "killed")) == 0
    assert again.attempts == 2 and digest(again) == digest(result)
    exact = trained(tmp_path / "exact", 4, 2, *SMALL, "--accumulate", 1)
    assert digest(exact) != digest(result)


def test_a_finished_run_trains_nothing_again(tmp_path):
    first = trained(tmp_path, 2, 2, *SMALL)
    before = (tmp_path / "snapshot.pt").read_bytes()
    again = trained(tmp_path, 1, 1, *SMALL)
    assert "nothing left to train: ask for more steps, or delete the snapshot" in again.lines(0)
    assert digest(again) == digest(first)
    assert (tmp_path / "snapshot.pt").read_bytes() == before and files(tmp_path) == ["snapshot.pt"]


def test_a_kill_during_a_validation_loses_nothing(tmp_path, whole):
    begin = "    model.eval()\n    total"
    kill = ("    if dist.get_rank() == 0 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
            f"        os.kill(os.getpid(), signal.SIGKILL)\n{begin}")
    again = trained(tmp_path / "killed", 7, 3, *SMALL, changes={begin: kill}, max_restarts=1)
    assert "attempt 1: resumed from snapshot.pt after step 3" in again.lines(0)
    assert digest(again) == digest(whole[2][0])


def inf_on_rank_1(steps):
    """Changes that multiply rank 1's loss by inf in these steps, which it knows by their seeds."""
    factor = f"(math.inf if torch.initial_seed() in {[2 * step + 1 for step in steps]} else 2)"
    return EVERY_STEP | {"(loss * weight * dist.get_world_size())": f"(loss * weight * {factor})"}


def test_inf_or_nan_spoils_neither_weights_nor_snapshot(tmp_path):
    """All ranks skip such a step, also when they repeat it after a kill. Five steps end the run."""
    once = inf_on_rank_1([4])
    skipped = killed(tmp_path, 2, once)
    whole = trained(tmp_path / "whole", 7, 3, *SMALL, changes=once)
    assert skipped.attempts == 2 and digest(skipped) == digest(whole)
    norms = {step: norm for step, (_, _, norm) in reports(whole).items()}
    assert [step for step in norms if not math.isfinite(norms[step])] == [4]
    assert validations(whole)[7] < validations(whole)[3]

    nan = f"{SHARED}        if step == 6:\n            model.module.head[1].bias.data *= math.nan\n"
    spoiled = "inf or nan in the weights or buffers after step"
    for changes, error in [
        (inf_on_rank_1(range(2, 9)), "inf or nan in the gradient of 5 steps, up to step 6"),
        ({SHARED: nan}, f"{spoiled} 8"),
        ({SHARED: nan + "            os.kill(os.getpid(), signal.SIGTERM)\n"}, f"{spoiled} 6"),
    ]:
        result = train(tmp_path / "bad", 9, 4, *SMALL, changes=changes)
        assert result.status == 1 and f"RuntimeError: {error}" in result.output
        snapshot = load(tmp_path / "bad")
        assert snapshot["step"] == 4 and all(t.isfinite().all() for t in tensors(snapshot))
        (tmp_path / "bad/snapshot.pt").unlink()


def test_an_inf_in_the_forward_pass_spoils_no_buffer(tmp_path):
    """On rank 0, whose buffers all get. A running mean stands for BatchNorm's."""
    embed = "        x = self.characters(text) + self.positions(positions)\n"
    changes = {
        "        self.dropout = nn.Dropout(dropout)\n        self.blocks":
        "        self.register_buffer('mean', torch.zeros(WIDTH))\n"
        "        self.dropout = nn.Dropout(dropout)\n        self.blocks",
        embed: embed + "        if self.training:\n"
        "            x = x * (math.inf if torch.initial_seed() == 8 else 1)  # rank 0 in step 4\n"
        "            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)\n"
        "        x = x - self.mean.clone()\n",
    }  # fmt: skip
    result = trained(tmp_path, 7, 7, *SMALL, changes=EVERY_STEP | changes)
    assert [s for s, (_, _, norm) in reports(result).items() if not math.isfinite(norm)] == [4]
    assert load(tmp_path)["model"]["mean"].isfinite().all() and validations(result)[7] < 5


# ---- Asked to leave ----


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
    """Called in a child: the last rank gets SIGTERM in step 5 of the first attempt."""
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("2", "0"):
        steps = itertools.count(1)

        def ask(*_):
            step = next(steps)
            if step == 2:
                start_and_end_a_process()
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        register_optimizer_step_pre_hook(ask)


def test_sigterm_of_one_rank_loses_nothing(tmp_path, whole):
    result, snapshot = whole[3]
    again = trained(tmp_path / "asked", 7, 3, *SMALL, changes=EVERY_STEP, world_size=3,
                    max_restarts=1, before=sigterm_in_step_5)  # fmt: skip
    for rank, who in enumerate(["another rank was", "another rank was", "this rank was"]):
        assert f"{who} asked to leave (SIGTERM): end after step 5" in again.lines(rank)
    assert "attempt 1: resumed from snapshot.pt after step 5" in again.lines(0)
    assert len(re.findall(r"\| rate ", again.output)) == 7 and reports(again) == reports(result)
    assert difference(load(tmp_path / "asked"), snapshot) == 0


# The windows come from a loader with two workers.
WITH_WORKERS = EVERY_STEP | {
    "    skipped, clock": "    shares = [draw(s, args.batch_size, len(windows))[rank::world_size]"
    ".tolist()\n              for s in range(steps_done + 1, args.total_steps + 1)]\n"
    "    batches = iter(torch.utils.data.DataLoader(windows, batch_sampler=shares, num_workers=2,"
    " worker_init_fn=ignore_sigterm))\n    skipped, clock",
    "share = draw(step, args.batch_size, len(windows))[rank::world_size]": "share = next(batches)",
    SHARED: "        loss = add_up_gradients(model, share, torch.arange(len(share)), args)\n",
}


@pytest.mark.long
def test_sigterm_of_torchrun_loses_nothing(tmp_path):
    """Nor do the loader's workers, which get the signal, too, end their rank."""
    script = variant(tmp_path, SCRIPT, WITH_WORKERS)
    command = (*TORCHRUN, "--standalone", "--nproc-per-node=2", script, 150, 150, *SMALL)
    job = start(*command, cwd=tmp_path)
    try:
        output = read_until(job, r"step +3/")
        job.send_signal(signal.SIGTERM)
        output += job.communicate(timeout=60)[0]
        assert_nothing_left(job)
    finally:
        end(job)
    assert job.returncode != 0
    first = Result(output, job.returncode)
    steps = {re.search(r"end after step (\d+)", first.lines(rank)[-1])[1] for rank in (0, 1)}
    assert len(steps) == 1 and "killed by signal" not in output, output
    assert torch.load(tmp_path / "train_by_steps.pt", weights_only=True)["step"] == int(*steps)
    second = run(*command, cwd=tmp_path)
    whole = trained(tmp_path / "whole", 150, 150, *SMALL)
    assert len(reports(first) | reports(second)) == 150 and digest(second) == digest(whole)


@pytest.mark.long
def test_a_rank_that_waits_for_a_stopped_one_leaves(tmp_path):
    """By itself, before torchrun kills it: only the stopped one is killed."""
    script = variant(tmp_path, SCRIPT, EVERY_STEP | {
        SHARED: "        if rank == 1 and step == 3:\n            log('stopped', True)\n"
                "            os.kill(os.getpid(), signal.SIGSTOP)\n" + SHARED})  # fmt: skip
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, cwd=tmp_path)
    try:
        output = read_until(job, "stopped")
        pids = dict(re.findall(r"^\[rank (\d)/2\] attempt 0, pid (\d+)", output, re.MULTILINE))
        wait_until_blocked(int(pids["0"]))
        job.send_signal(signal.SIGTERM)
        output += job.communicate(timeout=90)[0]
        assert_nothing_left(job)
    finally:
        end(job)
    killed = re.findall(r"Unable to shutdown process (\d+)", output)
    assert killed == [pids["1"]], output


def wait_until_blocked(pid):
    """Return when a process uses less than a twentieth of a core. (Its threads look around.)"""
    before, second = math.inf, os.sysconf("SC_CLK_TCK")
    for _ in range(60):
        times = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
        used = sum(map(int, times)) / second
        if 0 <= used - before < 0.1:
            return
        before = used
        time.sleep(2)
    raise AssertionError(f"process {pid} goes on")


# ---- What the ranks share ----


def draws(result):
    """{step: the windows that the ranks drew, in rank order}, from the lines that DRAWN adds."""
    found = re.findall(r"^drawn (\d+) (\d+) (\[.*\])$", result.output, re.MULTILINE)
    shares = {(int(step), int(rank)): json.loads(items) for step, rank, items in found}
    assert len(shares) == len(found)
    return {step: [items for (s, _), items in sorted(shares.items()) if s == step]
            for step, _ in shares}  # fmt: skip


def together(draws):
    """{step: the windows of all ranks}"""
    return {step: sorted(i for share in shares for i in share) for step, shares in draws.items()}


# Only 50 windows, so that an epoch has 4 steps of 12, and a line for each draw.
DRAWN = {
    SHARED: '        print(f"drawn {step} {rank} {share.tolist()}\\n", end="", flush=True)\n'
            + SHARED,
    "    return windows[:-VALIDATION], ": "    return windows[:50], ",
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "others"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.long)])
def test_another_number_of_ranks_sees_each_window_once(tmp_path, ranks, others):
    arguments = ("--batch-size", 12, "--dropout", 0)
    first = trained(tmp_path / "resized", 3, 3, *arguments, changes=DRAWN, world_size=ranks)
    second = trained(tmp_path / "resized", 8, 8, *arguments, changes=DRAWN, world_size=others)
    found = draws(first) | draws(second)
    assert sorted(found) == list(range(1, 9))
    assert [len(shares) for shares in found.values()] == 3 * [ranks] + 5 * [others]
    epochs = [[i for step in steps for share in found[step] for i in share]
              for steps in (range(1, 5), range(5, 9))]  # fmt: skip
    assert all(len(epoch) == len(set(epoch)) == 48 and max(epoch) < 50 for epoch in epochs)
    steps = together(found)
    assert steps[1] != steps[5], "the second epoch repeats the order of the first"
    whole = trained(tmp_path / "whole", 8, 8, *arguments, changes=DRAWN, world_size=ranks)
    assert together(draws(whole)) == steps
    off = difference(load(tmp_path / "whole"), load(tmp_path / "resized"))
    print(f"{ranks} to {others} ranks: off by {off:.1e}")
    assert 0 < off < 1e-4


def first_step(folder, *arguments, **options):
    """(loss, gradient as AdamW has seen it: ten times its first moment, norm before clipping)."""
    result = trained(folder, 1, 1, *SMALL, "--dropout", 0, *arguments, **options)
    state = load(folder)["optimizer"]["state"]
    gradient = torch.cat([10 * state[i]["exp_avg"].flatten() for i in range(len(state))])
    loss, _, norm = reports(result)[1]
    return loss, gradient, norm


def test_a_batch_that_the_ranks_cannot_divide(tmp_path):
    """3 ranks have 5, 4 and 4 windows, in micro-batches of 3, 2 or 2: the gradient of all 13."""
    loss, one, norm = first_step(tmp_path / "one", "--accumulate", 1, world_size=1)
    same_loss, three, same_norm = first_step(tmp_path / "three", "--accumulate", 2, world_size=3)
    changes = {"weight = len(indices) / args.batch_size":
               "weight = 1 / args.accumulate / dist.get_world_size()"}  # fmt: skip
    _, mean_of_means, _ = first_step(tmp_path / "means", world_size=3, changes=changes)
    assert same_loss == pytest.approx(loss, abs=1e-3) and same_norm == pytest.approx(norm, abs=0.02)
    off, wrong = ((other - one).norm() / one.norm() for other in (three, mean_of_means))
    print(f"off by {off:.1e}, mean of means {wrong:.1e}")
    assert off < 1e-5 and wrong > 1e-3


def test_the_gradient_of_the_whole_batch_is_clipped(tmp_path):
    changes = {"WARM_UP_STEPS, CLIP = 1e-2, 10, 1.0": "WARM_UP_STEPS, CLIP = 1e-2, 10, 0.125"}
    _, gradient, norm = first_step(tmp_path / "run", changes=changes)
    assert norm > 0.5 and gradient.norm().item() == pytest.approx(0.125, abs=1e-5)


@pytest.mark.parametrize(("changes", "exchanges"), [
    ({}, 3), ({"with model.no_sync() if i < len(micro_batches) - 1 else": "with"}, 7)])
def test_one_exchange_a_step(tmp_path, changes, exchanges):
    """And one of settle_reduction_order; without no_sync, one for each of 3 micro-batches."""
    hook = ("    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
            "    def hook(state, bucket):\n"
            "        rank or print('exchanged', flush=True)\n"
            "        return default_hooks.allreduce_hook(state, bucket)\n"
            "    model.register_comm_hook(None, hook)\n")  # fmt: skip
    if changes:
        changes = {"with model.no_sync() if i < len(micro_batches) - 1 else contextlib":
                   "with contextlib"}  # fmt: skip
    arguments = (2, 2, *SMALL, "--accumulate", 3)
    result = trained(tmp_path / "run", *arguments, changes={SETTLE: hook + SETTLE, **changes})
    assert result.output.count("exchanged\n") == exchanges


def print_masks():
    """Called in a child: every dropout prints a checksum of what it has kept."""
    forward = torch.nn.Dropout.forward

    def forward_and_print(module, x):
        if not module.training:
            return forward(module, x)
        kept = forward(module, torch.ones_like(x))
        print(f"mask {os.environ['RANK']} {hash(kept.numpy().tobytes())}\n", end="", flush=True)
        return x * kept

    torch.nn.Dropout.forward = forward_and_print


def masks(folder, changes=None):
    """[the masks of rank 0, those of rank 1], in order, of 4 steps; 5 a micro-batch."""
    result = trained(folder, 4, 4, "--batch-size", 4, before=print_masks, changes=changes)
    found = re.findall(r"^mask (\d) (-?\d+)$", result.output, re.MULTILINE)
    found = [[mask for r, mask in found if int(r) == rank] for rank in (0, 1)]
    assert [len(of_a_rank) for of_a_rank in found] == [4 * 2 * 5] * 2
    return found


def test_every_step_and_rank_has_its_own_masks(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    own = masks(tmp_path / "own")
    assert len({*own[0], *own[1]}) == 80
    wrong = masks(tmp_path / "sum", {SEEDED: SEEDED.replace("step * world_size", "step")})
    assert wrong[0][10:] == wrong[1][:-10], "rank 1 has the masks that rank 0 has a step later"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_validation_loss_counts_every_window_once(tmp_path, ranks):
    """Against one process that sees all 100 windows at once; three ranks cannot share them."""
    reported = validations(trained(tmp_path, 1, 1, *SMALL, world_size=ranks))[1]
    names = runpy.run_path(str(ROOT / SCRIPT))
    model = names["GPT"](dropout=0.1).eval()
    model.load_state_dict(load(tmp_path)["model"])
    _, windows = names["load_text"]()
    assert len(windows) == 100
    with torch.inference_mode():
        loss = names["mean_loss"](model, windows, argparse.Namespace(bf16=False)).item()
    assert reported == pytest.approx(loss, abs=1e-4) and 4 < loss < 6


def test_all_of_the_text_is_in_the_windows():
    names = runpy.run_path(str(ROOT / SCRIPT))
    windows = torch.cat(names["load_text"]())
    assert windows.shape[1] == 33 and len(windows) > 5000 and windows.max() < 128
    assert torch.equal(windows[1:, 0], windows[:-1, -1])  # each begins where the last one ends
    assert "comparison" in bytes(windows[:, :-1].flatten().tolist()).decode("ascii")


# ---- Snapshots and calls that cannot work ----


@pytest.fixture(scope="module")
def good_snapshot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    trained(folder, 1, 1, *SMALL, world_size=1)
    return folder / "snapshot.pt"


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


REFUSED = {function: message for function, message in BAD_SNAPSHOTS.items()
           if function.__name__ not in ("flipped_byte", "other_model", "empty")}  # fmt: skip
REFUSED |= {
    flipped_byte: "wrong checksum",
    without_scheduler: "KeyError: 'scheduler'",
    of_another_script: "Error(s) in loading state_dict for GPT",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda function: function.__name__)
def test_a_snapshot_that_cannot_be_continued_is_refused(tmp_path, good_snapshot, spoil):
    path = tmp_path / "snapshot.pt"
    shutil.copy(good_snapshot, path)
    spoil(path, path.read_bytes())
    before = path.read_bytes()
    result = train(tmp_path, 2, 1, *SMALL, world_size=1)
    assert result.status == 1, result.output
    assert "snapshot.pt" in result.error() and REFUSED[spoil] in result.error()
    assert "move it away" in result.error() and "Traceback" not in result.output
    assert path.read_bytes() == before
    assert files(tmp_path) == ["snapshot.pt"], "code in the pickle was executed"


BATCH = "--batch-size must be from 4 (a window for each of 2 ranks in each of 2 micro-batches) to"
BAD_CALLS = {
    "batch too small": (["--batch-size", 3], BATCH, 2),
    "batch too large": (["--batch-size", 10**6], BATCH, 2),
    "smaller than the ranks": (["--batch-size", 1, "--accumulate", 1], "must be from 2 (", 2),
    "nothing to accumulate": (["--accumulate", 0], "--accumulate must be 1 or more", 2),
    "negative steps": ([-3], "TOTAL_STEPS", 2),
    "save every 0": ([3, 0], "SAVE_EVERY", 2),
    "all dropped": (["--dropout", 1], "--dropout must be 0 or more, and less than 1", 2),
    "dropout nan": (["--dropout", "nan"], "--dropout must be 0 or more, and less than 1", 2),
    "folder missing": (["--snapshot-path", "no/such.pt"], "cannot write no/such.pt", 2),
    "another batch size": (["--batch-size", 12], "snapshot.pt needs --batch-size 13, as before", 1),
    "a directory": (["--snapshot-path", "."], "cannot continue from . (IsADirectoryError", 1),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_end_in_one_line(tmp_path, good_snapshot, name):
    arguments, message, status = BAD_CALLS[name]
    left = ["snapshot.pt"] if "snapshot.pt" in message else []
    for file in left:
        shutil.copy(good_snapshot, tmp_path / file)
    result = train(tmp_path, *arguments)
    assert result.status == status, result.output
    assert message in result.error() and "Traceback" not in result.output
    assert files(tmp_path) == left


@pytest.mark.long
def test_a_full_disk_keeps_the_last_snapshot(tmp_path, good_snapshot):
    path = tmp_path / "snapshot.pt"
    shutil.copy(good_snapshot, path)
    result = train(tmp_path, 2, 1, *SMALL, world_size=1, before=limit_file_size)
    assert result.status == 1
    assert "cannot write snapshot.pt, which stays as it was" in result.error()
    assert path.read_bytes() == good_snapshot.read_bytes() and files(tmp_path) == ["snapshot.pt"]


# ---- A real launch ----


@pytest.mark.long
def test_the_commands_of_the_docstring_end_with_the_same_weights(tmp_path):
    crash = "--max-restarts=3 \\\n        recipes/train_by_steps.py 60 20 --crash-step 30"
    assert crash in (ROOT / SCRIPT).read_text().partition('"""\n\nimport')[0]
    torchrun, checksums = (*TORCHRUN, "--standalone", "--nproc-per-node=2"), []
    for number, words in enumerate([
        (*torchrun, ROOT / SCRIPT),
        (*torchrun, "--max-restarts=3", ROOT / SCRIPT, 60, 20, "--crash-step", 30),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        result = run(*words, cwd=folder)
        assert result.status == 0 and files(folder) == ["train_by_steps.pt"], result.output
        checksums.append(digest(result))
    assert "attempt 1: resumed from train_by_steps.pt after step 20" in result.lines(0)
    assert checksums[0] == checksums[1]
    assert validations(result)[60] < 2.9
