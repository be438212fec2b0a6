"""Proof that a dataset is what it was when it was made, and what is done where it is not.

findings.py       what is wrong, where: bounded, however much is wrong
records.py        manifest, journal, plan, retry lists and failures against the specification
files.py          every byte and page of the shards against the journal
rows.py           every token of every row against the invariants
planned.py        rows against the plan: nothing twice, nothing that was not asked for, seeds as the hash says
dataset.py        all of these over a directory: `verify_dataset`
recompute.py      a Hugging Face model over stored samples: does the dataset replay?
truncation.py     whether supports are what top-k, top-p and min-p leave of a model's logits
tallies.py        sums over the tokens of both
recomputation.py  the figures of that, and what follows from them
judge.py          which shards are sound, which damaged, and which accuse the manifest instead
lines.py          journals line by line, damaged ones too
repair.py         what is damaged is set aside, and the journal made again from the shards that are not
terminal.py       the outcome as text
"""
