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
"""
