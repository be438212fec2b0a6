"""Looking at datasets and runs, changing nothing.

stats       figures of a whole dataset; terminal shows them, card writes them down
sample      one completion, token by token; sample_view shows it
status      how far a run is; status_view shows it
estimate    what a run will take, before it starts
"""
