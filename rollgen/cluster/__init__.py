"""Many engines on a Ray cluster, one dataset: `rollgen generate --ray`.

address.py   where the cluster is, and whether one answers there
probe.py     the program that asks
connect.py   joining a cluster or starting a local one
room.py      what it has room for
waiting.py   waits that can be given up, and one that cannot
tasks.py     what is owed, cut into tasks; Ray Data hands these to replicas, and again when a replica dies
slot.py      where the shards of one task go, safe against those who were believed dead: into a shared directory
parcels.py   the same where the dataset is in object storage: to the driver, who commits them
workplace.py what a replica reads of the run, and which of the two it has
scratch.py   the directory of a replica's own, of which nothing stays
delivery.py  the driver's side of both
receipts.py  what a shard settles, read from the shard itself
board.py     the one place where replicas tell the driver what happened, and are told to stop
replica.py   the Ray Data actor: one engine, several tasks at once
actors.py    what Ray knows of a replica, and does to one that is silent
books.py     what the driver makes of the news: journal, failures, totals, deaths
crew.py      the whole as a `loop.crew.Crew`: rounds until nothing is owed

The files are the truth. A replica commits the shards of its tasks itself, into the dataset directory, which all nodes
share; what Ray carries besides the tasks is news of them. So a result that Ray loses, doubles or brings late costs
nothing: after each round the driver looks at the directory, and what is not there goes round again.

A dataset in object storage is the driver's alone: the nodes have neither its files nor its credentials. Ray carries the
plan to the replicas and their shards back, and a replica goes on when the driver has committed what it sent.

This package alone imports Ray, and is imported only when Ray is asked for.
"""

import os

# Read by Ray when it is imported, and when it starts: after a lost connection it must not start a cluster of its own,
# and it writes to our standard error what it takes for an error.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
