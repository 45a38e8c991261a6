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
    model.reshard()  # otherwise a part of the weights stays whole: see below
    dist.all_reduce(total)
    mean = total[0] / total[1]

    with torch.no_grad(), gathered_once(model):  # see below; if the whole model fits on a GPU
        while any_rank(going := is_going(text), flags):  # flags: dist.new_group(backend="gloo")
            logits = model(text)  # on all ranks
            if going:
                text = add_token(text, logits)

With fully_shard (FSDP2), each rank (process) holds a shard, its part of each weight. All ranks
gather a block's whole weights when it runs. So each forward pass is an exchange, also under
no_grad(), and every rank must take part in each one. A rank that has no batch left, or whose texts
have ended, goes on until all are done. With Hugging Face's generate(), pass synced_gpus=True.

    torchrun --standalone --nproc-per-node=2 recipes/evaluate_with_shards.py

    [rank 0/2] evaluation, each rank on its own:  timed out on rank 0
    [rank 0/2] evaluation, as many on all ranks:  loss 3.90462; of one process 3.90462
    [rank 0/2] weights that it leaves whole:      0 of 52; without reshard() 4 of 52
    [rank 0/2] generation, each rank on its own:  timed out on rank 0
    [rank 0/2] generation, until all are done:    16, 13 tokens on the ranks
    [rank 0/2] gathered for each token  65 gathers, 3263096 bytes; right tokens on 2 of 2 ranks
    [rank 0/2] gathered_once()           5 gathers,  214136 bytes; right tokens on 2 of 2 ranks
    [rank 0/2] features(): "got mixed torch.Tensor and DTensor"
    [rank 0/2] features() after a forward pass: works; registered: off by 0.0e+00
    [rank 0/2] a training step after no_grad(): works; after inference_mode():
    [rank 0/2]    "Inplace update to inference tensor outside InferenceMode"
    [rank 0/2] in shards: the loss of one process, and the tokens of the plain model, on every rank

The waiting is cut short by a timeout of 2 s, on the CPU. If you set none, it is 30 minutes with
Gloo. With NCCL it is 10, and you get no exception: its watchdog ends the process.

By default, what belongs to no block stays whole after a forward pass, until backward(). Until then,
model.parameters() has these weights whole: an optimizer that you make now never trains them. Nor
does the model see a change of their shards, such as an average that you put there. So call
model.reshard(). gathered_once() keeps the blocks, too, and frees all at the end. If you have set
reshard_after_forward yourself, set it again after it.

loss_of_each_row() returns only losses that count, say losses[targets != -100]. FSDP2 does not share
the statistics of BatchNorm, and each rank evaluates with its own: see loss_over_ranks().

A call of the model gathers the weights: model(inputs). After the first one, a call of a block does
so, too: model.blocks[0](x). Any other method, such as model.forward(inputs), finds shards where it
needs whole weights. (After a forward pass without reshard(), it can seem to work.) Call
register_fsdp_forward_method(model, "features") first; but not for a method of a block that its own
forward() calls: it frees the weights on return. Evaluate under no_grad(). If the first forward pass
of a model is under inference_mode(), its next training step fails (or that pass itself, in older
versions of torch).
"""

import argparse
import gc
import os
import sys
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold that
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

BLOCKS, WIDTH, HEADS = 4, 32, 2
VOCABULARY, WINDOW, END = 29, 24, 7  # END: the token that ends a text
TIMEOUT = timedelta(seconds=2)  # for the demonstration; yours is that of init_process_group()


def loss_over_ranks(model, batches):
    """Return the mean loss over the tokens of all ranks. Each has a batch, and some have more."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # otherwise each rank takes its own BatchNorm statistics
    device = batches[0].device
    most = torch.tensor(len(batches), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    total = torch.zeros(2, dtype=torch.float64, device=device)  # losses, tokens
    model.eval()
    with torch.no_grad():
        for i in range(most.item()):
            losses = token_losses(model, batches[min(i, len(batches) - 1)])  # on all ranks
            if i < len(batches):  # otherwise it was only for the others
                total[0] += losses.double().sum()
                total[1] += losses.numel()
    model.train()
    model.reshard()  # what belongs to no block; otherwise it stays whole until backward()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def generate(model, tokens, flags):
    """Add tokens to each row, up to END or until the window is full. All ranks call it."""
    model.eval()
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    with torch.no_grad():
        while any_rank(going := is_going(tokens, ended), flags):
            logits = model(tokens)  # on all ranks, also on those that are done
            if going:
                tokens, ended = add_token(tokens, ended, logits)
    model.train()
    return tokens


def any_rank(condition, group):
    """Return True on every rank if condition is true on any of them. All ranks must call it."""
    flag = torch.tensor(float(condition))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return flag.item() > 0


@contextmanager
def gathered_once(model):
    """Keep all blocks whole after their first forward pass in here. Each rank needs the memory.

    At the end, reshard_after_forward is as fully_shard() sets it by default.
    """
    model.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(module is not model, recurse=False)
                module.reshard()  # frees; otherwise a change of the shards goes unseen


def mean_loss_alone(model, batches):
    """Right for a plain model. In shards: a rank that has fewer batches leaves the others."""
    with torch.no_grad():
        return torch.cat([token_losses(model, batch) for batch in batches]).mean().item()


def generate_alone(model, tokens):
    """Right for a plain model. In shards: a rank that is done leaves the others."""
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    with torch.no_grad():
        while is_going(tokens, ended):
            tokens, ended = add_token(tokens, ended, model(tokens))
    return tokens


def main():
    parse_args()
    device, backend = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=60),
                            device_id=device if device.type != "cpu" else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    check_evaluation(device, mesh)
    check_generation(device, mesh)
    check_methods(device, mesh)
    log("in shards: the loss of one process, and the tokens of the plain model, on every rank")
    gc.collect()  # otherwise what is left of the model can abort the process at its exit
    dist.destroy_process_group()


