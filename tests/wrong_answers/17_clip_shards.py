import math


def squares(parameters):
    gradients = [p.grad for p in parameters if p.grad is not None]
    return gradients, sum((g.float().square().sum() for g in gradients), torch.zeros(()))


# ---- each rank by its own norm: this rank returns the norm of its own gradients ----
def clip_by_norm(parameters, max_norm):
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()


# ---- norms added up: this rank returns the sum of all ranks' norms ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    norm = square.sqrt()
    dist.all_reduce(norm)
    norm = norm.item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- the mean of the squares: divided by the root of the ranks' number ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = (square / dist.get_world_size()).sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- no root: this rank returns the square of the norm ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = square.item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- the largest norm: this rank returns the (largest of the ranks' norms|norm of its own gradients) ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square, op=dist.ReduceOp.MAX)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- squares in bfloat16: this is the precision of bfloat16 ----
def clip_by_norm(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = sum((g.square().sum() for g in gradients), torch.zeros(()))
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- torch's norm of a gradient in its own dtype: bfloat16': .* the precision of bfloat16 ----
def clip_by_norm(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = (torch.nn.utils.get_total_norm(gradients).float() if gradients else torch.zeros(())) ** 2
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- a rank without gradients returns at once: this rank returns the norm of its own gradients, 0 ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    if not gradients:
        return 0.0
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- a rank that sees a nan returns at once: After \d+ s, there is no end ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    if not square.isfinite():
        return square.sqrt().item()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    for g in gradients:
        g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- scaled by an infinite norm: the norm is (nan|inf), and a gradient was changed ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    for g in gradients:
        g *= min(1, max_norm / (norm + 1e-6)) if norm == norm else math.nan
    return norm


# ---- a nan taken for a zero: the norm is nan, and this rank returns \d ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    square = square.nan_to_num(0)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- made longer: is not above max_norm, 3.5 ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= max_norm / (norm + 1e-6)
    return norm


# ---- without the small number: a very small gradient': a gradient was scaled by 0.33\d+, not by 0.33 ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm) and norm > max_norm:
        for g in gradients:
            g *= max_norm / norm
    return norm


# ---- a new tensor for each gradient: .grad is another tensor than before ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for p in parameters:
            if p.grad is not None:
                p.grad = p.grad * min(1, max_norm / (norm + 1e-6))
    return norm


# ---- all gradients sent: a rank sent \d+ bytes ----
def clip_by_norm(parameters, max_norm):
    gradients, _ = squares(parameters)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, gradients)
    norm = math.sqrt(sum(g.double().square().sum().item() for its in everyone for g in its))
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- its own square added first: the ranks return different norms ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    parts = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, square)
    parts.pop(dist.get_rank())
    norm = sum(parts[::-1], square).sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- a tensor returned: tensor\(.*\) came back ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = square.sqrt()
    if norm.isfinite():
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- each rank looks at its own square: the norm is (inf|nan), and a gradient was changed ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    whole = bool(square.isfinite())
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if whole:
        for g in gradients:
            g *= min(1, max_norm / (norm + 1e-6))
    return norm


# ---- the norm of a matrix: the norm is 20, and this rank returns 19\.8 ----
import math
import torch
import torch.distributed as dist

# WRONG: of a matrix, linalg.norm(g, 2) is the largest singular value
def clip_by_norm(parameters, max_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    square = torch.zeros((), dtype=torch.float64)
    for g in grads:
        square += torch.linalg.norm(g.double(), 2) ** 2
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm) and norm + 1e-6 > max_norm:
        for g in grads:
            g.mul_(max_norm / (norm + 1e-6))
    return norm


# ---- products of vectors: shapes cannot be multiplied ----
import math
import torch
import torch.distributed as dist

# WRONG: g @ g is the square of a vector, not of a matrix
def clip_by_norm(parameters, max_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    square = torch.tensor(float(sum(g.double() @ g.double() for g in grads)), dtype=torch.float64)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm) and norm + 1e-6 > max_norm:
        for g in grads:
            g.mul_(max_norm / (norm + 1e-6))
    return norm


# ---- scales a copy: was scaled by 1, not by 0\.15 ----
import math
import torch
import torch.distributed as dist

# WRONG: flatten() copies what is not contiguous: that gradient stays as it was
def clip_by_norm(parameters, max_norm):
    flat = [p.grad.flatten() for p in parameters if p.grad is not None]
    square = torch.zeros((), dtype=torch.float64)
    for g in flat:
        square += g.double().square().sum()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm) and norm + 1e-6 > max_norm:
        for g in flat:
            g *= max_norm / (norm + 1e-6)
    return norm


# ---- max_norm 0 is no limit: was scaled by 1, not by 0 ----
import math
import torch
import torch.distributed as dist

# WRONG: a max_norm of 0 taken for "do not clip"
def clip_by_norm(parameters, max_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    square = torch.tensor(sum(g.double().square().sum().item() for g in grads), dtype=torch.float64)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if max_norm and math.isfinite(norm):
        for g in grads:
            g.mul_(min(1, max_norm / (norm + 1e-6)))
    return norm


# ---- the own square in float64, the others' in float32: the ranks return different norms ----
def clip_by_norm(parameters, max_norm):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = sum(p.grad.double().square().sum().item() for p in parameters if p.grad is not None)
    came = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(came, torch.tensor([float(own)]))
    norm = math.sqrt(sum(own if r == rank else came[r].item() for r in range(ranks)))
    factor = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and factor < 1:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(factor)
    return norm


# ---- .data replaced: \.grad is another tensor than before, or has other memory ----
def clip_by_norm(parameters, max_norm):
    gradients, square = squares(parameters)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if math.isfinite(norm):
        for g in gradients:
            g.data = g.data * min(1, max_norm / (norm + 1e-6))
    return norm
