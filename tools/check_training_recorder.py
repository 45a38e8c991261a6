"""What check_training.py runs inside each Python process of a command: it notes what torch does.

It comes in as a sitecustomize.py, waits for `import torch`, and wraps what training scripts call.
Each process writes lines of JSON to a file of its own. It makes no collective call, draws no random
number, keeps no object of the script alive, and reads no tensor of a GPU after the first FIRST
steps. Tensors on a CPU are read ever more rarely. If it fails, it says so in a file, and is silent.
"""

import atexit
import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
import threading
import time
import traceback
import weakref
import zlib

FOLDER = os.environ.get("CHECK_TRAINING", "")  # where the records go
FIRST = 20  # steps in which tensors of a GPU are read
SAMPLE = 200_000  # values of all weights, or of all gradients, that are read in a step, at most
RAISED = object()  # in the place of a result
COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
]
TO_ONE = [
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
]
now = time.monotonic  # one clock for all processes of a machine
here = threading.local()  # what this thread is in
torch = dist = me = None


@functools.lru_cache(maxsize=4096)
def kind_of(path):
    """0: a file of the user; 1: of a package; 2: of torch, of Python or this one."""
    if path.startswith((os.path.dirname(torch.__file__), "<")) or path == __file__:
        return 2
    return 1 if "-packages" in path else 2 * path.startswith(os.path.dirname(os.__file__))


def where(whole=False):
    """The line that runs: the innermost one of the user, else of a package. whole: all of them."""
    frame, found = sys._getframe(1), []
    while frame:
        if (kind := kind_of(frame.f_code.co_filename)) < 2:
            found.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
            if kind == 0 and not whole:
                return found[-1]
        frame = frame.f_back
    return " ".join(found) if whole else found[0] if found else "?"


def looked(i):
    """Whether what is done for the i-th time is looked at: the same times on all ranks."""
    return i < 30 or i % 10 == 0 and i < 300 or i % 100 == 0


def readable(tensor, i=10**9):
    """Whether a tensor may be read in step i: it is whole, and no GPU must be waited for."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not torch._C._len_torch_dispatch_stack()
        and not tensor.is_quantized
        and (
            tensor.device.type == "cpu"
            or i < FIRST
            and tensor.device.type != "meta"
            and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
        )
    )


def sample(tensor, most):
    """Return (checksum of the bits of every n-th value, most at most; these, on the CPU)."""
    tensor = tensor.detach().reshape(-1)
    part = tensor[:: -(-len(tensor) // most) or 1].contiguous().cpu()
    return zlib.crc32(ctypes.string_at(part.data_ptr(), part.nbytes)), part


def bits(tensor, most=16384):
    return sample(tensor, most)[0]


def prints(tensors, i):
    """Return [checksum, norm] of each tensor, None for one that may not be read in step i."""
    out, parts, most = [None] * len(tensors), [], max(64, SAMPLE // max(1, len(tensors)))
    with torch.no_grad():
        for j, tensor in enumerate(tensors):
            if tensor is not None and readable(tensor, i):
                out[j], part = sample(tensor, most)
                parts.append((j, part if part.is_floating_point() else part.abs().float()))
        norms = torch._foreach_norm([part for _, part in parts]) if parts else ()
        for (j, _), norm in zip(parts, norms, strict=True):
            out[j] = [out[j], float(norm)]
    return out


def tensors_in(value, depth=0):
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, (dict, list, tuple)):
        for item in list(value.values() if isinstance(value, dict) else value)[:64]:
            yield from tensors_in(item, depth + 1)


def keys_in(value, depth=0):
    if isinstance(value, dict) and depth < 4:
        for key in list(value)[:3000]:
            yield str(key)
            yield from keys_in(value[key], depth + 1)


def random_state(device):
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel()))


def size_of(thing):
    try:
        return len(thing)
    except Exception:
        return None


def path_of(file):
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.path.realpath(os.fspath(name)) if isinstance(name, (str, os.PathLike)) else None


def node_of(parameter):
    """The node of autograd that adds up the gradients of a parameter: DDP's hook hangs there."""
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def rates(optimizer):
    return [
        float(rate)
        for group in optimizer.param_groups
        for rate in [group.get("lr")]
        if rate is not None and (not torch.is_tensor(rate) or readable(rate))
    ]


def data_in(dataset):
    """What can be known of a dataset without asking it for an item, which could draw numbers."""
    said = {}
    for name, value in list(getattr(dataset, "__dict__", {}).items())[:50]:
        if isinstance(value, (torch.Tensor, tuple)):
            said[name] = [bits(t, 4096) for t in tensors_in(value) if readable(t)]
        elif (
            isinstance(value, (list, dict))
            and value
            and isinstance(next(iter(value)), (str, tuple))
        ):
            items = [
                os.path.basename(str(item[0] if isinstance(item, tuple) and item else item))
                for item in list(value)[:5000]
            ]
            said[name] = [zlib.crc32(str(order).encode()) for order in (items, sorted(items))]
    inner = getattr(dataset, "dataset", None)
    return said if inner is None or inner is dataset else [said, data_in(inner)]


