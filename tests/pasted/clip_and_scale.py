model, MAX_NORM = DDP(Model()), 0.05
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1), torch.amp.GradScaler("cpu")
steps = [
    list(zip(rows.chunk(4), targets.chunk(4)))  # the first step is to be skipped
    for rows in (inputs * (math.inf if rank == last else 1), inputs)
]
for micro_batches in steps:
    # PASTE
    pass
nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
check(weights(Model()) - weights(model), gradient(plain), 0.01)
assert scaler.get_scale() == 32768
