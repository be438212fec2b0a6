"""Datasets to better ones with the same content.

compact(directory)      many small shards to few, the samples of a prompt together
"""
