"""What kill_test.py is made of.

options.py    the command line
records.py    the data that the other files share: kills, runs, what the undisturbed run has shown
drawing.py    who is killed, and when
playing.py    a run: start the command, look at it, end it; a round
processes.py  the processes of the command, and their roles: launcher, rank, worker
killing.py    the moment of a kill, and the kill
watching.py   who lives, who was started again, and whether what a victim had started works on
reading.py    what the command prints: steps, results, that it goes on
marks.py      how far the script has come, as a line or a progress bar says it
stale.py      ranks that read the addresses of the dead
reference.py  what the undisturbed run has shown, to which each round is held
judging.py    what a round proves, or why it has failed
comparing.py  two results: what was printed, and files
words.py      what is printed about all this

On several machines (--machines):

lab.py                 machines of launch/lab, and those that a dead test has left
departures.py          what happens to which machine, and when: drawn
happening.py           it happens, and the machine comes back
events.py              the data of such a run
on_machine.py          one machine: its folder and its command
staging.py             a run on all machines
distance.py            how far apart two results are, where the number of ranks has changed
disks.py               whether machines have the same snapshots
verdicts.py            what a round proves, or why it has failed
telling.py             what is printed
rounds_on_machines.py  the undisturbed run, the rounds, the status
"""
