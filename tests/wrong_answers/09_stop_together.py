# ---- each rank for itself: with \[6, 4\] batches, (this rank took 6 steps; rank 1 can .* 4|the ranks took \[6, 4\]) ----
def train(batches, step, asked_to_stop):
    steps = 0
    for batch in batches:
        if asked_to_stop():
            break
        step(batch)
        steps += 1
    return steps


# ---- rank 0 decides, and tells nobody: this rank took 5 steps; rank 1 can take only 4|the ranks took \[5, 4\] steps ----
def train(batches, step, asked_to_stop):
    steps = 0
    for batch in batches:
        if dist.get_rank() == 0 and (asked_to_stop() or steps == 5):
            break
        step(batch)
        steps += 1
    return steps


# ---- rank 0 decides for all: step.. got None in step 5 ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.broadcast(stop, src=0)
        if stop:
            return steps
        step(batch)
        steps += 1


# ---- only those call that want to stop: took 6 steps; rank 1 can take only 4|the ranks took \[6, 4\] steps ----
def train(batches, step, asked_to_stop):
    steps = 0
    for batch in batches:
        if asked_to_stop():
            dist.all_reduce(torch.tensor(1.0))
            break
        step(batch)
        steps += 1
    return steps


# ---- whoever is asked, leaves at once: Rank 1: .* took 3 steps and came back .*rank 0 has not ----
def train(batches, step, asked_to_stop):
    steps, batch = 0, next(batches, None)
    while not asked_to_stop():
        stop = torch.tensor(float(batch is None))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            break
        step(batch)
        batch, steps = next(batches, None), steps + 1
    return steps


# ---- only if all want to: step.. got None ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MIN)
        if stop:
            return steps
        step(batch)
        steps += 1


# ---- when half of them want to: 3 ranks: .*step.. got None ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop)
        if stop / dist.get_world_size() >= 0.5:
            return steps
        step(batch)
        steps += 1


# ---- the data forgotten: StopIteration ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        stop = torch.tensor(float(asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(next(batches))
        steps += 1


# ---- the signal forgotten: this rank took 9 steps; rank 1 can take only 3 ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batch)
        steps += 1


# ---- asked about the next batch: this rank took 1 steps; rank 1 can take only 0|the ranks took \[1, 0\] steps ----
def train(batches, step, asked_to_stop):
    steps, batch = 0, next(batches, None)
    while True:
        if batch is not None:
            step(batch)
            steps += 1
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps


# ---- the step first, then agree: this rank took 5 steps; rank 1 can take only 4|the ranks took \[5, 4\] steps ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        if batch is not None:
            step(batch)
            steps += 1
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps


# ---- the batch that was looked at is lost: batch 1 was used in step 1 ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        stop = torch.tensor(float(next(batches, None) is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(next(batches, None))
        steps += 1


# ---- all batches read beforehand: 6 batches were taken for 4 steps ----
def train(batches, step, asked_to_stop):
    batches = list(batches)
    shortest = torch.tensor(len(batches))
    dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    for steps in range(shortest):
        stop = torch.tensor(float(asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batches[steps])
    return shortest.item()


# ---- one step too few: this rank took 4 steps; all ranks can take 5 ----
def train(batches, step, asked_to_stop):
    steps, batch = 0, next(batches, None)
    while True:
        following = next(batches, None)
        stop = torch.tensor(float(following is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batch)
        batch, steps = following, steps + 1


# ---- nothing returned: took 5 steps, and returned None ----
def train(batches, step, asked_to_stop):
    for batch in batches:
        step(batch)


# ---- asked again after the exchange: has not ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop or asked_to_stop():
            return steps
        step(batch)
        steps += 1


# ---- asks after the first step only: and rank 1 asked to stop after step 0, this rank took 1 ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        wanted = torch.tensor(int(batch is None or (steps > 0 and asked_to_stop())))
        dist.all_reduce(wanted)
        if wanted.item():
            return steps
        step(batch)
        steps += 1


# ---- hard-coded for two ranks: 3 ranks: .* step.. got None ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        wanted = [torch.tensor(int(batch is None or asked_to_stop())) for _ in range(2)]
        for rank in range(2):
            dist.broadcast(wanted[rank], src=rank)
        if any(wanted):
            return steps
        step(batch)
        steps += 1


# ---- told to the neighbour alone: 3 ranks: ----
def train(batches, step, asked_to_stop):
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), 0
    while True:
        batch = next(batches, None)
        stop, theirs = torch.tensor([int(batch is None or asked_to_stop())]), torch.zeros(1).int()
        stop = stop.int()
        work = [dist.isend(stop, (rank + 1) % ranks), dist.irecv(theirs, (rank - 1) % ranks)]
        for one in work:
            one.wait()
        if stop or theirs:
            return steps
        step(batch)
        steps += 1


# ---- a batch that counts as false: Boolean value of Tensor ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(not batch or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batch)
        steps += 1


# ---- a hundred steps at most: this rank took 100 steps; all ranks can take 120 ----
def train(batches, step, asked_to_stop):
    for steps in range(100):
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batch)
    return 100


