# ---- nothing exchanged: in step 0, nothing was exchanged ----
def overlap(model):
    return lambda: None


# ---- all after backward: when backward.. came to the first layer, no exchange had begun ----
def overlap(model):
    def finish():
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    return finish


# ---- a call that waits, in the hook: Rank 1: rank 0 waits in backward.. for this rank ----
def overlap(model):
    def begin(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return lambda: None


# ---- never waits: finish.. (came back before rank \d had begun|has not waited for \d exchanges) ----
def overlap(model):
    def begin(p):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True)

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return lambda: None


# ---- the middle layer forgotten: layers.1.weight is still the rank's own ----
def overlap(model):
    exchanges = []

    def begin(p):
        p.grad /= dist.get_world_size()
        exchanges.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.layers[0].parameters():
        p.register_post_accumulate_grad_hook(begin)
    for p in model.layers[2].parameters():
        p.register_post_accumulate_grad_hook(begin)

    def finish():
        for work in exchanges:
            work.wait()

    return finish


# ---- summed, not averaged: in step 0, .* is 2.00 times the mean ----
def overlap(model):
    exchanges = []

    def begin(p):
        exchanges.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return lambda: [work.wait() for work in exchanges]


# ---- divided before and after: in step 0, .* is 0.50 times the mean ----
def overlap(model):
    exchanges = []

    def begin(p):
        p.grad /= dist.get_world_size()
        exchanges.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        while exchanges:
            work, p = exchanges.pop()
            work.wait()
            p.grad /= dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- hard-coded for two ranks: 3 ranks: .* is 1.50 times the mean ----
def overlap(model):
    exchanges = []

    def begin(p):
        exchanges.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        while exchanges:
            work, p = exchanges.pop()
            work.wait()
            p.grad /= 2

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- the list is not emptied: in step 1, (?s:.*)hint: step 0 was right. ----
def overlap(model):
    exchanges = []

    def begin(p):
        exchanges.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        for work, p in exchanges:
            work.wait()
            p.grad /= dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- a copy, which nobody copies back: is still the rank's own ----
def overlap(model):
    exchanges = []

    def begin(p):
        exchanges.append(dist.all_reduce(p.grad / dist.get_world_size(), async_op=True))

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return lambda: [work.wait() for work in exchanges]


# ---- hooks on frozen parameters: RuntimeError: cannot register a hook ----
def overlap(model):
    exchanges = []

    def begin(p):
        exchanges.append((dist.all_reduce(p.grad, async_op=True), p))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(begin)


# ---- one bucket, complete at the end: came to the first layer, no exchange had begun ----
def overlap(model):
    exchanges, ready = [], []
    trained = [p for p in model.parameters() if p.requires_grad]

    def begin(p):
        ready.append(p)
        if len(ready) == len(trained):
            exchanges.extend((dist.all_reduce(q.grad, async_op=True), q) for q in ready)
            ready.clear()

    def finish():
        while exchanges:
            work, p = exchanges.pop()
            work.wait()
            p.grad /= dist.get_world_size()

    for p in trained:
        p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- waits for the last one alone: finish.. has not waited for 4 exchanges ----
def overlap(model):
    work = []

    def begin(p):
        work.append(dist.all_reduce(p.grad, async_op=True))

    def finish():
        work[-1].wait()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= dist.get_world_size()
        work.clear()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- hooks on the last layer alone: had come through layer 1, 56 bytes were on their way ----
def overlap(model):
    pending = []

    def begin(p):
        pending.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish():
        for p in model.layers[:2].parameters():
            if p.requires_grad:
                begin(p)
        for p, work in pending:
            work.wait()
            p.grad /= dist.get_world_size()
        pending.clear()

    for p in model.layers[2].parameters():
        p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- the first layer in finish: had come through layer 0, \d+ bytes were on their way ----
def overlap(model):
    pending, first = [], list(model.layers[0].parameters())

    def begin(p):
        pending.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish():
        for p in first:
            begin(p)
        while pending:
            p, work = pending.pop(0)
            work.wait()
            p.grad /= dist.get_world_size()

    for p in model.layers[1:].parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- registered anew in each finish: in step 1, (?s:.*)hint: step 0 was right. ----
def overlap(model):
    pending = []

    def begin(p):
        pending.append((p, dist.all_reduce(p.grad, async_op=True)))

    def register():
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(begin)

    def finish():
        for p, work in pending:
            work.wait()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= dist.get_world_size()
        pending.clear()
        register()

    register()
    return finish


# ---- waits for the one before, in the hook: rank 0 waits in backward ----
def overlap(model):
    pending = []

    def begin(p):
        if pending:
            pending[-1][1].wait()
        pending.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish():
        for p, work in pending:
            work.wait()
            p.grad /= dist.get_world_size()
        pending.clear()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- hooks removed after the first step: in step 1, nothing was exchanged ----
def overlap(model):
    pending, handles = [], []

    def begin(p):
        pending.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish():
        for p, work in pending:
            work.wait()
            p.grad /= dist.get_world_size()
        pending.clear()
        for handle in handles:
            handle.remove()

    for p in model.parameters():
        if p.requires_grad:
            handles.append(p.register_post_accumulate_grad_hook(begin))
    return finish


# ---- biases in finish: were on their way ----
def overlap(model):
    pending = []

    def begin(p):
        pending.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish():
        for p in model.parameters():
            if p.requires_grad and p.dim() == 1:
                begin(p)
        for p, work in pending:
            work.wait()
            p.grad /= dist.get_world_size()
        pending.clear()

    for p in model.parameters():
        if p.requires_grad and p.dim() == 2:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- keeps the gradients of all steps: after step 2, 416 bytes more are in memory ----
def overlap(model):
    pending = []

    def begin(p):
        pending.append((dist.all_reduce(p.grad, async_op=True), p.grad))

    def finish():
        for work, _ in pending:
            work.wait()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= dist.get_world_size()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- divided on its way: in step \d, .* is off by \S+ of its length ----
def overlap(model):
    works = []

    def begin(p):
        works.append(dist.all_reduce(p.grad, async_op=True))
        p.grad /= dist.get_world_size()

    def finish():
        for work in works:
            work.wait()
        works.clear()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(begin)
    return finish


# ---- keeps those of the last step: after zero_grad.., 5 gradients of old steps ----
def overlap(model):
    works = {}

    def hook(p):
        works[p] = dist.all_reduce(p.grad, async_op=True)

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(hook)

    def finish():
        for p, work in works.items():
            work.wait()
            p.grad /= dist.get_world_size()

    return finish
