# ---- a queue, and a thread that exchanges ----
import queue
import threading


def overlap(model):
    jobs = queue.Queue()

    def exchange():
        while True:
            p = jobs.get()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            jobs.task_done()

    threading.Thread(target=exchange, daemon=True).start()
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(jobs.put)
    return jobs.join


# ---- a pool with one thread ----
from concurrent.futures import ThreadPoolExecutor


def overlap(model):
    pool, pending = ThreadPoolExecutor(1), []

    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    def finish():
        while pending:
            pending.pop(0).result()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(
                lambda p: pending.append(pool.submit(average, p)))
    return finish


# ---- functional ----
import torch.distributed._functional_collectives as functional


def overlap(model):
    sums = {}

    def begin(p):
        sums[p] = functional.all_reduce(p.grad, "sum", dist.group.WORLD)

    def finish():
        for p in list(sums):
            p.grad = sums.pop(p) / dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- gathered ----
def overlap(model):
    pending = []

    def begin(p):
        each = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        pending.append((p, each, dist.all_gather(each, p.grad, async_op=True)))

    def finish():
        for p, each, work in pending:
            work.wait()
            p.grad.copy_(sum(each) / len(each))
        pending.clear()

    for p in (p for p in model.parameters() if p.requires_grad):
        p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- to rank 0 in the hook, back in finish ----
def overlap(model):
    pending = []

    def begin(p):
        pending.append((p, dist.reduce(p.grad, dst=0, async_op=True)))

    def finish():
        for p, work in pending:
            work.wait()
        again = [dist.broadcast(p.grad, src=0, async_op=True) for p, _ in pending]
        for (p, _), work in zip(pending, again):
            work.wait()
            p.grad.div_(dist.get_world_size())
        pending.clear()

    for p in filter(lambda p: p.requires_grad, model.parameters()):
        p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- a bucket for each layer ----
def overlap(model):
    pending, ready = [], {}
    layers = [[p for p in layer.parameters() if p.requires_grad] for layer in model.layers]

    def begin(p):
        layer = next(number for number, ps in enumerate(layers) if any(p is q for q in ps))
        ready.setdefault(layer, []).append(p)
        if len(ready[layer]) == len(layers[layer]):
            ps = ready.pop(layer)
            flat = torch.cat([q.grad.flatten() for q in ps])
            pending.append((ps, flat, dist.all_reduce(flat, async_op=True)))

    def finish():
        for ps, flat, work in pending:
            work.wait()
            for q, part in zip(ps, flat.split([q.numel() for q in ps])):
                q.grad = part.view_as(q) / dist.get_world_size()
        pending.clear()

    for ps in layers:
        for p in ps:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- futures that divide ----
def overlap(model):
    futures = []

    def begin(p):
        p.grad /= dist.get_world_size()
        futures.append(dist.all_reduce(p.grad, async_op=True).get_future())

    def finish():
        torch.futures.wait_all(futures)
        futures.clear()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- messages to all the others ----
def overlap(model):
    pending = []

    def begin(p):
        others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
        own, parts = p.grad.clone(), [torch.empty_like(p) for _ in others]
        works = [dist.isend(own, r) for r in others]
        works += [dist.irecv(one, r) for one, r in zip(parts, others)]
        pending.append((p, own, parts, works))

    def finish():
        while pending:
            p, own, parts, works = pending.pop(0)
            for work in works:
                work.wait()
            p.grad = (own + sum(parts)) / dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- tensor hooks ----
def overlap(model):
    pending = []

    def hook_of(p):
        def begin(grad):
            copy = grad.contiguous().clone()
            pending.append((p, copy, dist.all_reduce(copy, async_op=True)))
        return begin

    def finish():
        while pending:
            p, copy, work = pending.pop()
            work.wait()
            p.grad = copy / dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(hook_of(p))
    return finish


# ---- reduce_scatter in the hook, all_gather in finish ----
def overlap(model):
    n, pending = dist.get_world_size(), []

    def begin(p):
        flat = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % n))
        part = flat.new_empty(len(flat) // n)
        pending.append((p, flat, part, dist.reduce_scatter_tensor(part, flat, async_op=True)))

    def finish():
        for p, flat, part, work in pending:
            work.wait()
            dist.all_gather_into_tensor(flat, part / n)
            p.grad = flat[: p.numel()].view_as(p).clone()
        pending.clear()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- polls ----
import time


class Overlap:
    def __init__(self, model):
        self.pending = {}
        for p in model.parameters():
            p.requires_grad and p.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p):
        self.pending[p] = dist.all_reduce(p.grad, async_op=True)

    def __call__(self):
        while self.pending:
            for p, work in list(self.pending.items()):
                if work.is_completed():
                    work.wait()
                    p.grad /= dist.get_world_size()
                    del self.pending[p]
            time.sleep(0.001)


overlap = Overlap


# ---- hooks of the nodes ----
import torch, torch.distributed as dist
class Averager:
    def __init__(self, model):
        self.nodes, self.begun = [], []
        for p in model.parameters():
            if p.requires_grad:
                node = p.view_as(p).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, p=p: self.begin(p))
                self.nodes.append(node)  # else the node, and the hook with it, goes away
    def begin(self, p):
        scaled = p.grad / dist.get_world_size()
        self.begun.append((p, scaled, dist.all_reduce(scaled, async_op=True)))
    def finish(self):
        for p, mean, work in self.begun:
            work.wait()
            p.grad = mean
        self.begun = []
def overlap(model):
    return Averager(model).finish


# ---- a hook for several gradients ----
from torch.autograd.graph import register_multi_grad_hook


def overlap(model):
    begun = []

    def watch(parameters):
        def begin(grads):
            flat = torch.cat([g.flatten() for g in grads]).div_(dist.get_world_size())
            begun.append((parameters, flat, dist.all_reduce(flat, async_op=True)))
        register_multi_grad_hook(parameters, begin)

    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own:
            watch(own)

    def finish():
        for parameters, flat, work in begun:
            work.wait()
            for p, one in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad = one.view_as(p)
        begun.clear()

    return finish


# ---- buffers that stay ----
import torch, torch.distributed as dist
def overlap(model):
    views = {p: torch.empty_like(p) for p in model.parameters() if p.requires_grad}
    begun = []
    def begin(p):
        p.grad = views[p].copy_(p.grad)
        begun.append((p, dist.all_reduce(p.grad, async_op=True)))
    for p in views:
        p.register_post_accumulate_grad_hook(begin)
    def finish():
        for p, work in begun:
            work.wait()
            p.grad /= dist.get_world_size()
        begun.clear()
    return finish


# ---- a future, and then ----
def overlap(model):
    n, futures = dist.get_world_size(), []

    def begin(p):
        grad = p.grad
        future = dist.all_reduce(grad, async_op=True).get_future()
        futures.append(future.then(lambda done: done.value()[0].div_(n)))

    def finish():
        for future in futures:
            future.wait()
        futures.clear()

    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish
