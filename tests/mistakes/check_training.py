"""One silent mistake at a time, in docs/many_processes.py, for test_check_training.py."""

import pathlib

BASE = "docs/many_processes.py"
LINES = (pathlib.Path(__file__).parents[2] / BASE).read_text().splitlines(True)


def line(begin):
    [found] = [text for text in LINES if text.strip().startswith(begin)]
    return found


SAMPLER, LOADER, WRAP, OPT = map(line, ("sampler = ", "loader = ", "model = DDP(", "optimizer = "))
DATA, EPOCHS, SET_EPOCH, LOOP = map(line, ("dataset = ", "for epoch", "sampler.set_e", "for x, y"))
MOVE, LOSS, ZERO, BACK = map(line, ("x, y = ", "loss = ", "optimizer.zero", "loss.backward"))
STEP, REDUCE, RANK_0, SAVE = map(
    line, ("optimizer.step", "dist.all_red", "if dist.get", "torch.save")
)
SUM_0 = line("loss_sum = ")
GROUP = line("dist.init_process_group")
GELU, SEED = "nn.GELU(),", "    torch.manual_seed(dist.get_rank())\n"
BOOK = """    class Book(nn.Module):  # a buffer of its own, which moves in each forward
        def __init__(self):
            super().__init__()
            self.register_buffer("book", torch.zeros(64))

        def forward(self, x):
            mean = x.detach().mean(0)
            self.book.mul_(0.9).add_(mean)
            return nn.functional.gelu(x)

"""
SNAPSHOT = (
    "snapshot = lambda: {'model': model.module.state_dict(), 'optimizer': optimizer.state_dict()}"
)
# A package's code: three calls above the step, as in a trainer.
TRAINER = "def fit(it): run(it)\\ndef run(it): take(it)\\ndef take(it): it.step()"
HALF = """    class Half(nn.Module):  # each forward leaves out one of its two layers
        def __init__(self):
            super().__init__()
            self.layers, self.calls = nn.ModuleList(nn.Linear(64, 64) for _ in "ab"), 0

        def forward(self, x):
            self.calls += 1
            return self.layers[(self.calls + dist.get_rank()) % 2](x)

"""
NORM, DROP = "nn.GELU(), nn.BatchNorm1d(64),", "nn.GELU(), nn.Dropout(0.1),"


def after(old, *new):
    pad = old[: len(old) - len(old.lstrip())]
    return {old: old + "".join(f"{pad}{text}\n" for text in new)}


def before(old, *new):
    return {old: after(old, *new)[old].removeprefix(old) + old}


def on_a_gpu(seconds):
    """Let a pretended GPU take so many seconds in forward and backward, and wait for it at last."""
    work = {GELU: f"pretended_gpu.Work({seconds}),", "range(5)": "range(7)"}
    return (
        before(GROUP, "from mistakes import pretended_gpu")
        | work
        | after(STEP, "pretended_gpu.wait()")
    )


def evaluate(arguments, mode="model.eval()"):
    return before(
        REDUCE,
        "tests = TensorDataset(inputs[:101])",
        mode,
        "with torch.no_grad():",
        f"    [model.module(x) for x, in DataLoader(tests, 17{arguments})]",
        "model.train()",
    )


def copy_of_the_model(who=""):
    return {
        WRAP: f"    import copy\n    mean = copy.deepcopy(model)\n{WRAP}",
        **after(
            STEP,
            "for its, new in zip(mean.parameters(), model.parameters()):",
            f"    {who}its.data.lerp_(new.data, 0.1)",
        ),
    }


def folder_of_files(folder="epochs/epoch_{epoch}", then=""):
    """Changes of 02: each epoch's state is in several files of one folder."""
    return {
        "def save(state, path):\n": "def save(state, path):\n"
        "    epoch = state['next_epoch'] - 1\n"
        f"    os.makedirs(f'{folder}')\n"
        "    for name in 'model', 'optimizer':\n"
        f"        torch.save(state[name], f'{folder}/{{name}}.pt')\n"
        f"    {then}\n"
        "    return\n",
        "def resume(path, model, optimizer):\n": "def resume(path, model, optimizer):\n"
        "    last = max(map(int, [name[6:] for name in os.listdir('epochs')]), default=0)\n"
        "    for name, part in ('model', model), ('optimizer', optimizer):\n"
        "        file = f'epochs/epoch_{last}/{name}.pt'\n"
        "        if last: part.load_state_dict(torch.load(file))\n"
        "    return last + 1\n",
        "    first_epoch = resume(": "    os.makedirs('epochs', exist_ok=True)\n"
        "    first_epoch = resume(",
    }


BY_RANK = "sampler=DistributedSampler(tests, shuffle=False)"
DEALT_OUT = """class DealtOut(torch.utils.data.BatchSampler):  # batches, to each rank in turn
    def __init__(self, sampler, size):
        super().__init__(sampler, size, False)

    def __len__(self):
        return -(-super().__len__() // dist.get_world_size())

    def __iter__(self):
        batches = [*super().__iter__()]
        batches += batches[: -len(batches) % dist.get_world_size()]
        return iter(batches[dist.get_rank() :: dist.get_world_size()])


"""
OWN_LOADER = """class Own:  # a loader of another library: no sampler, and torch's iterator
    num_workers, timeout, prefetch_factor, generator, worker_init_fn = 0, 0, None, None, None
    pin_memory, persistent_workers, in_order, drop_last = False, False, True, False
    _dataset_kind, _IterableDataset_len_called, _auto_collation = 1, None, False
    _index_sampler, collate_fn = range(99), staticmethod(lambda batch: batch)

    def __init__(self, batches):
        self.dataset = batches


"""
MAIN, END = line("def main"), "sampler=sampler)\n"
FSDP2 = {  # with a forward pass before the optimizer is made
    WRAP: "    from torch.distributed.fsdp import fully_shard\n"
    "    fully_shard(model, mesh=dist.init_device_mesh('cpu', (2,)))\n"
    "    model(inputs[:2])\n",
    SAVE: "",
}
ALIKE = "    numbers = torch.Generator().manual_seed(3)\n"
IN_TURN = {
    MAIN: DEALT_OUT + MAIN,
    SAMPLER: "    from torch.utils.data import RandomSampler\n" + ALIKE,
    SET_EPOCH: "",
    "batch_size=64 // dist.get_world_size(), sampler=sampler": (
        "batch_sampler=DealtOut(RandomSampler(dataset, generator=numbers), 32)"
    ),
}
RARE = """class Rare(nn.Module):  # step 77 of rank 1 does not use its layer
    def __init__(self):
        super().__init__()
        self.layer, self.steps = nn.Linear(64, 64), 0

    def forward(self, x):
        self.steps += 1
        left_out = self.steps == 77 and dist.get_rank() == 1
        return nn.functional.gelu(x if left_out else self.layer(x))


"""
NOISY = """class Noisy(TensorDataset):  # augments by random numbers of the process
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(10), y


"""
WINDOWS = """class Windows(TensorDataset):  # draws its items, whatever it is asked for
    def __getitem__(self, index):
        index = torch.randint(1024, ()).item()
        return super().__getitem__(index)


"""
SWAPPING = WINDOWS.replace("        index =", "        if torch.rand(()) < 0.1: index =")
EACH_ALL = {SAMPLER: SEED, SET_EPOCH: "", "sampler=sampler": "shuffle=True"}
CLASSES = """class Classes(TensorDataset):
    def __init__(self, *tensors):
        super().__init__(*tensors)
        names = ["cat", "dog", "owl"][:: 1 - 2 * dist.get_rank()]  # as from a set
        self.class_to_idx = {name: number for number, name in enumerate(names)}


"""
REPEATED = """class Repeated(DistributedSampler):  # each item comes three times, to be augmented
    def __init__(self, dataset):
        super().__init__(dataset)
        self.total_size = 3 * len(dataset)

    def __iter__(self):
        numbers = torch.Generator().manual_seed(self.epoch)
        items = torch.randperm(1024, generator=numbers).repeat_interleave(3)
        return iter(items[self.rank :: 2][: len(self)].tolist())


"""
STREAM = """class Stream(torch.utils.data.IterableDataset):  # this rank's part
    def __iter__(self):
        return iter(torch.randn(50, 10) + dist.get_rank())


"""
TURNING = """class Turning(TensorDataset):  # items could depend on the epoch
    def set_epoch(self, epoch):
        self.epoch = epoch


"""
PERSIST = {
    MAIN: TURNING + MAIN,
    "TensorDataset(inputs, inputs": "Turning(inputs, inputs",
    END: "sampler=sampler, num_workers=1, persistent_workers=True)\n",
    **after(SET_EPOCH, "dataset.set_epoch(epoch)"),
}
CUT = """    class Cut(nn.Module):
        def forward(self, x): return x.detach()

"""
SORTED = {
    DATA: "    kinds = torch.arange(1024) // 128\n" + DATA.replace("=True)", "=True), kinds"),
    SAMPLER: SAMPLER.replace("dataset)", "dataset, shuffle=False)"),
    LOOP: LOOP.replace("x, y", "x, y, _"),
}
NOISE = {MAIN: NOISY + MAIN, "TensorDataset(inputs, inputs": "Noisy(inputs, inputs"}

# Each rank plays a machine: its host has a name of its own.
TWO_MACHINES = before(
    GROUP,
    "host = 'Linux', 'node' + os.environ['RANK'], '', '', ''",
    "os.uname = lambda: os.uname_result(host)",
)
OWN_COPY = """    import pathlib, sys
    copy = pathlib.Path(f"{host[1]}/many_processes.py")
    copy.parent.mkdir()
    copy.write_text(f"# of {host[1]}")
    sys.modules["__main__"].__file__ = str(copy)
"""

CRASH = ["02_torchrun_elastic.py", 3, 1, "--batch-size", 512, "--crash-epoch", 2]
OWN_ORDER = {  # another sampler than a DistributedSampler, which nobody saves
    "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)": (
        "    class Shuffled(torch.utils.data.RandomSampler):\n"
        "        def __len__(self): return super().__len__() // world_size\n"
        "        def __iter__(self): return iter([*super().__iter__()][rank::world_size])\n"
        "    numbers = torch.Generator().manual_seed(SEED)\n"
        "    sampler = Shuffled(train_set, generator=numbers)"
    ),
    "sampler.set_epoch(epoch)": "pass",
}


def evaluate_share(*then, loader=BY_RANK):
    """Each rank sums over its share of the tests, after the sum of the training's losses."""
    return after(
        REDUCE,
        "tests, total, seen = TensorDataset(inputs[:100]), torch.zeros(()), torch.tensor(0)",
        "model.eval()",
        "with torch.no_grad():",
        f"    for x, in DataLoader(tests, 10, {loader}):",
        "        total += model.module(x).sum(); seen += len(x)",
        "model.train()",
        *then,
    )


def clip_half(clip="", at_end=""):
    """The gradients of half a batch are added up before the others, without an exchange."""
    return {
        ZERO: "",
        LOSS: "            half = len(x) // 2\n"
        "            optimizer.zero_grad()\n"
        "            with model.no_sync(): first = model(x[:half])\n"
        "            nn.functional.mse_loss(first, y[:half]).backward()\n"
        f"            {clip}\n" + LOSS.replace("model(x), y", "model(x[half:]), y[half:]"),
        STEP: f"            {at_end}\n{STEP}",
    }


