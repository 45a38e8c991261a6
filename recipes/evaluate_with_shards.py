"""How do I evaluate, or generate text, with a sharded model?

    most = torch.tensor(len(batches), device=device)  # a list; at least one batch on each rank
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    total = torch.zeros(2, dtype=torch.float64, device=device)  # losses, rows
    model.eval()
    with torch.no_grad():
        for i in range(most.item()):
            losses = loss_of_each_row(model, batches[min(i, len(batches) - 1)])  # on all ranks
            if i < len(batches):  # otherwise it was only for the others
                total[0] += losses.double().sum()  # bfloat16 would round a sum of 713 to 712
                total[1] += losses.numel()
    model.train()
    reshard(model)  # below; otherwise a part of the weights stays whole
    dist.all_reduce(total)
    mean = total[0] / total[1]

    model.eval()
    with torch.no_grad(), gathered_once(model):  # below; if the whole model fits on each GPU
        while is_going(text):
            text = add_token(text, model(text))
    model.train()

With fully_shard (FSDP2), each rank (process) holds a shard, its part of each weight. All ranks
gather a block's whole weights when it runs. So each forward pass is an exchange, also under
no_grad(), and every rank must take part in each one. A rank that has no batch left goes on until
all are done. In gathered_once(), nothing is left to exchange. If the whole model does not fit,
generate as in until_all_are_done() below; with Hugging Face's generate(), pass synced_gpus=True.

    torchrun --standalone --nproc-per-node=2 recipes/evaluate_with_shards.py

    [rank 0/2] evaluation, each rank on its own:   ranks [0] wait in vain
    [rank 0/2] evaluation, as many on all ranks:   loss 3.5339; of one process 3.5339
    [rank 0/2] weights that it leaves whole:       0 of 19; without reshard() 3 of 19
    [rank 0/2] generation, until all are done:     81 gathers; right tokens on 2 of 2 ranks
    [rank 0/2] generation, gathered_once():         5 gathers; right tokens on 2 of 2 ranks
    [rank 0/2] generation, and torch.compile:       5 gathers; right tokens on 2 of 2 ranks
    [rank 0/2] generation, and only blocks:         4 gathers; right tokens on 2 of 2 ranks
    [rank 0/2] in shards: the loss of one process, and the tokens of the plain model, on every rank

The waiting ends after 2 s here. By default, it is 30 minutes with Gloo. With NCCL it is 10, and you
get no exception: its watchdog ends the process.

By default, what belongs to no block stays whole after a forward pass, until backward(). ("Only
blocks" has no fully_shard(model): then the blocks stay whole.) Until then, model.parameters() has
these weights whole: an optimizer that you make now never trains them. Nor does the model see a
change of their shards, such as an average that you put there. So call reshard(model).
gathered_once() frees all at its end. If you have set reshard_after_forward yourself, set it again.

loss_of_each_row() returns only losses that count, say losses[targets != -100]. With BatchNorm,
broadcast rank 0's buffers first: FSDP2 does not. Call model(inputs): another method, forward() too,
does not gather what belongs to no block, unless you have called
register_fsdp_forward_method(model, "method"). Use no_grad(), not inference_mode(): after that, a
training step can fail.
"""

import gc
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold that
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu

# What fully_shard() calls to gather. Older versions of torch have another name for it.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
BLOCKS, WIDTH, VOCABULARY, WINDOW = 4, 32, 29, 24  # WINDOW: the length at which a text ends


