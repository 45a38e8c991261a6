"""What the pages say of torch on a GPU. Each of these runs the function of its name in inside/."""

from one_gpu.check import Skipped, check


@check(120)
def messages(shell):
    """What torch prints after some mistakes of the pitfalls' table."""
    return shell.inside("messages")


@check(90)
def sharded(shell):
    """FSDP2: three AdamW steps, bfloat16, the meta device, dcp's save, load and async_save."""
    return shell.inside("sharded")


@check(90)
def mixed_precision(shell):
    """DDP with float16 and a GradScaler, an inf, clipping."""
    return shell.inside("mixed_precision")


@check(120)
def compiled(shell):
    """compile() and activation checkpoints, the gradient and the memory."""
    return shell.inside("compiled")


@check(60)
def context_parallel(shell):
    """torch's own context_parallel, on one rank."""
    return shell.inside("context_parallel")


@check(60)
def experts(shell):
    """Tensors and DTensors in one optimizer, whose foreach is the default on a GPU."""
    return shell.inside("experts")


@check(60)
def gloo_with_two_ranks_on_a_gpu(shell):
    """Two ranks share GPU 0 by Gloo: DDP's gradient, and which collectives take CUDA tensors."""
    return shell.inside("gloo_with_two_ranks", ranks=2)


@check(60, alone=True)
def memory_of_a_process(shell):
    """MB of GPU memory that a process takes with one tensor, and after NCCL's first collective."""
    if shell.pretend:
        raise Skipped("needs a GPU")
    return shell.inside("memory_of_a_process")