OWN_EPOCHS = {  # ranks with unequal shares go on with their next pass
    **after(OPT, "s = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)"),
    SAMPLER: "    rows = torch.arange(1024).split([424, 600])[dist.get_rank()]\n"
    "    dataset = torch.utils.data.Subset(dataset, rows.tolist())\n",
    SET_EPOCH: "",
    "sampler=sampler": "shuffle=True",
    EPOCHS: "    def endless():\n"
    "        while True:\n"
    "            yield from loader\n"
    "            s.step()\n\n"
    "    batches = endless()\n" + EPOCHS,
    LOOP: LOOP.replace("loader", "(next(batches) for _ in range(16))"),
}
JOIN = {
    LOOP: "        from torch.distributed.algorithms.join import Join\n"
    "        with Join([model]):\n"
    "          for (x, y), _ in zip(loader, range(16 - dist.get_rank())):\n",
}
BY_HAND = {  # the gradients are averaged by the script
    WRAP: "",
    "model.module.state": "model.state",
    LOSS: LOSS.replace("y)", "y) / 2"),
    STEP: "            for each in model.parameters():\n"
    "                dist.all_reduce(each.grad)\n" + STEP,
}
ONE_VECTOR = BY_HAND | {
    STEP: "            gradients = [each.grad for each in model.parameters()]\n"
    "            whole = nn.utils.parameters_to_vector(gradients)\n"
    "            dist.all_reduce(whole)\n"
    "            nn.utils.vector_to_parameters(whole, gradients)\n" + STEP,
}
OWN_NORM = """            own = [each.grad for each in model.parameters()]
            norm = torch.stack([each.norm() for each in own]).norm()
            for each in own: each *= (0.1 / norm).clamp(max=1)
"""
DEEP = GELU + " *(nn.Linear(64, 64) for _ in range(8)),"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"