def loss_over_ranks(model, batches, device):
    """Return the mean loss over the rows of all ranks. Each has a batch, and some have more."""
    most = torch.tensor(len(batches), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for i in range(most.item()):
            losses = loss_of_each_row(model, batches[min(i, len(batches) - 1)])  # on all ranks
            if i < len(batches):  # otherwise it was only for the others
                total[0] += losses.double().sum()
                total[1] += losses.numel()
    model.train()
    reshard(model)
    dist.all_reduce(total)
    mean = total[0] / total[1]
    return mean.item()


def reshard(model):
    """Free the weights that a forward pass without backward() has left whole."""
    for module in model.modules():  # model itself may be that of torch.compile, or not in shards
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered_once(model):
    """Keep the whole model on each rank. In here, no forward pass exchanges anything.

    model: the whole one. A part of a sharded model would stay whole in the training that follows.
    """
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    inner = {part for module in shards for part in module.modules() if part is not module}
    try:
        for module in shards:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()  # all ranks gather its weights
        yield
    finally:
        for module in shards:
            module.set_reshard_after_forward(module in inner, recurse=False)  # the default
            module.reshard()  # frees them


def generate_gathered_once(model, text, flags):
    """Right, if the whole model fits on each GPU. It needs no flags."""
    model.eval()
    with torch.no_grad(), gathered_once(model):
        while is_going(text):
            text = add_token(text, model(text))
    model.train()
    return text


def until_all_are_done(model, text, flags):
    """Right, also if the whole model does not fit. flags: a group with Gloo."""
    with torch.no_grad():
        while any_rank(going := is_going(text), flags):
            logits = model(text)  # on all ranks, also on those that are done
            if going:
                text = add_token(text, logits)
    return text


def any_rank(condition, group):
    """Return True on every rank if condition is true on any of them. All ranks must call it."""
    flag = torch.tensor(float(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag.item() > 0


def mean_loss_alone(model, batches):
    """Right for a plain model. In shards: a rank that has fewer batches leaves the others."""
    with torch.no_grad():
        return torch.cat([loss_of_each_row(model, batch) for batch in batches]).mean().item()


def generate_alone(model, text):
    """Right for a plain model. In shards: a rank that is done leaves the others."""
    with torch.no_grad():
        while is_going(text):
            text = add_token(text, model(text))
    return text


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_evaluation(mesh)
    check_generation(mesh)
    log("in shards: the loss of one process, and the tokens of the plain model, on every rank")
    gc.collect()  # otherwise what is left of the model can abort the process at its exit
    dist.destroy_process_group()


def check_evaluation(mesh):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)  # all ranks make the same batches
    all_batches = torch.randint(VOCABULARY, (world_size + 1, 3, WINDOW))
    batches = [*all_batches[rank::world_size]]  # one on each rank, one more on rank 0
    failed = ranks_that_fail(mean_loss_alone, batches)
    log(f"evaluation, each rank on its own:   ranks {failed} wait in vain")
    model = new_shards(mesh)
    loss = loss_over_ranks(model, batches, torch.device("cpu"))
    expected = mean_loss_alone(new_model(), all_batches)
    log(f"evaluation, as many on all ranks:   loss {loss:.4f}; of one process {expected:.4f}")
    if not (failed == [0] and abs(loss - expected) < 1e-5):
        raise RuntimeError(f"evaluation: {failed} wait in vain; loss {loss}, not {expected}")
    left = whole_weights(model)
    mean_loss_alone(model, batches[:1])  # one on each rank
    without, of = whole_weights(model), len([*model.parameters()])
    log(f"weights that it leaves whole:       {left} of {of}; without reshard() {without} of {of}")
    if left or not without:
        raise RuntimeError(f"after an evaluation, {left} weights are whole; without {without}")


def check_generation(mesh):
    rank, flags = dist.get_rank(), dist.new_group(backend="gloo")
    torch.manual_seed(3 + rank)  # texts of its own on each rank; the longer are done sooner
    prompt = torch.randint(VOCABULARY, (2, 4 + 3 * (rank % 4)))
    expected = generate_alone(new_model(), prompt)
    most = max(gathered(WINDOW - prompt.shape[1]))
    for name, way, build, right in [
        ("until all are done:", until_all_are_done, new_shards, BLOCKS * most + 1),
        ("gathered_once():", generate_gathered_once, new_shards, BLOCKS + 1),
        ("and torch.compile:", generate_gathered_once, compiled_shards, BLOCKS + 1),
        ("and only blocks:", generate_gathered_once, shards_of_blocks, BLOCKS),
    ]:
        model, untouched, later = build(mesh), build(mesh), []
        before = whole_weights(model)
        with mock.patch.object(dist, GATHER, wraps=getattr(dist, GATHER)) as gather:
            text = way(model, prompt, flags)
        same = gathered(torch.equal(text, expected))
        log(
            f"generation, {name:<22} {gather.call_count:>3} gathers; right tokens on {sum(same)} of"
            f" {len(same)} ranks"
        )
        if not all(same) or gather.call_count != right:
            raise RuntimeError(f"{name} {gather.call_count} gathers; right: {same}")
        left = whole_weights(model) - before if way is generate_gathered_once else 0
        reshard(model)
        for net in (model, untouched):
            with mock.patch.object(dist, GATHER, wraps=getattr(dist, GATHER)) as gather:
                generate_alone(net, expected[:, :-2])
            later.append(gather.call_count)
        if left or later[0] != later[1]:
            raise RuntimeError(
                f"after {name} {left} are whole; then {later[0]} gathers, not {later[1]}"
            )


def ranks_that_fail(way, data):
    """Return the ranks on which an evaluation, with a model in shards, waits in vain."""
    group, failed = dist.new_group(backend="gloo", timeout=timedelta(seconds=2)), False
    model = new_shards(DeviceMesh.from_group(group, "cpu"))
    try:
        way(model, data)
    except RuntimeError:  # the timeout
        failed = True
    outcomes = gathered(failed)
    dist.destroy_process_group(group)  # a timeout has broken it
    return [rank for rank, failed in enumerate(outcomes) if failed]


def whole_weights(model):
    return sum(not isinstance(weight, DTensor) for weight in model.parameters())


def is_going(text):
    return text.shape[1] < WINDOW


def add_token(text, logits):
    return torch.cat([text, logits[:, -1:].argmax(dim=2)], dim=1)


def loss_of_each_row(model, text):
    scores = model(text)[:, :-1].transpose(1, 2)
    return cross_entropy(scores, text[:, 1:], reduction="none").mean(dim=1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(gelu(self.up(x)))


class NextToken(nn.Module):
    """Your model. This one guesses a token from the one before."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Layer() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text):
        return self.head(self.blocks(self.embedding(text)))


def new_model():
    torch.manual_seed(1)  # the same weights on all ranks
    return NextToken()


def new_shards(mesh):
    return fully_shard(shards_of_blocks(mesh), mesh=mesh)


def compiled_shards(mesh):
    return torch.compile(new_shards(mesh), backend="eager")  # quick; leave it out for the default


def shards_of_blocks(mesh):
    model = new_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def log(message):
    """Print a line with the rank in front. Rank 0 speaks for all."""
    if dist.get_rank() == 0:
        print(f"[rank 0/{dist.get_world_size()}] {message}", flush=True)


if __name__ == "__main__":
    main()
