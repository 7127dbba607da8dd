"""Grades in the formats of other programs. Each writer is a pure function of a report or of a graded class.

What a submission printed, raised or was called is in them as text; each writer makes it harmless for the program that
opens its output.
"""
