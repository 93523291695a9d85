"""Trainers' own files: what they ask for, and how a change to it is written into them.

One file per trainer turns its keys into a `Run`; the tables of `autofit.export` say how each writes an axis.
"""
