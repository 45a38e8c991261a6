model, path, average = DDP(Model()), f"{world_size}.pt", None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = list(zip(inputs.chunk(4), targets.chunk(4)))


def your_step():
    global average
    take_step(model, optimizer, inputs, targets)
    now = weights(model)
    average = now if average is None else 0.999 * average + 0.001 * now


# PASTE
plain.load_state_dict(torch.load(path, map_location="cpu"))
check(weights(plain), average, 1e-6)
