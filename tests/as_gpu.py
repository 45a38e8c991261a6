"""For before= of forked.py: on a CPU, what a GPU does by default, and what it refuses.

defaults(): optimizers and clipping take foreach by themselves; collectives refuse what NCCL does.
device(): a torch.device plays the GPU. What a script makes without one, and the parameters that it
does not move, must not meet what is there. Not seen: what torch's own code makes, what waits for a
GPU, memory, streams, kernels and their dtypes, which GPU of several.
"""

import os
import re
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils as foreach
from torch.utils._pytree import tree_leaves

TORCH = os.path.dirname(torch.__file__)
MAY_MIX = {"to", "copy_", "__getitem__", "__setitem__", "index_put_", "__set__"}
over_cpu, default_device = set(), []  # groups of Gloo, by name


def tensors_in(*values):  # a DTensor is left to its own checks
    return [
        t
        for t in tree_leaves(values)
        if isinstance(t, torch.Tensor) and not hasattr(t, "device_mesh")
    ]


def defaults():
    for module in (optimizer, foreach):
        module._get_foreach_kernels_supported_devices = lambda: ["cpu"]
    for name in dir(dist.ProcessGroup):
        if re.match("_?(all_?)?(reduce|gather|to)|broadcast|scatter|send|recv", name):
            setattr(dist.ProcessGroup, name, checked(getattr(dist.ProcessGroup, name)))

    def new_group(*args, old=dist.new_group, **kwargs):
        group = old(*args, **kwargs)
        over_cpu.update([getattr(group, "group_name", None)] * (kwargs.get("backend") == "gloo"))
        return group

    dist.new_group = new_group


def checked(call):
    def collective(group, *args, **kwargs):
        for t in tensors_in(args, kwargs) if group.group_name not in over_cpu else []:
            if not (
                t.is_contiguous()
                or t.dim() == 4
                and t.is_contiguous(memory_format=torch.channels_last)
            ):
                raise ValueError("Tensors must be contiguous")
            if getattr(t, "on_gpu", True) is False:
                raise RuntimeError("No backend type associated with device type cpu")
        return call(group, *args, **kwargs)

    return collective


def device():
    def register(module, name, p):
        if p is not None and not p.is_meta and not hasattr(p, "on_gpu"):
            p.on_gpu = bool(default_device)

    register_module_parameter_registration_hook(register)
    torch.set_default_device = default_device.append
    dist.get_backend = lambda *_: "nccl"
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.Event = lambda *_: SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    OneGPU().__enter__()


class OneGPU(TorchFunctionMode):
    """Marks tensors by .on_gpu: True, False, or not at all, if it is not known."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, by_script = (
            kwargs or {},
            getattr(func, "__name__", ""),
            (not sys._getframe(1).f_code.co_filename.startswith(TORCH)),
        )
        given = tensors_in(args, kwargs)
        known = [t for t in given if hasattr(t, "on_gpu")]
        if len({t.on_gpu for t in known if t.dim()}) > 1 and name not in MAY_MIX:
            raise RuntimeError(f"Expected all tensors to be on the same device, in {name}")
        asked = default_device * (not given) + [
            d for d in (*args, kwargs.get("device")) if isinstance(d, torch.device)
        ]
        result = func(*args, **kwargs)
        if name == "__set__" and known:
            args[0].on_gpu = known[-1].on_gpu
        for t in tensors_in(result):
            if asked or by_script and (name == "cpu" or name == "to" and "cpu" in args):
                if args and t is args[0] and not isinstance(t, torch.nn.Parameter):
                    t = result = t.view_as(t)  # where there is a GPU, it is another tensor
                t.on_gpu = bool(asked)
            elif known and not hasattr(t, "on_gpu"):
                t.on_gpu = any(arg.on_gpu for arg in known)
            elif by_script and not given and not kwargs.get("device"):
                t.on_gpu = False
        return result
