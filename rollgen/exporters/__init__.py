"""Datasets as the files that trainers load: a module a trainer, each of which names the version whose code it follows.

records     what is written: whole groups of a dataset with their rewards and advantages, as numpy arrays
table       the same as Arrow, for trainers that read tables
exporter    what a trainer's module has to say: where each column goes, and how files are written
export      puts these together: `rollgen.export`, the command `rollgen export`
"""