class Indices:
    """The iterator of a loader's sampler, which adds up what is drawn."""

    def __init__(self, inner, known):
        self.inner, self.known = inner, known

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self.inner)
        me.safely("drawn", self.known, batch)
        return batch


def wrap(owner, name, before=None, after=None, also=(), closed=False, whatever=False):
    """Put a function in the place of owner.name (and also). before and after: names of methods of
    Me; before(args, kwargs) returns a value, and after(value, result, args, kwargs) gets it; with
    whatever, after an error, too (RAISED). closed: what it calls itself is not noted."""
    inner, key = getattr(owner, name, None), object()
    if inner is None:
        return

    @functools.wraps(inner)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or not me.live:
            return inner(*args, **kwargs)
        busy = here.__dict__.setdefault("busy", set())
        if True in busy or key in busy:
            return inner(*args, **kwargs)
        value, result = None, RAISED
        busy |= {True, key}
        try:
            if before:
                value = me.safely(*before.split(), args, kwargs)
            if not closed:
                busy.discard(True)
            result = inner(*args, **kwargs)
            return result
        finally:
            busy.add(True)
            if after and (whatever or result is not RAISED):
                me.safely(*after.split(), value, result, args, kwargs)
            busy -= {key, True}

    # To whoever looks at the stack (torch's flight recorder, say), it is a part of torch.
    call.__code__ = call.__code__.replace(co_filename=f"{os.path.dirname(torch.__file__)}/watched")
    for place in (owner, *also):
        if getattr(place, name, None) is inner:
            setattr(place, name, call)


