"""launch/lab, with 03, the template and tools/check_machines.py: machines and networks fail."""

import itertools
import os
import random
import re
import shutil
import signal
import tempfile

import pytest
import shown
from forked import variant
from lab import LAB, Job, Lab
from mistakes.check_training import BASE, STEP
from shown import masked
from started import ACTIVE, PYTHON, ROOT, end, run, start, wait_until

pytestmark = pytest.mark.long
SCRIPT = ROOT / "template/train.py"
CHECK = ROOT / "tools/check_machines.py"
NODES = "node1", "node2"
TORCHRUN = (
    "torchrun",
    "--nnodes=2",
    "--rdzv-id=345",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=node1:29603",
)


@pytest.fixture
def lab(tmp_path):
    with Lab(tmp_path) as lab:
        yield lab


def test_machines_have_names_addresses_and_links_of_their_own(lab):
    connect = "import socket; socket.create_connection(('node2', 999), timeout=2)"
    server = lab.start(
        "node2",
        "python3",
        "-c",
        """
import socket
server = socket.create_server(("", 999))
print("up", flush=True)
print(server.accept()[1][0], socket.gethostname())
""",
    )
    server.wait_for("up")
    lab("cut", "node2")
    assert re.search("node1 .* link up .*\nnode2 .* link down +1 proc", lab("list"))
    output = lab("run", "node1", "python3", "-c", connect, check=False)
    assert "timed out" in output or "No route to host" in output
    lab("mend", "node2")
    lab("run", "node1", "python3", "-c", connect)
    assert server.result().output == "up\n10.77.0.1 node2\n"
    assert "0 processes\nnode2  10.77.0.2  link up  0 processes" in lab("list")


def test_kill_and_down_leave_nothing_behind(tmp_path):
    with Lab(tmp_path, 3) as lab:
        jobs = [lab.start(f"node{i}", "sleep", "1000") for i in (1, 2, 3)]
        wait_until(lambda: lab("list").count(" 1 processes") == 3, lambda: lab("list"))
        lab("kill", "node2")
        assert jobs[1].result(10).status == -signal.SIGKILL
        assert jobs[0].process.poll() is jobs[2].process.poll() is None
    assert all(job.result(10).status == -signal.SIGKILL for job in jobs)
    assert "no lab is up" in lab("list", check=False)
    assert not [name for name in os.listdir(tempfile.gettempdir()) if lab.env["LAB"] in name]


RECEIVE = """
import socket, time
server = socket.create_server(("", 999))
print("up", flush=True)
client, _ = server.accept()
got, start = len(client.recv(1)), time.monotonic()
while block := client.recv(1 << 20):
    got += len(block)
print(got * 8 / (time.monotonic() - start) / 1e6)
"""


def test_links_are_held_to_a_rate(tmp_path):
    """In both directions, also when it changes under way; never faster, however busy this is."""

    def rate(sender, receiver, size):
        server = lab.start(receiver, "python3", "-c", RECEIVE)
        server.wait_for("up")
        lab(
            "run",
            sender,
            "python3",
            "-c",
            f"import socket; socket.create_connection(('{receiver}', 999)).sendall(bytes({size}))",
        )
        return float(server.result().output.split()[-1])

    with Lab(tmp_path, 2, "--rate", "50mbit") as lab:
        lab("rate", "node2", "10mbit")  # what it sends, and what is sent to it
        assert re.search("node1 .* 50Mbit .*\nnode2 .* 10Mbit ", lab("list"))
        assert rate("node1", "node2", 1_000_000) < 13
        assert rate("node2", "node1", 1_000_000) < 13
        lab("rate", "node2", "off")
        assert re.search("node1 .* 50Mbit .*\nnode2 .* link up  0 ", lab("list"))


# ---- Training on two machines ----

STORY = ("lab: start", "lab: kill a machine", "lab: it comes back", "lab: end")


def with_scripts(folder):
    """The folder as a reader has it: the scripts, and launch/lab."""
    for path in ROOT.glob("0*_*.py"):
        shutil.copy(path, folder)
    (folder / "launch").mkdir()
    shutil.copy(LAB, folder / "launch")
    return folder


