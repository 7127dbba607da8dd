"""The command line: one module for each kind of user, and what they call."""
