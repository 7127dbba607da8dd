"""Jobs that Lockstep did not start: those that hang now, looked at from outside, and what dead ones have left.

Processes are only read: nothing is sent to them, and none is stopped. What is known of a rank is said with the words of
`lockstep.ranks`.
"""
