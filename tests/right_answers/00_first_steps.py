# ---- a list, another operation, an early return ----
def who_am_i():
    return [dist.get_rank(), dist.get_world_size()]


def sum_over_all(number):
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return sum(numbers)


def report(number):
    total = sum_over_all(number)
    if dist.get_rank() != 0:
        return
    print("sum:", total, flush=True)


# ---- a vector, and both branches make the call ----
def who_am_i():
    group = dist.group.WORLD
    return group.rank(), group.size()


def sum_over_all(number):
    tensor = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    tensor[dist.get_rank()] = number
    dist.all_reduce(tensor)
    return float(tensor.sum())


def report(number):
    if dist.get_rank() == 0:
        print(f"the sum of all ranks' numbers is {sum_over_all(number):.1f}")
    else:
        sum_over_all(number)
