"""Code that counts what a start, a step and a save cost, for test_template.py."""

COUNT = """
import os, sys, torch, torch.distributed as dist
sockets = lambda: sum(os.path.exists(link) and "socket:" in os.readlink(link) for link in map(
    "/proc/self/fd/{}".format, os.listdir("/proc/self/fd")))
requests, files, kept, new_store, inherited = [], [], [], dist.TCPStore, sockets()
class Counting(dist.Store):
    def __init__(self, *args, **options):
        super().__init__()
        self.store = new_store(*args, **options)
        kept.append(self)  # PrefixStore keeps torch's part of it alone
for name in "set", "get", "wait", "check", "add":
    setattr(Counting, name, lambda self, key, *args, name=name: (
        requests.extend([key] if isinstance(key, str) else key),  # in a request for several, each
        getattr(self.store, name)(key, *args))[1])
dist.TCPStore = Counting
sys.addaudithook(lambda event, args: event in ("open", "os.remove", "os.rename", "os.listdir")
                 and files.append(str(args[0])))
os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as start sets it for more than 64 ranks
import survive
survive.start()
snapshot = survive.Snapshot("snapshot.pt", "", model=torch.nn.Linear(2, 1))
snapshot.load(step=0)
asked_to_leave = survive.leave_on_sigterm()
for step in 1, 2:
    dist.all_reduce(torch.ones(3))
    asked_to_leave()
    snapshot.save(step=step)
ours = sum("/rank " in key or "/missing" in key for key in requests)
files, made = sum("snapshot.pt" in path for path in files), sockets() - inherited
survive.log([ours, len(requests) - ours, files, made], every_rank=True)
dist.barrier()
survive.leave(True)
"""
