"""launch/slurm.sbatch under a real Slurm: two nodes, a requeue in the middle, and the same end.

Without a Slurm, commands of the same names note the calls.
"""

import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from functools import partial

import pytest
import shown
import torch
from forked import fork_ranks, variant
from lab import Lab
from started import ACTIVE, PYTHON, ROOT, run, running, wait_until

DAEMONS = ("slurmctld", "slurmd")
# Commands in the place of Slurm's; and python, which without PYTHON finds no snapshot to look at.
FAKES = {
    "scontrol": 'echo "scontrol $*" >>calls; [[ $2 != job ]] || echo "$SHOWN"; echo node1',
    "scancel": 'kill "$(cat step)"',
    "python": 'exec $PYTHON "$@"',
    "srun": 'echo "srun $* $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >>calls; cp "$WRITES" train.pt;'
    " echo $$ >step; exec sleep 60",
}


def start_until_the_end_is_near(folder, writes="/dev/null", tell="the script", **env):
    """Run slurm.sbatch until a rank has written that; return its status, and what it called."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in FAKES.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    for name in ("step", "calls"):
        (folder / name).unlink(missing_ok=True)
    env = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "multinode",
        "SLURM_JOB_NODELIST": "node1",
        "WRITES": str(writes),
        "SLURM_CPUS_PER_TASK": None,
        "SHOWN": "PreemptTime=None",
        "PYTHON": "true",
        **env,
    }
    with running("bash", ROOT / "launch/slurm.sbatch", 2, 1, cwd=folder, env=env) as job:
        wait_until((folder / "step").exists, "srun is called")
        if tell == "the script":
            job.send_signal(signal.SIGUSR1)
        else:
            os.kill(int((folder / "step").read_text()), signal.SIGTERM)
        return job.wait(60), (folder / "calls").read_text()


@pytest.mark.parametrize("preempted", [False, True])
def test_a_job_that_slurm_ends_early_comes_back(tmp_path, preempted):
    """By SIGTERM to its ranks alone, and some time later by force; another failure ends the job."""
    shown = f"PreemptTime={'2026-11-22T19:39:18' if preempted else 'None'}"
    status, calls = start_until_the_end_is_near(tmp_path, tell="the step", SHOWN=shown)
    assert status != 0 and ("scontrol requeue 1" in calls) == preempted
    assert "srun --kill-on-bad-exit=1 bash" in calls, "a number of cores of its own"


@pytest.mark.long
def test_no_start_without_progress_is_followed_by_another(tmp_path):
    """Otherwise a job whose steps or saves take too long would come back for ever."""
    for step, requeued in ((0, True), (0, False), (40, True), (41, True)):
        path = tmp_path / "saved.pt"  # by ranks that go on from one and write another
        torch.save({"model": {}, "step": step, "due": False, "plan": str(time.monotonic())}, path)
        status, calls = start_until_the_end_is_near(
            tmp_path, path, PYTHON=PYTHON, SLURM_CPUS_PER_TASK="4"
        )
        assert (status, "scontrol requeue 1" in calls) == (not requeued, requeued), step
        assert "srun --kill-on-bad-exit=1 --cpus-per-task=4 bash" in calls and " 2 1 150\n" in calls


def test_an_array_is_refused(tmp_path):
    """To requeue its last task is to requeue the others, too."""
    env = {"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "1"}
    result = run("bash", ROOT / "launch/slurm.sbatch", cwd=tmp_path, env=env)
    assert result.status == 2 and "not for array jobs" in result.output


@pytest.fixture
def slurm(tmp_path):
    """A function that runs one of Slurm's commands; Slurm has the nodes node1 and node2."""
    missing = [name for name in DAEMONS if not shutil.which(name)]
    if missing or os.getuid() != 0:
        pytest.skip(f"not root, or no {missing}: apt-get install slurm-wlm brings them")
    with Lab(tmp_path) as lab, tempfile.TemporaryDirectory() as folder:  # short: it holds sockets
        os.mkdir(f"{folder}/state")
        lab.env["SLURM_CONF"] = f"{folder}/slurm.conf"
        configuration = (ROOT / "tests/slurm.conf").read_text().format(folder=folder)
        pathlib.Path(lab.env["SLURM_CONF"]).write_text(configuration)
        lab.start("node1", "slurmctld", "-D")
        for node in ("node1", "node2"):
            lab.start(node, "slurmd", "-D", "-N", node)

        def command(*words, check=True, **env):
            variables = [f"{name}={value}" for name, value in env.items()]
            return lab("run", "node1", "env", *variables, *words, check=check)

        command.wait_until = partial(
            wait_until,
            what=lambda: [job.output()[-3000:] for job in lab.jobs],
            timeout=300,
            pause=0.2,
        )
        command.wait_until(
            lambda: command("sinfo", "-h", "-N", "-o", "%T", check=False).split() == ["idle"] * 2
        )
        yield command


