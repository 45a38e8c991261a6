class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        return nn.functional.linear(PassOn.apply(inputs), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight)) + self.bias


class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return summed(partial)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def summed(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def own(tensor, dim):
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone()


# ---- nothing exchanged: the output is what this rank's hidden units give ----
class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return partial.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# ---- nothing exchanged in backward: the gradient of the inputs is that of this rank's hidden units ----
class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# ---- added up both ways: is 2.00 times that of one process ----
class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return summed(partial)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


# ---- torch.distributed.nn's all_reduce: is 2.00 times that of one process ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        import torch.distributed.nn

        partial = nn.functional.linear(own, self.weight)
        return torch.distributed.nn.all_reduce(partial) + self.bias


# ---- the bias on each rank: a bias that was added 2 times ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight, self.bias))


# ---- an Nth of the bias on each rank: RowLinear's bias is 0.50 times ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(
            own, self.weight, self.bias / dist.get_world_size()))


# ---- averaged: the output is the mean over the ranks ----
class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return summed(partial) / dist.get_world_size()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# ---- the gradient averaged: the inputs is 0.50 times ----
class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient) / dist.get_world_size()


# ---- hard-coded for two ranks: 3 ranks: .* has the shape ----
def own(tensor, dim):
    return tensor.tensor_split(2, dim)[dist.get_rank() % 2].clone()


# ---- the wrong side: RowLinear's weight has the shape ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight)) + self.bias


# ---- nothing sharded: ColumnLinear's weight has the shape ----
def own(tensor, dim):
    return tensor.clone()


# ---- a view kept: this rank keeps \d+ bytes, and its slices have ----
def own(tensor, dim):
    return tensor.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


# ---- all gathered, then added up: 3 ranks: .* the forward pass sends 320 bytes, in 1 exchange, and an all_reduce of the output ----
def summed(tensor):
    totals = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, tensor.contiguous())
    return sum(totals)


# ---- all hidden units gathered: the forward pass sends 680 bytes, in 2 exchanges, and an all_reduce of the output sends 160 ----
class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))
        self.count = len(bias)

    def forward(self, inputs):
        own = nn.functional.linear(PassOn.apply(inputs), self.weight, self.bias)
        places = torch.arange(self.count).tensor_split(dist.get_world_size())[dist.get_rank()]
        return summed(own.new_zeros(len(own), self.count).index_copy(1, places, own))


class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(
            own.tensor_split(dist.get_world_size(), 1)[dist.get_rank()], self.weight)) + self.bias


# ---- a hook on the inputs: is added up, and with it what comes to them from elsewhere ----
class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        if inputs.requires_grad:
            inputs.register_hook(summed)
        return nn.functional.linear(inputs, self.weight, self.bias)


# ---- summed in single precision: the output is off by ----
def summed(tensor):
    total = tensor.float().contiguous()
    dist.all_reduce(total)
    return total.double()


# ---- all inputs' gradients gathered: 3 ranks: .* the backward pass sends 480 bytes, in 1 ----
class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        return sum(parts)


# ---- more exchanged than is needed: sends \d+ bytes, in 3 exchanges ----
class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        own = nn.functional.linear(PassOn.apply(inputs), self.weight, self.bias)
        for _ in range(2):
            own = own + 0 * Twice.apply(own)
        return own


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        total = own.new_zeros(100)
        dist.all_reduce(total)
        return own.view_as(own)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# ---- a hook on inputs that need no gradient: cannot register a hook ----
import torch
import torch.distributed as dist
from torch import nn

class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        return nn.functional.linear(PassOn.apply(inputs), self.weight, self.bias)

class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight)) + self.bias

class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)

class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return summed(partial)

    @staticmethod
    def backward(ctx, gradient):
        return gradient

def summed(tensor):
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total

def own(tensor, dim):
    return tensor.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone(memory_format=torch.contiguous_format)

# WRONG: raises for inputs that require no gradient (data), and under no_grad
class ColumnLinear(ColumnLinear):
    def forward(self, inputs):
        inputs = inputs.view_as(inputs)
        inputs.register_hook(summed)
        return nn.functional.linear(inputs, self.weight, self.bias)


# ---- the given bias itself: RowLinear's bias changes with the tensor ----
import torch
import torch.distributed as dist
from torch import nn

class ColumnLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 0)), nn.Parameter(own(bias, 0))

    def forward(self, inputs):
        return nn.functional.linear(PassOn.apply(inputs), self.weight, self.bias)

class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight)) + self.bias

class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)

class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return summed(partial)

    @staticmethod
    def backward(ctx, gradient):
        return gradient

def summed(tensor):
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total

def own(tensor, dim):
    return tensor.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()].clone(memory_format=torch.contiguous_format)

# WRONG: the bias is not copied, but shared with the whole layer ("Copy what is this rank's")
class RowLinear(RowLinear):
    def __init__(self, weight, bias):
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias)


# ---- an all_reduce that autograd does not know: PyTorch warns: .* silently incorrect behavior. ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        total = nn.functional.linear(own, self.weight)
        dist.all_reduce(total)
        return total + self.bias


# ---- the bias added by rank 0 alone: Rank 1: there is no gradient for RowLinear's bias ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(own(weight, 1)), nn.Parameter(bias.detach().clone())

    def forward(self, own):
        partial = own @ self.weight.T
        if dist.get_rank() == 0:
            partial = partial + self.bias
        return AddUp.apply(partial)


# ---- does not wait: in the backward pass, 1 exchanges were begun, and nobody waits for them ----
class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, async_op=True)  # overlaps with the rest of the backward pass
        return total


# ---- the bias on rank 0, zeros elsewhere: Rank 1: RowLinear's bias .*\n    hint: each rank has the whole ----
class RowLinear(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, bias = nn.Parameter(own(weight, 1)), bias.detach().clone()
        self.bias = nn.Parameter(bias if dist.get_rank() == 0 else torch.zeros_like(bias))

    def forward(self, own):
        return AddUp.apply(nn.functional.linear(own, self.weight, self.bias))
