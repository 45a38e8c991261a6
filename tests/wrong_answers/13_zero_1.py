# ---- nothing sharded: this rank keeps \d+ bytes besides ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, self.optimizer = weights, torch.optim.AdamW([weights], lr=lr)

    def step(self):
        dist.all_reduce(self.weights.grad)
        self.weights.grad /= dist.get_world_size()
        self.optimizer.step()


# ---- nothing exchanged: that this rank's own gradient gives ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.optimizer = torch.optim.AdamW([weights], lr=lr)

    def step(self):
        self.optimizer.step()


# ---- the parts not gathered: weights are the same after step 1 as before ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights = weights
        self.part = weights.detach().tensor_split(dist.get_world_size())[dist.get_rank()]
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        dist.all_reduce(self.weights.grad)
        self.weights.grad /= dist.get_world_size()
        parts = self.weights.grad.tensor_split(dist.get_world_size())
        self.part.grad = parts[dist.get_rank()].clone()
        self.optimizer.step()
        self.part.grad = None


# ---- summed, not averaged: that the sum of the gradients, not the mean gives ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(self.part.grad, pad(self.weights.grad, (0, self.fill)))
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.detach().copy_(whole[: len(self.weights)])


# ---- averaged twice: divided once more gives ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        self.part.grad = torch.empty_like(self.part)
        mean = pad(self.weights.grad, (0, self.fill)) / dist.get_world_size()
        dist.reduce_scatter_tensor(self.part.grad, mean, op=dist.ReduceOp.AVG)
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.detach().copy_(whole[: len(self.weights)])


# ---- the own gradient for the own part: weights are off ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        gradient = pad(self.weights.grad, (0, self.fill))
        self.part.grad = gradient.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.detach().copy_(whole[: len(self.weights)])


# ---- the rest dropped: the first is number 1000 ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, self.size = weights, len(weights) // dist.get_world_size()
        start = dist.get_rank() * self.size
        self.part = weights.detach()[start : start + self.size].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        count = self.size * dist.get_world_size()
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(self.part.grad, self.weights.grad[:count])
        self.part.grad /= dist.get_world_size()
        self.optimizer.step()
        self.part.grad = None
        dist.all_gather_into_tensor(self.weights.detach()[:count], self.part)


# ---- an all_reduce and an all_gather: An all_reduce gives each rank the mean for all parts ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        dist.all_reduce(self.weights.grad)
        mean = pad(self.weights.grad / dist.get_world_size(), (0, self.fill))
        self.part.grad = mean.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.detach().copy_(whole[: len(self.weights)])


# ---- the part a view of a padded copy: this rank keeps \d+ bytes besides ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()]
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(self.part.grad, pad(self.weights.grad, (0, self.fill)))
        self.part.grad /= dist.get_world_size()
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.detach().copy_(whole[: len(self.weights)])


# ---- hard-coded for two ranks: 3 ranks: .* weights are (off|the same after step 1) ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, self.half = weights, (len(weights) + 1) // 2
        start = dist.get_rank() * self.half
        self.part = weights.detach()[start : start + self.half].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        rank = dist.get_rank()
        if rank > 1:
            return
        theirs = [self.weights.grad[: self.half], self.weights.grad[self.half :]][1 - rank]
        self.part.grad = torch.empty_like(self.part)
        for one in (dist.isend(theirs, 1 - rank), dist.irecv(self.part.grad, 1 - rank)):
            one.wait()
        start = rank * self.half
        self.part.grad += self.weights.grad[start : start + self.half]
        self.part.grad /= 2
        self.optimizer.step()
        self.part.grad = None
        parts = [self.weights.detach()[: self.half], self.weights.detach()[self.half :]]
        parts[rank].copy_(self.part)
        for one in (dist.isend(parts[rank], 1 - rank), dist.irecv(parts[1 - rank], 1 - rank)):
            one.wait()


# ---- the weights at another place: weights.data was replaced ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        self.part.grad = torch.empty_like(self.part)
        mean = pad(self.weights.grad, (0, self.fill)) / dist.get_world_size()
        dist.reduce_scatter_tensor(self.part.grad, mean)
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.data = whole[: len(self.weights)].clone()



# ---- gradients in single precision: weights are off ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        self.part.grad = torch.empty_like(self.part)
        mean = pad(self.weights.grad, (0, self.fill)).float() / dist.get_world_size()
        mine = mean.new_empty(len(self.part))
        dist.reduce_scatter_tensor(mine, mean)
        self.part.grad = mine.double()
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.detach().copy_(whole[: len(self.weights)])



