import torch
import torch.distributed as dist


def train(batches, step, asked_to_stop):
    # Every rank comes to the all_reduce in every round, whatever it knows itself, and the maximum
    # is the same everywhere: so all leave in the same round. One number costs little; over a Gloo
    # group it does not wait for the GPU (recipes/agree.py). torch.distributed.algorithms.join.Join
    # counts in each step, by all_reduce, the ranks that still have data. By default those go on;
    # with throw_on_early_termination=True, all ranks get an exception instead.
    steps = 0
    while True:
        batch = next(batches, None)
        stop = torch.tensor(float(batch is None or asked_to_stop()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            return steps
        step(batch)
        steps += 1
