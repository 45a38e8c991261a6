# ---- nothing exchanged: the tensor is still the rank's own ----
def ring_all_reduce(tensor):
    pass


# ---- a collective: allreduce, a collective, was called ----
def ring_all_reduce(tensor):
    dist.all_reduce(tensor)


# ---- blocking sends: there is no end(?s:.*)dist.send ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        dist.send(outgoing, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- everything to everyone: 3 ranks: .*it sent to rank \d, and its neighbour is rank \d ----
def ring_all_reduce(tensor):
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    incoming = [torch.empty_like(tensor) for _ in others]
    work = [dist.isend(tensor, other) for other in others]
    work += [dist.irecv(one, other) for one, other in zip(incoming, others, strict=True)]
    for one in work:
        one.wait()
    tensor += sum(incoming)


# ---- all by way of rank 0: 3 ranks: .*it sent to rank \d, and its neighbour is rank \d ----
def ring_all_reduce(tensor):
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    incoming = torch.empty_like(tensor)
    for other in range(1, dist.get_world_size()):
        dist.recv(incoming, other)
        tensor += incoming
    for other in range(1, dist.get_world_size()):
        dist.send(tensor, other)


# ---- the whole tensor goes round: 3 ranks: .*16016 bytes were sent, and .* have 10688 ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing = tensor.clone()
    for _ in range(world_size - 1):
        incoming = torch.empty_like(tensor)
        work = dist.isend(outgoing, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        tensor += incoming
        outgoing = incoming


# ---- the second half is missing: 50[01] hold the sum. Element (0 counts rank 0 1 times, rank 1 0|501 counts rank 0 0 times, rank 1 1) ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for step in range(world_size - 1):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        work = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        target += incoming


# ---- added in the second half, too: Element (0 counts rank 0 2 times, rank 1 1|501 counts rank 0 1 times, rank 1 2) times ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        work = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        target += incoming


# ---- a wrong chunk: [01] hold the sum. Element 0 (holds what belongs elsewhere|counts rank 0 1 times, rank 1 5) ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = len(tensor) // world_size
    chunks = tensor[: size * world_size].split(size) if size else [tensor] * world_size
    for step in range(2 * (world_size - 1)):
        incoming = torch.empty_like(chunks[0])
        work = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        target = chunks[(rank - step) % world_size]
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- the rest left out: with 1001 elements, 1000 hold the sum. Element 1000 ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.split(len(tensor) // world_size)
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        work = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- torch.chunk makes fewer chunks: IndexError ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(world_size)
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        work = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- a new tensor: the tensor is still the rank's own ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing = tensor
    for _ in range(world_size - 1):
        incoming = torch.empty_like(tensor)
        work = dist.isend(outgoing, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        tensor = tensor + incoming
        outgoing = incoming
    return tensor


# ---- hard-coded for two ranks: 3 ranks: .*0 hold the sum. Element 0 counts .* 0 times ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(tensor)
    work = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    work.wait()
    tensor += incoming


# ---- buffers of float32: of torch.int64, the sum is off by ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    copy = tensor.to(torch.float32, copy=True)
    chunks = list(copy.tensor_split(world_size))
    for step in range(2 * (world_size - 1)):
        out, into = (rank - step) % world_size, (rank - step - 1) % world_size
        received = torch.empty_like(chunks[into])
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, chunks[out], (rank + 1) % world_size),
                dist.P2POp(dist.irecv, received, (rank - 1) % world_size)]):
            work.wait()
        if step < world_size - 1:
            chunks[into] += received
        else:
            chunks[into].copy_(received)
    tensor.copy_(copy)


# ---- irecv without wait, into zeros: wait.. was called for \d of \d messages ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks, receiving = tensor.tensor_split(world_size), []
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.zeros_like(target)
        receiving.append(dist.irecv(incoming, (rank - 1) % world_size))
        dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size).wait()
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- isend without wait: wait.. was called for \d of \d messages ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks, sending = tensor.tensor_split(world_size), []
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        outgoing = chunks[(rank - step) % world_size].clone()
        sending.append((outgoing, dist.isend(outgoing, (rank + 1) % world_size)))
        dist.recv(incoming, (rank - 1) % world_size)
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- buffers of int64: torch.float64, the sum is off by ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.zeros(len(target), dtype=torch.int64)
        work = dist.isend(chunks[(rank - step) % world_size].long(), (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- one after the other, all by way of one link: 3 ranks: .*16016 bytes were sent, and ----
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    buffer = torch.empty_like(tensor)
    if rank > 0:
        dist.recv(buffer, rank - 1)
        tensor += buffer
    dist.send(tensor, (rank + 1) % n)
    if rank == 0:
        dist.recv(tensor, n - 1)
        if n > 2:
            dist.send(tensor, 1)
    elif rank < n - 1:
        dist.recv(tensor, rank - 1)
        if rank < n - 2:
            dist.send(tensor, rank + 1)


# ---- with a barrier: barrier, a collective, was called ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        work = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        dist.barrier()
        target.copy_(incoming + target if step < world_size - 1 else incoming)


# ---- added before the wait: Element \d+ (?s:.*)hint: (is a tensor used before|first the chunks) ----
def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.zeros_like(target)
        receiving = dist.irecv(incoming, (rank - 1) % world_size)
        target.copy_(incoming + target if step < world_size - 1 else incoming)
        dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size).wait()
        receiving.wait()


# ---- other memory: tensor\.data was replaced ----
import torch, torch.distributed as dist
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = [c.clone() for c in tensor.tensor_split(n)]
    for step in range(2 * (n - 1)):
        out, into = (rank - step) % n, (rank - step - 1) % n
        buffer = torch.empty_like(chunks[into])
        work = dist.isend(chunks[out], (rank + 1) % n)
        dist.recv(buffer, (rank - 1) % n)
        work.wait()
        chunks[into] = chunks[into] + buffer if step < n - 1 else buffer
    tensor.data = torch.cat(chunks)


# ---- added in float64: 3 ranks: .*the sum is off by|Element ----
import torch, torch.distributed as dist
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        buffer = torch.empty_like(into)
        work = dist.isend(out, (rank + 1) % n)
        dist.recv(buffer, (rank - 1) % n)
        work.wait()
        if step < n - 1:
            into.copy_(into.double() + buffer.double())  # for the precision
        else:
            into.copy_(buffer)


# ---- small tensors go round whole: 4 ranks: .*with 3 elements, 36 bytes were sent, and 2 \(N - 1\) chunks have 24 ----
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n

    def swap(outgoing, length):
        incoming = tensor.new_empty(length)
        works = [dist.isend(outgoing, right), dist.irecv(incoming, left)]
        for work in works:
            work.wait()
        return incoming

    if len(tensor) < n:  # too small to be cut
        passing = tensor.clone()
        for _ in range(n - 1):
            passing = swap(passing, len(passing))
            tensor += passing
        return
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        target = chunks[(rank - step - 1) % n]
        incoming = swap(chunks[(rank - step) % n], len(target))
        target.copy_(target + incoming if step < n - 1 else incoming)


# ---- a buffer as long as what is sent: process has ended|exception ----
def ring_all_reduce(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(outgoing)
        work = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        work.wait()
        if step < n - 1:
            target += incoming[: len(target)]
        else:
            target.copy_(incoming[: len(target)])
