store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
dist.barrier()  # one that left early would break the connections of those that still start
dist.destroy_process_group()
meet.__globals__["WINDOW"] = 2 if last == 1 else 6  # two survivors must not miss each other
RANKS, me, job = world_size, rank, Job()
job.net, of_all = Model(), take_newest_state
job.optimizer, expected = (
    torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (job.net, plain)
)


def die():
    print("done on rank", rank, flush=True)
    os._exit(0)


def take_newest_state(job):
    if meeting == 1 and me:
        die()  # a second one, while the others meet
    of_all(job)


def train(model, me, members, job):
    while job.step < 5:
        own = slice(members.index(me), None, len(members))
        job.optimizer.zero_grad()
        mse_loss(model(all_inputs[own]), all_targets[own]).backward()
        if job.step == 2 and me == last:
            die()
        # As if rank 0 had got the gradients of all before the death, and the others had not.
        if job.step == 2 and me:
            raise RuntimeError("rank 0 alone has the gradients")
        job.optimizer.step()
        job.step += 1


# PASTE
for _ in range(5):
    take_step(plain, expected, all_inputs, all_targets)
assert members == [0] and dist.get_world_size() == 1, members
check(weights(job.net), weights(plain))
