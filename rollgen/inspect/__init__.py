"""Looking at datasets and runs, changing nothing.

stats       figures of a whole dataset; terminal shows them, card writes them down
curves      figures that are drawn: along responses, over lengths and, by throughput, over time
report      both, and samples, as one page for a browser
sample      one completion, token by token; sample_view shows it
status      how far a run is; status_view shows it
chat        prompts that were chats
provenance  what a manifest says of how its dataset was made, as these show it
estimate    what a run will take, before it starts
"""
