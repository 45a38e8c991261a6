"""The check of exercises/10_evaluate_exactly.py."""

import collections
import copy
import math

import answer
import torch
import torch.distributed as dist
from checker import Exchanges, case, expect
from torch import nn


def trial():
    world_size = dist.get_world_size()
    for count, frozen, batch_size in (  # the third: the ranks have different numbers of batches
        (1001, True, 8),
        (5003, True, 8),
        (2 * world_size - 1, False, 1),
        (1, False, 8),
    ):
        torch.manual_seed(count)
        model, images = Model(), torch.randn(count, 9)
        images[:, 0] = torch.arange(count) + 0.5  # its number
        classes = copy.deepcopy(model).eval()(images).argmax(dim=1)
        labels = (classes + (torch.rand(count) < 0.4)) % 3  # 4 in 10 are wrong
        labels[0] = classes[0]
        model.norm.train(not frozen)
        model.training = frozen  # of the whole, but not of its parts
        model.last.bias.requires_grad_(False)
        modes = {name: part.training for name, part in model.named_modules()}
        state, needs = copy.deepcopy(model.state_dict()), grads_needed(model)
        given, expected = (images.clone(), labels.clone()), (classes == labels).double()
        SEEN.clear()
        torch.manual_seed(dist.get_rank())  # the ranks draw other numbers
        with case(f"{count} image(s)"), Exchanges() as exchanges:
            found = answer.accuracy(model, images, labels, batch_size)
        mine = [number for numbers, *_ in SEEN for number in numbers]
        look_at_passes(mine, count, batch_size)
        look_at_answer(found, expected, mine)
        look_at_all_ranks(found, mine, count)
        for name, part in model.named_modules():
            before, after = (["evaluation", "training"][on] for on in (modes[name], part.training))
            expect(
                before == after,
                f"with {count} image(s), {name or 'the model itself'} was in"
                f" {before} mode, and is in {after} mode now",
                "model.train() and model.eval() change all parts. What were they before?",
                "keep part.training for each part in model.modules(), and put it back",
            )
        expect(
            torch.is_grad_enabled(),
            "autograd is switched off now, and was on before",
            "with torch.no_grad(): ... puts back what was",
        )
        expect(
            grads_needed(model) == needs,
            "other weights require a gradient now than before",
            "with torch.no_grad(): ... builds no graph, and changes nothing in the model",
        )
        expect(
            all(torch.equal(state[name], now) for name, now in model.state_dict().items()),
            "the model's weights or buffers have changed",
            "in which mode is the model?",
        )
        expect(
            all(map(torch.equal, given, (images, labels))),
            "the images or labels have changed",
            "select from them, and write nothing into them",
        )
        if count > 1000:
            expect(
                exchanges.bytes_sent(),
                "nothing was sent, and no rank has seen all images",
                "which collective adds up over the ranks?",
            )
            told = (
                f"off by {abs(found - expected.mean().item()):.0e}, {len(mine)} of {count}"
                f" images on rank 0, {exchanges.bytes_sent()} bytes sent"
            )
    return told


def look_at_passes(mine, count, batch_size):
    """Check what has gone through the model on this rank; mine: the numbers of the images."""
    world_size = dist.get_world_size()
    expect(
        not any(training for _, training, _ in SEEN),
        "the model was in training mode, in whole or in part, while it saw the images",
        "Dropout and BatchNorm do other things in training",
        "model.eval()",
    )
    expect(
        not any(graph for *_, graph in SEEN),
        "a graph for a backward pass was built",
        "it needs memory for nothing: see torch.no_grad",
    )
    longest = max([len(numbers) for numbers, *_ in SEEN], default=0)
    expect(
        longest <= batch_size,
        f"the model got {longest} images at once, and batch_size is {batch_size}",
        "cut this rank's share into batches",
    )
    most = count / world_size + batch_size
    expect(
        len(mine) <= most or len(mine) < count,
        f"this rank evaluates all {count} images",
        "share the work: which are this rank's?",
    )
    expect(
        len(mine) <= most,
        f"this rank evaluates {len(mine)} of {count} images; its share is {count / world_size:.0f}",
        "the share depends on the number of ranks: dist.get_world_size()",
        "does one rank take all the rest? With 64 ranks, that can be 63 images",
    )
    twice = len(mine) - len(set(mine))
    expect(
        not twice,
        f"{twice} of its {len(mine)} images went through the model more than once",
        "do not fill up a share or a batch",
        "the last batch may be shorter than the others",
    )


