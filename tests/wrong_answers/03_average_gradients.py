# ---- nothing exchanged: still the rank's own ----
def average_gradients(model):
    pass


# ---- a copy: still the rank's own ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            mean = p.grad.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()


# ---- summed: is 2.00 times the mean ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)


# ---- averaged twice: is 0.50 times the mean ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# ---- hard-coded for two ranks: 3 ranks: .* is 1.50 times the mean ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2


# ---- those of rank 0 for all: is off by ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.broadcast(p.grad, src=0)
            p.grad *= 1.01


# ---- the weights averaged, too: the weights were changed ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            with torch.no_grad():
                p -= 0.1 * p.grad


# ---- everything gathered: bytes were sent for ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            gradients = [None] * dist.get_world_size()
            dist.all_gather_object(gradients, p.grad)
            p.grad = torch.stack(gradients).mean(dim=0)


# ---- a frozen parameter given one: does not train, and has a gradient ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- a gradient of zero left out: 3 ranks: .*(the process has ended|error|still) ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None and p.grad.abs().sum() > 0:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
