def new(seed, rate):
    model = Model(seed=seed)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 + n)
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
