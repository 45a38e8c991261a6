class Stage(Model):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight  # tied
        self.first.bias.requires_grad_(False)  # frozen
        self.blocks[1].down.requires_grad_(False)

    def forward(self, x):
        x = self.first(x) if self.first else x
        for block in self.blocks.children():
            x = block(x)
        return self.head(x) if self.head else x


def keep_stage(model, number, count):
    model.blocks = nn.ModuleDict({str(number): model.blocks[number]})
    model.first = None if number else model.first
    model.head = model.head if number else None
    return model


def plan_of(model):
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return plan | {"first" if model.first else "head": ColwiseParallel(output_layouts=Replicate())}


def tied_weight(model):
    return (model.first or model.head).weight


plain, model, inputs, targets, loss_fn = Stage(), Stage(), all_inputs, all_targets, mse_loss
mse_loss(plain(inputs), targets).backward()
expected = dict(plain.named_parameters(remove_duplicate=False))
total, max_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05), 0.05
# PASTE1
# PASTE2
check(norm, total)
trained = [(p.grad, expected[name].grad) for name, p in model.named_parameters() if p.requires_grad]
found, right = zip(*trained)
check(flat(found), flat(right))
held = sum(gathered(sum(p.to_local().nbytes for p in model.parameters())))
assert held < 1.2 * weights(plain).nbytes, f"{held} bytes on all ranks"