# {mistake: (changes, the rule, what is said, the text of the line that is named, plain pytest?)}
BOOTSTRAP = (
    "    sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=1024)\n"
)
# The optimizer has one tensor, and the model's weights and gradients are parts of it.
FLAT = {
    OPT: """    flat, gradient, end = torch.zeros(769), torch.zeros(769), 0
    for each in model.parameters():
        begin, end = end, end + each.numel()
        flat[begin:end] = each.detach().flatten()
        each.data = flat[begin:end].view_as(each)
        each.grad = gradient[begin:end].view_as(each)
    flat.grad = gradient
    optimizer = torch.optim.SGD([flat], lr=0.05, momentum=0.9)
"""
}
# Noises of a small set that all ranks have are added to each batch.
NOISES = before(
    EPOCHS,
    "noises = TensorDataset(torch.randn(24, 10))",
    "noise_loader = DataLoader(noises, batch_size=32, shuffle=True)",
) | after(MOVE, "x = x + 0.1 * next(iter(noise_loader))[0].repeat(2, 1)[: len(x)]")
MISTAKES = {
    "gradients on another model": (
        {
            EPOCHS: "    far = [each.detach().clone() for each in model.parameters()]\n"
            "    outer = torch.optim.SGD(far, 0.1)\n" + EPOCHS,
            STEP: STEP + "            outer.zero_grad()\n"
            "            for its, own in zip(far, model.parameters()):\n"
            "                own.grad = its - own.detach()\n"
            "            outer.step()\n",
        },
        "no_gradient_at_all",
        "found: none of the optimizer's 4 parameters .* ever has a gradient",
        None,
        False,
    ),
    "an ensemble whose answers meet": (  # each rank trains a member; only their answers meet
        {
            "torch.manual_seed(0)": "torch.manual_seed(dist.get_rank())",
            WRAP: "",
            "model.module.state": "model.state",
            **after(REDUCE, "dist.all_gather([torch.zeros(32) for _ in range(2)], torch.ones(32))"),
        },
        "weights_come_apart",
        "question: the weights of all ranks come apart at step 1 .* nothing is averaged in",
        STEP,
        False,
    ),
    "no DDP": (
        {WRAP: "", "model.module.state": "model.state"},
        "weights_come_apart",
        "found: .* come apart at step 1 .*no model is wrapped",
        STEP,
        True,
    ),
    "no DDP, and another group of all": (
        {WRAP: "    dist.new_group()\n", "model.module.state": "model.state"},
        "weights_come_apart",
        "found: .* come apart at step 1 .*no model is wrapped",
        STEP,
        False,
    ),
    "unfrozen": (
        {
            WRAP: "    model[0].requires_grad_(False)\n" + WRAP,
            **after(SET_EPOCH, "model.module[0].requires_grad_(epoch > 0)"),
        },
        "weights_come_apart",
        "found: .* come apart at step 17 .*: frozen when DDP",
        STEP,
        False,
    ),
    "no_sync": (
        {
            BACK: BACK[:8] + "    loss.backward()\n",
            LOSS: LOSS.replace("loss = ", "with model.no_sync(): loss = "),
        },
        "weights_come_apart",
        "found: .*no_sync",
        STEP,
        False,
    ),
    "bare model, once DDP is settled": (
        {
            OPT: OPT + "    model(inputs[:2].to(device)).sum().backward(); model.zero_grad()\n",
            LOSS: LOSS.replace("model(x)", "model.module(x)"),
            **before(STEP, "nn.utils.clip_grad_norm_(model.parameters(), 1)"),
        },
        "weights_come_apart",
        r"found: .* the bare model is trained",
        BACK,
        False,
    ),
    "bare model": (
        {LOSS: LOSS.replace("model(x)", "model.module(x)")},
        "weights_come_apart",
        "found: .* never called, but the bare model, at",
        "model.module(x)",
        False,
    ),
    "no_sync, and an evaluation that gathers": (  # as large a tensor as the largest parameter
        {
            LOSS: LOSS.replace("loss = ", "with model.no_sync(): loss = "),
            **before(
                REDUCE,
                "out = model.module(inputs[:640]).detach()",
                "dist.all_gather([torch.empty_like(out) for _ in range(2)], out)",
            ),
        },
        "weights_come_apart",
        "found: .*no_sync",
        STEP,
        False,
    ),
    "an optimizer of gathered copies": (
        FSDP2,
        "made_of_copies",
        "found: 4 of the optimizer's 4 parameters .* are copies",
        OPT,
        False,
    ),
    "a group that one rank alone makes": (
        before(EPOCHS, "if dist.get_rank() == 0: dist.new_group([0])"),
        "groups_differ",
        "question: the ranks make other groups, from number 1 on",
        None,
        False,
    ),
    "two forwards": (
        {BACK: "            more = model(x).mean()\n" + BACK + BACK.replace("loss", "more")},
        "weights_come_apart",
        "found: .*two forwards",
        STEP,
        False,
    ),
    "cast": (
        after(WRAP, "model.double(); model.float()"),
        "weights_come_apart",
        "found: .*cast",
        STEP,
        False,
    ),
    "a DDP object that is passed by": (  # others are called, twice before a backward()
        {
            **after(
                WRAP,
                "past = DDP(nn.Linear(64, 64, bias=False))",
                "own = torch.optim.Adam(past.parameters())",
            ),
            **after(
                STEP,
                "w = next(past.parameters())",
                "own.zero_grad()",
                "(model(x).mean() * model(x).mean() * 0 + w.sum() * x.mean()).backward()",
                "own.step()",
            ),
        },
        "weights_come_apart",
        "found: .*come apart .* is never called, but its parameters are trained",
        None,
        False,
    ),
    "loaded by one": (
        after(
            WRAP,
            "if dist.get_rank() == 0: model.module.load_state_dict({k: v + 1 "
            "for k, v in model.module.state_dict().items()})",
        ),
        "weights_come_apart",
        "found: .*rank 0 alone loads",
        STEP,
        False,
    ),
    "names": (
        {
            GELU: "nn.GELU(), nn.Sequential(OrderedDict([(n, nn.Linear(64, 64)) for n in 'abab'"
            "[dist.get_rank() :][:2]])),",
            DATA: "    from collections import OrderedDict\n" + DATA,
        },
        "models_are_not_alike",
        "found: the ranks' models are not alike",
        WRAP,
        False,
    ),  # as from a set
    "calls": (
        {REDUCE: REDUCE[:8] + "dist.all_reduce(loss_sum if dist.get_rank() else loss_sum.int())\n"},
        "calls_differ",
        "found: .*calls differ, from number 1",
        None,
        False,
    ),
    "same batches": (
        {SAMPLER: "", SET_EPOCH: "", "sampler=sampler": "shuffle=True"},
        "same_batches",
        "found: .*train on the same batches",
        LOSS,
        True,
    ),
    "the whole set": (
        EACH_ALL,
        "whole_set_on_each_rank",
        "found: each rank goes through all 1024",
        LOOP,
        False,
    ),
    "a flat tensor, whose gradient is lost": (
        FLAT | {ZERO: "            optimizer.zero_grad()\n"},
        "no_gradient_at_all",
        "found: none of the optimizer's 1 parameters .* but its gradients no longer are",
        "SGD([flat]",
        False,
    ),
    "rank 0 evaluates its share alone": (
        before(
            REDUCE,
            "if dist.get_rank() == 0:",
            "    share = DistributedSampler(dataset, shuffle=False)",
            "    with torch.no_grad():",
            "        [model.module(x) for x, _ in DataLoader(dataset, 64, sampler=share)]",
        ),
        "share_is_evaluated_alone",
        "question: the evaluation .* runs on rank 0 alone, over a share: 512 of 1024 items",
        "[model.module(x)",
        False,
    ),
    "items that all ranks draw alike": (
        {
            DATA: """    class Drawn(torch.utils.data.Dataset):
        def __len__(self):
            return 1024

        def __getitem__(self, place):
            x = torch.randn(10)
            return x, x.norm(dim=0, keepdim=True)

    dataset = Drawn()
"""
        },
        "same_batches",
        "found: all ranks train on the same batches: .*\n.* draw the same random items: seed",
        "loss = ",
        False,
    ),
    "noises of a second loader": (  # they may be meant, so it is a question
        NOISES,
        "whole_set_on_each_rank",
        "^question: each rank goes through all 24 .*\n.*unless they are added to another",
        "x = x + 0.1",
        False,
    ),
    "the whole set, and some items are others": (
        EACH_ALL | {MAIN: SWAPPING + MAIN, "= TensorDataset(inputs, in": "= Windows(inputs, in"},
        "whole_set_on_each_rank",
        "found: each rank goes through all 1024",
        LOOP,
        False,
    ),
    "one replica": (
        {"Sampler(dataset)": "Sampler(dataset, 1, 0)"},
        "sampler_told_wrong",
        "found: .*told a wrong number",
        LOOP,
        False,
    ),
    "no set_epoch": (
        {SET_EPOCH: ""},
        "same_order_in_each_epoch",
        "found: .*same order",
        LOOP,
        True,
    ),
    "classes are numbered in another order": (
        {MAIN: CLASSES + MAIN, "TensorDataset(inputs, inputs": "Classes(inputs, inputs"},
        "entries_in_another_order",
        "found: the dataset's 'class_to_idx' has the same entries in another order on each rank",
        LOOP,
        False,
    ),
    "another seed on each rank": (
        {
            SAMPLER: "    import random\n"
            "    seed = random.Random(dist.get_rank()).randint(1, 999)\n" + SAMPLER,
            SET_EPOCH: SET_EPOCH.replace("epoch)", "epoch + seed)", 1),
        },
        "ranks_begin_in_other_epochs",
        "found: the ranks begin in different epochs: .*\n.*set_epoch is given another number",
        None,
        False,
    ),
    "its own parts": (
        after(
            DATA, "torch.seed()", "dataset, _ = torch.utils.data.random_split(dataset, [896, 128])"
        ),
        "subsets_differ",
        "question: .*splits the set",
        None,
        False,
    ),
    "its own parts, of which the rest is tested on": (
        {
            **after(
                DATA,
                "torch.seed()",
                "dataset, rest = torch.utils.data.random_split(dataset, [896, 128])",
            ),
            **before(
                REDUCE,
                "with torch.no_grad():",
                "    [model.module(x) for x, _ in DataLoader(rest, 32)]",
            ),
        },
        "subsets_differ",
        "found: .*splits the set",
        None,
        False,
    ),
    "seeds": (
        {"Sampler(dataset)": "Sampler(dataset, seed=dist.get_rank())"},
        "shares_overlap",
        "found: the ranks' shares overlap",
        LOOP,
        False,
    ),
    "first batches": (
        {LOOP: "        for _ in range(16):\n            x, y = next(iter(loader))\n"},
        "first_batch_again",
        "found: each step begins a new pass",
        None,
        False,
    ),
    "unequal": (
        {
            "64 // dist.get_world_size()": "32 - 16 * dist.get_rank()",
            LOOP: LOOP.replace("in loader", "in [*loader][:16]"),
        },
        "batches_differ_in_size",
        "question: .*differ in size",
        None,
        False,
    ),
    "nothing": (
        {
            "sampler=sampler)": "sampler=sampler, drop_last=True)",
            "batch_size=64": ("batch_size=9999"),
        },
        "loader_is_empty",
        "found: .*yields no batch",
        LOOP,
        False,
    ),
    "eval mode": (
        {GELU: DROP, **before(REDUCE, "model.eval()"), EPOCHS: SEED + EPOCHS},
        "goes_on_in_eval_mode",
        "found: from forward 17 on, training goes on in eval",
        LOSS,
        False,
    ),
    "one seed": (
        {GELU: DROP},
        "same_numbers_on_ranks",
        "question: all ranks draw the same random",
        None,
        False,
    ),
    "noise of one seed": (
        after(MOVE, "x = x + torch.randn_like(x)"),
        "same_numbers_on_ranks",
        r"question: all ranks draw the same random numbers .* between a batch and",
        LOSS,
        False,
    ),
    "padded": (
        evaluate(", sampler=DistributedSampler(tests)"),
        "items_counted_twice",
        "question: .*counts 1 of 101 items twice",
        None,
        False,
    ),
    "a set of its own, shared out": (
        IN_TURN | {"torch.manual_seed(0)": "torch.manual_seed(dist.get_rank())"},
        "other_sets",
        "question: each rank has another dataset .*its sampler takes 1 of 2",
        LOOP,
        False,
    ),
    "dealt out in orders of their own": (
        IN_TURN | {SAMPLER: IN_TURN[SAMPLER].replace("seed(3)", "seed(dist.get_rank())")},
        "shares_overlap",
        "question: the ranks' shares overlap",
        LOOP,
        False,
    ),
    "augmented alike": (
        NOISE,
        "loaders_draw_alike",
        "question: the items of all ranks draw the same random numbers in .*torch",
        LOOP,
        False,
    ),
    "augmented alike in workers": (
        NOISE | {END: "sampler=sampler, num_workers=1)\n"},
        "workers_draw_alike",
        "question: the loader's workers have the same seeds on all ranks",
        LOOP,
        False,
    ),
    "a share, and a broadcast": (
        evaluate_share("dist.broadcast(torch.zeros(3), 0)"),
        "figures_stay_apart",
        "question: each rank evaluates a share .*nothing puts",
        "in DataLoader(tests",
        False,
    ),
    "a share, and a file of rank 0": (
        evaluate_share(
            "import json",
            "if dist.get_rank() == 0:",
            "    with open('best.json', 'w') as file: json.dump(float(total), file)",
            "dist.barrier()",
            "best = json.load(open('best.json'))",
            "dist.barrier()",
        ),
        "figures_stay_apart",
        "question: each rank evaluates a share .*nothing puts",
        "in DataLoader(tests",
        False,
    ),
    "padded, and figures in files": (
        {
            key: text.replace("inputs[:100]", "inputs[:101]")
            for key, text in evaluate_share(
                "import pickle",
                "pickle.dump(total, open(f'figures{dist.get_rank()}', 'wb'))",
                "dist.barrier()",
                "parts = [pickle.load(open(f'figures{rank}', 'rb')) for rank in range(2)]",
                "dist.barrier()",
            ).items()
        },
        "items_counted_twice",
        "question: .*counts 1 of 101 items twice: DistributedSampler",
        "in DataLoader(tests",
        False,
    ),
    "a share, and the number of items": (
        evaluate_share("dist.all_reduce(seen)"),
        "figures_stay_apart",
        "question: each rank evaluates a share .*sum the number of items alone",
        "in DataLoader(tests",
        False,
    ),
    "a share, beside an evaluation with sums": (
        evaluate_share(
            "with torch.no_grad():",
            f"    for x, in DataLoader(tests, 20, {BY_RANK}):",
            "        model.module(x); dist.all_reduce(seen)",
            "    for x, in DataLoader(tests, 5, sampler=DistributedSampler(tests, shuffle=False)):",
            "        model.module(x)",
        ),
        "figures_stay_apart",
        "question: each rank evaluates a share .*nothing puts",
        "in DataLoader(tests, 5",
        False,
    ),
    "a share in mappings": (
        {
            key: text.replace("for x, in", "for x in").replace("(x)", "(x['x'])")
            for key, text in evaluate_share(
                loader=BY_RANK + ", collate_fn=lambda items: __import__('collections').UserDict("
                "x=torch.stack([item[0] for item in items]))"
            ).items()
        },
        "figures_stay_apart",
        "question: each rank evaluates a share",
        "in DataLoader(tests",
        False,
    ),
    "padded, by the number of batches": (
        before(
            REDUCE,
            "tests = TensorDataset(inputs[:101])",
            f"batches = DataLoader(tests, 17, {BY_RANK})",
            "with torch.no_grad():",
            "    for most in 1, len(batches):",
            "        one = iter(batches)",
            "        [model.module(next(one)[0]) for _ in range(most)]",
            "n = torch.tensor([0.5, 51.0])",
            "dist.all_reduce(n)",
        ),
        "items_counted_twice",
        "found: .*counts 1 of 101 items twice",
        "one = iter(",
        False,
    ),
    "dealt out, and the last batches left out": (
        {
            MAIN: DEALT_OUT.replace("size, False", "size, True")
            .replace("-(-super().__len__() // dist.get_world_size())", "super().__len__() // 2")
            .replace(
                "batches += batches[: -len(batches) % dist.get_world_size()]", "del batches[4:]"
            )
            + MAIN,
            **before(
                REDUCE,
                "tests = TensorDataset(inputs[:101])",
                "with torch.no_grad():",
                "    for x, in DataLoader(tests, batch_sampler=DealtOut(range(101), 20)):",
                "        loss_sum += model.module(x).sum()",
            ),
        },
        "items_left_out",
        "found: .*leaves out 21 of 101 items: drop_last",
        "batch_sampler=DealtOut(range",
        False,
    ),
    "filled up": (
        {
            MAIN: DEALT_OUT + MAIN,
            **before(
                REDUCE,
                "tests = TensorDataset(inputs[:101])",
                "with torch.no_grad():",
                "    for x, in DataLoader(tests, batch_sampler=DealtOut(range(101), 10)):",
                "        loss_sum += model.module(x).sum()",
            ),
        },
        "shares_are_filled_up",
        "question: .*counts 10 of 101 items twice: its sampler fills up",
        "batch_sampler=DealtOut(range",
        False,
    ),
    "dropout in an evaluation": (
        {
            GELU: DROP,
            EPOCHS: SEED + EPOCHS,
            **before(
                REDUCE,
                "for x, in DataLoader(TensorDataset(inputs[:101]), 17):",
                "    with torch.no_grad(): model(x)",
            ),
        },
        "dropout_in_the_evaluation",
        "question: the evaluation .*runs in train mode: dropout is on",
        "for x, in DataLoader(",
        False,
    ),
    "drop_last": (
        evaluate(", drop_last=True"),
        "items_left_out",
        "found: .*leaves out 16 of 101",
        None,
        False,
    ),
    "train mode": (
        {GELU: NORM, **evaluate("", "model.train()")},
        "learns_from_the_evaluation",
        "question: .*runs in train mode",
        None,
        False,
    ),
    "BatchNorm": (
        {GELU: NORM, **evaluate("")},
        "other_norms_on_ranks",
        "question: BatchNorm's running values differ",
        None,
        False,
    ),
    "never cleared": (
        {ZERO: ""},
        "never_cleared",
        "found: gradients are never cleared",
        STEP,
        False,
    ),
    "never cleared, in a trainer": (
        {
            DATA: f"    code = compile('{TRAINER}', '/site-packages/fitting/loop.py', 'exec')\n"
            f"    exec(code, globals())\n{DATA}",
            ZERO: "",
            STEP: "            fit(optimizer)\n",
        },
        "never_cleared",
        r"found: gradients are never cleared \(loop.py:3 of fitting, from many_processes.py:\d+,",
        "fit(optimizer)",
        False,
    ),
    "another loss": (
        {
            WRAP: "    model.append(nn.Linear(1, 1))\n" + WRAP,
            OPT: "    head, model_ = model.module[3:], model.module[:3]\n"
            "    other = torch.optim.SGD(head.parameters(), lr=0.001)\n"
            + OPT.replace("model.", "model_."),
            ZERO: "            x, y = x, y\n",
            STEP: STEP + "            optimizer.zero_grad()\n"
            "            (model(x) * 0.1).mean().backward()\n"
            "            other.step(); other.zero_grad()\n",
        },
        "mixed_with_another_loss",
        "question: the optimizer of .* finds gradients of two backward passes",
        "optimizer = ",
        False,
    ),
    "cleared late, by a wrapper": (
        {
            OPT: OPT + "    inner = optimizer\n"
            "    class Passing(torch.optim.SGD):  # for an optimizer, without being made as one\n"
            "        __init__, step = object.__init__, lambda self: inner.step()\n"
            "        def __getattr__(self, name): return getattr(inner, name)\n"
            "    optimizer = Passing()\n",
            ZERO: "",
            STEP: ZERO + STEP,
        },
        "cleared_too_late",
        "found: .*cleared between",
        None,
        False,
    ),
    "cleared late": (
        {ZERO: "", STEP: ZERO + STEP},
        "cleared_too_late",
        "found: .*cleared between",
        STEP,
        False,
    ),
    "nan": (
        after(LOSS, "loss = loss * float('nan') if epoch else loss"),
        "not_finite",
        "found: from step 17 on, gradients are nan",
        STEP,
        False,
    ),
    "a copy": (
        {WRAP: "    import copy; old = copy.deepcopy(model)\n" + WRAP, "SGD(model": "SGD(old"},
        "no_gradient_at_all",
        "found: none of the optimizer's 4",
        "optimizer = ",
        False,
    ),
    "a part": (
        {"SGD(model.": "SGD(model.module[2]."},
        "parameters_in_no_optimizer",
        "found: 2 trained param",
        None,
        False,
    ),
    "a list of layers": (
        {
            DATA: """    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(64, 64)]

        def forward(self, x):
            return self.layers[0](x)

"""
            + DATA,
            GELU: "nn.GELU(), Listed(),",
        },
        "layers_of_no_model",
        "question: 2 parameters .Linear.weight, Linear.bias; .*are in no optimizer",
        "self.layers = [",
        False,
    ),
    "scaled": (
        {
            OPT: OPT + "    scaler = torch.amp.GradScaler('cpu')\n",
            BACK: (
                "            scaler.scale(loss).backward()\n"
                "            nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
            ),
            STEP: "            scaler.step(optimizer); scaler.update()\n",
        },
        "clips_scaled_gradients",
        "found: .*still multiplies",
        None,
        False,
    ),
    "summed": (
        after(BACK, "for p in model.parameters(): dist.all_reduce(p.grad)"),
        "summed_again",
        "question: .*that DDP has averaged",
        None,
        False,
    ),
    "rates": (
        {"lr=0.05": "lr=0.05 + 0.01 * dist.get_rank()"},
        "rates_differ",
        "found: the learning rates differ from step 1 ",
        STEP,
        False,
    ),
    "scales": (
        {
            OPT: OPT + "    scaler = torch.amp.GradScaler('cpu', 2.0 ** dist.get_rank())\n",
            BACK: "            scaler.scale(loss).backward()\n",
            STEP: "            scaler.step(optimizer); scaler.update()\n",
        },
        "scales_differ",
        "found: the scales of GradScaler differ from step 1 ",
        "scaler.step",
        False,
    ),
    "plateau": (
        {
            **after(OPT, "p = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"),
            **before(REDUCE, "p.step(loss_sum * (1 + dist.get_rank()))"),
        },
        "plateau_by_own_figures",
        "question: ReduceLROnPlateau .* another figure on each rank",
        "p.step(",
        False,
    ),
    "buffers": (
        {DATA: BOOK + DATA, GELU: "Book(),"},
        "buffers_differ",
        "question: buffers of the model .* differ between the ranks in step 9: 1.book",
        WRAP,
        False,
    ),
    "own BatchNorm": (
        {GELU: NORM, "DDP(model)": "DDP(model, broadcast_buffers=False)"},
        "own_batch_norm",
        "question: .*each rank's BatchNorm has means of its own",
        "model = DDP(",
        False,
    ),
    "find_unused_parameters": (
        {"DDP(model)": "DDP(model, find_unused_parameters=True)"},
        "looks_for_unused_parameters",
        "question: .* has find_unused_parameters=True, and each forward .* used all parameters",
        "model = DDP(",
        False,
    ),
    "an ensemble": (
        {
            WRAP: SEED + "    nn.init.normal_(model[0].weight)\n",
            "model.module.state": "model.state",
            **before(REDUCE, "dist.all_reduce(model(inputs[:300].to(device)).detach())"),
        },
        "weights_come_apart",
        "question: the weights of all ranks come apart",
        STEP,
        False,
    ),
    "lost sums": (
        {"all_reduce(loss_sum)": "all_reduce(loss_sum.clone())"},
        "sums_are_lost",
        "question: nothing holds the tensor that all_reduce",
        "all_reduce(",
        False,
    ),
    "many small sums": (
        after(BACK, "for figure in loss.detach().repeat(12): dist.all_reduce(figure)"),
        "many_small_calls",
        "question: each step makes 12 collective calls of few numbers",
        "dist.all_reduce(figure)",
        False,
    ),
    "no group": ({}, "no_group", "found: 2 processes train, and none calls", None, False),
    "groups of one": (
        {"group(backend)": "group(backend, store=dist.HashStore(), rank=0, world_size=1)"},
        "groups_of_one",
        "found: 2 processes train, each in a group of one rank, though WORLD_SIZE is 2",
        "dist.init_process_group(",
        False,
    ),
    "clipped before the exchange": (
        clip_half(CLIP),
        "clips_before_the_exchange",
        "question: each rank clips by a norm of its own .* exchanged after that",
        CLIP,
        False,
    ),
    "a detach": (
        {
            DATA: CUT + DATA,
            GELU: "nn.GELU(), Cut(),",
            "DDP(model)": "DDP(model, find_unused_parameters=True)",
        },
        "parameters_without_gradient",
        r"question: 2 of 4 parameters \(0.weight, 0.bias\) of the optimizer of .* no gradient",
        "optimizer = ",
        False,
    ),
    "kept losses": (
        {
            EPOCHS: "    kept = []\n" + EPOCHS.replace("5", "10"),
            **after(LOSS, "kept.append(loss)"),
        },
        "graphs_are_held",
        r"question: before step \d+, autograd still holds the graphs of \d+ of the backward",
        BACK,
        False,
    ),
    "an average of outputs, in a short run": (
        {
            EPOCHS: "    mean = 0\n" + EPOCHS,
            LOSS: LOSS.replace("model(x)", "(out := model(x))")
            + "            mean = 0.9 * mean + 0.1 * out.mean()\n",
        },
        "graphs_are_held",
        r"question: before step \d+, autograd still holds the graph of each backward pass",
        BACK,
        False,
    ),
    "a running total of what is gathered": (
        {
            SUM_0: "",
            EPOCHS: SUM_0[4:] + EPOCHS,
            REDUCE: "        sums = [torch.zeros_like(loss_sum) for _ in range(2)]\n"
            "        dist.all_gather(sums, loss_sum)\n"
            "        loss_sum = sum(sums)\n",
        },
        "total_summed_again",
        "found: all_gather at .* gathers a running total, again and again",
        "dist.all_gather(",
        False,
    ),
    "a running total in new tensors": (
        {
            SUM_0: "",
            EPOCHS: "    total = 0.0\n" + EPOCHS,
            LOOP: SUM_0 + LOOP,
            REDUCE: "        loss_sum += total\n" + REDUCE + "        total = loss_sum.item()\n",
        },
        "total_summed_again",
        "found: all_reduce at .* sums a running total in place, again and again",
        REDUCE,
        False,
    ),
    "an exchange of each parameter": (
        {**BY_HAND, GELU: DEEP},
        "one_call_for_each_parameter",
        "question: each step makes 20 calls of all_reduce, one for each parameter",
        "all_reduce(each.grad",
        False,
    ),
    "parts of a set that are shared out": (
        after(
            DATA,
            "rows = range(dist.get_rank(), 1024, 2)",
            "dataset = torch.utils.data.Subset(dataset, rows)",
        ),
        "other_sets",
        "question: each rank has another dataset .* takes 1 of 2 items of it",
        LOOP,
        False,
    ),
    "Join, and a schedule by step": (
        {
            **JOIN,
            **after(OPT, "s = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)"),
            STEP: STEP.replace("optimizer.step()", "optimizer.step(); s.step()"),
        },
        "rates_differ",
        "found: the learning rates differ when round 2 of Join begins",
        "with Join(",
        False,
    ),
    "a schedule by an epoch of its own": (
        OWN_EPOCHS,
        "rates_differ",
        "found: the learning rates differ from step 15 on",
        STEP,
        False,
    ),
    "clipped by hand before an exchange by hand": (
        ONE_VECTOR | {BACK: BACK + OWN_NORM},
        "clips_by_hand_before_the_exchange",
        "question: before most steps, each rank gives gradients of the norm 0.1 to the exchange",
        STEP,
        False,
    ),
    "clipped by a norm that was found before": (
        ONE_VECTOR
        | {
            BACK: BACK + "            its = [*model.parameters()]\n"
            "            norm = nn.utils.get_total_norm([each.grad for each in its])\n"
            "            nn.utils.clip_grads_with_norm_(its, 0.1, norm)\n"
        },
        "clips_before_the_exchange",
        "question: each rank clips by a norm of its own .* exchanged after that",
        "clip_grads_with_norm_(",
        False,
    ),
    "passes of other lengths, and as many steps": (
        {key: text.replace("s.step()", "pass") for key, text in OWN_EPOCHS.items()},
        "passes_differ_in_length",
        "question: in pass 1 over the loader .* other numbers of batches",
        "yield from loader",
        False,
    ),
    "workers that begin slowly": (
        {
            EPOCHS: "    import time\n    def slow(_): time.sleep(0.4)\n" + EPOCHS,
            SET_EPOCH: SET_EPOCH + "        loader = DataLoader(dataset, 32, sampler=sampler,"
            " num_workers=1, worker_init_fn=slow)\n",
        },
        "times",
        r"question: all ranks wait for their loaders: \d\.\d s in each of 4 pauses .* of the run",
        None,
        False,
    ),
    "workers whose start takes long": (
        {
            EPOCHS: "    import multiprocessing.process as mp, time\n"
            "    begin = mp.BaseProcess.start\n"
            "    mp.BaseProcess.start = lambda worker: time.sleep(0.4) or begin(worker)\n" + EPOCHS,
            SET_EPOCH: SET_EPOCH
            + "        loader = DataLoader(dataset, 32, sampler=sampler, num_workers=1)\n",
        },
        "times",
        r"\Aquestion: all ranks wait for their loaders: \d\.\d s in each of 4 pauses .* of the run",
        None,
        False,
    ),
    "weights loaded by one rank, later": (
        {
            EPOCHS: "    import copy\n    kept = copy.deepcopy(model.state_dict())\n" + EPOCHS,
            SET_EPOCH: SET_EPOCH
            + "        if epoch == 3 and dist.get_rank() == 0: model.load_state_dict(kept)\n",
        },
        "weights_come_apart",
        r"found: the weights of all ranks come apart .*: rank 0 alone loads weights, at",
        "model.load_state_dict(kept)",
        False,
    ),
    "no set_epoch, in a group that a mesh has made": (
        {
            GROUP: "    size = int(os.environ['WORLD_SIZE'])\n"
            "    dist.device_mesh.init_device_mesh('cpu', (size,))\n",
            SET_EPOCH: "",
        },
        "same_order_in_each_epoch",
        "found: the items come in the same order in each epoch",
        None,
        False,
    ),
    "wrapper on rank 0, between the steps": (
        {
            GELU: NORM,
            SET_EPOCH: SET_EPOCH
            + "        if dist.get_rank() == 0 and epoch:\n"
            + "            with torch.no_grad(): model(inputs[:8])\n",
        },
        "some_call_the_wrapper",
        r"\Aquestion: rank 0 alone calls the DDP object at .*, without gradients",
        "model(inputs[:8])",
        False,
    ),
    "a running total": (
        {SUM_0: "", EPOCHS: SUM_0[4:] + EPOCHS},
        "total_summed_again",
        "found: all_reduce at .* sums a running total in place, again and again",
        REDUCE,
        False,
    ),
    "nobody waits": (
        {REDUCE: REDUCE.replace("loss_sum)", "loss_sum, async_op=True)")},
        "nobody_waits",
        "question: nobody waits for all_reduce at .* which has async_op=True",
        "async_op=True",
        False,
    ),
    "a schedule on rank 0 alone": (
        after(OPT, "s = torch.optim.lr_scheduler.StepLR(optimizer, 1)")
        | before(RANK_0, "if dist.get_rank() == 0: s.step()"),
        "schedule_never_stepped",
        "found: the schedule StepLR .*never stepped on rank 1: .*\n.* on all ranks",
        "s = torch",
        False,
    ),
    "the state of another optimizer": (
        after(
            OPT,
            "optimizer.load_state_dict(optimizer.state_dict())",
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
        ),
        "loads_into_another_optimizer",
        "found: .* loads the state of an optimizer that never takes a step",
        "optimizer.load_state",
        False,
    ),
    "no step of a schedule that holds others": (
        after(
            OPT,
            "of = torch.optim.lr_scheduler",
            "parts = [of.LinearLR(optimizer), of.StepLR(optimizer, 9)]",
            "s = of.SequentialLR(optimizer, parts, [9])",
        ),
        "schedule_never_stepped",
        "found: the schedule SequentialLR .* is never stepped",
        "s = of.Seq",
        False,
    ),
    "figures of a stream": (
        {MAIN: STREAM + MAIN}
        | before(
            RANK_0,
            "model.eval()",
            "with torch.no_grad(): [model.module(x) for x in DataLoader(Stream(), 25)]",
            "model.train()",
        ),
        "figures_stay_apart",
        "question: each rank evaluates a share .*nothing puts the ranks' figures together",
        None,
        False,
    ),
    "nobody waits for several": (
        {
            REDUCE: "        for one in loss_sum, torch.ones(3):\n"
            "            dist.all_reduce(one, async_op=True)\n"
            "        dist.all_reduce(torch.ones(4))\n"
        },
        "nobody_waits",
        "question: nobody waits for all_reduce at .* which has async_op=True",
        "async_op=True",
        False,
    ),
    "workers keep the epoch": (
        PERSIST,
        "workers_keep_the_epoch",
        "question: the dataset's epoch is 4 .* workers still have 0: with persistent_workers",
        LOOP,
        False,
    ),
    "workers keep the epoch, which has another name, of a set in a set": (
        PERSIST
        | {
            MAIN: TURNING.replace("self.epoch", "self.now") + MAIN,
            "DataLoader(dataset": "DataLoader(torch.utils.data.ConcatDataset([dataset])",
        },
        "workers_keep_the_epoch",
        "question: the dataset's epoch is 4 .* workers still have 0: with persistent_workers",
        LOOP,
        False,
    ),
    "sorted by label": (
        SORTED,
        "batches_of_one_label",
        "question: nothing is shuffled .* in 16 of 16 batches, all .* same whole number",
        "in loader:",
        False,
    ),
    "sorted by label, with a name of each item": (
        {
            **SORTED,
            DATA: SORTED[DATA].replace("), kinds", "), torch.arange(1024), kinds"),
            LOOP: LOOP.replace("x, y", "x, y, _, _"),
        },
        "batches_of_one_label",
        "question: nothing is shuffled .* in 16 of 16 batches, all .* same whole number",
        "in loader:",
        False,
    ),
    "wrapper on rank 0": (
        {
            GELU: NORM,
            SAVE: SAVE
            + (
                "            with __import__('contextlib').suppress(RuntimeError):\n"
                "                if epoch == 4: model(inputs[:8])\n"
            ),
        },
        "some_call_the_wrapper",
        "found: rank 0 alone calls the DDP object",
        "model(inputs[:8])",
        False,
    ),
    "the order begins anew": (
        OWN_ORDER,
        "order_begins_anew",
        "question: after the resume, the items come in the order of the first epoch again",
        "for images, labels in tqdm(",
        False,
    ),
    "no state": (
        {'        optimizer.load_state_dict(snapshot["optimizer"])\n': ""},
        "optimizer_not_loaded",
        "found: .* without the optimizer's state",
        "torch.load(",
        False,
    ),
    "rate set back": (
        {
            **after(
                OPT,
                "state = optimizer.state_dict()",
                "state['param_groups'][0].update(lr=0.01, initial_lr=0.05)",
                "optimizer.load_state_dict(state)",
                "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)",
            ),
            **after(STEP, "schedule.step()"),
        },
        "rate_is_set_back",
        "question: .*state .* was loaded with rate 0.01, and the next step takes 0.05",
        "optimizer.load_state_dict(",
        False,
    ),
    "in place": (
        {
            **before(
                EPOCHS,
                SNAPSHOT,
                "if dist.get_rank() == 0: torch.save(snapshot(), 'snapshot.pt')",
                "dist.barrier()",
                "optimizer.load_state_dict(torch.load('snapshot.pt')['optimizer'])",
            ),
            **after(SAVE, "torch.save(snapshot(), 'snapshot.pt')"),
        },
        "saved_in_place",
        "found: snapshot.pt, from which the job goes on, is written over in place 6 times",
        None,
        False,
    ),
    "a folder in place": (
        folder_of_files(),
        "folder_in_place",
        r"question: the files .*\(model.pt, optimizer.pt; .*one by one into epoch_1",
        "torch.load(file)",
        False,
    ),
    "all save, by safetensors": (
        {
            **before(
                EPOCHS,
                "import pathlib, sys",
                "lib = pathlib.Path(f'lib{dist.get_rank()}').absolute()",
                "(lib / 'safetensors').mkdir(parents=True)",
                "code = 'def save_file(tensors, filename): open(filename, chr(119)).close()'",
                "(lib / 'safetensors/torch.py').write_text(code)",
                "sys.path.insert(0, str(lib))",
                "from safetensors.torch import save_file",
            ),
            SAVE: '        save_file(model.module.state_dict(), "model.safetensors")\n',
        },
        "several_save_one_file",
        "found: all ranks save to one file, model.safetensors",
        "save_file(model",
        False,
    ),
    "schedule": (
        after(OPT, "s = torch.optim.lr_scheduler.StepLR(optimizer, 9)"),
        "schedule_never_stepped",
        "found: the schedule StepLR .*never stepped",
        None,
        False,
    ),
    "average": (
        after(OPT, "a = torch.optim.swa_utils.AveragedModel(model.module)"),
        "average_never_updated",
        "question: AveragedModel .* is never updated",
        "AveragedModel(",
        False,
    ),
    "average of one rank": (
        {
            **after(OPT, "mean = torch.optim.swa_utils.AveragedModel(model.module)"),
            **after(STEP, "if dist.get_rank() == 0: mean.update_parameters(model.module)"),
            **before(REDUCE, "mean(inputs[:8])"),
        },
        "average_of_some_ranks",
        "question: AveragedModel .* these numbers of updates: 80 on rank 0, 0 on rank 1. And",
        "AveragedModel(",
        False,
    ),
    "copy of one rank": (
        copy_of_the_model("if dist.get_rank() == 0: "),
        "copy_of_some_ranks",
        "question: the copy of the model .* changes on rank 0 alone",
        "deepcopy(",
        False,
    ),
    "schedule runs ahead": (
        {
            **after(OPT, "s = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)"),
            **after(STEP, "s.step(); s.step()"),
        },
        "schedule_runs_ahead",
        "question: CosineAnnealingLR .* for 80 steps, and its step.. is called 2 times for each",
        "CosineAnnealingLR(",
        False,
    ),
    "best of its own": (
        {
            EPOCHS: "    best = 0\n" + EPOCHS,
            **before(
                REDUCE,
                "own = epoch * (3 + dist.get_rank()) % 5  # 0 3 1 4 2 on rank 0, 0 4 3 2 1",
                "if own >= best:",
                "    best = own",
                "    torch.save(model.module.state_dict(), f'best_{dist.get_rank()}.pt')",
            ),
        },
        "saved_by_own_decision",
        "question: each rank decides for itself whether it saves .*: 3 on rank 0, 2 on rank 1",
        "torch.save(model.module.state_dict(), f'best",
        False,
    ),
    "made anew": (
        after(SET_EPOCH, OPT.strip()),
        "optimizer_made_anew",
        "question: .*made anew 5",
        None,
        False,
    ),
    "all save": (
        {SAVE: SAVE[4:]},
        "several_save_one_file",
        "found: all ranks save to one file",
        SAVE,
        False,
    ),
    "the wrapper": (
        {"model.module.state": "model.state"},
        "saves_the_wrapper",
        "question: .*module",
        "torch.save",
        False,
    ),
    "by reference": (
        {
            EPOCHS: "    best = None\n" + EPOCHS,
            REDUCE: "        best = best or model.module.state_dict()\n" + REDUCE,
            SAVE: SAVE.replace(
                "torch.save(model.module.state_dict()", "epoch == 1 and torch.save(best"
            ),
        },
        "saves_what_has_changed",
        "found: .*16 steps before",
        "torch.save",
        False,
    ),
    "one tensor": (
        {
            REDUCE: "        parts = [torch.zeros_like(loss_sum)] * 2\n        dist."
            "all_gather(parts, loss_sum)\n"
        },
        "one_tensor_for_all",
        "found: .*under 2 names",
        None,
        False,
    ),
    "debugging": (
        before(EPOCHS, "torch.autograd.set_detect_anomaly(True)"),
        "debugging_is_on",
        "found: debugging is on",
        None,
        False,
    ),
    "another version of the script on a machine": (
        TWO_MACHINES | {GROUP: TWO_MACHINES[GROUP].replace(GROUP, OWN_COPY + GROUP)},
        "script_differs",
        "found: the script differs on node1: many_processes.py has other content than on node0",
        None,
        False,
    ),
    "other data on a machine": (
        TWO_MACHINES
        | after(DATA, "dataset = TensorDataset(inputs + dist.get_rank(), inputs[:, :1])"),
        "data_differ_by_machine",
        "question: the dataset on node1 is not the one on node0; a DistributedSampler",
        LOOP,
        False,
    ),
    "one file of two machines": (
        TWO_MACHINES | {SAVE: SAVE[4:]},
        "several_save_one_file",
        "found: all ranks save to one file",
        SAVE,
        False,
    ),
    "slow rank": (
        after(STEP, "import time; time.sleep(0.1 * dist.get_rank())"),
        "times",
        "found: rank 0 waits for rank 1 .*\n.*longer in its own code",
        None,
        False,
    ),
    "slow GPU of a rank": (
        on_a_gpu("lambda: 0.3 * dist.get_rank() if next(numbers) % 10 == 5 else 0.001, 0.001")
        | before(DATA, "import itertools", "numbers = itertools.count()"),
        "times",
        r"found: rank 0 waits for rank 1 in .*\n  rank 1 takes (29|30)\d\.\d ms longer in forward",
        None,
        False,
    ),
    "slow loader of a rank with a GPU": (
        on_a_gpu("0.001, 0.001")
        | before(
            DATA,
            "import time",
            "class Slow(TensorDataset):",
            "    def __getitem__(self, place):",
            "        time.sleep(0.001 * dist.get_rank())",
            "        return super().__getitem__(place)",
        )
        | {"TensorDataset(inputs": "Slow(inputs"},
        "times",
        r"found: rank 0 waits for rank 1 in \d\d% .*\n  rank 1 takes .* ms longer in loading",
        None,
        False,
    ),
    "a GPU that waits for Python": (
        on_a_gpu("0.001, 0.001")
        | before(DATA, "import itertools, time", "numbers = itertools.count()")
        | before(LOSS, "time.sleep(0.3 if next(numbers) % 10 == 5 else 0)"),  # what is measured
        "times",
        r"question: the GPU is in none of the parts for \d\d% of a step of \d+\.\d ms",
        None,
        False,
    ),
    "slow rank, after a warm-up of the other": (
        {
            WRAP: (
                "    warm = torch.optim.SGD(model.parameters(), 0.001)\n"
                "    for _ in range(60 - 60 * dist.get_rank()):\n"
                "        model(inputs[:8].to(device)).mean().backward()\n"
                "        warm.step(); warm.zero_grad()\n"
            )
            + WRAP,
            **after(STEP, "import time; time.sleep(0.1 * dist.get_rank())"),
        },
        "times",
        "found: rank 0 waits for rank 1 .*\n.*longer in its own code",
        None,
        False,
    ),
    "slow rank, after a warm-up by the same optimizer": (
        {
            OPT: "",
            WRAP: OPT.replace("0.9", "0")
            + (
                "    for _ in range(60 - 60 * dist.get_rank()):\n"
                "        model(inputs[:8].to(device)).mean().backward()\n"
                "        optimizer.step(); optimizer.zero_grad()\n"
            )
            + WRAP,
            **after(STEP, "import time; time.sleep(0.1 * dist.get_rank())"),
        },
        "times",
        "found: rank 0 waits for rank 1 .*\n.*longer in its own code",
        None,
        False,
    ),
    "slow loader": (
        before(
            DATA,
            "import time",
            "class Slow(TensorDataset):",
            "    def __getitem__(self, i):",
            "        time.sleep(0.002)",
            "        return super().__getitem__(i)",
        )
        | {"TensorDataset(inputs, inputs": "Slow(inputs, inputs"},
        "times",
        "found: rank [01] waits for its loader",
        None,
        False,
    ),
    "slow disk": (
        after(STEP, "if not dist.get_rank(): torch.save(torch.ones(2_000_000), 'big.pt')"),
        "times",
        "found: rank 0 saves for",
        None,
        False,
    ),
    "rank 0 evaluates alone": (
        after(
            REDUCE,
            "if dist.get_rank() == 0:",
            "    import time; model.eval()",
            "    with torch.no_grad():",
            "        for x, y in DataLoader(dataset, 64):",
            "            model.module(x.to(device)); time.sleep(0.03)",
            "    model.train()",
        ),
        "times",
        r"found: rank 1 waits while rank 0 evaluates .*, \d+% of the run",
        "in DataLoader(dataset, 64)",
        False,
    ),
}
CRASH = ["02_torchrun_elastic.py", 3, 1, "--batch-size", 512, "--crash-epoch", 2]
OTHERS = {  # {mistake: script, and its arguments} where it is not BASE
    "no group": ["docs/one_process.py"],
    "no state": CRASH,
    "saved before the others": CRASH,
    "a folder in place": CRASH,
    "a folder that is renamed": CRASH,
    "the order begins anew": CRASH,
    "the order goes on": CRASH,
}
ROWS = """def joined(items):  # items of one to three rows each, as graphs have nodes
    sizes = [1 + int(x[0] > 0) + int(x[1] > 0) for x, _ in items]
    rows = [x.repeat(size, 1) for (x, _), size in zip(items, sizes)]
    return torch.cat(rows), torch.stack([y for _, y in items]), sizes


"""
DICTS = """class Mine(torch.utils.data.Dataset):  # a list of dicts: this rank's part of all
    def __init__(self, inputs):
        names = range(dist.get_rank(), len(inputs), dist.get_world_size())
        self.data = [{"x": inputs[name].numpy()} for name in names]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x = self.data[index]["x"]
        return x, x[:1] * 2


"""
SHARED_BEFORE = {
    MAIN: DICTS + MAIN,
    DATA: "    dataset = Mine(inputs)\n",
    SAMPLER: "",
    SET_EPOCH: "",
    "sampler=sampler": "shuffle=True",
    EPOCHS: SEED + EPOCHS,
}
WITHOUT_PADDING = {
    key: text.replace("inputs[:100]", "inputs[:101]").replace("        total +=", CUT)
    for CUT in ["        x = x[: 51 - dist.get_rank() - int(seen)]\n                total +="]
    for key, text in evaluate_share("dist.all_reduce(seen)", "dist.all_reduce(total)").items()
}
# One iterator over the loader for all epochs, as an endless sampler allows.
ENDLESS = """    class Again:
        def __init__(self, inner):
            self.sampler = inner

        def __iter__(self):
            while True:
                yield from iter(self.sampler)

    class Endless(DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self):
            return len(self.batch_sampler.sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

"""
# The set has all files, and gives this rank's rows by their places among its own.
OWN_ROWS = """    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.files = [f"{row:04d}.png" for row in range(1024)]
            order = torch.randperm(1024, generator=torch.Generator().manual_seed(0))
            self.rows = order[dist.get_rank() :: 2]

        def __len__(self):
            return len(self.files)

        def __getitem__(self, place):
            row = self.rows[place]
            return inputs[row], inputs[row].norm(dim=0, keepdim=True)

    class Places(DistributedSampler):
        def __iter__(self):
            order = torch.Generator().manual_seed(self.epoch)
            return iter(torch.randperm(self.num_samples, generator=order).tolist())

    dataset = Rows()
"""
AVERAGE = """    import copy
    class Average(nn.Module):  # as some trainers write it: its names begin with "module."
        def __init__(self, model):
            super().__init__()
            self.module = copy.deepcopy(model).requires_grad_(False)

        def update(self, model):
            for mine, new in zip(self.module.parameters(), model.parameters()):
                mine.lerp_(new.detach(), 0.1)

    average = Average(model.module)
"""
RIGHT = {  # scripts in styles that look like mistakes: changes of the same script
    "as it is": {},
    "two machines": TWO_MACHINES,
    "the batches of all, of which each rank takes its part": {
        SAMPLER: "",
        SET_EPOCH: "",
        LOADER: "    order = torch.Generator().manual_seed(0)\n"
        "    loader = DataLoader(dataset, batch_size=64, shuffle=True, generator=order)\n",
        **after(MOVE, "x, y = x[dist.get_rank() :: 2], y[dist.get_rank() :: 2]"),
    },
    "rank 0 saves now and then, and all ranks at the end": {
        EPOCHS: "    def save(path):\n"
        "        torch.save(model.module.state_dict(), path)\n\n" + EPOCHS,
        SAVE: '            save(f"0/{epoch}.pt")\n    save(f"{dist.get_rank()}/9.pt")\n',
        GROUP: GROUP + "    os.makedirs(str(dist.get_rank()), exist_ok=True)\n",
    },
    "one flat tensor, of which the model has the parts": FLAT
    | {ZERO: "            optimizer.zero_grad(set_to_none=False)\n"}
    | after(BACK, "nn.utils.clip_grad_norm_([*model.parameters()], 1.0)"),
    "an evaluation with gradients on, when the training is over": {
        GELU: DROP,
        EPOCHS: SEED + EPOCHS,
        SAVE: SAVE + "    model.eval()\n    [model(x) for x in inputs.split(64)]\n",
    },
    "one endless pass, and rank 0 evaluates": {
        LOADER: ENDLESS + LOADER.replace("DataLoader", "Endless"),
        REDUCE: "        if dist.get_rank() == 0:\n"
        "            with torch.no_grad():\n"
        "                [model.module(x) for x, _ in DataLoader(dataset, batch_size=64)]\n"
        + REDUCE,
    },
    "rank 0 starts the others, and calls their function": {
        '"__main__":\n    main()\n': """"__main__":
    import multiprocessing

    # As torch's spawn() gives the function to one of its own.
    multiprocessing.get_context("fork").Process(target=print, args=(main,)).start()
    if os.environ["RANK"] == "0":
        main()
    else:
        main()
"""
    },
    "an optimizer that is loaded after the training": {
        SAVE: SAVE + "    again = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    again.load_state_dict(optimizer.state_dict())\n"
    },
    "a share that the set makes of itself": {
        DATA: OWN_ROWS,
        SAMPLER: SAMPLER.replace("DistributedSampler", "Places"),
    },
    "an average of the weights, in the same file": {
        **after(WRAP, *(line[4:] for line in AVERAGE.splitlines())),
        **after(STEP, "average.update(model.module)"),
        "torch.save(model.module.state_dict(), ": "torch.save({'model': model.module.state_dict(),"
        " 'average': average.state_dict()}, ",
    },
    "Join, and a schedule by epoch": {
        **after(OPT, "s = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"),
        **JOIN,
        REDUCE: "        s.step()\n" + REDUCE,
    },
    "one Join for all epochs, and a schedule by step": {
        **after(OPT, "s = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)"),
        EPOCHS: "    from torch.distributed.algorithms.join import Join\n"
        "    with Join([model]):\n"
        "      rows = [each for epoch in range(5)"
        " for each, _ in zip(loader, range(16 - dist.get_rank()))]\n"
        "      for x, y in rows:\n"
        "            optimizer.zero_grad()\n"
        "            nn.functional.mse_loss(model(x), y).backward()\n"
        "            optimizer.step()\n"
        "            s.step()\n" + EPOCHS.replace("range(5)", "range(0)"),
    },
    "parts that were cut by hand, in order": {
        SAMPLER: "",
        SET_EPOCH: "        numbers = torch.Generator().manual_seed(epoch)\n"
        "        rows = torch.randperm(1024, generator=numbers)[dist.get_rank() :: 2].tolist()\n"
        "        mine = torch.utils.data.Subset(dataset, rows)\n"
        "        loader = DataLoader(mine, 32)\n",
        LOADER: "",
    },
    "twelve parameters, and an exchange of each": BY_HAND | {GELU: DEEP.replace("8", "4")},
    "many parameters, which are sent as one": BY_HAND
    | {
        GELU: DEEP,
        STEP: STEP.replace(
            "optimizer.step()",
            "with dist._coalescing_manager():\n"
            "                for each in model.parameters(): dist.all_reduce(each.grad)\n"
            "            optimizer.step()",
        ),
    },
    "one vector, clipped when it is exchanged": ONE_VECTOR
    | {STEP: ONE_VECTOR[STEP].removesuffix(STEP) + OWN_NORM + STEP},
    "signs of the gradients": ONE_VECTOR
    | {BACK: BACK + "            for each in model.parameters(): each.grad.sign_()\n"},
    "a figure of each closure": {
        OPT: "    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=9)\n",
        BACK: "",
        ZERO: "            def closure():\n"
        "                optimizer.zero_grad()\n"
        "                loss = nn.functional.mse_loss(model(x), y)\n"
        "                loss.backward()\n"
        "                dist.all_reduce(mean := loss.detach().clone())\n"
        "                return mean\n",
        STEP: "            optimizer.step(closure)\n",
    },
    "a total of copies, and a count that grows": {
        SUM_0: "",
        EPOCHS: SUM_0[4:] + "    buffer = torch.zeros_like(loss_sum)\n" + EPOCHS,
        REDUCE: "        buffer.copy_(loss_sum)\n"
        "        dist.all_reduce(buffer)\n"
        "        dist.all_gather([torch.zeros(1) for _ in range(2)], torch.ones(1) * epoch)\n",
    },
    "batches of one sampler are dealt out": IN_TURN
    | before(
        REDUCE,
        "sums = torch.zeros(2)",
        "with torch.no_grad():",
        "    tests = TensorDataset(inputs[:100])",
        "    for x, in DataLoader(tests, batch_sampler=DealtOut(range(100), 10)):",
        "        sums += torch.tensor([model.module(x).sum(), len(x)])",
    ),
    "a forward pass, and shards again": FSDP2 | {OPT: "    model.reshard()\n" + OPT},
    "a group that its members make": before(
        EPOCHS,
        "if dist.get_rank() == 0: dist.new_group([0], use_local_synchronization=True)",
    ),
    "a loader of another library": {
        MAIN: OWN_LOADER + MAIN,
        SET_EPOCH: "        numbers = torch.Generator().manual_seed(epoch)\n"
        "        rows = torch.randperm(1024, generator=numbers)[dist.get_rank() :: 2]\n"
        "        own = Own([dataset[part] for part in rows.split(32)])\n"
        "        batches = torch.utils.data.dataloader._SingleProcessDataLoaderIter(own)\n",
        LOOP: LOOP.replace("in loader", "in batches"),
    },
    "a dataset that draws its items by itself": EACH_ALL
    | {MAIN: WINDOWS + MAIN, "= TensorDataset(inputs, in": "= Windows(inputs, in"}
    | before(
        RANK_0,
        "with torch.no_grad():",
        "    [model.module(x) for x, y in DataLoader(Windows(inputs, inputs), 64)]",
    ),
    "each item comes several times": {MAIN: REPEATED + MAIN, "DistributedSampler(d": "Repeated(d"},
    "schedules that wait for their turn": {
        **after(
            OPT,
            "of = torch.optim.lr_scheduler",
            "waits = of.StepLR(optimizer, 9)",
            "s = of.SequentialLR(optimizer, [of.LinearLR(optimizer), waits], [9])",
        ),
        REDUCE: "        s.step()\n" + REDUCE,
    },
    "a warm-up that holds what follows": {
        **after(
            OPT,
            "of = torch.optim.lr_scheduler",
            "s = of.LambdaLR(optimizer, lambda epoch: min(1, epoch / 9))",
            "s.follows = of.StepLR(optimizer, 9)",
        ),
        REDUCE: "        s.step()\n" + REDUCE,
    },
    "two passes of an optimizer, and the gradients of both are used": after(
        BACK,
        "old = [each.detach().clone() for each in model.parameters()]",
        "with torch.no_grad():",
        "    for each in model.parameters(): each.add_(each.grad, alpha=0.01)",
        "optimizer.zero_grad()",
        "nn.functional.mse_loss(model(x), y).backward()",
        "with torch.no_grad():",
        "    for each, was in zip(model.parameters(), old): each.copy_(was)",
    ),
    "items of several rows": {
        MAIN: ROWS + MAIN,
        END: "sampler=sampler, collate_fn=joined)\n",
        LOOP: LOOP.replace("x, y", "x, y, sizes"),
        "model(x)": "torch.stack([part.mean(0) for part in model(x).split(sizes)])",
    },
    "dicts that were shared out before": SHARED_BEFORE,
    "files of one name that were shared out before": SHARED_BEFORE
    | {
        MAIN: DICTS.replace(
            "        self.data =",
            "        self.files = [f'case_{each}/image.png' for each in names]\n"
            "        self.data =",
        )
        .replace('{"x": inputs[name].numpy()}', "[inputs[name]]")
        .replace('["x"]', "[0]")
        + MAIN
    },
    "padding that is cut off before the sums": WITHOUT_PADDING,
    "rank 0 reads, and sends": {
        LOOP: (
            "        read = iter(DataLoader(dataset, 64, shuffle=True))\n"
            "        for _ in range(16):\n"
            "            x, y = torch.empty(64, 10), torch.empty(64, 1)\n"
            "            if dist.get_rank() == 0: x, y = next(read)\n"
            "            dist.broadcast(x, 0); dist.broadcast(y, 0)\n"
            "            x, y = x[dist.get_rank() :: 2], y[dist.get_rank() :: 2]\n"
        )
    },
    "sum and number, one by one": evaluate_share("dist.all_reduce(seen)", "dist.all_reduce(total)"),
    "a sum alone, of whole numbers": evaluate_share(
        "right = torch.tensor(40 - dist.get_rank())", "dist.all_reduce(right)"
    ),
    "two evaluations, and one sum": evaluate_share(
        "with torch.no_grad():",
        f"    for x, in DataLoader(tests, 20, {BY_RANK}): total += model.module(x).sum()",
        "dist.all_reduce(total)",
    ),
    "figures in an object": evaluate_share(
        "every = [None] * 2 if dist.get_rank() == 0 else None",
        "dist.gather_object((total, seen), every)",
    ),
    "means that are averaged before each evaluation": {
        GELU: NORM,
        "DDP(model)": "DDP(model, broadcast_buffers=False)",
        SUM_0: SUM_0.replace("loss_sum", "means = [*model.buffers()][:2]; loss_sum"),
        **{
            key: "        for mean in means: dist.all_reduce(mean); mean /= 2\n" + text
            for key, text in evaluate_share("dist.all_reduce(total)").items()
        },
    },
    "figures in files": evaluate_share(
        "import pickle",
        "with open(f'figures{dist.get_rank()}', 'wb') as file: pickle.dump((total, seen), file)",
        "dist.barrier()",
        "if dist.get_rank() == 0: [pickle.load(open(f'figures{rank}', 'rb')) for rank in range(2)]",
        "dist.barrier()",
    ),
    "figures in files of torch, which were moved": evaluate_share(
        "torch.save((total, seen), f'part{dist.get_rank()}')",
        "os.replace(f'part{dist.get_rank()}', f'figures{dist.get_rank()}')",
        "dist.barrier()",
        "if dist.get_rank() == 0: [torch.load(f'figures{rank}') for rank in range(2)]",
        "dist.barrier()",
    ),
    "a broadcast from each rank": evaluate_share(
        "sums = [total.clone(), total.clone()]",
        "for rank in range(2): dist.broadcast(sums[rank], rank)",
    ),
    "figures some steps later": {
        EPOCHS: "    later = None\n" + EPOCHS,
        LOOP: LOOP
        + (
            "            if later is not None and len(later) < 4: later.append(0)\n"
            "            if later is not None and len(later) == 4:\n"
            "                dist.all_reduce(later[0]); later.append(0)\n"
        ),
        **evaluate_share("later = [total]"),
    },
    "the figures of an evaluation that stops by its number of batches": after(
        REDUCE,
        "tests, total = TensorDataset(inputs[:100]), torch.zeros(())",
        f"batches = DataLoader(tests, 10, {BY_RANK})",
        "model.eval(); one = iter(batches)",
        "with torch.no_grad():",
        "    for _ in range(len(batches)): total += model.module(next(one)[0]).sum()",
        "dist.all_reduce(total); model.train()",
    ),
    "eval mode of the inner model": {
        GELU: DROP,
        EPOCHS: SEED + EPOCHS,
        **before(
            REDUCE,
            "for x, in DataLoader(TensorDataset(inputs[:17]), 17):",
            "    model.module.eval()",
            "    with torch.no_grad(): model(x)",
            "model.module.train()",
        ),
    },
    "noise of a seed by rank": {
        **after(MOVE, "x = x + torch.randn_like(x)"),
        EPOCHS: SEED + EPOCHS,
    },
    "augmented by rank": NOISE | {EPOCHS: SEED + EPOCHS},
    "workers with one seed, and nothing random": {END: "sampler=sampler, num_workers=1)\n"},
    "a sampler that draws for each batch": {
        SAMPLER: "",
        SET_EPOCH: "",
        LOADER: (
            "    class Drawn(torch.utils.data.Sampler):\n"
            "        def __len__(self): return 16\n"
            "        def __iter__(self):\n"
            "            for _ in range(16):\n"
            "                yield torch.randint(1024, (64,))[dist.get_rank() :: 2].tolist()\n"
            "    loader = DataLoader(dataset, batch_sampler=Drawn())\n"
        ),
    },
    "another group of all": {
        REDUCE: (  # as from a thread
            "        log, sums = dist.new_group(), torch.ones(3)\n"
            "        one, other = [(loss_sum, None), (sums, log)][:: 1 - 2 * dist.get_rank()]\n"
            "        work = dist.all_reduce(one[0], group=one[1], async_op=True)\n"
            "        dist.all_reduce(other[0], group=other[1]); work.wait()\n"
        )
    },
    "take turns": {RANK_0: RANK_0.replace("== 0", "== epoch % 2")},
    "local SGD": {
        WRAP: "",
        "model.module.state": "model.state",
        STEP: STEP
        + (
            "            n = optimizer.__dict__.setdefault('n', []); n.append(0)\n"
            "            if len(n) % 5 == 0:\n"
            "                for p in model.parameters(): dist.all_reduce(p.data); p.data /= 2\n"
        ),
    },
    "two optimizers": {
        OPT: OPT + "    critic = DDP(nn.Linear(1, 1)); other = torch.optim.SGD("
        "critic.parameters(), 0.001)\n",
        STEP: STEP + "            "
        "other.zero_grad();"
        " critic(model(x)).mean().backward(); other.step()\n",
    },
    "two losses, each cleared before its own": {
        WRAP: "    model.append(nn.Linear(1, 1))\n" + WRAP,
        OPT: "    head, model_ = model.module[3:], model.module[:3]\n"
        "    other = torch.optim.SGD(head.parameters(), lr=0.001)\n"
        + OPT.replace("model.", "model_."),
        STEP: STEP
        + "            other.zero_grad(); (model(x) * 0.1).mean().backward(); other.step()\n",
    },
    "an optimizer that takes a step more rarely": {
        WRAP: "    model.append(nn.Linear(1, 1))\n" + WRAP,
        OPT: "    head, model_ = model.module[3:], model.module[:3]\n"
        "    other = torch.optim.SGD(head.parameters(), lr=0.001); number = 0\n"
        + OPT.replace("model.", "model_."),
        STEP: STEP + "            number += 1\n"
        "            if number % 2 == 0: other.step(); other.zero_grad()\n",
    },
    "a part that was trained before": {  # and keeps its last gradient
        WRAP: "    old = nn.Linear(10, 10)\n"
        "    first = torch.optim.SGD(old.parameters(), lr=0.01)\n"
        "    old(inputs).norm().backward(); first.step(); del first\n" + WRAP,
        LOSS: LOSS.replace("model(x)", "model(old(x).detach())"),
    },
    "by hand": {
        WRAP: "",
        "model.module.state": "model.state",
        BACK: BACK
        + ("            for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= 2\n"),
    },
    "ZeRO": {
        "torch.optim.SGD(model.parameters(),": "__import__('torch.distributed.optim').distributed"
        ".optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD,"
    },
    "accumulation": {
        ZERO: "            n = optimizer.__dict__.setdefault('n', []); n.append(0)\n",
        LOSS: LOSS.replace(
            "loss = ",
            "model.require_backward_grad_sync = "
            "len(optimizer"
            ".__dict__.get('n', [])) % 4 == 3; loss = ",
        ),
        STEP: "            if len(n) % 4 == 0: optimizer.step(); optimizer.zero_grad()\n",
    },
    "equal buffers": {
        GELU: "Book(),",
        DATA: BOOK.replace(
            "mean(0)\n",
            ("mean(0)\n            dist.all_reduce(mean); dist.all_reduce(torch.ones(1))\n"),
        )
        + DATA,
    },
    "the order goes on": OWN_ORDER
    | {"sampler.set_epoch(epoch)": "numbers.manual_seed(SEED + epoch)"},
    "saved before the others": {  # rank 1 ends its epoch after rank 0 has saved it
        "        if epoch == args.crash": (
            "        if rank == 0:\n"
            "            save({'model': model.module.state_dict(), 'optimizer': optimizer"
            ".state_dict(), 'next_epoch': epoch + 1}, args.snapshot_path)\n"
            "            open(f'saved {epoch}', 'w').close()\n"
            "        if epoch == args.crash"
        ),
        "    for images, labels in tqdm(": (
            "    import builtins; builtins.epoch = getattr(builtins, 'epoch', 0) + 1\n"
            "    for images, labels in tqdm("
        ),
        "        total[1] += len(labels)\n": (
            "        total[1] += len(labels)\n"
            "        while dist.get_rank() and total[1] == 4096 and (\n"
            "                not os.path.exists(f'saved {epoch}')): time.sleep(0.01)\n"
        ),
        "    dist.all_reduce(total)  # in place: the sums over all ranks\n": "",
    },
    "a folder that is renamed": folder_of_files(
        folder="new", then="os.rename('new', f'epochs/epoch_{epoch}')"
    ),
    "rank 0 alone has the average": {
        **after(OPT, "mean = torch.optim.swa_utils.AveragedModel(model.module)"),
        **after(STEP, "if dist.get_rank() == 0: mean.update_parameters(model.module)"),
        **after(RANK_0, "    mean(inputs[:8])"),
    },
    "a copy that all ranks change": copy_of_the_model(),
    "a schedule whose length counts its calls": {
        **after(OPT, "s = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)"),
        **after(STEP, "s.step(); s.step()"),
    },
    "all save their part, and rank 0 one more": {
        **before(EPOCHS, "def put(name): torch.save(model.module.state_dict(), name)"),
        **before(REDUCE, "put(f'part_{dist.get_rank()}.pt')"),
        SAVE: "            put('model.pt')\n",
    },
    "accumulated, and clipped once": clip_half(at_end=CLIP),
    "a norm that is printed for half a batch": clip_half(CLIP.replace("0.1", "float('inf')")),
    "a frozen layer, which the optimizer has": {
        WRAP: "    model[0].requires_grad_(False)\n" + WRAP,
        STEP: "            trained = filter(lambda each: each.requires_grad, model.parameters())\n"
        f"            nn.utils.clip_grad_norm_(trained, 0.1)\n{STEP}",
    },
    "losses added up for an epoch, and numbers for all": {
        EPOCHS: "    kept = []\n" + EPOCHS.replace("5", "10"),
        **after(SET_EPOCH, "total = 0"),
        **after(LOSS, "total = total + loss; kept.append(loss.detach())"),
    },
    "figures that begin anew and grow fast": {  # as PPO's distance from the old policy
        EPOCHS: "    count = 0\n" + EPOCHS,
        **after(
            LOSS,
            "figure = torch.tensor(1e-3 * 2.2 ** (count % 8))",
            "dist.all_reduce(figure)",
            "count += 1",
        ),
    },
    "a shared evaluation, in batches of objects": before(
        REDUCE,
        "class Own: pass",
        "def own(rows):",
        "    it = Own(); it.x = inputs[rows]; time.sleep(0.01); return it, torch.arange(len(rows))",
        "import time",
        "shares = DistributedSampler(range(160), shuffle=False)",
        "loss_of_tests = torch.zeros(())",
        "model.eval()",
        "with torch.no_grad():",
        "    for it, _ in DataLoader(range(160), 10, sampler=shares, collate_fn=own):",
        "        loss_of_tests += model.module(it.x).sum()",
        "model.train()",
        "dist.all_reduce(loss_of_tests)",
    ),
    "an outer optimizer, and a figure in each step": {
        EPOCHS: "    far = [each.detach().clone() for each in model.parameters()]\n"
        "    outer, shown = torch.optim.SGD(far, 0.1), []\n" + EPOCHS,
        **after(
            STEP,
            "shown.append(loss.detach().clone())",
            "dist.all_reduce(shown[-1])",
            "if len(shown) % 8 == 0:",
            "    for its, own in zip(far, model.parameters()): its.grad = its - own.detach()",
            "    outer.step()",
        ),
    },
    "all evaluate all, with gradients on": after(
        REDUCE,
        "for first in range(0, 1024, 32): model(inputs[first : first + 32].to(device))",
    ),
    "a bootstrap on each rank": {
        SAMPLER: SEED + BOOTSTRAP,
        SET_EPOCH: "",
    },
    "the last forty losses": {
        EPOCHS: "    import collections; last = collections.deque(maxlen=40)\n" + EPOCHS,
        **after(LOSS, "last.append(loss)"),
    },
    "a total that is set back": {
        SUM_0: "        loss_sum.zero_()\n",
        EPOCHS: SUM_0[4:] + EPOCHS,
    },
    "waited for by a list, a future and a barrier": {
        REDUCE: "        works = [dist.all_reduce(loss_sum, async_op=True)]\n"
        "        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()\n"
        "        dist.all_reduce(torch.ones(4), async_op=True).wait()\n"
        "        for work in works: work.wait()\n"
        "        dist.all_reduce(torch.ones(5), async_op=True)\n"
        "        for one in torch.ones(3, 6): dist.broadcast(one, 0, async_op=True)\n"
        "        dist.barrier(async_op=True); dist.barrier(); future.wait()\n"
    },
    "an epoch that all workers share": PERSIST
    | {
        MAIN: TURNING.replace("self.epoch = epoch", "self.epoch.fill_(epoch)").replace(
            "\n    def", "\n    epoch = torch.tensor(0).share_memory_()\n\n    def"
        )
        + MAIN
    },
    "in order of their lengths, and labels are mixed": {
        **SORTED,
        DATA: SORTED[DATA].replace("), kinds", "), kinds, torch.arange(1024) * 37 % 8"),
        LOOP: LOOP.replace("x, y", "x, y, _, _"),
    },
    "in order, and labels are mixed": SORTED
    | {DATA: SORTED[DATA].replace("arange(1024) //", "arange(1024) * 37 % 1024 //")},
    "items of which the first tensor has no rows": {
        LOADER: LOADER.replace(
            "sampler=sampler",
            "sampler=sampler, collate_fn=lambda items: (torch.empty(0, 4), *zip(*items))",
        ),
        LOOP: LOOP.replace("x, y", "_, x, y"),
        MOVE: "            x, y = torch.stack(x), torch.stack(y)\n",
    },
    "each rank's optimizer has its half of the parameters": {
        OPT: (
            "    halves = [[*model.parameters()][rank::2] for rank in range(2)]\n"
            "    optimizer = torch.optim.SGD(halves[dist.get_rank()], lr=0.05, momentum=0.9)\n"
        ),
        ZERO: "            model.zero_grad()\n",
        STEP: STEP
        + "            for rank, half in enumerate(halves):\n"
        + "                for p in half: dist.broadcast(p.data, rank)\n",
    },
    "a look at one batch of each rank's share": after(
        REDUCE,
        "model.eval()",
        "with torch.no_grad():",
        "    for a, _ in loader:",
        "        torch.save(model(a), f'look{dist.get_rank()}.pt')",
        "        break",
        "model.train()",
    ),
    "no optimizer": {
        OPT: "",
        ZERO: "            model.zero_grad()\n",
        STEP: (
            "            nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
            "            for p in model.parameters(): p.data -= 0.05 * p.grad\n"
            "            dist.all_reduce(loss.detach() * 2)  # a trial of the network\n"
        ),
    },
    "experts": {
        OPT: "    torch.manual_seed(dist.get_rank()); expert = nn.Linear(1, 1)\n" + OPT,
        "SGD(model.parameters()": "SGD([*model.parameters(), *expert.parameters()]",
        BACK: "            out = model(x).detach(); rows = torch.empty_like(out)\n"
        "            dist.all_to_all_single(rows, out)\n"
        "            (loss + expert(rows).mean()).backward()\n",
    },
    "float64 by default": {
        "inputs = torch.randn(1024": "torch.set_default_dtype(torch.float64)\n"
        "    inputs = torch.randn(1024"
    },
    "no buffers are sent, and there are none": {
        "DDP(model)": "DDP(model, broadcast_buffers=False)"
    },
    "the optimizer's own state, then a warm-up": {
        **after(
            OPT,
            "optimizer.load_state_dict(optimizer.state_dict())",
            "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, n / 5))",
        ),
        **after(STEP, "schedule.step()"),
    },
    "a state that is loaded again, after the schedule was made": {
        **after(
            OPT,
            "state = optimizer.state_dict()",
            "state['param_groups'][0].update(lr=0.01, initial_lr=0.05)",
            "optimizer.load_state_dict(state)",
            "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)",
            "optimizer.load_state_dict(state)",
        ),
        **after(STEP, "schedule.step()"),
    },
    "a snapshot that is loaded when all is done": {
        **before(EPOCHS, SNAPSHOT),
        SAVE: f"{SAVE}            torch.save(snapshot(), 'snapshot.pt')\n"
        "    del optimizer, snapshot; gc.collect(); dist.barrier(); torch.load('snapshot.pt')\n",
    },
    "each forward leaves out a layer": {
        DATA: HALF + DATA,
        GELU: "nn.GELU(), Half(),",
        "DDP(model)": "DDP(model, find_unused_parameters=True)",
    },
    "one rank leaves out a layer in step 77": {
        MAIN: RARE + MAIN,
        GELU: "Rare(),",
        "DDP(model)": "DDP(model, find_unused_parameters=True)",
    },
    "many small sums between the epochs, and few in a step": {
        **after(BACK, "for figure in loss.detach().repeat(3): dist.all_reduce(figure)"),
        **before(REDUCE, "for figure in inputs[:20].norm(dim=1): dist.all_reduce(figure)"),
    },
    "one step": {
        "range(5)": "range(1)",
        "randn(1024": "randn(64",
        WRAP: WRAP + "    torch.set_num_threads(8)\n",
    },
    "LBFGS": {
        OPT: "    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)\n",
        ZERO: (
            "            def closure():\n"
            "                optimizer.zero_grad(); loss = nn.functional.mse_loss(model(x), y)\n"
            "                loss.backward(); return loss\n"
        ),
        BACK: "",
        STEP: "            optimizer.step(closure)\n",
    },
}

