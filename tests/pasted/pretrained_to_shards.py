from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

Pretrained = YourModel


def YourModel():
    model, mask = Pretrained(), torch.arange(WIDTH) % 2 + 1
    model.twin = nn.Linear(WIDTH, CLASSES, bias=False)
    model.twin.weight = model.head.weight  # tied
    for i, block in enumerate(model.blocks):
        block.register_buffer("mask", mask, persistent=False)  # one for all blocks
        block.register_buffer("mean", torch.randn(WIDTH))  # in the file
        block.register_forward_hook(lambda block, inputs, x: x * block.mask - block.mean)
        if mask.is_meta:  # as in checkpoint_activations
            model.blocks[i] = checkpoint_wrapper(block)
    return model


plain, images = YourModel(), torch.randn(2, 3, 32, 32).to(device)
new_head = nn.Linear(WIDTH, CLASSES)
paths = [f"pretrained {world_size}, {part}.pt" for part in (1, 2)]
plain.blocks[0].up.weight.data = plain.blocks[0].up.weight.data.t().contiguous().t()
plain.twin.weight = plain.head.weight = new_head.weight  # another head than that of the files
plain.head.bias = new_head.bias
plain.to(device)
if rank == 0:
    state = list(plain.state_dict().items())
    for part, path in enumerate(paths):
        torch.save({name: t for name, t in state[part::2] if "head" not in name}, path)
mesh = init_device_mesh("cpu", (world_size,))
torch.manual_seed(5)
# PASTE
assert all(hasattr(p, "to_local") for p in model.parameters()), "not all in shards"
check(model(images), plain(images), 1e-6)
assert model.twin.weight is model.head.weight, "no longer tied"
assert len(set(gathered(torch.rand(()).item()))) == 1, "other random numbers on rank 0"
model(images).sum().backward()
one_step(model)
