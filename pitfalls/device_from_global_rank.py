"""The device chosen by the global rank: the second machine has no such GPU.

    python pitfalls/device_from_global_rank.py
    python pitfalls/device_from_global_rank.py --fixed

You see a table, without processes or GPUs: the device that each of four ranks on two machines with
two GPUs each would take, by its global rank, and by nothing at all (.cuda(), or device "cuda").

Recognise it: the job runs on one machine, where both ranks are the same number. On the second one
it fails with "CUDA error: invalid device ordinal". With no device chosen, all ranks of a machine
crowd on its GPU 0: it runs out of memory while the others idle, or NCCL says "Duplicate GPU
detected".
Cure: by the local rank, which starts at 0 on each machine: torchrun puts it into LOCAL_RANK, and
torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) comes before all else that touches a GPU.
"""

import argparse

MACHINES, GPUS = 2, 2  # GPUs of a machine, and ranks on it: one for each GPU


def main(fixed):
    places = [divmod(rank, GPUS) for rank in range(MACHINES * GPUS)]  # (machine, local rank)
    if fixed:
        choices = {"local rank": [local_rank for _, local_rank in places]}
    else:  # the mistake: numbers that do not tell the ranks of one machine apart, from 0 up
        choices = {"global rank": list(range(len(places))), "nothing": [0] * len(places)}
    for choice, indices in choices.items():
        print(f"machine  global rank  local rank  device by {choice}")
        for rank, ((machine, local_rank), index) in enumerate(zip(places, indices, strict=True)):
            device = f"cuda:{index}" + " does not exist" * (index >= GPUS)
            print(f"{machine:7}  {rank:11}  {local_rank:10}  {device}")
    used = {
        choice: len({(m, i) for (m, _), i in zip(places, indices, strict=True) if i < GPUS})
        for choice, indices in choices.items()
    }
    if any((count == MACHINES * GPUS) != fixed for count in used.values()):
        raise RuntimeError(f"GPUs in use: {used}")
    found = ", ".join(f"{count} of {MACHINES * GPUS} by {choice}" for choice, count in used.items())
    print(f"{'cured' if fixed else 'symptom'}: GPUs in use: {found}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
