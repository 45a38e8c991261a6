"""What the benchmarks measure, one by one."""

from one_gpu.check import check
from one_gpu.printed import tables_of


@check(150, alone=True)
def throughput(shell):
    """benchmarks/throughput.py at batch sizes 512 and 4096."""
    if shell.pretend:
        size = ["--rounds", 1, "--images", 512, "--batch-sizes", 64, "--workers", 0, 1]
    else:
        size = ["--rounds", 5, "--images", 16_384, "--batch-sizes", 512, 4096]
        size += ["--workers", 0, 1, 8]
    return measured(shell, "throughput", size)


@check(60, alone=True)
def ddp_anatomy(shell):
    """benchmarks/ddp_anatomy.py."""
    small = ["--layers=4", "--width=256", "--batch-size=4", "--rounds=1"]
    return measured(shell, "ddp_anatomy", small if shell.pretend else [])


@check(60, alone=True)
def recovery(shell):
    """benchmarks/recovery.py: how long a killed rank costs on this machine."""
    rounds, megabytes = (1, 0.1) if shell.pretend else (2, 100)
    return measured(shell, "recovery", ["--rounds", rounds, "--megabytes", megabytes])


def measured(shell, name, options):
    """Run a benchmark, which leaves its files in the caller's folder; return its tables."""
    script = f"benchmarks/{name}.py"
    return tables_of(shell.python(script, *options, "--results-dir", shell.results))
