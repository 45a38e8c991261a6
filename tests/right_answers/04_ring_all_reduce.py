# ---- even ranks send first, odd ones receive first ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)

    def swap(number, before):
        received = torch.empty_like(chunks[before])
        if rank % 2 == 0 and rank != world_size - 1 or world_size == 1:
            dist.send(chunks[number], right)
            dist.recv(received, left)
        else:
            dist.recv(received, left)
            dist.send(chunks[number], right)
        return received

    for step in range(world_size - 1):
        chunks[(rank - step - 1) % world_size].add_(
            swap((rank - step) % world_size, (rank - step - 1) % world_size))
    for step in range(world_size - 1):
        chunks[(rank - step) % world_size].copy_(
            swap((rank - step + 1) % world_size, (rank - step) % world_size))


# ---- every N-th element is a chunk, sent as a copy ----
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(2 * (n - 1)):
        target = tensor[(rank - step - 1) % n :: n]
        incoming = torch.empty(target.shape, dtype=tensor.dtype)
        work = dist.isend(tensor[(rank - step) % n :: n].clone(), (rank + 1) % n)
        dist.irecv(incoming, (rank - 1) % n).wait()
        work.wait()
        if step < n - 1:
            target += incoming
        else:
            target[:] = incoming


# ---- padded, a matrix of chunks, and another order ----
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunk = -(-len(tensor) // n)
    padded = torch.zeros(n, chunk, dtype=tensor.dtype)
    padded.view(-1)[: len(tensor)] = tensor
    for step in range(1, 2 * n - 1):
        buffer = torch.zeros(chunk, dtype=tensor.dtype)
        receiving = dist.irecv(buffer, src=(rank - 1) % n)
        sending = dist.isend(padded[(rank - step + 2) % n].contiguous(), dst=(rank + 1) % n)
        receiving.wait(), sending.wait()
        old = padded[(rank - step + 1) % n]
        padded[(rank - step + 1) % n] = old + buffer if step < n else buffer
    tensor.copy_(padded.view(-1)[: len(tensor)])


# ---- a thread sends ----
import threading


def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, target = (chunks[(rank - step - k) % n] for k in (0, 1))
        thread = threading.Thread(target=dist.send, args=(outgoing.clone(), (rank + 1) % n))
        thread.start()
        incoming = torch.empty_like(target)
        dist.recv(incoming, (rank - 1) % n)
        thread.join()
        target.copy_(target + incoming if step < n - 1 else incoming)


# ---- two messages a step ----
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        target, out = chunks[(rank - step - 1) % n], chunks[(rank - step) % n]
        incoming = torch.empty_like(target)
        works = [dist.isend(half, (rank + 1) % n, tag=k)
                 for k, half in enumerate(out.tensor_split(2))]
        for k, half in enumerate(incoming.tensor_split(2)):
            dist.recv(half, (rank - 1) % n, tag=k)
        for work in works:
            work.wait()
        if step < n - 1:
            target += incoming
        else:
            target[:] = incoming


# ---- recursion ----
def ring_all_reduce(tensor, step=0):
    rank, n = dist.get_rank(), dist.get_world_size()
    if step == 2 * n - 2:
        return
    chunks = torch.tensor_split(tensor, n)
    a, b = chunks[(rank + n + n - step) % n], chunks[(rank - step + n + n - 1) % n]
    buffer = b.new_zeros(b.shape)
    ops = [dist.P2POp(dist.irecv, buffer, (rank + n - 1) % n),
           dist.P2POp(dist.isend, a, (rank + 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    b.copy_(buffer + b * (step < n - 1))
    ring_all_reduce(tensor, step + 1)


# ---- a buffer that is carried ----
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(torch.tensor_split(tensor, n))
    number, carried = rank, chunks[rank].clone()
    for step in range(2 * n - 2):
        number = (number - 1) % n
        arriving = torch.empty_like(chunks[number])
        receiving = dist.irecv(arriving, src=(rank - 1) % n)
        sending = dist.isend(carried, dst=(rank + 1) % n)
        sending.wait()
        receiving.wait()
        carried = arriving + chunks[number] if step < n - 1 else arriving
        if step >= n - 2:  # finished
            chunks[number].copy_(carried)
