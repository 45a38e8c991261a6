import functools
import gzip
import hashlib
import json
import os
import re
import signal
import tempfile

# A shell starts what it runs in the background with SIGINT ignored, and all children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before torch is imported, here and in every child: all runs on the CPU, also where there is a GPU.
# pytest -m gpu gives them back to the commands that it runs.
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Variables for the caller's own jobs, and a proxy, would change what the tests see.
for name in list(os.environ):
    if name == "RANK" or name.startswith(
        (
            "OMP_",
            "MASTER_",
            "LOCAL_",
            "GROUP_",
            "ROLE_",
            "WORLD_",
            "TORCHELASTIC_",
            "TORCH_DISTRIBUTED_",
        )
    ):
        del os.environ[name]
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

import pytest
from digits import make_digits, write_digits
from started import PYTHON, run
from xdist.scheduler import LoadScopeScheduling


def pytest_addoption(parser):
    parser.addoption("--rounds", type=int, default=1, help="repetitions of the launch tests")
    parser.addoption("--write-transcripts", action="store_true", help="write transcripts anew")


def pytest_xdist_auto_num_workers(config):
    """All plain tests run in three processes, all long ones in four, as most wait; a few in one."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return {"not long and not gpu": 3, "long": 4}.get(config.option.markexpr, 0) * whole


def pytest_xdist_make_scheduler(config, log):
    """One process runs a file, as its tests share what they set up; some share nothing."""
    alone = "answer|test_(benchmarks|departures|kill|lab|recipes|repository|swap)"
    config.option.loadscopereorder = config.option.markexpr != "long"  # else: as sorted below

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            long = config.option.markexpr == "long"
            found = re.search(alone if long else "answer", nodeid)
            return nodeid if found else nodeid.partition("::")[0]

    return ByFile(config, log)


ASK = """import json, torch
there = torch.cuda.is_available()
count = torch.cuda.device_count() if there else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if there else None
print(json.dumps({"gpus": count, "torch": torch.__version__, "cuda": torch.version.cuda,
                  "name": torch.cuda.get_device_name() if there else None, "nccl": nccl}))"""


@functools.cache
def machine_with_gpus():
    """What a process that may see the GPUs says of them."""
    with tempfile.TemporaryDirectory() as folder:
        result = run(PYTHON, "-c", ASK, cwd=folder, env={"CUDA_VISIBLE_DEVICES": VISIBLE})
    return json.loads(result.ok().output.splitlines()[-1])


def pytest_collection_modifyitems(config, items):
    order = {"test_slurm.py": -1, "test_lab.py": -1}  # what waits most, begins
    first = re.compile("come_and_go|one_gpu")
    items.sort(key=lambda item: -2 * bool(first.search(item.name)) or order.get(item.path.name, 0))
    if config.option.markexpr == "gpu" and not machine_with_gpus()["gpus"]:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


@pytest.fixture(scope="session")
def idx_files():
    return make_digits()


@pytest.fixture(scope="session")
def archives(idx_files):
    """{name.gz: (content, md5)}: the same set as a mirror of MNIST has it."""
    packed = {f"{name}.gz": gzip.compress(data, 1, mtime=0) for name, data in idx_files.items()}
    return {name: (data, hashlib.md5(data).hexdigest()) for name, data in packed.items()}


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory):
    """A folder for --data-dir that holds the small set; not to be written to."""
    return write_digits(tmp_path_factory.mktemp("digits"))
