"""The pattern of timm's train.py: its models, loaders, optimizers, schedules and CheckpointSaver.

torchrun --standalone --nproc-per-node=2 tests/trainers/timm_train.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from images import Pictures
from shared import MISTAKE, print_checksum
from timm import utils
from timm.data import create_loader
from timm.models import create_model, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn


def loaders(args):
    """Return the loaders of training and validation. Their workers live for one epoch, so that
    their random numbers are the same again after a resume."""
    options = {
        "input_size": (3, 32, 32),
        "batch_size": args.batch_size,
        "num_workers": args.workers,
        "distributed": True,
        "device": torch.device("cpu"),
        "persistent_workers": False,
    }
    train = create_loader(Pictures(320, 0), is_training=True, scale=(0.8, 1), hflip=0, **options)
    # OrderedDistributedSampler pads the shares: 64 can be divided by the number of ranks.
    return train, create_loader(Pictures(64, 1), crop_pct=1.0, **options)


def train_one_epoch(epoch, model, loader, optimizer, loss_function, scheduler, args):
    losses = utils.AverageMeter()
    model.train()
    updates = epoch * len(loader)
    for batch, (images, labels) in enumerate(loader):
        loss = loss_function(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        utils.dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
        optimizer.step()
        updates += 1
        losses.update(loss.item(), len(labels))
        if batch % args.log_interval == 0 and utils.is_primary(args):
            share, rate = 100 * batch / (len(loader) - 1), optimizer.param_groups[0]["lr"]
            print(
                f"Train: {epoch} [{batch:>4d}/{len(loader)} ({share:>3.0f}%)]  "
                f"Loss: {losses.val:.3f} ({losses.avg:.3f})  LR: {rate:.3e}",
                flush=True,
            )
        scheduler.step_update(num_updates=updates, metric=losses.avg)


def validate(model, loader, loss_function, args):
    losses, top1 = utils.AverageMeter(), utils.AverageMeter()
    model.eval()
    with torch.inference_mode():
        for images, labels in loader:
            logits = model(images)
            figures = loss_function(logits, labels), utils.accuracy(logits, labels)[0]
            if MISTAKE != "no_reduce":
                figures = [utils.reduce_tensor(figure, args.world_size) for figure in figures]
            losses.update(figures[0].item(), len(labels))
            top1.update(figures[1].item(), len(labels))
    if utils.is_primary(args):
        print(f"Test:  Loss: {losses.avg:.4f}  Acc@1: {top1.avg:.2f}", flush=True)
    return top1.avg


def main(args):
    dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    utils.random_seed(args.seed, args.rank)
    model = create_model(args.model, num_classes=4)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.01, weight_decay=1e-4)
    last = os.path.join(args.output, "last.pth.tar")
    start_epoch = resume_checkpoint(model, last, optimizer) if os.path.exists(last) else 0
    if start_epoch and utils.is_primary(args):
        print(f"resumed from {last}, at epoch {start_epoch}", flush=True)
    model = nn.parallel.DistributedDataParallel(model)
    train_loader, validation_loader = loaders(args)
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=args.epochs, updates_per_epoch=len(train_loader)
    )
    scheduler.step(start_epoch)
    saver = None
    if utils.is_primary(args):
        os.makedirs(args.output, exist_ok=True)
        saver = utils.CheckpointSaver(model, optimizer, args, checkpoint_dir=args.output)
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(start_epoch, epochs):
        if MISTAKE != "no_set_epoch":
            train_loader.sampler.set_epoch(epoch)
        utils.random_seed(args.seed + epoch * args.world_size, args.rank)
        train_one_epoch(epoch, model, train_loader, optimizer, loss_function, scheduler, args)
        utils.distribute_bn(model, args.world_size, reduce=True)
        top1 = validate(model, validation_loader, loss_function, args)
        if saver:
            saver.save_checkpoint(epoch, metric=top1)
        scheduler.step(epoch + 1, top1)
    print_checksum(model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--output", default="output")
    main(parser.parse_args())
