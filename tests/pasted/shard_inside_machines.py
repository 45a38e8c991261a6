os.environ["LOCAL_WORLD_SIZE"] = str(2 if world_size == 4 else world_size)  # two machines, or one
model = Model()
# PASTE
mse_loss(model(inputs), targets).backward()
check(gradient(model), gradient(plain))
kept = sum(p.to_local().numel() for p in model.parameters())
whole = sum(p.numel() for p in plain.parameters())
assert kept == whole // 2 or world_size == 3, f"{kept} of {whole} weights on a rank"
