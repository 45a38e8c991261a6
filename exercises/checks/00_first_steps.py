"""The check of exercises/00_first_steps.py."""

import contextlib
import io
import re

import answer
import torch
import torch.distributed as dist
from checker import case, expect


def trial():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with case("who_am_i") as told:
        found = answer.who_am_i()
        right = (rank, world_size)
        expect(found != right[::-1], f"{told} {found} came back", "first the rank")
        expect(
            found in (right, list(right)),
            f"{told} {found!r} came back, and this is rank {rank} of {world_size}",
            "each process runs the same function, and asks dist who it is",
            "dist.get_rank(), dist.get_world_size()",
        )
    numbers = [10.0 * r + 1 for r in range(world_size)]
    own, total = numbers[rank], sum(numbers)
    with case("sum_over_all") as told:
        found = answer.sum_over_all(own)
        expect(
            found is not None,
            f"{told} nothing came back",
            "all_reduce returns nothing: it writes the sum into the tensor that you give it",
        )
        expect(
            not torch.is_tensor(found),
            f"{told} a tensor came back",
            "tensor.item() is the float in it",
        )
        expect(
            found != own,
            f"{told} this rank's own number came back, {own}",
            "which call leaves the sum on each rank, and where?",
            "all_reduce writes it into the tensor",
        )
        expect(
            found == total,
            f"{told} {found!r} came back, and the numbers are {numbers}",
            "all_reduce leaves their sum on each rank: give it the number, and no more",
        )
    said = io.StringIO()
    with case("report") as told:
        with contextlib.redirect_stdout(said):
            answer.report(own)
        print(said.getvalue(), end="")
        lines = said.getvalue().strip()
        expect(
            rank == 0 or not lines,
            f"{told} this rank prints {lines!r}",
            "rank 0 alone is to print: what stands under the if?",
        )
        expect(
            rank != 0 or lines,
            f"{told} rank 0 prints nothing",
            "print() under the if, and the sum above it",
        )
        shown = [float(one) for one in re.findall(r"\d+(?:\.\d+)?", lines)]
        expect(
            rank != 0 or total in shown,
            f"{told} rank 0 prints {lines!r}, and the sum is {total}",
            "print what sum_over_all returns",
        )
    return f"the sum of {numbers} is {total} on each rank, and rank 0 alone prints it"
