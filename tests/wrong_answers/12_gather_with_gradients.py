def gather(rows):
    return Gather.apply(rows)


# ---- all_gather without gradients: the result does not require one ----
def gather(rows):
    parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


# ---- nothing exchanged: has shape \(5, 6\), not \(10, 6\) ----
def gather(rows):
    return rows


# ---- own rows put back: is that of this rank's loss alone ----
def gather(rows):
    parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


# ---- own part with a factor: is 2 times that of this rank's loss ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size())[dist.get_rank()] * dist.get_world_size()


# ---- averaged, not summed: is 0.50 times that of the sum ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


# ---- summed twice: is 2.00 times that of the sum ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous() * dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


# ---- the first part on every rank: Rank 1: the gradient of the rows is off by ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient[: len(gradient) // dist.get_world_size()]


# ---- the last rank first: does not have the rows of all ranks in their order ----
def gather(rows):
    parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts[::-1])


# ---- in place: the gradient of the result was changed ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


# ---- the memory as it is: is not contiguous, the gradient of the rows is off by ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        memory = gradient.as_strided(gradient.shape, (gradient.shape[1], 1)).clone()
        dist.all_reduce(memory)
        return memory.chunk(dist.get_world_size())[dist.get_rank()]


# ---- hard-coded for two ranks: 3 ranks: .* has shape \(10, 6\), not \(15, 6\) ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts[:2])

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(2)[dist.get_rank()]


# ---- all gradients gathered: 3 ranks: .* backward\(\) sent \d+ bytes ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        parts = [gradient.new_empty(gradient.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return sum(parts).chunk(dist.get_world_size())[dist.get_rank()]


# ---- rows as they lie in memory: a tensor that is not contiguous is to be filled by allgather ----
def gather(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


# ---- the gradient as it lies in memory: a tensor that is not contiguous goes into allreduce ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


# ---- the rows kept outside: the gradient of a contrastive loss is off ----
KEPT = {}


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [rows.new_empty(rows.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        KEPT["calls"] = KEPT.get("calls", 0) + 1
        ctx.call = KEPT["calls"]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        own = gradient.chunk(dist.get_world_size())[dist.get_rank()]
        return own if ctx.call == KEPT["calls"] else torch.zeros_like(own)


# ---- a result that is laid out in memory as the rows are: not contiguous ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


# ---- does not wait in backward: in backward\(\), 1 exchanges were begun, and nobody waits ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        whole = rows.new_empty(dist.get_world_size() * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(whole, rows.contiguous())
        return whole

    @staticmethod
    def backward(ctx, gradient):
        own = gradient.new_empty(len(gradient) // dist.get_world_size(), gradient.shape[1])
        dist.reduce_scatter_tensor(own, gradient.contiguous(), async_op=True)
        return own


gather = Gather.apply


# ---- torch.distributed.nn's all_gather: to be filled by scatter\n.*torch.distributed.nn may do ----
import torch.distributed.nn.functional as dnn


def gather(rows):
    return torch.cat(dnn.all_gather(rows.contiguous()), dim=0)


# ---- the gradient added in float32: off by .*\n.*float32 has 7 digits ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        out = rows.new_empty(dist.get_world_size() * rows.shape[0], rows.shape[1])
        dist.all_gather_into_tensor(out, rows.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        own = gradient.new_empty(len(gradient) // dist.get_world_size(), gradient.shape[1]).float()
        dist.reduce_scatter_tensor(own, gradient.float().contiguous())
        return own.double()


def gather(rows):
    return Gather.apply(rows)
