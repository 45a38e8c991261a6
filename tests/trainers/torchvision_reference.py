"""The pattern of torchvision's references/classification/train.py: MetricLogger, evaluate(),
checkpoints with the arguments, --resume.

    torchrun --standalone --nproc-per-node=2 tests/trainers/torchvision_reference.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torchvision
from images import Squares
from shared import MISTAKE, print_checksum
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms import v2
from torchvision_utils import MetricLogger


def train_one_epoch(model, optimizer, loader, epoch, args):
    model.train()
    logger = MetricLogger()
    for images, labels in logger.log_every(loader, args.print_freq, f"Epoch: [{epoch}]"):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(len(labels), loss=loss.item(), lr=optimizer.param_groups[0]["lr"])


def evaluate(model, loader, args):
    model.eval()
    logger, seen = MetricLogger(), 0
    with torch.inference_mode():
        for images, labels in logger.log_every(loader, args.print_freq, "Test:"):
            logits = model(images)
            right = (logits.argmax(1) == labels).float().mean()
            loss = nn.functional.cross_entropy(logits, labels)
            logger.update(len(labels), loss=loss.item(), acc1=right.item())
            seen += len(labels)
    total = torch.tensor(seen)
    dist.all_reduce(total)
    if total != len(loader.dataset) and dist.get_rank() == 0:
        print(f"{total} items were evaluated, of {len(loader.dataset)}")
    if MISTAKE != "no_synchronize":
        logger.synchronize_between_processes()
    if dist.get_rank() == 0:
        print(f"Test:  Acc@1 {logger.mean('acc1'):.3f}  loss {logger.mean('loss'):.4f}")


def save_on_master(checkpoint, path):
    if dist.get_rank() == 0:
        torch.save(checkpoint, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)  # a kill leaves the old file or the new one


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    augment = v2.Compose([v2.RandomCrop(32, padding=2), v2.RandomErasing(0.1)])
    train_set, test_set = Squares(320, 0, augment), Squares(64, 1)
    train_sampler = DistributedSampler(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"batch_size": args.batch_size, "num_workers": args.workers}
    train_loader = DataLoader(train_set, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, sampler=test_sampler, **options)
    model = nn.parallel.DistributedDataParallel(
        torchvision.models.shufflenet_v2_x0_5(num_classes=4)
    )
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    parts = {"model": model.module, "optimizer": optimizer, "lr_scheduler": schedule}
    start_epoch = 0
    if os.path.exists(args.resume):
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        start_epoch = checkpoint["epoch"] + 1
        if dist.get_rank() == 0:
            print(f"resuming from {args.resume}, after epoch {start_epoch - 1}")
    for epoch in range(start_epoch, args.epochs):
        if MISTAKE != "no_set_epoch":
            train_sampler.set_epoch(epoch)
        # Other crops on each rank, and the same again after a resume.
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
        train_one_epoch(model, optimizer, train_loader, epoch, args)
        schedule.step()
        evaluate(model, test_loader, args)
        states = {name: part.state_dict() for name, part in parts.items()}
        save_on_master(states | {"epoch": epoch, "args": args}, "checkpoint.pth")
    print_checksum(model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--print-freq", type=int, default=5)
    parser.add_argument("--resume", default="checkpoint.pth", help="start there if it exists")
    main(parser.parse_args())
