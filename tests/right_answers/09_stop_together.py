# ---- objects, and a generator ----
def train(batches, step, asked_to_stop):
    steps = 0
    for steps, batch in enumerate(agreed(batches, asked_to_stop), start=1):
        step(batch)
    return steps


def agreed(batches, asked_to_stop):
    while True:
        stop = asked_to_stop()
        batch = None if stop else next(batches, None)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (stop, batch is None))
        if any(stop or empty for stop, empty in everyone):
            return
        yield batch


# ---- all have to agree to go on ----
def train(batches, step, asked_to_stop):
    nothing = object()
    batch, steps = next(batches, nothing), 0
    while goes_on(batch is not nothing and not asked_to_stop()):
        step(batch)
        batch, steps = next(batches, nothing), steps + 1
    return steps


def goes_on(wanted):
    votes = torch.tensor([int(wanted)])
    dist.all_reduce(votes)
    return votes.item() == dist.get_world_size()


# ---- each in turn ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        try:
            batch, stop = next(batches), 0
        except StopIteration:
            batch, stop = None, 1
        votes = torch.zeros(dist.get_world_size(), dtype=torch.uint8)
        votes[dist.get_rank()] = 1 if asked_to_stop() else stop
        for rank in range(len(votes)):
            dist.broadcast(votes[rank : rank + 1], src=rank)
        if votes.any():
            break
        step(batch)
        steps += 1
    return steps


# ---- around a ring ----
def train(batches, step, asked_to_stop):
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), 0
    while True:
        batch = next(batches, None)
        stop, theirs = torch.tensor([float(batch is None or asked_to_stop())]), torch.zeros(1)
        for _ in range(ranks - 1):
            work = dist.isend(stop.clone(), (rank + 1) % ranks)
            dist.recv(theirs, (rank - 1) % ranks)
            work.wait()
            stop = torch.maximum(stop, theirs)
        if stop:
            return steps
        step(batch)
        steps += 1


# ---- the exchange begins before the batch is there ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        asked = torch.tensor(int(asked_to_stop()))
        work = dist.all_reduce(asked, op=dist.ReduceOp.MAX, async_op=True)
        batch = next(batches, None)
        empty = torch.tensor(int(batch is None))
        dist.all_reduce(empty, op=dist.ReduceOp.MAX)
        work.wait()
        if asked or empty:
            return steps
        step(batch)
        steps += 1


# ---- takewhile ----
import itertools, torch, torch.distributed as dist
def train(batches, step, asked_to_stop):
    def agreed(batch):
        wish = torch.tensor([batch is not None and not asked_to_stop()], dtype=torch.int32)
        dist.all_reduce(wish, op=dist.ReduceOp.PRODUCT)
        return bool(wish)
    steps = itertools.takewhile(agreed, itertools.chain(batches, itertools.repeat(None)))
    return sum(step(batch) is None or 1 for batch in steps)


# ---- tags ----
import torch, torch.distributed as dist
class Vote:
    def __call__(self, stop):
        flag, n = torch.tensor([stop], dtype=torch.uint8), dist.get_world_size()
        each = [torch.zeros_like(flag) for _ in range(n)] if dist.get_rank() == 0 else None
        dist.gather(flag, each, dst=0)
        if each:
            flag = torch.stack(each).amax(0)
        dist.scatter(flag, [flag] * n if each else None, src=0)
        return bool(flag)
def train(batches, step, asked_to_stop):
    vote, done = Vote(), 0
    while not vote((batch := next(batches, None)) is None or bool(asked_to_stop())):
        step(batch)
        done += 1
    return done


# ---- for, and a word at the end ----
def train(batches, step, asked_to_stop):
    steps = 0
    for batch in batches:
        stop = torch.tensor(int(asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batch)
        steps += 1
    dist.all_reduce(torch.tensor(1), op=dist.ReduceOp.MAX)
    return steps
