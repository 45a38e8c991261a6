"""Images a second of 02's training loop, against the loop of most examples, no DDP, and the limit.

    python benchmarks/throughput.py

customary   MNIST read image by image, each turned into a PIL image, a tensor, and normalised, by a
            DataLoader with some workers; loss.item() in every step
02          what 02_torchrun_elastic.py does: the whole set as one tensor, a batch indexed at once
limit       no input at all: the batches lie ready on the device. With CUDA, the whole step is
            replayed as a CUDA graph, so that Python and kernel launches cost nothing (without DDP);
            "02, no input" is 02's step on such batches, with its launches and its DDP
without DDP 02's loop on one rank, and the same with the model not wrapped: what DDP itself costs
02, ...     02's loop with one change: would that make it faster? (--compile tries torch.compile,
            too, which takes half a minute and needs a C++ compiler)

All sides have the same layers, optimizer and batch size, and take turns in the same processes.
What is said of GPUs has not been run so far.
"""

import pathlib
import struct
import tempfile
import warnings

import torch
from parts.common import (
    alternate,
    count_cores,
    find_gpus,
    finish,
    load_script,
    number,
    paired,
    parser,
    process_group,
    run_ranks,
    seconds,
    spread,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SCRIPT = load_script("02_torchrun_elastic.py")
pick_device = load_script("04_collectives.py").pick_device


def write_mnist(folder, images, labels):
    """Write a set into folder as the files that torchvision.datasets.MNIST reads."""
    raw = pathlib.Path(folder) / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, tensor in (("images-idx3", images), ("labels-idx1", labels.byte())):
        header = struct.pack(f">{1 + tensor.dim()}i", 0x0800 + tensor.dim(), *tensor.shape)
        for split in ("train", "t10k"):
            (raw / f"{split}-{name}-ubyte").write_bytes(header + tensor.numpy().tobytes())


def new_model(device, ddp=True, variant=None):
    """Return (02's model, its optimizer), the model wrapped as 02 does, or with one change."""
    torch.manual_seed(0)
    model = SCRIPT.Net().to(device)
    if variant == "channels-last":
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.03, momentum=0.9, fused=variant == "fused SGD"
    )
    model = DDP(model, gradient_as_bucket_view=True) if ddp else model
    return (torch.compile(model) if variant == "torch.compile" else model), optimizer


def loader_of_02(train_set, share):
    """The loader of 02."""
    sampler = DistributedSampler(train_set, drop_last=True)
    return SCRIPT.fast_loader(train_set, sampler, share, drop_last=True)


def customary_loader(folder, share, workers, device):
    """The loader of most MNIST examples."""
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    train_set = datasets.MNIST(folder, train=True, transform=transform)
    sampler = DistributedSampler(train_set, drop_last=True)
    # persistent_workers and forkserver are not customary: they spare this side the start of its
    # workers in each epoch, and let them end without complaint.
    return DataLoader(
        train_set,
        share,
        sampler=sampler,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type != "cpu",
        persistent_workers=workers > 0,
        multiprocessing_context="forkserver" if workers else None,
    )


class Copied:
    """The batches of a loader, sent to the device without waiting for it."""

    def __init__(self, loader, device):
        self.loader, self.device = loader, device

    def __iter__(self):
        for batch in self.loader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]


def step(model, optimizer, images, labels):
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def customary_epoch(layers, optimizer, loader, device):
    """The loop of most examples; layers is the model without the division that 02 does inside."""
    loss_sum = 0.0
    for images, labels in loader:
        loss_sum += step(layers, optimizer, images.to(device), labels.to(device)).item()
    return loss_sum


