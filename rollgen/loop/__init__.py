"""Running: plan - done -> engine -> writer, until everything is stored, and what happens when something dies.

run.py       one attempt from its preflight to its end
place.py     where it writes: a directory, or a workspace of object storage
parts.py     which part of the prompts it makes
owed.py      which samples are still to be made, in which order
retry.py     samples that were cut, made again
crew.py      who makes them, and what these are given
engines.py   the crew of engines in this process or of servers, restarts included
work.py      the requests, as the workers of all engines share them
sampling.py  the workers of one engine; failure bound and stall watchdog
stop.py      signals
report.py    running totals, and the Reporter that is told them
log.py       the log file of an attempt
"""
