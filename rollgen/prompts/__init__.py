"""From prompt files to a plan: everything that can be known, checked and refused before a model loads.

    model.py        what must be known about the model: sizes, tokenizer, chat template
    fingerprint.py  which model and which tokenizer it is, independent of path and mtime
    sources.py      what is named on the command line -> files -> lines
    streams.py      a text file, compressed or not -> lines
    tables.py       a Parquet file -> lines
    readers.py      lines -> JSON objects, bytes kept as they are
    rows.py         JSON object -> `Row` or `BadRow`
    parameters.py   sampling parameters of a row
    messages.py     chat turns, tools and template variables of a row
    ids.py          unique prompt ids in flat memory
    templates.py    what a chat template makes use of
    tokens.py       rows -> token ids: chat template, tokenizer
    plan.py         `plan.parquet`: write it, read it, check that a new one extends it
    planner.py      all of the above in order: `write_plan`
    single.py       one prompt that comes by itself

Only this package (and what shows or checks a dataset) may load transformers; nothing here loads vLLM or weights.
"""