def test_the_story_of_the_document(tmp_path, request):
    """Its blocks, one after the other in one shell, and what they print."""
    lab, script = Lab(with_scripts(tmp_path)), ""
    for i, name in enumerate(STORY):
        script += f"{shown.block(name)}\nwhile [ ! -e go{i} ]; do sleep 0.1; done\n"
    job = Job(start("bash", "-c", script, cwd=tmp_path, env=lab.env))
    try:
        moment = 0
        for number, patterns in enumerate(
            [
                [r"rank 0/4\] epoch +4/"],
                [r"rank 0/2\] resumed from snapshot.pt at epoch \d", r"rank 0/2\] epoch"],
                [r"rank 0/4\] resumed from", r"rank 0/4\] epoch"],
                [],
            ]
        ):
            for pattern in patterns:
                moment, _ = job.wait_for(rf"^\[{pattern}", moment)
            (tmp_path / f"go{number}").touch()
        output = job.result().output
    finally:
        end(job.process)
        lab("down", check=False)
    if request.config.getoption("--write-transcripts"):
        printed = [line for line in output.splitlines() if line.startswith("[rank 0/")]
        shown.write(shown.FOLDER / "several_machines.txt", shown.LAB_STORY, printed)
    blocks = shown.BLOCK.findall(shown.LAUNCH.read_text())
    lines = [
        line
        for name, block in blocks
        if name == "several_machines.txt"
        for line in block.splitlines()
    ]
    assert len(lines) > 8 and set(masked(lines)) <= set(masked(output.splitlines()))


def test_the_start_by_hand_of_the_document(tmp_path, lab):
    block = shown.block("by hand").replace("\\\n", " ")
    calls = re.findall(r"^(.*) +# on (node\d)$", block, re.MULTILINE)
    assert [node for _, node in calls] == ["node1", "node2"]
    with_scripts(tmp_path)
    results = lab.run(*((node, "bash", "-c", command) for command, node in calls))
    assert all(result.status == 0 for result in results), results
    assert results[0].lines(0)[-1].startswith("2 replicas are identical, sha256 ")
    assert list(results[0].epochs()) == [1, 2, 3, 4, 5]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start its own sshd on port 22")
@pytest.mark.skipif(not os.path.exists("/usr/sbin/sshd"), reason="no sshd: openssh-server has it")
def test_the_start_by_ssh_of_the_document(tmp_path, lab):
    """On CPUs, two processes each; with servers, keys and a configuration of the test's own."""
    block = shown.block("start by ssh")
    with_scripts(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={lab.env['PATH']}\n")
    for key in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key, cwd=tmp_path)
    (tmp_path / "ssh_config").write_text(
        f"IdentityFile {tmp_path}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
    )
    serve = (
        "mount -t tmpfs none /run; mkdir /run/sshd; exec /usr/sbin/sshd -D -e -f /dev/null"
        " -h $PWD/host -o AuthorizedKeysFile=$PWD/user.pub -o StrictModes=no"
        " -o PermitRootLogin=yes -o PidFile=none"
    )
    for node in ("node1", "node2"):
        server = lab.start(node, "unshare", "--mount", "sh", "-c", serve)
        server.wait_for("Server listening on 0.0.0.0 port 22")
    bind = "mount --bind ssh_config /etc/ssh/ssh_config; "
    command = bind + block.replace("=gpu", "=2").replace(" 50 10", " 2 1")
    [result] = lab.run(("node1", "unshare", "--mount", "bash", "-c", command))
    assert list(result.ok().epochs()) == [1, 2], result.output
    assert result.lines(0)[-1].startswith("4 replicas are identical, sha256 ")


# ---- What goes wrong between machines, and what 03 and tools/check_machines.py say ----


def check(lab, *options, nodes=NODES, names=NODES, **env):
    """Run the check on these machines; return the results."""
    results = lab.run(*((node, "python", CHECK, *names, *options) for node in nodes), **env)
    assert all("Traceback" not in result.output for result in results), results
    return results


def assert_well(results):
    assert all(result.status == 0 for result in results), results


def assert_error(result, message):
    assert result.status == 1 and message in result.error(), result.output


def test_check_passes_and_names_a_machine_that_is_missing_or_cut_off(lab):
    first, second = check(lab)
    assert_well([first, second])
    assert first.lines(0)[-1] == "check passed: 2 ranks on 2 machines"
    for shared in ("", "1"):  # a store of torchrun, and one of rank 0
        results = lab.run(
            *((node, *TORCHRUN, "--nproc-per-node=2", CHECK) for node in NODES),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE=shared,
        )
        assert_well(results)
        assert "check passed: 4 ranks on 2 machines" in results[0].output + results[1].output

    lab("cut", "node2")
    first, second = check(lab, "--timeout", 5)
    assert_error(first, "node2 did not come within 5 s: is the check running there")
    assert_error(second, "node1:29613 has not answered node2 for 5 s")
    lab("mend", "node2")
    [second] = check(lab, "--timeout", 5, nodes=["node2"])
    assert_error(second, "nothing listens there. Start the check on node1, too")
    silent = "import socket, time; s = socket.create_server(('', 29613)); time.sleep(1000)"
    lab.start("node1", "python3", "-c", silent)
    [second] = check(lab, "--timeout", 5, nodes=["node2"])
    assert_error(second, "node1:29613 accepts connections, but does not answer")
    [first] = check(lab, nodes=["node1"])
    assert_error(first, "the port is taken. Is another check or a job running")


