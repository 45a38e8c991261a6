import math


# ---- squares gathered, and a zero factor left out ----
def clip_by_norm(parameters, max_norm):
    own = torch.zeros(1, dtype=torch.float64)
    for p in parameters:
        if p.grad is not None:
            own += (p.grad.double() ** 2).sum()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    norm = math.sqrt(sum(part.item() for part in parts))
    if math.isfinite(norm) and max_norm < norm + 1e-6:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(max_norm / (norm + 1e-6))
    return norm


# ---- torch's two halves ----
def clip_by_norm(parameters, max_norm):
    in_float32 = [p.grad.float() for p in parameters if p.grad is not None]
    norm = torch.as_tensor(torch.nn.utils.get_total_norm(in_float32), dtype=torch.float32)
    norms = torch.zeros(dist.get_world_size())
    dist.all_gather_into_tensor(norms, norm.reshape(1))
    norm = torch.linalg.vector_norm(norms)
    if norm.isfinite():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.item()


# ---- by way of rank 0, and with a flag for what is broken ----
def clip_by_norm(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = sum(one.float().norm() ** 2 for one in gradients)
    square = torch.tensor(float(square))
    broken = torch.tensor(float(not square.isfinite()))
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    if broken:
        return math.nan
    dist.reduce(square, 0)
    dist.broadcast(square, 0)
    norm = square.sqrt().item()
    if norm > max_norm - 1e-6:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6)) if gradients else None
    return norm


# ---- objects, and one flat tensor ----
def clip_by_norm(parameters, max_norm):
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    flat = torch.cat([g.float().flatten() for g in grads]) if grads else torch.zeros(0)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, flat.dot(flat).item())
    norm = math.fsum(everyone) ** 0.5 if all(map(math.isfinite, everyone)) else math.inf
    factor = max_norm / (norm + 1e-6)
    if norm < math.inf and factor < 1:
        [g.copy_(g * factor) for g in grads]
    return norm


# ---- messages to all others ----
import math
import torch
import torch.distributed as dist

# RIGHT: each rank sends its number to each other one, in a batch; a class
class Clip:
    def __init__(self, parameters):
        self.grads = [p.grad for p in parameters if p.grad is not None]

    def own(self):
        if not self.grads:
            return torch.zeros(1, dtype=torch.float64)
        norms = torch._foreach_norm([g.float() for g in self.grads])
        return torch.stack(norms).double().pow(2).sum().reshape(1)

    def everyone(self):
        mine, rank = self.own(), dist.get_rank()
        all_of = [mine if r == rank else torch.empty_like(mine) for r in range(dist.get_world_size())]
        calls = [dist.P2POp(op, t, r) for r, one in enumerate(all_of) if r != rank
                 for op, t in ((dist.isend, mine), (dist.irecv, one))]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return torch.cat(all_of).tolist()

    def scale(self, factor):
        for g in self.grads:
            g.copy_(g.float() * factor)


def clip_by_norm(parameters, max_norm):
    clip = Clip(parameters)
    norm = math.sqrt(sum(clip.everyone()))
    if norm not in (math.inf,) and norm == norm and max_norm / (norm + 1e-6) < 1:
        clip.scale(max_norm / (norm + 1e-6))
    return norm
