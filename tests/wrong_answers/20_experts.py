class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None


def counted(chosen):
    leaving = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    return leaving.tolist(), coming.tolist()


# ---- each rank its own expert: result.* wrong|and \d+ have chosen it ----
def through_experts(rows, chosen, expert):
    return expert(rows)


# ---- the order not restored: the results are right, but in another order than the rows ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    arrived = Exchange.apply(rows[chosen.argsort(stable=True)], leaving, coming)
    return Exchange.apply(expert(arrived), coming, leaving)


# ---- put back by order, not by its inverse: the results are right, but in another order ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(rows[order], leaving, coming)
    return Exchange.apply(expert(arrived), coming, leaving)[order]


# ---- not sorted: \d+ of \d+ results are wrong; the first is that of row \d+ ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    arrived = Exchange.apply(rows, leaving, coming)
    return Exchange.apply(expert(arrived), coming, leaving)


# ---- without autograd: no gradient has reached the rows|no gradient can go back ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(arrived, rows.detach()[order], coming, leaving)
    back = rows.new_empty(len(rows), rows.shape[1])
    dist.all_to_all_single(back, expert(arrived).detach().contiguous(), leaving, coming)
    return back[order.argsort()]


# ---- the way to the expert without autograd: no gradient has reached the rows ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(arrived, rows.detach()[order], coming, leaving)
    return Exchange.apply(expert(arrived), coming, leaving)[order.argsort()]


# ---- an idle expert not called: the expert was called 0 times ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(rows[order], leaving, coming)
    results = expert(arrived) if len(arrived) else torch.empty_like(arrived)
    return Exchange.apply(results, coming, leaving)[order.argsort()]


# ---- an idle expert called, and its result thrown away: no row for expert 0': no gradient has reached the rows ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(rows[order], leaving, coming)
    results = expert(arrived)
    if not len(arrived):
        results = torch.empty_like(arrived).detach().requires_grad_()
    return Exchange.apply(results, coming, leaving)[order.argsort()]


# ---- called for the rows of each rank: the expert was called [23] times ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(rows[order], leaving, coming)
    results = torch.cat([expert(part) for part in arrived.split(coming)])
    return Exchange.apply(results, coming, leaving)[order.argsort()]


# ---- filled up to equal lengths: called with \d+ rows, and \d+ have chosen it ----
def through_experts(rows, chosen, expert):
    ranks = dist.get_world_size()
    most = torch.tensor(len(rows))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    lines = [(chosen == e).nonzero().flatten() for e in range(ranks)]
    full = torch.cat([torch.cat([rows[line], rows.new_zeros(int(most) - len(line), rows.shape[1])])
                      for line in lines])
    equal = [int(most)] * ranks
    back = Exchange.apply(expert(Exchange.apply(full, equal, equal)), equal, equal)
    result = torch.empty_like(rows)
    for line, part in zip(lines, back.split(equal)):
        result = result.index_copy(0, line, part[: len(line)])
    return result


# ---- filled up on the way, cut before the expert: this rank sends \d+ bytes ----
def through_experts(rows, chosen, expert):
    ranks = dist.get_world_size()
    leaving, coming = counted(chosen)
    most = torch.tensor(max(leaving))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    equal = [int(most)] * ranks

    def padded(parts):
        return torch.cat([torch.nn.functional.pad(p, (0, 0, 0, int(most) - len(p))) for p in parts])

    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(padded(rows[order].split(leaving)), equal, equal).split(equal)
    results = expert(torch.cat([p[:n] for p, n in zip(arrived, coming)]))
    back = Exchange.apply(padded(results.split(coming)), equal, equal).split(equal)
    return torch.cat([p[:n] for p, n in zip(back, leaving)])[order.argsort()]


# ---- the gradient's numbers not swapped: an exception|After \d+ s|the process has ended ----
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way = leaving, coming
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Straight.apply(gradient, *ctx.way), None, None


def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Straight.apply(rows[order], leaving, coming)
    return Straight.apply(expert(arrived), coming, leaving)[order.argsort()]


# ---- a gradient that is not contiguous: a tensor that is not contiguous goes into alltoall ----
class Loose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows, coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Loose.apply(gradient, *ctx.way_back), None, None


def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Loose.apply(rows[order], leaving, coming)
    back = Loose.apply(expert(arrived), coming, leaving)
    return NotThere.apply(back, order)


class NotThere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, back, order):
        ctx.order = order
        return back[order.argsort()]

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mT[:, ctx.order].mT, None


# ---- divided by the ranks: the gradient of the rows is 0.5 times what it should be ----
class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        return Exchange.apply(rows, leaving, coming)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back) / dist.get_world_size(), None, None