def test_check_training_names_a_slow_rank_with_its_machine(lab, tmp_path):
    """As tools/README.md shows it: recorded on disks apart, judged on one."""
    slow = {STEP: f"{STEP}            __import__('time').sleep(dist.get_rank() // 3 * 0.1)\n"}
    for folder in (tmp_path, *((tmp_path / node) for node in NODES)):
        folder.mkdir(exist_ok=True)
        (folder / "tools").symlink_to(ROOT / "tools")
        variant(folder, BASE, slow).rename(folder / "train.py")
    commands = shown.block("check training: several machines")
    job = f"cd $0; {commands} mv records ../records-of-$0"
    assert_well(lab.run(*((node, "sh", "-euc", job, node) for node in NODES)))
    result = run("sh", "-euc", shown.block("check training: judge"), cwd=tmp_path)
    assert "found: ranks 0, 1 and 2 wait for rank 3 (node2) in " in result.output, result.output


def test_check_training_names_the_machine_with_a_slow_link(tmp_path):
    """Of three, while they train: all leave an exchange together, so the steps do not tell."""
    large = {"nn.GELU(),": "nn.GELU(), nn.Linear(64, 2000), nn.Linear(2000, 64),"}
    variant(tmp_path, BASE, large | {"range(5)": "range(2)", "lr=0.05": "lr=1e-4"})
    script = ROOT / "tools/check_training.py"
    words = f"python {script} --records kept -- {' '.join(TORCHRUN)} --nnodes=3 many_processes.py"
    with Lab(tmp_path, 3) as lab:
        lab("rate", "node3", "50mbit")
        assert_well(lab.run(*((node, *words.split()) for node in (*NODES, "node3"))))
    said = run(PYTHON, script, "--judge", "kept", cwd=tmp_path, env=ACTIVE).output
    assert re.search(r"link of node3: .* [2-6]\d Mbit/s, ", said) and "question" not in said, said


def test_a_host_name_on_loopback_and_its_cure(tmp_path):
    call, cure = (*TORCHRUN, SCRIPT, 1, 1), {"GLOO_SOCKET_IFNAME": "eth0"}
    with Lab(tmp_path, 2, "loopback") as lab:
        for result, node in itertools.product(check(lab), NODES):
            assert_error(
                result,
                f"{node} gives the others an address that only it can use (127.0."
                f"1.1): on {node}, set GLOO_SOCKET_IFNAME to one of eth0",
            )
        short = (*call, "--timeout", 6)  # Gloo may try for five times as long
        results = lab.run(("node1", *short), ("node2", *short))
        assert all(result.status == 1 for result in results)
        output = re.sub(r":\d+\]", "]", results[0].output + results[1].output)
        assert "an address that they cannot reach: set GLOO_SOCKET_IFNAME" in output, output
        for message in ("Gloo connectFullMesh failed", "Connection refused, remote=[127.0.1.1]"):
            assert message in output and message in shown.PITFALLS.read_text(), output
        assert_well(check(lab, **cure))
        assert_well(lab.run(("node1", *call), ("node2", *call), **cure))


def test_machines_without_names(tmp_path):
    addresses, interface = ("10.77.0.1", "10.77.0.2"), {"GLOO_SOCKET_IFNAME": "eth0"}
    torchrun = [word.replace("node1", addresses[0]) for word in TORCHRUN]
    calls = [
        (
            f"node{number}",
            *torchrun,
            f"--local-addr={addresses[number - 1]}",
            f"--rdzv-conf=is_host={int(number == 1)}",
            SCRIPT,
            1,
            1,
        )
        for number in (1, 2)
    ]
    with Lab(tmp_path, 2, "none") as lab:
        for result in check(lab):
            assert_error(result, "does not know the name node1: add it to /etc/hosts")
        assert_well(check(lab, names=addresses, **interface))
        assert_well(lab.run(*calls, **interface))


def test_machines_without_ipv4(tmp_path):
    """With names, and with addresses; 05 needs no more than loopback."""
    with Lab(tmp_path, 2, "ipv6") as lab:
        for names in (NODES, ("fd77::1", "fd77::2")):
            assert_well(check(lab, names=names))
        for script in (ROOT / "03_multinode.py", SCRIPT):
            assert_well(lab.run(*((node, *TORCHRUN, script, 1, 1) for node in NODES)))
        port = str(random.randrange(20000, 30000))
        assert_well(
            lab.run(
                *(
                    ("node1", "python", ROOT / "05_tcpstore.py", "--role", role, "--port", port)
                    for role in ("server", "client")
                )
            )
        )
