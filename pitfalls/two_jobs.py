"""Two jobs with one snapshot: each goes on from the other's epochs, and neither says so.

    python pitfalls/two_jobs.py
    python pitfalls/two_jobs.py --fixed

You see job A train two epochs. Then job B, with another learning rate, is started in the same
folder: B skips what A has trained. Job A is killed, and started again: it goes on behind epochs
that it never trained, from the weights of B.

Recognise it: a new job begins with "resumed"; or a restart resumes at an epoch that this job's log
does not have. It happens when a job that was thought dead lives on, is started twice, or when two
experiments share a folder.
Cure: lock a file beside the snapshot (fcntl), and keep it open: the lock ends with the process,
even if that is killed. A disk that several machines share must have locks for it (see its mount
options). With one folder for each experiment, the question does not come up.
"""

import argparse
import fcntl
import multiprocessing
import os
import tempfile

import torch


def broken(path):
    pass  # the mistake: nobody looks whether another job has this snapshot


def fixed(path):
    file = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT)  # the cure; never close it
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, if another process has it


def job(protect, rate, path, pipe):
    """In a process of its own: train an epoch for each line that comes; answer with its number."""
    try:
        protect(path)
    except BlockingIOError:
        pipe.send("refused")
        return
    start = torch.load(path) if os.path.exists(path) else {"weight": 1.0, "next_epoch": 1}
    weight, epoch = start["weight"], start["next_epoch"]
    while pipe.recv():
        weight *= 1 - rate
        torch.save({"weight": weight, "next_epoch": epoch + 1}, f"{path}.{os.getpid()}")
        os.replace(f"{path}.{os.getpid()}", path)
        pipe.send(epoch)
        epoch += 1


def new_job(*args):
    """Return a function that lets a new job train epochs, and returns their numbers; 0 kills it."""
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe()
    process = context.Process(target=job, args=(*args, its))
    process.start()

    def epochs(count):
        if count == 0:
            process.kill()
            process.join()
            return []
        found = []
        for _ in range(count):
            ours.send("train")
            found.append(ours.recv())
            if found[-1] == "refused":
                break
        return found

    return epochs


def main(cure):
    protect = fixed if cure else broken
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/snapshot.pt"
        first = new_job(protect, 0.1, path)
        of_a = first(2)
        second = new_job(protect, 0.5, path)  # while A lives
        of_b = second(3)
        of_a += first(1)
        of_b += second(1) if of_b != ["refused"] else []
        first(0), second(0)
        again = new_job(protect, 0.1, path)
        of_a += again(2)
        again(0)
        weight = torch.load(path)["weight"]
    print(f"job A: epochs {of_a}, killed after the third of them\njob B: {of_b}")
    if of_a != ([1, 2, 3, 4, 5] if cure else [1, 2, 3, 7, 8]) or (of_b == ["refused"]) != cure:
        raise RuntimeError(f"epochs {of_a} and {of_b}")
    alone = 0.9**5
    print(
        f"{'cured' if cure else 'symptom'}: job A ends with {weight:.3f}; alone, it ends with"
        f" {alone:.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="show the cure")
    main(parser.parse_args().fixed)
