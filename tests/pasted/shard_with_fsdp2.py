model, expected = Model(), torch.optim.AdamW(plain.parameters())
# PASTE
for _ in range(3):
    take_step(plain, expected, all_inputs, all_targets)
    take_step(model, optimizer, inputs, targets)
start, held = weights(Model()), sum(p.to_local().nbytes for p in model.parameters())
check(weights(model) - start, weights(plain) - start, 1e-3)
assert held < 1.2 * start.nbytes / world_size, f"{held} bytes on this rank"
assert all(hasattr(block, "unshard") for block in model.blocks), "all gathered at once"
