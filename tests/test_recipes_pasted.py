"""recipes/: the first lines of each, pasted as they stand into a plain script, are right.

Each recipe has such a script here. The answer comes in the place of PASTE; or its parts, between
which it has a comment or an empty line, in those of PASTE1, PASTE2, ... The lines below YOURS are
the reader's own: they come in the place of "..." in the answer, or behind its last line. The script
also gets the recipe's imports, and those functions, classes and constants of the recipe that it
uses and does not define itself. It fails unless the answer has done what the recipe is for.
"""

import ast
import re
import textwrap

import pytest
from support import ROOT, fork_ranks

RECIPES = {path.stem: path.read_text() for path in sorted(ROOT.glob("recipes/*.py"))}
# The mesh of tensor_parallel has two columns; two machines of two ranks make four;
# dry_run_1024_ranks is one process.
SIZES = {"tensor_parallel": {(2, 3): (4,)}, "shard_inside_machines": {(2,): (4,), (2, 3): (3, 4)},
         "dry_run_1024_ranks": {(2,): (1,), (2, 3): (1,)}}  # fmt: skip

PLAIN = """
import copy, io, math, multiprocessing, os, sys, traceback
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(self.up(x).tanh())
class Model(nn.Module):
    def __init__(self, width=8, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.blocks = nn.Linear(width, width), nn.Sequential(Block(width), Block(width))
    def forward(self, x):
        return self.blocks(self.first(x))
def flat(tensors):
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole])
def weights(model):
    return flat(model.parameters())
def gradient(model):
    return flat(p.grad for p in model.parameters())
def gathered(value):
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values
def check(found, expected, tolerance=1e-5):
    off = ((found - expected).norm() / expected.norm()).item()
    assert off < tolerance, f"off by {off:.1e}"
def check_on_3_as_on_2_ranks(found):
    if world_size == 2 and rank == 0:
        torch.save(found, "found on 2")
    elif world_size == 3:
        expected = torch.load("found on 2")
        assert found == expected, f"on 3 ranks {found}, on 2 ranks {expected}"
def take_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last, device, mean_loss = world_size - 1, torch.device("cpu"), mse_loss
if world_size > 1:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
torch.manual_seed(0)
all_inputs, all_targets = torch.randn(2, 24, 8)  # of all ranks; 2, 3 and 4 divide them
inputs, targets = all_inputs[rank::world_size], all_targets[rank::world_size]
plain = Model()  # for what one process computes
mse_loss(plain(all_inputs), all_targets).backward()
"""

