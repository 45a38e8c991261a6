"""What a process notes while it trains: the contract between the recorder and the rules.

The recorder writes these records inside the script's processes, a file for each process. The rules
compare the records of all ranks afterwards. To note something new, add a field, or a class, here,
and say what it is. (lines.py makes lines of JSON of them.)

Words that all records share:

    time        seconds of time.monotonic(), one clock for all processes of a machine; when the
                record was written, unless it says something else
    line        the line of the script that asked for it, as "train.py:42"
    number      how many such things came before: 0 is the first
    bits        a CRC-32 of a tensor's bytes (of every n-th value, if it is large): equal tensors
                have equal bits
    phase       how many exchanges with other ranks this process has ended: what two ranks do in
                phases that overlap, nothing keeps apart
    steps       how many steps of an optimizer the process had taken
    a key       a text or a number that is the same on all ranks for the same thing of the script

The classes stand in a file for each subject, as what notes them and the rules do.
"""