def check_evaluation(device, mesh):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)  # all ranks make the same batches
    all_batches = torch.randint(VOCABULARY, (world_size + 1, 3, WINDOW)).to(device)
    batches = [*all_batches[rank::world_size]]  # one on each rank, one more on rank 0
    failed = ranks_that_fail(mean_loss_alone, [batch.cpu() for batch in batches])
    log(f"evaluation, each rank on its own:  timed out on {listed(failed)}")
    model = new_shards(device, mesh)
    for block in model.blocks:
        block.mean += rank  # as BatchNorm's: on each rank its own
    loss = loss_over_ranks(model, batches)
    expected = mean_loss_alone(new_gpt().to(device), all_batches)
    log(f"evaluation, as many on all ranks:  loss {loss:.5f}; of one process {expected:.5f}")
    if not (failed == [0] and abs(loss - expected) < 1e-5):
        raise RuntimeError(f"evaluation: {failed} timed out; loss {loss}, not {expected}")
    left = whole_weights(model)
    mean_loss_alone(model, batches[:1])  # one on each rank
    without, of = whole_weights(model), len([*model.parameters()])
    log(f"weights that it leaves whole:      {left} of {of}; without reshard() {without} of {of}")
    if left or not without:
        raise RuntimeError(f"after an evaluation, {left} weights are whole; without {without}")


def check_generation(device, mesh):
    rank, flags = dist.get_rank(), dist.new_group(backend="gloo")  # not to wait for a GPU
    torch.manual_seed(3 + rank)  # texts of its own on each rank; the longer fill the window sooner
    prompt = torch.randint(VOCABULARY, (2, 4 + 3 * (rank % 4))).to(device)
    expected = generate_alone(new_gpt().to(device), prompt)
    added = gathered(expected.shape[1] - prompt.shape[1])
    failed = ranks_that_fail(generate_alone, prompt.cpu())
    log(f"generation, each rank on its own:  timed out on {listed(failed)}")
    if not failed or failed != [r for r, tokens in enumerate(added) if tokens > min(added)]:
        raise RuntimeError(f"generation: {added} tokens, {failed} timed out")
    log(f"generation, until all are done:    {', '.join(map(str, added))} tokens on the ranks")
    for name, way, gathers in [
            ("gathered for each token", lambda model: nullcontext(), BLOCKS * max(added) + 1),
            ("gathered_once()", gathered_once, BLOCKS + 1)]:
        model = new_shards(device, mesh)
        found = count_gathers(model)
        with way(model):
            same = gathered(torch.equal(generate(model, prompt, flags), expected))
        log(f"{name:<23} {len(found):>3} gathers, {sum(found):>7} bytes; right tokens on"
            f" {sum(same)} of {len(same)} ranks")
        if not all(same) or len(found) != gathers:
            raise RuntimeError(f"{name}: {len(found)} gathers; the plain model's tokens: {same}")
    if whole_weights(model):
        raise RuntimeError("after gathered_once(), weights are still whole")
    found.clear()
    generate_alone(model, torch.zeros(1, WINDOW - 2, dtype=torch.long, device=device))  # 2 tokens
    if len(found) != 2 * BLOCKS + 1:
        raise RuntimeError("after gathered_once(), the model does not gather as before")


