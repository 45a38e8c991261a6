"""pitfalls/ that hang or fail: each shows its symptom, and with --fixed the cure."""

from support import fork_ranks


def show(name, cwd, *arguments, status=0, **options):
    """Run a pitfall on two ranks; return what it printed."""
    result = fork_ranks(f"pitfalls/{name}.py", *arguments, cwd=cwd, **options)
    assert result.status == status, result.output
    return result


def test_a_collective_on_one_rank(tmp_path):
    broken = show("collective_on_one_rank", tmp_path)
    assert "step 1: losses add up to 101, gradients to 200" in broken.lines(0)
    assert "step 1: losses add up to 1, gradients to 101" in broken.lines(1)
    timeout = "symptom: all_reduce failed: Timed out waiting 3000ms for recv operation to complete"
    assert broken.lines(0)[-1] == timeout
    fixed = show("collective_on_one_rank", tmp_path, "--fixed")
    right = [f"step {step}: losses add up to 2, gradients to 200" for step in (1, 2)]
    assert fixed.lines(0) == fixed.lines(1) == right
