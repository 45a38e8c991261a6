"""recipes/ that concern what all ranks do together: their figures, and that each can fail."""

import pickle
import runpy

import pytest
import torch
from support import ROOT, assert_fails, fork_ranks, numbers, variant

# ---- agree ----


def test_agree(tmp_path):
    result = fork_ranks("recipes/agree.py", cwd=tmp_path, world_size=3)
    assert result.status == 0, result.output
    assert numbers(r"alone: .* rank (\d) left after epoch (\d); the others failed in epoch (\d)",
                   result) == [("0", "3", "4")]
    agreed = numbers(r"agreed: (.*?) +wanted by rank (\d); all left after epoch (\d)", result)
    assert agreed == [("early stopping", "0", "3"), ("stop file", "0", "2"),
                      ("time limit", "2", "4"), ("loss is nan", "2", "1")]


@pytest.mark.long
@pytest.mark.parametrize(("message", "old", "new"), [
    ("not all left together: early stopping, epochs [3, 3], errors ['', 'Timed out",
     'on any of them. All ranks must call it."""\n', 'alone."""\n    return condition\n'),
    pytest.param("one rank left alone, but: epochs [6, 6], errors ['', '']",
                 "        if wants_to_stop(epoch):\n            break\n", "",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_agree_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/agree.py", {old: new}, message)


# ---- metrics ----


def test_metrics(tmp_path):
    """The figures of one process, without the recipe's own functions where that is easy."""
    result = fork_ranks("recipes/metrics.py", cwd=tmp_path)
    found = {name: tuple(map(float, figures)) for name, *figures in numbers(
        r"(AUC|median|F1) +(\S+) +(\S+) +(\S+)", result)}  # fmt: skip
    assert found == {"AUC": (0.7707, 0.7707, 0.8105), "median": (0.6615, 0.6615, 0.6694),
                     "F1": (0.3798, 0.3798, 0.4108)}  # fmt: skip


def test_metrics_sends_the_rows_alone():
    """And not the tensor that they are a slice of."""
    gather_rows, sizes = runpy.run_path(str(ROOT / "recipes/metrics.py"))["gather_rows"], []

    class OneRank:
        get_world_size = staticmethod(lambda: 1)

        def all_gather_object(shares, value):
            sizes.append(len(pickle.dumps(value)))
            shares[0] = value

    gather_rows.__globals__["dist"] = OneRank
    [rows] = gather_rows(torch.arange(1_000_000)[:600])
    assert rows.tolist() == list(range(600)) and sizes[0] < 10_000


@pytest.mark.parametrize(("message", "old", "new"), [
    ("AUC over all ranks: 0.8105", "return metric(*gather_rows(scores, labels))",
     "return mean_of_metrics(metric, scores, labels)"),
    ("F1 over all ranks: 0.", "    dist.all_reduce(counts)  # adds them up", "    # adds them up"),
    pytest.param("the mean of the ranks' AUC is right here: 0.7",
                 "metric(scores, labels), device=scores",
                 "metric(*gather_rows(scores, labels)), device=scores", marks=pytest.mark.long),
])  # fmt: skip
def test_metrics_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/metrics.py", {old: new}, message)


# ---- stream ----


def test_stream(tmp_path):
    result = fork_ranks("recipes/stream.py", cwd=tmp_path)
    delivered = numbers(r"(.*?) +(\d+) samples delivered, (\d+) of them different", result)
    assert delivered == [("no split", "400", "100"), ("split by rank", "200", "100"),
                         ("split by rank and worker", "100", "100")]
    assert numbers(r"batches on each rank, .*: (\d), (\d)", result) == [("5", "2")]
    assert numbers(r"steps .* with all_have\(\): +(\d), (\d)", result) == [("2", "2")]


@pytest.mark.parametrize(("message", "old", "new"), [
    ("split by rank and worker: not every sample is delivered 1 times",
     "start, step = self.rank * workers + me, self.world_size * workers\n        # Every",
     "start, step = self.rank, self.world_size\n        # Every"),
    pytest.param("no split: not every sample is delivered 4 times", "return self.samples()\n",
                 "return itertools.islice(self.samples(), self.rank, None, self.world_size)\n",
                 marks=pytest.mark.long),
    pytest.param("batches [5, 5], steps [5, 5]", "    if rank > 0:", "    if rank > 1:",
                 marks=pytest.mark.long),
    ("batches [5, 2], steps [1, 1]", "yield batch\n", "yield batch\n        return\n"),
])  # fmt: skip
def test_stream_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/stream.py", {old: new}, message)


@pytest.mark.long
def test_stream_hangs_without_the_agreement(tmp_path):
    """Rank 0 then waits in its third step for rank 1, which has left: until a short timeout."""
    script = variant(tmp_path, "recipes/stream.py", {
        "    dist.all_reduce(have, op=dist.ReduceOp.MIN)": "    # dist.all_reduce(have)",
        "timeout=timedelta(seconds=60)": "timeout=timedelta(seconds=10)",
        "    have, took =": "    time.sleep(60 if rank else 0)\n    have, took =",
    })  # fmt: skip
    result = fork_ranks(script, cwd=tmp_path)
    assert result.status == 1
    assert "all_reduce(torch.ones(1, device=device))" in result.output, result.output
    assert "Timed out waiting 10000ms" in result.output


# ---- contrastive ----


def test_contrastive(tmp_path):
    result = fork_ranks("recipes/contrastive.py", cwd=tmp_path)
    off = {name: (float(encoder), float(scale)) for name, encoder, scale in numbers(
        r"(.*?) +off by (\S+) +off by (\S+)", result)}  # fmt: skip
    assert max(off["AllGather"]) < 1e-6
    assert off["local negatives"][0] == pytest.approx(0.68, abs=0.01)
    assert off["all_gather alone"][0] == pytest.approx(0.49, abs=0.01)
    assert off["own rows put back"][0] == pytest.approx(0.35, abs=0.01)
    assert off["whole loss on every rank"] == (pytest.approx(0.5), pytest.approx(0, abs=1e-6))
    assert off["whole loss times ranks"] == (pytest.approx(0, abs=1e-6), pytest.approx(1))


@pytest.mark.parametrize(("message", "old", "new"), [
    ("AllGather does not give", "        dist.reduce_scatter(own, parts)\n",
     "        own = parts[dist.get_rank()]\n"),  # only the own loss's gradient
    pytest.param("AllGather does not give",
                 "first=dist.get_rank() * len(a))\n\n\ndef local_negatives",
                 "first=0)\n\n\ndef local_negatives", marks=pytest.mark.long),
    ("the mistakes do not", "    return torch.cat(parts).unbind(dim=1)\n",
     "    return AllGather.apply(torch.stack([a, b], dim=1)).unbind(dim=1)\n"),
])  # fmt: skip
def test_contrastive_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/contrastive.py", {old: new}, message)


# ---- weights_to_serve ----


def test_weights_to_serve(tmp_path):
    result = fork_ranks("recipes/weights_to_serve.py", cwd=tmp_path)
    off = {name: float(figure) for name, figure in numbers(
        r"(.*?): +outputs differ by (\S+)", result)}  # fmt: skip
    right = ["averaged.module, loaded by the plain model", "DDP(model), loaded without its prefix"]
    assert [off.pop(name) for name in right] == [0, 0]
    assert off.popitem()[1] > 0.1 and not off
    assert numbers(r"(.*?): +(Missing key\(s\): .*)", result) == [
        ("DDP(model), loaded by the plain model", 'Missing key(s): "0.weight", ...')]


@pytest.mark.parametrize(("message", "old", "new"), [
    ("the averaged weights differ", "(model(torch.randn", "(model.module(torch.randn"),
    pytest.param("the loaded model is not",
                 "torch.save(averaged.module.state_dict(), path)\n\n\ndef",
                 "torch.save(new_net().state_dict(), path)\n\n\ndef", marks=pytest.mark.long),
    pytest.param("the names are not", "    plain.compile(backend=BACKEND)",
                 "    plain = torch.compile(plain, backend=BACKEND)", marks=pytest.mark.long),
    ("the buffers of the ranks", "            dist.broadcast(buffer, src=0)", "            pass"),
    ("the average of integers", "            mean.copy_(latest)", "            pass"),
    ("the average does not go on", "right.load_state_dict(averaged",
     "right.module.load_state_dict(averaged.module"),
    pytest.param("the mistakes do not", "load_what_fits(wrong)", "load_without_prefix(wrong)",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_weights_to_serve_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/weights_to_serve.py", {old: new}, message)


# ---- send_fewer_bytes ----


@pytest.mark.long
def test_send_fewer_bytes(tmp_path):
    result = fork_ranks("recipes/send_fewer_bytes.py", cwd=tmp_path)
    found = {name: (float(sent), float(loss)) for name, sent, loss in numbers(
        r"(\S.*?) +(\S+) MB sent, loss (\S+)", result)}  # fmt: skip
    weights = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    thin = 4 * (2 * (512 + 256) * 4 + 512 + 256)  # two matrices of rank 4, and the biases
    power = 10 * weights + 50 * thin
    assert {name: sent for name, (sent, _) in found.items()} == pytest.approx({
        "exact": 60 * weights / 1e6, "bfloat16": 30 * weights / 1e6, "PowerSGD": power / 1e6,
        "local SGD": 8 * weights / 1e6, "PowerSGD, no error feedback": power / 1e6,
        "local SGD, rank 0's weights": 7 * weights / 1e6}, abs=0.005)  # fmt: skip
    [(half, few)] = numbers(r"in a step, bfloat16 sends 1/(\d+) .* start, 1/(\d+)", result)
    assert (int(half), int(few)) == (2, round(weights / thin))
    loss = {name: value for name, (_, value) in found.items()}
    assert loss["exact"] == pytest.approx(loss["bfloat16"], rel=0.01) and loss["exact"] < 0.1
    assert loss["PowerSGD"] < 0.12 and loss["PowerSGD, no error feedback"] > 0.12


RESUMED = """
import io, os, runpy, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

recipe = runpy.run_path(sys.argv[1])
dist.init_process_group("gloo")
teacher, saved = recipe["new_model"](7, "cpu"), io.BytesIO()

def train(model):
    seeds = range(dist.get_rank(), 60, dist.get_world_size())
    recipe["train"](model, [recipe["rows"](32, seed, teacher, "cpu") for seed in seeds])
    return torch.cat([p.detach().flatten() for p in model.parameters()])

model, state = DDP(recipe["new_model"](1, "cpu")), []
register = DDP.register_comm_hook
DDP.register_comm_hook = lambda model, *hook: (state.append(hook[0]), register(model, *hook))
recipe["power_sgd"](model)
train(model)
torch.save([model.module.state_dict(), state[0]], saved)
whole, equal = train(model), []
for passes in (2, 0):
    saved.seek(0)
    weights, loaded = torch.load(saved, weights_only=False)
    resumed = DDP(recipe["new_model"](1, "cpu"))
    resumed.module.load_state_dict(weights)
    for _ in range(passes):
        resumed(torch.ones(1, 256)).sum().backward()
    resumed.register_comm_hook(loaded, recipe["powerSGD_hook"])
    equal.append(torch.equal(whole, train(resumed)))
recipe["log"](f"equal: {equal}")
dist.barrier()
os._exit(0)
"""


@pytest.mark.long
def test_a_saved_power_sgd_goes_on_as_its_comment_says(tmp_path):
    """Equal only after the two passes."""
    (tmp_path / "job.py").write_text(RESUMED)
    result = fork_ranks(tmp_path / "job.py", ROOT / "recipes/send_fewer_bytes.py", cwd=tmp_path)
    assert numbers(r"equal: \[(\w+), (\w+)\]", result) == [("True", "False")], result.output


FEWER, ORDER = "the bytes are not as few as this file", "the losses do not order as this file"


@pytest.mark.parametrize(("message", "old", "new"), [
    (FEWER, "hook(None, default_hooks.bf16_compress_hook)\n\n\n",
     "hook(None, default_hooks.allreduce_hook)\n\n\n"),
    pytest.param(FEWER, "with model.no_sync():", "if True:", marks=pytest.mark.long),
    pytest.param(ORDER, "power_sgd(model, use_error_feedback=False)", "power_sgd(model)",
                 marks=pytest.mark.long),
    pytest.param(ORDER, "if then_average:", "if way == train_locally:", marks=pytest.mark.long),
])  # fmt: skip
def test_send_fewer_bytes_can_fail(tmp_path, message, old, new):
    assert_fails(tmp_path, "recipes/send_fewer_bytes.py", {old: new}, message)
