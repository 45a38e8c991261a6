folder = f"records of {world_size}"


def train():
    for number in range(4):
        if rank == last and number == 3:
            raise KeyError("your loader")
        dist.all_reduce(torch.ones(4, device=device))


try:
    # PASTE1
    pass
except (KeyError, RuntimeError):
    dist.destroy_process_group()  # so that the others need not wait for the timeout
if rank == 0:
    with redirect_stdout(io.StringIO()) as output:
        # PASTE2
        pass
    said = output.getvalue()
    assert "call 4 is the first that differs" in said and f"rank {last} made 3 calls" in said, said
    assert "rank 0 called all_reduce Float[4] in train (" in said, said
