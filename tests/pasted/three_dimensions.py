class Stage(Model):
    def forward(self, x):
        x = self.first(x) if self.first else x
        for block in self.blocks.values():
            x = block(x)
        return x
def keep_stage(model, number, count):
    model.blocks = nn.ModuleDict({str(number): model.blocks[number]})
    model.first = None if number else model.first
    return model
def plan_of(model):
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return plan | ({"first": ColwiseParallel(output_layouts=Replicate())} if model.first else {})
model, inputs, targets, loss_fn, max_norm = Stage(), all_inputs, all_targets, mse_loss, 0.05
# PASTE1
# PASTE2
nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
expected = dict(plain.named_parameters())
check(gradient(model), flat(expected[name].grad for name, _ in model.named_parameters()))
held = sum(gathered(sum(p.to_local().nbytes for p in model.parameters())))
assert held < 1.05 * weights(plain).nbytes, f"{held} bytes on all ranks"