SCRIPTS = """
# accumulate
sent, model = [], DDP(Model())
def hook(state, bucket):
    sent.append(bucket.buffer().nbytes)
    return default_hooks.allreduce_hook(state, bucket)
model.register_comm_hook(None, hook)
micro_batches = list(zip(inputs.chunk(4), targets.chunk(4)))
PASTE
check(gradient(model), gradient(plain))
assert sum(sent) == gradient(plain).nbytes, f"{sent} bytes sent"

# agree
PASTE1
PASTE2
for epoch in range(1, 8):
    dist.all_reduce(torch.ones(1))  # your training
    no_progress = rank == last and epoch >= 3
    deadline = 0 if rank == 0 and epoch >= 5 else math.inf
    PASTE3
assert gathered(epoch) == [3] * world_size, f"left after epochs {gathered(epoch)}"

# checkpoint_activations
mesh, model, calls = init_device_mesh("cpu", (world_size,)), Model(), []
for block in model.blocks:
    block.up.register_forward_hook(lambda *_: calls.append(1))
PASTE
for _ in range(2):
    optimizer.zero_grad()
    mse_loss(model(inputs), targets).backward()
check(gradient(model), gradient(plain))
assert len(calls) == 2 * 2 * 2, f"{len(calls)} forward passes of 2 blocks in 2 steps"
assert set(model.state_dict()) == set(plain.state_dict())

# checkpoint_any_world_size
def new(seed, rate):
    model = Model(seed=seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 + n)
def resume(model, optimizer, scheduler):
    PASTE2
    moments = flat(optimizer.state[p]["exp_avg_sq"] for p in model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    scheduler.step()
    rates = rate, *scheduler.get_last_lr()
    return step, rates, min(moments.tolist()) > 0, weights(model).tolist()
root = "saves"
if newest(root):  # 3 ranks load what 2 have saved
    assert resume(*new(2, 1)) == torch.load("expected"), "loaded something else"
(model, optimizer, scheduler), step = new(0, 0.1), 3
mse_loss(model(inputs), targets).backward()
optimizer.step()
scheduler.step()
before = weights(model)
PASTE1
found = resume(*new(2, 1))
assert found == (3, (0.2, 0.1 * 3), True, before.tolist()), "loaded something else"
torch.save(found, "expected") if rank == 0 else None

# clip_and_scale
model, MAX_NORM = DDP(Model()), 0.05
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1), torch.amp.GradScaler("cpu")
steps = [list(zip(rows.chunk(4), targets.chunk(4)))  # the first step is to be skipped
         for rows in (inputs * (math.inf if rank == last else 1), inputs)]
for micro_batches in steps:
    PASTE
nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
check(weights(Model()) - weights(model), gradient(plain), 0.01)
assert scaler.get_scale() == 32768

# contrastive
class Encoder(Model):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.0))
    def forward(self, *views):
        return *(normalize(super(Encoder, self).forward(x), dim=1) for x in views), self.scale * 1
views, own = (all_inputs, all_inputs + all_targets / 10), 24 // world_size
plain, model, pairs = Encoder(), DDP(Encoder()), torch.arange(24)
a, b, scale = plain(*views)
(cross_entropy(scale * a @ b.T, pairs) + cross_entropy(scale * b @ a.T, pairs)).backward()
a, b, scale = model(*(x[rank * own : (rank + 1) * own] for x in views))
PASTE
loss.backward()
check(gradient(model), gradient(plain))
check(model.module.scale.grad, plain.scale.grad)

# dry_run_1024_ranks
def YourModel():
    return Model(width=1024)
def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
def train_one_step(model):
    model(torch.randn(16, 1024)).square().mean().backward()
PASTE
with torch.device("meta"):
    whole, block = (4 * weights(net).numel() for net in (YourModel(), Block(1024)))
kept, sent = sum(p.to_local().nbytes for p in model.parameters()), step.bytes["reduce-scatter"]
assert kept == whole / 1024 and sent == whole, f"{kept} and {sent} of {whole}"
assert step.largest["all-gather"] == block, step.largest

# evaluate_with_shards
def shard(net):
    mesh = init_device_mesh("cpu", (world_size,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
def loss_of_each_row(net, rows):
    assert not net.training
    return net(rows).square().mean(dim=1).bfloat16()
def is_going(text):
    return len(text) < 5 + 3 * rank
def add_token(text, outputs):
    return torch.cat([text, outputs[-1:].sin()])
model, flags, text = Model(), dist.new_group(backend="gloo"), torch.ones(1, 8) * rank
shard(model)
all_batches = torch.randn(world_size + 3, 257, 8)
batches, expected = list(all_batches[rank::world_size]), text  # unequal numbers of batches
PASTE1
whole = [name for name, p in model.named_parameters() if not hasattr(p, "full_tensor")]
assert model.training and not whole, f"still whole: {whole}"
PASTE2
plain.eval()
with torch.no_grad():
    check(mean, torch.cat([loss_of_each_row(plain, b) for b in all_batches]).double().mean())
    while is_going(expected):
        expected = add_token(expected, plain(expected))
check(text, expected)

# go_on_without
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
me, meeting, members, step, net = rank, 1, list(range(world_size)), 0, Model()
optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, plain))
model = DDP(net)
while step < 5:
    own, fault = slice(members.index(me), None, len(members)), None
    optimizer.zero_grad()
    try:
        mse_loss(model(all_inputs[own]), all_targets[own]).backward()
    except RuntimeError:
        fault = traceback.format_exc()
    if step == 2 and me == last:
        print("done on rank", rank, flush=True)
        os._exit(0)
    # As if rank 0 had got the gradients of all before the death, and the others had not.
    if fault or meeting == 1 and step == 2 and me:
        PASTE
        meeting += 1
        continue
    optimizer.step()
    step += 1
for _ in range(5):
    take_step(plain, expected, all_inputs, all_targets)
assert sorted(members) == list(range(last)) and dist.get_world_size() == last, members
check(weights(net), weights(plain))

# leave_in_time
dataset, saved = [*range(200)], []
def save(step):
    saved.append(step)
def train_epoch():
    for step, batch in enumerate(loader, 1):
        dist.all_reduce(torch.ones(1))  # your training
        if step == 30 and rank == last:
            workers = " ".join(str(worker.pid) for worker in multiprocessing.active_children())
            os.system(f"kill {os.getpid()} {workers}")  # as torchrun does
        PASTE2
        assert step < 40, "not asked to leave"
PASTE1
try:
    for epoch in range(2):
        train_epoch()
except SystemExit as end:
    status = end.code
assert (saved, status) == ([30], 143), f"saved after {saved}, exit status {status}"

# metrics
def auc(scores, labels):
    return (scores[labels == 1][:, None] > scores[labels == 0]).double().mean().item()
all_scores, all_labels = torch.rand(101) + torch.arange(101) / 200, torch.arange(101) ** 2 % 3
sizes = [60, *(len(part) for part in torch.arange(41).tensor_split(last))]
scores, labels = all_scores.split(sizes)[rank], all_labels.split(sizes)[rank]
PASTE
assert value == auc(all_scores, all_labels), f"{value} for {auc(all_scores, all_labels)}"

# pretrained_to_shards
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
class Shifted(Block):
    def __init__(self, width, mask):
        super().__init__(width)
        self.register_buffer("mean", torch.randn(width))  # in the file
        self.register_buffer("shift", torch.arange(width) / 7, persistent=False)
        self.register_buffer("mask", mask, persistent=False)  # one for all blocks
    def forward(self, x):
        return super().forward(x - self.mean) * self.mask + self.shift
class YourModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(9, 7), nn.Linear(7, 9, bias=False)
        self.last.weight = self.first.weight  # tied
        mask = torch.arange(7) % 2 + 1
        self.blocks = nn.ModuleList(Shifted(7, mask) for _ in range(2))
        if mask.is_meta:  # as in checkpoint_activations
            for i, block in enumerate(self.blocks):
                self.blocks[i] = checkpoint_wrapper(block)
    def forward(self, words):
        x = self.first(words)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
plain, words, path = YourModel(), torch.arange(9), f"pretrained {world_size}.pt"
plain.blocks[0].up.weight.data = plain.blocks[0].up.weight.data.t().contiguous().t()
if rank == 0:
    torch.save(plain.state_dict(), path)
outputs = gathered(plain(words).tolist())[0]
mesh = init_device_mesh("cpu", (world_size,))
torch.manual_seed(5)
PASTE
check(model(words), torch.tensor(outputs), 1e-6)
assert model.last.weight is model.first.weight, "no longer tied"
assert len(set(gathered(torch.rand(()).item()))) == 1, "other random numbers on rank 0"

# randomness
class Crops(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.tensor([index, torch.randint(10**12, ())])
dataset, batch_size, epochs, runs = Crops(), 2, 3, []
sampler = DistributedSampler(dataset, world_size, rank)
for first_epoch in (0, 2):
    seen = {}
    PASTE
    runs.append(gathered(seen))
whole, resumed = runs
drawn = [value for seen in whole for value in seen.values()]
assert len({mask for mask, _, _ in drawn}) == len(drawn) == 3 * 6, "equal masks"
assert len({crop for _, _, crops in drawn for crop in crops}) == 3 * 12, "equal crops"
items = [[seen[key][1] for key in seen if key[0] == epoch] for seen in whole for epoch in range(3)]
assert items[0] != items[1] != items[2], "the same order in each epoch"
assert resumed == [{k: v for k, v in seen.items() if k[0] == 2} for seen in whole], "not resumed"
YOURS
mask = tuple((dropout(torch.ones(200)) > 0).tolist())
seen[epoch, step] = mask, *map(tuple, batch.T.tolist())

# resume_mid_epoch
class Drawn(Dataset):
    def __len__(self):
        return 26
    def __getitem__(self, index):
        return torch.stack([torch.tensor(index), torch.randint(10**12, ())])
dataset, batch_size, total_steps, runs = Drawn(), 6, 12, []
for snapshot in ({"step": 0}, {"step": 6}):
    seen = {}
    PASTE
    runs.append(seen)
whole, resumed = runs
assert resumed == {step: seen for step, seen in whole.items() if step >= 6}, "not resumed"
for first in (0, 4, 8):
    items = [item for step in range(first, first + 4) for item, _ in whole[step]]
    assert len(items) == len(set(items)) == 24, f"items twice, or never: {items}"
check_on_3_as_on_2_ranks(whole)
YOURS
seen[step] = sorted(sum(gathered(batch.tolist()), []))

# send_fewer_bytes
sent, all_reduce, size = [], dist.all_reduce, 64 * 64
def counted(tensor, *args, **kwargs):
    sent.append(tensor.nbytes)
    return all_reduce(tensor, *args, **kwargs)
dist.all_reduce = counted
rows = torch.randn(world_size, 8, 64)
plain = nn.Linear(64, 64, bias=False)
models = [DDP(copy.deepcopy(plain)) for _ in range(2)]
plain(rows.flatten(0, 1)).pow(3).mean().backward()
model = models[0]
PASTE1
model(rows[rank]).pow(3).mean().backward()
check(gradient(model), gradient(plain), 0.01)
assert sum(sent) == 2 * size, f"{sum(sent)} bytes"
model, mean = models[1], 0
PASTE2
state.start_powerSGD_iter = 2  # in place of 1000
for _ in range(100):
    sent.clear()
    model.zero_grad()
    model(rows[rank]).pow(3).mean().backward()
    mean += gradient(model) / 100
assert sum(sent) == 4 * 2 * 4 * 64, f"{sum(sent)} bytes"
check(mean, gradient(plain), 0.2)

# shard_inside_machines
os.environ["LOCAL_WORLD_SIZE"] = str(2 if world_size == 4 else world_size)  # two machines, or one
model = Model()
PASTE
mse_loss(model(inputs), targets).backward()
check(gradient(model), gradient(plain))
kept = sum(p.to_local().numel() for p in model.parameters())
whole = sum(p.numel() for p in plain.parameters())
assert kept == whole // 2 or world_size == 3, f"{kept} of {whole} weights on a rank"

# shard_with_fsdp2
model, expected = Model(), torch.optim.AdamW(plain.parameters())
PASTE
for _ in range(3):
    take_step(plain, expected, all_inputs, all_targets)
    take_step(model, optimizer, inputs, targets)
start, held = weights(Model()), sum(p.to_local().nbytes for p in model.parameters())
check(weights(model) - start, weights(plain) - start, 1e-3)
assert held < 1.2 * start.nbytes / world_size, f"{held} bytes on this rank"
assert all(hasattr(block, "unshard") for block in model.blocks), "all gathered at once"

# stream
class Lines(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
    def samples(self):
        yield from range(50)
    PASTE
for workers in (0, 2):
    loader = DataLoader(Lines(rank, world_size), 4, num_workers=workers)
    delivered = sum(gathered(torch.cat(list(loader)).tolist()), [])
    assert sorted(delivered) == list(range(50)), f"{len(delivered)} delivered"

# tensor_parallel
model = Model()
PASTE
own = slice(mesh["dp"].get_local_rank(), None, mesh["dp"].size())
mse_loss(model(all_inputs[own]), all_targets[own]).backward()
for net in (plain, model):
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
check(gradient(model), gradient(plain))
held = sum(p.to_local().nbytes for p in model.parameters())
assert held < 1.05 * gradient(plain).nbytes / world_size, f"{held} bytes on this rank"

# train_by_steps
dataset, batch_size, batches, total_steps, seen, ends = [*range(24)], 6, "6 of 24", 6, {}, []
for path, killed in (("whole", None), ("killed", 5), ("killed", None)):
    path, model = f"{path}{world_size}.pt", nn.Sequential(nn.Dropout(), Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    PASTE
    ends.append(weights(model))
    dist.barrier()
assert torch.equal(ends[0], ends[2]), "resumed, it ends with other weights"
assert len({mask for masks, _ in seen.values() for mask in masks}) == 6 * world_size, "equal masks"
items = [items for _, items in seen.values()]
assert sorted(sum(items[:4], [])) == list(range(24)), f"items twice, or never: {items}"
check_on_3_as_on_2_ranks(items)
YOURS
if step == killed:
    break
mask = (dropout(torch.ones(200)) > 0).tolist()
now = [*map(tuple, gathered(mask))], sorted(sum(gathered(batch.tolist()), []))
assert seen.setdefault(step, now) == now, "repeated, the step is another one"
mse_loss(model(all_inputs[batch]), all_targets[batch]).backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
optimizer.step()
scheduler.step()
optimizer.zero_grad()

# unequal_micro_batches
plain, batches = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)), []
model = DDP(copy.deepcopy(plain))
for number in range(3 * world_size):
    batches.append(torch.randint(10, (2, 2, 3 + number**2)))
    batches[-1][1, 1, number + 1:] = -100
scores = torch.cat([plain(inputs).flatten(0, 1) for inputs, _ in batches])
cross_entropy(scores, torch.cat([targets.flatten() for _, targets in batches])).backward()
micro_batches = batches[rank::world_size]
PASTE
check(gradient(model), gradient(plain))

# weights_to_serve
model, path, average = DDP(Model()), f"{world_size}.pt", None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = list(zip(inputs.chunk(4), targets.chunk(4)))
PASTE
dist.barrier()
plain.load_state_dict(torch.load(path, map_location="cpu"))
check(weights(plain), average, 1e-6)
YOURS
take_step(model, optimizer, inputs, targets)
now = weights(model)
average = now if average is None else 0.999 * average + 0.001 * now

# who_is_missing
folder = f"records of {world_size}"
def train():
    for number in range(4):
        if rank == last and number == 3:
            raise KeyError("your loader")
        dist.all_reduce(torch.ones(4))
try:
    PASTE1
except (KeyError, RuntimeError):
    dist.destroy_process_group()  # so that the others need not wait for the timeout
if rank == 0:
    printed, sys.stdout = sys.stdout, io.StringIO()
    PASTE2
    said, sys.stdout = sys.stdout.getvalue(), printed
    assert "call 4 is the first that differs" in said and f"rank {last} made 3 calls" in said, said
    assert "rank 0 called all_reduce Float[4] in train (" in said, said
"""


