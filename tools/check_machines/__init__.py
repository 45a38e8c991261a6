"""What check_machines.py is made of.

place.py     which process this is, and how it reaches the others; what a machine's name means
meeting.py   the store, through which all processes find each other
machines.py  what the processes tell each other, and the faults that this shows
group.py     the process group: do sums arrive unchanged, and how fast?
words.py     what is printed, and the causes of errors
"""