def check_methods(device, mesh):
    tokens = torch.arange(WINDOW, device=device)[None]
    expected = new_gpt().to(device).features(tokens)
    model = new_shards(device, mesh)
    outcomes = [outcome_of(lambda: model.features(tokens)), outcome_of(lambda: model(tokens)),
                outcome_of(lambda: model.features(tokens))]
    model = new_shards(device, mesh)
    register_fsdp_forward_method(model, "features")
    off = (model.features(tokens) - expected).abs().max().item()
    log(f'features(): "{outcomes[0]}"')
    log(f"features() after a forward pass: {outcomes[2]}; registered: off by {off:.1e}")
    if not (outcomes == ["got mixed torch.Tensor and DTensor", "works", "works"] and off < 1e-5):
        raise RuntimeError(f"features(): {outcomes}, registered: off by {off}")

    def evaluate_and_train(context):
        model = new_shards(device, mesh)
        with context():
            model(tokens)
        model(tokens).sum().backward()

    no_grad, inference = (outcome_of(lambda c=context: evaluate_and_train(c))
                          for context in (torch.no_grad, torch.inference_mode))
    log(f"a training step after no_grad(): {no_grad}; after inference_mode():")
    log(f'   "{inference}"')
    if no_grad != "works" or inference == "works":
        raise RuntimeError("inference_mode() does not do what this file says")


def ranks_that_fail(way, data):
    """Return the ranks on which an evaluation, with a model in shards, waits in vain."""
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    model = new_shards(torch.device("cpu"), DeviceMesh.from_group(group, "cpu"))
    error = outcome_of(lambda: way(model, data))  # "Timed out ...", or "Connection closed ..."
    failed = [rank for rank, outcome in enumerate(gathered(error)) if outcome != "works"]
    dist.destroy_process_group(group)  # a timeout has broken it
    return failed


def outcome_of(function):
    try:
        function()
        return "works"
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        return text.partition("default ")[2].partition(",")[0] or text.partition(" is not")[0]


def whole_weights(model):
    return sum(not isinstance(weight, DTensor) for weight in model.parameters())


def count_gathers(model):
    """Return a list to which each gather of this model adds its bytes."""
    found = []

    class Gather:  # what fully_shard() calls to gather
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            found.append(output_tensor.nbytes)
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
    return found


def listed(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def is_going(tokens, ended):
    return tokens.shape[1] < WINDOW and not ended.all()


def add_token(tokens, ended, logits):
    new = logits[:, -1].argmax(dim=1).masked_fill(ended, END)
    return torch.cat([tokens, new[:, None]], dim=1), ended | (new == END)


def token_losses(model, tokens):
    """Return the loss of each token but the first of each row."""
    return cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(),
                         reduction="none")


class GPTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))  # stands for BatchNorm's statistics

    def forward(self, x):
        parts = self.attend(self.norm1(x) - self.mean).unflatten(2, (3, HEADS, -1))
        heads = scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Your model."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def features(self, tokens):
        """A method other than forward()."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        return self.head(self.features(tokens))


def new_gpt():
    torch.manual_seed(1)  # the same weights on all ranks
    return TinyGPT()


def new_shards(device, mesh):
    model = new_gpt().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# ---- Helpers that are no part of the lesson ----


def gathered(value):
    """Return every rank's value, in rank order. All ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # any Python object, sent as a pickle
    return values


def pick_device(local_rank):
    """Return (device, backend): a GPU for each process and its backend, or the CPU and Gloo."""
    kind = torch.accelerator.current_accelerator()  # cuda (ROCm's name, too), xpu, mps, or None
    if count_gpus():
        torch.accelerator.set_device_index(local_rank)  # else each process takes memory on GPU 0
        return torch.device(kind.type, local_rank), dist.get_default_backend_for_device(kind)
    why = ""
    if torch.accelerator.is_available():
        why = f"no backend exchanges tensors of {kind.type}"
    elif torch.cuda.device_count():  # the driver counts GPUs, but torch has none
        why = f"torch cannot use its GPU: is the driver too old for CUDA {torch.version.cuda}?"
    if why and local_rank == 0:
        print(f"note: this machine takes the CPU: {why}\n", end="", flush=True)
    return torch.device("cpu"), "gloo"


def count_gpus():
    """Return how many GPUs, or other accelerators, the ranks on this machine can use."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    # For Apple's GPUs (mps) torch names Gloo, but Gloo exchanges tensors on the CPU alone.
    carried = kind and dist.Backend.default_device_backend_map.get(kind.type, "gloo") != "gloo"
    return torch.accelerator.device_count() if carried else 0


def log(message, every_rank=False):
    """Print a line with the rank in front: rank 0 speaks for all, or every rank for itself."""
    if every_rank or dist.get_rank() == 0:
        # The newline inside the text makes it one write: the lines of two ranks stay apart.
        print(f"[rank {dist.get_rank()}/{dist.get_world_size()}] {message}\n", end="", flush=True)


def stop(message, status=2):
    """End this process with one line instead of a traceback: for errors that the user can fix."""
    # All ranks mostly fail alike. Local rank 0 says it, and torchrun then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a rank that is still alive after this was the only one to fail
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse_args():
    """Stop if the way of starting cannot work."""
    gpus = count_gpus()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = stop
    parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        stop(f"start it with: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        stop(f"each process needs a GPU, and there are {gpus}: use --nproc-per-node={gpus}, or the"
             " CPU with CUDA_VISIBLE_DEVICES= in front")


if __name__ == "__main__":
    main()