def replaced(pattern, text, new):
    """Put new(match) in the place of each match, with the spaces in front of it."""
    return re.sub(rf"^( *){pattern}\n", lambda match: textwrap.indent(new(match), match[1]), text,
                  flags=re.MULTILINE)  # fmt: skip


def names(tree, context):
    return {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def defined(node):
    """The names to which a line of a file's top level gives a meaning."""
    return {node.name} if hasattr(node, "name") else names(node, ast.Store)


def pasted(name):
    """The reader's script with the answer in it: the indented lines below the recipe's question."""
    lines = re.match(r'r?""".+\n\n((?:(?:    .*)?\n)+)', RECIPES[name])[1]
    answer = textwrap.dedent(lines).rstrip() + "\n"
    [script] = re.findall(rf"^# {name}\n(.*?)(?=^# \w+$|\Z)", SCRIPTS, re.DOTALL | re.MULTILINE)
    script, _, yours = script.partition("YOURS\n")
    tree = ast.parse(PLAIN + replaced(r"PASTE\d?", script, lambda _: "pass\n"))
    own = names(tree, ast.Store).union(*(defined(node) for node in tree.body))
    if yours and not re.search(r"^ +\.\.\.", answer, re.MULTILINE):
        answer += re.match(" *", answer.splitlines()[-1])[0] + "...\n"
    answer = replaced(r"(?<= )\.\.\..*", answer, lambda _: yours)
    parts = re.split(r"(?:^(?:#.*|)\n)+", answer, flags=re.MULTILINE)
    marks = re.findall(r"^ *PASTE(\d?)$", script, re.MULTILINE)
    assert marks == [""] or len(marks) == len(parts), f"{len(parts)} parts for {len(marks)} places"
    parts.insert(0, answer)
    script = replaced(r"PASTE(\d?)", script, lambda mark: parts[int(mark[2] or 0)])

    recipe, needed, found = ast.parse(RECIPES[name]).body, names(ast.parse(script), ast.Load), []
    while more := [node for node in recipe
                   if node not in found and defined(node) & (needed - own)]:
        found += more
        needed = needed.union(*(names(node, ast.Load) for node in more))
    copied = [ast.unparse(node) for node in recipe
              if node in found or isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join([*copied, PLAIN, script, "print('done on rank', rank, flush=True)\n"])


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 3), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_the_answer_pasted_into_a_plain_script(tmp_path, name, sizes):
    (tmp_path / "plain.py").write_text(pasted(name))
    for world_size in SIZES.get(name, {}).get(sizes, sizes):
        result = fork_ranks(tmp_path / "plain.py", cwd=tmp_path, world_size=world_size)
        assert result.status == 0, result.output
        assert result.output.count("done on rank") == world_size


def test_an_error_of_your_own_does_not_loop(tmp_path):
    """The answer of go_on_without meets again and again, unless it sees that nobody is missing."""
    script, loss = pasted("go_on_without"), "mse_loss(model(all_inputs[own])"
    assert script.count(loss) == 1
    (tmp_path / "plain.py").write_text(script.replace(
        loss, 'assert meeting < 3, "it loops"\n        mse_loss(model(all_inputs[own, :4])'))
    result = fork_ranks(tmp_path / "plain.py", cwd=tmp_path)
    assert result.status == 1 and "it loops" not in result.output, result.output
    assert "mat1 and mat2 shapes cannot be multiplied" in result.output
