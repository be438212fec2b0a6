"""From prompt files to a plan: everything that can be known, checked and refused before a model loads.

    model.py        what must be known about the model: sizes, tokenizer, chat template
    fingerprint.py  which model and which tokenizer it is, independent of path and mtime
    readers.py      files -> lines -> JSON objects, bytes kept as they are
    rows.py         JSON object -> `Row` or `BadRow`
    ids.py          unique prompt ids in flat memory
    tokens.py       rows -> token ids: chat template, tokenizer
    plan.py         `plan.parquet`: write it, read it, check that a new one extends it
    planner.py      all of the above in order: `write_plan`

Only this package (and what shows or checks a dataset) may load transformers; nothing here loads vLLM or weights.
"""
