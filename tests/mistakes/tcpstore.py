"""Wrong answers of a store, for test_05_tcpstore.py: what each lesson's check says of them."""

# In the place of main: lessons meet a store that gives wrong answers. What do their checks say?
WRONG = """
class Wrong:
    def __init__(self, store, answers):
        self.store, self.answers, self.underlying_store = store, answers, store.underlying_store

    def __getattr__(self, name):
        if self.answers.get(name):
            return lambda *args, **options: self.answers[name].pop(0)
        return getattr(self.store, name)


def main(real=dist.PrefixStore):
    store = serve()
    assert connect(store.port).timeout == store.timeout == TIMEOUT
    store.set_timeout(timedelta(seconds=0.3))
    assert outcome(say_goodbye, store, Member(0, 2)) == "DistStoreError", "does not wait"
    time.sleep, dist.all_reduce = (lambda seconds: None), torch.Tensor.zero_
    for n, (lesson, rank, answers) in enumerate(CASES):
        store, why = serve(), "passed"
        wrong = Wrong(real(lesson, store), answers) if answers else real(lesson, store)
        if lesson == "prefix_store":
            dist.PrefixStore = lambda prefix, store: store
            store.set("prefix_store/job a/epoch", "7")
        if lesson == "find_each_other":
            dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
        if lesson == "server_ends_first":
            globals()["connect"] = lambda port: wrong
        try:
            globals()[lesson](wrong, Member(rank, 1))
        except RuntimeError as error:
            why = str(error)
        print(f"{n}: {why}", flush=True)
    print(os.environ["GLOO_SOCKET_IFNAME"], "is Gloo's interface")

"""

# Lesson, rank, wrong answers of some calls: what the lesson's check says
CASES = {
    '"set_get", 1, {"check": [True]}': "True, expected False",
    '"set_get", 1, {"get": [b"7"]}': "b'7', expected b'hello'",
    '"wait_timeout", 0, {"wait": [None]}': "None, expected 'DistStoreError'",
    '"wait_timeout", 0, {"wait": ["DistStoreError"]}': "False, expected True",
    '"add", 0, {"get": [b"0", b"7"]}': "(300, 7), expected (300, 1)",
    '"add", 0, {"add": [*[0] * 300, 299]}': "(299, 1), expected (300, 1)",
    '"append_and_multi", 0, {"get": [b"0 0 "]}': "[0, 0], expected [0]",
    '"append_and_multi", 0, {"multi_get": [[b"1"]]}': "(1, b'1'), expected (1, ",
    '"elect_leader", 0, {"multi_get": [[b"0", b"1"]]}': "{b'",
    '"barrier_100_times", 0, {"add": [1, 1, 2]}': "(1, False), expected (0, False)",
    '"barrier_100_times", 0, {"check": [True]}': "(0, True), expected (0, False)",
    '"work_queue", 0, {"add": [0, 0]}': "[False, False], expected [True, False]",
    '"work_queue", 0, {"add": [0, 1, 1, 2]}': "[True, True], expected [True, False]",
    '"work_queue", 0, {"add": [0, 1, 1, 1], "queue_pop": [b"1"]}': "[1, 1, 2, 3, 4, 5, 6, 7, 8, ",
    '"process_groups", 0, {}': "0, expected 1",
    '"prefix_store", 0, {"get": [b"40", b"40"]}': "(b'40', b'40', b'7'), expected (b'7', b'4",
    '"server_ends_first", 1, {"get": [b"1", b"2", b"3"]}': "[b'2', b'3'], expected ['DistNetwork",
    '"find_each_other", 0, {}': "0, expected 1",
}
