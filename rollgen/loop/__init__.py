"""Running: plan - done -> engine -> writer, until everything is stored, and what happens when something dies.

run.py       one attempt from its preflight to its end, engine restarts included
owed.py      which samples are still to be made, in which order
retry.py     samples that were cut, made again
sampling.py  the workers that share them; failure bound and stall watchdog
stop.py      signals
report.py    running totals, and the Reporter that is told them
log.py       the log file of an attempt
"""
