# ---- reduced to each owner, and broadcast from it ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.parts = weights.detach().tensor_split(dist.get_world_size())
        self.own = torch.nn.Parameter(self.parts[dist.get_rank()])  # a view of the weights
        self.optimizer = torch.optim.AdamW([self.own], lr=lr)
        self.weights = weights

    def step(self):
        gradients = self.weights.grad.tensor_split(dist.get_world_size())
        for rank, gradient in enumerate(gradients):
            dist.reduce(gradient, dst=rank)
        self.own.grad = gradients[dist.get_rank()] / dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for rank, part in enumerate(self.parts):
            dist.broadcast(part, src=rank)


# ---- AdamW by hand, and all_to_all ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights, self.lr, self.steps = weights, lr, 0
        self.sizes = [len(one) for one in weights.tensor_split(dist.get_world_size())]
        size = self.sizes[dist.get_rank()]
        self.mean, self.square = (torch.zeros(size, dtype=weights.dtype) for _ in range(2))

    @torch.no_grad()
    def step(self):
        rank, ranks, self.steps = dist.get_rank(), dist.get_world_size(), self.steps + 1
        theirs = self.weights.new_empty(ranks * self.sizes[rank])
        dist.all_to_all_single(theirs, self.weights.grad, [self.sizes[rank]] * ranks, self.sizes)
        gradient = theirs.view(ranks, -1).mean(dim=0)
        self.weights.grad = None
        part = self.weights.split(self.sizes)[rank].clone()
        self.mean.lerp_(gradient, 0.1)
        self.square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        part -= self.lr * (0.01 * part + mean / (square.sqrt() + 1e-8))
        sent, whole = part.repeat(ranks), torch.empty_like(self.weights)
        dist.all_to_all_single(whole, sent, self.sizes, [len(part)] * ranks)
        self.weights.copy_(whole)


# ---- messages ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        self.weights = weights
        self.places = torch.arange(len(weights)).tensor_split(dist.get_world_size())
        self.places = [slice(int(one[0]), int(one[-1]) + 1) for one in self.places]
        part = weights.detach()[self.places[dist.get_rank()]].clone()
        self.optimizer = torch.optim.AdamW([part], lr=lr)

    @torch.no_grad()
    def step(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        others = [r for r in range(ranks) if r != rank]
        own = self.places[rank]
        theirs = [torch.empty_like(self.weights[own]) for _ in others]
        work = [dist.isend(self.weights.grad[self.places[r]], r) for r in others]
        work += [dist.irecv(one, r) for one, r in zip(theirs, others, strict=True)]
        for one in work:
            one.wait()
        [part] = self.optimizer.param_groups[0]["params"]
        part.grad = (self.weights.grad[own] + sum(theirs)) / ranks
        self.optimizer.step()
        part.grad = None
        self.weights[own] = part
        work = [dist.isend(part, r) for r in others]
        work += [dist.irecv(self.weights[self.places[r]], r) for r in others]
        for one in work:
            one.wait()


# ---- an Optimizer, and interleaved parts ----
import torch
import torch.distributed as dist

class ShardedAdamW(torch.optim.Optimizer):
    def __init__(self, weights, lr):
        super().__init__([weights], {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})
        own = self.dealt(weights.detach())[dist.get_rank()]
        self.state[weights] = {"step": 0, "exp_avg": torch.zeros_like(own), "exp_avg_sq": torch.zeros_like(own)}

    @staticmethod
    def dealt(flat):
        ranks = dist.get_world_size()
        return torch.nn.functional.pad(flat, (0, -len(flat) % ranks)).view(-1, ranks).T.contiguous()

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        [weights] = group["params"]
        state, ranks, (b1, b2) = self.state[weights], dist.get_world_size(), group["betas"]
        gradient = torch.empty_like(state["exp_avg"])
        work = dist.reduce_scatter(gradient, list(self.dealt(weights.grad)), async_op=True)
        part = self.dealt(weights)[dist.get_rank()].clone()
        part *= 1 - group["lr"] * group["weight_decay"]
        work.wait()
        gradient /= ranks
        state["step"] += 1
        state["exp_avg"].mul_(b1).add_(gradient, alpha=1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        root = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
        part -= group["lr"] / (1 - b1 ** state["step"]) * state["exp_avg"] / root
        parts = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(parts, part, async_op=True).wait()
        weights.copy_(torch.stack(parts).T.flatten()[: len(weights)])


# ---- DTensor and torch.optim.AdamW on it ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        self.weights, self.ranks = weights, dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.ranks,))
        self.size, self.placed = -(-len(weights) // self.ranks), [Shard(0)]
        self.make = DTensor.from_local
        first = dist.get_rank() * self.size
        self.slice = slice(min(first, len(weights)), min(first + self.size, len(weights)))
        own = weights.detach()[self.slice].clone()
        self.part = self.make(own, self.mesh, self.placed)
        self.optimizer = torch.optim.AdamW([self.part], lr=lr)

    @torch.no_grad()
    def step(self):
        pad = torch.nn.functional.pad
        length, own = len(self.weights), self.slice.stop - self.slice.start
        filled = pad(self.weights.grad, (0, self.size * self.ranks - length))
        mean = filled.new_empty(self.size)
        dist.reduce_scatter_tensor(mean, filled)
        self.part.grad = self.make(mean[:own] / self.ranks, self.mesh, self.placed)
        self.optimizer.step()
        self.part.grad = None
        dist.all_gather_into_tensor(filled, pad(self.part.to_local(), (0, self.size - own)))
        self.weights.copy_(filled[:length])


# ---- the part a view, a reduce to each owner, AdamW fused ----
class ShardedAdamW:
    def __init__(self, weights, lr):
        size = -(-len(weights) // dist.get_world_size())
        starts = [min(size * rank, len(weights)) for rank in range(dist.get_world_size() + 1)]
        self.pairs = list(zip(starts, starts[1:]))
        self.weights, self.part = weights, weights.detach()[slice(*self.pairs[dist.get_rank()])]
        self.optimizer = torch.optim.AdamW([self.part], lr=lr, fused=True)

    def step(self):
        for owner, (a, b) in enumerate(self.pairs):
            g = self.weights.grad[a:b] / dist.get_world_size()
            if len(g):
                dist.reduce(g, owner)
            if owner == dist.get_rank():
                self.part.grad = g
        self.weights.grad = None
        self.optimizer.step()
        self.part.grad = None
        for owner, (a, b) in enumerate(self.pairs):
            if b > a:
                dist.broadcast(self.weights.detach()[a:b], owner)
