"""Kill a training job anywhere, many times, and look whether anything is lost.

    python tests/fault_campaign.py --rounds 100

A round draws a script (02 or 03), a number of ranks, a victim (a rank, the launcher torchrun, or
the whole job), a moment and a signal; the seed of the draw is printed. The job runs under torchrun
with --max-restarts=3, and is started again if torchrun itself gives up or was killed. Then:
- the snapshot loads, and its epoch is not older than the last one that was announced as saved;
- no other file is left, and no process;
- the final weights, and the optimizer's state, are those of an uninterrupted run, bit for bit.

The scripts know nothing of this. torchrun starts this file instead, which changes a function that
the script calls, so that the signal is sent at exactly that moment, and then runs the script.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import random
import re
import runpy
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass

import torch

EPOCHS = 4
SCRIPTS = {"02": "02_torchrun_elastic.py", "03": "03_multinode.py"}
# Who is struck, when, and how. In the first moments torchrun itself is starting.
MOMENTS = (
    "torchrun starts", "rank starts", "resuming", "step", "evaluation", "writing",
    "before the move", "after the move", "the end",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")


@dataclass
class Plan:
    """One round: what is struck, and when."""

    script: str
    world_size: int
    save_every: int
    victim: str  # "rank 1", "launcher", "job"
    actor: int  # the rank that sends the signal when it comes to the moment
    moment: str
    count: int  # at which time it comes there, from 1
    signal: str
    seconds: float  # for "torchrun starts", which has no ranks yet: after how long

    @classmethod
    def draw(cls, seed):
        """The plan of a seed."""
        rng = random.Random(seed)
        world_size, moment = rng.choice((2, 3)), rng.choice(MOMENTS)
        victims = ["launcher", "job", *(f"rank {rank}" for rank in range(world_size))]
        victim = rng.choice(victims[:2] if moment == "torchrun starts" else victims)
        actor = int(victim[-1]) if victim.startswith("rank") else rng.randrange(world_size)
        save_every = rng.choice((1, 2))
        counts = {"step": 16 * EPOCHS, "evaluation": EPOCHS}
        if moment in ("writing", "before the move", "after the move"):
            actor, counts[moment] = 0, EPOCHS // save_every  # rank 0 alone saves
        count = rng.randint(1, counts.get(moment, 1))
        return cls(rng.choice(("02", "02", "03")), world_size, save_every, victim, actor, moment,
                   count, rng.choice(SIGNALS), rng.uniform(0, 2.5))  # fmt: skip


# ---- In each worker: torchrun runs this file, and this file runs the script ----


def strike(plan, folder):
    """Send the signal to the victim, once in a round; called by one of its ranks."""
    try:
        os.close(os.open(folder / "struck", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return  # the moment has come again, in a later attempt
    pids = {}
    while len(pids) < plan.world_size:  # they have all been started by now
        for rank in range(plan.world_size):
            with contextlib.suppress(OSError, ValueError):
                pids[f"rank {rank}"] = int((folder / f"pid{rank}").read_text())
        time.sleep(0.01)
    own = pids.pop(f"rank {os.environ['RANK']}")
    order = {"launcher": [os.getppid()], "job": [os.getppid(), *pids.values(), own]}
    for pid in order.get(plan.victim) or [{**pids, f"rank {os.environ['RANK']}": own}[plan.victim]]:
        with contextlib.suppress(ProcessLookupError):  # torchrun may have been faster
            os.kill(pid, signal.Signals[plan.signal])


def run_worker(plan, folder, script, arguments):
    """Run the script with the function of the plan's moment changed, if this rank is the actor."""
    (folder / f"pid{os.environ['RANK']}.new").write_text(str(os.getpid()))
    os.replace(folder / f"pid{os.environ['RANK']}.new", folder / f"pid{os.environ['RANK']}")
    sys.argv = [script, *arguments]
    names = runpy.run_path(script)
    if int(os.environ["RANK"]) == plan.actor:
        change(plan, folder, names["log"].__globals__)
    names["main"]()


