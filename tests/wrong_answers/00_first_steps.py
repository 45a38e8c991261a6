import torch
import torch.distributed as dist


def who_am_i():
    return dist.get_rank(), dist.get_world_size()


def sum_over_all(number):
    tensor = torch.tensor(number)
    dist.all_reduce(tensor)
    return tensor.item()


def report(number):
    total = sum_over_all(number)
    if dist.get_rank() == 0:
        print(f"the sum is {total}")


# ---- the other way round: who_am_i.*: \(2, \d\) came back\s+hint: first the rank ----
def who_am_i():
    return dist.get_world_size(), dist.get_rank()


# ---- as delivered: no end:\s+rank 0 waits in line.*all_reduce\(tensor\)\s+rank 1 has come to the end ----
def report(number):
    if dist.get_rank() == 0:
        total = sum_over_all(number)
        print(f"the sum is {total}")


# ---- fixed for two: \(1, 2\) came back, and this is rank [02] of 3|Rank 0: .*\(1, 2\) ----
def who_am_i():
    return 1, 2


# ---- nothing returned: sum_over_all.*: nothing came back ----
def sum_over_all(number):
    tensor = torch.tensor(number)
    return dist.all_reduce(tensor)


# ---- a tensor returned: a tensor came back\s+hint: tensor.item ----
def sum_over_all(number):
    tensor = torch.tensor(number)
    dist.all_reduce(tensor)
    return tensor


# ---- a copy summed: this rank's own number came back, 11?\.0 ----
def sum_over_all(number):
    dist.all_reduce(torch.tensor(number))
    return number


# ---- the sum on one rank: Rank 1: in the case 'sum_over_all': .* came back ----
def sum_over_all(number):
    tensor = torch.tensor(number)
    dist.reduce(tensor, dst=0)
    return tensor.item()


# ---- a mean: 6.0 came back, and the numbers are \[1.0, 11.0\] ----
def sum_over_all(number):
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return tensor.item()


# ---- no tensor: in the case 'sum_over_all', an exception:(?s:.*)of type torch.Tensor ----
def sum_over_all(number):
    return dist.all_reduce(number)


# ---- each rank prints: Rank 1: .*'report': this rank prints 'the sum is 12.0' ----
def report(number):
    print(f"the sum is {sum_over_all(number)}")


# ---- nobody prints: rank 0 prints nothing ----
def report(number):
    return sum_over_all(number)


# ---- its own number: prints 'the sum is 1.0', and the sum\s+is 12.0 ----
def report(number):
    sum_over_all(number)
    if dist.get_rank() == 0:
        print(f"the sum is {number}")
