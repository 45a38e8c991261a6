"""First steps: three functions of one to three lines, on real processes, two minutes each.

The checker starts two processes, then three, and connects them, as parts 1 and 2 of
docs/many_processes.py do. In each process, it then calls your functions, one after the other.

Read before: README.md, "From one process to many".

    python exercises/00_first_steps.py

Next: 01_single_node_multi_gpu.py
"""

import torch
import torch.distributed as dist


def who_am_i():
    """Return the rank of this process, and how many processes there are.

    docs/many_processes.py asks torch.distributed (dist) for both.
    """
    raise NotImplementedError


def sum_over_all(number):
    """Return the sum of all ranks' numbers, a float. Each rank has a number of its own, a float.

    The processes share no variables, and exchange tensors only: make one, torch.tensor(number), on
    the CPU. dist.all_reduce(tensor) waits until all ranks have called it. Then the tensor itself
    holds the sum, on each of them. tensor.item() is the float in it.
    """
    raise NotImplementedError


def report(number):
    """Let rank 0 print the sum of all ranks' numbers. The other ranks print nothing.

    Write the two functions above first, and run the file with this one as it is: it hangs. There
    is no error. Rank 0 waits in all_reduce for the others, which never call it. You will meet this
    again: most mistakes with several processes end like this. (The checker gives up after 8
    seconds, later on a busy machine, and says where each rank is.) The cure is a rule: what all
    ranks must call never stands under an "if" that only some ranks enter. Mend the function.
    """
    if dist.get_rank() == 0:
        total = sum_over_all(number)
        print(f"the sum is {total}")


if __name__ == "__main__":
    from checker import main

    main(__file__)
