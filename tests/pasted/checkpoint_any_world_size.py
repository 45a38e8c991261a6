def new(seed, rate):
    model = Model(seed=seed)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 9])


def contents(step):
    moments = flat(optimizer.state[p]["exp_avg_sq"] for p in model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    return step, weights(model).tolist(), moments.tolist(), rate, scheduler.state_dict()


root = "saves"
if world_size == 2:
    (model, optimizer, scheduler), step = new(seed=0, rate=0.1), 3
    take_step(model, optimizer, inputs, targets)
    scheduler.step()
    torch.save(contents(step), f"expected by rank {rank}")
    # PASTE1
model, optimizer, scheduler = new(seed=2, rate=1)
# PASTE2
assert contents(step) == torch.load("expected by rank 0"), "loaded something else"


class History(dict):  # it grows
    state_dict, load_state_dict = dict.copy, dict.update


best, found = History({1: [{"loss": 0.5}]}), History()
root = f"saves of {world_size}"
save_shards(model, optimizer, 4, root, scheduler=scheduler, best=best)
model, optimizer, scheduler = new(seed=3, rate=2)
model(inputs).sum().backward()  # to try out the memory
step = load_folder(model, optimizer, newest(root), scheduler=scheduler, best=found)
assert (step, found) == (4, best), f"loaded {step}, {found}"
assert contents(3) == torch.load("expected by rank 0"), "loaded again, something else"
take_step(model, optimizer, inputs, targets)


class Average:
    def __init__(self, factor):
        self.shards = [factor * p.detach() for p in model.parameters()]
        self.state_dict, self.load_state_dict = lambda: {"shards": self.shards}, lambda state: None


mean, root = Average(1), f"more of {world_size}"
save_shards(model, optimizer, 5, root, mean=mean)
expected, mean = flat(mean.shards), Average(0)
load_folder(model, optimizer, newest(root), mean=mean)
check(flat(mean.shards), expected, 1e-9)


class Part(nn.Module):  # of a pipeline, or of experts: each rank has a layer of its own
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(rank): Block(8)}).to(device)

    def forward(self, x):
        return self.layers[str(rank)](x)


part, root = Part(), f"parts of {world_size}"
optimizer = torch.optim.AdamW(part.parameters(), lr=0.25)
take_step(part, optimizer, inputs, targets)
save_shards(part, optimizer, 6, root)
take_step(part, optimizer, inputs, targets)
expected, part = weights(part), Part()
optimizer = torch.optim.AdamW(part.parameters(), lr=2)
load_folder(part, optimizer, newest(root))
take_step(part, optimizer, inputs, targets)
check(weights(part), expected, 1e-9)
