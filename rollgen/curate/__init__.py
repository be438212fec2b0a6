"""Datasets to better ones with the same content.

compact(directory)          many small shards to few, the samples of a prompt together
merge(directories, out)     datasets of several models or runs to one
score(directory, scorer)    a reward for each sample, beside the shards
"""
