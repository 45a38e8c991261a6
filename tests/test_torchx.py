"""TorchX starts 02 unchanged, and the jobs that it writes for Slurm and Kubernetes start 03."""

import re
import shutil

import pytest
import shown
from started import ACTIVE, ROOT, run

pytestmark = pytest.mark.long


def test_torchx_starts_the_scripts_unchanged(tmp_path):
    """launch/README.md's commands as they stand, but for the first, which installs."""
    pytest.importorskip("torchx", reason="pip install -r requirements-dev.txt")
    for name in ("02_torchrun_elastic.py", "03_multinode.py"):
        shutil.copy(ROOT / name, tmp_path)
    install, commands = shown.block("torchx").split("\n", 1)
    assert install.startswith("pip install ")
    environment = ACTIVE | {"HOME": tmp_path}
    result = run("bash", "-euc", commands, cwd=tmp_path, env=environment, timeout=600)
    assert result.status == 0, result.output
    here, slurm, kubernetes = re.split(r"^=== APPLICATION ===$", result.output, flags=re.MULTILINE)

    assert re.search(r"\[rank 0/2\] 2 replicas are identical, sha256 \w{12}", here), here
    assert "Job finished: SUCCEEDED" in here

    torchrun = (r"torchrun --rdzv_backend c10d --rdzv_endpoint \$\{\w+:=localhost\}:29500"
                r" --rdzv_id .* --nnodes 2 --nproc_per_node 8 .* 03_multinode.py 50 10")
    assert "kind: Job" in kubernetes and "schedulerName: volcano" in kubernetes
    for scheduler in slurm, kubernetes:
        assert len(re.findall(torchrun, scheduler)) == 2, scheduler
    assert len(re.findall(r"--mem=64000 --gpus-per-task=8", slurm)) == 2
    assert kubernetes.count("nvidia.com/gpu: '8'") >= 2, kubernetes