class Me:
    """What this process knows. One that is forked begins anew, and notes nothing until it joins a
    group: a loader's worker never does."""

    def __init__(self, live=False):
        self.live, self.file, self.early, self.lines = live, None, [], 0
        self.phase = self.backwards = self.batches = self.forwards = self.small = self.open = 0
        self.counts, self.spans, self.main, self.idle = {}, [], None, 0
        self.optimizers, self.wrappers, self.passes, self.loaders, self.scalers, self.made = (
            weakref.WeakKeyDictionary() for _ in range(6)
        )
        self.parameters, self.states, self.groups, self.recent = {}, {}, {}, {}
        self.timed = True  # whether the parts of this step are noted
        self.called = set()  # DDP objects, since the last step
        self.was_training = {}  # {number of a DDP object: training?}, at its last forward
        self.sync, self.twice, self.line, self.ended, self.source = None, False, "", None, None

    def safely(self, name, *args):
        """Call a method. If it fails, that is said in a file, and all is over."""
        if self.live:
            try:
                return getattr(self, name)(*args)
            except Exception:
                self.live = False
                with open(f"{FOLDER}/{os.getpid()}.failed", "w") as file:
                    traceback.print_exc(file=file)

    def install(self):
        install()

    def count(self, kind):
        """How often that has been before."""
        self.counts[kind] = self.counts.get(kind, -1) + 1
        return self.counts[kind]

    def site(self, kind):
        """By what ranks match objects: the lines that made it, how many these made before."""
        name = f"{kind}{zlib.crc32(where(whole=True).encode()):x}"
        return name, self.count(name)

    def steps(self):
        return max((known["i"] for known in self.optimizers.values()), default=0)

    def note(self, kind, **what):
        """Write a line; keep it until the process has joined a group, or takes a step."""
        self.lines += 1
        if self.lines < 300_000:
            line = json.dumps({"k": kind, "t": now(), **what}, default=str) + "\n"
            if self.file is None:
                self.early.append(line)
            else:
                os.write(self.file, line.encode())

    def begin(self):
        """Open this process's files."""
        if self.file is None:
            name = f"{FOLDER}/{os.getpid()}-{time.monotonic_ns()}"
            with open(f"{name}.now", "wb+") as file:
                file.write(b" " * 200)
                file.flush()
                self.place = mmap.mmap(file.fileno(), 200)
            self.file = os.open(f"{name}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            env, early, self.early = os.environ, self.early, []
            self.note("begin", world=env.get("WORLD_SIZE"), rank=env.get("RANK"), pid=os.getpid())
            os.write(self.file, "".join(early).encode())

    def stand(self, *words):
        """Leave word what this process is in, in case that it does not come back."""
        if self.file is not None:
            text = f"{now():.3f}|{'|'.join(map(str, words))}".encode("ascii", "replace")
            self.place[:] = text[:200].ljust(200)

    def span(self, kind, start, end):
        if not self.timed:
            return
        if len(self.spans) > 400:
            del self.spans[:100]
        self.spans.append((kind, round(start, 6), round(end, 6)))

    # ---- The group, and its collectives ----

    def joined(self, _, result, args, kwargs):
        self.begin()
        env, self.groups, self.phase = os.environ, {}, 0
        self.counts = {k: n for k, n in self.counts.items() if not k.startswith("in ")}  # calls
        self.note(
            "joined",
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            pid=os.getpid(),
            host=os.uname().nodename,
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
            local=env.get("LOCAL_WORLD_SIZE"),
            cores=len(os.sched_getaffinity(0)),
            debug=[
                f"{n}={v}"
                for n, v in (("CUDA_LAUNCH_BLOCKING", "1"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"))
                if env.get(n) == v
            ],
        )

    def left(self, args, kwargs):
        if not args and not kwargs.get("group"):
            self.finish("left")

    def finish(self, kind="exit"):
        for known in list(self.recent.values()):
            self.end_pass(known, False)
        self.after_pass()
        self.note(kind, steps=self.steps())

    def has(self, what, *_):
        """Note once that the script uses something that the rules must know of."""
        if self.count(what) == 0:
            self.note("has", what=what)

    def group_of(self, args, kwargs):
        """The ranks of the group of a call, as a text; "" for the default group. (A thread may call
        another group of all ranks meanwhile.)"""
        group = kwargs.get("group") or next(
            (a for a in args if isinstance(a, dist.ProcessGroup)), None
        )
        if group is None:
            return ""
        if (name := group.group_name) not in self.groups:
            ranks = sorted(dist.get_process_group_ranks(group))
            self.groups[name] = "" if group is dist.group.WORLD else f"{ranks}#{name}"
        return self.groups[name]

    def enter_call(self, name, args, kwargs):
        group, what = self.group_of(args, kwargs), {"name": name, "at": where()}
        if (
            name == "all_reduce"
            and args
            and sys.getrefcount(args[0]) == 2
            and (  # args' own
                not kwargs.get("async_op") and readable(args[0], self.steps())
            )
        ):
            users = [
                torch._C._storage_Use_Count(t.untyped_storage()._cdata)
                for t in (args[0], torch.empty(1, device="cpu"))
            ]  # of its memory, and of one that nobody else has
            what |= {"lost": bits(args[0])} if users[0] == users[1] else {}
        tensors = [*tensors_in([*args[:2], *kwargs.values()])]
        i = self.count(f"in {group}")
        if tensors:
            first = tensors[0]
            what.update(dtype=str(first.dtype)[6:], n=first.numel())
            self.small += first.numel() <= 16
            if name == "all_reduce" and self.sync and self.steps() < 30:
                what["grad"] = any(
                    (p := ref()) is not None and p.grad is first
                    for ref, *_ in self.parameters.values()
                )
            if name == "all_gather" and first.numel() and isinstance(args[0], list):
                what["one"] = len({t.data_ptr() for t in args[0]}) < len(args[0])
        self.stand(name, what["at"], i, group)
        return dict(what, i=i, group=group, begun=self.phase), now()

    def leave_call(self, value, result, args, kwargs):
        self.phase += 1
        self.span("c", value[1], now())
        self.stand("")
        if value[0]["i"] < 3000:
            self.note("call", start=value[1], phase=self.phase, error=result is RAISED, **value[0])

    # ---- DDP, backward, the optimizer ----

    def wrapped(self, _, result, args, kwargs):
        ddp, number = args[0], self.count("ddp")
        named = [
            (name, p)
            for name, p in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        ]
        kinds = [(type(m).__name__, getattr(m, "p", 0)) for m in ddp.module.modules()]
        for name, p in named:
            self.parameters[id(p)] = weakref.ref(p), number, name, p.requires_grad
            if p.requires_grad and readable(p, 0):
                node_of(p).metadata["check_training"] = True
        self.wrappers[ddp] = number, {*ddp.state_dict()}
        self.note(
            "ddp",
            number=number,
            names=[name for name, _ in named],
            at=where(),
            frozen=[name for name, p in named if not p.requires_grad],
            group=sorted(dist.get_process_group_ranks(ddp.process_group)),
            buffers=len([*ddp.module.buffers()]) * ddp.broadcast_buffers,
            draws=any("Dropout" in kind and p for kind, p in kinds),
            norm=any(kind.startswith("BatchNorm") for kind, _ in kinds),
        )

    def enter_forward(self, args, kwargs):
        ddp, grad, device = args[0], torch.is_grad_enabled(), None
        number, sync = self.wrappers.get(ddp, (0,))[0], ddp.require_backward_grad_sync
        i = self.count(f"forward {number} {grad}")
        what = {
            "ddp": number,
            "i": i,
            "grad": grad,
            "training": ddp.training,
            "sync": sync,
            "at": where(),
        }
        if grad:
            self.forwards, self.open, self.sync = self.forwards + 1, self.open + 1, sync
            self.twice = self.twice or self.open > 1
            self.called.add(number)
            what["turned"] = self.was_training.get(number, ddp.training) != ddp.training
            self.was_training[number] = ddp.training
        if looked(i):
            found = [*tensors_in((args[1:], kwargs))]
            what.update(
                rows=next((len(t) for t in found if t.dim()), None),
                batch=[bits(t) for t in found[:3] if readable(t, i)],
            )
            device = next((p.device for p in ddp.module.parameters()), None)
            if grad and (device.type == "cpu" or i < FIRST):
                what["random"] = random_state(device)
        self.stand("forward", what["at"])
        return what, device, now()

    def leave_forward(self, value, result, args, kwargs):
        what, device, start = value
        self.span("f", start, now())
        self.stand("")
        if "random" in what:
            what["moved"] = random_state(device) != what["random"]
        if "batch" in what or what.get("turned"):
            self.note("forward", start=start, **what)

    def watched(self, known, i):
        """The checksum of an optimizer's watched gradient: 0 if there is none, or it is 0."""
        p = known["watch"]()
        if p is None or p.grad is None or not readable(p.grad, i) or not bool(p.grad.any()):
            return 0
        return bits(p.grad)

    def enter_backward(self, args, kwargs):
        """A callback tells when this rank has all its gradients: what is left of backward() after
        it is waiting for other ranks, and the exchange."""
        ready, handle, self.line = [], None, where()
        for known in self.optimizers.values():
            known["open"] += 1
            if known["dirty"] and looked(known["i"]):
                known["dirty"] = self.watched(known, known["i"]) == known["bits"]  # not by hand
        root = next(tensors_in(args[:1] or [kwargs.get("tensors")]), None)
        if root is not None and root.requires_grad and self.sync and self.timed:
            queue = torch.autograd.Variable._execution_engine.queue_callback
            handle = root.register_hook(lambda _: queue(lambda: ready.append(now())))
        self.backwards, self.open = self.backwards + 1, max(0, self.open - 1)
        self.stand("backward", self.line)
        return now(), ready, handle

    def leave_backward(self, value, result, args, kwargs):
        start, ready, handle = value
        end = now()
        if handle is not None:
            handle.remove()
        self.span("b", start, ready[0] if ready else end)
        if ready:
            self.span("w", ready[0], end)
        self.phase += bool(self.sync)
        self.stand("")
        for known in self.optimizers.values():
            if known["dirty"] and looked(known["i"]):
                known["bits"] = self.watched(known, known["i"])

    def made_optimizer(self, _, result, args, kwargs):
        frame, inner = sys._getframe(3), False  # ZeRO's inner one has a part of the parameters
        for _ in range(4):
            inner = inner or f"distributed{os.sep}optim" in frame.f_code.co_filename
            frame = frame.f_back or frame
        if not inner or ".distributed.optim" in type(args[0]).__module__:
            self.optimizers[args[0]] = {
                "key": str(self.site("o")),
                "at": where(),
                "i": 0,
                "dirty": False,
                "watch": None,
                "bits": 0,
                "open": 0,
                "late": 0,
                "listed": None,
                "backs": 0,
                "forwards": 0,
                "small": 0,
            }

    def describe(self, optimizer, known, params):
        """Note the parameters of an optimizer, by DDP's names where they are DDP's."""
        known["listed"] = len(params)
        if {type(p) for p in params} - {torch.nn.Parameter, torch.Tensor}:
            self.has("shards")
        its = [self.parameters.get(id(p), (lambda: None, None, None)) for p in params]
        self.note(
            "optimizer",
            o=known["key"],
            at=known["at"],
            type=type(optimizer).__name__,
            names=[i[1:3] if i[0]() is p else None for i, p in zip(its, params, strict=True)],
            shapes=[list(p.shape) for p in params],
            threads=torch.get_num_threads(),
            ids=zlib.crc32(str([*map(id, params)]).encode()),
            device=params[0].device.type,
            keeps=any(g.get("momentum") or "betas" in g for g in optimizer.param_groups),
            anomaly=torch.is_anomaly_enabled(),
            double=torch.get_default_dtype() != torch.float64
            and any(p.dtype == torch.float64 for p in params),
        )

    def buffers(self, i):
        """Note the buffers of DDP's modules that are not BatchNorm's."""
        for ddp, (number, _) in list(self.wrappers.items()):
            norms = {
                id(b)
                for m in ddp.module.modules()
                if hasattr(m, "num_batches_tracked")
                for b in m.buffers()
            }
            own = {
                name: bits(b)
                for name, b in list(ddp.module.named_buffers())[:1000]
                if id(b) not in norms and readable(b, i)
            }
            self.note("buffers", ddp=number, bits=own)

    def before_step(self, optimizer):
        self.begin()
        known = self.optimizers.get(optimizer)
        if known is None:
            return
        i, self.idle = known["i"], 0 if known["key"] == self.main else self.idle + 1
        if self.main is None or self.idle > 20:  # the first was that of a warm-up
            self.main = known["key"]
        source = self.source or {"count": 0}  # of the last batch: a training loader, mostly
        batches, source["stepped"] = source["count"] - source.get("stepped", 0), source["count"]
        if looked(i) and (params := parameters_of(optimizer)):
            if known["listed"] != len(params) or i == 8:
                self.describe(optimizer, known, params)
            if i == 8 and self.count("buffers") == 0:
                self.buffers(i)
            if known["backs"] == self.backwards:  # gradients by hand, or within step()
                known["dirty"] = False
            mine = [
                (name, p)
                for p in params
                for ref, _, name, grad in [self.parameters.get(id(p), (None, 0, "", False))]
                if grad and p.requires_grad and readable(p, 0)
            ]
            owned = {id(p) for each in list(self.optimizers) for p in parameters_of(each)}
            free = [
                name
                for key, (ref, number, name, _) in self.parameters.items()
                if key not in owned
                and number in self.called
                and (p := ref()) is not None
                and p.grad is not None
                and p.requires_grad
            ]
            self.note(
                "step",
                o=known["key"],
                i=i,
                at=where(),
                g=prints([p.grad for p in params], i),
                v=prints(params, i),
                none=sum(p.grad is None for p in params),
                free=free[:20],
                rate=rates(optimizer),
                stale=known["dirty"],
                late=known["late"],
                twice=self.twice,
                backs=self.backwards - known["backs"],
                sync=self.sync,
                line=self.line,
                forwards=self.forwards - known["forwards"],
                small=self.small - known["small"],
                batches=batches,
                state=len(optimizer.state),
                cut=[
                    name
                    for name, p in mine[:1] + mine[-1:]
                    if "check_training" not in node_of(p).metadata
                ],
                scale=[s.get_scale() for s in self.scalers if s.is_enabled() and i < FIRST],
            )
        known["start"] = now()

    def after_step(self, optimizer):
        known, end = self.optimizers.get(optimizer), now()
        if known is None or "start" not in known:
            return
        i = known["i"]
        self.span("o", known.pop("start"), end)
        if looked(i + 1):
            grads = [
                (p.grad.numel(), j, p)
                for j, p in enumerate(parameters_of(optimizer))
                if p.grad is not None and readable(p.grad, i)
            ]
            if grads:
                known["watch"] = weakref.ref(min(grads)[2])
                known["bits"] = self.watched(known, i)
            known["dirty"] = bool(grads and known["bits"])
        known.update(
            i=i + 1, backs=self.backwards, forwards=self.forwards, small=self.small, open=0, late=0
        )
        self.twice, self.open, self.called = False, 0, set()
        if known["key"] == self.main:
            if self.timed:
                self.note("spans", i=i, spans=self.spans, end=end, own=round(now() - end, 6))
            self.spans, i = [], i + 1
            self.timed = i < 200 or i % 10 == 0 and i < 5000 or i % 100 == 0

    def cleared(self, _, result, args, kwargs):
        """zero_grad of an optimizer, or of a module, which may be another one's."""
        for optimizer, known in self.optimizers.items():
            if (
                optimizer is args[0]
                or not hasattr(args[0], "param_groups")
                and (known["watch"] is None or not self.watched(known, known["i"]))
            ):
                if known["open"]:
                    known["late"] = known["open"]
                    if optimizer is args[0] and self.count("thrown") < 500:
                        self.note(
                            "thrown", o=known["key"], backs=known["open"], at=where(), i=known["i"]
                        )
                known["dirty"], known["open"] = False, 0

    def clipped(self, _, result, args, kwargs):
        i, given = self.count("clip"), args[0] if args else kwargs["parameters"]
        if looked(i):  # a generator has been read by now: its frame is gone
            ids = (
                None
                if hasattr(given, "gi_frame")
                else {
                    id(p) for p in tensors_in([*given] if (not torch.is_tensor(given)) else given)
                }
            )
            owners = [
                o for o in self.optimizers if ids is None or ids & {id(p) for p in parameters_of(o)}
            ]
            self.note(
                "clip",
                i=i,
                at=where(),
                owned=bool(owners),
                scaled=any(
                    "UNSCALED" not in str(s._per_optimizer_states[id(o)]["stage"])
                    for s, used in self.scalers.items()
                    for o in owners
                    if used
                ),
                n=len(ids)
                if ids is not None
                else int(not readable(result, i) or float(result) != 0),
                norm=float(result) if torch.is_tensor(result) and readable(result, i) else None,
            )

    def scaled(self, _, result, args, kwargs):
        self.scalers[args[0]] = args[0].is_enabled()

    # ---- Data ----

    def drawn(self, known, batch):
        batch = batch if isinstance(batch, (list, tuple)) else [batch]
        if batch and isinstance(batch[0], int):
            known["drawn"] += len(batch)
            known["order"] = hash((known["order"], *batch))  # of numbers: alike in all processes
            known["sum"] += sum(batch)
            known["rising"] = known["rising"] and list(batch) == sorted(batch)
            if known["number"] < 4 and len(known["sketch"]) < 2000:
                known["sketch"] += [i for i in batch if i % known["every"] == 0]

    def begin_pass(self, _, result, args, kwargs):
        """A loader's iterator was made, or begins anew."""
        iterator, loader = args[:2]
        chain = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
        while (inner := getattr(chain[-1], "sampler", None)) is not None and len(chain) < 5:
            chain.append(inner)
        sampler = next((s for s in chain if hasattr(s, "num_replicas")), chain[-1])
        key, number = self.site("p")
        self.end_pass(self.recent.get(key), False)
        self.after_pass()
        length, share = size_of(loader.dataset), size_of(sampler)
        known = self.passes[iterator] = self.recent[key] = {
            "key": key,
            "number": number,
            "p": self.count("pass"),
            "drawn": 0,
            "order": 0,
            "sum": 0,
            "rising": True,
            "sketch": [],
            "every": max(1, (length or 0) // 2000),
            "count": 0,
            "rows": 0,
            "crcs": [],
            "content": 0.0,
            "backs": self.backwards,
            "over": False,
            "grad": False,
            "modes": self.modes(),
        }
        iterator._sampler_iter = Indices(iterator._sampler_iter, known)
        self.note(
            "pass",
            p=known["p"],
            key=key,
            number=number,
            at=where(),
            length=length,
            share=share,
            loader=self.loaders.setdefault(loader, len(self.loaders)),
            batches=size_of(loader),
            sampler=type(sampler).__name__,
            workers=loader.num_workers,
            every=known["every"],
            drop=any(getattr(s, "drop_last", None) is True for s in (*chain, loader)),
            iterable=iterator._dataset_kind == 1,
            data=data_in(loader.dataset) if number < 2 else 0,
            id=id(sampler),
            **{
                name: value
                for name in ("num_replicas", "rank", "epoch", "shuffle", "total_size")
                if isinstance(value := getattr(sampler, name, None), int)
            },
        )

    def modes(self):
        """[training?, BatchNorm's values, how often they have moved] of each DDP's module."""
        out, i = [], self.steps()
        for ddp in list(self.wrappers):
            norms = [
                m
                for m in ddp.module.modules()
                if hasattr(m, "num_batches_tracked")
                and m.running_mean is not None
                and readable(m.running_mean, i)
                and type(m).__name__ != "SyncBatchNorm"
            ]
            out.append(
                [
                    ddp.module.training,
                    [bits(m.running_mean) for m in norms[:20]],
                    int(norms[0].num_batches_tracked) if norms else 0,
                ]
            )
        return out

    def begin_batch(self, args, kwargs):
        self.stand("the loader", where())
        return now()

    def end_batch(self, start, batch, args, kwargs):
        self.span("l", start, now())
        self.stand("")
        known = self.passes.get(args[0])
        if batch is RAISED:
            return self.end_pass(known, isinstance(sys.exc_info()[1], StopIteration))
        self.batches += 1
        if known is not None:
            i, first, self.source = known["count"], next(tensors_in(batch), None), known
            known["count"] += 1
            known["grad"] = known["grad"] or torch.is_grad_enabled()
            if first is not None and first.dim() and readable(first):
                known["rows"] += len(first)
                if known["number"] < 20 and i < 32:
                    known["crcs"].append(bits(first))
                if known["number"] < 2 and i < 300:
                    part = first.reshape(len(first), -1)[:, :8].double()
                    known["content"] += float(part.sum())
            if i > 2 and i & (i + 1) == 0:
                self.so_far(known)

    def so_far(self, known, **more):
        self.note(
            "passed",
            backs=self.backwards - known["backs"],
            **more,
            **{
                k: known[k]
                for k in (
                    "p",
                    "count",
                    "rows",
                    "drawn",
                    "order",
                    "sum",
                    "sketch",
                    "rising",
                    "content",
                    "crcs",
                    "grad",
                )
            },
        )

    def after_pass(self):
        """Backward passes since the last pass ended that no other loader fed: by list(loader)."""
        if self.ended:
            p, backwards, batches = self.ended
            self.note("after", p=p, backs=self.backwards - backwards - self.batches + batches)
            self.ended = None

    def end_pass(self, known, done):
        if known and not known["over"]:
            known["over"], self.ended = True, (known["p"], self.backwards, self.batches)
            self.so_far(known, done=done, over=True, modes=[known["modes"], self.modes()])
            for thing, (kind, at) in list(self.made.items()):
                count = getattr(thing, "n_averaged", None)
                self.note(
                    kind,
                    id=id(thing),
                    at=at,
                    type=type(thing).__name__,
                    steps=self.steps(),
                    n=int(count)
                    if torch.is_tensor(count) and readable(count)
                    else getattr(thing, "_step_count", None),
                    last=getattr(thing, "last_epoch", 0),
                    total=next(
                        (
                            getattr(thing, n)
                            for n in ("total_steps", "T_max", "total_iters")
                            if hasattr(thing, n)
                        ),
                        None,
                    ),
                    of=[id(s) for s in getattr(thing, "_schedulers", ())],
                )

    def made_one(self, kind, _, result, args, kwargs):
        self.made[args[0]] = kind, where()

    def stepped(self, _, result, args, kwargs):
        self.count("scheduled")
        value = args[1] if len(args) > 1 else kwargs.get("metrics")
        if (
            hasattr(args[0], "num_bad_epochs")
            and self.count("plateau") < 300
            and (not torch.is_tensor(value) or readable(value, self.steps()))
        ):
            self.note("plateau", at=where(), value=float(value))

    def chosen(self, _, result, args, kwargs):
        """Subset(dataset, indices), also by random_split."""
        length, indices = size_of(args[0].dataset) or 0, args[0].indices
        if size_of(indices) and self.count("subset") < 100:
            listed = [int(i) for i in indices]
            self.note(
                "subset",
                key=str(self.site("u")),
                at=where(),
                n=len(listed),
                of=length,
                order=hash(tuple(listed)),
                data=data_in(args[0].dataset),
                sketch=[i for i in listed if i % max(1, length // 2000) == 0][:3000],
            )

    def set_epoch(self, args, kwargs):
        if self.count("epoch set") < 300:
            self.note("epoch", id=id(args[0]), epoch=args[1] if len(args) > 1 else None, at=where())

    # ---- Files ----

    def enter_file(self, args, kwargs):
        self.stand("a file", where())
        return {"start": now(), "at": where(), "begun": self.phase}

    def saved(self, value, result, args, kwargs):
        content, keys = args[0], {*keys_in(args[0])}
        self.span("s", value["start"], now())
        self.note(
            "save",
            path=path_of(args[1] if len(args) > 1 else kwargs.get("f")),
            phase=self.phase,
            old=max(
                map(
                    self.outdated,
                    [content, *(content.values() if isinstance(content, dict) else ())],
                )
            ),
            optimizer={"param_groups", "state"} <= keys,
            wrapper="n_averaged" not in keys
            and any(names <= keys for _, names in self.wrappers.values()),
            **value,
            steps=self.steps(),
        )
        self.stand("")

    def loaded(self, value, result, args, kwargs):
        keys = {*keys_in(None if result is RAISED else result)}
        self.note(
            "load",
            path=path_of(args[0] if args else kwargs.get("f")),
            phase=self.phase,
            optimizer={"param_groups", "state"} <= keys,
            steps=self.steps(),
            **value,
        )
        self.stand("")

    def moved(self, _, result, args, kwargs):
        if len(args) > 1 and self.count("move") < 1000:
            self.note("move", source=path_of(args[0]), path=path_of(args[1]), phase=self.phase)

    def kept(self, _, result, args, kwargs):
        """A state_dict() shares the model's memory: remember at which step it was made."""
        if len(self.states) > 200:
            self.states = {k: v for k, v in self.states.items() if v[0]() is not None}
        for first in [*tensors_in(result)][:1]:
            self.states[id(result)] = (
                weakref.ref(result),
                self.steps(),
                first.data_ptr(),
                weakref.ref(args[0]),
            )

    def outdated(self, state):
        """By how many steps a state_dict(), which shares its memory with the model, is older."""
        made, steps, first, module = self.states.get(id(state), (lambda: None, 0, 0, lambda: None))
        if (
            made() is state is not None
            and (module := module()) is not None
            and first in {p.data_ptr() for p in module.parameters()}
        ):
            return self.steps() - steps
        return 0

    def took(self, _, result, args, kwargs):
        module, given = args[0], args[1] if len(args) > 1 else kwargs.get("state_dict", {})
        if self.count("took") < 100:
            own = {*module.state_dict()}
            self.note(
                "took",
                at=where(),
                n=len(given),
                fit=len(own & {*given}),
                steps=self.steps(),
                old=self.outdated(given),
                ddp=any(module in (ddp, ddp.module) for ddp in list(self.wrappers)),
                prefix=next(
                    (
                        p
                        for p in ("module.", "_orig_mod.", "model.")
                        if own & {k.removeprefix(p) for k in given} or own & {p + k for k in given}
                    ),
                    "",
                ),
            )

    def resumed(self, _, result, args, kwargs):
        if (known := self.optimizers.get(args[0])) is not None:
            self.note(
                "resumed",
                o=known["key"],
                at=where(),
                state=len(args[0].state),
                i=known["i"],
                rate=rates(args[0]),
                scheduled=self.counts.get("scheduled", 0),
            )


def begin_anew():
    global me
    me, here.busy = Me(), set()


def install():
    """Wrap what training scripts call, as soon as torch has been imported."""
    global torch, dist
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.nn.utils import clip_grad
    from torch.optim import lr_scheduler, optimizer, swa_utils
    from torch.utils.data import dataloader, dataset, distributed

    os.register_at_fork(after_in_child=begin_anew)
    join = c10d.init_process_group

    @functools.wraps(join)
    def init_process_group(*args, **kwargs):
        result = join(*args, **kwargs)
        me.live = not os.path.exists(f"{FOLDER}/{os.getpid()}.failed")
        me.safely("joined", None, result, args, kwargs)
        return result

    c10d.init_process_group = dist.init_process_group = init_process_group
    wrap(c10d, "destroy_process_group", "left", also=[dist])
    for name in COLLECTIVES:
        wrap(c10d, name, f"enter_call {name}", "leave_call", [dist], closed=True, whatever=True)
    for name in TO_ONE:
        wrap(c10d, name, "has to_one", also=[dist], closed=True)
    wrap(c10d, "new_group", "has groups", also=[dist], closed=True)
    wrap(Join, "__enter__", "has join")
    wrap(DDP, "__init__", None, "wrapped", closed=True)
    wrap(DDP, "forward", "enter_forward", "leave_forward", whatever=True)
    wrap(torch.autograd, "backward", "enter_backward", "leave_backward", whatever=True)
    wrap(optimizer.Optimizer, "__init__", None, "made_optimizer")
    wrap(optimizer.Optimizer, "zero_grad", None, "cleared")
    wrap(optimizer.Optimizer, "load_state_dict", None, "resumed")
    optimizer.register_optimizer_step_pre_hook(lambda o, *_: me.safely("before_step", o))
    optimizer.register_optimizer_step_post_hook(lambda o, *_: me.safely("after_step", o))
    wrap(torch.nn.Module, "zero_grad", None, "cleared")
    wrap(torch.nn.Module, "state_dict", None, "kept", closed=True)
    wrap(torch.nn.Module, "load_state_dict", None, "took", closed=True)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap(clip_grad, name, None, "clipped", also=[torch.nn.utils])
    wrap(torch.amp.GradScaler, "scale", None, "scaled")
    wrap(lr_scheduler.LRScheduler, "__init__", None, "made_one schedule")
    for kind in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
        wrap(kind, "step", None, "stepped")
    wrap(swa_utils.AveragedModel, "__init__", None, "made_one average")
    for name in ("__init__", "_reset"):
        wrap(dataloader._BaseDataLoaderIter, name, None, "begin_pass")
    wrap(dataloader._BaseDataLoaderIter, "__next__", "begin_batch", "end_batch", whatever=True)
    wrap(dataset.Subset, "__init__", None, "chosen")
    wrap(distributed.DistributedSampler, "set_epoch", "set_epoch")
    wrap(torch, "save", "enter_file", "saved", also=[torch.serialization], closed=True)
    wrap(torch, "load", "enter_file", "loaded", [torch.serialization], closed=True, whatever=True)
    for name in ("replace", "rename"):
        wrap(os, name, None, "moved")
    atexit.register(lambda: me.safely("finish"))


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls install() when torch has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def then_install(module):
            execute(module)
            me.safely("install")

        spec.loader.exec_module = then_install
        return spec


def come_in():
    """As a sitecustomize.py: run the one that this stands in the way of, and wait for torch."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != folder]
    sys.meta_path.insert(0, AfterTorch())
    if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path):
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


me = Me(live=True)
if __name__ == "sitecustomize":
    come_in()
