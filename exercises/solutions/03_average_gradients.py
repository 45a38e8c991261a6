import torch.distributed as dist


def average_gradients(model):
    # All ranks go through the parameters in the same order, so their calls meet. DDP does better:
    # it puts many gradients into one exchange (exercise 5), and begins during backward() (7).
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