def capture(model, optimizer, images, labels):
    """Return a call that replays one step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # some steps first, to allocate and to choose kernels
        for _ in range(3):
            step(model, optimizer, images, labels)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, optimizer, images, labels)
    return graph.replay


def limit_epochs(batches, device):
    """Return {side: call}: a step for each of the batches, which lie on the device."""
    model, optimizer = new_model(device)

    def epoch():
        for batch in batches:
            step(model, optimizer, *batch)

    if device.type != "cuda":
        return {"limit: no input": epoch}
    replay = capture(*new_model(device, ddp=False), *batches[0])
    return {"02, no input": epoch, "limit: no input": lambda: [replay() for _ in batches]}


def measure(rank, world_size, store, folder, images, batch_sizes, workers, variants, rounds):
    """Return {batch size: {side: [images/s of each round]}}; on one rank, also without DDP."""
    device, backend = pick_device(rank)
    # Made here, as 02 does, and not sent. It leaves the C library with room that it keeps: without
    # that, memory went back to the system in each step, and steps of 512 took twice as long.
    train_set = TensorDataset(*SCRIPT.generate_data(images))
    with process_group(backend, store, "throughput", rank, world_size):
        return {
            size: measure_batch(
                size // world_size, world_size, device, folder, train_set, workers, variants, rounds
            )
            for size in batch_sizes
        }


def measure_batch(share, world_size, device, folder, train_set, workers, variants, rounds):
    loader = loader_of_02(train_set, share)
    images = len(loader) * share * world_size

    def epoch_of_02(ddp=True):
        model, optimizer = new_model(device, ddp)
        return lambda: SCRIPT.train_epoch(model, loader, optimizer, device)

    def epoch_of_variant(name):
        model, optimizer = new_model(device, variant=name)
        batches = Copied(loader, device) if name == "non_blocking" else loader

        def epoch():
            with torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16 autocast"):
                SCRIPT.train_epoch(model, batches, optimizer, device)

        return epoch

    def customary(workers):
        model, optimizer = new_model(device, ddp=False)
        layers = DDP(model.layers)
        loader = customary_loader(folder, share, workers, device)
        return lambda: customary_epoch(layers, optimizer, loader, device)

    sides = {f"customary, {n} workers": customary(n) for n in workers}
    sides["02"] = epoch_of_02()
    if world_size == 1:
        sides["02 without DDP"] = epoch_of_02(ddp=False)
    # DDP warns that a one-channel layer in channels-last costs it a copy: it does, and counts.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    sides |= {f"02, {name}": epoch_of_variant(name) for name in variants}
    batches = [(x.to(device), y.to(device)) for x, y in loader]
    sides |= limit_epochs(batches, device)
    timed = {name: lambda call=call: images / seconds(call, device) for name, call in sides.items()}
    return alternate(timed, rounds)


def tables(figures, device):
    """[(title, columns, rows)] of {"batch size, ranks": {side: [images/s]}}."""
    found = []
    for setting, sides in figures.items():
        batch_size, world_size = setting.split()
        rows = [
            [name, *spread(speeds), *paired(speeds, sides["02"])] for name, speeds in sides.items()
        ]
        found.append(
            (
                f"batch size {batch_size}, ranks on {device}: {world_size}",
                {
                    "loop": "",
                    "images/s": ".0f",
                    "least": ".0f",
                    "most": ".0f",
                    "times 02": ".2f",
                    "from": ".2f",
                    "to": ".2f",
                },
                rows,
            )
        )
    return found


def main():
    new = parser(__doc__, rounds=5)
    new.add_argument("--images", type=number, help="default: 8192, on a GPU 60000")
    new.add_argument("--batch-sizes", type=number, nargs="+", default=[64, 512])
    new.add_argument("--workers", type=int, nargs="+", help="of the customary loader, by rank")
    new.add_argument("--compile", action="store_true", help="try torch.compile, too")
    args = new.parse_args()
    gpus, device = find_gpus()
    # One rank last: there, it is DDP that is looked at, and not the loading.
    changes = [
        "fused SGD",
        "channels-last",
        "bf16 autocast",
        *["non_blocking"] * bool(gpus),
        *["torch.compile"] * args.compile,
    ]
    world_size = gpus or 2
    # Each rank has workers of its own: all together at most as many as there are cores.
    workers = args.workers or sorted({0, 1, max(1, count_cores() // world_size)})
    ranks = {world_size: (workers, changes)}
    ranks.setdefault(1, ([], []))
    images = args.images or (60_000 if gpus else 8192)
    if not max(ranks) <= min(args.batch_sizes) <= max(args.batch_sizes) <= images:
        new.error(
            f"--batch-sizes: from {max(ranks)} (an image for each rank) to {images} (--images)"
        )
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_mnist(folder, *SCRIPT.generate_data(images))
        for world_size, (workers, variants) in ranks.items():
            found = run_ranks(
                measure,
                world_size,
                folder,
                images,
                args.batch_sizes,
                workers,
                variants,
                args.rounds,
            )
            figures |= {f"{size} {world_size}": sides for size, sides in found.items()}
    settings = {"images": images, "rounds": args.rounds}
    finish("throughput", args, device, settings, figures, tables(figures, device))


if __name__ == "__main__":
    main()