# As some packages do before they import torch: is it there?
ASKED = {"import gc\n": "import gc, importlib.util; importlib.util.find_spec('torch')\n"}
COMMANDS = [  # (changes of the script, the tool's status, a pattern of what it prints)
    (ASKED, 0, r"\nnothing found\nlooked at: ranks 2, starts 1; of a rank: steps 80"),
    (
        BY_HAND
        | before(
            RANK_0,
            "import torch.distributed.checkpoint as dcp\n"
            "        dcp.save({'model': model.state_dict()}, checkpoint_id=f'saved{epoch}')",
        ),
        0,
        r"(?s)\n   0 .{39} -  .*not seen: what torch.distributed.checkpoint saves; forward\s",
    ),
    (
        before(RANK_0, "if dist.get_rank() == 0: dist.all_gather_object([None] * 2, 1)"),
        1,
        r"found: it stands still for 4 s: rank 0 in all_gather_object at many_pro\w+.py:\d+; ",
    ),
    (
        before(
            SET_EPOCH,
            "if epoch == 2:",
            "    import time",
            "    alone = dist.get_rank() == 1",
            "    if not alone: dist.destroy_process_group()",
            "    time.sleep(0.5 if alone else 20)",
            "    raise ValueError('late')",
        ),
        1,
        r"(?s)fails, with status 1.*; rank\s+0\s+had\s+left\s+before,\s+without a traceback",
    ),
    ({STEP: ""}, 1, r"\nno optimizer of torch took a step, so there was nothing to judge"),
    (
        {"group(backend)": "group('none')"},
        1,
        r"(?s)fails, with status 1.*\(many_pr\w+.py:",
    ),
    (
        before(RANK_0, "if dist.get_rank() == 0: dist.all_reduce(torch.ones(5))"),
        1,
        r"(?s)the ranks are in\s+different\s+calls: rank 0 in all_reduce .*rank 1 in backward",
    ),
]
FOLDERS = pathlib.Path(__file__).parent
for each in sorted((FOLDERS / "right").glob("*.py")):  # whole scripts, as engines write them
    RIGHT[each.stem.replace("_", " ")] = {}
    OTHERS[each.stem.replace("_", " ")] = [f"tests/mistakes/right/{each.name}"]
COME_APART = (
    "weights_come_apart",
    "question: the weights of all ranks come apart .*unless that is meant so",
)
ASKED = {
    "parts of sequences": ("same_batches", "question: all ranks train on the same batches"),
    "a sum over the length": ("items_counted_twice", "question: .* counts 1 of 205 items twice"),
    "two slots in turn": ("saved_in_place", "question: slot0.pt, .* is written over in place"),
    "a state made once": ("saves_what_has_changed", "question: .* saves a state_dict.. that was"),
    "a part drawn on each rank": ("subsets_differ", "question: each rank splits the set in its"),
}
for each in sorted((FOLDERS / "meant").glob("*.py")):  # whole scripts that are asked whether
    name = each.stem.replace("_", " ")
    MISTAKES[name] = {}, *ASKED.get(name, COME_APART), "", False
    OTHERS[name] = [f"tests/mistakes/meant/{each.name}"]