@pytest.mark.long
def test_a_requeued_job_goes_on_at_its_step_and_ends_as_an_uninterrupted_one(tmp_path, slurm):
    (tmp_path / "template").mkdir()
    variant(
        tmp_path / "template",
        "template/train.py",
        (  # step 21 waits for SIGTERM
            "add_up_gradients = lambda *args, old=add_up_gradients: ([time.sleep(.1) for _ in iter("
            "lambda: args[2] == 21 and not survive.SIGTERM_CAME.is_set(), 0)], old(*args))[1]"
        ),
    )
    log = tmp_path / "multinode-1.log"
    arguments = (60, 20, "--batch-size", 8)  # it is told to leave after the first save
    submitted = slurm("sbatch", ROOT / "launch/slurm.sbatch", *arguments, PROCESSES=2)
    assert "Submitted batch job 1" in submitted

    def text():
        return log.read_text() if log.exists() else ""

    slurm.wait_until(lambda: "step   20/60 | saved" in text())
    slurm("scancel", "--batch", "--signal=USR1", 1)
    slurm.wait_until(lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", 1))
    saved = torch.load(tmp_path / "train.pt", weights_only=True)
    assert saved["step"] == 21
    time.sleep(5)  # a node refuses a start that comes sooner: it takes it for the killed job's
    slurm("scontrol", "update", "JobId=1", "StartTime=now")
    slurm.wait_until(lambda: "JobState=COMPLETED" in slurm("scontrol", "show", "job", 1))
    assert "Restarts=1" in slurm("scontrol", "show", "job", 1)

    assert "job 1 saves and goes back into the queue" in text()
    resumed = r"^node1 \[rank 0/4\] resumed from train.pt after step (\d+), saved on node\d$"
    assert re.findall(resumed, text(), re.MULTILINE) == [str(saved["step"])]
    steps = [int(number) for number in re.findall(r"step +(\d+)/.* examples/s", text())]
    assert steps == [*range(10, 61, 10)], "a step was trained twice, or not at all"
    (whole := tmp_path / "whole").mkdir()
    fork_ranks("template/train.py", *arguments, cwd=whole, world_size=4, timeout=400)
    ours, theirs = (
        torch.load(folder / "train.pt", weights_only=True)["model"] for folder in (tmp_path, whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.long
def test_srun_alone_starts_the_template(tmp_path, slurm):
    """As template/README.md says, in a batch script."""
    shutil.copytree(ROOT / "template", tmp_path / "template")
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + shown.block("template: srun"))
    slurm("sbatch", "--nodes=2", "--ntasks-per-node=2", "--output=log", tmp_path / "job.sh")
    slurm.wait_until(lambda: "JobState=COMPLETED" in slurm("scontrol", "show", "job", 1))
    assert "[rank 0/4] 4 replicas are identical, sha256 " in (tmp_path / "log").read_text()


@pytest.mark.long
def test_check_training_under_srun(tmp_path, slurm):
    """As tools/README.md says, in a batch script."""
    variant(tmp_path, "docs/many_processes.py", {}).rename(tmp_path / "train.py")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + shown.block("check training: Slurm"))
    slurm("sbatch", "--nodes=2", "--ntasks-per-node=2", "--output=log", tmp_path / "job.sh")
    slurm.wait_until(lambda: "JobState=COMPLETED" in slurm("scontrol", "show", "job", 1))
    assert "node1: ranks 0 and 1; node2: ranks 2 and 3\n" in (tmp_path / "log").read_text()


@pytest.mark.long
def test_torchx_starts_the_template_and_writes_jobs(tmp_path):
    """launch/README.md's commands as they stand, but for the first, which installs."""
    pytest.importorskip("torchx", reason="pip install -r requirements-dev.txt")
    shutil.copy(ROOT / "03_multinode.py", tmp_path)
    shutil.copytree(ROOT / "template", tmp_path / "template")
    install, commands = shown.block("torchx").split("\n", 1)
    assert install.startswith("pip install ")
    result = run(
        "bash", "-euc", commands, cwd=tmp_path, env=ACTIVE | {"HOME": tmp_path}, timeout=600
    ).ok()
    here, slurm, kubernetes = re.split(r"^=== APPLICATION ===$", result.output, flags=re.MULTILINE)
    assert re.search(r"\[rank 0/2\] 2 replicas are identical, sha256 \w{12}", here), here
    torchrun = (
        r"torchrun --rdzv_backend c10d --rdzv_endpoint \$\{\w+:=localhost\}:29500"
        r" --rdzv_id .*? --nnodes 2 --nproc_per_node 8 .*? "
    )
    for scheduler, script in (
        (slurm.partition("#!/bin/bash\n")[2], "03_multinode.py 50 10"),
        (kubernetes, "template/train.py 6000 1000 --snapshot-path /jobs/train.pt"),
    ):
        assert len(re.findall(torchrun + script, " ".join(scheduler.split()))) == 2, scheduler
    assert slurm.count("--mem=64000 --gpus-per-task=8") == 2
    assert "schedulerName: volcano" in kubernetes and "nvidia.com/gpu" in kubernetes
