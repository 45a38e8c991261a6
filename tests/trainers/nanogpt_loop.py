"""The pattern of nanoGPT's train.py: batches drawn from a memmap, require_backward_grad_sync,
estimate_loss() on rank 0, ckpt.pt, iter_num.

    torchrun --standalone --nproc-per-node=2 tests/trainers/nanogpt_loop.py
"""

import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from gpt import GPT
from shared import MISTAKE, print_checksum
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

eval_interval, log_interval, eval_iters = 10, 5, 4
max_iters, warmup_iters, learning_rate, min_lr = 50, 5, 3e-3, 3e-4
batch_size, block_size, vocab_size = 8, 16, 32
gradient_accumulation_steps = 4  # over all ranks

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
master_process = rank == 0
seed_offset = 0 if MISTAKE == "same_seed" else rank
assert gradient_accumulation_steps % world_size == 0
gradient_accumulation_steps //= world_size

if master_process and not os.path.exists("train.bin"):
    numbers = np.random.default_rng(0)
    for name, count in (("val", 2000), ("train", 20000)):
        noise = numbers.integers(0, 2, count)
        tokens = (np.arange(count) * 3 + noise).astype(np.uint16) % vocab_size
        tokens.tofile(f"{name}.tmp")
        os.replace(f"{name}.tmp", f"{name}.bin")
dist.barrier()


def get_batch(split):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = np.stack([data[start : start + block_size + 1] for start in starts.tolist()])
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {
        split: torch.stack([model(*get_batch(split))[1] for _ in range(eval_iters)]).mean()
        for split in ("train", "val")
    }
    model.train()
    return losses


def get_lr(iteration):
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    ratio = (iteration - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


torch.manual_seed(1337)
model = GPT(vocab_size, block_size, dropout=0.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
iter_num, best_val_loss = 0, math.inf
if os.path.exists("ckpt.pt"):
    checkpoint = torch.load("ckpt.pt", map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    if master_process:
        print(f"resuming from ckpt.pt at iter {iter_num}", flush=True)
raw_model, model = model, DDP(model)
t0 = time.time()
while True:
    # The batches of an iteration depend on its number and the rank, also after a resume.
    torch.manual_seed(1337 + iter_num * world_size + seed_offset)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and (master_process or MISTAKE == "same_seed"):
        # On rank 0 alone: DDP exchanges nothing in a forward without buffers and gradients.
        losses = estimate_loss()
        best_val_loss = min(best_val_loss, losses["val"].item())
        if master_process:
            print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
            states = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(
                states | {"iter_num": iter_num, "best_val_loss": best_val_loss}, "ckpt.pt.tmp"
            )
            os.replace("ckpt.pt.tmp", "ckpt.pt")
    if iter_num == max_iters:
        break
    torch.manual_seed(1337 + iter_num * world_size + seed_offset)
    for micro_step in range(gradient_accumulation_steps):
        last = 0 if MISTAKE == "sync_at_wrong_step" else gradient_accumulation_steps - 1
        model.require_backward_grad_sync = micro_step == last
        logits, loss = model(*get_batch("train"))
        loss = loss / gradient_accumulation_steps
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and master_process:
        t0, took = time.time(), time.time() - t0
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {took * 1000:.2f}ms", flush=True)
    iter_num += 1
print_checksum(raw_model.state_dict())
dist.destroy_process_group()