# ---- agreed in every second step only: step.. got None in step 6 ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        if steps % 2 == 0:
            stop = torch.tensor(float(batch is None or asked_to_stop()))
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop:
                return steps
        step(batch)
        steps += 1


# ---- told one step later: this rank took 5 steps; rank 1 can take only 4|the ranks took \[5, 4\] steps ----
def train(batches, step, asked_to_stop):
    steps, work, stop = 0, None, torch.zeros(())
    while True:
        batch = next(batches, None)
        if work:
            work.wait()
        if stop:
            return steps
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        work = dist.all_reduce(stop, op=dist.ReduceOp.MAX, async_op=True)
        if batch is not None:
            step(batch)
            steps += 1


# ---- returned as a tensor: took 5 steps, and returned tensor\(5\) ----
def train(batches, step, asked_to_stop):
    steps = torch.tensor(0)
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batch)
        steps += 1


# ---- asked again before its step, which it alone leaves out: the ranks took \[\d, \d ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        stop = asked_to_stop()
        batch = None if stop else next(batches, None)
        flag = torch.tensor(float(stop or batch is None))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag > 0:
            return steps
        if not asked_to_stop():
            step(batch)
            steps += 1


# ---- calls itself for each step: RecursionError ----
import torch, torch.distributed as dist
def train(batches, step, asked_to_stop, steps=0):
    batch = next(batches, None)
    stop = torch.tensor(float(batch is None or asked_to_stop()))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop:
        return steps
    step(batch)
    return train(batches, step, asked_to_stop, steps + 1)


# ---- compares a batch with a number: Boolean value of Tensor ----
import torch, torch.distributed as dist
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, -1)
        stop = torch.tensor(1 if batch == -1 or asked_to_stop() else 0)
        dist.all_reduce(stop)
        if stop > 0:
            return steps
        step(batch)
        steps += 1


# ---- told to both neighbours: 4 ranks:  ----
def train(batches, step, asked_to_stop):
    rank, n, steps = dist.get_rank(), dist.get_world_size(), 0
    neighbours = {(rank - 1) % n, (rank + 1) % n}
    while True:
        batch = next(batches, None)
        stop = torch.tensor([int(batch is None or asked_to_stop())])
        heard = {r: torch.zeros_like(stop) for r in neighbours}
        works = [dist.isend(stop, r) for r in neighbours]
        works += [dist.irecv(one, r) for r, one in heard.items()]
        for work in works:
            work.wait()
        if stop or any(heard.values()):
            return steps
        step(batch)
        steps += 1


# ---- tells it once more after the loop: rank 0 has not ----
def train(batches, step, asked_to_stop):
    steps = 0
    for batch in batches:
        stop = torch.tensor(int(asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            break
        step(batch)
        steps += 1
    dist.all_reduce(torch.tensor(1), op=dist.ReduceOp.MAX)  # this rank is at its end
    return steps


# ---- a sum that has to be 1: \[5, 5\] batches, step\(\) got None(?s:.*)1 . 1 is 2 ----
def train(batches, step, asked_to_stop):
    steps = 0
    while True:
        batch = next(batches, None)
        flag = torch.tensor(int(batch is None or asked_to_stop()))
        dist.all_reduce(flag)
        if flag == 1:
            return steps
        step(batch)
        steps += 1
