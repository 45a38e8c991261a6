"""What a reader brings, for test_swap.py: data, a model and a loss of another kind, as text."""

# What the reader brings. Pixel (0, 0) of an image holds its index, those beside it what was drawn.
MINE = """
import json, os, pathlib, random
import numpy

class MyImages(torch.utils.data.Dataset):
    def __init__(self, count, augment):
        self.images = torch.rand(count, 8, 8, generator=torch.Generator().manual_seed(count))
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].clone()
        if self.augment:
            # Not in the workers of the pass that settles DDP's order: it is over by then, perhaps.
            if torch.utils.data.get_worker_info() and (MyNet.called or TEMPLATE):
                strike("worker")
            drawn = [torch.rand(()).item(), random.random(), numpy.random.rand()]
            image *= sum(drawn)
            image[0, 1:4] = torch.tensor(drawn)
        image[0, 0] = index
        return image, index % 3

class MyNet(nn.Module):
    called = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(144, 3))
        self.auxiliary = nn.Linear(64, 3)  # used in training only
        self.stem = nn.BatchNorm2d(1).requires_grad_(False).eval()  # frozen
        self.teacher = nn.Linear(64, 3).requires_grad_(False)  # moved in forward

    def forward(self, images):
        seen = {"rank": dist.get_rank(), "items": images[:, 0, 0].tolist(),
                "augmented": images[:, 0, 1:4].tolist()}
        strike("step" if self.training else "validation")
        if self.training:
            seen["drawn"] = [torch.rand(()).item()]
            if TEMPLATE:  # 01 to 03 seed torch alone, but for the loader's workers
                seen["drawn"] += [random.random(), numpy.random.rand()]
            seen["settles"] = SETTLES and MyNet.called == 0
            MyNet.called += 1
        with open("trained" if self.training else "evaluated", "a") as file:
            file.write(json.dumps(seen) + "\\n")
        images = images.unsqueeze(1).clone()
        images[:, :, 0, :4] = sum(seen.get("drawn", [0]))
        outputs = self.layers(self.stem(images))
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.auxiliary.weight, 0.1)
            outputs = outputs + self.auxiliary(images.flatten(1)) + self.teacher(images.flatten(1))
        return outputs

def strike(place, count={}):
    count[place] = count.get(place, 0) + 1
    plan = pathlib.Path("plan")
    first, *rest = plan.read_text().split("\\n") if plan.exists() else [""]
    if first == f"{place} {count[place]} of rank {os.environ.get('RANK')}":
        plan.write_text("\\n".join(rest))
        os.kill(os.getpid(), 9)
"""

IN_A_LESSON = """
TEMPLATE, Net = False, MyNet

def load_data(folder):
    return MyImages(41, True), MyImages(7, False), "images of mine"

def cross_entropy(logits, labels, old=cross_entropy):
    return old(logits, labels, label_smoothing=0.1)

def fast_loader(dataset, sampler, batch_size, drop_last):
"""

# Its items are dicts, with tuples and dicts in them; its loss is that of a mixup.
IN_THE_TEMPLATE = """
TEMPLATE, SETTLES, GPT = True, False, MyNet
random.seed(), numpy.random.seed()  # as in a fresh process

class Nested(MyImages):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image, "more": (label, {"name": f"image {index}"})}

def load_sets():
    sets = Nested(41, True), Nested(7, False)
    sets[0].images += 0.01 * (random.random() + numpy.random.rand())  # as a random split: seeded
    return *sets, "images of mine"

def mean_loss(model, batch, step):
    images, labels = batch["image"], batch["more"][0]
    share = numpy.random.default_rng(step).beta(0.2, 0.2) if model.training else 1.0
    print(f"mixed {dist.get_rank()} {step} {share}\\n", end="")
    logits = model(images)
    return share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(
        logits, labels.flip(0))
"""
