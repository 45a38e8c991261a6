store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
me, meeting, members, step, net = rank, 1, list(range(world_size)), 0, Model()
optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, plain))
model = DDP(net)
while step < 5:
    own, fault = slice(members.index(me), None, len(members)), None
    optimizer.zero_grad()
    try:
        mse_loss(model(all_inputs[own]), all_targets[own]).backward()
    except RuntimeError:
        fault = traceback.format_exc()
    if step == 2 and me == last:
        print("done on rank", rank, flush=True)
        os._exit(0)
    # As if rank 0 had got the gradients of all before the death, and the others had not.
    if fault or meeting == 1 and step == 2 and me:
        # PASTE
        meeting += 1
        continue
    optimizer.step()
    step += 1
for _ in range(5):
    take_step(plain, expected, all_inputs, all_targets)
assert sorted(members) == list(range(last)) and dist.get_world_size() == last, members
check(weights(net), weights(plain))
