"""What the checks judge by and is no check itself: what an exercise's mistakes would give, and how a job is watched.

A module here has the name of the exercise that it is for, or of what several share. `autograder` is on the path of
whatever grades, so a check says `from judging.train_batch import Batch`.
"""
