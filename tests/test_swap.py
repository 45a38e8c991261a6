"""Whoever puts his own data, model and loss in at the marks gets a script that keeps its promises.

The data: a Dataset of single items, augmented at random in the loader's workers. The model: with
BatchNorm and Dropout. The promises: the same global batch on any number of ranks; an evaluation
that counts each item once; other random numbers in each epoch and step, and on each rank; after a
SIGKILL of a rank or of a loader's worker, the same bits as without.
"""

import itertools
import json
import re

import pytest
import torch
from support import ROOT, fork_ranks, fork_workers, load, tensors, variant

TRAIN, TEST, BATCH, STEPS = 41, 7, 12, 3  # neither set can be shared equally

# What the reader brings. Pixel (0, 0) of an image holds its index, the three beside it what the
# augmentation drew. The model notes what it sees. strike kills the process where the plan says so.
MINE = '''
SEED = 0
import json, pathlib

class MyImages(torch.utils.data.Dataset):
    def __init__(self, count, augment):
        self.images = torch.rand(count, 8, 8, generator=torch.Generator().manual_seed(count))
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].clone()
        if self.augment:
            if torch.utils.data.get_worker_info():
                strike("worker")
            drawn = [torch.rand(()).item(), random.random(), numpy.random.rand()]
            image *= sum(drawn)
            image[0, 1:4] = torch.tensor(drawn)
        image[0, 0] = index
        return image, index % 3

class MyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(144, 3))

    def forward(self, images):
        seen = {"rank": dist.get_rank(), "items": images[:, 0, 0].tolist(),
                "augmented": images[:, 0, 1:4].tolist()}
        if self.training:
            strike("step")
            seen["drawn"] = torch.rand(()).item(), random.random(), numpy.random.rand()
        with open("trained" if self.training else "evaluated" if torch.is_inference_mode_enabled()
                  else "checked", "a") as file:
            file.write(json.dumps(seen) + "\\n")
        images = images.unsqueeze(1).clone()
        images[:, :, 0, :4] = sum(seen.get("drawn", [0]))
        return self.layers(images)

def strike(place, count={}):
    count[place] = count.get(place, 0) + 1
    plan = pathlib.Path("plan")
    first, *rest = plan.read_text().split("\\n") if plan.exists() else [""]
    if first == f"{place} {count[place]} of rank {os.environ.get('RANK')}":
        plan.write_text("\\n".join(rest))
        os.kill(os.getpid(), 9)
'''
SWAP = {
    "\nSEED = 0\n": MINE,
    "train_set, test_set, source = load_data(args.data_dir)":
        "train_set, test_set, source = MyImages(41, True), MyImages(7, False), 'images of mine'",
    "model = Net().to(device)": "model = MyNet().to(device)",
    "cross_entropy(model(images), labels)":
        "cross_entropy(model(images), labels, label_smoothing=0.1)",
}
MARKED = [*SWAP][1:]


def swapped(folder, script, changes=()):
    """The script with all of that in it, and a dictionary of changes more, in a folder."""
    path = variant(folder, script, SWAP | dict(changes))
    for line in (ROOT / script).read_text().splitlines():
        for old in MARKED:
            if old in line:
                assert re.search("# your (data|model|loss)", line), f"no mark: {line}"
    return path


def noted(folder, name):
    """What the model has noted in one of its files, by rank."""
    ranks = {}
    for line in (folder / name).read_text().splitlines():
        seen = json.loads(line)
        ranks.setdefault(seen["rank"], []).append(seen)
    return ranks


def global_batches(folder):
    """The items of each training step, of all ranks together."""
    ranks = noted(folder, "trained").values()
    return [sorted(item for seen in step for item in seen["items"])
            for step in zip(*ranks, strict=True)]


def assert_each_counted_once(folder, epochs):
    seen = itertools.chain(*noted(folder, "evaluated").values())
    items = sorted(item for each in seen for item in each["items"])
    assert items == sorted(epochs * [*range(TEST)])


def assert_no_number_twice(folder):
    """Neither augmentation nor model: not in two steps, two epochs or on two ranks."""
    seen = [*itertools.chain(*noted(folder, "trained").values())]
    for source in range(3):
        drawn = [each["drawn"][source] for each in seen]
        augmented = [numbers[source] for each in seen for numbers in each["augmented"]]
        assert len({*drawn}) == len(drawn) and len({*augmented}) == len(augmented), source


def train(script, folder, world_size, plan=(), epochs=2):
    """Run the script, again after each kill of the plan; return its output."""
    (folder / "plan").write_text("\n".join(plan))
    output = ""
    for starts in range(1 + len(plan)):
        assert (folder / "plan").read_text() == "\n".join(plan[starts:]), output
        result = fork_ranks(script, epochs, 1, "--batch-size", BATCH, cwd=folder,
                            world_size=world_size)
        output += result.output
        assert (result.status == 0) == (starts == len(plan)), output
    return output


def folders(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in names]


def assert_same_bits(one, other):
    (mine, its) = load(one), load(other)
    assert len(tensors(mine)) == len(tensors(its)) >= 14
    for a, b in zip(tensors(mine), tensors(its), strict=True):
        assert torch.equal(a, b)


def test_01(tmp_path):
    """With its own proofs: the gradient of the whole batch, and equal replicas."""
    args = {"total_epochs": 2, "save_every": 1, "batch_size": BATCH, "data_dir": "data",
            "checkpoint_path": "checkpoint.pt"}
    batches = []
    for world_size, folder in zip((1, 2, 3), folders(tmp_path, "1", "2", "3"), strict=True):
        result = fork_workers(swapped(folder, "01_single_node_multi_gpu.py"), cwd=folder,
                              world_size=world_size, **args)
        assert result.status == 0, result.output
        batches.append(global_batches(folder))
        assert_each_counted_once(folder, 2)
        assert_no_number_twice(folder)
    assert len(batches[0]) == 2 * STEPS and batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize(("script", "world_size", "plan"), [
    ("02_torchrun_elastic.py", 2, ["step 5 of rank 1"]),
    pytest.param("02_torchrun_elastic.py", 3, ["step 4 of rank 0", "worker 3 of rank 2"],
                 marks=pytest.mark.long),
    pytest.param("03_multinode.py", 2, ["worker 9 of rank 0", "step 2 of rank 1"],
                 marks=pytest.mark.long),
    pytest.param("03_multinode.py", 3, ["step 6 of rank 2"], marks=pytest.mark.long),
])  # fmt: skip
def test_a_killed_run_ends_with_the_bits_of_the_other(tmp_path, script, world_size, plan):
    whole, killed = folders(tmp_path, "whole", "killed")
    train(swapped(whole, script), whole, world_size)
    train(swapped(killed, script), killed, world_size, plan)
    assert_same_bits(whole, killed)
    steps = global_batches(whole)
    assert len(steps) == 2 * STEPS and steps[:STEPS] != steps[STEPS:]
    assert_each_counted_once(whole, 2)
    assert_no_number_twice(whole)