# ---- Adam, not AdamW: weights are off ----
from torch.nn.functional import pad


class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.fill = -len(weights) % ranks
        self.part = pad(weights.detach(), (0, self.fill)).chunk(ranks)[dist.get_rank()].clone()
        self.optimizer = torch.optim.Adam([self.part], lr=lr)

    def step(self):
        self.part.grad = torch.empty_like(self.part)
        mean = pad(self.weights.grad, (0, self.fill)) / dist.get_world_size()
        dist.reduce_scatter_tensor(self.part.grad, mean)
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(len(self.weights) + self.fill)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.detach().copy_(whole[: len(self.weights)])


# ---- chunk, of few weights: in the case '4 weights', an exception:(?s:.*)IndexError: tuple index out of range ----
import torch
import torch.distributed as dist
from torch.nn.functional import pad

class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, self.ranks = weights, dist.get_world_size()
        self.size = -(-len(weights) // self.ranks)
        part = weights.detach().chunk(self.ranks)[dist.get_rank()]
        self.part = pad(part, (0, self.size - len(part)))
        if self.part.untyped_storage().nbytes() != self.part.nbytes:
            self.part = self.part.clone()
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    @torch.no_grad()
    def step(self):
        fill = self.size * self.ranks - len(self.weights)
        gradient = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(gradient, pad(self.weights.grad, (0, fill)))
        self.part.grad = gradient / self.ranks
        self.optimizer.step()
        self.part.grad = None
        whole = self.part.new_empty(self.size * self.ranks)
        dist.all_gather_into_tensor(whole, self.part)
        self.weights.copy_(whole[: len(self.weights)])


# ---- the last part takes the rest: has a part of 335 weights ----
import torch
import torch.distributed as dist

class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        size = len(weights) // ranks
        self.sizes = [size] * (ranks - 1) + [len(weights) - size * (ranks - 1)]
        self.part = weights.detach().split(self.sizes)[dist.get_rank()]  # a view of the weights
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    @torch.no_grad()
    def step(self):
        gradients = self.weights.grad.split(self.sizes)
        for rank, one in enumerate(gradients):
            dist.reduce(one, rank)
        self.part.grad = gradients[dist.get_rank()] / dist.get_world_size()
        self.optimizer.step()
        self.part.grad = None
        for rank, one in enumerate(self.weights.detach().split(self.sizes)):
            dist.broadcast(one, rank)


# ---- a mask as long as all weights: keeps a tensor of 1001 numbers or more ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, self.lr, self.steps = weights, lr, 0
        self.mine = torch.arange(len(weights)) % dist.get_world_size() == dist.get_rank()
        count = -(-len(weights) // dist.get_world_size())
        self.average = torch.zeros(count, dtype=weights.dtype)
        self.square = torch.zeros(count, dtype=weights.dtype)

    @torch.no_grad()
    def step(self):
        ranks, self.steps = dist.get_world_size(), self.steps + 1
        fill = -len(self.weights) % ranks
        dealt = torch.nn.functional.pad(self.weights.grad, (0, fill)).view(-1, ranks).T.contiguous()
        gradient = torch.empty_like(self.average)
        dist.reduce_scatter_tensor(gradient, dealt.flatten())
        gradient /= ranks
        self.average.lerp_(gradient, 0.1)
        self.square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        part = self.weights[self.mine]
        part = torch.nn.functional.pad(part, (0, len(gradient) - len(part)))
        root = (self.square / (1 - 0.999**self.steps)).sqrt() + 1e-8
        part -= self.lr * (0.01 * part + self.average / (1 - 0.9**self.steps) / root)
        whole = part.new_empty(ranks * len(part))
        dist.all_gather_into_tensor(whole, part)
        self.weights.copy_(whole.view(ranks, -1).T.flatten()[: len(self.weights)])


# ---- the part's gradient stays, no copy of the part: between two steps, a tensor has a .grad ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, ranks = weights, dist.get_world_size()
        self.parts = weights.detach().tensor_split(ranks)
        self.part = self.parts[dist.get_rank()]
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    def step(self):
        for rank, one in enumerate(self.weights.grad.tensor_split(dist.get_world_size())):
            one = one.clone()
            dist.reduce(one, rank)
            if rank == dist.get_rank():
                self.part.grad = one / dist.get_world_size()
        self.weights.grad = None
        self.optimizer.step()
        for rank, one in enumerate(self.parts):
            dist.broadcast(one, rank)
