"""What the checks start under torchrun, in processes of its own. __main__.py has the command.

A function of features.py, context_parallel.py, sharing.py or messages.py is one check's: it returns
figures, {what was measured: a number, a text, or a list or dict of these}. Without a GPU, each runs
on the CPU as far as it can.
"""
