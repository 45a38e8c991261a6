"""recipes/checkpoint_any_world_size.py: its figures, that it can fail, jobs killed at random."""

import contextlib
import hashlib
import random
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support import (
    ROOT,
    assert_fails,
    fork_ranks,
    forkserver,
    numbers,
    run_script,
    variant,
    wait_until,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

RECIPE = "recipes/checkpoint_any_world_size.py"


def digests(result):
    """[(step, "saved" or "loaded", ranks, sha256)], in order."""
    return numbers(r"step (\d+), (\w+) by (\d) ranks?: +sha256 (\w{12})", result)


def new_rows(result):
    """{way: (rows of the save that was cut off, rows)}"""
    found = numbers(r"save of step \d+ cut off, (.+): (\d+) of (\d+) loaded rows are new", result)
    return {way: (int(new), int(rows)) for way, new, rows in found}


@pytest.mark.long
def test_checkpoint_any_world_size(tmp_path):
    """One folder, by 2 ranks, then 3, then 2: each loads what the one before has saved."""
    before = []
    only_rank_0 = variant(tmp_path, RECIPE, {  # the others learn from it what the pointer says
        "def read_pointer(root):\n": "def read_pointer(root):\n    assert dist.get_rank() == 0\n"})
    for ranks, start in ((2, 0), (3, 10), (2, 20)):
        result = fork_ranks(only_rank_0, "--folder", "saves", cwd=tmp_path, world_size=ranks)
        assert result.status == 0, result.output
        end = str(start + 10)
        *loaded, saved, by_one = digests(result)
        assert loaded == before and saved[:3] == (end, "saved", str(ranks))
        assert by_one == (end, "loaded", "1", saved[3])
        later = 3 if ranks == 2 else 2
        before = [(end, "loaded", str(later), saved[3])]
        [off] = numbers(r"after 10 more, .* stopped: (\S+) on 1 rank, (\S+) on \d ranks", result)
        assert max(map(float, off)) < 1e-4
        assert numbers(r"in one file, .*: weights differ by (\S+)", result) == [("0.0e+00",)]
        shards = {2: 512, 3: 682}[ranks]  # of 3 ranks: 342, 342 and 340 rows
        assert new_rows(result) == {"new folders": (0, 1024), "same folder": (shards, 1024)}
        step, digest = loaded_from(tmp_path / "saves", tmp_path)
        assert (step, digest) == (int(end), saved[3])
    # After the second "_" the name is random, and may have more of them.
    kept = sorted(path.name.split("_")[1] for path in (tmp_path / "saves").glob("step_*"))
    assert kept == ["20", "30"]


@pytest.mark.parametrize(("message", "old", "new"), [
    ("one rank did not load", "dcp.load(state, checkpoint_id=folder, process_group=group)",
     'dcp.load({"model": state["model"]}, checkpoint_id=folder, process_group=group)'),
    pytest.param("with new folders and a pointer, a save that was cut off is loaded",
                 'path = [tempfile.mkdtemp(prefix=f"step_{step}_", dir=root)]',
                 'path = [os.path.join(root, "step_x")]', marks=pytest.mark.long),
    pytest.param("the mistake does not show", "    cut_off(save_in_place, ",
                 "    cut_off(save_shards, ", marks=pytest.mark.long),
    pytest.param("nothing was cut off", "if dist.get_rank() == 1:", "if dist.get_rank() > 9:",
                 marks=pytest.mark.long),
    pytest.param("async_save() did not save the weights",
                 "        saved = time.perf_counter()\n",
                 "        saved = time.perf_counter()\n"
                 "        train(model, optimizer, step, step + 1)\n",
                 marks=pytest.mark.long),
    pytest.param("training goes on in another way", "torch.manual_seed(step)",
                 "torch.manual_seed(step * world_size)", marks=pytest.mark.long),
    pytest.param("the one file does not hold",
                 '        single.load_state_dict(torch.load(path)["model"])\n', "",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_checkpoint_any_world_size_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, RECIPE, {old: new}, message)


# ---- Jobs that are killed ----

# A job that goes on from what there is, and saves every step. It says what it is about to save.
JOB = """
import os, runpy, signal, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp

recipe = runpy.run_path(sys.argv[1])
root, way, kill_at = sys.argv[2:]
dist.init_process_group("gloo")
model, optimizer = recipe["new_sharded"](torch.device("cpu"))
folder, step = recipe["newest"](root), 0
log, checksum = recipe["log"], recipe["checksum"]
if folder:
    step = recipe["load_folder"](model, optimizer, folder)
    log(f"loaded {step} {checksum(model, optimizer)}")
group = dist.new_group(backend="gloo")
finish = None
write_data = dcp.FileSystemWriter.write_data

def write_or_die(*args):
    if dist.get_rank() == 1 and step == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
    return write_data(*args)

dcp.FileSystemWriter.write_data = write_or_die
while True:
    recipe["train"](model, optimizer, step, step + 1, dist.get_rank(), dist.get_world_size())
    step += 1
    digest = checksum(model, optimizer)
    if way == "save_shards_async" and finish:
        finish()
        log(f"saved {step - 1}")
    log(f"saving {step} {digest}")
    if way == "save_shards_async":
        finish = recipe[way](model, optimizer, step, root, group)
    else:
        recipe[way](model, optimizer, step, root)
        log(f"saved {step}")
"""


@contextlib.contextmanager
def job(folder, way, world_size, kill_at=-1):
    """Start it; yields its processes and a function that returns what it has said so far.

    kill_at: the step of the save in which rank 1 kills itself before it writes.
    """
    script, output = folder / "job.py", folder / "output"
    script.write_text(JOB)
    output.write_text("")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        forkserver.Process(
            target=run_script,
            args=(script, [ROOT / RECIPE, folder / "saves", way, kill_at], {
                "RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }, str(folder), str(output)),
        )
        for rank in range(world_size)
    ]  # fmt: skip
    for process in processes:
        process.start()

    def said(word):
        """{step: sha256 or ""}, of the lines with this word."""
        pattern = rf"^\[rank 0/\d\] {word} (\d+) ?(\w*)$"
        found = re.findall(pattern, output.read_text(), re.MULTILINE)
        return {int(step): digest for step, digest in found}

    try:
        yield processes, said
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def loaded_from(root, scratch):
    """(step, sha256) of what the pointer names, or None: read by this process, without ranks."""
    pointer = root / "latest"
    return opened(root / pointer.read_text(), scratch) if pointer.exists() else None


def opened(folder, scratch):
    """(step, sha256) of all that is in a folder. The recipe computes the sha256 by itself."""
    dcp_to_torch_save(folder, scratch / "one_file.pt")
    state = torch.load(scratch / "one_file.pt")
    digest = hashlib.sha256()
    for name, weight in sorted(state["model"].items()):
        of_adam = state["optimizer"]["state"][name]
        assert sorted(of_adam) == ["exp_avg", "exp_avg_sq", "step"]
        for tensor in (weight, of_adam["exp_avg"], of_adam["exp_avg_sq"], of_adam["step"]):
            digest.update(tensor.numpy().tobytes())
    return state["step"], digest.hexdigest()[:12]


@pytest.mark.long
@pytest.mark.parametrize("way", ["save_shards", "save_shards_async"])
def test_jobs_killed_at_random(tmp_path, way):
    """After each kill, the pointer names one whole step, and at most the last save is lost."""
    root, before, in_the_middle = tmp_path / "saves", None, 0
    for number in range(20):
        moments = random.Random(number)
        with job(tmp_path, way, world_size=2 + number % 2) as (processes, said):
            wait_until(lambda: said("saving") or not all(p.is_alive() for p in processes),
                       (tmp_path / "output").read_text)  # fmt: skip
            time.sleep(moments.uniform(0, 0.5))  # the moment of the kill is by chance: that is it
            assert all(p.is_alive() for p in processes), (tmp_path / "output").read_text()
            for process in moments.sample(processes, len(processes)):
                process.kill()
        assert said("loaded") == (dict([before]) if before else {}), number
        after = loaded_from(root, tmp_path)
        saving, saved = said("saving"), said("saved")
        assert after in [before, *saving.items()], (number, after, before, saving)
        reached = max([*saved, before[0] if before else 0])
        assert (after[0] if after else 0) >= reached, "a save that had ended is lost"
        in_the_middle += any(not (path / ".metadata").exists() for path in root.glob("step_*"))
        before = after
    assert in_the_middle > 0, "no kill has hit a save"


@pytest.mark.long
def test_a_kill_mixes_what_is_saved_in_place(tmp_path):
    """Rank 1 is killed before it writes: what the recipe's cut_off() stands in for."""
    ended = {}
    for way, kill_at in (("save_shards", 4), ("save_in_place", 3)):
        folder = tmp_path / way
        folder.mkdir()
        with job(folder, way, world_size=2, kill_at=kill_at) as (processes, said):
            for process in processes:  # rank 0 misses the other one, and fails
                process.join(90)
            assert [p.exitcode for p in processes] == [1, -signal.SIGKILL]
            assert max(said("saving")) == kill_at and max(said("saved")) == kill_at - 1
        ended[way] = said("saving")
    right, wrong = tmp_path / "save_shards/saves", tmp_path / "save_in_place/saves"
    assert loaded_from(right, tmp_path) == (3, ended["save_shards"][3])
    mixed = opened(wrong, tmp_path)  # without an error
    assert mixed[1] not in ended["save_in_place"].values()
    # Both jobs take the same steps; the first one has kept the folders of the steps 2 and 3.
    first = {}
    for name, path in (("2", *right.glob("step_2_*")), ("3", *right.glob("step_3_*")), ("", wrong)):
        opened(path, tmp_path)
        first[name] = torch.load(tmp_path / "one_file.pt")["model"]["0.weight"]
    assert torch.equal(first[""], torch.cat([first["3"][:512], first["2"][512:]]))
