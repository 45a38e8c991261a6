"""Ways to run a pitfall fast, for the tests of pitfalls/: in processes forked with torch loaded."""

import re
from concurrent.futures import ThreadPoolExecutor

import torch.multiprocessing as mp
from support import fork, fork_ranks


def show(name, cwd, *arguments, status=0, **options):
    """Run a pitfall for torchrun on two ranks, or world_size; return the result."""
    result = fork_ranks(f"pitfalls/{name}.py", *arguments, cwd=cwd, **options)
    assert result.status == status, result.output
    return result


def show_alone(name, cwd, *arguments):
    """Run a pitfall that needs no torchrun; return the lines that it printed."""
    result = fork(f"pitfalls/{name}.py", *arguments, cwd=cwd, before=fork_the_workers)
    assert result.status == 0, result.output
    assert not list(cwd.iterdir()), "files left in the reader's folder"
    return result.output.splitlines()


def both(name, cwd, run=show, **options):
    """Run a pitfall without and with --fixed, at the same time: mostly they wait."""
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run, name, cwd, *flags, **options) for flags in ([], ["--fixed"])]
        return [run.result() for run in runs]


def fork_the_workers():
    """Called in a child: the script forks its processes, so that they have torch loaded."""
    def fork_instead(function, args=(), nprocs=1, join=True):
        return mp.start_processes(function, args, nprocs, join, start_method="fork")

    mp.spawn = fork_instead
    mp.set_start_method("fork", force=True)  # for Process: a forkserver's child would start another


def last_line(result, pattern):
    """The groups of a pattern that the last line of rank 0 matches, as numbers."""
    match = re.fullmatch(pattern, result.lines(0)[-1])
    assert match, result.output
    return [float(group) for group in match.groups()]
