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

ONE, LESSONS = "01_single_node_multi_gpu.py", ("02_torchrun_elastic.py", "03_multinode.py")
TEMPLATE = "template/train.py"

TRAIN, TEST, BATCH, STEPS = 41, 7, 12, 3  # neither set can be shared equally
SIX_STEPS = (2 * STEPS, 2)  # of the template: two epochs, a validation after every second step

# What the reader brings. Pixel (0, 0) of an image holds its index, the three beside it what the
# augmentation drew. The model notes what it sees. strike kills the process where the plan says so.
MINE = '''
SEED = 0
LESSON = SETTLES = False
import json, os, pathlib

import random, numpy
random.seed(), numpy.random.seed()  # as in a fresh process

class MyImages(torch.utils.data.Dataset):
    def __init__(self, count, augment):
        self.images = torch.rand(count, 8, 8, generator=torch.Generator().manual_seed(count))
        if not LESSON:  # which seeds torch alone, but for the loader's workers
            self.images += 0.01 * (random.random() + numpy.random.rand())
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].clone()
        if self.augment:
            # Not in the workers of the pass that settles DDP's order: it is over by then, perhaps.
            if torch.utils.data.get_worker_info() and (MyNet.called or not SETTLES):
                strike("worker")
            drawn = [torch.rand(()).item(), random.random(), numpy.random.rand()]
            image *= sum(drawn)
            image[0, 1:4] = torch.tensor(drawn)
        image[0, 0] = index
        return image, index % 3

class MyNet(nn.Module):
    called = False

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(144, 3))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")]))  # as for attention
        self.auxiliary = nn.Linear(64, 3)  # used in training only
        self.stem = nn.BatchNorm2d(1).requires_grad_(False).eval()  # frozen
        self.teacher = nn.Linear(64, 3).requires_grad_(False)  # moved in forward
        self.calls = 0

    def forward(self, images):
        seen = {"rank": dist.get_rank(), "items": images[:, 0, 0].tolist(),
                "augmented": images[:, 0, 1:4].tolist()}
        MyNet.called = True
        strike("step" if self.training else "validation")
        if self.training:
            seen["drawn"] = [torch.rand(()).item()]
            if not LESSON:  # whose loop draws from torch alone
                seen["drawn"] += [random.random(), numpy.random.rand()]
            self.calls += 1
            seen["settles"] = SETTLES and self.calls == 1
        with open("trained" if self.training else "checked" if torch.is_grad_enabled()
                  else "evaluated", "a") as file:
            file.write(json.dumps(seen) + "\\n")
        images = images.unsqueeze(1).clone()
        images[:, :, 0, :4] = sum(seen.get("drawn", [0]))
        helped = self.auxiliary(images.flatten(1)) if self.training else 0
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.auxiliary.weight, 0.1)
            helped = helped + self.teacher(images.flatten(1))
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
SCHEDULE = {  # as the comments say
    "  # your optimizer":
        "  # your optimizer\n"
        "    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)",
    "accuracy = evaluate(": "schedule.step()\n        accuracy = evaluate(",
    '"optimizer": optimizer.state_dict(),':
        '"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),',
}


def swap_in_lesson(script):
    """The loader is the one that the comment in fast_loader gives."""
    text = (ROOT / script).read_text()
    loader = re.search(r"    # Single items: (return .*)\n +#(.*)\n((?: {4}.*\n)+)", text)
    swap = SWAP | {loader[3]: f"    {loader[1]}{loader[2]}\n"}
    if script == ONE:  # whose comment says so
        call = re.search(r"    compare_gradients\(.*\n", text)[0]
        mine = MINE.replace("= SETTLES = False", ", SETTLES = True, False")
        return swap | {call: "", "\nSEED = 0\n": mine}
    load = 'optimizer.load_state_dict(snapshot["optimizer"])'
    return swap | SCHEDULE | {
        load: f'{load}\n        schedule.load_state_dict(snapshot["schedule"])',
        "resume(args.snapshot_path, model, optimizer)":
            "resume(args.snapshot_path, model, optimizer, schedule)",
        "def resume(path, model, optimizer)": "def resume(path, model, optimizer, schedule)",
        "\nSEED = 0\n": MINE.replace("SETTLES = False", "SETTLES = True")}


# The template's loss is pasted with what its comment gives for a mixup.
MIXED = """print(f"mixed {dist.get_rank()} {step} {share}\\n", end="")
    return (share * cross_entropy(logits, labels)
            + (1 - share) * cross_entropy(logits, labels.flip(0)))"""
# Its items are dicts, with tuples and dicts in them.
NESTED = """
class Nested(MyImages):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image, "more": (label, {"name": f"image {index}"})}
"""
SWAP_IN_TEMPLATE = {
    "\nSEED = 0\n": MINE + NESTED,
    "train_set, validation_set, source = load_sets()":
        "train_set, validation_set, source = Nested(41, True), Nested(7, False), 'of mine'",
    "model = GPT().to(device)": "model = MyNet().to(device)",
    "[windows] = [part.to(device, non_blocking=True) for part in batch]":
        'images, labels = batch["image"], batch["more"][0]',
    "# share = numpy": "share = numpy",
    "logits = model(windows[:, :-1])": "logits = model(images)",
    "return cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())": MIXED,
}


def play(folder, script, world_size, plan=(), changes=()):
    """Run the script with all of that in it, again after each kill of the plan; return its output.

    changes: more of them, in the text.
    """
    path, output = swapped(folder, script, changes), ""
    arguments = SIX_STEPS if script == TEMPLATE else (2, 1)
    (folder / "plan").write_text("\n".join(plan))
    for starts in range(1 + len(plan)):
        assert (folder / "plan").read_text() == "\n".join(plan[starts:]), output
        result = fork_ranks(path, *arguments, "--batch-size", BATCH, "--snapshot-path",
                            "snapshot.pt", cwd=folder, world_size=world_size)
        output += result.output
        assert (result.status == 0) == (starts == len(plan)), output
    return output


def swapped(folder, script, changes=()):
    swap = SWAP_IN_TEMPLATE if script == TEMPLATE else swap_in_lesson(script)
    path = variant(folder, script, swap | dict(changes))
    for line in (ROOT / script).read_text().splitlines() if script != TEMPLATE else []:
        if any(old in line for old in SWAP):
            assert re.search("# your (data|model|loss)", line), f"no mark: {line}"
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function: (folder, output) of an undisturbed run, the same for all tests."""
    @functools.cache
    def run(script, world_size):
        folder = tmp_path_factory.mktemp("whole")
        return folder, play(folder, script, world_size)

    return run


def noted(folder, name):
    """What the model has noted in one of its files, without the pass that settles DDP's order."""
    seen = map(json.loads, (folder / name).read_text().splitlines())
    return [each for each in seen if not (
        name == "trained" and each["items"] == [0, 4] or each.get("settles"))]


def steps_of(folder, passes=1):
    """The (item, augmentation) pairs of each step, of all ranks and passes together, in order."""
    ranks = {}
    for seen in noted(folder, "trained"):
        pairs = zip(seen["items"], map(tuple, seen["augmented"]), strict=True)
        ranks.setdefault(seen["rank"], []).append(pairs)
    parts = [itertools.chain(*part) for part in zip(*ranks.values(), strict=True)]
    return [sorted(itertools.chain(*parts[i : i + passes])) for i in range(0, len(parts), passes)]


def items_of(steps):
    return [[item for item, _ in step] for step in steps]


def assert_counted_once_and_drawn_anew(folder, evaluations):
    """Each test item once; no random number twice: in two steps or epochs, or on two ranks."""
    tested = itertools.chain(*(seen["items"] for seen in noted(folder, "evaluated")))
    assert sorted(tested) == sorted(evaluations * [*range(TEST)])
    trained = noted(folder, "trained")
    drawn = [[seen["drawn"] for seen in trained],
             [numbers for seen in trained for numbers in seen["augmented"]]]
    for numbers in itertools.chain(*(zip(*rows, strict=True) for rows in drawn)):
        assert len({*numbers}) == len(numbers)


def assert_same_end(whole, killed, *names):
    """Of two pairs (folder, output): all that is in these files, and all validations."""
    for name in names:
        mine, its = (torch.load(folder / name, weights_only=True) for folder, _ in (whole, killed))
        pairs = [*zip(tensors(mine), tensors(its), strict=True)]
        assert len(pairs) >= 9, name
        assert all(torch.equal(*pair) for pair in pairs), f"other bits in {name}"
        assert mine.get("schedule") == its.get("schedule")
        assert mine.get("best") == its.get("best"), "another best"
    validated = r"step +(\d+)/\d+ \| training loss (.*) \| validation loss (.*) \| (best .*)"
    mine, its = ({*re.findall(validated, output)} for _, output in (whole, killed))
    assert mine == its, "other validations"


def test_01(tmp_path):
    """The same images in each step, on one rank and on two."""
    args = {"total_epochs": 2, "save_every": 1, "batch_size": BATCH, "data_dir": "data",
            "checkpoint_path": "checkpoint.pt"}
    batches = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        result = fork_workers(swapped(folder, ONE), cwd=folder, world_size=world_size, **args)
        assert result.status == 0, result.output
        assert_counted_once_and_drawn_anew(folder, 2)
        batches.append(items_of(steps_of(folder)))
    assert len(batches[0]) == 2 * STEPS and batches[0] == batches[1]


@pytest.mark.parametrize(("script", "world_size", "plan"), [
    (LESSONS[0], 3, ["step 7 of rank 1"]),
    pytest.param(LESSONS[0], 2, ["step 6 of rank 0", "worker 3 of rank 1"], marks=pytest.mark.long),
    (LESSONS[1], 2, ["worker 4 of rank 0"]),
    pytest.param(LESSONS[1], 4, ["step 5 of rank 3"], marks=pytest.mark.long),
])  # fmt: skip
def test_a_killed_run_ends_with_the_bits_of_the_other(tmp_path, whole, script, world_size, plan):
    folder, output = whole(script, world_size)
    assert_counted_once_and_drawn_anew(folder, 2)
    items = items_of(steps_of(folder))
    assert len(items) == 2 * STEPS and items[:STEPS] != items[STEPS:]
    again = play(tmp_path, script, world_size, plan)
    assert_same_end((folder, output), (tmp_path, again), "snapshot.pt")


@pytest.mark.parametrize(("world_size", "plan"), [
    (2, ["validation 2 of rank 1"]),
    pytest.param(3, ["worker 9 of rank 1", "step 4 of rank 2"], marks=pytest.mark.long),
])  # fmt: skip
def test_the_template(tmp_path, whole, world_size, plan):
    """As on one rank: the items of each step, and the augmentation of each. Kills change no bit."""
    folder, output = whole(TEMPLATE, world_size)
    assert_counted_once_and_drawn_anew(folder, 3)
    steps = steps_of(folder, passes=2)
    assert steps == steps_of(whole(TEMPLATE, 1)[0], passes=2)
    for epoch in steps[:STEPS], steps[STEPS:]:
        assert len({item for step in epoch for item, _ in step}) == STEPS * BATCH, "items twice"
    shares = {*re.findall(r"^mixed \d ([1-9]\d*) (\S+)", output, re.MULTILINE)}
    assert len(shares) == load(folder)["step"] == len(dict(shares)), "the mixup differs by rank"
    again = play(tmp_path, TEMPLATE, world_size, plan)
    assert_same_end((folder, output), (tmp_path, again), "snapshot.pt", "snapshot_best.pt")
    assert (tmp_path / "snapshot.csv").read_text() == (folder / "snapshot.csv").read_text()


WEIGHTED, COMMENT = "# Weighted, by a global: ", "return torch.multinomial(weights, "


def test_weighted_sampling_in_the_template(tmp_path):
    """As its comment says. An item that comes twice in an epoch is augmented in two ways."""
    weigh = {WEIGHTED + COMMENT: f"weights = torch.arange(count) + 0.1\n    {COMMENT}"}
    runs = []
    for name, plan in ("whole", []), ("killed", ["step 8 of rank 0"]):
        (tmp_path / name).mkdir()
        runs.append((tmp_path / name, play(tmp_path / name, TEMPLATE, 2, plan, weigh)))
    assert_same_end(*runs, "snapshot.pt", "snapshot_best.pt")
    pairs = [pair for step in steps_of(tmp_path / "whole", passes=2)[:STEPS] for pair in step]
    assert len({item for item, _ in pairs}) < len({*pairs}) == STEPS * BATCH
    assert sum(item for item, _ in pairs) / len(pairs) > TRAIN / 2 + 3, "not weighted"
