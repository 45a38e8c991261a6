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


# ---- those of rank 0 for all: still the rank's own(?s:.*)hint: broadcast copies|is that of rank 0\s+hint: which collective adds up ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.broadcast(p.grad, src=0)


# ---- those of the last rank for all: the gradient of 0.weight is (that of rank \d|still the rank's own) ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.broadcast(p.grad, src=dist.get_world_size() - 1)


# ---- the sum on rank 0 alone: Rank 1: (?s:.*)hint: reduce leaves the sum on one rank ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            mine = p.grad.clone()
            dist.reduce(mine, dst=0)
            if dist.get_rank() == 0:
                p.grad = mine / dist.get_world_size()


# ---- in half precision: is off by \S+ of its length ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            half = p.grad.bfloat16()
            dist.all_reduce(half)
            p.grad.copy_(half / dist.get_world_size())


# ---- the weights averaged, too: the weights were changed ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            with torch.no_grad():
                p -= 0.1 * p.grad


# ---- a frozen parameter given one: does not train, and has a gradient ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- a gradient of zero left out: (process has ended|exception|no end) ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None and p.grad.abs().sum() > 0:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# ---- own part twice: is off by|times the mean ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(each, p.grad)
            p.grad += sum(each)
            p.grad /= dist.get_world_size() + 1


# ---- the gradients of the first call: is still the rank's own ----
import torch, torch.distributed as dist
def average_gradients(model):
    if not hasattr(model, "to_average"):
        model.to_average = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in model.to_average:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


# ---- weights and biases alone: 3\.scale is still the rank's own ----
import torch, torch.distributed as dist
def average_gradients(model):
    for layer in model.modules():
        for name in ("weight", "bias"):
            p = getattr(layer, name, None)
            if p is not None and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


# ---- waits for the last one: exchanges were begun, and nobody waits ----
import torch, torch.distributed as dist
def average_gradients(model):
    work = None
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= dist.get_world_size()
            work = dist.all_reduce(p.grad, async_op=True)
    work.wait()


# ---- pieces of the first dimension: tensor_split expected at least a 1-dimensional ----
def average_gradients(model):
    n = dist.get_world_size()
    for p in model.parameters():
        if p.grad is None:
            continue
        for r, piece in enumerate(p.grad.tensor_split(n)):  # rank r is responsible for piece r
            piece = piece.contiguous()
            dist.reduce(piece, dst=r)
            piece /= n
            dist.broadcast(piece, src=r)


# ---- divided on its way: is off by \S+ of its length ----
def average_gradients(model):
    trained = [p for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(p.grad, async_op=True) for p in trained]
    for p in trained:
        p.grad /= dist.get_world_size()
    for work in works:
        work.wait()


# ---- the process group destroyed: (?s:.*)does your code call destroy_process_group ----
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    dist.destroy_process_group()
