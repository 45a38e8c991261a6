"""The device chosen by the global rank: the second machine does not have that GPU.

    python pitfalls/device_from_global_rank.py
    python pitfalls/device_from_global_rank.py --fixed

You see the device that each process of a job takes on two machines with two GPUs each. The code
runs four times, each time with the variables that torchrun sets for that process. It needs no GPU:
torch.device() only names one. The global rank (RANK) counts through all machines; the local rank
(LOCAL_RANK) starts at 0 on each of them.

Recognise it: the job runs on one machine, where both ranks are the same number. On the second one
it fails with "CUDA error: invalid device ordinal". If no device is chosen at all (.cuda(), or
device "cuda"), all processes of a machine share GPU 0: it runs out of memory while the other GPUs
are idle, or NCCL reports "Duplicate GPU detected" (NCCL 2.30: "Multiple Ranks are using the same
GPU/Partition"), or torch 2.15 "Expected tensor on cuda:1".
Cure: use LOCAL_RANK, and call torch.accelerator.set_device_index(local_rank) before anything else
uses a GPU.
If each process sees one GPU alone (CUDA_VISIBLE_DEVICES differs, as with Slurm's --gpus-per-task),
that GPU is number 0 in each of them, and LOCAL_RANK fails. (Not tried.)
"""

import argparse
import os

import torch

MACHINES, GPUS = 2, 2  # GPUs on each machine, and as many processes


def broken():
    return torch.device("cuda", int(os.environ["RANK"]))  # the mistake: 2 and 3 on machine 1


def broken_too():
    return torch.device("cuda")  # the mistake: GPU 0, unless another was set as the current one


def fixed():
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # the cure: 0 and 1 on each machine


def main(cure):
    functions = {"local rank": fixed} if cure else {"global rank": broken, "nothing": broken_too}
    counts = []
    for name, choose_device in functions.items():
        print(f"machine  global rank  local rank  device by {name}")
        used = set()  # the GPUs that exist, and do some work
        for rank in range(MACHINES * GPUS):
            machine, local_rank = divmod(rank, GPUS)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            index = choose_device().index or 0
            if index < GPUS:
                used.add((machine, index))
            device = f"cuda:{index}" + " does not exist" * (index >= GPUS)
            print(f"{machine:7}  {rank:11}  {local_rank:10}  {device}")
        counts.append(len(used))
    if any((count == MACHINES * GPUS) != cure for count in counts):
        raise RuntimeError(f"GPUs in use: {counts}")
    found = ", ".join(f"{n} of {MACHINES * GPUS} by {name}" for n, name in zip(counts, functions))
    print(f"{'cured' if cure else 'symptom'}: GPUs in use: {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
