"""A training that may be killed at any moment. Every line is yours to change.

A small GPT learns to predict the next character of a text. survive.py keeps the training alive:
copy both files. README.md says what a script of your own needs.

    torchrun --standalone --nproc-per-node=2 template/train.py

    [rank 0/2] data: 14432 + 100 windows of 32 characters, Python's help; 451 steps an epoch
    [rank 0/2] batch size 32: 2 ranks x 2 micro-batches
    [rank 0/2] step   10/60 | loss 3.0953 | rate 1.00e-02 | norm  0.31 |   472 examples/s
    ...
    [rank 0/2] step   60/60 | saved in train.pt
    [rank 0/2] step   60/60 | training loss 2.7612 | validation loss 2.7503 | best after step 60
    [rank 0/2] 2 replicas are identical, sha256 844dcbd4594f

Your figures will differ, as Python's help text and CPUs do. The same command goes on from train.pt.
A kill costs the steps since the last save, SIGTERM none. On a CPU, with as many ranks, a killed
training ends with the bits of an unbroken one.
"""

import argparse
import contextlib
import functools
import math
import time
from pydoc_data.topics import topics

import survive  # before torch, whose import takes seconds: it looks for torchrun
import torch
import torch.distributed as dist
from survive import log
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

SEED = 0
REPORT_EVERY = 10  # steps
CONTEXT, VALIDATION = 32, 100  # characters in a window; windows that are kept from training
VOCABULARY, WIDTH, HEADS, LAYERS, DROPOUT = 128, 64, 4, 2, 0.1
LEARNING_RATE, WARM_UP_STEPS, CLIP = 1e-2, 10, 1.0
EMA_DECAY = 0.9  # for 60 steps; 0.999 or more for a real training
WORKERS = 2  # processes of each rank that load data; 0: the rank itself does


