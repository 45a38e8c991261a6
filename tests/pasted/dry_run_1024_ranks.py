device = None  # of tensors that are no real ones, nothing is moved


def YourModel():
    return Model(width=1024)


def train_one_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4096, 1024)).square().mean().backward()
    optimizer.step()


# PASTE
with torch.device("meta"):
    whole, block = (4 * weights(net).numel() for net in (YourModel(), Block(1024)))
kept = sum(p.to_local().nbytes for p in model.parameters())
assert kept == whole / 1024 and sent.bytes["reduce-scatter"] == whole, f"{kept} of {whole}: {sent}"
assert sent.calls == {"all-gather": 2 * 2 + 1, "reduce-scatter": 3}, sent.calls
row = 4096 * 1024 * 4  # bytes; a block keeps its input, and the results of up and of tanh()
[stays] = memory.get_tracker_snapshot("current").values()  # weights, gradients, two averages
assert 4 * kept < sum(stays.values()) / 2 < 4 * kept + 100, stays  # and AdamW's counts of steps
[peak] = memory.get_tracker_snapshot("peak").values()
assert 2 * (1 + 2) * row + 2 * block < sum(peak.values()) / 2 < 12 * row + 3 * block, peak
assert sum(n for kind, n in peak.items() if "OPT" in str(kind)) > 2 * kept, f"no averages: {peak}"
