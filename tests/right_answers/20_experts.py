# ---- torch's own exchange with autograd ----
from torch.distributed._functional_collectives import all_to_all_single_autograd


def through_experts(rows, chosen, expert):
    ranks = dist.get_world_size()
    table = [torch.empty(ranks, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(table, chosen.bincount(minlength=ranks))
    table = torch.stack(table)
    leaving, coming = table[dist.get_rank()].tolist(), table[:, dist.get_rank()].tolist()
    order = chosen.argsort()
    rows = rows if rows.requires_grad else rows.detach().requires_grad_()
    arrived = all_to_all_single_autograd(rows[order].contiguous(), coming, leaving, dist.group.WORLD)
    answers = expert(arrived + 0).contiguous()
    back = all_to_all_single_autograd(answers, leaving, coming, dist.group.WORLD)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return (back + 0)[inverse]


# ---- messages from rank to rank ----
class Messages(torch.autograd.Function):
    @staticmethod
    def forward(ctx, coming, *parts):
        ctx.counts = [len(part) for part in parts]
        received = [parts[0].new_empty(n, parts[0].shape[1]) for n in coming]
        rank, works = dist.get_rank(), []
        for other, (part, place) in enumerate(zip(parts, received)):
            if other == rank:
                place.copy_(part)
                continue
            if len(part):
                works.append(dist.isend(part.contiguous(), other))
            if len(place):
                works.append(dist.irecv(place, other))
        for work in works:
            work.wait()
        return tuple(received)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *Messages.apply(ctx.counts, *gradients)


def through_experts(rows, chosen, expert):
    ranks = range(dist.get_world_size())
    lines = [(chosen == e).nonzero().flatten() for e in ranks]
    counts = [None for _ in ranks]
    dist.all_gather_object(counts, [len(line) for line in lines])
    coming = [its[dist.get_rank()] for its in counts]
    parts = Messages.apply(coming, *[rows[line] for line in lines])
    back = Messages.apply([len(line) for line in lines], *expert(torch.cat(parts)).split(coming))
    result = rows.new_zeros(rows.shape)
    for line, part in zip(lines, back):
        result = result.index_add(0, line, part)
    return result


# ---- one Function for the whole way, which runs the expert's own backward ----
def exchange(rows, leaving, coming):
    received = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), coming, leaving)
    return received


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, leaving, coming, expert, anchor):
        with torch.enable_grad():
            ctx.arrived = exchange(rows, leaving, coming).requires_grad_()
            ctx.results = expert(ctx.arrived)
        ctx.counts = leaving, coming
        return exchange(ctx.results.detach(), coming, leaving)

    @staticmethod
    def backward(ctx, gradient):
        ctx.results.backward(exchange(gradient, *ctx.counts))
        return exchange(ctx.arrived.grad, *ctx.counts[::-1]), None, None, None, None


def through_experts(rows, chosen, expert):
    _, places = chosen.sort(stable=True)
    leaving = torch.zeros(dist.get_world_size(), dtype=torch.int32)
    for one in chosen.tolist():
        leaving[one] += 1
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    anchor = torch.zeros((), requires_grad=True)
    back = Whole.apply(rows[places], leaving.tolist(), coming.tolist(), expert, anchor)
    return torch.zeros_like(rows).index_copy(0, places, back)


# ---- torch.distributed.nn.functional, and own rows that stay at home ----
from torch.distributed.nn.functional import all_to_all_single


def through_experts(rows, chosen, expert):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    at_home = (chosen == rank).nonzero().flatten()
    away = (chosen != rank).nonzero().flatten()
    away = away[chosen[away].argsort()]
    leaving = torch.bincount(chosen[away], minlength=ranks)
    coming = torch.zeros_like(leaving)
    dist.all_to_all_single(coming, leaving)
    leaving, coming = leaving.tolist(), coming.tolist()
    if not rows.requires_grad:
        rows = rows.detach().clone().requires_grad_()
    arrived = all_to_all_single(rows.new_empty(sum(coming), rows.shape[1]), rows[away],
                                output_split_sizes=coming, input_split_sizes=leaving)
    own, others = expert(torch.cat([rows[at_home], arrived])).tensor_split([len(at_home)])
    back = all_to_all_single(rows.new_empty(len(away), rows.shape[1]), others.contiguous(),
                             output_split_sizes=leaving, input_split_sizes=coming)
    return torch.cat([own, back])[torch.cat([at_home, away]).argsort()]


# ---- sorts inside the functions ----
import torch
import torch.distributed as dist

class Ways:
    def __init__(self, chosen):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.table = torch.zeros(ranks * ranks, dtype=torch.int32)
        own = (chosen[:, None] == torch.arange(ranks)).sum(dim=0).to(torch.int32)
        dist.all_gather_into_tensor(self.table, own); self.table = self.table.view(ranks, ranks)
        self.leaving, self.coming = self.table[rank].tolist(), self.table[:, rank].tolist()
        self.places = torch.cat([(chosen == r).nonzero().flatten() for r in range(ranks)])

    def go(self, rows):
        there = rows.new_empty(sum(self.coming), rows.shape[1])
        dist.all_to_all_single(there, rows.index_select(0, self.places), self.coming, self.leaving, async_op=True).wait()
        return there

    def come(self, rows):
        back = rows.new_empty(sum(self.leaving), rows.shape[1])
        dist.all_to_all_single(back, rows.contiguous(), self.leaving, self.coming, async_op=True).wait()
        return torch.empty_like(back).index_copy_(0, self.places, back)

class Go(torch.autograd.Function):
    forward = staticmethod(lambda ctx, rows, ways: (setattr(ctx, "ways", ways), ways.go(rows))[1])
    backward = staticmethod(lambda ctx, gradient: (ctx.ways.come(gradient), None))

class Come(torch.autograd.Function):
    forward = staticmethod(lambda ctx, rows, ways: (setattr(ctx, "ways", ways), ways.come(rows))[1])
    backward = staticmethod(lambda ctx, gradient: (ctx.ways.go(gradient), None))

def through_experts(rows, chosen, expert):
    ways = Ways(chosen)
    return Come.apply(expert(Go.apply(rows, ways)), ways)


# ---- a custom op ----
@torch.library.custom_op("learner::exchange", mutates_args=())
def exchange(rows: torch.Tensor, leaving: list[int], coming: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), coming, leaving)
    return out


def keep(ctx, inputs, output):
    _, ctx.leaving, ctx.coming = inputs


exchange.register_autograd(
    lambda ctx, gradient: (exchange(gradient, ctx.coming, ctx.leaving), None, None),
    setup_context=keep)


def through_experts(rows, chosen, expert):
    order = chosen.argsort(stable=True)
    leaving = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving)
    leaving, coming = leaving.tolist(), coming.tolist()
    arrived = exchange(rows[order], leaving, coming)
    return exchange(expert(arrived), coming, leaving)[order.argsort()]
