os.environ["LOCAL_WORLD_SIZE"] = str(2 if world_size == 4 else world_size)  # two machines, or one
model, loss_fn = Model(), mse_loss
micro_batches = list(zip(inputs.chunk(2), targets.chunk(2)))
# PASTE1
dist.all_reduce = counted
# PASTE2
check(gradient(model), gradient(plain))
kept = sum(p.to_local().numel() for p in model.parameters())
whole = sum(p.numel() for p in plain.parameters())
assert kept == whole // 2 or world_size == 3, f"{kept} of {whole} weights on a rank"
assert world_size == 3 or sum(sent) == 4 * kept, f"{sum(sent)} bytes across machines"
one_step(model)