@record  # if a process fails, torchrun's report shows its traceback
def main():
    args = parse_args()
    device = survive.start(args.timeout)  # parts 1 and 2: who am I; meet the others
    finished = train(device, args)  # parts 3, 4 and 5
    survive.leave(finished)  # part 6: torchrun and Slurm see whether the job ended early


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Part 3: share the data. Every rank can read all of it, and takes its share of each batch.
    survive.seed(SEED)  # a random split must be alike on all ranks, in all restarts
    train_set, validation_set, source = load_sets()  # your data
    count = len(train_set)
    if not world_size * args.accumulate <= args.batch_size <= count:
        survive.stop(
            f"--batch-size must be from {world_size * args.accumulate} (an example for"
            f" each rank in each micro-batch) to {count}"
        )
    epoch_steps, validate_every = count // args.batch_size, args.save_every
    if args.epochs:
        args.total_steps, validate_every = args.epochs * epoch_steps, epoch_steps
    log(f"data: {count} + {len(validation_set)} {source}; {epoch_steps} steps an epoch")
    log(f"batch size {args.batch_size}: {world_size} ranks x {args.accumulate} micro-batches")
    tenths = [(0, place, place) for place in range(0, count, max(1, count // 10))]
    samples = [batch for batch, _ in loader_of(train_set, [tenths[:2], tenths])]
    survive.compare(training_data=samples)  # each machine reads its own disk

    # Part 4: build the model, go on from the newest snapshot, and wrap the model.
    survive.seed(SEED)  # every run starts from the same weights
    model = GPT().to(device)  # your model
    # The average of the weights over the last steps (EMA): validated, and saved as the best.
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    optimizer = torch.optim.AdamW(  # your optimizer; groups of parameters as on one GPU
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # your schedule, by steps
        optimizer, functools.partial(warm_up_and_cosine, total_steps=args.total_steps)
    )
    # Whatever has a state_dict() is a part: in fp16, your GradScaler, too.
    snapshot = survive.Snapshot(
        args.snapshot_path,
        f"{args.batch_size} of {count} examples, seed {SEED}",
        model=model,
        averaged=averaged,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    # All else that changes, as plain numbers or tensors. due: the step is to be validated.
    # loss_sum: over the steps since the last validation. rows: of the log.
    now = snapshot.load(step=0, due=False, loss_sum=0.0, best={"step": 0}, rows=[])
    step, due, best, rows = now["step"], now["due"], now["best"], now["rows"]
    loss_sum = torch.tensor(now["loss_sum"], dtype=torch.float64, device=device)
    model = DDP(model, gradient_as_bucket_view=True)  # backward() then averages the gradients
    with survive.settled(model):  # all that this pass changes is put back
        mean_loss(model, samples[0], 0).backward()

    # Part 5: train.
    asked_to_leave = survive.leave_on_sigterm()
    loader = iter(loader_of(train_set, share_of_steps(range(step, args.total_steps), count, args)))
    name = args.snapshot_path.removesuffix(".pt")  # for the files beside the snapshot
    clock, reported = time.perf_counter(), step
    if step >= args.total_steps:
        log("nothing left to train: ask for more steps, or delete the snapshot on every machine")
    while True:
        # A validation may take longer than SIGTERM grants. So it comes after the snapshot, and a
        # run that goes on from that snapshot begins with it.
        if due:
            survive.same_buffers(averaged, model)
            metrics = validate(averaged.module, validation_set)  # the same on all ranks
            if metrics["loss"] < best.get("loss", math.inf):  # your rule
                best = {**metrics, "step": step}
                if snapshot.writer:
                    survive.save({"model": averaged.module.state_dict(), **best}, f"{name}_best.pt")
            mean = loss_sum.item() / (step - (rows[-1]["step"] if rows else 0))
            loss_sum.zero_()
            rows.append({"step": step, "training_loss": mean, **metrics})
            if snapshot.writer:
                write_log(rows, f"{name}.csv")
            log(
                f"step {step:4d}/{args.total_steps} | training loss {mean:.4f} | validation loss"
                f" {metrics['loss']:.4f} | best after step {best['step']}"
            )
            clock, reported = time.perf_counter(), step
            if args.patience and step - best["step"] >= args.patience * validate_every:  # on all
                log(f"stopped early: no better validation since step {best['step']}")
                break
        if step >= args.total_steps:
            break

        step += 1
        micro_batches = [next(loader) for _ in range(args.accumulate)]
        survive.seed(SEED, step, rank)  # other dropout masks in each step and on each rank
        model.train()  # in case you validate this model, and not its average
        loss = add_up_gradients(model, micro_batches, step, args)
        dist.all_reduce(loss)  # the sum over the ranks: what is saved must be alike on all
        loss_sum += loss
        # An inf or nan must not reach the weights: recipes/clip_and_scale.py.
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP, error_if_nonfinite=True)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        averaged.update_parameters(model.module)
        scheduler.step()
        optimizer.zero_grad()

        if step % REPORT_EVERY == 0 or step == args.total_steps:
            loss = loss.item()  # waits for the GPU: the clock must count finished work
            speed = (step - reported) * args.batch_size / (time.perf_counter() - clock)
            log(
                f"step {step:4d}/{args.total_steps} | loss {loss:.4f} | rate {rate:.2e}"
                f" | norm {norm.item():5.2f} | {speed:5.0f} examples/s"
            )
            clock, reported = time.perf_counter(), step
        due = step % validate_every == 0 or step == args.total_steps
        leaving = asked_to_leave() and step < args.total_steps  # has any rank got SIGTERM?
        if due or leaving or step % args.save_every == 0:
            snapshot.save(step=step, due=due, loss_sum=loss_sum.item(), best=best, rows=rows)
            log(f"step {step:4d}/{args.total_steps} | saved in {args.snapshot_path}")
        if leaving:
            log(f"leaving (SIGTERM) after step {step}")
            return False

    sha256 = survive.compare(model=model.module, averaged=averaged)
    log(f"{world_size} replicas are identical, sha256 {sha256}")
    return True


def add_up_gradients(model, micro_batches, step, args):
    """Set the gradients to those of the whole batch; return this rank's part of its mean loss."""
    total = 0
    for i, (batch, size) in enumerate(micro_batches):
        # no_sync: only the last micro-batch exchanges gradients. DDP decides so in its forward.
        with model.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
            loss = mean_loss(model, batch, step)
            weight = size / args.batch_size  # sizes may differ by one example
            # DDP takes the mean over the ranks; times their number, that is the sum.
            (loss * weight * dist.get_world_size()).backward()
        total += loss.detach() * weight  # loss.item() would make the CPU wait for the GPU
    return total


def mean_loss(model, batch, step):
    """Your loss: the mean over the batch of how badly each next character is predicted.

    batch: what the loader makes of your items. Call model(...), not model.module or a method: DDP
    averages what its forward has seen. A mean over tokens, class weights, Dice: see README.md.
    """
    device = next(model.parameters()).device
    windows = batch[0].to(device)
    # What all ranks must draw alike, a mixup's share, say, follows from the step alone:
    # share = numpy.random.default_rng(step).beta(0.2, 0.2) if model.training else 1.0
    logits = model(windows[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model, validation_set):
    """Your metrics, by name, the same on all ranks. Every example counts once over all ranks."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    # The shares may differ by one, so no rank may wait for another: this is a model without DDP.
    places = range(dist.get_rank(), len(validation_set), dist.get_world_size())
    lists = [[(0, place, place) for place in places[i : i + 64]] for i in range(0, len(places), 64)]
    for batch, size in loader_of(validation_set, lists):
        total += mean_loss(model, batch, 0) * size
    dist.all_reduce(total)  # sum, then divide: a mean of means is wrong when shares differ
    return {"loss": total.item() / len(validation_set)}


def load_sets():
    """Your data. Return (training set, validation set, their name): windows of a text.

    Any Datasets with len() and []. All ranks call this at once: so download and unpack before, and
    sort the files that you list. Only the training set should have an augmentation.
    """
    # The texts of all topics of help(), as in help("if"): every Python has them.
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    windows = characters.long().unfold(0, CONTEXT + 1, CONTEXT)  # int64 (N, CONTEXT + 1)
    sets = TensorDataset(windows[:-VALIDATION]), TensorDataset(windows[-VALIDATION:])
    return *sets, f"windows of {CONTEXT} characters, Python's help"


def share_of_steps(steps, count, args):
    """Yield this rank's micro-batches of these steps. A step is the same on any number of ranks."""
    for step in steps:
        epoch, number = divmod(step, count // args.batch_size)  # the rest of an epoch is left out
        places = range(number * args.batch_size, (number + 1) * args.batch_size)
        mine, order = places[dist.get_rank() :: dist.get_world_size()], order_of(epoch, count)
        for i in range(args.accumulate):  # their sizes may differ by one
            yield [(epoch, place, int(order[place])) for place in mine[i :: args.accumulate]]


@functools.lru_cache(maxsize=1)
def order_of(epoch, count):
    """Your sampler: the items of an epoch, alike on all ranks, so drawn from seed and epoch."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    # Weighted, by a global: return torch.multinomial(weights, count, True, generator=generator)
    return torch.randperm(count, generator=generator)


class SeededItems(Dataset):
    """Your Dataset, asked for (epoch, place, item): what it draws follows from epoch and place.

    By its place, not by its number: an item that comes twice in an epoch is augmented in two ways.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, which):
        epoch, place, item = which
        survive.seed(SEED, epoch, place, "item")
        return self.dataset[item]


def loader_of(dataset, lists):
    """Return a DataLoader that yields (batch, its size) for each list of (epoch, place, item)."""
    # fork: other ways to start import torch anew in each worker. timeout: a batch may get lost.
    return DataLoader(
        SeededItems(dataset),
        batch_sampler=lists,
        num_workers=WORKERS,
        timeout=120 * bool(WORKERS),
        collate_fn=lambda items: (default_collate(items), len(items)),  # or your collate_fn
        worker_init_fn=survive.obey_rank,
        multiprocessing_context="fork" if WORKERS else None,
    )


class GPT(nn.Module):
    """Your model. This is a small GPT: characters, int64 (N, T), to logits (N, T, VOCABULARY)."""

    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH,
                HEADS,
                4 * WIDTH,
                DROPOUT,
                nn.functional.gelu,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, text):
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.characters(text) + self.positions(positions))
        future = nn.Transformer.generate_square_subsequent_mask(len(positions), text.device)
        for block in self.blocks:
            x = block(x, src_mask=future, is_causal=True)
        return self.head(x)


def warm_up_and_cosine(steps_done, total_steps):
    """Return the learning rate of the next step, as a fraction of LEARNING_RATE."""
    if steps_done < WARM_UP_STEPS:
        return (steps_done + 1) / WARM_UP_STEPS
    progress = (steps_done - WARM_UP_STEPS) / max(1, total_steps - WARM_UP_STEPS)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def write_log(rows, path):
    """Write all rows anew: they are in the snapshot, so that no row is lost or stands twice."""
    columns = list(dict.fromkeys(name for row in rows for name in row))  # a metric may be new
    table = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    survive.save("".join(",".join(map(str, row)) + "\n" for row in table).encode(), path)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = survive.stop  # one line, not one of each rank
    parser.add_argument("total_steps", type=int, nargs="?", default=60, help="60 by default")
    parser.add_argument("save_every", type=int, nargs="?", default=20, help="steps; 20 by default")
    parser.add_argument("--epochs", type=int, help="in place of TOTAL_STEPS; validated after each")
    parser.add_argument("--patience", type=int, help="validations without a better loss; then stop")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step, all ranks")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches on each rank")
    parser.add_argument("--snapshot-path", default="train.pt")
    parser.add_argument("--timeout", type=int, default=600, help="wait for others, in seconds")
    args = parser.parse_args()
    wrong = [name for name, value in vars(args).items() if isinstance(value, int) and value < 1]
    if wrong:
        survive.stop(f"{', '.join(wrong)} must be 1 or more")
    # So no two jobs share NAME_best.pt or NAME.csv, which the lock of NAME.pt guards, too.
    if not args.snapshot_path.endswith(".pt") or args.snapshot_path.endswith("_best.pt"):
        survive.stop(f"--snapshot-path {args.snapshot_path} must end in .pt, and not in _best.pt")
    return args


if __name__ == "__main__":
    main()