def change(plan, folder, names):
    """Have the signal sent at the plan's moment; names are the script's own globals."""
    calls = Counter()

    def before(function, condition=lambda *args: True):
        def call(*args, **kwargs):
            calls["before"] += condition(*args)
            if condition(*args) and calls["before"] == plan.count:
                strike(plan, folder)
            return function(*args, **kwargs)

        return call

    def write_in_halves(state, file):
        whole = io.BytesIO()
        original_save(state, whole)
        content = whole.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        calls["save"] += 1
        if calls["save"] == plan.count:
            strike(plan, folder)
        file.write(content[len(content) // 2 :])

    def replace_first(source, target):
        original_replace(source, target)
        calls["replace"] += 1
        if calls["replace"] == plan.count:
            strike(plan, folder)

    def training(net, images):
        # (The one image of settle_buckets is no step.)
        return net.training and len(images) > 1

    def testing(net, images):
        return not net.training and len(images) > 1

    original_save, original_replace, net = torch.save, os.replace, names["Net"]
    if plan.moment == "rank starts":
        names["pick_device"] = before(names["pick_device"])
    elif plan.moment == "resuming":
        name = "resume" if "resume" in names else "resume_newest"
        names[name] = before(names[name])
    elif plan.moment == "step":
        net.forward = before(net.forward, training)
    elif plan.moment == "evaluation":
        net.forward = before(net.forward, testing)
    elif plan.moment == "writing":
        torch.save = write_in_halves
    elif plan.moment == "before the move":
        os.replace = before(os.replace)
    elif plan.moment == "after the move":
        os.replace = replace_first
    elif plan.moment == "the end":
        names["fingerprint"] = before(names["fingerprint"])


# ---- The campaign ----


def command(plan, folder, data_dir):
    """What starts the job of a plan."""
    from support import ROOT, TORCHRUN

    launcher = (*TORCHRUN, "--standalone", f"--nproc-per-node={plan.world_size}")
    worker = (__file__, "--worker", json.dumps(asdict(plan)), folder, ROOT / SCRIPTS[plan.script])
    return *launcher, "--max-restarts=3", *worker, EPOCHS, plan.save_every, "--data-dir", data_dir


def play(plan, folder, data_dir, whole):
    """Play one round in folder; return (starts, what was printed). Raises AssertionError."""
    from support import assert_nothing_left, end, family, start

    output = ""
    for starts in range(1, 5):
        # 03 asks for this variable (README.md): it cannot tell attempts apart by itself.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if plan.script == "03" else {}
        job = start(*command(plan, folder, data_dir), cwd=folder, env=env)
        try:
            if starts == 1 and plan.moment == "torchrun starts":
                time.sleep(plan.seconds)
                victims = [job.pid, *(family(job) if plan.victim == "job" else [])]
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.Signals[plan.signal])
            output += job.communicate(timeout=300)[0]
            assert_nothing_left(job)
        finally:
            end(job)
        check_snapshot(folder / "snapshot.pt", output)
        if job.returncode == 0:
            break
    assert job.returncode == 0, f"not done after {starts} starts:\n{output}"
    struck = plan.moment == "torchrun starts" or (folder / "struck").exists()
    assert struck, f"the moment never came:\n{output}"
    left = {path.name for path in folder.iterdir() if not re.match(r"struck|pid\d|\.", path.name)}
    assert left == {"snapshot.pt"}, left
    found = torch.load(folder / "snapshot.pt", weights_only=True)
    pairs = list(zip(tensors(found), tensors(whole), strict=True))
    assert len(pairs) == 12  # six parameters, each with its momentum
    assert all(torch.equal(*pair) for pair in pairs), f"other weights:\n{output}"
    return starts, output


def check_snapshot(path, output):
    """Raise AssertionError unless the snapshot is whole and holds what was announced as saved."""
    announced = [int(n) for n in re.findall(r"epoch +(\d+)/.*\| saved in", output)]
    if announced or path.exists():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        snapshot = torch.load(path, weights_only=True)
        assert snapshot["next_epoch"] > max(announced, default=0), output


def tensors(tree):
    """All tensors in a snapshot, in order."""
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in tensors(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def repeated_epochs(output):
    """How many epochs rank 0 has reported twice: the work that the strike has cost."""
    reported = Counter(re.findall(r"^\[rank 0/\d\] epoch +(\d+)/", output, re.MULTILINE))
    return sum(count - 1 for count in reported.values())


def whole_run(script, world_size, data_dir):
    """The last snapshot of an uninterrupted run."""
    from support import fork_ranks

    with tempfile.TemporaryDirectory() as folder:
        arguments = (EPOCHS, EPOCHS, "--data-dir", data_dir)
        result = fork_ranks(SCRIPTS[script], *arguments, cwd=folder, world_size=world_size)
        assert result.status == 0, result.output
        return torch.load(f"{folder}/snapshot.pt", weights_only=True)


def campaign(rounds, seed, data_dir):
    """Play the rounds, printing a line for each; return [(plan, starts, repeated epochs)]."""
    wholes, played = {}, []
    # A shell starts what it runs in the background with SIGINT ignored, and torchrun inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(rounds):
        plan = Plan.draw(f"{seed}/{number}")
        key = plan.script, plan.world_size
        if key not in wholes:
            wholes[key] = whole_run(*key, data_dir)
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            starts, output = play(plan, pathlib.Path(folder), data_dir, wholes[key])
        repeated = repeated_epochs(output)
        assert repeated <= plan.save_every, output
        played.append((plan, starts, repeated))
        print(f"{number:>3}  {plan.script}  {plan.world_size} ranks  {plan.signal:<7}"
              f"  {plan.victim:<8}  {plan.moment:<15}  {starts} starts, {repeated} epochs repeated,"
              f" {time.monotonic() - begin:4.0f} s", flush=True)  # fmt: skip
    return played


def report(played):
    """Print how many rounds struck whom, when and how."""
    for name in ("script", "world_size", "signal", "victim", "moment"):
        counts = sorted(Counter(str(getattr(plan, name)) for plan, _, _ in played).items())
        print(f"{name:<10}  {', '.join(f'{value}: {count}' for value, count in counts)}")
    again = sum(starts > 1 for _, starts, _ in played)
    print(f"{len(played)} rounds: {again} started again by hand, the others by torchrun;"
          f" epochs repeated {sum(repeated for _, _, repeated in played)}; lost: none")  # fmt: skip


def main():
    if sys.argv[1:2] == ["--worker"]:
        plan, folder, script, *arguments = sys.argv[2:]
        return run_worker(Plan(**json.loads(plan)), pathlib.Path(folder), script, arguments)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    from support import write_digits

    with tempfile.TemporaryDirectory() as folder:
        report(campaign(args.rounds, args.seed, write_digits(pathlib.Path(folder))))


if __name__ == "__main__":
    main()