def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(rows[order], leaving, coming)
    return Mean.apply(expert(arrived), coming, leaving)[order.argsort()]


# ---- all rows to all ranks: this rank sends \d+ bytes ----
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, counts):
        ctx.counts = counts
        parts = [rows.new_empty(n, rows.shape[1]) for n in counts]
        for rank, part in enumerate(parts):
            part.copy_(rows) if rank == dist.get_rank() else None
            dist.broadcast(part, rank)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.split(ctx.counts)[dist.get_rank()], None


def through_experts(rows, chosen, expert):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, chosen)
    counts, all_chosen = [len(one) for one in everyone], torch.cat(everyone)
    mine = all_chosen == dist.get_rank()
    results = torch.zeros(len(all_chosen), rows.shape[1], dtype=rows.dtype)
    line = mine.nonzero().flatten()
    results = results.index_copy(0, line, expert(Gather.apply(rows, counts)[line]))
    whole = Gather.apply(results, [len(all_chosen)] * dist.get_world_size())
    return sum(whole.split(len(all_chosen))).split(counts)[dist.get_rank()]


# ---- tells all ranks every choice: rows for all experts.*forward, this rank sends ----
import torch
import torch.distributed as dist

class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None

# WRONG: all ranks get all choices, 8 bytes a row: with 4096 rows, 32 kB to each rank, not 1000 bytes
def through_experts(rows, chosen, expert):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = [None] * ranks
    dist.all_gather_object(everyone, chosen)
    leaving = chosen.bincount(minlength=ranks).tolist()
    coming = [int((its == rank).sum()) for its in everyone]
    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(rows[order], leaving, coming)
    return Exchange.apply(expert(arrived), coming, leaving)[order.argsort()]


# ---- results that are not contiguous: not contiguous ----
import torch
import torch.distributed as dist

class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows, coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient.contiguous(), *ctx.way_back), None, None

def through_experts(rows, chosen, expert):
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    leaving, coming = leaving.tolist(), coming.tolist()
    back = Exchange.apply(expert(Exchange.apply(rows[order], leaving, coming)), coming, leaving)
    return back[order.argsort()]


# ---- counts in a class: invalid gradient ----
import torch
import torch.distributed as dist

def exchange(rows, leaving, coming):
    received = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
    return received

class There(torch.autograd.Function):
    counts = None

    @staticmethod
    def forward(ctx, rows):
        return exchange(rows, *There.counts)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, *There.counts[::-1])

class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return exchange(rows, *There.counts[::-1])

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, *There.counts)

def through_experts(rows, chosen, expert):
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    There.counts = leaving.tolist(), coming.tolist()
    return Back.apply(expert(There.apply(rows[order])))[order.argsort()]


# ---- the given rows learn to need a gradient: which require no gradient.*afterwards the rows do ----
import torch
import torch.distributed as dist

class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None

# WRONG: rows that need no gradient need one afterwards, and get a .grad ("rows and chosen stay as they are")
def through_experts(rows, chosen, expert):
    rows.requires_grad_()
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    leaving, coming = leaving.tolist(), coming.tolist()
    return Exchange.apply(expert(Exchange.apply(rows[order], leaving, coming)), coming, leaving)[order.argsort()]


# ---- does not wait: forward, 2 exchanges were begun, and nobody waits for them ----
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        ctx.way_back = coming, leaving
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving, async_op=True)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None


def through_experts(rows, chosen, expert):
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    leaving, coming = leaving.tolist(), coming.tolist()
    arrived = Exchange.apply(rows[order], leaving, coming)
    return Exchange.apply(expert(arrived), coming, leaving)[order.argsort()]


# ---- the numbers on a stack that all calls share: in the same order ----
STACK = []


class Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming):
        STACK.append((coming, leaving))
        received = rows.new_empty(sum(coming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
        return received

    @staticmethod
    def backward(ctx, gradient):
        leaving, coming = STACK.pop()
        received = gradient.new_empty(sum(coming), gradient.shape[1])
        dist.all_to_all_single(received, gradient.contiguous(), coming, leaving)
        return received, None, None


def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Shared.apply(rows[order], leaving, coming)
    return Shared.apply(expert(arrived), coming, leaving)[order.argsort()]


# ---- rows sent as float32: the results are off by .*\n.*float32 has 7 digits ----
def through_experts(rows, chosen, expert):
    leaving, coming = counted(chosen)
    order = chosen.argsort(stable=True)
    arrived = Exchange.apply(rows[order].float(), leaving, coming).double()
    return Exchange.apply(expert(arrived), coming, leaving)[order.argsort()]
