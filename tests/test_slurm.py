"""launch/slurm.sbatch under a real Slurm: two nodes, a requeue in the middle, and the same end."""

import os
import re
import shutil
import time
from functools import partial

import pytest
import torch
from lab import Lab
from support import ROOT, fork_ranks, wait_until

pytestmark = pytest.mark.long
DAEMONS = ("slurmctld", "slurmd")
CONFIGURATION = """
ClusterName=lab
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
NodeName=node1 NodeAddr=10.77.0.1 CPUs=2 RealMemory=4000
NodeName=node2 NodeAddr=10.77.0.2 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path):
    """A function that runs one of Slurm's commands; Slurm has the nodes node1 and node2."""
    missing = [name for name in DAEMONS if not shutil.which(name)]
    if missing or os.getuid() != 0:
        pytest.skip(f"not root, or no {missing}: apt-get install slurm-wlm brings them")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    with Lab(tmp_path) as lab:
        lab.env["SLURM_CONF"] = str(folder / "slurm.conf")
        lab.start("node1", "slurmctld", "-D")
        for node in ("node1", "node2"):
            lab.start(node, "slurmd", "-D", "-N", node)

        def command(*words, **env):
            return lab("run", "node1", "env", *(f"{k}={v}" for k, v in env.items()), *words)

        command.wait_until = partial(
            wait_until, what=lambda: [job.output()[-3000:] for job in lab.jobs],
            timeout=300, pause=0.2)  # fmt: skip
        command.wait_until(lambda: both_idle(lab))
        yield command


def both_idle(lab):
    """Whether Slurm says that both nodes wait for work: "2 idle", or a line for each."""
    said = lab("run", "node1", "sinfo", "-h", "-o", "%D %T", check=False)
    return sum(int(count) for count in re.findall(r"^(\d+) idle$", said, re.MULTILINE)) == 2


def test_a_requeued_job_goes_on_and_ends_as_an_uninterrupted_one(tmp_path, mnist_dir, slurm):
    shutil.copy(ROOT / "03_multinode.py", tmp_path)
    total, log = 30, tmp_path / "multinode-1.log"
    arguments = (total, total, "--data-dir", mnist_dir, "--batch-size", 12)
    submitted = slurm("sbatch", ROOT / "launch/slurm.sbatch", *arguments, PROCESSES=2)
    assert "Submitted batch job 1" in submitted

    def text():
        return log.read_text() if log.exists() else ""

    slurm.wait_until(lambda: "epoch  2/" in text())
    slurm("scancel", "--batch", "--signal=USR1", 1)
    slurm.wait_until(lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", 1))
    saved = torch.load(tmp_path / "snapshot.pt", weights_only=True)["next_epoch"]
    assert 3 <= saved <= total
    time.sleep(5)  # a node refuses a start that comes sooner: it takes it for the killed job's
    slurm("scontrol", "update", "JobId=1", "StartTime=now")
    slurm.wait_until(lambda: "JobState=COMPLETED" in slurm("scontrol", "show", "job", 1))
    assert "Restarts=1" in slurm("scontrol", "show", "job", 1)

    assert "job 1 saves and goes back into the queue" in text()
    assert f"node1 [rank 0/4] resumed from snapshot.pt of node1 at epoch {saved}" in text()
    epochs = [int(number) for number in re.findall(r"epoch +(\d+)/.* images/s", text())]
    assert epochs == list(range(1, total + 1)), "an epoch was trained twice, or not at all"
    whole = tmp_path / "whole"
    whole.mkdir()
    fork_ranks("02_torchrun_elastic.py", *arguments, cwd=whole, world_size=4)
    ours, theirs = (torch.load(folder / "snapshot.pt", weights_only=True)["model"]
                    for folder in (tmp_path, whole))  # fmt: skip
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for node in ("node1", "node2"):
        files = list((tmp_path / "multinode-1" / node).glob("**/stdout.log"))
        assert len(files) == 4, "two processes, twice"
