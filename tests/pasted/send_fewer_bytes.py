dist.all_reduce = counted
rows = torch.randn(world_size, 64).to(device)
plain = nn.Linear(64, 64, bias=False).to(device)


def backward(model, rows):
    sent.clear()
    model.zero_grad()
    model(rows).pow(3).mean().backward()


backward(plain, rows)
model = DDP(copy.deepcopy(plain))
# PASTE1
backward(model, rows[rank : rank + 1])
check(gradient(model), gradient(plain), 0.01)
assert sum(sent) == 2 * 64 * 64, f"{sum(sent)} bytes"
model = DDP(copy.deepcopy(plain))
# PASTE2
state.start_powerSGD_iter = 2  # in place of 1000
for _ in range(4):
    backward(model, rows[rank : rank + 1])
check(gradient(model), gradient(plain), 0.01)  # so few rows have a gradient of low rank
assert sum(sent) == 4 * 2 * 4 * 64, f"{sum(sent)} bytes"
one_step(model)