def look_at_answer(found, expected, mine):
    """expected: 1.0 for each image that the model classifies right, else 0.0."""
    expect(isinstance(found, float), f"{found!r} came back", "return a float: tensor.item()")
    count, world_size, right = len(expected), dist.get_world_size(), expected.mean().item()
    told = f"with {count} image(s), the accuracy is {right:.6f}, and this rank returns {found:.6f}"
    if abs(found - right) < 1e-6:
        return
    expect(
        math.isfinite(found),
        told,
        "the accuracy of a share without images is 0 / 0",
        "add up the right answers over the ranks, then divide once",
    )
    expect(
        mine,
        f"{told}. It has no image of its own",
        "a rank without images makes the same calls as the others, and adds 0",
    )
    expect(
        min(abs(found - own) for own in (expected[mine].mean(), expected[mine].sum() / count))
        > 1e-6,
        f"{told}: it counts its own right answers alone",
        "which collective adds up over the ranks?",
    )
    causes = {
        "the right answers of all ranks, not divided": expected.sum(),
        "the mean of the ranks' accuracies": torch.stack(
            [expected[r::world_size].mean() for r in range(world_size)]
        ).mean(),
        "a mean of the ranks' accuracies": torch.stack(
            [share.mean() for share in expected.tensor_split(world_size)]
        ).mean(),
    }
    for cause, number in causes.items():
        expect(
            abs(number - found) > 1e-6,
            f"{told}: {cause}",
            "each image counts once, though the shares have different lengths",
            "add up the right answers over the ranks, then divide once by the number of images",
        )
    for number, hint in (
        (count + -count % world_size, "some image is in two shares: do not fill up a share"),
        (count - count % world_size, "some image is in no share: who takes the last one?"),
    ):
        expect(
            not number or abs(found * number - round(found * number)) > 1e-4,
            f"{told}: {found * number:.0f} right answers of {number}",
            hint,
            "the shares need not have the same length",
        )
    expect(
        False,
        told,
        "does each image count once, though shares and the last batch may be"
        " shorter? A sampler that fills up shares counts some twice",
        "add up the right answers over the ranks, then divide once by the number of images",
    )


def look_at_all_ranks(found, mine, count):
    """The answer is right on this rank. Look whether all ranks together see each image once."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, mine))
    results, shares = zip(*everyone, strict=True)
    seen = collections.Counter(number for share in shares for number in share)
    twice = [number for number in seen if seen[number] > 1]
    expect(
        not twice,
        f"with {count} image(s), image {min(twice, default=0)} went through the model"
        f" on ranks {[r for r, share in enumerate(shares) if min(twice, default=0) in share]}",
        "once is enough: do not fill up the shares, and let a rank without images have none",
    )
    never = set(range(count)) - set(seen)
    expect(
        not never,
        f"image {min(never, default=0)} of {count} went through no rank's model",
        "the answer is right by chance: who takes the last images?",
    )
    expect(
        len(set(results)) == 1,
        f"the ranks return {list(results)}",
        "all return the same number: the same sum, divided in the same way",
    )


def grads_needed(model):
    return [p.requires_grad for p in model.parameters()]


SEEN = []  # this rank's passes through the model, or a copy: (image numbers, training?, graph?)


class Model(nn.Module):
    """Scores of images whose first number is the image's own, and plays no part."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.last = nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)
        self.norm.running_mean += 1

    def forward(self, images):
        training = any(part.training for part in self.modules())
        scores = self.last(self.dropout(self.norm(images[:, 1:])))
        numbers = [int(one) for one in images[:, 0].tolist() if one % 1 == 0.5]  # of no filling
        SEEN.append((numbers, training, scores.requires_grad))
        return scores
