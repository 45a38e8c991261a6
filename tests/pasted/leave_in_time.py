dataset, saved = [*range(200)], []


def save(step):
    if rank == 0:
        time.sleep(1)
        open("saved by rank 0", "w").close()
    saved.append(step)


# PASTE1
def train():
    model = DDP(Model())  # it holds the process group
    models.append(weakref.ref(model))
    model.cycle = [model]  # in a reference cycle, as DDP is by itself at times
    for step, batch in enumerate(loader, 1):
        model(inputs).sum().backward()
        if step == 30 and rank == last:
            workers = " ".join(str(worker.pid) for worker in multiprocessing.active_children())
            os.system(f"kill {os.getpid()} {workers}; sleep 0.5")  # as torchrun does
        # PASTE2
        if step == 40:
            return 0


def destroy(destroy=dist.destroy_process_group):
    assert models[0]() is None, "DDP lives on"
    destroy()


models, dist.destroy_process_group = [], destroy
gc.disable()  # so that it is not freed by chance
status = train()
try:
    assert status == 143, "not asked to leave"
    # PASTE3
except SystemExit as end:
    assert os.path.exists("saved by rank 0"), "left before rank 0 had saved"
    # Another thread may take the signal: then the handler runs in the next step.
    assert saved in ([30], [31]) and end.code == 143, f"saved after {saved}, exit status {end.code}"
