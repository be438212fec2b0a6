"""Datasets in object storage (S3, GCS and whatever fsspec reaches): the only place that knows fsspec.

A run writes into a local workspace, of which every commit goes up (`workspace.py`) under a lease (`lease.py`).
"""
