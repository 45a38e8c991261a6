"""Whoever puts his own data, model and loss in at the marks gets a script that keeps its promises.

The data: a Dataset of single items, augmented at random in the loader's workers. The model: with
BatchNorm and Dropout. The promises: the same global batch on any number of ranks; an evaluation
that counts each item once; other random numbers in each epoch and step, and on each rank; after a
SIGKILL of a rank or of a loader's worker, the same bits as without.
"""

import functools
import itertools
import json
import re

import pytest
import torch
from support import ROOT, fork_ranks, fork_workers, load, tensors, variant

TEMPLATE = "recipes/train_by_steps.py"

TRAIN, TEST, BATCH, STEPS = 41, 7, 12, 3  # neither set can be shared equally

# What the reader brings. Pixel (0, 0) of an image holds its index, the three beside it what the
# augmentation drew. The model notes what it sees. strike kills the process where the plan says so.
MINE = '''
SEED = 0
import json, pathlib

random.seed(), numpy.random.seed()  # as in a fresh process

class MyImages(torch.utils.data.Dataset):
    def __init__(self, count, augment):
        self.images = torch.rand(count, 8, 8, generator=torch.Generator().manual_seed(count))
        self.images += 0.01 * (random.random() + numpy.random.rand())  # from the seed of the loop
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
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))  # as for attention
        self.auxiliary = nn.Linear(64, 3)  # used in training only
        self.stem = nn.BatchNorm2d(1).requires_grad_(False).eval()  # frozen

    def forward(self, images):
        seen = {"rank": dist.get_rank(), "items": images[:, 0, 0].tolist(),
                "augmented": images[:, 0, 1:4].tolist()}
        strike("step" if self.training else "validation")
        if self.training:
            seen["drawn"] = torch.rand(()).item(), random.random(), numpy.random.rand()
        with open("trained" if self.training else "checked" if torch.is_grad_enabled()
                  else "evaluated", "a") as file:
            file.write(json.dumps(seen) + "\\n")
        images = images.unsqueeze(1).clone()
        images[:, :, 0, :4] = sum(seen.get("drawn", [0]))
        helped = self.auxiliary(images.flatten(1)) if self.training else 0
        return self.layers(self.stem(images)) + helped

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
SWAP_IN_SNAPSHOT = SWAP | {  # of 02 and 03: a schedule, as their comments say
    "  # your optimizer":
        "  # your optimizer\n"
        "    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)",
    '# (Your schedule: schedule.load_state_dict(snapshot["schedule"]).)':
        'schedule.load_state_dict(snapshot["schedule"])',
    "accuracy = evaluate(": "schedule.step()\n        accuracy = evaluate(",
    '"optimizer": optimizer.state_dict(),':
        '"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),',
}
# The template's loss is pasted with what its comment gives for a mixup.
MIXED = """print(f"mixed {dist.get_rank()} {step} {share}\\n", end="")
    return (share * cross_entropy(logits, labels)
            + (1 - share) * cross_entropy(logits, labels.flip(0)))"""
SWAP_IN_TEMPLATE = {
    "\nSEED = 0\n": MINE,
    "train_set, validation_set, source = load_sets(args)":
        "train_set, validation_set, source = MyImages(41, True), MyImages(7, False), 'of mine'",
    "model = GPT().to(device)": "model = MyNet().to(device)",
    "[windows] = [part": "images, labels = [part",
    "# share = numpy": "share = numpy",
    "logits = model(windows[:, :-1])": "logits = model(images)",
    "return cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())": MIXED,
}


def swapped(folder, script, changes=()):
    """The script with all of that in it, and a dictionary of changes more, in a folder."""
    swap = {TEMPLATE: SWAP_IN_TEMPLATE, "01_single_node_multi_gpu.py": SWAP}.get(
        script, SWAP_IN_SNAPSHOT)  # fmt: skip
    path = variant(folder, script, swap | dict(changes))
    for line in (ROOT / script).read_text().splitlines():
        if any(old in line for old in SWAP | SWAP_IN_TEMPLATE if old != "# share = numpy"):
            assert re.search("# your (data|model|loss)", line), f"no mark: {line}"
    return path


def noted(folder, name):
    """What the model has noted in one of its files, by rank."""
    ranks = {}
    for line in (folder / name).read_text().splitlines():
        seen = json.loads(line)
        if seen["items"] != [0, TRAIN - 1]:  # the pass that settles the order of reduction
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


def train(script, folder, world_size, plan=(), arguments=(2, 1)):
    """Run the script, again after each kill of the plan; return its output."""
    (folder / "plan").write_text("\n".join(plan))
    output = ""
    for starts in range(1 + len(plan)):
        assert (folder / "plan").read_text() == "\n".join(plan[starts:]), output
        result = fork_ranks(script, *arguments, "--batch-size", BATCH, "--snapshot-path",
                            "snapshot.pt", cwd=folder, world_size=world_size)
        output += result.output
        assert (result.status == 0) == (starts == len(plan)), output
    return output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function: (folder, output) of an undisturbed run, the same for all tests."""
    @functools.cache
    def run(script, world_size, arguments):
        folder = tmp_path_factory.mktemp("whole")
        script = swapped(folder, script)
        return folder, train(script, folder, world_size, arguments=arguments)

    return run


def assert_same_bits(one, other, name="snapshot.pt"):
    mine, its = (torch.load(folder / name, weights_only=True) for folder in (one, other))
    pairs = [*zip(tensors(mine), tensors(its), strict=True)]
    assert len(pairs) >= 9, name
    assert all(torch.equal(a, b) for a, b in pairs), f"other bits in {name}"
    assert mine.get("schedule") == its.get("schedule")
    assert mine.get("best") == its.get("best"), "another best"


def test_01(tmp_path):
    """Where the gradient cannot be proved, as evaluation does not use a head, a line says so."""
    args = {"total_epochs": 2, "save_every": 1, "batch_size": BATCH, "data_dir": "data",
            "checkpoint_path": "checkpoint.pt"}
    batches = []
    for world_size, changes, said in (
        (1, {}, "gradients not compared"),
        (2, {"if self.training else 0": ""}, "gradient that DDP leaves"),
    ):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        script = swapped(folder, "01_single_node_multi_gpu.py", changes)
        result = fork_workers(script, cwd=folder, world_size=world_size, **args)
        assert result.status == 0 and said in result.output, result.output
        batches.append(global_batches(folder))
        assert_each_counted_once(folder, 2)
        assert_no_number_twice(folder)
    assert len(batches[0]) == 2 * STEPS and batches[0] == batches[1]


@pytest.mark.parametrize(("script", "world_size", "plan"), [
    ("02_torchrun_elastic.py", 2, ["step 6 of rank 1"]),
    pytest.param("02_torchrun_elastic.py", 3, ["step 5 of rank 0", "worker 3 of rank 2"],
                 marks=pytest.mark.long),
    pytest.param("03_multinode.py", 2, ["worker 9 of rank 0", "step 3 of rank 1"],
                 marks=pytest.mark.long),
])  # fmt: skip
def test_a_killed_run_ends_with_the_bits_of_the_other(tmp_path, whole, script, world_size, plan):
    undisturbed, _ = whole(script, world_size, (2, 1))
    train(swapped(tmp_path, script), tmp_path, world_size, plan)
    assert_same_bits(undisturbed, tmp_path)
    steps = global_batches(undisturbed)
    assert len(steps) == 2 * STEPS and steps[:STEPS] != steps[STEPS:]
    assert_each_counted_once(undisturbed, 2)
    assert_no_number_twice(undisturbed)


# ---- The template: recipes/train_by_steps.py ----

SIX_STEPS = (2 * STEPS, 2)  # two epochs; three validations, each after its snapshot
SCALE = "LEARNING_RATE, WARM_UP_STEPS, CLIP = 1e-2"
WORSE = {SCALE: SCALE.replace("1e-2", "9.0")}  # so that each validation is worse than the last


def assert_killed_alike(folder, world_size, plan, undisturbed, output, changes=()):
    """A killed run ends as the undisturbed one did. AssertionError if a promise is broken."""
    script = swapped(folder, TEMPLATE, changes)
    again = train(script, folder, world_size, plan, SIX_STEPS)
    for name in ("snapshot.pt", "snapshot_best.pt"):
        assert_same_bits(undisturbed, folder, name)
    validated = r"step +(\d+)/\d+ \| validation loss (\S+) \| (best after .*)"
    assert {*re.findall(validated, output)} == {*re.findall(validated, again)}, "other validations"


def epochs_of(folder):
    """The (item, augmentation) pairs of each epoch, of all ranks together, in order."""
    ranks = [[[*zip(seen["items"], map(tuple, seen["augmented"]), strict=True)] for seen in steps]
             for steps in noted(folder, "trained").values()]  # fmt: skip
    parts = [sorted(itertools.chain(*part)) for part in zip(*ranks, strict=True)]
    size = 2 * STEPS  # two micro-batches in a step
    return [sorted(itertools.chain(*parts[i : i + size])) for i in range(0, len(parts), size)]


def assert_whole(folder, output):
    """Each item at most once in an epoch; the shares of the mixup the same on all ranks."""
    for epoch in epochs_of(folder):
        assert len({item for item, _ in epoch}) == len(epoch) == STEPS * BATCH, "items twice"
    shares = {*re.findall(r"^mixed \d ([1-9]\d*) (\S+)", output, re.MULTILINE)}
    assert len(shares) == load(folder)["step"] == len(dict(shares)), "shares that are not alike"


@pytest.mark.parametrize(("world_size", "plan"), [
    (2, ["validation 2 of rank 1"]),
    pytest.param(3, ["step 10 of rank 2", "worker 2 of rank 1"],
                 marks=pytest.mark.long),
])  # fmt: skip
def test_the_template(tmp_path, whole, world_size, plan):
    """As on one rank: the items of an epoch, and the augmentation of each. Kills change no bit."""
    undisturbed, output = whole(TEMPLATE, world_size, SIX_STEPS)
    assert_whole(undisturbed, output)
    assert_each_counted_once(undisturbed, 3)
    assert_no_number_twice(undisturbed)
    alone, _ = whole(TEMPLATE, 1, SIX_STEPS)
    assert len(epochs_of(alone)) == 2 and epochs_of(undisturbed) == epochs_of(alone)
    assert_killed_alike(tmp_path, world_size, plan, undisturbed, output)


SHARE = "(*averaged.module.buffers(), *model.module.buffers())"
# Rows of the table at the template's head, without their cure; and what is seen then.
ROWS = {
    "shuffled data": ({"shuffled(epoch, self": "shuffled(epoch + self.rank, self"}, "items twice"),
    "mixup": ({"default_rng(SEED + step)": "default_rng(SEED + step + 9 * dist.get_rank())"},
              "shares that are not alike"),
    "BatchNorm": ({SHARE: "averaged.module.buffers()"}, "the replicas differ"),
    "EMA's buffers": ({SHARE: "model.module.buffers()"}, "the replicas differ"),
    "augmentation": ({"        seed_all(ITEM_SEEDS": "        (ITEM_SEEDS"}, "other bits"),
    "EMA": ({'"averaged": averaged,': '"averaged": averaged.module,'}, "other bits"),
    "best model": (WORSE | {'start["best"]': '{"step": 0}'}, "another best"),
}


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_table_is_needed(tmp_path, row):
    changes, symptom = ROWS[row]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir(), killed.mkdir()
    with pytest.raises(AssertionError, match=symptom):
        script = swapped(undisturbed, TEMPLATE, changes)
        output = train(script, undisturbed, 2, arguments=SIX_STEPS)
        assert_whole(undisturbed, output)
        assert_killed_alike(killed, 2, ["step 10 of rank 1"], undisturbed, output, changes)
