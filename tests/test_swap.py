"""Whoever puts his own data, model and loss in the place of ours keeps the promises of the script.

The data: a Dataset of single items, augmented at random in the loader's workers. The model: with
BatchNorm, Dropout, and weights that it moves itself. The promises: the same global batch on any
number of ranks; an evaluation that counts each item once; other random numbers in each epoch and
step, and on each rank; after a SIGKILL of a rank or of a loader's worker, the same bits as without.
"""

import itertools
import json
import re

import pytest
import torch
from digits import load, tensors
from forked import fork_ranks, fork_workers, variant
from mistakes.swapped import IN_A_LESSON, IN_THE_TEMPLATE, MINE
from started import ROOT

ONE, LESSONS = "01_single_node_multi_gpu.py", ("02_torchrun_elastic.py", "03_multinode.py")
TEMPLATE = "template/train.py"
TRAIN, TEST, BATCH, STEPS = 41, 7, 12, 3  # neither set can be shared equally


def swapped(folder, script):
    """Write the script with all of that in it; the lessons' loader is that of their comment."""
    if script == TEMPLATE:
        return variant(folder, script, MINE + IN_THE_TEMPLATE)
    text = (ROOT / script).read_text()
    assert {"data", "model", "loss"} <= {*re.findall("# your (data|model|loss)", text)}, "no mark"
    loader = re.search(r"def fast_loader.*\n.*\n +# Or, item by item: (.*)\n +# (.*)\n", text)
    more = f"    {loader[1]}\n        {loader[2]}\nSETTLES = {script != ONE}\n"
    if script == ONE:  # whose comment asks for that
        more += "def compare_gradients(*_):\n    pass\n"
    return variant(folder, script, MINE + IN_A_LESSON + more)


def play(folder, script, world_size, plan=()):
    """Run the script, again after each kill of the plan; return (folder, output)."""
    folder.mkdir()
    path, output = swapped(folder, script), ""
    arguments = (2 * STEPS, 2) if script == TEMPLATE else (2, 1)  # two epochs
    (folder / "plan").write_text("\n".join(plan))
    for starts in range(1 + len(plan)):
        assert (folder / "plan").read_text() == "\n".join(plan[starts:]), output
        options = "--batch-size", BATCH, "--snapshot-path", "snapshot.pt"
        result = fork_ranks(path, *arguments, *options, cwd=folder, world_size=world_size)
        output += result.output
        assert (result.status == 0) == (starts == len(plan)), output
    return folder, output


def noted(folder, name):
    """What the model has noted in one of its files, without the pass that settles DDP's order."""
    seen = map(json.loads, (folder / name).read_text().splitlines())
    return [
        each
        for each in seen
        if not (name == "trained" and each["items"] == [0, 4] or each.get("settles"))
    ]


def steps_of(folder, passes=1):
    """The (item, augmentation) pairs of each step, of all ranks and passes together, in order."""
    ranks = {}
    for seen in noted(folder, "trained"):
        pairs = zip(seen["items"], map(tuple, seen["augmented"]), strict=True)
        ranks.setdefault(seen["rank"], []).append(pairs)
    parts = [itertools.chain(*part) for part in zip(*ranks.values(), strict=True)]
    return [sorted(itertools.chain(*parts[i : i + passes])) for i in range(0, len(parts), passes)]


def assert_counted_once_and_drawn_anew(folder, evaluations):
    """Each test item once; no random number twice: in two steps or epochs, or on two ranks."""
    tested = itertools.chain(*(seen["items"] for seen in noted(folder, "evaluated")))
    assert sorted(tested) == sorted(evaluations * [*range(TEST)])
    trained = noted(folder, "trained")
    drawn = [
        [seen["drawn"] for seen in trained],
        [numbers for seen in trained for numbers in seen["augmented"]],
    ]
    for numbers in itertools.chain(*(zip(*rows, strict=True) for rows in drawn)):
        assert len({*numbers}) == len(numbers)


def assert_same_end(whole, killed):
    """Of two pairs (folder, output): all that is in their files, and all validations."""
    names = [path.name for path in whole[0].glob("snapshot*.pt")]
    assert "snapshot.pt" in names
    for name in names:
        mine, its = (torch.load(folder / name, weights_only=True) for folder, _ in (whole, killed))
        pairs = [*zip(tensors(mine), tensors(its), strict=True)]
        assert len(pairs) >= 9, name
        assert all(torch.equal(*pair) for pair in pairs), f"other bits in {name}"
        assert mine.get("best") == its.get("best"), "another best"


def test_01(tmp_path):
    """The same images in each step, on one rank and on two."""
    args = {
        "total_epochs": 2,
        "save_every": 1,
        "batch_size": BATCH,
        "data_dir": "data",
        "checkpoint_path": "checkpoint.pt",
    }
    batches = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        fork_workers(swapped(folder, ONE), cwd=folder, world_size=world_size, **args).ok()
        assert_counted_once_and_drawn_anew(folder, 2)
        batches.append([[item for item, _ in step] for step in steps_of(folder)])
    assert len(batches[0]) == 2 * STEPS and batches[0] == batches[1]


@pytest.mark.parametrize(
    ("script", "world_size", "plan"),
    [
        pytest.param(LESSONS[0], 3, ["step 7 of rank 1"], marks=pytest.mark.long),
        pytest.param(
            LESSONS[0], 2, ["step 6 of rank 0", "worker 3 of rank 1"], marks=pytest.mark.long
        ),
        (LESSONS[1], 2, ["worker 4 of rank 0"]),
        pytest.param(LESSONS[1], 4, ["step 5 of rank 3"], marks=pytest.mark.long),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_the_other(tmp_path, script, world_size, plan):
    whole = folder, _ = play(tmp_path / "whole", script, world_size)
    assert_counted_once_and_drawn_anew(folder, 2)
    items = [[item for item, _ in step] for step in steps_of(folder)]
    assert len(items) == 2 * STEPS and items[:STEPS] != items[STEPS:]
    assert_same_end(whole, play(tmp_path / "killed", script, world_size, plan))


@pytest.mark.parametrize(
    ("world_size", "plan"),
    [
        (2, ["validation 2 of rank 1"]),
        pytest.param(3, ["worker 9 of rank 1", "step 4 of rank 2"], marks=pytest.mark.long),
    ],
)
def test_the_template(tmp_path, world_size, plan):
    """As on one rank: the items of each step, and the augmentation of each. Kills change no bit."""
    whole = folder, output = play(tmp_path / "whole", TEMPLATE, world_size)
    assert_counted_once_and_drawn_anew(folder, 3)
    steps = steps_of(folder, passes=2)
    assert steps == steps_of(play(tmp_path / "alone", TEMPLATE, 1)[0], passes=2)
    for epoch in steps[:STEPS], steps[STEPS:]:
        assert len({item for step in epoch for item, _ in step}) == STEPS * BATCH, "items twice"
    shares = {*re.findall(r"^mixed \d ([1-9]\d*) (\S+)", output, re.MULTILINE)}
    assert len(shares) == load(folder)["step"] == len(dict(shares)), "the mixup differs by rank"
    killed = play(tmp_path / "killed", TEMPLATE, world_size, plan)
    assert_same_end(whole, killed)
    assert (killed[0] / "snapshot.csv").read_text() == (folder / "snapshot.csv").read_text()
